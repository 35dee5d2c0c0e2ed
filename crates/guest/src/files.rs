//! Contents of the files of `/etc` that a guest has its own version of.

use std::fmt::Write as _;
use std::net::Ipv4Addr;

use ringfence_hostnet::name_files::{HostsEntry, ServerOptions};

use crate::config::GuestConfig;
use crate::names::name::DOMAIN;
use ringfence_hostnet::interface::ResolverConfig;

/// Address of a guest's DNS stub. `systemd-resolved` uses the same one, which is free in a new
/// network namespace.
pub(crate) const STUB_ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 53);

/// Time limit of the client for one answer, in seconds. The stub may hold back an answer for some seconds, until a name
/// exists, so the client must not time out or repeat the query earlier.
const CLIENT_TIMEOUT: u64 = 10;

/// Modules of `nsswitch.conf(5)` that query a daemon of the host, which knows no guests. The guest reaches none of them.
const DAEMONS: [&str; 6] =
    ["mdns", "mdns_minimal", "mdns4", "mdns4_minimal", "mdns6_minimal", "mymachines"];

/// Returns a `resolv.conf(5)` with the stub as name server. The stub itself observes the host's options about servers.
fn resolv_conf(resolver: Option<&ResolverConfig>) -> String {
    let (servers, options) =
        resolver.map(|resolver| ServerOptions::split(&resolver.options)).unwrap_or_default();
    let timeout = servers.timeout.map_or(0, |timeout| timeout.as_secs()).max(CLIENT_TIMEOUT);
    let mut text = format!("nameserver {STUB_ADDRESS}\noptions timeout:{timeout} attempts:2\n");
    if let Some(resolver) = resolver {
        write_search_and_options(&mut text, &resolver.search, &options);
    }
    text
}

/// Returns the `resolv.conf(5)` of a guest.
pub(crate) fn resolv_conf_for(config: &GuestConfig) -> String {
    match (&config.names, &config.resolver) {
        (None, Some(resolver)) => resolv_conf_of_host(resolver),
        (_, others) => resolv_conf(others.as_ref()),
    }
}

/// Returns the `resolv.conf(5)` of a guest that is on no switch.
fn resolv_conf_of_host(resolver: &ResolverConfig) -> String {
    let servers = resolver.name_servers.iter();
    let mut text = servers.fold(String::new(), |text, ip| text + &format!("nameserver {ip}\n"));
    write_search_and_options(&mut text, &resolver.search, &resolver.options);
    text
}

fn write_search_and_options(text: &mut String, search: &[String], options: &[String]) {
    for (keyword, words) in [("search", search), ("options", options)] {
        if !words.is_empty() {
            // Writing to a String cannot fail, here and below.
            let _ = writeln!(text, "{keyword} {}", words.join(" "));
        }
    }
}

/// Returns `hosts(5)` of the guest: its own name, then the host's entries. `guests` are names of guests on the switch,
/// in lower case: these names are left out of the host's entries, so that the stub answers for them.
pub(crate) fn hosts(config: &GuestConfig, host: &[HostsEntry], guests: &[String]) -> String {
    let mut text = String::from("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n");
    let host_name = &config.host_name;
    let addresses: Vec<_> =
        config.interface.iter().flat_map(|interface| &interface.addresses).collect();
    if addresses.is_empty() {
        let _ = writeln!(text, "127.0.1.1 {host_name}");
    }
    for address in addresses {
        let _ = writeln!(text, "{} {host_name}", address.ip());
    }
    let switch = config.names.as_ref().map_or("", |names| names.switch.as_str());
    let is_guest = |name: &str| guests.iter().any(|guest| guest == name);
    let is_taken = |name: &&String| {
        let name = name.to_ascii_lowercase();
        let of_switch = name.split_once('.').is_some_and(|(guest, domain)| {
            (domain == DOMAIN || domain.eq_ignore_ascii_case(switch)) && is_guest(guest)
        });
        let is_own = name.eq_ignore_ascii_case(host_name);
        is_own || name == "localhost" || of_switch || is_guest(&name)
    };
    for HostsEntry { address, names } in host {
        let left: Vec<&str> =
            names.iter().filter(|name| !is_taken(name)).map(String::as_str).collect();
        if !left.is_empty() {
            let _ = writeln!(text, "{address} {}", left.join(" "));
        }
    }
    text
}

/// Returns an `nsswitch.conf(5)` in which host names are looked up in the host's order, without modules that query
/// daemons of the host. `dns` and `files` replace systemd's `resolve`, which answers for both.
pub(crate) fn nsswitch(host: &str, with_dns: bool) -> String {
    let mut text = String::new();
    let mut sources = None;
    for line in host.lines() {
        match line.trim_start().strip_prefix("hosts:") {
            Some(rest) => sources = Some(rest.split('#').next().unwrap_or_default()),
            None => {
                let _ = writeln!(text, "{line}");
            }
        }
    }
    // The default without a line is that of the C library.
    let mut modules = kept_modules(sources.unwrap_or("files dns"));
    if with_dns && !modules.iter().any(|module| module == "dns") {
        modules.push("dns".into());
    }
    let _ = writeln!(text, "hosts: {}", modules.join(" "));
    text
}

/// Returns the modules of a line, each at its first place, with the actions (`[NOTFOUND=return]`) that follow it.
fn kept_modules(line: &str) -> Vec<String> {
    let mut kept: Vec<String> = Vec::new();
    let mut keeps_actions = false;
    let mut in_action = false;
    for word in line.split_ascii_whitespace() {
        let is_action = in_action || word.starts_with('[');
        in_action = is_action && !word.ends_with(']');
        let replaced: &[&str] = match word {
            _ if is_action => {
                if keeps_actions {
                    kept.push(word.to_owned());
                }
                continue;
            }
            "resolve" => &["files", "dns"],
            _ if DAEMONS.contains(&word) => &[],
            _ => &[word],
        };
        let new: Vec<_> =
            replaced.iter().filter(|new| !kept.iter().any(|module| module == *new)).collect();
        // The actions of a module that was replaced are about its daemon.
        keeps_actions = !new.is_empty() && replaced == [word];
        kept.extend(new.into_iter().map(|new| (*new).to_owned()));
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NamesConfig;
    use ringfence_hostnet::interface::InterfaceConfig;

    fn config() -> GuestConfig {
        GuestConfig {
            host_name: "web".into(),
            interface: None,
            uplink: None,
            names: None,
            resolver: None,
            blocked_signals: vec![],
            ignored_signals: vec![],
            terminal: crate::TerminalKind::None,
            open_files: None,
            environment: vec![],
            removed_variables: vec![],
            cgroups: crate::config::CgroupConfig::default(),
            view: crate::ViewConfig::default(),
        }
    }

    fn entry(address: &str, names: &[&str]) -> HostsEntry {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        HostsEntry { address: address.parse().unwrap(), names }
    }

    #[test]
    fn nsswitch_replaces_only_the_hosts_line() {
        let host = "passwd: files\n hosts: files resolve [!UNAVAIL=return] dns\nnetworks: files\n";
        assert_eq!(nsswitch(host, true), "passwd: files\nnetworks: files\nhosts: files dns\n");
        assert_eq!(nsswitch("", true), "hosts: files dns\n");
    }

    #[test]
    fn nsswitch_keeps_the_order_of_modules_that_work_in_a_guest() {
        for (host, guest) in [
            ("files mdns4_minimal [NOTFOUND=return] dns myhostname", "files dns myhostname"),
            ("dns [NOTFOUND = return] files # why", "dns [NOTFOUND = return] files"),
            ("mymachines resolve [!UNAVAIL=return] files myhostname dns", "files dns myhostname"),
            ("files [SUCCESS=merge] dns", "files [SUCCESS=merge] dns"),
            ("files sss", "files sss dns"),
        ] {
            assert_eq!(nsswitch(&format!("hosts: {host}"), true), format!("hosts: {guest}\n"));
        }
        assert_eq!(nsswitch("hosts: files", false), "hosts: files\n");
    }

    #[test]
    fn options_of_clients_are_kept_and_those_of_servers_left_to_the_stub() {
        let resolver = ResolverConfig {
            name_servers: vec!["192.0.2.1".parse().unwrap()],
            search: vec!["a.example".into(), "b.example".into()],
            options: ["ndots:3", "timeout:1", "rotate", "edns0"].map(str::to_owned).into(),
        };
        let own = "nameserver 127.0.0.53\noptions timeout:10 attempts:2\n";
        let kept = "search a.example b.example\noptions ndots:3 edns0\n";
        assert_eq!(resolv_conf(Some(&resolver)), format!("{own}{kept}"));
        assert_eq!(resolv_conf(None), own);
        let whole = "nameserver 192.0.2.1\nsearch a.example b.example\n\
                     options ndots:3 timeout:1 rotate edns0\n";
        assert_eq!(resolv_conf_of_host(&resolver), whole);
    }

    #[test]
    fn hosts_file_contains_own_name() {
        let mut config = config();
        assert!(hosts(&config, &[], &[]).contains("\n127.0.1.1 web\n"));
        config.interface = Some(InterfaceConfig {
            name: "eth0".into(),
            mac: [0; 6],
            mtu: 1500,
            offloads: 0,
            addresses: vec!["10.0.0.2/24".parse().unwrap(), "fd00::2/64".parse().unwrap()],
            queues: 1,
        });
        assert!(hosts(&config, &[], &[]).ends_with("\n10.0.0.2 web\nfd00::2 web\n"));
    }

    #[test]
    fn names_of_guests_come_before_the_entries_of_the_host() {
        let mut config = config();
        config.names = Some(NamesConfig { switch: "Lab".into(), own: Some("web".into()) });
        let host = [
            entry("127.0.0.1", &["localhost", "here"]),
            entry("10.1.0.1", &["db", "base.example"]),
            entry("10.1.0.2", &["WEB", "db.lab", "DB.ringfence"]),
        ];
        let own = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n127.0.1.1 web\n";
        let text = hosts(&config, &host, &["db".to_owned()]);
        assert_eq!(text, format!("{own}127.0.0.1 here\n10.1.0.1 base.example\n"));
        let text = hosts(&config, &host, &[]);
        let all = "127.0.0.1 here\n10.1.0.1 db base.example\n10.1.0.2 db.lab DB.ringfence\n";
        assert_eq!(text, format!("{own}{all}"));
    }
}

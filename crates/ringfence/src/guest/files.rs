//! Contents of the files of `/etc` that a guest has its own version of.

use std::fmt::Write as _;
use std::net::Ipv4Addr;

use super::{GuestConfig, ResolverConfig};

/// Address of a guest's DNS stub. `systemd-resolved` uses the same one, which is free in a new
/// network namespace.
pub(crate) const STUB_ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 53);

/// Returns a `resolv.conf(5)` with the stub as name server. The stub may hold back an answer for
/// some seconds, until a name exists, so the client must not time out or repeat the query earlier.
///
/// With a search list, a name is queried first as it is written, because a guest may have it.
pub(crate) fn resolv_conf(others: Option<&ResolverConfig>) -> String {
    let mut text = format!("nameserver {STUB_ADDRESS}\noptions timeout:10 attempts:2\n");
    if let Some(resolver) = others.filter(|resolver| !resolver.search.is_empty()) {
        // Writing to a String cannot fail, here and below.
        let _ = writeln!(text, "search {}\noptions ndots:0", resolver.search.join(" "));
    }
    text
}

/// Returns the `resolv.conf(5)` of a guest that is on no switch.
pub(crate) fn resolv_conf_of_host(resolver: &ResolverConfig) -> String {
    let servers = resolver.name_servers.iter();
    let mut text = servers.fold(String::new(), |text, ip| text + &format!("nameserver {ip}\n"));
    if !resolver.search.is_empty() {
        let _ = writeln!(text, "search {}", resolver.search.join(" "));
    }
    text
}

/// Returns `hosts(5)` of the guest. The host's file would contain names of the host's networks.
pub(crate) fn hosts(config: &GuestConfig) -> String {
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
    text
}

/// Returns an `nsswitch.conf(5)` that looks up host names in files and by DNS only. The host's
/// version may query daemons of the host, which know no guests.
pub(crate) fn nsswitch(host: &str) -> String {
    let others = host.lines().filter(|line| !line.trim_start().starts_with("hosts:"));
    others.chain(["hosts: files dns"]).fold(String::new(), |text, line| text + line + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::InterfaceConfig;

    #[test]
    fn nsswitch_replaces_only_the_hosts_line() {
        let host = "passwd: files\n hosts: files resolve [!UNAVAIL=return] dns\nnetworks: files\n";
        assert_eq!(nsswitch(host), "passwd: files\nnetworks: files\nhosts: files dns\n");
        assert_eq!(nsswitch(""), "hosts: files dns\n");
    }

    #[test]
    fn hosts_file_contains_own_name() {
        let mut config = GuestConfig {
            host_name: "web".into(),
            interface: None,
            uplink: None,
            names: None,
            resolver: None,
            blocked_signals: vec![],
            open_files: None,
            environment: vec![],
            removed_variables: vec![],
            view: crate::guest::ViewConfig::default(),
        };
        assert!(hosts(&config).contains("\n127.0.1.1 web\n"));
        config.interface = Some(InterfaceConfig {
            name: "eth0".into(),
            mac: [0; 6],
            mtu: 1500,
            offloads: 0,
            addresses: vec!["10.0.0.2/24".parse().unwrap(), "fd00::2/64".parse().unwrap()],
            queues: 1,
        });
        assert!(hosts(&config).ends_with("\n10.0.0.2 web\nfd00::2 web\n"));
    }
}

//! Parsers of `hosts(5)` and `resolv.conf(5)`, which say how the host's programs look up names.
//!
//! They accept and skip what the C library accepts and skips: a malformed line never spoils the rest of a file. Words
//! are copied into files of a guest, so words with control characters or white space never pass. Both parsers allocate
//! no more than a small multiple of the text's length.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use ringfence_base::address::{with_zone, without_zone};

/// Maximum number of name servers that a C library uses (`MAXNS` of resolv.h).
pub const NAME_SERVERS_MAX: usize = 3;
/// Maximum number of search domains. The C library has no limit; a message to a guest has one.
pub const SEARCH_MAX: usize = 32;
/// Maximum length of a search domain in bytes (RFC 1035, section 2.3.4).
const DOMAIN_MAX: usize = 255;
/// Maximum length of one of the files in bytes. Callers ignore the rest of a longer one.
pub const FILE_MAX: u64 = 1024 * 1024;
/// Maximum number of options in the file.
pub const OPTIONS_MAX: usize = 32;
/// Maximum length of an option in bytes.
const OPTION_MAX: usize = 32;
/// Maximum values of `timeout` and `attempts` (`RES_MAXRETRANS` and `RES_MAXRETRY` of resolv.h).
const TIMEOUT_MAX: u64 = 30;
const ATTEMPTS_MAX: usize = 5;

/// Line of a file `hosts(5)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostsEntry {
    pub address: IpAddr,
    /// Canonical name and aliases. Never empty.
    pub names: Vec<String>,
}

/// Parses `hosts(5)`. Lines without an address or a name are skipped.
pub fn parse_hosts(text: &[u8]) -> Vec<HostsEntry> {
    text.split(|byte| *byte == b'\n').filter_map(parse_hosts_line).collect()
}

fn parse_hosts_line(line: &[u8]) -> Option<HostsEntry> {
    let line = line.split(|byte| *byte == b'#').next()?;
    let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let address = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
    let names = words.filter_map(|word| std::str::from_utf8(word).ok());
    let names: Vec<String> = names.filter(|name| is_plain(name)).map(str::to_owned).collect();
    (!names.is_empty()).then_some(HostsEntry { address, names })
}

/// Returns `true` for a word that is still one word in another file.
fn is_plain(word: &str) -> bool {
    !word.chars().any(|c| c.is_control() || c.is_whitespace())
}

/// Contents of a file `resolv.conf(5)`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvConf {
    pub name_servers: Vec<IpAddr>,
    /// Search domains.
    pub search: Vec<String>,
    /// Options, one word each.
    pub options: Vec<String>,
}

impl ResolvConf {
    /// Parses the file. Without a name server, the one of this machine is meant.
    pub fn parse(text: &[u8]) -> ResolvConf {
        ResolvConf::parse_with(text, |_| None)
    }

    /// Parses the file. `index_of` returns the index of an interface, for name servers with a zone (`fe80::1%eth0`). One of
    /// an interface that is not there is left out.
    pub fn parse_with(text: &[u8], index_of: impl Fn(&str) -> Option<u32>) -> ResolvConf {
        let mut parsed = ResolvConf::default();
        for line in text.split(|byte| *byte == b'\n') {
            let mut words = line
                .split(u8::is_ascii_whitespace)
                .map(|word| std::str::from_utf8(word).unwrap_or_default());
            // The C library wants the keyword at the start of the line.
            let keyword = words.next();
            let words = words.filter(|word| !word.is_empty());
            match keyword {
                Some("nameserver") => parsed.add_server(words, &index_of),
                // The last line counts, of either keyword.
                Some("search") => parsed.search = domains(words),
                Some("domain") => parsed.search = domains(words.take(1)),
                Some("options") => {
                    let room = OPTIONS_MAX - parsed.options.len();
                    let options = words.filter(|word| is_option(word)).take(room);
                    parsed.options.extend(options.map(str::to_owned));
                }
                _ => {}
            }
        }
        if parsed.name_servers.is_empty() {
            parsed.name_servers.push(Ipv4Addr::LOCALHOST.into());
        }
        parsed
    }

    fn add_server<'a>(
        &mut self,
        mut words: impl Iterator<Item = &'a str>,
        index_of: impl Fn(&str) -> Option<u32>,
    ) {
        if self.name_servers.len() < NAME_SERVERS_MAX {
            let server = words.next().and_then(|word| address_of(word, index_of));
            self.name_servers.extend(server.map(loopback_if_unspecified));
        }
    }
}

/// Returns the address of a name server. One with a zone has the form of [`with_zone`].
fn address_of(word: &str, index_of: impl Fn(&str) -> Option<u32>) -> Option<IpAddr> {
    let Some((ip, zone)) = word.split_once('%') else { return word.parse().ok() };
    let ip: Ipv6Addr = ip.parse().ok()?;
    if !ip.is_unicast_link_local() {
        return None;
    }
    let number = zone.parse().ok().filter(|number| *number > 0);
    let index = number.or_else(|| index_of(zone))?;
    Some(with_zone(without_zone(ip).0, index).into())
}

/// Returns loopback for 0.0.0.0 and `::`, to which the kernel sends such queries.
fn loopback_if_unspecified(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(v4) if v4.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(v6) if v6.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        other => other,
    }
}

fn domains<'a>(words: impl Iterator<Item = &'a str>) -> Vec<String> {
    let sane = words.filter(|word| word.len() <= DOMAIN_MAX && is_plain(word));
    sane.take(SEARCH_MAX).map(str::to_owned).collect()
}

fn is_option(word: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b':' | b'-' | b'_');
    word.len() <= OPTION_MAX && word.bytes().all(is_part)
}

/// Options about the exchange with name servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerOptions {
    /// Time limit for the answer of one server (`timeout:N`).
    pub timeout: Option<Duration>,
    /// Number of times that each server is queried (`attempts:N`).
    pub attempts: Option<usize>,
    /// Begins each query with another server (`rotate`).
    pub rotate: bool,
}

impl ServerOptions {
    /// Returns these options of a list, and all others.
    pub fn split(options: &[String]) -> (ServerOptions, Vec<String>) {
        let mut own = ServerOptions::default();
        let others = options.iter().filter(|word| !own.accept(word)).cloned().collect();
        (own, others)
    }

    fn accept(&mut self, word: &str) -> bool {
        match word.split_once(':') {
            // The C library reads nonsense as 0, and waits at least a second.
            Some(("timeout", number)) => {
                let seconds = number.parse().unwrap_or(0).clamp(1, TIMEOUT_MAX);
                self.timeout = Some(Duration::from_secs(seconds));
            }
            Some(("attempts", number)) => {
                self.attempts = Some(number.parse().unwrap_or(0).clamp(1, ATTEMPTS_MAX));
            }
            None if word == "rotate" => self.rotate = true,
            _ => return false,
        }
        true
    }
}

/// Checks of the parsers for the fuzz target.
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing {
    use super::{
        HostsEntry, NAME_SERVERS_MAX, OPTIONS_MAX, ResolvConf, SEARCH_MAX, ServerOptions,
        parse_hosts,
    };
    use std::fmt::Write as _;

    /// Parses arbitrary bytes as both files. A file written from the result must have the same meaning.
    ///
    /// # Panics
    ///
    /// Panics if it has another.
    pub fn name_files(data: &[u8]) {
        let entries = parse_hosts(data);
        assert_eq!(parse_hosts(write_hosts(&entries).as_bytes()), entries);
        let parsed = ResolvConf::parse(data);
        assert!((1..=NAME_SERVERS_MAX).contains(&parsed.name_servers.len()));
        assert!(parsed.search.len() <= SEARCH_MAX && parsed.options.len() <= OPTIONS_MAX);
        assert_eq!(ResolvConf::parse(write_resolv_conf(&parsed).as_bytes()), parsed);
        let (_, others) = ServerOptions::split(&parsed.options);
        assert_eq!(ServerOptions::split(&others).1, others);
    }

    fn write_hosts(entries: &[HostsEntry]) -> String {
        let mut text = String::new();
        for HostsEntry { address, names } in entries {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{address} {}", names.join(" "));
        }
        text
    }

    fn write_resolv_conf(parsed: &ResolvConf) -> String {
        let servers = parsed.name_servers.iter().map(|ip| format!("nameserver {ip}\n"));
        let (search, options) = (parsed.search.join(" "), parsed.options.join(" "));
        servers.collect::<String>() + &format!("search {search}\noptions {options}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(address: &str, names: &[&str]) -> HostsEntry {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        HostsEntry { address: address.parse().unwrap(), names }
    }

    #[test]
    fn hosts_file_is_parsed_as_by_the_c_library() {
        let text = b"# head\n10.0.0.5\tdb db.example # the base\n\n  ::1 localhost\r\n10.0.0.300 no\n\
                     fe80::1%lo0 zone\n10.0.0.6\n10.0.0.7 a#b c\n010.0.0.1 zero\n\xff\xfe bad\n10.0.0.8 \xff ok";
        let expected = [
            entry("10.0.0.5", &["db", "db.example"]),
            entry("::1", &["localhost"]),
            entry("10.0.0.7", &["a"]),
            entry("10.0.0.8", &["ok"]),
        ];
        assert_eq!(parse_hosts(text), expected);
    }

    #[test]
    fn word_with_control_character_is_skipped() {
        let text = b"10.0.0.9 a\x0bb \x1b[0m \xc2\x85 fine\n";
        assert_eq!(parse_hosts(text), [entry("10.0.0.9", &["fine"])]);
        assert_eq!(ResolvConf::parse(b"search a\x0boptions \x07 b\n").search, ["b"]);
    }

    #[test]
    fn resolv_conf_is_parsed_as_by_the_c_library() {
        let text = "# a\nnameserver 192.0.2.1\nsearch a.example b.example\nnameserver ::1\n\
                    options edns0 ndots:3\n nameserver 3.3.3.3\nnameserver nonsense\n\
                    nameserver 1.1.1.1\noptions rotate (odd)\nnameserver 2.2.2.2\n";
        let parsed = ResolvConf::parse(text.as_bytes());
        assert_eq!(parsed.search, ["a.example", "b.example"]);
        let servers: Vec<IpAddr> =
            ["192.0.2.1", "::1", "1.1.1.1"].iter().map(|ip| ip.parse().unwrap()).collect();
        assert_eq!(parsed.name_servers, servers);
        assert_eq!(parsed.options, ["edns0", "ndots:3", "rotate"]);
        assert_eq!(ResolvConf::parse(b"").name_servers, [IpAddr::from([127, 0, 0, 1])]);
        let unspecified = ResolvConf::parse(b"nameserver 0.0.0.0\n");
        assert_eq!(unspecified.name_servers, [IpAddr::from([127, 0, 0, 1])]);
    }

    #[test]
    fn name_server_with_a_zone_has_the_index_of_its_interface() {
        let text = b"nameserver fe80::53%eth0\nnameserver fe80::54%7\nnameserver fe80::55%none\n\
                     nameserver 2001:db8::1%eth0\nnameserver fe80::56\n";
        let parsed = ResolvConf::parse_with(text, |name| (name == "eth0").then_some(3));
        let zone = |ip: &str, index| IpAddr::from(with_zone(ip.parse().unwrap(), index));
        let expected = [zone("fe80::53", 3), zone("fe80::54", 7), zone("fe80::56", 0)];
        assert_eq!(parsed.name_servers, expected);
    }

    #[test]
    fn last_search_or_domain_line_counts() {
        let last = |text: &str| ResolvConf::parse(text.as_bytes()).search;
        assert_eq!(last("search a b\ndomain c d\n"), ["c"]);
        assert_eq!(last("domain c\nsearch a b\n"), ["a", "b"]);
    }

    #[test]
    fn options_of_servers_are_split_from_the_others() {
        let options = ["ndots:2", "timeout:99", "attempts:x", "rotate", "use-vc"];
        let (own, others) = ServerOptions::split(&options.map(str::to_owned));
        let timeout = Some(Duration::from_secs(TIMEOUT_MAX));
        assert_eq!(own, ServerOptions { timeout, attempts: Some(1), rotate: true });
        assert_eq!(others, ["ndots:2", "use-vc"]);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_keep_their_meaning(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            fuzzing::name_files(&bytes);
        }

        #[test]
        fn lines_of_the_files_keep_their_meaning(
            lines in prop::collection::vec(
                "(nameserver|search|domain|options|10\\.0\\.0\\.[0-9]|::1)[ \t]([a-z0-9.:#-]{0,9}[ \t]){0,4}", 0..20),
        ) {
            fuzzing::name_files(lines.join("\n").as_bytes());
        }
    }
}

//! TCP sockets of this network namespace: listeners, their ports, and unsent data, from `/proc/net/tcp`; their number, from
//! `/proc/net/sockstat`.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;

use crate::files::STUB_ADDRESS;
use crate::messages::ListeningPorts;

/// State `TCP_LISTEN` of the kernel's `tcp_states.h`, as `/proc/net/tcp` prints it.
const LISTEN: &str = "0A";
/// Maximum number of ports in a message.
const PORTS_SHOWN: usize = 16;

/// Returns `true` if a socket listens for TCP connections from other hosts.
pub(super) fn something_listens() -> bool {
    ["tcp", "tcp6"].iter().any(|table| {
        fs::read_to_string(format!("/proc/self/net/{table}")).is_ok_and(|text| any_listens(&text))
    })
}

/// Returns the TCP ports at which processes listen. The guest's DNS stub does not count.
pub fn listening_ports(wanted: u16) -> ListeningPorts {
    let mut ports = BTreeSet::new();
    for table in ["tcp", "tcp6"] {
        if let Ok(text) = fs::read_to_string(format!("/proc/self/net/{table}")) {
            let of_others = |(address, _): &(IpAddr, u16)| *address != IpAddr::V4(STUB_ADDRESS);
            ports.extend(listeners(&text).filter(of_others).map(|(_, port)| port));
        }
    }
    ListeningPorts {
        has_wanted: ports.contains(&wanted),
        lowest: ports.into_iter().take(PORTS_SHOWN).collect(),
    }
}

/// Returns `true` if a connection that its process has closed still has data to send.
pub fn something_is_unsent() -> bool {
    ["tcp", "tcp6"].iter().any(|table| {
        fs::read_to_string(format!("/proc/self/net/{table}")).is_ok_and(|text| any_unsent(&text))
    })
}

/// Returns the number of TCP sockets that are bound, listen or are connected. `None` if the kernel does not tell it.
pub fn tcp_sockets() -> Option<u64> {
    ["sockstat", "sockstat6"].iter().try_fold(0, |sum, table| {
        let text = fs::read_to_string(format!("/proc/self/net/{table}")).ok()?;
        Some(sum + sockets_in_use(&text)?)
    })
}

/// Returns the number after `inuse` in the line of TCP.
fn sockets_in_use(table: &str) -> Option<u64> {
    let is_tcp = |line: &&str| line.starts_with("TCP:") || line.starts_with("TCP6:");
    let mut words = table.lines().find(is_tcp)?.split_ascii_whitespace().skip(1);
    (words.next() == Some("inuse")).then(|| words.next()?.parse().ok()).flatten()
}

/// States `TCP_FIN_WAIT1`, `TCP_LAST_ACK` and `TCP_CLOSING`: closed here, not acknowledged yet.
const CLOSING: [&str; 3] = ["04", "09", "0B"];

fn any_unsent(table: &str) -> bool {
    table.lines().skip(1).any(|line| {
        let state = line.split_ascii_whitespace().nth(3);
        state.is_some_and(|state| CLOSING.contains(&state))
    })
}

fn any_listens(table: &str) -> bool {
    listeners(table).any(|(address, _)| !address.is_loopback())
}

/// Iterates over the addresses and ports of the listeners in a table.
fn listeners(table: &str) -> impl Iterator<Item = (IpAddr, u16)> {
    table.lines().skip(1).filter_map(|line| {
        let mut columns = line.split_ascii_whitespace().skip(1);
        let (local, _, state) = (columns.next()?, columns.next()?, columns.next()?);
        let (address, port) = local.split_once(':').filter(|_| state == LISTEN)?;
        Some((parse_address(address)?, u16::from_str_radix(port, 16).ok()?))
    })
}

/// Parses an address in the kernel's notation.
fn parse_address(hex: &str) -> Option<IpAddr> {
    // The kernel prints each 32-bit word in the byte order of this machine.
    let words: Option<Vec<[u8; 4]>> = (0..hex.len() / 8)
        .map(|at| hex.get(at * 8..at * 8 + 8))
        .map(|word| Some(u32::from_str_radix(word?, 16).ok()?.to_ne_bytes()))
        .collect();
    match words?.as_slice() {
        &[v4] => Some(IpAddr::from(v4)),
        words @ [_, _, _, _] => {
            let bytes: [u8; 16] = words.as_flattened().try_into().ok()?;
            Some(IpAddr::from(bytes))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when\n";

    fn table(local: &str, state: &str) -> String {
        format!("{HEADER}   0: {local} 00000000:0000 {state} 00000000:00000000 00:00000000\n")
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn listener_on_loopback_alone_does_not_count() {
        assert!(any_listens(&table("00000000:1F40", "0A")));
        assert!(any_listens(&table("0200000A:1F40", "0A")));
        assert!(!any_listens(&table("0100007F:1F40", "0A")));
        assert!(!any_listens(&table("3500007F:0035", "0A")), "the DNS stub itself");
        assert!(!any_listens(&table("00000000:1F40", "01")), "an open connection");
        assert!(any_listens(&table("00000000000000000000000000000000:1F40", "0A")));
        assert!(!any_listens(&table("00000000000000000000000001000000:1F40", "0A")));
        assert!(!any_listens(HEADER));
        assert!(!any_listens(&table("0000é0000:1F40", "0A")));
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn listener_has_address_and_port() {
        let text = table("0100007F:1F40", "0A") + &table("0200000A:0050", "01");
        let found: Vec<_> = listeners(&text).collect();
        assert_eq!(found, [(IpAddr::from([127, 0, 0, 1]), 8000)]);
        let text = table("00000000000000000000000001000000:01BB", "0A");
        assert_eq!(listeners(&text).collect::<Vec<_>>(), [("::1".parse().unwrap(), 443)]);
    }

    #[test]
    fn own_listener_is_among_the_ports() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(listening_ports(port).has_wanted);
        drop(listener);
        let ports = listening_ports(port);
        assert!(!ports.has_wanted && ports.lowest.len() <= PORTS_SHOWN);
    }

    #[test]
    fn closed_connection_with_queued_data_is_unsent() {
        assert!(any_unsent(&table("0200000A:1F40", "04")));
        assert!(!any_unsent(&table("0200000A:1F40", "06")), "waiting out old segments");
        assert!(!any_unsent(&table("00000000:1F40", "0A")));
        assert!(!any_unsent(HEADER));
    }

    #[test]
    fn sockets_in_use_are_those_of_tcp() {
        let v4 = "sockets: used 9\nTCP: inuse 3 orphan 5 tw 0 alloc 9 mem 1\nUDP: inuse 7 mem 0\n";
        assert_eq!(sockets_in_use(v4), Some(3));
        assert_eq!(sockets_in_use("TCP6: inuse 2\nUDP6: inuse 1\n"), Some(2));
        assert_eq!(sockets_in_use("UDP: inuse 7\n"), None);
    }

    #[test]
    fn own_listener_is_found_in_the_kernels_table() {
        let text = fs::read_to_string("/proc/self/net/tcp").unwrap();
        assert!(text.lines().next().unwrap().contains("local_address rem_address   st"));
    }
}

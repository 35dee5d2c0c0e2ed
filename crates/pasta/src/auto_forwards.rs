//! Ports of the options `auto`: which of them follow listeners, at which addresses, and which do not.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::args::PastaArgs;
use crate::forward_spec::{Listen, PastaForwardSpec, Range};
use ringfence_uplink_process::forward::ForwardProtocol;

/// Sockets of the namespace's network: their names in `/proc/net`.
pub(super) const TABLES: [&str; 4] = ["tcp", "tcp6", "udp", "udp6"];

/// Option `auto` of one protocol.
#[derive(Clone, Debug)]
pub(super) struct AutoForwards {
    pub(super) protocol: ForwardProtocol,
    pub(super) listen: Listen,
    /// Addresses at which ports are opened: of the host, or of the namespace's loopback.
    pub(super) addresses: Vec<IpAddr>,
    /// Ports with an entry of their own.
    pub(super) taken: BTreeSet<u16>,
}

impl AutoForwards {
    /// Returns `true` if a listener at this port is to be forwarded. Ephemeral ports of UDP belong to clients.
    pub(super) fn wants(&self, protocol: ForwardProtocol, port: u16, ephemeral: Range) -> bool {
        let is_client = protocol == ForwardProtocol::Udp && ephemeral.contains(port);
        protocol == self.protocol
            && !is_client
            && !self.taken.contains(&port)
            && !self.listen.is_excluded(port)
    }
}

/// Returns the specifications behind the last `none`.
pub(super) fn without_none(specs: &[PastaForwardSpec]) -> impl Iterator<Item = &Listen> {
    let start =
        specs.iter().rposition(|spec| *spec == PastaForwardSpec::None).map_or(0, |last| last + 1);
    specs.iter().skip(start).filter_map(|spec| match spec {
        PastaForwardSpec::Listen(listen) => Some(listen),
        PastaForwardSpec::None => None,
    })
}

/// Returns `true` if ports follow the listeners of the host's loopback.
pub(super) fn has_ports_to_host(args: &PastaArgs) -> bool {
    [&args.tcp_ns, &args.udp_ns].into_iter().flat_map(|specs| without_none(specs)).any(|s| s.auto)
}

/// Returns the ports that follow the listeners of the host's loopback.
pub(super) fn ports_to_host(args: &PastaArgs) -> Vec<AutoForwards> {
    let mut found = Vec::new();
    for (protocol, to_host, to_guest) in [
        (ForwardProtocol::Tcp, &args.tcp_ns, &args.tcp_ports),
        (ForwardProtocol::Udp, &args.udp_ns, &args.udp_ports),
    ] {
        // Ports with an entry of their own, and listeners of ours on the host.
        let mapped = [to_host, to_guest].into_iter().flat_map(|specs| without_none(specs));
        let taken: BTreeSet<u16> = mapped.flat_map(Listen::ports).map(|(port, ..)| port).collect();
        for listen in without_none(to_host).filter(|listen| listen.auto) {
            let addresses = vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
            let (listen, taken) = (listen.clone(), taken.clone());
            found.push(AutoForwards { protocol, listen, addresses, taken });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn automatic_ports_towards_the_host_leave_out_ports_of_options() {
        let words: Vec<_> =
            ["-T", "auto,81,~82", "-t", "83:84", "17"].into_iter().map(Into::into).collect();
        let args = super::super::parse(&words).unwrap();
        assert!(has_ports_to_host(&args));
        let [ports] = &ports_to_host(&args)[..] else { panic!("one protocol") };
        assert_eq!(ports.taken, BTreeSet::from([81, 83]));
        assert!(ports.listen.is_excluded(82) && ports.addresses.len() == 2);
        let none: Vec<_> = ["-T", "81", "-U", "none", "17"].into_iter().map(Into::into).collect();
        let args = super::super::parse(&none).unwrap();
        assert!(!has_ports_to_host(&args) && ports_to_host(&args).is_empty());
    }
}

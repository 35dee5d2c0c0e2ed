//! Source addresses and interfaces of outbound sockets (`-o`, `--outbound-if4`, `--outbound-if6`).

use std::net::IpAddr;

use anyhow::{Context, bail};

use super::args::PastaArgs;
use ringfence_hostnet::host::HostNetwork;
use ringfence_uplink_process::Outbound;
use ringfence_uplink_process::multicast::Chosen;

/// Returns the sources that the options name, IPv4 first. The last address of a family counts.
pub(super) fn sources(args: &PastaArgs) -> anyhow::Result<[Outbound; 2]> {
    let source = |v4: bool, interface: &Option<String>| {
        let address = args.outbound.iter().rev().find(|ip| ip.is_ipv4() == v4).copied();
        Outbound { address, interface: interface.clone() }
    };
    let sources = [source(true, &args.outbound_if4), source(false, &args.outbound_if6)];
    for address in sources.iter().filter_map(|source| source.address) {
        check(address)?;
    }
    Ok(sources)
}

/// Rejects an address from which nothing can be sent to other hosts.
fn check(address: IpAddr) -> anyhow::Result<()> {
    if address.is_loopback() || address.is_multicast() {
        bail!("--outbound {address}: this is no address of the host towards others");
    }
    // A socket that is bound to it would be refused later, for each connection.
    let probe = std::net::UdpSocket::bind((address, 0));
    probe.map(drop).with_context(|| format!("--outbound {address}: the host has no such address"))
}

/// Reads the network of the host that is copied: of `--interface`, or of the interface of each family's sockets.
pub(super) fn host_network(args: &PastaArgs) -> anyhow::Result<HostNetwork> {
    let read = |name: Option<&str>, option: &str| {
        let host = HostNetwork::read_only(name).context("looking at the host's network")?;
        match name {
            Some(name) if host.interfaces.is_empty() => bail!(
                "--{option} {name}: the host has no such interface that is up and has an address"
            ),
            _ => Ok(host),
        }
    };
    let own = [&args.outbound_if4, &args.outbound_if6];
    if args.interface.is_some() || own.iter().all(|name| name.is_none()) {
        return read(args.interface.as_deref(), "interface");
    }
    let [v4, v6] = own;
    let v4 = read(v4.as_deref(), "outbound-if4")?;
    let v6 = read(v6.as_deref(), "outbound-if6")?;
    Ok(merged(v4, v6))
}

/// Returns the interfaces that the options choose for multicast.
pub(super) fn chosen(args: &PastaArgs) -> Chosen {
    [&args.outbound_if4, &args.outbound_if6]
        .map(|own| own.as_ref().or(args.interface.as_ref()).cloned())
}

/// Returns IPv4 of one network and IPv6 of the other.
fn merged(v4: HostNetwork, v6: HostNetwork) -> HostNetwork {
    let mut all = HostNetwork { interfaces: v4.interfaces, ..HostNetwork::default() };
    all.interfaces.extend(v6.interfaces);
    all.interfaces.dedup();
    all.addresses.extend(v4.addresses.into_iter().filter(|address| address.ip().is_ipv4()));
    all.addresses.extend(v6.addresses.into_iter().filter(|address| address.ip().is_ipv6()));
    all.routes.extend(v4.routes.into_iter().filter(|route| route.destination.is_ipv4()));
    all.routes.extend(v6.routes.into_iter().filter(|route| route.destination.is_ipv6()));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> PastaArgs {
        let words: Vec<std::ffi::OsString> = line.split_whitespace().map(Into::into).collect();
        super::super::parse(&words).unwrap()
    }

    #[test]
    fn last_address_of_a_family_counts() {
        let given = args("--outbound-if4 wan1 -o 0.0.0.0 -o :: 17");
        let [v4, v6] = sources(&given).unwrap();
        assert_eq!(v4.interface.as_deref(), Some("wan1"));
        assert_eq!(v6, Outbound { address: Some("::".parse().unwrap()), interface: None });
        for address in ["127.0.0.1", "::1", "198.51.100.9", "224.0.0.1"] {
            let error = sources(&args(&format!("-o {address} 17"))).unwrap_err();
            assert!(error.to_string().contains(address), "{error}");
        }
    }

    #[test]
    fn families_are_copied_from_their_own_interfaces() {
        let network = |name: &str, last: u8| {
            let v4 = std::net::Ipv4Addr::new(192, 0, 2, last).into();
            let v6 = std::net::Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last.into()).into();
            let address = |ip, len| ringfence_hostnet::address::Address::new(ip, len).unwrap();
            HostNetwork {
                interfaces: vec![name.to_owned()],
                addresses: vec![address(v4, 24), address(v6, 64)],
                routes: vec![],
                links: Default::default(),
            }
        };
        let all = merged(network("wan0", 1), network("wan1", 2));
        assert_eq!(all.interfaces, ["wan0", "wan1"]);
        let texts: Vec<String> = all.addresses.iter().map(|one| one.ip().to_string()).collect();
        assert_eq!(texts, ["192.0.2.1", "2001:db8::2"]);
    }
}

//! Network namespace of a guest: loopback, and TAPs as Ethernet interfaces.

use std::fs;
use std::io;

use ringfence_net::features::OffloadKeys;
use ringfence_sys::numbers::usize_from;
use ringfence_sys::tap::{Tap, TapError, TapOffloads};

use ringfence_hostnet::address::Address;
use ringfence_hostnet::interface::{InterfaceConfig, UplinkInterface};
use ringfence_hostnet::netlink::{LinkChange, Netlink};

/// Minimum MTU of IPv6 (RFC 8200, section 5).
const IPV6_MTU_MIN: u32 = 1280;

/// Errors of the network's set-up.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// A TAP could not be created.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// A setting of an interface failed.
    #[error("{interface}: {what}: {source}")]
    Interface {
        interface: String,
        /// Operation that failed.
        what: String,
        source: io::Error,
    },
}

/// Sets up loopback, and the configured interfaces to the switch and to the host's network.
pub(crate) fn set_up(
    interface: Option<&InterfaceConfig>,
    uplink: Option<&UplinkInterface>,
    remarks: &mut Vec<String>,
) -> Result<(Vec<Tap>, Vec<Tap>), NetworkError> {
    let fail = |source| NetworkError::Interface {
        interface: "lo".into(),
        what: "bringing it up".into(),
        source,
    };
    let mut netlink = Netlink::open().map_err(fail)?;
    let loopback = netlink.index_of("lo").map_err(fail)?;
    netlink
        .change_link(loopback, &LinkChange { up: true, ..LinkChange::default() })
        .map_err(fail)?;
    allow_ping(remarks);
    // Interfaces inherit the settings of `default` when they are created.
    for scope in ["all", "default"] {
        ignore_neighbour_config(scope, remarks);
        use_own_addresses(scope, remarks);
    }
    let taps =
        interface.map(|interface| to_switch(&mut netlink, interface, remarks)).transpose()?;
    let uplink = uplink.map(|uplink| to_host(&mut netlink, uplink, remarks)).transpose()?;
    Ok((taps.unwrap_or_default(), uplink.unwrap_or_default()))
}

/// Sets up loopback and the interface to the host's network in a network namespace that Ringfence may not have
/// made. `is_own` is set if it has: then the namespace as a whole is configured, too. Without `addressed`, the
/// interface stays down, and its addresses and routes are left out.
pub fn connect(
    uplink: &UplinkInterface,
    is_own: bool,
    addressed: bool,
    remarks: &mut Vec<String>,
) -> Result<Vec<Tap>, NetworkError> {
    if is_own && addressed {
        return set_up(None, Some(uplink), remarks).map(|(_, taps)| taps);
    }
    let name = &uplink.interface.name;
    let fail = |interface: &str, what: &str| {
        let (interface, what) = (interface.to_owned(), what.to_owned());
        move |source| NetworkError::Interface { interface, what, source }
    };
    let mut netlink = Netlink::open().map_err(fail(name, "netlink"))?;
    let up = LinkChange { up: true, ..LinkChange::default() };
    let loopback = netlink.index_of("lo").map_err(fail("lo", "looking it up"))?;
    netlink.change_link(loopback, &up).map_err(fail("lo", "bringing it up"))?;
    if is_own {
        allow_ping(remarks);
    }
    if addressed {
        return to_host(&mut netlink, uplink, remarks);
    }
    let taps = make(&uplink.interface)?;
    let index = netlink.index_of(name).map_err(fail(name, "looking it up"))?;
    let (mac, mtu) = (Some(uplink.interface.mac), Some(uplink.interface.mtu));
    let change = LinkChange { mac, mtu, ..LinkChange::default() };
    netlink.change_link(index, &change).map_err(fail(name, "its address and MTU"))?;
    Ok(taps)
}

fn to_switch(
    netlink: &mut Netlink,
    interface: &InterfaceConfig,
    remarks: &mut Vec<String>,
) -> Result<Vec<Tap>, NetworkError> {
    let taps = make(interface)?;
    let settings = Settings {
        name: taps.first().map_or(&interface.name, |tap| &tap.name),
        mac: interface.mac,
        mtu: interface.mtu,
        addresses: &interface.addresses,
    };
    remarks.extend(configure(netlink, &settings)?);
    Ok(taps)
}

/// Creates the TAP of an interface, with all its queues.
fn make(interface: &InterfaceConfig) -> Result<Vec<Tap>, NetworkError> {
    let mut taps = Tap::create_queues(&interface.name, usize_from(interface.queues))?;
    for tap in &mut taps {
        tap.limit_offloads(TapOffloads(interface.offloads))?;
    }
    Ok(taps)
}

fn to_host(
    netlink: &mut Netlink,
    uplink: &UplinkInterface,
    remarks: &mut Vec<String>,
) -> Result<Vec<Tap>, NetworkError> {
    let UplinkInterface { interface, routes } = uplink;
    let taps = make(interface)?;
    let name = taps.first().map_or(&interface.name, |tap| &tap.name);
    let settings =
        Settings { name, mac: interface.mac, mtu: interface.mtu, addresses: &interface.addresses };
    remarks.extend(configure(netlink, &settings)?);
    let fail = |what: String| {
        let interface = name.clone();
        move |source| NetworkError::Interface { interface, what, source }
    };
    let index = netlink.index_of(name).map_err(fail("looking it up".into()))?;
    for route in routes {
        if let Err(error) = netlink.add_route(index, route) {
            remarks.push(format!(
                "{name}: the route to {}/{} is left out: {error}",
                route.destination, route.prefix
            ));
        }
    }
    Ok(taps)
}

/// Returns the offloads of a TAP whose frontend accepts `keys`: work that the guest's kernel may
/// leave undone in sent frames. It is never more than the guest itself accepts. A vif has no
/// feature for UDP super-packets, so the frontend segments them: one read of 40 datagrams costs
/// less than 40 reads.
pub fn carried(keys: OffloadKeys) -> TapOffloads {
    let checksum = keys.checksum_ipv4 || keys.checksum_ipv6;
    let tcp_v4 = keys.gso_tcp_v4 && keys.checksum_ipv4;
    let tcp_v6 = keys.gso_tcp_v6 && keys.checksum_ipv6;
    let choices = [
        (checksum, TapOffloads::CSUM),
        (tcp_v4, TapOffloads::TSO4),
        (tcp_v6, TapOffloads::TSO6),
        (tcp_v4 || tcp_v6, TapOffloads::TSO_ECN),
        (tcp_v4 && tcp_v6, TapOffloads::USO4.union(TapOffloads::USO6)),
    ];
    let chosen = choices.into_iter().filter(|(on, _)| *on);
    chosen.fold(TapOffloads::default(), |all, (_, one)| all.union(one))
}

/// Returns the offloads of the host's port that accepts `keys`. With all of them, the kernel may
/// leave everything undone, because the switch segments what the egress port cannot take.
pub fn carried_for_host(keys: OffloadKeys) -> TapOffloads {
    if keys == OffloadKeys::ALL { TapOffloads(u32::MAX) } else { carried(keys) }
}

/// Configures an interface of the host that is a TAP on a switch. Needs `CAP_NET_ADMIN`. Returns
/// remarks on optional settings that failed.
///
/// # Errors
///
/// Returns `NetworkError` if a required setting fails.
pub fn configure_leg(
    name: &str,
    mac: [u8; 6],
    mtu: u32,
    addresses: &[Address],
) -> Result<Vec<String>, NetworkError> {
    let mut netlink = Netlink::open().map_err(|source| NetworkError::Interface {
        interface: name.to_owned(),
        what: "netlink".into(),
        source,
    })?;
    let mut remarks = Vec::new();
    ignore_neighbour_config(name, &mut remarks);
    let settings = Settings { name, mac, mtu, addresses };
    remarks.extend(configure(&mut netlink, &settings)?);
    Ok(remarks)
}

struct Settings<'a> {
    name: &'a str,
    mac: [u8; 6],
    mtu: u32,
    addresses: &'a [Address],
}

fn configure(netlink: &mut Netlink, config: &Settings<'_>) -> Result<Vec<String>, NetworkError> {
    let fail = |what: String| {
        let interface = config.name.to_owned();
        move |source| NetworkError::Interface { interface, what, source }
    };
    let mut remarks = Vec::new();
    let index = netlink.index_of(config.name).map_err(fail("looking it up".into()))?;
    let has_ipv6 = config.mtu >= IPV6_MTU_MIN && disable_address_detection(config.name);
    let change =
        LinkChange { mac: Some(config.mac), mtu: Some(config.mtu), ..LinkChange::default() };
    netlink.change_link(index, &change).map_err(fail(format!("MTU {}", config.mtu)))?;
    let up = LinkChange { up: true, ..LinkChange::default() };
    netlink.change_link(index, &up).map_err(fail("bringing it up".into()))?;
    for &address in config.addresses {
        if address.ip().is_ipv6() && !has_ipv6 {
            remarks.push(ipv6_remark(config, address));
            continue;
        }
        netlink.add_address(index, address).map_err(fail(format!("adding {address}")))?;
    }
    Ok(remarks)
}

fn ipv6_remark(config: &Settings<'_>, address: Address) -> String {
    if config.mtu < IPV6_MTU_MIN {
        format!(
            "{address} is left out: IPv6 needs an MTU of {IPV6_MTU_MIN}, and this is {}",
            config.mtu
        )
    } else {
        format!("{address} is left out: this kernel has no IPv6")
    }
}

/// Disables duplicate address detection, so that the link-local address is usable at once. Returns
/// `false` if the interface has no IPv6.
fn disable_address_detection(interface: &str) -> bool {
    let directory = format!("/proc/sys/net/ipv6/conf/{interface}");
    let disabled = fs::read_to_string(format!("{directory}/disable_ipv6"));
    // Best effort: with detection, the address becomes usable one second later.
    let _ = fs::write(format!("{directory}/accept_dad"), "0");
    disabled.is_ok_and(|text| text.trim() == "0")
}

/// Makes interfaces of `scope` (an interface, `all` or `default`) ignore routes and addresses from
/// neighbours. All routes and addresses come from the configuration.
fn ignore_neighbour_config(scope: &str, remarks: &mut Vec<String>) {
    const SETTINGS: [(&str, &str, &str); 10] = [
        ("ipv4", "accept_redirects", "0"),
        ("ipv4", "secure_redirects", "0"),
        ("ipv4", "send_redirects", "0"),
        ("ipv4", "accept_source_route", "0"),
        ("ipv4", "arp_accept", "0"),
        ("ipv6", "accept_ra", "0"),
        ("ipv6", "autoconf", "0"),
        ("ipv6", "accept_redirects", "0"),
        ("ipv6", "accept_source_route", "-1"),
        ("ipv6", "accept_untracked_na", "0"),
    ];
    write_settings(scope, &SETTINGS, remarks);
}

/// Makes interfaces of `scope` use only their own addresses, because a switch drops others. The
/// link-local address is derived from the Ethernet address.
fn use_own_addresses(scope: &str, remarks: &mut Vec<String>) {
    const SETTINGS: [(&str, &str, &str); 4] = [
        ("ipv4", "arp_ignore", "1"),
        ("ipv4", "arp_announce", "2"),
        ("ipv6", "use_tempaddr", "0"),
        ("ipv6", "addr_gen_mode", "0"),
    ];
    write_settings(scope, &SETTINGS, remarks);
}

/// Writes settings of the IP stacks. A setting that the kernel does not have is skipped.
fn write_settings(scope: &str, settings: &[(&str, &str, &str)], remarks: &mut Vec<String>) {
    for (family, key, value) in settings {
        let path = format!("/proc/sys/net/{family}/conf/{scope}/{key}");
        match fs::write(&path, value) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                remarks.push(format!("{path} cannot be set to {value}: {error}"));
            }
            _ => {}
        }
    }
}

/// Lets a command without capabilities listen at every port.
pub(super) fn allow_low_ports(remarks: &mut Vec<String>) {
    const PATH: &str = "/proc/sys/net/ipv4/ip_unprivileged_port_start";
    if let Err(error) = fs::write(PATH, "0") {
        remarks.push(format!("ports below 1024 are for root alone: {PATH}: {error}"));
    }
}

/// Lets every user of the guest ping without a capability.
fn allow_ping(remarks: &mut Vec<String>) {
    const PATH: &str = "/proc/sys/net/ipv4/ping_group_range";
    // The whole range if all ids are mapped, otherwise the only id.
    let written = ["0 2147483647", "0 0"].iter().any(|range| fs::write(PATH, range).is_ok());
    if !written {
        remarks.push("`ping` may need to be run as root".into());
    }
}

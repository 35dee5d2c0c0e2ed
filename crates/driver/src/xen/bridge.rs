//! TAP interfaces of the host, and the bridges that they are ports of.
//!
//! Each vif has a TAP with the name that operators expect, such as `vif5.0`. The daemon creates it before
//! the guest is connected, so that the toolstack's script finds it. The TAP is persistent: it outlives the
//! daemon together with its bridge port and the administrator's settings, and the next daemon opens it
//! again. The daemon removes it with the device.

// #syscall daemon openat: /sys, and TAPs

use std::io;
use std::path::Path;

use ringfence_net::features::OffloadKeys;
use ringfence_sys::tap::{Tap, TapError, TapOffloads};

use ringfence_hostnet::netlink::{LinkChange, Netlink};

/// Ethernet address of TAPs, as of xen-netback's interfaces. It is the highest one, so that no bridge adopts it.
const PORT_MAC: [u8; 6] = [0xfe, 0xff, 0xff, 0xff, 0xff, 0xff];

/// Reasons for which an interface cannot be created.
#[derive(Debug, thiserror::Error)]
pub(super) enum BridgeError {
    #[error(transparent)]
    Tap(#[from] TapError),
    #[error(
        "there is no bridge `{0}`: make it (`ip link add {0} type bridge; ip link set {0} up`), or \
         name another one, by `bridge=` in the guest's configuration or in the daemon's"
    )]
    NoBridge(String),
    /// Interface exists and is no bridge.
    #[error("`{0}` is no bridge of the kernel's; name one that is")]
    NotABridge(String),
    #[error("interface `{name}`: {what}: {source}")]
    Link {
        name: String,
        /// Operation that the kernel refused.
        what: &'static str,
        source: io::Error,
    },
}

/// Returns the MTU of an interface, in bytes.
pub(super) fn mtu_of(interface: &str) -> Option<u16> {
    number_of(interface, "mtu")
}

/// Returns the number of frames that the kernel dropped because the queue of a TAP was full.
pub(super) fn queue_drops(interface: &str) -> Option<u64> {
    number_of(interface, "statistics/tx_dropped")
}

/// Reads a file of an interface in sysfs that has one number.
fn number_of<T: core::str::FromStr>(interface: &str, file: &str) -> Option<T> {
    let text = std::fs::read_to_string(format!("/sys/class/net/{interface}/{file}")).ok()?;
    text.trim_end().parse().ok()
}

/// Creates the TAP `name`, as a port of `bridge` if there is one, or opens the persistent one of that name. Returns a file
/// for each queue. A TAP that existed before may have fewer queues than requested.
pub(super) fn make_tap(
    name: &str,
    bridge: Option<&str>,
    mtu: u16,
    queues: usize,
) -> Result<Vec<Tap>, BridgeError> {
    let link = |what| move |source| BridgeError::Link { name: name.to_owned(), what, source };
    let mut netlink = Netlink::open().map_err(link("netlink"))?;
    let bridge = bridge.map(|bridge| bridge_index(&netlink, bridge)).transpose()?;
    // A routed TAP of an earlier daemon keeps the address that the toolstack's script gave it.
    let has_own = bridge.is_none() && netlink.index_of(name).is_ok();
    let taps = Tap::take_up_queues(name, queues)?;
    let index = netlink.index_of(name).map_err(link("its number"))?;
    // Separate requests: an old kernel that refuses one of them still does the others.
    let settings = LinkChange {
        mac: (!has_own).then_some(PORT_MAC),
        mtu: Some(mtu.into()),
        ..LinkChange::default()
    };
    netlink.change_link(index, &settings).map_err(link("address and MTU"))?;
    if bridge.is_some() {
        let port = LinkChange { bridge, ..LinkChange::default() };
        netlink.change_link(index, &port).map_err(link("joining the bridge"))?;
    }
    let up = LinkChange { up: true, ..LinkChange::default() };
    netlink.change_link(index, &up).map_err(link("setting it up"))?;
    taps.first().map_or(Ok(()), |tap| tap.keep(true))?;
    Ok(taps)
}

/// Returns the work that the kernel may leave to a guest with these offloads. It segments the rest before a frame is
/// read, in frames that the guest takes one at a time.
pub(super) fn offloads_for(guest: OffloadKeys) -> TapOffloads {
    let OffloadKeys { scatter_gather, gso_tcp_v4, gso_tcp_v6, .. } = guest;
    let (v4, v6) = (scatter_gather && gso_tcp_v4, scatter_gather && gso_tcp_v6);
    let udp = TapOffloads::USO4.union(TapOffloads::USO6);
    let parts = [
        (true, TapOffloads::CSUM),
        (v4, TapOffloads::TSO4),
        (v6, TapOffloads::TSO6),
        (v4 || v6, TapOffloads::TSO_ECN),
        // A guest takes no whole UDP packets, but has slots for the segments.
        (v4 && v6, udp),
    ];
    let taken = parts.into_iter().filter(|(taken, _)| *taken);
    taken.fold(TapOffloads(0), |all, (_, part)| all.union(part))
}

/// Creates the host's interface on the switch. The administrator sets its addresses.
pub(super) fn make_host_leg(name: &str) -> Result<Tap, BridgeError> {
    let link = |what| move |source| BridgeError::Link { name: name.to_owned(), what, source };
    let tap = Tap::create(name)?;
    let mut netlink = Netlink::open().map_err(link("netlink"))?;
    let index = netlink.index_of(name).map_err(link("its number"))?;
    let up = LinkChange { up: true, ..LinkChange::default() };
    netlink.change_link(index, &up).map_err(link("setting it up"))?;
    tap.keep(true)?;
    Ok(tap)
}

fn bridge_index(netlink: &Netlink, bridge: &str) -> Result<u32, BridgeError> {
    let missing = |_| BridgeError::NoBridge(bridge.to_owned());
    let index = netlink.index_of(bridge).map_err(missing)?;
    let class = Path::new("/sys/class/net").join(bridge);
    // If /sys is not mounted, the kernel itself refuses the request later.
    if class.exists() && !class.join("bridge").exists() {
        return Err(BridgeError::NotABridge(bridge.to_owned()));
    }
    Ok(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_of_interface_are_read_unless_it_is_gone() {
        assert!(queue_drops("lo").is_some());
        assert_eq!(queue_drops("no-such-one"), None);
    }

    #[test]
    fn kernel_segments_what_guest_does_not_take_whole() {
        let all = offloads_for(OffloadKeys::ALL);
        for part in [TapOffloads::TSO4, TapOffloads::TSO6, TapOffloads::USO4, TapOffloads::CSUM] {
            assert!(all.contains(part));
        }
        let only_v4 = offloads_for(OffloadKeys { gso_tcp_v6: false, ..OffloadKeys::ALL });
        assert!(only_v4.contains(TapOffloads::TSO4.union(TapOffloads::TSO_ECN)));
        assert!(!only_v4.contains(TapOffloads::TSO6) && !only_v4.contains(TapOffloads::USO4));
        let one_slot = OffloadKeys { scatter_gather: false, ..OffloadKeys::ALL };
        for guest in [OffloadKeys::NONE, one_slot] {
            assert_eq!(offloads_for(guest), TapOffloads::CSUM);
        }
    }
}

//! TAP interfaces of the host, and the bridges they are ports of.
//!
//! A guest's interface has a TAP called as operators expect, `vif5.0`. It is there before the guest
//! is connected, so that a toolstack's script finds it, and it is *kept*: it outlives the daemon, with
//! its place in the bridge and whatever the administrator gave it, and a daemon that is started again
//! takes it up. It goes with the device.

// #syscall daemon openat: /sys, and TAPs

use std::io;
use std::path::Path;

use ringfence_sys::tap::{Tap, TapError};

use crate::netlink::{LinkChange, Netlink};

/// The Ethernet address of a bridge's ports: the highest there is, so that no bridge takes it for its
/// own.
const PORT_MAC: [u8; 6] = [0xfe, 0xff, 0xff, 0xff, 0xff, 0xff];

/// Why an interface is not there.
#[derive(Debug, thiserror::Error)]
pub(super) enum BridgeError {
    /// No TAP.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// There is no such bridge.
    #[error(
        "there is no bridge `{0}`: make it (`ip link add {0} type bridge; ip link set {0} up`), or \
         name another one, by `bridge=` in the guest's configuration or in the daemon's"
    )]
    NoBridge(String),
    /// It exists and is none.
    #[error("`{0}` is no bridge of the kernel's; name one that is")]
    NotABridge(String),
    /// The kernel refused.
    #[error("interface `{name}`: {what}: {source}")]
    Link {
        /// Which.
        name: String,
        /// What was attempted.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
}

/// Octets behind the Ethernet header that fit the bridge.
pub(super) fn mtu_of(interface: &str) -> Option<u16> {
    let text = std::fs::read_to_string(format!("/sys/class/net/{interface}/mtu")).ok()?;
    text.trim_end().parse().ok()
}

/// Makes the TAP `name`, or takes it up where it was kept, as a port of `bridge`: a file for each of its
/// queues, of which one that was kept may have fewer than are asked for.
pub(super) fn make_tap(
    name: &str,
    bridge: Option<&str>,
    mtu: u16,
    queues: usize,
) -> Result<Vec<Tap>, BridgeError> {
    let link = |what| move |source| BridgeError::Link { name: name.to_owned(), what, source };
    let mut netlink = Netlink::open().map_err(link("netlink"))?;
    let bridge = bridge.map(|bridge| bridge_index(&netlink, bridge)).transpose()?;
    let taps = Tap::take_up_queues(name, queues)?;
    let index = netlink.index_of(name).map_err(link("its number"))?;
    // Each by itself: an old kernel's refusal of one must not cost the others.
    let settings = LinkChange {
        mac: bridge.map(|_| PORT_MAC),
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

/// Makes the interface that gives the host a leg on the switch. Its addresses are the administrator's.
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
    // Where /sys is not mounted, the kernel says it soon enough.
    if class.exists() && !class.join("bridge").exists() {
        return Err(BridgeError::NotABridge(bridge.to_owned()));
    }
    Ok(index)
}

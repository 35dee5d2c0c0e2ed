//! Sockets for relays: unconnected sockets of the guest's network namespace, made by a process that is in it.
//!
//! ```text
//! uplink ──FromUplink::Sockets──> launcher or session ──order──> process in the namespace: socket(2)
//!        <──ForwardedPortOrder::Sockets──                       <─report──
//! ```
//!
//! For a guest of `run` that process is the guest's init, for other namespaces one of its own (`pasta::namespace_process`). The
//! uplink connects the sockets to servers of the guest ([`ringfence_uplink::relay`]).

use std::os::fd::{AsFd, OwnedFd};

use ringfence_sandbox::channel::{Channel, ChannelError};
use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, ipproto};

/// Number of TCP and of UDP sockets of each family in one message.
const NUMBERS: [(SocketType, Protocol, usize); 2] =
    [(SocketType::STREAM, ipproto::TCP, 16), (SocketType::DGRAM, ipproto::UDP, 4)];

/// Creates unconnected sockets in the network namespace of this process. A family that it lacks is left out.
pub fn make() -> Vec<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let make =
        |family, kind, protocol| rustix::net::socket_with(family, kind, flags, Some(protocol)).ok();
    let mut made = Vec::new();
    for family in [AddressFamily::INET, AddressFamily::INET6] {
        for (kind, protocol, number) in NUMBERS {
            made.extend((0..number).map_while(|_| make(family, kind, protocol)));
        }
    }
    made
}

/// Answers an order for sockets with `report`.
///
/// # Errors
///
/// Returns the error of the channel.
pub fn report<T: serde::Serialize>(channel: &Channel, report: &T) -> Result<(), ChannelError> {
    let sockets = make();
    let fds: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
    channel.send(report, &fds)
}

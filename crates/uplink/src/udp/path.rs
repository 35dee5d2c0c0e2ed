//! Paths: the MTU of the host's paths, made known to the guest, so that fragmentation is what the guest's programs ask for.
//!
//! The guest's link has a larger MTU than most paths. Its kernel sends each datagram that fits into the MTU it knows of
//! whole and with DF, for programs that discover the path themselves and for all others. The host's kernel knows the path
//! better: it would fragment a long datagram of the others. So the two have to be told apart:
//!
//! | a long datagram of the guest | leaves |
//! |---|---|
//! | without DF, or in fragments | without DF, in fragments if necessary |
//! | with DF, and IPv4's identification is 0: the program has asked for DF | with DF, or not at all |
//! | with DF, and the guest's kernel does not know the path's MTU yet | as that of a program of the host |
//! | with DF, and the guest's kernel knows the MTU: it would have fragmented the datagrams of others | with DF, or not at all |
//!
//! The first datagram to an address makes its path known, whatever its length: an ICMP error with the MTU that quotes an
//! echo reply. The guest's kernel notes the MTU, and no socket of the guest has an error, because nothing was lost.
//!
//! A datagram that leaves "not at all" is reported by an ICMP error about itself, from the router that dropped it or from the
//! guest's gateway for the host. Sockets that have no peer do not know their path: theirs becomes known by such errors alone.

use core::net::IpAddr;
use core::time::Duration;
use std::collections::HashMap;

use ringfence_offload::packet::protocol;

use crate::context::Context;
use crate::flow::FlowKey;
use crate::icmp::error::{self as icmp_error, Message, QuotedPacket, Reason};
use crate::packet::{Fragmentation, Mac, PathDiscovery};

/// Maximum of addresses whose paths are remembered.
const PATHS_MAX: usize = 1024;
/// Time in which datagrams may arrive that the guest sent before it knew the path.
const GRACE: Duration = Duration::from_millis(1);
/// Time for which the guest knows a path. Linux forgets a path's MTU after ten minutes (`mtu_expires`).
const KNOWN: Duration = Duration::from_secs(500);

/// Length of an echo header, in bytes.
const ECHO_LEN: usize = 8;

/// Time in which the guest knows the MTU of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KnownPath {
    from: Duration,
    until: Duration,
}

impl KnownPath {
    /// Path whose MTU is known to nobody.
    pub(super) const UNKNOWN: KnownPath = KnownPath { from: Duration::MAX, until: Duration::MAX };

    /// Returns `true` if the guest has forgotten the path.
    pub(super) fn is_over(&self, now: Duration) -> bool {
        self.until <= now
    }

    /// Returns the handling of a packet by a socket with the handling `current`.
    pub(super) fn discovery(
        &self,
        fragmentation: Fragmentation,
        current: PathDiscovery,
        now: Duration,
    ) -> PathDiscovery {
        match fragmentation {
            Fragmentation::Short => current,
            Fragmentation::Allowed => PathDiscovery::Off,
            Fragmentation::Forbidden => PathDiscovery::Guest,
            Fragmentation::Presumed if self.from <= now => PathDiscovery::Guest,
            Fragmentation::Presumed => PathDiscovery::Host,
        }
    }
}

/// Paths that the guest knows, by the address of the other end.
#[derive(Debug, Default)]
pub(super) struct KnownPaths(HashMap<IpAddr, KnownPath>);

impl KnownPaths {
    /// Returns the path of an association. Makes it known to the guest if it is not yet, and `path_mtu` returns its MTU.
    pub(super) fn make_known(
        &mut self,
        key: &FlowKey,
        mac: Mac,
        path_mtu: impl FnOnce() -> Option<u32>,
        context: &mut Context<'_>,
    ) -> KnownPath {
        let remote = key.remote.ip();
        if let Some(path) = self.0.get(&remote).filter(|path| !path.is_over(context.now)) {
            return *path;
        }
        let Some(mtu) = path_mtu() else { return KnownPath::UNKNOWN };
        let until = context.now + KNOWN;
        let mut path = KnownPath { from: context.now, until };
        if mtu < context.config.mtu.into() {
            tell(&key.guest.ip(), &remote, mac, mtu, context);
            path.from += GRACE;
        }
        // A path that is made known twice does no harm.
        if self.0.len() >= PATHS_MAX {
            self.0.clear();
        }
        self.0.insert(remote, path);
        path
    }
}

/// Tells the guest's kernel the MTU of a path.
fn tell(guest: &IpAddr, remote: &IpAddr, mac: Mac, mtu: u32, context: &mut Context<'_>) {
    let is_v4 = guest.is_ipv4();
    let (kind, code, info) = Reason::TooBig(mtu).numbers(is_v4);
    let from = icmp_error::reporter(*remote, context);
    let message = Message { from, to: *guest, mac, kind, code, info };
    let mut reply = [0; ECHO_LEN];
    let protocol = if is_v4 {
        protocol::ICMP
    } else {
        reply[0] = 129;
        protocol::ICMPV6
    };
    let quoted = QuotedPacket { from: *guest, to: *remote, protocol };
    icmp_error::send_about(&message, quoted, &reply, context);
}

#[cfg(test)]
mod tests;

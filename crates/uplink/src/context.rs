//! What a protocol is handed beside a packet or an event.

use core::net::SocketAddr;
use core::time::Duration;

use crate::access::Refusal;
use crate::config::Config;
use crate::counters::UplinkCounters;
use crate::host::Host;
use crate::replies::Replies;

/// Everything outside a protocol's own state.
pub struct Context<'a> {
    /// What the uplink was told.
    pub config: &'a Config,
    /// The sockets.
    pub host: &'a mut dyn Host,
    /// Frames for the guest that need no socket: resets, errors, answers. They go out in the same turn.
    pub replies: &'a mut Replies,
    /// What is counted.
    pub counters: &'a UplinkCounters,
    /// The time.
    pub now: Duration,
}

impl Context<'_> {
    /// Returns the host's address for a destination of the guest; `None`, and counts, when the guest must
    /// not reach it.
    pub fn outward_to(&self, destination: SocketAddr) -> Option<SocketAddr> {
        // Addresses that stand for the uplink itself are nobody's on the host's network.
        let is_own = |ip| self.config.guest.is_virtual(ip) || self.host.is_own(ip);
        match self.config.access.outward_to(destination, is_own) {
            Ok(outward) => Some(outward),
            Err(Refusal::Unreachable) => {
                self.counters.drop_unreachable.add(1);
                None
            }
            Err(Refusal::Local) => {
                self.counters.drop_local.add(1);
                None
            }
        }
    }
}

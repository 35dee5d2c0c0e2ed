//! What a protocol is handed beside a packet or an event.

use core::time::Duration;

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

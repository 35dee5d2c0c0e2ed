//! Limits and times of TCP.

use core::time::Duration;

use crate::flow::Origin;

/// Limits and times of TCP.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// Connections that the guest began, whatever their state. When there are as many, the longest idle one
    /// makes room.
    pub flows_max: usize,
    /// Connections from outside, to forwarded ports, likewise.
    pub inbound_max: usize,
    /// Connections of the guest that are not yet made. When there are as many, the oldest one makes room.
    /// As many from outside, or half of `inbound_max`, may be so.
    pub half_open_max: usize,
    /// How long a connection may be silent before the guest is asked whether it is still there.
    pub keep_alive_after: Duration,
    /// How long between such questions.
    pub keep_alive_every: Duration,
    /// Questions without an answer after which the connection is reset.
    pub keep_alive_tries: u8,
    /// How long the last acknowledgement of a connection can be asked for once more.
    pub time_wait: Duration,
    /// How long the other end has to answer the guest's SYN.
    pub connect_within: Duration,
    /// The largest window that the guest is offered.
    pub window_max: u32,
    /// Octets under way to the guest, at most.
    pub flight_max: u32,
}

impl TcpConfig {
    /// Connections of one origin that may be half open.
    pub(super) fn half_open_of(&self, origin: Origin) -> usize {
        match origin {
            Origin::Guest => self.half_open_max,
            Origin::Outside => self.half_open_max.min(self.inbound_max / 2).max(1),
        }
    }
}

impl Default for TcpConfig {
    fn default() -> Self {
        TcpConfig {
            flows_max: 65_536,
            inbound_max: 65_536,
            half_open_max: 4096,
            keep_alive_after: Duration::from_secs(7200),
            keep_alive_every: Duration::from_secs(75),
            keep_alive_tries: 9,
            time_wait: Duration::from_secs(2),
            connect_within: Duration::from_secs(130),
            window_max: 8 << 20,
            flight_max: 4 << 20,
        }
    }
}

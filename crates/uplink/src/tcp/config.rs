//! TCP configuration: limits and timeouts of the uplink's TCP connections.

use core::time::Duration;

use crate::flow::Origin;

/// Limits and timeouts of the TCP connections of one engine.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// Maximum of connections that the guest opened, in any state. At the maximum, a new connection evicts
    /// the one that is idle longest.
    pub flows_max: usize,
    /// Maximum of connections from outside, to forwarded ports. The same eviction rule applies.
    pub inbound_max: usize,
    /// Maximum of half-open connections that the guest opened. At the maximum, a new connection evicts the
    /// oldest one. For connections from outside the maximum is the lower of this and half of `inbound_max`.
    pub half_open_max: usize,
    /// Idle time after which the guest receives the first keep-alive probe.
    pub keep_alive_after: Duration,
    /// Idle time after which a guest that has closed its direction receives one. A guest of Linux forgets such a connection
    /// after 60 s, unless a process still reads from it, and then answers the probe by a reset.
    pub half_closed_after: Duration,
    /// Interval between keep-alive probes.
    pub keep_alive_every: Duration,
    /// Number of unanswered keep-alive probes after which the connection is reset.
    pub keep_alive_tries: u8,
    /// Time for which a closed connection still answers a repeated FIN.
    pub time_wait: Duration,
    /// Time the other end has to accept a connection that the guest opens.
    pub connect_within: Duration,
    /// Time an upstream proxy has to open a connection, from the guest's SYN on.
    pub proxy_within: Duration,
    /// Maximum of the window that is offered to the guest, in bytes.
    pub window_max: u32,
    /// Maximum of bytes in flight to the guest.
    pub flight_max: u32,
    /// Maximum of the guest's bytes, of all connections, that wait for room in their sockets.
    pub backlog_max: usize,
}

impl TcpConfig {
    /// Returns the maximum of half-open connections of one origin.
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
            half_closed_after: Duration::from_secs(61),
            keep_alive_every: Duration::from_secs(75),
            keep_alive_tries: 9,
            time_wait: Duration::from_secs(2),
            connect_within: Duration::from_secs(130),
            proxy_within: Duration::from_secs(60),
            window_max: 8 << 20,
            flight_max: 4 << 20,
            backlog_max: 16 << 20,
        }
    }
}

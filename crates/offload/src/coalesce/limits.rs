//! Limits of a coalescer.

/// Limits of a coalescer: enabled protocols and sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum frames in a round.
    pub frames: usize,
    /// Maximum open flows, rounded up to whole sets of [`SET`](super::SET).
    pub flows: usize,
    /// Maximum length of a joined frame in bytes, headers included; IP's own limit applies too.
    pub packet_len: u32,
    /// Maximum frames in one packet.
    pub packet_frames: u32,
    /// Enables TCP over IPv4: the egress port takes such super-packets.
    pub tcp_v4: bool,
    /// Enables TCP over IPv6.
    pub tcp_v6: bool,
    /// Enables UDP. Linux disables it by default, because not every receiver expects joined datagrams.
    pub udp: bool,
}

impl Default for Limits {
    /// Rounds of 64 frames, 64 flows, TCP only, frames of at most 65535 bytes.
    fn default() -> Self {
        Self {
            frames: 64,
            flows: 64,
            packet_len: 65_535,
            packet_frames: 64,
            tcp_v4: true,
            tcp_v6: true,
            udp: false,
        }
    }
}

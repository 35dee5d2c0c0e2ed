//! Port counters: frames, bytes, and every dropped frame by reason.
//!
//! Directions are those of the port: it *received* ingress frames (from a guest, or from the host's
//! kernel) and *sent* egress frames. Only the datapath worker that owns the port writes the counters. Any
//! thread can read them at any time.

use ringfence_offload::OffloadMeta;
use ringfence_sys::counters::Counter;

macro_rules! drop_reasons {
    ($($(#[$doc:meta])* $variant:ident = $name:literal;)*) => {
        /// Reasons for which a frame is dropped.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum DropReason { $($(#[$doc])* $variant,)* }

        impl DropReason {
            /// All reasons, in the order of their counters.
            pub const ALL: &'static [DropReason] = &[$(DropReason::$variant,)*];

            /// Returns the counter's name.
            pub fn name(self) -> &'static str {
                match self { $(DropReason::$variant => concat!("drop_", $name),)* }
            }
        }
    };
}

drop_reasons! {
    // Counted at the ingress port.

    /// Frame shorter than an Ethernet header.
    Runt = "runt";
    /// Source address that is a group address or zero.
    BadSource = "bad_source";
    /// Source address that belongs to another port, or is not the one assigned to this port.
    SpoofedSource = "spoofed_source";
    /// IP source, ARP sender or neighbor discovery target that is not an address of this port.
    SpoofedAddress = "spoofed_address";
    /// Router message (advertisement, redirect) from a port that must not send any.
    RouterMessage = "router_message";
    /// DHCP server message from a port that must not send any.
    DhcpServer = "dhcp_server";
    /// Headers that the address filter cannot parse: malformed, too deep, or neighbor discovery in a
    /// fragment.
    BadHeaders = "bad_headers";
    /// Protocol whose addresses the address filter does not know.
    UnknownProtocol = "unknown_protocol";
    /// Destination 01:80:C2:00:00:00 to 0F, which no bridge forwards (IEEE 802.1Q, 8.6.3).
    LinkLocal = "link_local";
    /// Destination behind the ingress port.
    SamePort = "same_port";
    /// No other port to forward to.
    NoDestination = "no_destination";
    /// Frame longer than the ingress port's maximum.
    Oversize = "oversize";
    /// Offload metadata of the sender that breaks a rule.
    BadOffload = "bad_offload";
    /// Bytes that could not be read from the peer.
    Unreadable = "unreadable";
    /// Request of the peer that breaks a rule of the protocol.
    BadRequest = "bad_request";

    /// Full mailbox of the worker that owns the egress queue.
    HandoffFull = "relay_full";

    // Counted at the egress port.

    /// No room at the receiver.
    PortFull = "port_full";
    /// Receiver whose link is down.
    LinkDown = "link_down";
    /// Multicast group that the receiver did not add.
    MulticastFilter = "multicast_filter";
    /// Frame longer than the receiver accepts.
    TooLong = "too_long";
    /// Super-packet that cannot be segmented for the receiver.
    GsoUnsupported = "gso_unsupported";
    /// Super-packet with more segments than one round allows.
    SegmentLimit = "segment_limit";
    /// Blank checksum that could not be computed.
    ChecksumUnfinished = "checksum_unfinished";
    /// Bytes that could not be written to the receiver.
    Unwritable = "unwritable";
    /// Frame that the receiver refused.
    Refused = "refused";
}

/// Running totals of one port.
#[derive(Debug)]
pub struct PortCounters {
    pub rx_frames: Counter,
    /// Received bytes, Ethernet header included.
    pub rx_bytes: Counter,
    pub tx_frames: Counter,
    /// Sent bytes, Ethernet header included.
    pub tx_bytes: Counter,
    /// Sent super-packets.
    pub tx_gso: Counter,
    /// Frames sent in more than one slot of a ring.
    pub tx_chained: Counter,
    /// Frames sent with a blank checksum.
    pub tx_blank: Counter,
    /// Bytes that this port copied from or to lent memory, headers included. The platform's counters have
    /// the bytes that the platform copied.
    pub copied_bytes: Counter,
    /// Super-packets sent whole.
    pub frames_whole: Counter,
    /// Super-packets segmented for this port.
    pub frames_segmented: Counter,
    /// Segments made of super-packets for this port.
    pub segments_made: Counter,
    pub checksums_computed: Counter,
    /// Frames coalesced into larger ones for this port.
    pub frames_coalesced: Counter,
    /// Times that backpressure of this port began.
    pub hold_ups: Counter,
    /// Wake-ups of the worker by an event of this port.
    pub wakeups: Counter,
    /// Wake-ups after which there was no work.
    pub spurious_wakeups: Counter,
    /// Times that the worker ignored this port's events for a while after spurious wake-ups.
    pub throttles: Counter,
    /// Times that the rate limit delayed the peer.
    pub rate_limited: Counter,
    /// Times that the peer was declared stalled because it accepted no frames.
    pub stalls: Counter,
    pub stall_ends: Counter,
    drops: [Counter; DropReason::ALL.len()],
}

impl Default for PortCounters {
    fn default() -> Self {
        PortCounters {
            rx_frames: Counter::default(),
            rx_bytes: Counter::default(),
            tx_frames: Counter::default(),
            tx_bytes: Counter::default(),
            tx_gso: Counter::default(),
            tx_chained: Counter::default(),
            tx_blank: Counter::default(),
            copied_bytes: Counter::default(),
            frames_whole: Counter::default(),
            frames_segmented: Counter::default(),
            segments_made: Counter::default(),
            checksums_computed: Counter::default(),
            frames_coalesced: Counter::default(),
            hold_ups: Counter::default(),
            wakeups: Counter::default(),
            spurious_wakeups: Counter::default(),
            throttles: Counter::default(),
            rate_limited: Counter::default(),
            stalls: Counter::default(),
            stall_ends: Counter::default(),
            drops: core::array::from_fn(|_| Counter::default()),
        }
    }
}

impl PortCounters {
    /// Counts received frames and their bytes.
    #[inline]
    pub fn received(&self, frames: u64, bytes: u64) {
        self.rx_frames.add(frames);
        self.rx_bytes.add(bytes);
    }

    /// Counts sent frames and their bytes.
    #[inline]
    pub fn sent(&self, frames: u64, bytes: u64) {
        self.tx_frames.add(frames);
        self.tx_bytes.add(bytes);
    }

    /// Counts the offloads that a sent frame uses.
    #[inline]
    pub fn sent_with(&self, meta: OffloadMeta, slots: usize) {
        if meta.gso.is_some() {
            self.tx_gso.add(1);
        }
        if slots > 1 {
            self.tx_chained.add(1);
        }
        if meta.checksum.place().is_some() {
            self.tx_blank.add(1);
        }
    }

    /// Counts one dropped frame.
    #[inline]
    pub fn dropped(&self, reason: DropReason) {
        self.dropped_many(reason, 1);
    }

    /// Counts `n` dropped frames.
    #[inline]
    pub fn dropped_many(&self, reason: DropReason, n: u64) {
        // The discriminants are the indices of `ALL`.
        if let Some(counter) = self.drops.get(reason as usize) {
            counter.add(n);
        }
    }

    /// Returns the number of frames dropped for `reason`.
    pub fn drops(&self, reason: DropReason) -> u64 {
        self.drops.get(reason as usize).map_or(0, Counter::get)
    }

    /// Returns the number of dropped frames.
    pub fn drops_total(&self) -> u64 {
        self.drops.iter().map(Counter::get).sum()
    }

    /// Returns the name and the value of each counter.
    pub fn named(&self) -> Vec<(&'static str, u64)> {
        let totals = [
            ("rx_frames", &self.rx_frames),
            ("rx_bytes", &self.rx_bytes),
            ("tx_frames", &self.tx_frames),
            ("tx_bytes", &self.tx_bytes),
            ("tx_gso", &self.tx_gso),
            ("tx_chained", &self.tx_chained),
            ("tx_blank", &self.tx_blank),
            ("copied_bytes", &self.copied_bytes),
            ("frames_whole", &self.frames_whole),
            ("frames_segmented", &self.frames_segmented),
            ("segments_made", &self.segments_made),
            ("checksums_computed", &self.checksums_computed),
            ("frames_coalesced", &self.frames_coalesced),
            ("hold_ups", &self.hold_ups),
            ("wakeups", &self.wakeups),
            ("spurious_wakeups", &self.spurious_wakeups),
            ("throttles", &self.throttles),
            ("rate_limited", &self.rate_limited),
            ("stalls", &self.stalls),
            ("stall_ends", &self.stall_ends),
        ];
        let totals = totals.into_iter().map(|(name, counter)| (name, counter.get()));
        let drops = DropReason::ALL.iter().map(|&reason| (reason.name(), self.drops(reason)));
        totals.chain(drops).collect()
    }
}

/// Numbers of a port that rise and fall, at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PortLevels {
    /// Requests to send that the peer posted and the port has not taken.
    pub requests_waiting: u64,
    /// Buffers for frames that the peer posted and the port has not used.
    pub buffers_posted: u64,
}

impl PortLevels {
    /// Adds the levels of another part of the port.
    pub fn add(&mut self, other: PortLevels) {
        self.requests_waiting = self.requests_waiting.saturating_add(other.requests_waiting);
        self.buffers_posted = self.buffers_posted.saturating_add(other.buffers_posted);
    }

    /// Returns the name and the value of each level.
    pub fn named(&self) -> [(&'static str, u64); 2] {
        [("requests_waiting", self.requests_waiting), ("buffers_posted", self.buffers_posted)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn drop_reasons_have_distinct_counters_and_names() {
        let counters = PortCounters::default();
        for (n, &reason) in (1..).zip(DropReason::ALL) {
            counters.dropped_many(reason, n);
        }
        for (n, &reason) in (1..).zip(DropReason::ALL) {
            assert_eq!(counters.drops(reason), n, "{reason:?}");
        }
        let named = counters.named();
        let names: HashSet<_> = named.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), named.len(), "names differ");
        assert_eq!(counters.drops_total(), (1..=DropReason::ALL.len() as u64).sum());
    }
}

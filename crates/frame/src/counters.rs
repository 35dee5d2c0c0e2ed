//! What is counted at a port: frames, bytes, and every frame that was dropped, by reason.
//!
//! Directions are the port's: *received* came in by it (from a guest, from the host's kernel),
//! *sent* went out by it. The counters are written by the data-plane thread alone and may be read
//! by any thread at any time.

use ringfence_offload::OffloadMeta;
use ringfence_sys::counters::Counter;

macro_rules! drop_reasons {
    ($($(#[$doc:meta])* $variant:ident = $name:literal;)*) => {
        /// Why a frame went no further.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum DropReason { $($(#[$doc])* $variant,)* }

        impl DropReason {
            /// All reasons, in the order of their counters.
            pub const ALL: &'static [DropReason] = &[$(DropReason::$variant,)*];

            /// The counter's name.
            pub fn name(self) -> &'static str {
                match self { $(DropReason::$variant => concat!("drop_", $name),)* }
            }
        }
    };
}

drop_reasons! {
    // Counted at the port by which the frame came.

    /// Shorter than an Ethernet header.
    Runt = "runt";
    /// The source address is a group address or zero.
    BadSource = "bad_source";
    /// The source address belongs to another port, or is not the one this port must use.
    SpoofedSource = "spoofed_source";
    /// The IP source, the ARP sender or the neighbour discovery target is not an address of this port.
    SpoofedAddress = "spoofed_address";
    /// A router's message (advertisement, redirect) from a port that may not send any.
    RouterMessage = "router_message";
    /// A DHCP server's message from a port that may not send any.
    DhcpServer = "dhcp_server";
    /// The address filter cannot read the headers: malformed, too deep, or neighbour discovery in a
    /// fragment.
    BadHeaders = "bad_headers";
    /// A protocol whose addresses the address filter does not know.
    UnknownProtocol = "unknown_protocol";
    /// To 01:80:C2:00:00:00 to 0F, which no bridge forwards (IEEE 802.1Q, 8.6.3).
    LinkLocal = "link_local";
    /// The destination is behind the port by which the frame came.
    SamePort = "same_port";
    /// There is no other port.
    NoDestination = "no_destination";
    /// Longer than the port said it would send.
    Oversize = "oversize";
    /// The sender's offload request breaks a rule.
    BadOffload = "bad_offload";
    /// The bytes could not be fetched from the peer.
    Unreadable = "unreadable";
    /// The peer's request breaks a rule of the protocol.
    BadRequest = "bad_request";

    /// Too much waits for the thread that serves the queue it goes to.
    RelayFull = "relay_full";

    // Counted at the port by which the frame was to leave.

    /// The receiver has no room.
    PortFull = "port_full";
    /// The receiver's link is down.
    LinkDown = "link_down";
    /// The receiver asked for multicast control, and not for this group.
    MulticastFilter = "multicast_filter";
    /// Longer than the receiver takes.
    TooLong = "too_long";
    /// A super-packet for a receiver that cannot split it.
    GsoUnsupported = "gso_unsupported";
    /// A super-packet of more segments than are made in one turn.
    SegmentLimit = "segment_limit";
    /// A blank checksum that could not be finished.
    ChecksumUnfinished = "checksum_unfinished";
    /// The bytes could not be written to the receiver.
    Unwritable = "unwritable";
    /// The receiver refused the frame.
    Refused = "refused";
}

/// Running totals of one port.
#[derive(Debug)]
pub struct PortCounters {
    /// Frames received.
    pub rx_frames: Counter,
    /// Bytes received, Ethernet header included.
    pub rx_bytes: Counter,
    /// Frames sent.
    pub tx_frames: Counter,
    /// Bytes sent, Ethernet header included.
    pub tx_bytes: Counter,
    /// Frames sent that say how to split them.
    pub tx_gso: Counter,
    /// Frames sent in more than one slot of a ring.
    pub tx_chained: Counter,
    /// Frames sent whose checksum is blank.
    pub tx_blank: Counter,
    /// Bytes this port itself copied from or to lent memory, headers included; what the platform
    /// copied for it is in the platform's counters.
    pub copied_bytes: Counter,
    /// Super-packets that left whole.
    pub frames_whole: Counter,
    /// Super-packets that were split for this port.
    pub frames_segmented: Counter,
    /// What they were split into.
    pub segments_made: Counter,
    /// Checksums that were finished for this port.
    pub checksums_computed: Counter,
    /// Frames that became part of a larger one for this port.
    pub frames_coalesced: Counter,
    /// Times others began to wait because this port had no room.
    pub hold_ups: Counter,
    /// Times this port's events ended the data plane's sleep.
    pub wakeups: Counter,
    /// Of these, the ones after which there was nothing to do.
    pub spurious_wakeups: Counter,
    /// Times its events were ignored for a while because they kept announcing nothing.
    pub throttles: Counter,
    /// Times the peer had to wait for credit, its rate being limited.
    pub rate_limited: Counter,
    /// Times the peer came to count as stalled, because it took no frames.
    pub stalls: Counter,
    /// Of these, the ones that are over.
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
    /// Counts frames that came in.
    #[inline]
    pub fn received(&self, frames: u64, bytes: u64) {
        self.rx_frames.add(frames);
        self.rx_bytes.add(bytes);
    }

    /// Counts frames that went out.
    #[inline]
    pub fn sent(&self, frames: u64, bytes: u64) {
        self.tx_frames.add(frames);
        self.tx_bytes.add(bytes);
    }

    /// Counts the offloads that a frame which went out makes use of.
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

    /// Counts one frame that went no further.
    #[inline]
    pub fn dropped(&self, reason: DropReason) {
        self.dropped_many(reason, 1);
    }

    /// Counts `n` frames that went no further.
    #[inline]
    pub fn dropped_many(&self, reason: DropReason, n: u64) {
        // The discriminants are the places in `ALL`.
        if let Some(counter) = self.drops.get(reason as usize) {
            counter.add(n);
        }
    }

    /// Frames dropped for `reason`.
    pub fn drops(&self, reason: DropReason) -> u64 {
        self.drops.get(reason as usize).map_or(0, Counter::get)
    }

    /// Frames dropped for any reason.
    pub fn drops_total(&self) -> u64 {
        self.drops.iter().map(Counter::get).sum()
    }

    /// Name and value of each counter.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn each_reason_has_a_counter_of_its_own() {
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

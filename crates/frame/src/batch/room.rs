//! Room: the free slots at the egress port, which limit the frames that a batch receives.

use ringfence_memory::PAGE_SIZE;

use ringfence_offload::Gso;

use crate::capabilities::{GsoOffload, PortCapabilities};

/// Estimate of the maximum header length of a segment in bytes, to compute the number of segments.
const HEADERS: usize = 128;

/// Maximum cost of one frame in slots: half a ring, so that every frame fits an empty ring.
const COST_MAX: usize = 128;

/// Free slots of a page each at the egress port, and the cost of frames in such slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    slots: usize,
    /// Maximum length in bytes of a frame that goes whole, and of one without extra info.
    whole: usize,
    plain: usize,
    /// Length in bytes of one segment of a longer frame, and the slots for one segment.
    piece: usize,
    piece_slots: usize,
    /// Maximum length in bytes of a frame that a sender waits for room for.
    awaited: usize,
    /// Super-packets that go whole.
    gso: GsoOffload,
}

impl Room {
    /// Room without a limit.
    pub const UNBOUNDED: Room = Room {
        slots: usize::MAX,
        whole: usize::MAX,
        plain: usize::MAX,
        piece: 1,
        piece_slots: 1,
        awaited: usize::MAX,
        gso: GsoOffload { tcp_v4: true, tcp_v6: true, ecn: true, udp: true },
    };

    /// Makes the room of `slots` free slots at a port with the capabilities `into`.
    pub fn of(slots: usize, into: &PortCapabilities) -> Room {
        if slots == usize::MAX {
            return Room::UNBOUNDED;
        }
        let plain = into.frame_max();
        Room {
            slots,
            whole: into.longest(),
            plain,
            piece: plain.saturating_sub(HEADERS).max(1),
            piece_slots: plain.div_ceil(PAGE_SIZE).max(1),
            awaited: usize::MAX,
            gso: into.gso,
        }
    }

    /// Limits the wait for room to that for the longest frame that goes whole. A sender that does not know the length
    /// of its next frame would else wait for the segments of the longest frame there is. A port with fewer slots than
    /// that never has them.
    #[must_use]
    pub fn awaiting_whole_frames(self) -> Room {
        Room { awaited: self.whole, ..self }
    }

    /// Returns the estimated number of slots for a frame of `len` bytes. A split frame takes more if the
    /// sender requested segments shorter than the maximum.
    #[inline]
    pub fn cost(&self, len: usize) -> usize {
        if len <= self.plain {
            return len.div_ceil(PAGE_SIZE).max(1);
        }
        if len <= self.whole {
            return len.div_ceil(PAGE_SIZE) + 1;
        }
        len.div_ceil(self.piece).saturating_mul(self.piece_slots).min(COST_MAX)
    }

    /// Returns the number of slots that a sender with a frame of at most `len` bytes waits for.
    #[inline]
    pub fn needed(&self, len: usize) -> usize {
        self.cost(len.min(self.awaited))
    }

    /// Returns true if a frame of at most `len` bytes need not wait.
    #[inline]
    pub fn fits(&self, len: usize) -> bool {
        self.slots == usize::MAX || self.needed(len) <= self.slots
    }

    /// Subtracts the slots for a frame of `len` bytes, down to zero. `gso` is its segmentation request, for a
    /// frame that does not go whole.
    #[inline]
    pub fn take(&mut self, len: usize, gso: Option<Gso>) {
        if self.slots == usize::MAX {
            return;
        }
        let cost = match gso {
            Some(gso) if !self.gso.takes(gso.kind, gso.ecn) => {
                let size = usize::from(gso.size).max(1);
                let slots = (size + HEADERS).div_ceil(PAGE_SIZE);
                len.div_ceil(size).saturating_mul(slots).min(COST_MAX)
            }
            _ => self.cost(len),
        };
        self.slots = self.slots.saturating_sub(cost);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capabilities::ChecksumOffload;
    use ringfence_offload::GsoKind;

    fn whole(mtu: u16) -> PortCapabilities {
        PortCapabilities {
            checksum: ChecksumOffload::Any,
            gso: GsoOffload { tcp_v4: true, ..GsoOffload::default() },
            scatter_gather: true,
            mtu,
        }
    }

    #[test]
    fn cost_of_super_packet_is_pages_and_one_extra_slot() {
        let room = Room::of(20, &whole(1500));
        assert_eq!([60, 1514, 4096, 4097, 65_000].map(|len| room.cost(len)), [1, 1, 2, 3, 17]);
        // Without a segmentation request there is no extra info.
        let jumbo = Room::of(20, &whole(16_436));
        assert_eq!([4096, 4097, 16_450, 16_455].map(|len| jumbo.cost(len)), [1, 2, 5, 6]);
    }

    #[test]
    fn cost_of_split_frame_is_slots_of_its_segments() {
        let room = Room::of(256, &PortCapabilities::plain(1500));
        assert_eq!(room.cost(1518), 1);
        // 46 segments of 1448 bytes of payload.
        assert_eq!(room.cost(65_226), 47);
        let small = Room::of(256, &PortCapabilities::plain(576));
        assert_eq!(small.cost(65_226), COST_MAX, "fits an empty ring all the same");
    }

    #[test]
    fn wait_is_limited_to_longest_frame_that_goes_whole() {
        let longest = 65_553;
        for (into, slots) in [(PortCapabilities::plain(1500), 1), (whole(1500), 17)] {
            let room = Room::of(18, &into);
            assert!(!room.fits(longest), "48 segments");
            let waits = room.awaiting_whole_frames();
            assert!(waits.fits(longest));
            assert_eq!(waits.needed(longest), slots);
            assert_eq!(waits.cost(longest), 48, "a frame takes what it takes");
            assert!(!Room::of(slots - 1, &into).awaiting_whole_frames().fits(longest));
        }
        assert!(Room::UNBOUNDED.awaiting_whole_frames().fits(usize::MAX));
    }

    #[test]
    fn room_decreases_by_cost_of_each_frame() {
        let mut room = Room::of(18, &whole(1500));
        assert!(room.fits(65_000));
        let gso = |kind, size| Some(Gso { kind, ecn: false, size });
        room.take(65_000, gso(GsoKind::TcpV4, 1448));
        assert!(room.fits(60) && !room.fits(1600));
        room.take(65_000, None);
        assert!(!room.fits(60), "more than there was");
        let mut endless = Room::UNBOUNDED;
        endless.take(1 << 40, None);
        assert!(endless.fits(usize::MAX));
        assert_eq!(Room::of(usize::MAX, &whole(1500)), Room::UNBOUNDED);
        // Neither UDP nor TCP over IPv6 goes whole: each segment takes its own slots.
        for (kind, size, slots) in
            [(GsoKind::Udp, 1000, 61), (GsoKind::Udp, 8, 128), (GsoKind::TcpV6, 5000, 26)]
        {
            let mut room = Room::of(256, &whole(1500));
            room.take(60_500, gso(kind, size));
            assert_eq!(room.slots, 256 - slots, "{kind:?} {size}");
        }
    }
}

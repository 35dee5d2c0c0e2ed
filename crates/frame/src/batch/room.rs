//! How much a batch may take on because of where its frames go.

use ringfence_memory::PAGE_SIZE;

use ringfence_offload::Gso;

use crate::port::{GsoOffload, PortCapabilities};

/// Bytes of headers that each segment of a super-packet has at most, in a reckoning of how many
/// there will be.
const HEADERS: usize = 128;

/// What one frame is reckoned to need at most: half a ring, so that every frame fits an empty one.
const COST_MAX: usize = 128;

/// Free slots at the port that frames go to, each of a page, and what a frame takes of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    slots: usize,
    /// Bytes of the longest frame that goes whole, and of the longest that has no extra info.
    whole: usize,
    plain: usize,
    /// Bytes of a longer frame that go in one segment, and the slots that this takes.
    piece: usize,
    piece_slots: usize,
    /// Super-packets that go whole.
    gso: GsoOffload,
}

impl Room {
    /// Room for everything.
    pub const UNBOUNDED: Room = Room {
        slots: usize::MAX,
        whole: usize::MAX,
        plain: usize::MAX,
        piece: 1,
        piece_slots: 1,
        gso: GsoOffload { tcp_v4: true, tcp_v6: true, ecn: true, udp: true },
    };

    /// `slots` free slots at a port that takes `into`.
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
            gso: into.gso,
        }
    }

    /// Slots that a frame of `len` bytes takes. What is split takes more if the sender asked for
    /// segments shorter than they could be.
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

    /// Whether a frame of `len` bytes fits.
    #[inline]
    pub fn fits(&self, len: usize) -> bool {
        self.slots == usize::MAX || self.cost(len) <= self.slots
    }

    /// Takes the place of a frame of `len` bytes, or what is left if that is less. `gso` is how it is
    /// to be split if it does not go whole.
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
    use crate::port::ChecksumOffload;
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
    fn a_super_packet_takes_its_pages_and_a_slot_for_its_extra_info() {
        let room = Room::of(20, &whole(1500));
        assert_eq!([60, 1514, 4096, 4097, 65_000].map(|len| room.cost(len)), [1, 1, 2, 3, 17]);
        // Without an order to segment there is no extra info.
        let jumbo = Room::of(20, &whole(16_436));
        assert_eq!([4096, 4097, 16_450, 16_455].map(|len| jumbo.cost(len)), [1, 2, 5, 6]);
    }

    #[test]
    fn what_is_split_takes_as_many_slots_as_it_has_segments() {
        let room = Room::of(256, &PortCapabilities::plain(1500));
        assert_eq!(room.cost(1518), 1);
        // 46 segments of 1448 bytes of payload.
        assert_eq!(room.cost(65_226), 47);
        let small = Room::of(256, &PortCapabilities::plain(576));
        assert_eq!(small.cost(65_226), COST_MAX, "fits an empty ring all the same");
    }

    #[test]
    fn room_is_used_up() {
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
        // Datagrams are not taken whole, nor is TCP over IPv6: a slot each.
        for (kind, size, slots) in
            [(GsoKind::Udp, 1000, 61), (GsoKind::Udp, 8, 128), (GsoKind::TcpV6, 5000, 26)]
        {
            let mut room = Room::of(256, &whole(1500));
            room.take(60_500, gso(kind, size));
            assert_eq!(room.slots, 256 - slots, "{kind:?} {size}");
        }
    }
}

//! Layout of a ring, and the arithmetic of its indices.

/// Length of the ring header in bytes.
pub const HEADER_BYTES: usize = 64;

/// Entry size and entry count of one kind of ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingLayout {
    entry: usize,
    count: u32,
}

impl RingLayout {
    /// Returns the layout of a ring of `ring_bytes` with requests and responses of the given sizes, the
    /// union aligned to `align`. The count is the largest power of two that fits.
    ///
    /// Returns `None` if no entry fits or `align` is no power of two.
    pub const fn new(
        ring_bytes: usize,
        request: usize,
        response: usize,
        align: usize,
    ) -> Option<RingLayout> {
        if !align.is_power_of_two() || ring_bytes <= HEADER_BYTES || ring_bytes > 1 << 24 {
            return None;
        }
        let larger = if request > response { request } else { response };
        let entry = (larger + align - 1) & !(align - 1);
        if entry == 0 || entry > ring_bytes - HEADER_BYTES {
            return None;
        }
        let fit = (ring_bytes - HEADER_BYTES) / entry;
        let count = 1u32 << fit.ilog2();
        Some(RingLayout { entry, count })
    }

    /// Returns the number of entries, a power of two.
    pub const fn count(self) -> u32 {
        self.count
    }

    /// Returns the distance in bytes from one entry to the next.
    pub const fn entry_bytes(self) -> usize {
        self.entry
    }

    /// Returns the number of entries from the free-running `index` to the ring's end.
    #[inline]
    pub fn until_end(self, index: u32) -> u32 {
        self.count - (index & (self.count - 1))
    }

    /// Returns the byte offset of the entry at the free-running `index`.
    #[inline]
    pub fn offset(self, index: u32) -> usize {
        HEADER_BYTES + (index & (self.count - 1)) as usize * self.entry
    }
}

/// Layout of the netif transmit ring, one page: 256 entries of 12 bytes.
pub const NETIF_TX: RingLayout = RingLayout { entry: 12, count: 256 };
/// Layout of the netif receive ring, one page: 256 entries of 8 bytes.
pub const NETIF_RX: RingLayout = RingLayout { entry: 8, count: 256 };
/// Layout of the netif control ring, one page: 128 entries of 16 bytes.
pub const NETIF_CTRL: RingLayout = RingLayout { entry: 16, count: 128 };

/// Producer index of the peer further ahead than the ring has entries (XSA-39).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the peer announced {announced} entries in a ring of {count}")]
pub struct ProducerOverflow {
    /// Distance that the peer claims.
    pub announced: u32,
    /// Entries of the ring.
    pub count: u32,
}

/// Returns `true` if a producer that moved from `old` to `new` must notify a consumer that requested an
/// event at index `event` (`RING_PUSH_*_AND_CHECK_NOTIFY`).
#[inline]
pub fn passes_event(old: u32, new: u32, event: u32) -> bool {
    new.wrapping_sub(event) < new.wrapping_sub(old)
}

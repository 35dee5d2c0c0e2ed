//! Fast receive paths: the condition and the result that netback and netfront share.

use ringfence_memory::PAGE_SIZE;
use ringfence_wire::netif::PACKET_MIN;

/// Maximum number of packets of a batch.
pub(crate) const BATCH_MAX: usize = 64;

/// Result of a fast receive path.
#[derive(Default)]
pub(crate) struct FastRun {
    /// Number of slots consumed.
    pub(crate) looked: usize,
    /// Number of frames added, and their bytes.
    pub(crate) frames: usize,
    pub(crate) bytes: u64,
    /// Set if nothing is left for the slow path in this round.
    pub(crate) ends: bool,
}

impl FastRun {
    /// Counts `taken` packets of a batch of `validated`, of at most `most` slots. Returns `true` if the run
    /// is over: nothing is left, the batch of frames is full, or the next slot needs the slow path.
    #[inline]
    pub(crate) fn advance(&mut self, taken: u32, validated: usize, most: usize) -> bool {
        let short = validated < BATCH_MAX;
        self.looked += taken as usize;
        self.ends |= short && validated == most;
        short || self.ends
    }
}

/// Returns `true` if a slot qualifies for the fast path: one whole packet inside its page. `plain` is set if
/// the slot has no flag that needs the slow path.
#[inline]
pub(crate) fn qualifies(plain: bool, offset: usize, len: usize) -> bool {
    plain && len >= PACKET_MIN as usize && offset + len <= PAGE_SIZE
}

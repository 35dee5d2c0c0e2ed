//! Header buffers: small buffers for the first bytes of packets, several in a page.
//!
//! The fewer pages a frontend stages, the less its peer must keep mapped. 16 pages hold the first 256 bytes
//! of as many packets as the ring has slots. A packet of at most 256 bytes lies in its header buffer only.

use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_platform::{Gref, Lease};
use ringfence_wire::numbers::bounded;

/// Number of pages of a queue that are divided into header buffers.
pub(super) const HEAD_PAGES: usize = 16;
/// Size of a header buffer in bytes.
pub(super) const HEAD: usize = 256;
/// Number of header buffers in a page.
const PLACES: usize = PAGE_SIZE / HEAD;

/// Stack of header buffers. The one released last is used first, since it is in the caches.
pub(super) struct Heads {
    pages: Vec<(Gref, LentSlice)>,
    free: Vec<u16>,
}

/// Header buffer of a packet.
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    pub(super) gref: Gref,
    pub(super) page: &'a LentSlice,
    pub(super) offset: u16,
}

impl Heads {
    pub(super) fn new(leases: &[Lease]) -> Heads {
        let pages: Vec<_> = leases.iter().map(|l| (l.gref(), l.memory().clone())).collect();
        let count = bounded(pages.len() * PLACES, u16::MAX);
        Heads { pages, free: (0..count).rev().collect() }
    }

    /// Returns the number of header buffers, free or not.
    pub(super) fn len(&self) -> usize {
        self.pages.len() * PLACES
    }

    #[inline]
    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    #[inline]
    pub(super) fn take(&mut self) -> Option<u16> {
        self.free.pop()
    }

    #[inline]
    pub(super) fn give_back(&mut self, place: u16) {
        self.free.push(place);
    }

    /// Returns the location of a header buffer.
    #[inline]
    pub(super) fn get(&self, place: u16) -> Option<Head<'_>> {
        let (page, within) = (usize::from(place) / PLACES, usize::from(place) % PLACES);
        let (gref, page) = self.pages.get(page)?;
        // Less than a page.
        let offset = bounded(within * HEAD, u16::MAX);
        Some(Head { gref: *gref, page, offset })
    }
}

//! Places for the first bytes of packets, several in a page.
//!
//! Pages that stay mapped are worth the more, the fewer of them there are: 16 pages hold the first 256
//! bytes of as many packets as the ring has slots. A short packet lies there whole.

use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_platform::{Gref, Lease};

/// Pages of a queue that are cut into places.
pub(super) const HEAD_PAGES: usize = 16;
/// Bytes of a place.
pub(super) const HEAD: usize = 256;
/// Places of a page.
const PLACES: usize = PAGE_SIZE / HEAD;

/// The places, of which the last that was given back is the first to be taken: it is in the caches.
pub(super) struct Heads {
    pages: Vec<(Gref, LentSlice)>,
    free: Vec<u16>,
}

/// One of them.
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    pub(super) gref: Gref,
    pub(super) page: &'a LentSlice,
    pub(super) offset: u16,
}

impl Heads {
    pub(super) fn new(leases: &[Lease]) -> Heads {
        let pages: Vec<_> = leases.iter().map(|l| (l.gref(), l.memory().clone())).collect();
        let count = u16::try_from(pages.len() * PLACES).unwrap_or(0);
        Heads { pages, free: (0..count).rev().collect() }
    }

    /// How many there are, free or not.
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

    /// Where that place is.
    #[inline]
    pub(super) fn get(&self, place: u16) -> Option<Head<'_>> {
        let (page, within) = (usize::from(place) / PLACES, usize::from(place) % PLACES);
        let (gref, page) = self.pages.get(page)?;
        // Below a page.
        let offset = u16::try_from(within * HEAD).unwrap_or(0);
        Some(Head { gref: *gref, page, offset })
    }
}

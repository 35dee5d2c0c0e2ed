//! Ring of which every byte can be set.

use core::sync::atomic::Ordering::{Acquire, Release};

use ringfence_memory::LentSlice;
use ringfence_ring::RingLayout;

/// Offsets of the four shared words.
const REQ_PROD: usize = 0;
const REQ_EVENT: usize = 4;
const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;

/// Page of a ring, with the indices of a correct peer.
#[derive(Debug)]
pub struct RawRing {
    /// Memory of the ring.
    pub page: LentSlice,
    layout: RingLayout,
    /// Index of the next entry that this side writes.
    pub produced: u32,
    /// Index of the next entry that this side reads.
    pub consumed: u32,
}

impl RawRing {
    /// Creates a ring on a page without changing the page.
    pub fn new(page: LentSlice, layout: RingLayout) -> RawRing {
        RawRing { page, layout, produced: 0, consumed: 0 }
    }

    /// Resets the page to an empty ring.
    pub fn reset(&mut self) {
        self.page.zero(0, 4096).unwrap();
        self.page.store_u32(REQ_EVENT, 1, Release).unwrap();
        self.page.store_u32(RSP_EVENT, 1, Release).unwrap();
        (self.produced, self.consumed) = (0, 0);
    }

    /// Returns the offset in the page of the entry with a free-running index.
    pub fn place(&self, index: u32) -> usize {
        self.layout.offset(index)
    }

    /// Writes the next entry without publishing it.
    pub fn put(&mut self, entry: &[u8]) {
        self.page.copy_from(self.place(self.produced), entry).unwrap();
        self.produced = self.produced.wrapping_add(1);
    }

    /// Returns the entry with that index.
    pub fn entry<const N: usize>(&self, index: u32) -> [u8; N] {
        self.page.fetch(self.place(index)).unwrap().into_unchecked()
    }

    /// Sets the frontend's producer index.
    pub fn set_req_prod(&self, index: u32) {
        self.page.store_u32(REQ_PROD, index, Release).unwrap();
    }

    /// Returns the frontend's producer index.
    pub fn req_prod(&self) -> u32 {
        self.page.load_u32(REQ_PROD, Acquire).unwrap()
    }

    /// Sets the backend's producer index.
    pub fn set_rsp_prod(&self, index: u32) {
        self.page.store_u32(RSP_PROD, index, Release).unwrap();
    }

    /// Returns the backend's producer index.
    pub fn rsp_prod(&self) -> u32 {
        self.page.load_u32(RSP_PROD, Acquire).unwrap()
    }

    /// Returns the index at which the backend requests an event.
    pub fn req_event(&self) -> u32 {
        self.page.load_u32(REQ_EVENT, Acquire).unwrap()
    }

    /// Sets the index at which the frontend requests an event.
    pub fn set_rsp_event(&self, index: u32) {
        self.page.store_u32(RSP_EVENT, index, Release).unwrap();
    }

    /// Takes the published responses, at most one ring of them.
    pub fn take_responses<const N: usize>(&mut self) -> Vec<[u8; N]> {
        let count = self.rsp_prod().wrapping_sub(self.consumed).min(self.layout.count());
        let taken = (0..count).map(|i| self.entry(self.consumed.wrapping_add(i))).collect();
        self.consumed = self.consumed.wrapping_add(count);
        taken
    }

    /// Takes the published requests, at most one ring of them.
    pub fn take_requests<const N: usize>(&mut self) -> Vec<[u8; N]> {
        let count = self.req_prod().wrapping_sub(self.consumed).min(self.layout.count());
        let taken = (0..count).map(|i| self.entry(self.consumed.wrapping_add(i))).collect();
        self.consumed = self.consumed.wrapping_add(count);
        taken
    }
}

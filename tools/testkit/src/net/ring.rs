//! A ring of which every byte can be set.

use core::sync::atomic::Ordering::{Acquire, Release};

use ringfence_memory::LentSlice;
use ringfence_ring::RingLayout;

/// The four shared words by offset.
const REQ_PROD: usize = 0;
const REQ_EVENT: usize = 4;
const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;

/// A ring's page, and how far its peer produced and consumed honestly.
#[derive(Debug)]
pub struct RawRing {
    /// The page.
    pub page: LentSlice,
    layout: RingLayout,
    /// Next slot to be written by this side.
    pub produced: u32,
    /// Next slot of the other side to be read.
    pub consumed: u32,
}

impl RawRing {
    /// A ring whose page is taken as it is.
    pub fn new(page: LentSlice, layout: RingLayout) -> RawRing {
        RawRing { page, layout, produced: 0, consumed: 0 }
    }

    /// Makes it an empty ring.
    pub fn reset(&mut self) {
        self.page.zero(0, 4096).unwrap();
        self.page.store_u32(REQ_EVENT, 1, Release).unwrap();
        self.page.store_u32(RSP_EVENT, 1, Release).unwrap();
        (self.produced, self.consumed) = (0, 0);
    }

    /// Where the entry of a free-running index starts in the page.
    pub fn place(&self, index: u32) -> usize {
        self.layout.offset(index)
    }

    /// Writes the next entry without publishing it.
    pub fn put(&mut self, entry: &[u8]) {
        self.page.copy_from(self.place(self.produced), entry).unwrap();
        self.produced = self.produced.wrapping_add(1);
    }

    /// The entry of that index.
    pub fn entry<const N: usize>(&self, index: u32) -> [u8; N] {
        self.page.fetch(self.place(index)).unwrap().into_unchecked()
    }

    /// Sets the frontend's producer index.
    pub fn set_req_prod(&self, index: u32) {
        self.page.store_u32(REQ_PROD, index, Release).unwrap();
    }

    /// The frontend's producer index.
    pub fn req_prod(&self) -> u32 {
        self.page.load_u32(REQ_PROD, Acquire).unwrap()
    }

    /// Sets the backend's producer index.
    pub fn set_rsp_prod(&self, index: u32) {
        self.page.store_u32(RSP_PROD, index, Release).unwrap();
    }

    /// The backend's producer index.
    pub fn rsp_prod(&self) -> u32 {
        self.page.load_u32(RSP_PROD, Acquire).unwrap()
    }

    /// The index at which the backend wants to be told of requests.
    pub fn req_event(&self) -> u32 {
        self.page.load_u32(REQ_EVENT, Acquire).unwrap()
    }

    /// Sets the index at which the frontend wants to be told of responses.
    pub fn set_rsp_event(&self, index: u32) {
        self.page.store_u32(RSP_EVENT, index, Release).unwrap();
    }

    /// Takes the responses that came, at most a ring's worth.
    pub fn take_responses<const N: usize>(&mut self) -> Vec<[u8; N]> {
        let count = self.rsp_prod().wrapping_sub(self.consumed).min(self.layout.count());
        let taken = (0..count).map(|i| self.entry(self.consumed.wrapping_add(i))).collect();
        self.consumed = self.consumed.wrapping_add(count);
        taken
    }

    /// Takes the requests that came, at most a ring's worth.
    pub fn take_requests<const N: usize>(&mut self) -> Vec<[u8; N]> {
        let count = self.req_prod().wrapping_sub(self.consumed).min(self.layout.count());
        let taken = (0..count).map(|i| self.entry(self.consumed.wrapping_add(i))).collect();
        self.consumed = self.consumed.wrapping_add(count);
        taken
    }
}

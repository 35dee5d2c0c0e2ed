//! Adversary guest on a vbd: its resources, its handshake and its raw ring access.
//!
//! It has the means of every guest: the store, pages to lend, an event channel, and a ring of which it
//! can write every word. [`super::attacks`] uses them to break rules. The identifier of each request
//! encodes the responses that are acceptable, so that each response can be validated on arrival.

use std::ops::Range;

use anyhow::{Context, ensure};
use ringfence_memory::PAGE_SIZE;
use ringfence_platform::{Access, Channel as _, Granter, Gref, Lease, Platform};
use ringfence_ring::RingLayout;
use ringfence_ring::sync::Ordering::{Acquire, Release};
use ringfence_wire::blkif::{Abi, Response, SegmentRange, Slot, Status, keys};
use ringfence_wire::xenbus::{DeviceId, XenbusState};

use super::super::handshake::{Handshake, Pace};

/// Offsets in a ring's page: the front's producer index, the back's, and the response index at which
/// the front requests an event.
const REQ_PROD: usize = 0;
const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;

/// Offset of the identifier in a request slot.
const ID: usize = 8;
/// Number of data pages lent at the start.
const PAGES: usize = 32;
/// Set of acceptable responses to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Right(u64);

impl Right {
    pub const OKAY: Right = Right(1);
    pub const ERROR: Right = Right(2);
    pub const UNSUPPORTED: Right = Right(4);
    /// Okay or error, depending on the value that the backend read.
    pub const EITHER: Right = Right(1 | 2);
    /// Any defined status.
    pub const ANY: Right = Right(1 | 2 | 4);
    const BITS: u32 = 3;

    /// Returns `true` if the identifier of the request admits this response.
    fn admits(id: u64, status: Status) -> bool {
        let bit = match status {
            Status::Okay => Right::OKAY,
            Status::Error => Right::ERROR,
            Status::NotSupported => Right::UNSUPPORTED,
            _ => Right(0),
        };
        id & bit.0 != 0
    }
}

/// Adversary guest with one vbd.
pub struct DiskAdversary<P: Platform> {
    platform: P,
    pub handshake: Handshake,
    granter: P::Granter,
    ring: Lease,
    layout: RingLayout,
    produced: u32,
    consumed: u32,
    serial: u64,
    channel: Option<P::Channel>,
    /// Pages that the backend may write.
    pub pages: Vec<Lease>,
    /// Page for descriptors of indirect requests.
    pub list: Lease,
    /// Size of its disk in sectors.
    pub sectors: u64,
    /// References that this guest has not granted.
    pub foreign: Range<u32>,
}

impl<P: Platform> DiskAdversary<P> {
    /// Creates a guest for a device and lends its first pages.
    pub fn new(
        platform: P,
        device: DeviceId,
        foreign: Range<u32>,
        pace: Pace,
    ) -> anyhow::Result<DiskAdversary<P>> {
        let mut granter = platform.granter(device.backend)?;
        let mut lend = || granter.lend(Access::ReadWrite);
        let (ring, list) = (lend()?, lend()?);
        let pages = (0..PAGES).map(|_| lend()).collect::<Result<_, _>>()?;
        let abi = Abi::NATIVE;
        let layout =
            RingLayout::new(PAGE_SIZE, abi.request_bytes(), abi.response_bytes(), abi.alignment());
        Ok(DiskAdversary {
            handshake: Handshake::new(&platform, device, pace)?,
            platform,
            granter,
            ring,
            layout: layout.context("a ring of one page")?,
            produced: 0,
            consumed: 0,
            serial: 0,
            channel: None,
            pages,
            list,
            sectors: 0,
            foreign,
        })
    }

    /// Lends more pages, up to `wanted` or until the platform refuses.
    pub fn lend_up_to(&mut self, wanted: usize) {
        while self.pages.len() < wanted {
            let Ok(page) = self.granter.lend(Access::ReadWrite) else { return };
            self.pages.push(page);
        }
    }

    /// Runs the handshake from its beginning.
    pub fn connect(&mut self) -> anyhow::Result<()> {
        self.handshake.restart()?;
        let header = self.ring.memory();
        header.zero(0, PAGE_SIZE)?;
        // No events are requested: the adversary polls.
        header.store_u32(RSP_EVENT, u32::MAX / 2, Release)?;
        (self.produced, self.consumed) = (0, 0);
        let channel = self.platform.alloc_unbound(self.handshake.device.backend)?;
        let (gref, port) = (self.ring.gref().to_string(), channel.port().0.to_string());
        self.channel = Some(channel);
        self.handshake.set(keys::RING_REF, &gref)?;
        self.handshake.set(keys::EVENT_CHANNEL, &port)?;
        self.handshake.set(keys::PROTOCOL, Abi::NATIVE.name())?;
        self.handshake.set(keys::FEATURE_PERSISTENT, "1")?;
        self.handshake.enter(XenbusState::Initialised)?;
        self.handshake.wait_for_connection()?;
        self.sectors =
            self.handshake.of_backend(keys::SECTORS)?.parse().context("the disk's size")?;
        self.handshake.enter(XenbusState::Connected)
    }

    /// Notifies the backend of requests.
    pub fn notify(&mut self) -> anyhow::Result<()> {
        self.handshake.notified(self.channel.as_ref().context("no channel")?.notify());
        Ok(())
    }

    /// Publishes a producer index `more` requests beyond those written.
    pub fn publish(&mut self, more: u32) -> anyhow::Result<()> {
        self.ring.memory().store_u32(REQ_PROD, self.produced.wrapping_add(more), Release)?;
        self.notify()
    }

    /// Returns the number of free request slots.
    pub fn free(&self) -> u32 {
        self.layout.count().saturating_sub(self.produced.wrapping_sub(self.consumed))
    }

    /// Writes a request without publishing it; its identifier encodes the acceptable responses.
    pub fn put(&mut self, mut slot: Slot, right: Right) -> anyhow::Result<()> {
        self.serial = self.serial.wrapping_add(1);
        let id = self.serial << Right::BITS | right.0;
        slot[ID..ID + 8].copy_from_slice(&id.to_le_bytes());
        self.ring.memory().copy_from(self.layout.offset(self.produced), &slot)?;
        self.produced = self.produced.wrapping_add(1);
        Ok(())
    }

    /// Fills the ring with requests and publishes them.
    pub fn post(
        &mut self,
        mut make: impl FnMut(&DiskAdversary<P>, u32) -> (Slot, Right),
    ) -> anyhow::Result<()> {
        for n in 0..self.free() {
            let (slot, right) = make(self, n);
            self.put(slot, right)?;
        }
        self.publish(0)
    }

    /// Consumes and validates the published responses.
    pub fn take(&mut self) -> anyhow::Result<()> {
        let published = self.ring.memory().load_u32(RSP_PROD, Acquire)?;
        let count = published.wrapping_sub(self.consumed);
        let owed = self.produced.wrapping_sub(self.consumed);
        ensure!(count <= owed, WrongResponse(format!("{count} answers to {owed} requests")));
        for _ in 0..count {
            let offset = self.layout.offset(self.consumed);
            let bytes = self.ring.memory().fetch::<{ Response::MAX }>(offset)?.into_unchecked();
            let Response { id, operation, status } = Response::from_bytes(bytes);
            let wrong = || format!("operation {operation} was answered by {status:?} ({id:#x})");
            ensure!(Right::admits(id, status), WrongResponse(wrong()));
            self.consumed = self.consumed.wrapping_add(1);
        }
        Ok(())
    }

    /// Returns the range of one whole data page; the index wraps.
    pub fn whole(&self, page: usize) -> SegmentRange {
        let gref = self.pages.get(page % self.pages.len().max(1)).map_or(Gref(0), Lease::gref);
        whole(gref)
    }
}

/// Returns the range of a whole page.
pub fn whole(gref: Gref) -> SegmentRange {
    const LAST: u8 = 7;
    SegmentRange::new(gref, 0, LAST).expect("a page has eight sectors")
}

/// Unacceptable response of the backend, which fails the benchmark.
#[derive(Debug, thiserror::Error)]
#[error("the backend's answer is wrong: {0}")]
pub struct WrongResponse(pub String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifier_admits_only_encoded_responses() {
        for (right, okay, error, unsupported) in [
            (Right::OKAY, true, false, false),
            (Right::ERROR, false, true, false),
            (Right::UNSUPPORTED, false, false, true),
            (Right::EITHER, true, true, false),
            (Right::ANY, true, true, true),
        ] {
            let id = 77 << Right::BITS | right.0;
            assert_eq!(Right::admits(id, Status::Okay), okay, "{right:?}");
            assert_eq!(Right::admits(id, Status::Error), error, "{right:?}");
            assert_eq!(Right::admits(id, Status::NotSupported), unsupported, "{right:?}");
            assert!(!Right::admits(id, Status::from_raw(7)), "{right:?}");
        }
    }
}

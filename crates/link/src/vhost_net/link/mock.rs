//! Mock device: the other end of a link's virtqueues, correct unless a test makes it misbehave.

// #syscall none: for tests

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_access::iommu::AddressSpace;
use ringfence_frame::tap::capabilities;
use ringfence_memory::{DeviceRegion, LentSlice, Mapping};
use ringfence_platform::iotlb::Miss;
use ringfence_platform::vhost::{QueueName, VhostEvents};
use ringfence_platform::window::EngineFacts;
use ringfence_platform::{Access, Counters};
use ringfence_ring::split::device::{DeviceQueue, TakenChain};
use ringfence_ring::split::{DriverQueue, QueueFeatures, QueuePages};
use ringfence_sys::tap::TapOffloads;
use ringfence_wire::virtio::SplitLayout;
use rustix::event::{EventfdFlags, eventfd};

use super::lending::Lending;
use super::receive::Receiver;
use super::{Protection, VhostLink};
use crate::frame_ring::{FrameRing, FrameShape};
use crate::vhost_net::device::Device;

/// All offloads that a TAP can leave to its reader.
const OFFLOADS: TapOffloads = TapOffloads(0x6f);

/// Mapped memory: own address and length by device address, and the maximum of mappings if limited.
#[derive(Default)]
pub(crate) struct MappedMemory(
    pub(crate) Mutex<BTreeMap<u64, (u64, u64)>>,
    pub(crate) Mutex<Option<usize>>,
);

impl AddressSpace for MappedMemory {
    fn engine(&self) -> EngineFacts {
        EngineFacts { name: "list", one_sided: true, in_flight: "none", cost: "none" }
    }

    fn map_region(&self, address: u64, memory: &DeviceRegion, access: Access) -> io::Result<()> {
        if (access == Access::ReadWrite) != memory.is_writable() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let mut lent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let most = self.1.lock().unwrap_or_else(PoisonError::into_inner);
        if most.is_some_and(|most| lent.len() >= most) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        match lent.insert(address, (memory.address(), memory.len())) {
            None => Ok(()),
            Some(_) => Err(io::ErrorKind::AlreadyExists.into()),
        }
    }

    fn unmap(&self, address: u64) -> io::Result<()> {
        let mut lent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lent.remove(&address).map(drop).ok_or(io::ErrorKind::NotFound.into())
    }
}

impl MappedMemory {
    /// Returns the address in this process for a device address, or `None` if it is not mapped.
    pub(crate) fn find(&self, address: u64, len: u32) -> Option<u64> {
        let lent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (start, (own, bytes)) = lent.range(..=address).next_back()?;
        let offset = address - start;
        (offset + u64::from(len) <= *bytes).then_some(own + offset)
    }
}

/// State of the mock device, shared with the test.
pub(crate) struct MockState {
    /// Device end of the link's receive queue.
    pub(crate) receive: DeviceQueue,
    /// Device end of the link's transmit queue.
    pub(crate) transmit: DeviceQueue,
    /// Number of kicks of each queue.
    pub(crate) kicks: [u32; 2],
    /// Events that the link receives next.
    pub(crate) events: VhostEvents,
    /// Missed access that the link receives next.
    pub(crate) miss: Option<Miss>,
    /// Set once the link has stopped the device.
    pub(crate) is_stopped: bool,
    pub(crate) is_gone: bool,
    /// Mapped memory, unless all is mapped.
    pub(crate) lent: Option<Arc<MappedMemory>>,
    /// Memory of all receive buffers.
    buffers: LentSlice,
    region: DeviceRegion,
}

/// Device that a link drives.
pub(crate) struct Mock {
    ends: Arc<Mutex<MockState>>,
    event: OwnedFd,
}

impl Device for Mock {
    fn kick(&self, queue: QueueName) -> io::Result<()> {
        lock(&self.ends).kicks[usize::from(queue == QueueName::Transmit)] += 1;
        Ok(())
    }

    fn take_events(&self) -> io::Result<VhostEvents> {
        Ok(core::mem::take(&mut lock(&self.ends).events))
    }

    fn is_gone(&self) -> io::Result<bool> {
        Ok(lock(&self.ends).is_gone)
    }

    fn take_miss(&self) -> io::Result<Option<Miss>> {
        Ok(lock(&self.ends).miss.take())
    }

    fn stop(&self) -> io::Result<()> {
        lock(&self.ends).is_stopped = true;
        Ok(())
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Locks the state of the mock device.
pub(crate) fn lock(ends: &Mutex<MockState>) -> MutexGuard<'_, MockState> {
    ends.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Creates a link with queues of the given sizes, and its mock device. Returns `None` without memory.
pub(crate) fn pair(
    sizes: [u16; 2],
    features: QueueFeatures,
    shape: FrameShape,
) -> Option<(VhostLink<Mock>, Arc<Mutex<MockState>>)> {
    lent_pair(sizes, features, shape, Protection::Fixed)
}

/// Creates a link as [`pair`] does, with the given protection of its memory.
pub(crate) fn lent_pair(
    sizes: [u16; 2],
    features: QueueFeatures,
    shape: FrameShape,
    protection: Protection,
) -> Option<(VhostLink<Mock>, Arc<Mutex<MockState>>)> {
    let [receive, transmit] = sizes.map(|size| queue(size, features));
    let ((driver_in, receive), (driver_out, transmit)) = (receive?, transmit?);
    let buffers = Mapping::private(Receiver::bytes(sizes[0])).ok()?.lent();
    let region = buffers.device_region();
    let system = Arc::<Counters>::default();
    let frames = FrameRing::new(shape).ok()?;
    let (mut lending, mut lent) = (Lending::default(), None);
    if matches!(protection, Protection::Fine | Protection::FineWithoutReuse) {
        let list = Arc::<MappedMemory>::default();
        let (space, reuse) = (Arc::clone(&list) as _, protection == Protection::Fine);
        lending = Lending::new(region.clone(), &frames, reuse, &space, &system).ok()?;
        lent = Some(list);
    }
    let ends = Arc::new(Mutex::new(MockState {
        receive,
        transmit,
        kicks: [0; 2],
        events: VhostEvents::default(),
        miss: None,
        is_stopped: false,
        is_gone: false,
        lent,
        buffers: buffers.clone(),
        region,
    }));
    let event = eventfd(0, EventfdFlags::CLOEXEC).ok()?;
    let device = Mock { ends: Arc::clone(&ends), event };
    let takes = capabilities(OFFLOADS, 1500);
    let queues = [driver_in, driver_out];
    let link = VhostLink::from_parts(device, queues, buffers, frames, lending, takes, system);
    link.ok().map(|link| (link, ends))
}

fn queue(size: u16, features: QueueFeatures) -> Option<(DriverQueue, DeviceQueue)> {
    let layout = SplitLayout::new(size)?;
    let memory = Mapping::private(QueuePages::bytes(layout).next_multiple_of(4096)).ok()?;
    let pages = QueuePages::new(&memory.lent(), layout).ok()?;
    let driver = DriverQueue::new(pages.clone(), layout, features);
    Some((driver, DeviceQueue::new(pages, layout, features)))
}

impl MockState {
    /// Returns the address in this process for a device address.
    pub(crate) fn find(&self, address: u64, len: u32) -> Option<u64> {
        match &self.lent {
            Some(lent) => lent.find(address, len),
            None => Some(address),
        }
    }

    /// Writes bytes to the start of a receive buffer. Returns the number written.
    pub(crate) fn fill(&self, buffer: &TakenChain, bytes: &[u8]) -> u32 {
        let Some(descriptor) = buffer.chain.first() else { return 0 };
        let len = bytes.len().min(descriptor.len as usize);
        let Some(address) = self.find(descriptor.address, descriptor.len) else { return 0 };
        let offset = address.wrapping_sub(self.region.address());
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        match self.buffers.copy_from(offset, &bytes[..len]) {
            Ok(()) => u32::try_from(len).unwrap_or(0),
            Err(_) => 0,
        }
    }

    /// Delivers a frame with its virtio-net header in as many buffers as it needs. Returns `false` if there are
    /// too few. The driver sees it after the queue's next `publish`.
    pub(crate) fn deliver(&mut self, bytes: &[u8]) -> bool {
        let mut bytes = bytes.to_vec();
        let buffers = bytes.len().div_ceil(super::receive::BUFFER).max(1);
        let number = u16::try_from(buffers).unwrap_or(u16::MAX);
        if self.receive.available() < number {
            return false;
        }
        if let Some(place) = bytes.get_mut(10..12) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        for piece in bytes.chunks(super::receive::BUFFER) {
            let Some(buffer) = self.receive.take() else { return false };
            let len = self.fill(&buffer, piece);
            self.receive.finish(buffer.head, len);
        }
        true
    }
}

//! A device for tests: the other end of a link's queues, honest unless it is told otherwise.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_memory::{DeviceRegion, LentSlice, Mapping};
use ringfence_net::tap::capabilities;
use ringfence_platform::Counters;
use ringfence_platform::tap::TapOffloads;
use ringfence_platform::vhost::{QueueName, VhostEvents};
use ringfence_ring::split::device::{DeviceQueue, Request};
use ringfence_ring::split::{DriverQueue, QueueFeatures, QueuePages};
use ringfence_wire::virtio::SplitLayout;
use rustix::event::{EventfdFlags, eventfd};

use super::VhostLink;
use super::receive::Receiver;
use crate::device::Device;
use crate::frames::{FrameRing, FrameShape};

/// Everything that a TAP can leave to its reader.
const OFFLOADS: TapOffloads = TapOffloads(0x6f);

/// The other end.
pub(crate) struct Ends {
    /// The device's end of the queue by which the link receives.
    pub(crate) receive: DeviceQueue,
    /// That of the queue by which it sends.
    pub(crate) transmit: DeviceQueue,
    /// Kicks of either queue.
    pub(crate) kicks: [u32; 2],
    /// What the link hears next.
    pub(crate) events: VhostEvents,
    /// The memory of all receive buffers.
    buffers: LentSlice,
    region: DeviceRegion,
}

/// A handle of [`Ends`] that a link drives.
pub(crate) struct Mock {
    ends: Arc<Mutex<Ends>>,
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

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// The ends that a link's device is.
pub(crate) fn lock(ends: &Mutex<Ends>) -> MutexGuard<'_, Ends> {
    ends.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A link with queues of so many entries, and the other ends of them; `None` when there is no memory.
pub(crate) fn pair(
    sizes: [u16; 2],
    features: QueueFeatures,
    shape: FrameShape,
) -> Option<(VhostLink<Mock>, Arc<Mutex<Ends>>)> {
    let [receive, transmit] = sizes.map(|size| queue(size, features));
    let ((driver_in, receive), (driver_out, transmit)) = (receive?, transmit?);
    let buffers = Mapping::private(Receiver::bytes(sizes[0])).ok()?.lent();
    let region = buffers.device_region();
    let lent = buffers.clone();
    let events = VhostEvents::default();
    let ends = Ends { receive, transmit, kicks: [0; 2], events, buffers: lent, region };
    let ends = Arc::new(Mutex::new(ends));
    let event = eventfd(0, EventfdFlags::CLOEXEC).ok()?;
    let device = Mock { ends: Arc::clone(&ends), event };
    let frames = FrameRing::new(shape).ok()?;
    let takes = capabilities(OFFLOADS, 1500);
    let system = Arc::<Counters>::default();
    let link = VhostLink::over(device, [driver_in, driver_out], buffers, frames, takes, system);
    link.ok().map(|link| (link, ends))
}

fn queue(size: u16, features: QueueFeatures) -> Option<(DriverQueue, DeviceQueue)> {
    let layout = SplitLayout::new(size)?;
    let memory = Mapping::private(QueuePages::bytes(layout).next_multiple_of(4096)).ok()?;
    let pages = QueuePages::new(&memory.lent(), layout).ok()?;
    let driver = DriverQueue::new(pages.clone(), layout, features);
    Some((driver, DeviceQueue::new(pages, layout, features)))
}

impl Ends {
    /// Writes octets to the start of a receive buffer, as many as it takes; how many.
    pub(crate) fn fill(&self, buffer: &Request, octets: &[u8]) -> u32 {
        let Some(descriptor) = buffer.chain.first() else { return 0 };
        let len = octets.len().min(descriptor.len as usize);
        let offset = descriptor.address.wrapping_sub(self.region.address());
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        match self.buffers.copy_from(offset, &octets[..len]) {
            Ok(()) => u32::try_from(len).unwrap_or(0),
            Err(_) => 0,
        }
    }

    /// Delivers a frame, with the virtio-net header in front of it, by as many buffers as it takes;
    /// whether there were so many. The driver sees it with the queue's next `publish`.
    pub(crate) fn deliver(&mut self, octets: &[u8]) -> bool {
        let mut octets = octets.to_vec();
        let buffers = octets.len().div_ceil(super::receive::BUFFER).max(1);
        let number = u16::try_from(buffers).unwrap_or(u16::MAX);
        if self.receive.available() < number {
            return false;
        }
        if let Some(place) = octets.get_mut(10..12) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        for piece in octets.chunks(super::receive::BUFFER) {
            let Some(buffer) = self.receive.take() else { return false };
            let len = self.fill(&buffer, piece);
            self.receive.finish(buffer.head, len);
        }
        true
    }
}

//! Kernel vhost-net: a virtio-net device whose other side is a TAP interface (`vhost.h`).
//!
//! # Theory of operation
//!
//! A thread of the kernel, the *worker*, moves frames between two virtqueues and the queue of a TAP interface.
//! It works in the address space of the process that set it up ([`VhostNet::start`]), and accesses only the
//! memory in a table of regions, by which it translates the addresses in descriptors. Here each region is at its
//! own address. A device has one queue in each direction; an interface with several queues has a device for each.
//!
//! The driver notifies the worker by an eventfd for each queue (*kick*). The worker notifies the driver by other
//! eventfds: that it used buffers of a queue (*call*), and that a queue failed (*error*).
//!
//! [`VhostNet::start_translated`] starts a worker that translates all addresses, those of its own queues too, by a
//! table that changes while it works ([`IotlbSpace`]). Memory that the worker gets at the start is at its own
//! address in this process, in the driver domain's *own region*. Regions for guests' pages begin above it, at
//! [`FIRST_IO_ADDRESS`](ringfence_memory::FIRST_IO_ADDRESS).
//!
//! # Memory safety
//!
//! The worker writes to the addresses in descriptors. So:
//!
//! * This module allocates the memory of the queues and gives no other code a handle to it. Only [`DriverQueue`]
//!   writes descriptors, from [`DeviceRange`](ringfence_memory::DeviceRange)s. No writable range is in memory with
//!   Rust references.
//! * The regions in the table are kept until the worker has released both queues. If the worker cannot be
//!   stopped, they are never unmapped.

// #syscall uplink eventfd2,read,write: kicks and calls
// #syscall uplink epoll_create1,epoll_ctl,epoll_pwait,epoll_pwait2,ppoll: waiting for calls and errors
// #syscall uplink ioctl 1=0x4008af30: VHOST_NET_SET_BACKEND: taking its queues away from vhost-net
// #syscall uplink ioctl 1=0xc008af12: VHOST_GET_VRING_BASE: how far it has come

use core::mem::ManuallyDrop;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringfence_memory::{DeviceRegion, Mapping, PAGE_SIZE};
use ringfence_ring::split::{DriverQueue, QueueFeatures, QueuePages};
use ringfence_wire::grant::Access;
use ringfence_wire::vhost::{self, NET_RECEIVE, NET_TRANSMIT, REGIONS_MAX, Region, ioctl};
use ringfence_wire::virtio::{SplitLayout, feature};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::iotlb::IotlbSpace;
use ringfence_sys::numbers::bounded;
use ringfence_sys::prerequisite::VHOST_NET;

const PATH: &str = VHOST_NET.object;

/// Errors of setting up a vhost device.
#[derive(Debug, thiserror::Error)]
pub enum VhostError {
    /// The device node is missing.
    #[error("{}", VHOST_NET.missing())]
    Missing,
    /// The device node may not be opened.
    #[error("{}", VHOST_NET.denied())]
    Denied,
    /// The device node cannot be opened for another reason.
    #[error("{PATH} cannot be opened: {0}")]
    Open(#[source] io::Error),
    /// The device lacks features that the driver requires.
    #[error("vhost-net of this kernel lacks {}", missing.join(" and "))]
    Features { missing: Vec<&'static str> },
    /// The queue size is no power of two, or too large.
    #[error("a queue of {size} entries: it takes a power of two up to 32768")]
    QueueSize { size: u16 },
    /// The memory consists of too many regions.
    #[error("{count} regions of memory, of at most {REGIONS_MAX}")]
    Regions {
        /// Number of regions, that of the queues included.
        count: usize,
    },
    /// The kernel refused a setting.
    #[error("{what}: {source}")]
    Setting { what: &'static str, source: io::Error },
}

/// Settings of a device.
#[derive(Debug)]
pub struct VhostSetup {
    /// Number of entries of the receive queue and of the transmit queue.
    pub sizes: [u16; 2],
    /// Memory that the device may access in addition to its queues.
    pub regions: Vec<DeviceRegion>,
    /// Set to use `IN_ORDER` if the device offers it. Linux has it from 6.17 on, with fixes in later versions.
    pub in_order: bool,
}

/// One of the two queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QueueName {
    /// Queue on which the driver receives.
    Receive,
    /// Queue on which the driver sends.
    Transmit,
}

impl QueueName {
    const ALL: [QueueName; 2] = [QueueName::Receive, QueueName::Transmit];

    /// Returns the device's number of the queue.
    fn number(self) -> u32 {
        match self {
            QueueName::Receive => NET_RECEIVE,
            QueueName::Transmit => NET_TRANSMIT,
        }
    }
}

/// Events since the last call.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VhostEvents {
    /// The device has used buffers.
    pub called: bool,
    /// Queue that the worker stopped with an error.
    pub failed: Option<QueueName>,
    /// The interface behind the device was removed.
    pub backend_gone: bool,
    /// The worker needs an address that is not in its table ([`IotlbSpace::take_miss`]).
    pub missed: bool,
}

/// Running vhost-net device, with its queues and the memory that it may access.
#[derive(Debug)]
pub struct VhostNet {
    file: OwnedFd,
    /// Epoll descriptor of everything by which the kernel notifies the driver.
    watch: OwnedFd,
    kicks: [OwnedFd; 2],
    /// Kept open: the kernel's end holds the files, ours watches them.
    events: [[OwnedFd; 2]; 2],
    features: u64,
    queues: [(SplitLayout, QueuePages); 2],
    space: Option<Arc<IotlbSpace>>,
    /// Layout and memory of both queues.
    tap: OwnedFd,
    /// Memory that the worker may access; see `drop`.
    memory: ManuallyDrop<Vec<DeviceRegion>>,
}

/// Tokens of watched files in the epoll set.
mod place {
    pub(super) const CALL: u64 = 0;
    pub(super) const BACKEND: u64 = 1;
    pub(super) const MISS: u64 = 2;
    /// First of two tokens: the queue's number is added.
    pub(super) const ERROR: u64 = 3;
}

/// Opens the device, to be set up here or to be handed to another process.
///
/// # Errors
///
/// Returns [`VhostError::Missing`], [`VhostError::Denied`] or [`VhostError::Open`]; the text says what to do.
pub fn open() -> Result<OwnedFd, VhostError> {
    rustix::fs::open(PATH, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|errno| {
        match errno {
            Errno::NOENT | Errno::NODEV | Errno::NXIO => VhostError::Missing,
            Errno::ACCESS | Errno::PERM => VhostError::Denied,
            other => VhostError::Open(other.into()),
        }
    })
}

/// Creates the address space of a device without queues, to measure the cost of table changes.
///
/// # Errors
///
/// Returns [`VhostError`] if the kernel refuses a setting.
pub fn bare_space(file: &OwnedFd) -> Result<Arc<IotlbSpace>, VhostError> {
    set(file, ioctl::SET_OWNER, "VHOST_SET_OWNER", &mut [])?;
    negotiate(file, false, feature::ACCESS_PLATFORM)?;
    space_of(file)
}

fn space_of(file: &OwnedFd) -> Result<Arc<IotlbSpace>, VhostError> {
    let backend = &mut vhost::BACKEND_MESSAGE_V2.to_ne_bytes();
    set(file, ioctl::SET_BACKEND_FEATURES, "VHOST_SET_BACKEND_FEATURES", backend)?;
    let space = file.try_clone().and_then(IotlbSpace::new);
    let space = space.map_err(|source| VhostError::Setting { what: "an address space", source })?;
    Ok(Arc::new(space))
}

impl VhostNet {
    /// Sets the device up and starts it. Its worker moves frames, with virtio-net headers of 12 bytes, between
    /// the queue behind `tap` and the two returned queues: receive, then transmit.
    ///
    /// # Errors
    ///
    /// Returns a [`VhostError`] if the kernel or the device refuses the setup.
    pub fn start(
        file: OwnedFd,
        tap: BorrowedFd<'_>,
        setup: VhostSetup,
    ) -> Result<(VhostNet, [DriverQueue; 2]), VhostError> {
        let (mut device, memory) = VhostNet::prepare(file, tap, &setup, 0)?;
        device.memory.extend(setup.regions);
        device.memory.push(memory);
        set_table(&device.file, &device.memory)?;
        let queues = device.start_queues(tap)?;
        Ok((device, queues))
    }

    /// Starts a device as [`VhostNet::start`] does, with an address space: the device may access only memory that
    /// is mapped in it. The setup's regions are mapped at their own addresses at all times: writable ones for
    /// writing, the others for reading.
    ///
    /// # Errors
    ///
    /// Returns a [`VhostError`] if the kernel or the device refuses the setup.
    pub fn start_translated(
        file: OwnedFd,
        tap: BorrowedFd<'_>,
        setup: VhostSetup,
    ) -> Result<(VhostNet, Arc<IotlbSpace>, [DriverQueue; 2]), VhostError> {
        let (mut device, memory) = VhostNet::prepare(file, tap, &setup, feature::ACCESS_PLATFORM)?;
        // The kernel starts no queue without a table of regions; this one is empty.
        set_table(&device.file, &[])?;
        watch_file(&device.watch, device.file.as_fd(), place::MISS, EventFlags::IN)?;
        let space = space_of(&device.file)?;
        let update = |source| VhostError::Setting { what: "VHOST_IOTLB_UPDATE", source };
        for region in setup.regions.iter().chain([&memory]) {
            let access = if region.is_writable() { Access::ReadWrite } else { Access::ReadOnly };
            space.map_region(region.address(), region, access).map_err(update)?;
        }
        let queues = device.start_queues(tap)?;
        device.space = Some(Arc::clone(&space));
        Ok((device, space, queues))
    }

    /// Opens eventfds and allocates queue memory for a device with negotiated features. The device gets no memory yet.
    fn prepare(
        file: OwnedFd,
        tap: BorrowedFd<'_>,
        setup: &VhostSetup,
        needed: u64,
    ) -> Result<(VhostNet, DeviceRegion), VhostError> {
        let (memory, queues) = queue_memory(setup.sizes)?;
        set(&file, ioctl::SET_OWNER, "VHOST_SET_OWNER", &mut [])?;
        let features = negotiate(&file, setup.in_order, needed)?;
        let watch = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(setting("epoll"))?;
        watch_file(&watch, tap, place::BACKEND, EventFlags::empty())?;
        let [receive, transmit] = QueueName::ALL.map(|name| wire_up(&file, &watch, name));
        let ((kick_in, events_in), (kick_out, events_out)) = (receive?, transmit?);
        let kept = |source| VhostError::Setting { what: "keeping the TAP", source };
        let tap = tap.try_clone_to_owned().map_err(kept)?;
        // From here on, dropping the device stops it first.
        let device = VhostNet {
            file,
            watch,
            kicks: [kick_in, kick_out],
            events: [events_in, events_out],
            features,
            queues,
            space: None,
            tap,
            memory: ManuallyDrop::default(),
        };
        Ok((device, memory))
    }

    fn start_queues(&self, tap: BorrowedFd<'_>) -> Result<[DriverQueue; 2], VhostError> {
        let mut queues = Vec::with_capacity(2);
        for (name, (layout, pages)) in QueueName::ALL.into_iter().zip(self.queues.clone()) {
            queues.push(self.start_queue(name, layout, pages, tap)?);
        }
        <[DriverQueue; 2]>::try_from(queues)
            .map_err(|_| VhostError::Setting { what: "queues", source: Errno::INVAL.into() })
    }

    /// Detaches both queues from the worker. No request is in progress afterwards. Returns the number of
    /// buffers of each queue that the worker has begun; used buffers can still be popped.
    ///
    /// # Errors
    ///
    /// Returns [`VhostError::Setting`].
    pub fn stop(&self) -> Result<[u16; 2], VhostError> {
        let mut bases = [0; 2];
        for name in QueueName::ALL {
            let none = &mut vhost::vring_file(name.number(), -1);
            set(&self.file, ioctl::NET_SET_BACKEND, "VHOST_NET_SET_BACKEND", none)?;
        }
        for (name, base) in QueueName::ALL.into_iter().zip(&mut bases) {
            let mut state = vhost::vring_state(name.number(), 0);
            set(&self.file, ioctl::GET_VRING_BASE, "VHOST_GET_VRING_BASE", &mut state)?;
            // The kernel returns a 32-bit index in native byte order; a queue's index is its low 16 bits.
            let [_, _, _, _, a, b, c, d] = state;
            let index = u32::from_ne_bytes([a, b, c, d]) & u32::from(u16::MAX);
            *base = bounded(index, u16::MAX);
        }
        Ok(bases)
    }

    /// Restarts after [`VhostNet::stop`] with empty queues in the same memory. The previous queues must not be
    /// used any more.
    ///
    /// # Errors
    ///
    /// Returns a [`VhostError`].
    pub fn restart(&self, tap: BorrowedFd<'_>) -> Result<[DriverQueue; 2], VhostError> {
        for [_, error] in &self.events {
            // The worker's errors were about the previous queues.
            let _ = rustix::io::read(error, &mut [0; 8]);
        }
        self.start_queues(tap)
    }

    fn start_queue(
        &self,
        name: QueueName,
        layout: SplitLayout,
        pages: QueuePages,
        tap: BorrowedFd<'_>,
    ) -> Result<DriverQueue, VhostError> {
        let features = QueueFeatures {
            indirect: self.features & feature::INDIRECT != 0,
            event_idx: self.features & feature::EVENT_IDX != 0,
            in_order: self.features & feature::IN_ORDER != 0,
        };
        let address = |offset: usize| {
            let range = pages.device_range(offset, 0);
            range
                .map(ringfence_memory::DeviceRange::address)
                .map_err(|_| VhostError::QueueSize { size: layout.size() })
        };
        let (descriptors, used) = (address(layout.descriptor(0))?, address(layout.used_flags())?);
        let available = address(layout.avail_flags())?;
        let queue = DriverQueue::new(pages, layout, features);
        let (number, file) = (name.number(), &self.file);
        let size = &mut vhost::vring_state(number, layout.size().into());
        set(file, ioctl::SET_VRING_NUM, "VHOST_SET_VRING_NUM", size)?;
        let base = &mut vhost::vring_state(number, 0);
        set(file, ioctl::SET_VRING_BASE, "VHOST_SET_VRING_BASE", base)?;
        let tables = &mut vhost::vring_address(number, descriptors, used, available);
        set(file, ioctl::SET_VRING_ADDR, "VHOST_SET_VRING_ADDR", tables)?;
        let backend = &mut vhost::vring_file(number, tap.as_raw_fd());
        set(file, ioctl::NET_SET_BACKEND, "VHOST_NET_SET_BACKEND", backend)?;
        Ok(queue)
    }

    /// Returns the address space, if the device was [started](VhostNet::start_translated) with one.
    pub fn space(&self) -> Option<&Arc<IotlbSpace>> {
        self.space.as_ref()
    }

    /// Returns the negotiated bits of [`feature`].
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Wakes the worker because a queue has new buffers.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn kick(&self, queue: QueueName) -> io::Result<()> {
        let [receive, transmit] = &self.kicks;
        let kick = if queue == QueueName::Receive { receive } else { transmit };
        match rustix::io::write(kick, &1u64.to_ne_bytes()) {
            // A full counter is a kick that the worker has not read yet.
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Returns the events since the last call. Makes one system call.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn take_events(&self) -> io::Result<VhostEvents> {
        let mut list = Vec::with_capacity(8);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        epoll::wait(&self.watch, rustix::buffer::spare_capacity(&mut list), Some(&now))?;
        let mut events = VhostEvents::default();
        for event in list {
            match event.data.u64() {
                place::CALL => events.called = true,
                place::BACKEND => events.backend_gone = true,
                place::MISS => events.missed = true,
                error => {
                    let number = error - place::ERROR;
                    events.failed =
                        QueueName::ALL.into_iter().find(|name| u64::from(name.number()) == number);
                }
            }
        }
        Ok(events)
    }

    /// Returns `true` if the interface was deleted. [`VhostNet::take_events`] reports that only when the worker
    /// uses the interface next. The TAP is not in the epoll set, because each packet would wake this thread.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn is_gone(&self) -> io::Result<bool> {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut tap = [PollFd::new(&self.tap, PollFlags::empty())];
        poll(&mut tap, Some(&now))?;
        Ok(tap[0].revents().intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL))
    }
}

impl AsFd for VhostNet {
    /// Returns a descriptor that is readable while there are events.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }
}

impl Drop for VhostNet {
    /// Detaches both queues before their memory is unmapped. The kernel waits for the worker.
    fn drop(&mut self) {
        let stopped = QueueName::ALL.map(|name| {
            let none = &mut vhost::vring_file(name.number(), -1);
            set(&self.file, ioctl::NET_SET_BACKEND, "VHOST_NET_SET_BACKEND", none)
        });
        if stopped.iter().all(Result::is_ok) {
            // SAFETY: dropped once, here, and not used again.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

/// Allocates memory for queues of these sizes. Returns it with the part of each queue.
fn queue_memory(
    sizes: [u16; 2],
) -> Result<(DeviceRegion, [(SplitLayout, QueuePages); 2]), VhostError> {
    let layout = |size| SplitLayout::new(size).ok_or(VhostError::QueueSize { size });
    let layouts = [layout(sizes[0])?, layout(sizes[1])?];
    let bytes = layouts.map(|layout| QueuePages::bytes(layout).next_multiple_of(PAGE_SIZE));
    let mapping = Mapping::private(bytes[0] + bytes[1])
        .map_err(|source| VhostError::Setting { what: "memory for queues", source })?;
    let lent = mapping.lent();
    let pages = |layout: SplitLayout, offset, len| {
        let part = lent.slice(offset, len).and_then(|part| QueuePages::new(&part, layout));
        part.map(|pages| (layout, pages)).map_err(|_| VhostError::QueueSize { size: layout.size() })
    };
    let receive = pages(layouts[0], 0, bytes[0])?;
    let transmit = pages(layouts[1], bytes[0], bytes[1])?;
    Ok((lent.device_region(), [receive, transmit]))
}

/// Negotiates features with the device.
fn negotiate(file: &OwnedFd, in_order: bool, also: u64) -> Result<u64, VhostError> {
    const USEFUL: u64 = feature::INDIRECT | feature::EVENT_IDX;
    let needed = feature::VERSION_1 | feature::MRG_RXBUF | also;
    let mut word = [0; 8];
    set(file, ioctl::GET_FEATURES, "VHOST_GET_FEATURES", &mut word)?;
    let offered = u64::from_ne_bytes(word);
    let missing = needed & !offered;
    if missing != 0 {
        return Err(VhostError::Features { missing: feature::names(missing) });
    }
    let wanted = needed | USEFUL | if in_order { feature::IN_ORDER } else { 0 };
    let agreed = offered & wanted;
    set(file, ioctl::SET_FEATURES, "VHOST_SET_FEATURES", &mut agreed.to_ne_bytes())?;
    Ok(agreed)
}

/// Gives the device its memory table, with every region at its own address.
fn set_table(file: &OwnedFd, regions: &[DeviceRegion]) -> Result<(), VhostError> {
    let at_its_own = |region: &DeviceRegion| Region {
        device_address: region.address(),
        len: region.len(),
        user_address: region.address(),
    };
    let table: Vec<Region> = regions.iter().map(at_its_own).collect();
    let mut table =
        vhost::memory_table(&table).ok_or(VhostError::Regions { count: regions.len() })?;
    set(file, ioctl::SET_MEM_TABLE, "VHOST_SET_MEM_TABLE", &mut table)
}

/// Creates the eventfds of a queue. Returns the one for kicks, and the watched ones for calls and errors.
fn wire_up(
    file: &OwnedFd,
    watch: &OwnedFd,
    name: QueueName,
) -> Result<(OwnedFd, [OwnedFd; 2]), VhostError> {
    let new = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let make = || new().map_err(setting("eventfd"));
    let (kick, call, error) = (make()?, make()?, make()?);
    let number = name.number();
    for (request, what, event) in [
        (ioctl::SET_VRING_KICK, "VHOST_SET_VRING_KICK", &kick),
        (ioctl::SET_VRING_CALL, "VHOST_SET_VRING_CALL", &call),
        (ioctl::SET_VRING_ERR, "VHOST_SET_VRING_ERR", &error),
    ] {
        set(file, request, what, &mut vhost::vring_file(number, event.as_raw_fd()))?;
    }
    // Edge-triggered: only changes matter, the counters are never read.
    let edge = EventFlags::IN | EventFlags::ET;
    watch_file(watch, call.as_fd(), place::CALL, edge)?;
    watch_file(watch, error.as_fd(), place::ERROR + u64::from(number), EventFlags::IN)?;
    Ok((kick, [call, error]))
}

/// Adds a file to the epoll set. Errors of the file are always reported.
fn watch_file(
    watch: &OwnedFd,
    file: BorrowedFd<'_>,
    place: u64,
    flags: EventFlags,
) -> Result<(), VhostError> {
    epoll::add(watch, file, EventData::new_u64(place), flags).map_err(setting("epoll_ctl"))
}

fn setting(what: &'static str) -> impl Fn(Errno) -> VhostError {
    move |errno| VhostError::Setting { what, source: errno.into() }
}

/// Calls one ioctl of vhost.
fn set(
    file: &OwnedFd,
    request: u32,
    what: &'static str,
    argument: &mut [u8],
) -> Result<(), VhostError> {
    let size = (request >> 16 & 0x3fff) as usize;
    if argument.len() < size {
        return Err(VhostError::Setting { what, source: Errno::INVAL.into() });
    }
    // SAFETY: the request's number holds the number of bytes that the kernel accesses at the pointer, and the
    // buffer has that length. SET_MEM_TABLE reads more: the entries of the count in the bytes, which
    // `memory_table` encoded. The module's contract covers the memory that the kernel uses later.
    let done = unsafe {
        libc::ioctl(file.as_raw_fd(), libc::c_ulong::from(request), argument.as_mut_ptr())
    };
    if done < 0 {
        return Err(VhostError::Setting { what, source: io::Error::last_os_error() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some_file() -> OwnedFd {
        rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
    }

    #[test]
    fn file_that_is_no_device_is_refused_with_the_failed_step() {
        let setup = VhostSetup { sizes: [256; 2], regions: vec![], in_order: false };
        let started = VhostNet::start(some_file(), some_file().as_fd(), setup);
        let said = started.map(|_| ()).unwrap_err().to_string();
        assert!(said.starts_with("VHOST_SET_OWNER: "), "{said}");
    }

    #[test]
    fn impossible_queue_size_is_refused() {
        for size in [0, 100, 40_000] {
            let setup = VhostSetup { sizes: [256, size], regions: vec![], in_order: false };
            let started = VhostNet::start(some_file(), some_file().as_fd(), setup);
            assert!(matches!(started, Err(VhostError::QueueSize { size: s }) if s == size));
        }
    }

    #[test]
    fn queues_share_one_region_without_overlap() {
        let (region, pages) = queue_memory([8, 1024]).unwrap();
        let ends = pages.map(|(layout, pages)| {
            let all = pages.device_range(0, QueuePages::bytes(layout)).unwrap();
            assert!(region.contains(all));
            (all.address(), all.address() + u64::from(all.len()))
        });
        assert!(ends[0].1 <= ends[1].0);
    }
}

//! Frontend of tests: a hypervisor and its driver's vrings, for any device.
//!
//! The memory is a memfd, of which descriptors have the addresses of this process. It begins with a page for the mark of a
//! pool. The tables of the vrings come next, then buffers. The frontend keeps its memory, its vrings and the in-flight log
//! while backends come and go ([`Frontend::set_up`]).

// #syscall none: a hypervisor of tests

use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use ringfence_memory::{DeviceAccess, DeviceRange, LentSlice, Mapping, PAGE_SIZE, Protection};
use ringfence_ring::split::{DriverQueue, QueueFeatures, QueuePages};
use ringfence_sys::descriptors::take_of_stream;
use ringfence_sys::poll::wait_readable;
use ringfence_wire::vhost_user::{
    FILES_MAX, HEADER_LEN, MemoryRegion, POOL_MARK, PROTOCOL_FEATURES, memory_table, number,
    protocol_feature, request,
};
use ringfence_wire::virtio::{SplitLayout, feature};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

/// Bytes of memory for the tables of one vring.
const AREA: usize = 128 << 10;
/// Maximum wait for an answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Properties of a frontend.
#[derive(Clone, Copy, Debug)]
pub struct FrontShape {
    /// Number of vrings.
    pub vrings: u16,
    /// Entries of each vring.
    pub size: u16,
    /// Bytes for buffers.
    pub buffers: usize,
    /// Features that the driver wants.
    pub features: u64,
    /// Protocol features that the hypervisor wants.
    pub protocol: u64,
    /// The memory has the mark of a pool.
    pub has_mark: bool,
}

/// Vring of a frontend.
pub struct FrontVring {
    pub driver: DriverQueue,
    pub kick: OwnedFd,
    pub call: OwnedFd,
}

/// Frontend of a device. See the [module](self).
pub struct Frontend {
    shape: FrontShape,
    socket: Option<UnixStream>,
    pub file: OwnedFd,
    pub memory: LentSlice,
    /// Other memory of the machine, which the hypervisor hands over with the first one.
    pub other_files: Vec<OwnedFd>,
    pub vrings: Vec<FrontVring>,
    /// Description and file of the in-flight log.
    pub log: Option<(Vec<u8>, OwnedFd)>,
}

/// Encodes words of 64 bits.
pub fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Encodes the state of a vring.
pub fn state(index: u32, value: u32) -> Vec<u8> {
    [index.to_ne_bytes(), value.to_ne_bytes()].concat()
}

/// Creates a memfd of so many bytes, for the memory of a machine.
///
/// # Errors
///
/// Returns the system's error.
pub fn memfd(bytes: u64) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("memory", flags)?;
    rustix::fs::ftruncate(&file, bytes)?;
    Ok(file)
}

/// Creates a memfd of so many bytes for an in-flight log, which cannot shrink.
///
/// # Errors
///
/// Returns the system's error.
pub fn log_file(bytes: u64) -> io::Result<OwnedFd> {
    let file = memfd(bytes)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK)?;
    Ok(file)
}

/// Log of written pages for all addresses of a process. Its file has pages where marks are.
#[derive(Debug)]
pub struct PageMarks(OwnedFd);

impl PageMarks {
    /// Length of the log in bytes: a bit for each page of 2^47 bytes.
    pub const BYTES: u64 = 1 << (47 - 12 - 3);

    /// Creates a log without a mark.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub fn new() -> io::Result<PageMarks> {
        log_file(PageMarks::BYTES).map(PageMarks)
    }

    /// Returns the file, for the device.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Takes the marks off `count` pages from an address on, as a hypervisor does. Returns `true` for each page that was
    /// marked.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub fn take(&self, address: u64, count: usize) -> io::Result<Vec<bool>> {
        let mut marks = Vec::new();
        for page in (address / PAGE_SIZE as u64..).take(count) {
            let mut byte = [0];
            rustix::io::pread(&self.0, &mut byte, page / 8)?;
            let bit = 1 << (page % 8);
            marks.push(byte[0] & bit != 0);
            rustix::io::pwrite(&self.0, &[byte[0] & !bit], page / 8)?;
        }
        Ok(marks)
    }
}

/// Sends bytes with at most 16 files.
///
/// # Errors
///
/// Returns the system's error.
pub fn send_with(socket: impl AsFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(files));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Returns a region at the start of its file, whose addresses are the same in both address spaces.
fn region(start: u64, len: u64) -> MemoryRegion {
    MemoryRegion { guest: start, len, user: start, offset: 0 }
}

impl Frontend {
    /// Creates the memory and its vrings.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    ///
    /// # Panics
    ///
    /// Panics if the size is no power of two.
    pub fn new(shape: FrontShape) -> io::Result<Frontend> {
        let bytes = PAGE_SIZE + usize::from(shape.vrings) * AREA + shape.buffers;
        let file = memfd(bytes as u64)?;
        let memory = Mapping::new(&file, 0, bytes, Protection::ReadWrite)?.lent();
        if shape.has_mark {
            memory.copy_from(0, &POOL_MARK).map_err(io::Error::other)?;
        }
        let layout = SplitLayout::new(shape.size).expect("a power of two");
        let features = QueueFeatures {
            indirect: shape.features & feature::INDIRECT != 0,
            event_idx: shape.features & feature::EVENT_IDX != 0,
            in_order: false,
        };
        let mut vrings = Vec::new();
        for number in 0..usize::from(shape.vrings) {
            let at = PAGE_SIZE + number * AREA;
            let pages = memory.slice(at, QueuePages::bytes(layout)).map_err(io::Error::other)?;
            let pages = QueuePages::new(&pages, layout).map_err(io::Error::other)?;
            let mut driver = DriverQueue::new(pages, layout, features);
            driver.arm(1).map_err(io::Error::other)?;
            let event = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
            vrings.push(FrontVring { driver, kick: event()?, call: event()? });
        }
        let other_files = Vec::new();
        Ok(Frontend { shape, socket: None, file, memory, other_files, vrings, log: None })
    }

    /// Returns the offset of the first buffer in the memory.
    pub fn buffers_at(&self) -> usize {
        PAGE_SIZE + usize::from(self.shape.vrings) * AREA
    }

    /// Returns the offset of a vring's tables in the memory.
    pub fn tables_at(&self, index: u16) -> usize {
        PAGE_SIZE + usize::from(index) * AREA
    }

    /// Returns the address of the memory.
    pub fn base(&self) -> u64 {
        self.range(0, 1, DeviceAccess::Read).address()
    }

    /// Returns a part of the memory for a descriptor.
    ///
    /// # Panics
    ///
    /// Panics if the part is not in the memory.
    pub fn range(&self, offset: usize, len: usize, access: DeviceAccess) -> DeviceRange {
        self.memory.device_range(offset, len, access).expect("a part of the memory")
    }

    /// Uses a connection to a backend.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub fn attach(&mut self, socket: UnixStream) -> io::Result<()> {
        socket.set_read_timeout(Some(PATIENCE))?;
        self.socket = Some(socket);
        Ok(())
    }

    /// Connects to the socket of a backend.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub fn connect(&mut self, path: &Path) -> io::Result<()> {
        self.attach(UnixStream::connect(path)?)
    }

    /// Closes the connection, as a hypervisor that ends does.
    pub fn disconnect(&mut self) {
        self.socket = None;
    }

    /// Returns the connection.
    ///
    /// # Errors
    ///
    /// Returns `NotConnected` without one.
    pub fn socket(&self) -> io::Result<&UnixStream> {
        self.socket.as_ref().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Sends bytes with files.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub fn send_bytes(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        send_with(self.socket()?, bytes, files)
    }

    /// Sends a request without an answer.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub fn send(&self, number: u32, payload: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_bytes(&request(number, false, payload), files)
    }

    /// Sends a request, and returns the payload and the files of its answer.
    ///
    /// # Errors
    ///
    /// Returns the system's error, and `UnexpectedEof` if the backend has closed the connection.
    pub fn ask(&self, number: u32, payload: &[u8]) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        self.send(number, payload, &[])?;
        self.answer()
    }

    /// Sends a request, and waits until the backend has carried it out.
    ///
    /// # Errors
    ///
    /// As [`Frontend::ask`].
    pub fn order(&self, number: u32, payload: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        if self.shape.protocol & protocol_feature::REPLY_ACK == 0 {
            return self.send(number, payload, files);
        }
        self.send_bytes(&request(number, true, payload), files)?;
        match self.answer()? {
            (payload, _) if payload == 0_u64.to_ne_bytes() => Ok(()),
            (payload, _) => Err(io::Error::other(format!("{number}: {payload:?}"))),
        }
    }

    /// Waits for an answer, and returns its payload and its files.
    ///
    /// # Errors
    ///
    /// As [`Frontend::ask`].
    pub fn answer(&self) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let mut socket = self.socket()?;
        let mut header = [0; HEADER_LEN];
        if !wait_readable(socket, Some(PATIENCE))? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let received = take_of_stream(socket, &mut header, FILES_MAX).map_err(io::Error::other)?;
        if received.bytes < HEADER_LEN {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let [.., l0, l1, l2, l3] = header;
        let len = u32::from_ne_bytes([l0, l1, l2, l3]).min(4096);
        let mut payload = vec![0; len as usize];
        socket.read_exact(&mut payload)?;
        Ok((payload, received.descriptors.into_vec()))
    }

    /// Negotiates features, as QEMU does.
    ///
    /// # Errors
    ///
    /// As [`Frontend::ask`], and an error that names what was not offered.
    pub fn negotiate(&self) -> io::Result<()> {
        let FrontShape { features, protocol, .. } = self.shape;
        let word = |payload: &[u8]| payload.first_chunk().map_or(0, |b| u64::from_ne_bytes(*b));
        let missing = |wanted: u64, (payload, _): (Vec<u8>, _)| match wanted & !word(&payload) {
            0 => Ok(()),
            missing => Err(io::Error::other(format!("{missing:#x} is not offered"))),
        };
        missing(features | PROTOCOL_FEATURES, self.ask(number::GET_FEATURES, &[])?)?;
        missing(protocol, self.ask(number::GET_PROTOCOL_FEATURES, &[])?)?;
        self.send(number::SET_PROTOCOL_FEATURES, &words(&[protocol]), &[])?;
        self.send(number::SET_OWNER, &[], &[])
    }

    /// Hands over the memory of the vrings, and other memory: region by region with that protocol feature, or all in a table.
    ///
    /// # Errors
    ///
    /// As [`Frontend::order`].
    pub fn send_memory(&self) -> io::Result<()> {
        let mut regions = Vec::new();
        let mut files = Vec::new();
        for (file, number) in self.other_files.iter().zip(1_u64..) {
            let len = rustix::fs::fstat(file)?.st_size.cast_unsigned();
            regions.push(region(number << 46, len));
            files.push(file.as_fd());
        }
        regions.push(self.own_region());
        files.push(self.file.as_fd());
        if self.shape.protocol & protocol_feature::CONFIGURE_MEM_SLOTS == 0 {
            return self.order(number::SET_MEM_TABLE, &memory_table(&regions), &files);
        }
        let mut each = regions.into_iter().zip(files);
        each.try_for_each(|(region, file)| self.add_region(region, file))
    }

    /// Adds a region of a file to the memory.
    ///
    /// # Errors
    ///
    /// As [`Frontend::order`].
    pub fn add_region(&self, region: MemoryRegion, file: BorrowedFd<'_>) -> io::Result<()> {
        self.order(number::ADD_MEM_REG, &memory_table(&[region]), &[file])
    }

    /// Removes a region from the memory.
    ///
    /// # Errors
    ///
    /// As [`Frontend::order`].
    pub fn remove_region(&self, region: MemoryRegion) -> io::Result<()> {
        self.order(number::REM_MEM_REG, &memory_table(&[region]), &[])
    }

    /// Returns the region with the vrings and the buffers.
    pub fn own_region(&self) -> MemoryRegion {
        region(self.base(), self.memory.len() as u64)
    }

    /// Asks for an in-flight log unless there is one, and passes it.
    ///
    /// # Errors
    ///
    /// As [`Frontend::order`].
    pub fn send_log(&mut self) -> io::Result<()> {
        if self.log.is_none() {
            let queues = [self.shape.vrings, self.shape.size].map(u16::to_ne_bytes).concat();
            let wanted = [words(&[0, 0]), queues, vec![0; 4]].concat();
            let (described, files) = self.ask(number::GET_INFLIGHT_FD, &wanted)?;
            let file = files.into_iter().next().ok_or(io::ErrorKind::InvalidData)?;
            self.log = Some((described, file));
        }
        let Some((described, file)) = &self.log else { return Ok(()) };
        self.order(number::SET_INFLIGHT_FD, described, &[file.as_fd()])
    }

    /// Sends what QEMU sends for a vring.
    ///
    /// # Errors
    ///
    /// As [`Frontend::order`].
    pub fn send_vring(&self, index: u16) -> io::Result<()> {
        let layout = SplitLayout::new(self.shape.size).ok_or(io::ErrorKind::InvalidInput)?;
        // QEMU continues behind the used chains after a backend has gone.
        let used_at = self.tables_at(index) + layout.used_idx();
        let used = self.memory.fetch::<2>(used_at).map_err(io::Error::other)?.into_unchecked();
        let (number, vring) = (u32::from(index), &self.vrings[usize::from(index)]);
        self.send(number::SET_VRING_NUM, &state(number, self.shape.size.into()), &[])?;
        let base = u16::from_le_bytes(used).into();
        self.send(number::SET_VRING_BASE, &state(number, base), &[])?;
        self.send_tables(index, 0)?;
        let word = words(&[number.into()]);
        self.send(number::SET_VRING_KICK, &word, &[vring.kick.as_fd()])?;
        self.send(number::SET_VRING_CALL, &word, &[vring.call.as_fd()])?;
        self.order(number::SET_VRING_ENABLE, &state(number, 1), &[])
    }

    /// Sends the addresses of a vring's tables. The used ring has its own address in a log of written pages.
    ///
    /// # Errors
    ///
    /// As [`Frontend::order`].
    pub fn send_tables(&self, index: u16, flags: u32) -> io::Result<()> {
        let layout = SplitLayout::new(self.shape.size).ok_or(io::ErrorKind::InvalidInput)?;
        let start = self.base() + self.tables_at(index) as u64;
        let [used, available] = [layout.used_flags(), layout.avail_flags()].map(|at| at as u64);
        let tables = words(&[start, start + used, start + available, start + used]);
        let head = [u32::from(index), flags].map(u32::to_ne_bytes).concat();
        self.order(number::SET_VRING_ADDR, &[head, tables].concat(), &[])
    }

    /// Sets the device up on a new connection.
    ///
    /// # Errors
    ///
    /// As [`Frontend::negotiate`].
    pub fn set_up(&mut self) -> io::Result<()> {
        self.negotiate()?;
        if self.shape.protocol & protocol_feature::INFLIGHT != 0 {
            self.send_log()?;
        }
        let features = self.shape.features | PROTOCOL_FEATURES;
        self.send(number::SET_FEATURES, &words(&[features]), &[])?;
        self.send_memory()?;
        (0..self.shape.vrings).try_for_each(|index| self.send_vring(index))
    }

    /// Publishes chains of a vring, and kicks the device if it wants that.
    pub fn kick(&mut self, index: usize) {
        let vring = &mut self.vrings[index];
        if vring.driver.publish() {
            // The counter of a kick does not fill in a test.
            let _ = rustix::io::write(&vring.kick, &1_u64.to_ne_bytes());
        }
    }
}

//! Disk on a chain that another process opened.
//!
//! # Locking
//!
//! Many threads serve requests. Reads and writes of clusters that are allocated share the disk. Everything that changes
//! metadata has it alone: writes that allocate, zeros, discards, and the flush of the library's tables. So no table is
//! written while an entry of it changes, and a discard invalidates no mapping that another request uses. The sync that
//! makes a flush durable does not hold the disk.

// #syscall driver lseek 2=3: SEEK_DATA, where a raw backing file has holes
// #syscall driver lseek 2=4: SEEK_HOLE, where a raw backing file has holes

use core::ops::Range;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use imago::io_buffers::IoBuffer;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{FormatAccess, Mapping};
use ringfence_sys::images::{ImageFile, ImageStorage};
use ringfence_sys::numbers::usize_from;
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::chain::{ChainFacts, DEPTH_MAX, MemberFormat, OpenChain};
use super::file::{FileHandle, MemberFile, Stopped};
use super::order::{Durability, WriteOrder};
use super::pieces::Pieces;
use crate::storage::extents::{ExtentList, ExtentState, memory};
use crate::storage::file::{Bounce, CacheMode, FileFacts, FileKind, FileOptions};
use crate::storage::qcow2_header::Header;
use crate::storage::threads::ThreadQueue;
use crate::storage::{Discard, Disk, DiskQueue, Geometry, LiveDisk, Op, Request, check_request};

/// Size in bytes of the private memory of one thread.
const BUFFER: usize = 1 << 20;

/// Alignment in bytes of that memory: more than O_DIRECT requires anywhere.
const BUFFER_ALIGN: usize = 4096;

type Storage = ImageStorage<MemberFile>;
type Access = FormatAccess<Storage>;
/// Place of a range of the disk, and the length for which it holds.
type Place<'a> = (Mapping<'a, Storage>, u64);

/// Disk on a qcow2 image.
pub struct QcowDisk {
    image: Arc<Image>,
    /// Files of the image itself, without those below it.
    pub(super) own_files: Vec<FileHandle>,
}

/// Open chain, shared by the threads that serve requests.
pub(super) struct Image {
    /// Chain until the library opens it, and the library's access, or `None` if it failed to open.
    chain: Mutex<Option<Closed>>,
    access: OnceLock<Option<RwLock<Access>>>,
    /// File of the image's clusters.
    data: FileHandle,
    geometry: Geometry,
    version: u32,
    cluster: u64,
    cache: CacheMode,
    discard: bool,
    bounce_always: bool,
    /// Set once the library failed an assertion. Its tables are not written any more.
    broken: Stopped,
}

/// Private memory of a thread.
#[derive(Default)]
pub(super) struct Buffer(Option<IoBuffer>);

impl Buffer {
    /// Returns the first `len` bytes, or all if there are fewer.
    fn bytes(&mut self, len: u64) -> io::Result<&mut [u8]> {
        let buffer = match self.0.take() {
            Some(buffer) => buffer,
            None => IoBuffer::new(BUFFER, BUFFER_ALIGN)?,
        };
        let buffer = self.0.insert(buffer);
        let len = usize_from(len.min(BUFFER as u64));
        Ok(&mut buffer.as_mut().into_slice()[..len])
    }
}

impl QcowDisk {
    /// Creates a disk on a chain that was opened in this process.
    ///
    /// # Errors
    ///
    /// As [`QcowDisk::handed`], and an error if the library refuses the image.
    pub fn new(chain: OpenChain, options: &FileOptions) -> io::Result<QcowDisk> {
        let disk = QcowDisk::handed(&chain.facts(), chain.files, options)?;
        catch_unwind(AssertUnwindSafe(|| disk.image.opened().map(|_| ())))
            .map_err(|_| io::Error::other("the library of qcow2 failed at this image"))??;
        Ok(disk)
    }

    /// Creates a disk on the files of a chain that another process opened. The first request reads the tables: their
    /// storage may be slow.
    ///
    /// # Errors
    ///
    /// Returns an error if the files are not those of the chain.
    pub fn handed(
        facts: &ChainFacts,
        files: Vec<OwnedFd>,
        options: &FileOptions,
    ) -> io::Result<QcowDisk> {
        let mut files = files.into_iter();
        let missing = || io::Error::other("the files are not those of the chain");
        let stopped = Stopped::default();
        let mut members = vec![];
        for member in &facts.members {
            let mut take = |facts| {
                let file = files.next().ok_or_else(missing)?;
                Ok::<_, io::Error>(MemberFile::new(file, facts, &stopped))
            };
            let file = take(member.file)?;
            let data_file = member.data_file.map(take).transpose()?;
            members.push(OpenMember { file, data_file, format: member.format });
        }
        let is_valid = files.len() == 0 && facts.members.len() <= DEPTH_MAX;
        let image = members.first().filter(|_| is_valid).ok_or_else(missing)?;
        let own_files = [Some(&image.file), image.data_file.as_ref()];
        let own_files = own_files.into_iter().flatten().map(MemberFile::handle).collect();
        let data = image.data_file.as_ref().unwrap_or(&image.file);
        let (data, file) = (data.handle(), *image.file.facts());
        let durability = match options.cache {
            CacheMode::Unsafe => Durability::Killed,
            _ => Durability::PowerLoss,
        };
        let writes = (!file.read_only).then_some(durability);
        let chain = Mutex::new(Some(Closed { members, writes }));
        let image = Arc::new(Image::new(chain, data, facts, &file, options, stopped));
        Ok(QcowDisk { image, own_files })
    }
}

/// Member of a chain whose library is not opened yet.
struct OpenMember {
    file: MemberFile,
    data_file: Option<MemberFile>,
    format: MemberFormat,
}

/// Chain whose library is not opened yet.
struct Closed {
    /// Members from the image down.
    members: Vec<OpenMember>,
    /// Durability of the metadata of the image, if it is written.
    writes: Option<Durability>,
}

impl Closed {
    fn open(self) -> io::Result<Access> {
        let mut below = None;
        for (level, member) in self.members.into_iter().enumerate().rev() {
            let writes = self.writes.filter(|_| level == 0);
            below = Some(open_member(member, below.take(), writes)?);
        }
        below.ok_or_else(|| io::Error::other("a chain has an image"))
    }
}

/// Reads and validates the header of an open member.
fn header_of(file: &MemberFile) -> io::Result<Header> {
    let mut head = vec![0; 1 << 16];
    file.read_unaligned(&mut head, 0)?;
    let bits = head[20..24].try_into().map_or(0, u32::from_be_bytes);
    if (16..=21).contains(&bits) {
        head.resize(1 << bits, 0);
        file.read_unaligned(&mut head, 0)?;
    }
    Header::parse(&head).map_err(|error| io::Error::other(format!("the image {error}")))
}

/// Opens a member by the library. `writes` is the durability of its metadata, if it is written.
fn open_member(
    member: OpenMember,
    below: Option<Access>,
    writes: Option<Durability>,
) -> io::Result<Access> {
    let OpenMember { mut file, data_file, format } = member;
    if format == MemberFormat::Raw {
        return Ok(FormatAccess::new(Raw::open_image(Storage::new(file), false)?));
    }
    if let Some(durability) = writes {
        let order = WriteOrder::new(&header_of(&file)?, durability);
        file = file.with_order(order)?;
    }
    let mut image = Qcow2::<Storage>::open_image(Storage::new(file), writes.is_some())?;
    if image.requires_external_data_file() != data_file.is_some() {
        return Err(io::Error::other("the image has another data file than its header names"));
    }
    image.set_data_file(data_file.map(Storage::new));
    image.set_backing(below);
    Ok(FormatAccess::new(image))
}

impl Image {
    fn new(
        chain: Mutex<Option<Closed>>,
        data: FileHandle,
        facts: &ChainFacts,
        file: &FileFacts,
        options: &FileOptions,
        broken: Stopped,
    ) -> Image {
        let discard = options.discard && facts.version >= 3 && !file.read_only;
        let cluster = 1u64 << facts.cluster_bits.min(21);
        let granularity = u32::try_from(cluster).unwrap_or(u32::MAX);
        let geometry = Geometry {
            bytes: facts.bytes,
            sector_size: file.sector_size,
            physical_sector_size: file.physical_sector_size,
            read_only: file.read_only,
            flush: true,
            discard: discard.then_some(Discard { granularity, alignment: 0, secure: false }),
            write_zeroes: !file.read_only,
            extents: true,
            rotational: file.rotational,
        };
        let bounce_always = match options.bounce {
            Bounce::Always => true,
            Bounce::Never => false,
            Bounce::Auto => file.checksums && file.direct.is_some(),
        };
        let access = OnceLock::new();
        let (cache, version) = (options.cache, facts.version);
        Image {
            chain,
            access,
            data,
            geometry,
            version,
            cluster,
            cache,
            discard,
            bounce_always,
            broken,
        }
    }

    /// Returns the library's access, and opens it the first time.
    fn opened(&self) -> io::Result<&RwLock<Access>> {
        let mut refused = None;
        let access = self.access.get_or_init(|| {
            let chain = self.chain.lock().unwrap_or_else(PoisonError::into_inner).take()?;
            chain.open().map(RwLock::new).map_err(|error| refused = Some(error)).ok()
        });
        if let Some(error) = refused {
            tracing::error!("the image cannot be served: {error}");
            return Err(error);
        }
        access.as_ref().ok_or_else(|| io::Error::from_raw_os_error(libc::EIO))
    }

    fn shared(&self) -> io::Result<RwLockReadGuard<'_, Access>> {
        Ok(self.opened()?.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn exclusive(&self) -> io::Result<RwLockWriteGuard<'_, Access>> {
        Ok(self.opened()?.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Checks a request against the geometry.
    pub(super) fn check(&self, request: &Request) -> Result<(), i32> {
        let Geometry { bytes, sector_size, read_only, .. } = self.geometry;
        check_request(request, bytes, sector_size, read_only)
    }

    /// Serves a request. Returns the errno of a failure.
    pub(super) fn result_of(&self, request: &Request, buffer: &mut Buffer) -> Result<(), i32> {
        if self.broken.get().is_some() {
            return Err(libc::EIO);
        }
        let served = catch_unwind(AssertUnwindSafe(|| self.serve(request, buffer)));
        let Ok(served) = served else {
            // The tables in memory may be inconsistent, so nothing more is read or written.
            let _ = self.broken.set(());
            tracing::error!(
                "the library of qcow2 failed at a request: the disk is not served any more"
            );
            return Err(libc::EIO);
        };
        served.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
    }

    fn serve(&self, request: &Request, buffer: &mut Buffer) -> io::Result<()> {
        let pieces = Pieces(&request.segments);
        let range = request.range();
        let durable = match request.op {
            Op::Read => return self.read(range, pieces, buffer),
            Op::Extents => return self.extents(range, request),
            Op::Flush => self.cache != CacheMode::Unsafe,
            Op::Write { fua } => {
                self.write(range, pieces, buffer)?;
                self.cache.is_synchronous() || (fua && self.cache != CacheMode::Unsafe)
            }
            Op::Discard { secure } if secure || !self.discard => {
                return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
            }
            Op::Discard { .. } => {
                self.free(range)?;
                self.cache.is_synchronous()
            }
            Op::WriteZeroes { allocate } => {
                self.zero(range, allocate, buffer)?;
                self.cache.is_synchronous()
            }
        };
        if durable { self.flush() } else { Ok(()) }
    }

    /// Makes all completed writes durable.
    fn flush(&self) -> io::Result<()> {
        if self.geometry.read_only {
            return Ok(());
        }
        self.exclusive()?.flush()?;
        self.shared()?.sync()
    }

    fn read(&self, range: Range<u64>, pieces: Pieces<'_>, buffer: &mut Buffer) -> io::Result<()> {
        let access = self.shared()?;
        let mut at = range.start;
        while at < range.end {
            let from = at - range.start;
            let (mapping, len) = access.get_mapping(at, range.end - at)?;
            at += match mapping {
                Mapping::Raw { storage, offset, .. } => {
                    self.read_raw(storage.file(), offset, pieces, from..from + len, buffer)?;
                    len
                }
                Mapping::Zero { .. } => {
                    pieces.zero(from, len)?;
                    len
                }
                Mapping::Eof { .. } => {
                    pieces.zero(from, range.end - at)?;
                    range.end - at
                }
                _ => {
                    let bytes = buffer.bytes(len)?;
                    access.read(&mut *bytes, at)?;
                    pieces.fill(from, bytes)?;
                    bytes.len() as u64
                }
            };
        }
        Ok(())
    }

    /// Reads from a file into a part of the request's memory.
    fn read_raw(
        &self,
        file: &MemberFile,
        offset: u64,
        pieces: Pieces<'_>,
        part: Range<u64>,
        buffer: &mut Buffer,
    ) -> io::Result<()> {
        let mut at = part.start;
        while at < part.end {
            let (left, place) = (part.end - at, offset + (at - part.start));
            if self.bounce_always || !pieces.fit(at, left, file.facts().direct) {
                let bytes = buffer.bytes(left)?;
                file.read_unaligned(bytes, place)?;
                pieces.fill(at, bytes)?;
                at += bytes.len() as u64;
                continue;
            }
            let read = retried(|| pieces.read_once(file, place, at, left))?;
            at += read;
            if read == 0 || (at < part.end && place + read >= file.size()?) {
                return pieces.zero(at, part.end - at);
            }
        }
        Ok(())
    }

    fn write(&self, range: Range<u64>, pieces: Pieces<'_>, buffer: &mut Buffer) -> io::Result<()> {
        let mut at = range.start;
        let access = self.shared()?;
        while at < range.end {
            let Some(len) = self.overwrite(
                access.get_mapping(at, range.end - at)?,
                at - range.start,
                pieces,
                buffer,
            )?
            else {
                break;
            };
            at += len;
        }
        drop(access);
        if at == range.end {
            return Ok(());
        }
        let access = self.exclusive()?;
        while at < range.end {
            let from = at - range.start;
            let place = access.get_mapping(at, range.end - at)?;
            if let Some(len) = self.overwrite(place, from, pieces, buffer)? {
                at += len;
                continue;
            }
            let bytes = buffer.bytes(range.end - at)?;
            pieces.gather(from, bytes)?;
            access.write(&*bytes, at)?;
            at += bytes.len() as u64;
        }
        Ok(())
    }

    /// Writes to clusters that are allocated, from byte `from` of the request on. Returns the length, or `None` if the
    /// clusters must be allocated first.
    fn overwrite(
        &self,
        (mapping, len): Place<'_>,
        from: u64,
        pieces: Pieces<'_>,
        buffer: &mut Buffer,
    ) -> io::Result<Option<u64>> {
        let Mapping::Raw { storage, offset, writable: true, .. } = mapping else { return Ok(None) };
        let file = storage.file();
        let mut done = 0;
        while done < len {
            let (at, left, place) = (from + done, len - done, offset + done);
            if self.bounce_always || !pieces.fit(at, left, file.facts().direct) {
                let bytes = buffer.bytes(left)?;
                pieces.gather(at, bytes)?;
                file.write_all(&mut [IoSlice::new(bytes)], place)?;
                done += bytes.len() as u64;
                continue;
            }
            match retried(|| pieces.write_once(file, place, at, left))? {
                0 => return Err(io::Error::from_raw_os_error(libc::ENOSPC)),
                written => done += written,
            }
        }
        Ok(Some(len))
    }

    /// Makes a range read as zeros, and frees its clusters unless they shall stay allocated.
    fn zero(&self, range: Range<u64>, allocate: bool, buffer: &mut Buffer) -> io::Result<()> {
        let len = range.end - range.start;
        match (self.version, allocate) {
            (..3, _) => self.write_zeros(range, buffer),
            (_, true) => self.exclusive()?.write_zeroes(range.start, len),
            (_, false) => self.free(range),
        }
    }

    /// Writes zeros as data, where a range does not read as zeros already: version 2 has no clusters of zeros.
    fn write_zeros(&self, range: Range<u64>, buffer: &mut Buffer) -> io::Result<()> {
        let access = self.exclusive()?;
        let mut at = range.start;
        while at < range.end {
            let (mapping, len) = access.get_mapping(at, range.end - at)?;
            if let Mapping::Zero { .. } = mapping {
                at += len;
                continue;
            }
            let bytes = buffer.bytes(len)?;
            bytes.fill(0);
            access.write(&*bytes, at)?;
            at += bytes.len() as u64;
        }
        Ok(())
    }

    /// Frees the clusters of a range, which reads as zeros then, and the storage of the file below them.
    ///
    /// Zeros in a part of a cluster may allocate one, and an L2 table takes one, too. So the parts come last, and each L2
    /// table by itself: no cluster has a new use before its storage is freed.
    fn free(&self, range: Range<u64>) -> io::Result<()> {
        let mut access = self.exclusive()?;
        let end = match range.end == self.geometry.bytes {
            true => range.end,
            false => range.end - range.end % self.cluster,
        };
        let start = range.start.next_multiple_of(self.cluster).min(range.end);
        let mut at = start;
        while at < end {
            // Each entry of a table has 8 bytes.
            let table = (at + 1).next_multiple_of(self.cluster * (self.cluster / 8)).min(end);
            self.free_clusters(&mut access, at..table)?;
            at = table;
        }
        let rest = at.max(start);
        for part in [range.start..start, rest..range.end].iter().filter(|part| !part.is_empty()) {
            access.discard_to_zero(part.start, part.end - part.start)?;
        }
        Ok(())
    }

    /// Frees whole clusters of one L2 table.
    fn free_clusters(&self, access: &mut Access, range: Range<u64>) -> io::Result<()> {
        let mut freed = vec![];
        let mut at = range.start;
        while at < range.end {
            let (mapping, len) = access.get_mapping(at, range.end - at)?;
            if len == 0 {
                break;
            }
            if let Mapping::Raw { offset, writable: true, .. } = mapping {
                freed.push((at, offset, len));
            }
            at += len;
        }
        access.discard_to_zero(range.start, range.end - range.start)?;
        // No other request runs, and nothing was allocated, so the clusters have no new use yet.
        for (at, offset, len) in freed {
            if let (Mapping::Zero { .. }, _) = access.get_mapping(at, len)? {
                self.data.punch(offset, len);
            }
        }
        Ok(())
    }

    /// Lists the extents of a range: data of the image and of its backing files, and zeros.
    fn extents(&self, range: Range<u64>, request: &Request) -> io::Result<()> {
        let mut list = ExtentList::new(range.end - range.start, self.geometry.sector_size);
        let access = self.shared()?;
        while !list.is_full() {
            let at = range.start + list.given();
            let (mapping, len) = access.get_mapping(at, range.end - at)?;
            let (state, len) = match mapping {
                Mapping::Zero { .. } => (ExtentState::HOLE, len),
                Mapping::Eof { .. } => (ExtentState::HOLE, range.end - at),
                Mapping::Raw { storage, offset, .. } => state_in_file(storage.file(), offset, len),
                _ => (ExtentState::DATA, len),
            };
            list.push(len.max(1), state);
        }
        list.store(memory(&request.segments)).map_err(io::Error::other)
    }
}

/// Returns the state of a range of a file, and the length for which it holds. A raw backing file may have holes.
fn state_in_file(file: &MemberFile, offset: u64, len: u64) -> (ExtentState, u64) {
    if file.facts().kind == FileKind::BlockDevice {
        return (ExtentState::DATA, len);
    }
    let until = |end: u64| end.saturating_sub(offset).min(len);
    match rustix::fs::seek(file, SeekFrom::Data(offset)) {
        Ok(data) if data > offset => (ExtentState::HOLE, until(data)),
        Ok(_) => match rustix::fs::seek(file, SeekFrom::Hole(offset)) {
            Ok(hole) if hole > offset => (ExtentState::DATA, until(hole)),
            _ => (ExtentState::DATA, len),
        },
        Err(Errno::NXIO) => (ExtentState::HOLE, len),
        Err(_) => (ExtentState::DATA, len),
    }
}

/// Repeats a call that a signal interrupted.
fn retried(mut call: impl FnMut() -> io::Result<u64>) -> io::Result<u64> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

impl Disk for QcowDisk {
    fn geometry(&self) -> Geometry {
        self.image.geometry
    }

    fn queue(&self, depth: u32) -> io::Result<Box<dyn DiskQueue>> {
        Ok(Box::new(ThreadQueue::new(Arc::clone(&self.image), depth)?))
    }

    fn live(&self) -> Option<&dyn LiveDisk> {
        Some(self)
    }
}

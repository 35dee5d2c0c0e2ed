//! Properties of a file that serves as a disk, and the checks and lock at its opening.
//!
//! They are determined by the process that opens the file, which has `/sys` and may name paths. The domain
//! that does the I/O receives the descriptor and these facts.

// #syscall daemon openat: the disks of guests that come
// #syscall daemon fstat,fstatfs: what a disk is, and on what
// #syscall daemon statx 2-AT_EMPTY_PATH: whether a file is there
// #syscall daemon fallocate: whether ranges can be given up
// #syscall daemon fcntl 1=F_GETFL: O_DIRECT
// #syscall daemon fcntl 1=F_SETFL: O_DIRECT
// #syscall daemon pread64: the signature of a disk image
// #syscall daemon ioctl 1=0x1268: BLKSSZGET: how large its sectors are
// #syscall daemon ioctl 1=0x127b: BLKPBSZGET: how large those of its medium are

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use ringfence_memory::{Mapping, ReadList};
use ringfence_sys::blkdev;
use rustix::fs::{AtFlags, FallocateFlags, FileType, Mode, OFlags, StatxFlags};
use serde::{Deserialize, Serialize};

use super::super::below::overlay_above;
use super::super::signature::{EXAMINED, Format};
use super::error::{OpenFileError, system};
use super::growth::measure;
use super::lock;
use super::options::{Engine, FileOptions};

/// File systems that compute checksums of written data (`linux/magic.h`).
const CHECKSUMMING: [u64; 3] = [
    0x9123_683E, // btrfs
    0x2FC1_2FC1, // ZFS
    0xCA45_1A4E, // bcachefs
];

/// File types that can hold a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum FileKind {
    Regular,
    BlockDevice,
}

/// Alignment that O_DIRECT requires, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DirectRules {
    /// Alignment of memory addresses.
    pub memory: u32,
    /// Alignment of offsets and lengths.
    pub offset: u32,
}

/// Properties of a file that was opened as a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileFacts {
    pub kind: FileKind,
    /// Size of the disk in bytes, a multiple of the sector size; of a file of an image, the file's own size.
    pub bytes: u64,
    /// Sector size in bytes: 512 or 4096.
    pub sector_size: u32,
    /// Sector size of the medium in bytes.
    pub physical_sector_size: u32,
    /// Set if the file was opened read-only.
    pub read_only: bool,
    /// Alignment for O_DIRECT, or `None` if the page cache is used.
    pub direct: Option<DirectRules>,
    /// Set if the file supports discards.
    pub can_discard: bool,
    /// Set if the file had less storage than its size when it was opened.
    pub sparse: bool,
    /// Unit of discards in bytes.
    pub discard_granularity: u32,
    /// Offset in bytes of the first unit of discards.
    pub discard_alignment: u32,
    /// Set if secure discards are supported.
    pub discard_secure: bool,
    /// Set if seeking takes time.
    pub rotational: bool,
    /// Set if the storage computes checksums: a page that changes during a write makes the block unreadable.
    pub checksums: bool,
}

/// File that was opened and locked as a disk.
#[derive(Debug)]
pub struct OpenFile {
    pub file: OwnedFd,
    pub facts: FileFacts,
    /// Descriptor that marks the disk as served, for I/O that may outlive the process (`lock.rs`).
    pub mark: Option<OwnedFd>,
}

impl OpenFile {
    /// Opens and locks `path` and determines its properties. O_DIRECT is dropped, with a warning, if the file
    /// does not support it or requires more alignment than a sector has.
    ///
    /// # Errors
    ///
    /// Returns [`OpenFileError`].
    pub fn open(path: &Path, options: &FileOptions) -> Result<OpenFile, OpenFileError> {
        OpenFile::open_reporting(path, options, &warn)
    }

    /// Opens a file as [`OpenFile::open`] does, and reports to `report` if it waits for a lock.
    ///
    /// # Errors
    ///
    /// Returns [`OpenFileError`].
    pub fn open_reporting(
        path: &Path,
        options: &FileOptions,
        report: &dyn Fn(&str),
    ) -> Result<OpenFile, OpenFileError> {
        let open = |flags| -> io::Result<OwnedFd> {
            Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())?)
        };
        let file = open(OpenFile::flags(options)).map_err(|source| {
            let path = path.to_owned();
            match OpenFile::denies_writing(&source, options, || open(OpenFile::reading()).is_ok()) {
                true => OpenFileError::NotWritable { path, source },
                false => OpenFileError::System { what: "opening", path, source },
            }
        })?;
        OpenFile::examine(file, path, options, report)
    }

    /// Returns the flags with which a file is opened for [`OpenFile::of`].
    pub fn flags(options: &FileOptions) -> OFlags {
        let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        // O_NONBLOCK: opening a FIFO of that name must not block.
        access | OFlags::NOCTTY | OFlags::NONBLOCK
    }

    /// Returns the flags with which a disk is opened that is only read.
    pub fn reading() -> OFlags {
        OpenFile::flags(&FileOptions { read_only: true, ..FileOptions::default() })
    }

    /// Returns `true` if a file was not opened because it may not be written. `reads` tries to open it for reading.
    pub fn denies_writing(
        error: &io::Error,
        options: &FileOptions,
        reads: impl FnOnce() -> bool,
    ) -> bool {
        let denials = [libc::EACCES, libc::EPERM, libc::EROFS, libc::ETXTBSY];
        let denied = error.raw_os_error().is_some_and(|errno| denials.contains(&errno));
        denied && !options.read_only && reads()
    }

    /// Locks a file that was opened with [`OpenFile::flags`] and determines its properties. All calls use the
    /// descriptor; `path` only names the file in messages.
    ///
    /// # Errors
    ///
    /// Returns [`OpenFileError`].
    pub fn of(
        file: OwnedFd,
        path: &Path,
        options: &FileOptions,
    ) -> Result<OpenFile, OpenFileError> {
        OpenFile::examine(file, path, options, &warn)
    }

    fn examine(
        file: OwnedFd,
        path: &Path,
        options: &FileOptions,
        report: &dyn Fn(&str),
    ) -> Result<OpenFile, OpenFileError> {
        let stat = rustix::fs::fstat(&file).map_err(system("looking at", path))?;
        let kind = FileKind::of(&stat, path)?;
        let sector_size = sector_size(&file, kind, options, path)?;
        lock::acquire(&file, options.read_only, path, report)?;
        refuse_below_overlay(&file, path, options)?;
        // Before the size: an image of another format may have any.
        if kind == FileKind::Regular && !options.raw && !options.in_use {
            refuse_formats(&file, stat.st_size.max(0).cast_unsigned(), path)?;
        }
        let bytes = bytes(&file, kind, sector_size, options, path)?;
        let facts = FileFacts::of(&file, &stat, bytes, sector_size, options);
        let rings = options.engine != Engine::Threads;
        let mark = if rings { lock::mark(&file, path) } else { None };
        Ok(OpenFile { file, facts, mark }.with_cache_mode(path, options))
    }

    /// Locks a file of a disk image and determines its properties. Its size is not limited to whole sectors.
    /// A wait for a lock is reported to `report`; without it no lock is taken.
    ///
    /// # Errors
    ///
    /// Returns [`OpenFileError`].
    pub(in crate::storage) fn of_image(
        file: OwnedFd,
        path: &Path,
        options: &FileOptions,
        report: Option<&dyn Fn(&str)>,
    ) -> Result<OpenFile, OpenFileError> {
        let stat = rustix::fs::fstat(&file).map_err(system("looking at", path))?;
        let kind = FileKind::of(&stat, path)?;
        let sector_size = sector_size(&file, kind, options, path)?;
        if let Some(report) = report {
            lock::acquire(&file, options.read_only, path, report)?;
        }
        refuse_below_overlay(&file, path, options)?;
        let bytes = length(&file, kind, path)?;
        let facts = FileFacts::of(&file, &stat, bytes, sector_size, options);
        Ok(OpenFile { file, facts, mark: None })
    }

    /// Sets O_DIRECT if the cache mode asks for it and the file supports it.
    pub(in crate::storage) fn with_cache_mode(
        mut self,
        path: &Path,
        options: &FileOptions,
    ) -> OpenFile {
        let FileFacts { kind, sector_size, .. } = self.facts;
        let direct =
            options.cache.is_direct().then(|| use_direct(&self.file, path, kind, sector_size));
        self.facts.direct = direct.flatten();
        self
    }
}

impl FileKind {
    fn of(stat: &rustix::fs::Stat, path: &Path) -> Result<FileKind, OpenFileError> {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Ok(FileKind::Regular),
            FileType::BlockDevice => Ok(FileKind::BlockDevice),
            _ => Err(OpenFileError::Kind { path: path.to_owned() }),
        }
    }
}

impl FileFacts {
    /// Determines the properties of a file of `bytes` bytes that uses the page cache.
    fn of(
        file: &OwnedFd,
        stat: &rustix::fs::Stat,
        bytes: u64,
        sector_size: u32,
        options: &FileOptions,
    ) -> FileFacts {
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => FileKind::BlockDevice,
            _ => FileKind::Regular,
        };
        let sysfs = Sysfs::of(kind, stat.st_rdev);
        let discards = Discards::of(file, kind, &sysfs, options.read_only, bytes);
        FileFacts {
            kind,
            bytes,
            sector_size,
            physical_sector_size: physical(file, kind, sector_size),
            read_only: options.read_only,
            direct: None,
            can_discard: discards.possible,
            sparse: kind == FileKind::Regular && allocated(stat) < bytes,
            discard_granularity: discards.granularity.max(sector_size),
            discard_alignment: discards.alignment,
            discard_secure: discards.secure,
            rotational: sysfs.number("queue/rotational") == Some(1),
            checksums: checksums(file, kind, &sysfs),
        }
    }
}

/// Description of a file that was not opened as a disk.
#[derive(Debug)]
pub struct FileDescription {
    /// Size in bytes.
    pub bytes: u64,
    /// Set if the file begins like a qcow2 image.
    pub is_qcow: bool,
    /// Reason for which the file is not served as a raw disk.
    pub refusal: Option<OpenFileError>,
}

impl FileDescription {
    /// Describes a file as a raw disk. The file is read and not locked.
    ///
    /// # Errors
    ///
    /// Returns [`OpenFileError`] if the file cannot be read.
    pub fn of(path: &Path, options: &FileOptions) -> Result<FileDescription, OpenFileError> {
        let served = options;
        let options = FileOptions { read_only: true, ..served.clone() };
        let flags = OpenFile::flags(&options) | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(system("opening", path))?;
        let stat = rustix::fs::fstat(&file).map_err(system("looking at", path))?;
        let kind = FileKind::of(&stat, path)?;
        let length = length(&file, kind, path)?;
        let examined = match kind {
            FileKind::Regular if !options.raw => refuse_formats(&file, length, path),
            _ => Ok(()),
        };
        let is_qcow = matches!(examined, Err(OpenFileError::NotRaw { format: Format::Qcow, .. }));
        let sized = || {
            let sector_size = sector_size(&file, kind, &options, path)?;
            bytes(&file, kind, sector_size, &options, path)
        };
        let refusal = examined
            .and_then(|()| refuse_below_overlay(&file, path, served))
            .and_then(|()| sized().map(drop))
            .err();
        Ok(FileDescription { bytes: length, is_qcow, refusal })
    }
}

fn warn(text: &str) {
    tracing::warn!("{text}");
}

/// Returns the sector size: the requested one if the device supports it, otherwise the device's, or 512.
fn sector_size(
    file: &OwnedFd,
    kind: FileKind,
    options: &FileOptions,
    path: &Path,
) -> Result<u32, OpenFileError> {
    let smallest = match kind {
        FileKind::Regular => 512,
        FileKind::BlockDevice => {
            rustix::fs::ioctl_blksszget(file).map_err(system("asking for the sectors of", path))?
        }
    };
    let wanted = options.sector_size.unwrap_or(smallest);
    let refused = |why| OpenFileError::Sector { path: path.to_owned(), wanted, why };
    if !matches!(wanted, 512 | 4096) {
        return Err(refused("a disk has sectors of 512 or 4096 bytes".to_owned()));
    }
    if wanted < smallest {
        return Err(refused(format!("the device's have {smallest}")));
    }
    Ok(wanted)
}

/// Fails for a file below an overlay that these options would write, unless a guest uses it already.
pub(in crate::storage) fn refuse_below_overlay(
    file: &OwnedFd,
    path: &Path,
    options: &FileOptions,
) -> Result<(), OpenFileError> {
    if options.read_only || options.in_use {
        return Ok(());
    }
    match overlay_above(file) {
        Some(overlay) => Err(OpenFileError::BelowOverlay { path: path.to_owned(), overlay }),
        None => Ok(()),
    }
}

/// Fails for a file with the signature of a format that is not raw.
fn refuse_formats(file: &OwnedFd, bytes: u64, path: &Path) -> Result<(), OpenFileError> {
    let examine = |from: u64| -> Result<Vec<u8>, OpenFileError> {
        let mut part = vec![0; EXAMINED];
        let mut filled = 0;
        while filled < EXAMINED {
            let read = rustix::io::pread(file, &mut part[filled..], from + filled as u64);
            match read {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(system("reading", path)(errno)),
            }
        }
        part.truncate(filled);
        Ok(part)
    };
    let (head, tail) = (examine(0)?, examine(bytes.saturating_sub(EXAMINED as u64))?);
    match Format::of(&head, &tail) {
        Some(format) => Err(OpenFileError::NotRaw { path: path.to_owned(), format }),
        None => Ok(()),
    }
}

/// Sets O_DIRECT on the open file, if it supports it. Returns the alignment that it requires. A second open
/// of the path could reach another file.
fn use_direct(
    file: &OwnedFd,
    path: &Path,
    kind: FileKind,
    sector_size: u32,
) -> Option<DirectRules> {
    let set = |direct: bool| {
        let mut flags = rustix::fs::fcntl_getfl(file)?;
        flags.set(OFlags::DIRECT, direct);
        rustix::fs::fcntl_setfl(file, flags)
    };
    let why = match set(true) {
        Ok(()) => match direct_rules(file, kind) {
            Some(rules) if rules.offset <= sector_size => return Some(rules),
            Some(rules) => format!(
                "it asks for multiples of {} bytes, and sectors have {sector_size} (4096-byte \
                 sectors would do)",
                rules.offset
            ),
            None => "it is refused for every alignment".to_owned(),
        },
        Err(error) => error.to_string(),
    };
    if let Err(error) = set(false) {
        tracing::warn!("{}: O_DIRECT stays set: {error}", path.display());
    }
    tracing::warn!("{}: no O_DIRECT there: {why}. The page cache is used", path.display());
    None
}

/// Returns the alignment reported by the file system (Linux 6.1), or one found by trial reads.
fn direct_rules(file: &OwnedFd, kind: FileKind) -> Option<DirectRules> {
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
    if let Some(stat) = stat
        && StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::DIOALIGN)
    {
        let rules =
            DirectRules { memory: stat.stx_dio_mem_align, offset: stat.stx_dio_offset_align };
        return (rules.memory > 0 && rules.offset > 0).then_some(rules);
    }
    if kind == FileKind::BlockDevice {
        let sector = rustix::fs::ioctl_blksszget(file).ok()?;
        return Some(DirectRules { memory: sector, offset: sector });
    }
    [512, 4096]
        .into_iter()
        .find(|align| try_direct(file, *align))
        .map(|align| DirectRules { memory: align, offset: align })
}

/// Returns `true` if a direct read with an alignment of `align` bytes succeeds.
fn try_direct(file: &OwnedFd, align: u32) -> bool {
    let Ok(room) = Mapping::private(3 * 4096) else { return false };
    let (lent, len) = (room.lent(), align as usize);
    let mut list = ReadList::new();
    list.push_lent(&lent, len, len).is_ok() && list.read_at(file, u64::from(align)).is_ok()
}

/// Returns the size of the disk in bytes. For a file that a guest uses already, a partial sector at the
/// end is not served.
fn bytes(
    file: &OwnedFd,
    kind: FileKind,
    sector_size: u32,
    options: &FileOptions,
    path: &Path,
) -> Result<u64, OpenFileError> {
    let bytes = length(file, kind, path)?;
    let over = bytes % u64::from(sector_size);
    if over > 0 && options.in_use {
        tracing::warn!("{}: its last {over} bytes are no sector and not served", path.display());
    }
    match (bytes - over, over) {
        (0, _) if bytes == 0 => Err(OpenFileError::Empty { path: path.to_owned(), bytes }),
        (whole, 0) => Ok(whole),
        (whole, _) if options.in_use && whole > 0 => Ok(whole),
        _ => Err(OpenFileError::Odd { path: path.to_owned(), bytes, sector_size }),
    }
}

/// Returns the size of the file in bytes.
fn length(file: &OwnedFd, kind: FileKind, path: &Path) -> Result<u64, OpenFileError> {
    measure(file, kind).map_err(system("asking for the size of", path))
}

fn physical(file: &OwnedFd, kind: FileKind, sector_size: u32) -> u32 {
    let found = match kind {
        FileKind::Regular => None,
        FileKind::BlockDevice => rustix::fs::ioctl_blkpbszget(file).ok(),
    };
    // By definition a multiple of the sector size; some devices report less.
    found.filter(|size| size.is_power_of_two()).unwrap_or(0).max(sector_size)
}

/// Properties of discards of a file.
#[derive(Default)]
struct Discards {
    possible: bool,
    granularity: u32,
    alignment: u32,
    secure: bool,
}

impl Discards {
    fn of(file: &OwnedFd, kind: FileKind, sysfs: &Sysfs, read_only: bool, bytes: u64) -> Discards {
        if read_only {
            return Discards::default();
        }
        let number = |name| sysfs.number(name).and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
        match kind {
            FileKind::Regular => {
                let stat = rustix::fs::fstat(file).ok();
                let block = stat.and_then(|stat| u32::try_from(stat.st_blksize).ok());
                // Punching a hole beyond the end changes nothing, and shows whether holes are supported.
                let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let behind = bytes.next_multiple_of(1 << 20);
                let possible = rustix::fs::fallocate(file, mode, behind, 4096).is_ok();
                let granularity = block.filter(|size| size.is_power_of_two()).unwrap_or(4096);
                Discards { possible, granularity, ..Discards::default() }
            }
            FileKind::BlockDevice => Discards {
                possible: sysfs.number("queue/discard_max_bytes").is_some_and(|max| max > 0),
                granularity: number("queue/discard_granularity"),
                alignment: number("discard_alignment"),
                secure: blkdev::can_discard_securely(file),
            },
        }
    }
}

/// Returns the storage of a file in bytes.
fn allocated(stat: &rustix::fs::Stat) -> u64 {
    // The unit is 512 bytes on every file system (`stat(3type)`).
    u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512)
}

fn checksums(file: &OwnedFd, kind: FileKind, sysfs: &Sysfs) -> bool {
    match kind {
        FileKind::Regular => rustix::fs::fstatfs(file)
            .is_ok_and(|fs| u64::try_from(fs.f_type).is_ok_and(|id| CHECKSUMMING.contains(&id))),
        FileKind::BlockDevice => sysfs.number("queue/stable_writes") == Some(1),
    }
}

/// Attributes of a block device in `/sys`; empty for a regular file.
struct Sysfs(Vec<PathBuf>);

impl Sysfs {
    fn of(kind: FileKind, device: u64) -> Sysfs {
        if kind == FileKind::Regular {
            return Sysfs(vec![]);
        }
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let here = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        // A partition uses the queue of its device.
        let above = here.join("..");
        Sysfs(vec![here, above])
    }

    fn number(&self, name: &str) -> Option<u64> {
        let text = self.0.iter().find_map(|base| std::fs::read_to_string(base.join(name)).ok())?;
        text.trim().parse().ok()
    }
}

//! Headers of qcow2 images, as far as the decision needs them how an image is served.
//!
//! Every number of a header may be hostile. [`Header::parse`] bounds each one and refuses, by its name, a feature that the
//! library of the format does not have.
//!
//! Source: "Qcow2 Image File Format" (`docs/interop/qcow2.rst` of QEMU). Numbers are big-endian.

// #syscall daemon pread64: the header of an image

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use ringfence_sys::numbers::usize_from;

/// First bytes of an image.
const MAGIC: &[u8] = b"QFI\xfb";

/// Length in bytes of the header of version 2, and the least of version 3.
const LENGTHS: [usize; 2] = [72, 104];

/// Cluster sizes: 512 bytes to 2 MiB, QEMU's largest.
const CLUSTER_BITS: core::ops::RangeInclusive<u32> = 9..=21;

/// Maximum length in bytes of the table of L1 entries, and of the refcount table. QEMU has the same.
const L1_MAX: u64 = 32 << 20;
const REFCOUNT_TABLE_MAX: u64 = 8 << 20;

/// Maximum size in bytes of a disk: the host offsets of entries have 56 bits.
const BYTES_MAX: u64 = 1 << 56;

/// Maximum length in bytes of a file name in a header.
const NAME_MAX: usize = 1023;

/// Numbers of L2 tables and refcount blocks that the library keeps in memory.
const CACHED: [u64; 2] = [128, 32];

// Bits of the incompatible features.
const DIRTY: u64 = 1 << 0;
const CORRUPT: u64 = 1 << 1;
const DATA_FILE: u64 = 1 << 2;
const COMPRESSION: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;

// Types of header extensions.
const END: u32 = 0;
const BACKING_FORMAT: u32 = 0xE279_2ACA;
const DATA_FILE_NAME: u32 = 0x4441_5441;

/// Reasons for which an image is not served, or not with this header. Each reads on behind the name of the image.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HeaderError {
    #[error("is not a qcow2 image: serve it as raw, or name the right file")]
    Magic,
    #[error("ends within its header of {wanted} bytes")]
    Truncated { wanted: usize },
    #[error(
        "is a qcow image of version {0}, and versions 2 and 3 are served: convert it (qemu-img convert -O qcow2)"
    )]
    Version(u32),
    #[error("has clusters of 2^{0} bytes, and 2^9 to 2^21 are served: its header is damaged")]
    ClusterBits(u32),
    #[error(
        "is encrypted (method {method}, {name}), which Ringfence does not serve: decrypt it (qemu-img convert), or encrypt \
             in the guest"
    )]
    Encrypted { method: u32, name: &'static str },
    #[error(
        "has {0} internal snapshots, which Ringfence does not serve: delete them (qemu-img snapshot -d), or copy the \
             disk without them (qemu-img convert)"
    )]
    Snapshots(u32),
    #[error("was not closed by its last user (dirty bit): repair it (qemu-img check -r all)")]
    Dirty,
    #[error("is marked as corrupt: repair it (qemu-img check -r all)")]
    Corrupt,
    #[error(
        "compresses with zstd or another type than zlib, which Ringfence does not serve: convert it (qemu-img convert -O \
             qcow2)"
    )]
    Compression,
    #[error(
        "has extended L2 entries (subclusters), which Ringfence does not serve: convert it (qemu-img convert -O qcow2 -o \
             extended_l2=off)"
    )]
    ExtendedL2,
    #[error("has features that Ringfence does not know (incompatible bits {0:#x})")]
    Features(u64),
    #[error("has a damaged header: {what} is {value}, which no image has")]
    Field { what: &'static str, value: u64 },
    #[error("has a file name in its header that is no text, or too long")]
    Name,
    #[error(
        "has a disk of {bytes} bytes, which is no multiple of its sectors of {sector} bytes: resize it (qemu-img resize)"
    )]
    Odd { bytes: u64, sector: u32 },
}

/// Backing file as an image names it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Backing {
    pub name: String,
    /// Format of the backing file, if the image names it.
    pub format: Option<String>,
}

/// External data file of an image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DataFile {
    /// Name in the header, if there is one.
    pub name: Option<String>,
}

/// Validated header of an image that can be served.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    pub cluster_bits: u32,
    /// Size of the disk in bytes.
    pub bytes: u64,
    /// Offset in bytes of the L1 table, and the number of its entries.
    pub l1: (u64, u64),
    /// Offset in bytes of the refcount table, and its length in bytes.
    pub refcount_table: (u64, u64),
    /// Binary logarithm of the number of bits of a refcount.
    pub refcount_order: u32,
    pub lazy_refcounts: bool,
    pub backing: Option<Backing>,
    pub data_file: Option<DataFile>,
}

/// Returns the path for which a file name in a header stands. A name with a colon before each slash is a protocol's, and
/// stands for none.
pub(super) fn path_of_name(name: &str) -> Option<&Path> {
    let first = name.split('/').next().unwrap_or(name);
    (!first.contains(':')).then(|| Path::new(name))
}

impl Header {
    /// Reads and parses the header of a file.
    ///
    /// # Errors
    ///
    /// Returns the system's error, or the reason for which the image is not served.
    pub fn read(file: impl AsFd) -> io::Result<Result<Header, HeaderError>> {
        // O_DIRECT is not set yet, so any length can be read.
        let first = read_up_to(&file, LENGTHS[1])?;
        let bits = first.get(20..24).map_or(0, |bytes| u32_at(bytes, 0));
        if !CLUSTER_BITS.contains(&bits) {
            return Ok(Header::parse(&first));
        }
        Ok(Header::parse(&read_up_to(&file, 1 << bits)?))
    }

    /// Parses the first cluster of an image, or as much of it as the file has.
    ///
    /// # Errors
    ///
    /// Returns the reason for which the image is not served.
    pub fn parse(head: &[u8]) -> Result<Header, HeaderError> {
        if !head.starts_with(MAGIC) {
            return Err(HeaderError::Magic);
        }
        let fixed = |wanted| head.get(..wanted).ok_or(HeaderError::Truncated { wanted });
        let version = u32_at(fixed(8)?, 4);
        let least = match version {
            2 => LENGTHS[0],
            3 => LENGTHS[1],
            other => return Err(HeaderError::Version(other)),
        };
        let fields = fixed(least)?;
        let cluster_bits = u32_at(fields, 20);
        if !CLUSTER_BITS.contains(&cluster_bits) {
            return Err(HeaderError::ClusterBits(cluster_bits));
        }
        let (features, compatible, order, length) = match version {
            2 => (0, 0, 4, least),
            _ => (
                u64_at(fields, 72),
                u64_at(fields, 80),
                u32_at(fields, 96),
                u32_at(fields, 100) as usize,
            ),
        };
        check_features(features)?;
        check_content(u32_at(fields, 32), u32_at(fields, 60))?;
        let cluster = 1usize << cluster_bits;
        if length < least || length > cluster || !length.is_multiple_of(8) {
            return Err(HeaderError::Field {
                what: "the length of the header",
                value: length as u64,
            });
        }
        let extensions = Extensions::parse(head, length, cluster)?;
        let mut header = Header {
            version,
            cluster_bits,
            bytes: u64_at(fields, 24),
            l1: (u64_at(fields, 40), u32_at(fields, 36).into()),
            refcount_table: (u64_at(fields, 48), u64::from(u32_at(fields, 56)) << cluster_bits),
            refcount_order: order,
            lazy_refcounts: compatible & 1 != 0,
            backing: None,
            data_file: None,
        };
        header.check_tables()?;
        header.data_file =
            (features & DATA_FILE != 0).then_some(DataFile { name: extensions.data_file });
        header.backing = backing(head, fields, cluster)?
            .map(|name| Backing { name, format: extensions.backing_format });
        Ok(header)
    }

    /// Returns the cluster size in bytes.
    pub fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Returns the most memory in bytes that the library takes for the tables of the image.
    pub fn memory(&self) -> u64 {
        let l2 = CACHED[0].min(self.l1.1);
        let blocks = CACHED[1].min(self.refcount_table.1 / 8);
        (l2 + blocks) * self.cluster() + self.l1.1 * 8 + self.refcount_table.1
    }

    /// Bounds the tables. An image whose L1 table is smaller than its disk is refused, so that no write ever moves the
    /// table.
    fn check_tables(&self) -> Result<(), HeaderError> {
        let wrong = |what, value| Err(HeaderError::Field { what, value });
        let aligned = |offset: u64| offset.is_multiple_of(self.cluster()) && offset < BYTES_MAX;
        if self.bytes >= BYTES_MAX {
            return wrong("the size of the disk", self.bytes);
        }
        if self.refcount_order > 6 {
            return wrong("the order of refcounts", self.refcount_order.into());
        }
        if !aligned(self.l1.0) {
            return wrong("the offset of the L1 table", self.l1.0);
        }
        let each = self.cluster() * (self.cluster() / 8);
        if self.l1.1 * 8 > L1_MAX || self.l1.1 < self.bytes.div_ceil(each) {
            return wrong("the number of L1 entries", self.l1.1);
        }
        if !aligned(self.refcount_table.0) || self.refcount_table.0 == 0 {
            return wrong("the offset of the refcount table", self.refcount_table.0);
        }
        if self.refcount_table.1 == 0 || self.refcount_table.1 > REFCOUNT_TABLE_MAX {
            return wrong("the length of the refcount table", self.refcount_table.1);
        }
        Ok(())
    }
}

/// Refuses features that the library does not have.
fn check_features(features: u64) -> Result<(), HeaderError> {
    for (bit, error) in [
        (CORRUPT, HeaderError::Corrupt),
        (DIRTY, HeaderError::Dirty),
        (COMPRESSION, HeaderError::Compression),
        (EXTENDED_L2, HeaderError::ExtendedL2),
    ] {
        if features & bit != 0 {
            return Err(error);
        }
    }
    match features & !DATA_FILE {
        0 => Ok(()),
        unknown => Err(HeaderError::Features(unknown)),
    }
}

/// Refuses encrypted images and those with internal snapshots.
fn check_content(encryption: u32, snapshots: u32) -> Result<(), HeaderError> {
    let name = match encryption {
        0 if snapshots > 0 => return Err(HeaderError::Snapshots(snapshots)),
        0 => return Ok(()),
        1 => "AES",
        2 => "LUKS",
        _ => "unknown",
    };
    Err(HeaderError::Encrypted { method: encryption, name })
}

/// Returns the name of the backing file.
fn backing(head: &[u8], fields: &[u8], cluster: usize) -> Result<Option<String>, HeaderError> {
    let (offset, len) = (u64_at(fields, 8), u32_at(fields, 16) as usize);
    if offset == 0 || len == 0 {
        return Ok(None);
    }
    if len > NAME_MAX || offset >= cluster as u64 {
        return Err(HeaderError::Name);
    }
    let start = usize_from(offset);
    let name = head.get(start..start + len).ok_or(HeaderError::Name)?;
    text(name).map(Some)
}

fn text(bytes: &[u8]) -> Result<String, HeaderError> {
    let text = core::str::from_utf8(bytes).map_err(|_| HeaderError::Name)?;
    let is_name = !text.is_empty() && text.len() <= NAME_MAX && !text.contains('\0');
    if is_name { Ok(text.to_owned()) } else { Err(HeaderError::Name) }
}

/// Header extensions that matter here.
#[derive(Default)]
struct Extensions {
    backing_format: Option<String>,
    data_file: Option<String>,
}

impl Extensions {
    /// Parses the extensions from `start` to their end mark, or to the end of the first cluster.
    fn parse(head: &[u8], start: usize, cluster: usize) -> Result<Extensions, HeaderError> {
        let mut found = Extensions::default();
        let mut at = start;
        loop {
            let Some(entry) = head.get(at..at + 8).filter(|_| at + 8 <= cluster) else {
                // The file may end behind the header.
                return Ok(found);
            };
            let (kind, len) = (u32_at(entry, 0), u32_at(entry, 4) as usize);
            if kind == END {
                return Ok(found);
            }
            let wrong =
                HeaderError::Field { what: "the length of an extension", value: len as u64 };
            let content = head.get(at + 8..).and_then(|rest| rest.get(..len)).ok_or(wrong)?;
            let place = match kind {
                BACKING_FORMAT => Some(&mut found.backing_format),
                DATA_FILE_NAME => Some(&mut found.data_file),
                _ => None,
            };
            if let Some(place) = place {
                let value = text(content)?;
                if place.as_ref().is_some_and(|earlier| *earlier != value) {
                    let (what, value) = ("a second extension of the same type", kind.into());
                    return Err(HeaderError::Field { what, value });
                }
                *place = Some(value);
            }
            at += 8 + len.next_multiple_of(8);
        }
    }
}

/// Reads the first `len` bytes of a file, or as many as it has.
fn read_up_to(file: impl AsFd, len: usize) -> io::Result<Vec<u8>> {
    let mut head = vec![0; len];
    let mut filled = 0;
    while filled < len {
        match rustix::io::pread(&file, &mut head[filled..], filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    head.truncate(filled);
    Ok(head)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|part| part.try_into().ok()).map_or(0, u32::from_be_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|part| part.try_into().ok()).map_or(0, u64::from_be_bytes)
}

//! Requests and configuration space of a virtio disk (virtio 1.x, section 5.2).
//!
//! A request is a chain: a header of 16 bytes that the device reads, data, and one status byte that the device writes.
//! Data of [`RequestKind::Discard`] and [`RequestKind::WriteZeroes`] is a list of [`BlkRange`]s.

/// Feature bits, as masks of the 64-bit word.
pub mod feature {
    /// Maximum length of a segment is in the configuration space (`VIRTIO_BLK_F_SIZE_MAX`).
    pub const SIZE_MAX: u64 = 1 << 1;
    /// Maximum number of segments is in the configuration space (`VIRTIO_BLK_F_SEG_MAX`).
    pub const SEG_MAX: u64 = 1 << 2;
    /// The disk is read-only (`VIRTIO_BLK_F_RO`).
    pub const RO: u64 = 1 << 5;
    /// Block size is in the configuration space (`VIRTIO_BLK_F_BLK_SIZE`).
    pub const BLK_SIZE: u64 = 1 << 6;
    /// The device has a write cache, and flushes it on request (`VIRTIO_BLK_F_FLUSH`).
    pub const FLUSH: u64 = 1 << 9;
    /// Physical block size is in the configuration space (`VIRTIO_BLK_F_TOPOLOGY`).
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The device has several queues (`VIRTIO_BLK_F_MQ`).
    pub const MQ: u64 = 1 << 12;
    /// The device discards ranges (`VIRTIO_BLK_F_DISCARD`).
    pub const DISCARD: u64 = 1 << 13;
    /// The device zeroes ranges (`VIRTIO_BLK_F_WRITE_ZEROES`).
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// Unit of sector numbers and of the capacity, in bytes.
pub const SECTOR: u64 = 512;
/// Length of a request's header in bytes.
pub const HEADER_BYTES: usize = 16;
/// Length of a range in bytes.
pub const RANGE_BYTES: usize = 16;
/// Length of the identity of a disk in bytes.
pub const ID_BYTES: usize = 20;
/// Length of the configuration space in bytes, up to the fields of [`feature::WRITE_ZEROES`].
pub const CONFIG_BYTES: usize = 60;

/// Bit of a range's flags: the device may free its storage. The others are reserved.
const UNMAP: u32 = 1;

/// Result of a request, as its status byte says it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum BlkStatus {
    Okay = 0,
    Error = 1,
    Unsupported = 2,
}

/// Kind of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestKind {
    Read,
    Write,
    Flush,
    /// Asks for the identity of the disk: [`ID_BYTES`] of text.
    Identity,
    Discard,
    WriteZeroes,
    Unknown(u32),
}

/// Header of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestHeader {
    pub kind: RequestKind,
    /// First sector of a read or a write, in units of [`SECTOR`].
    pub sector: u64,
}

impl RequestHeader {
    /// Decodes a header; accepts any bytes. The second word is reserved.
    pub fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> RequestHeader {
        let [k0, k1, k2, k3, _, _, _, _, sector @ ..] = *bytes;
        let kind = match u32::from_le_bytes([k0, k1, k2, k3]) {
            0 => RequestKind::Read,
            1 => RequestKind::Write,
            4 => RequestKind::Flush,
            8 => RequestKind::Identity,
            11 => RequestKind::Discard,
            13 => RequestKind::WriteZeroes,
            unknown => RequestKind::Unknown(unknown),
        };
        RequestHeader { kind, sector: u64::from_le_bytes(sector) }
    }

    /// Encodes the header as laid out in memory.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let kind = match self.kind {
            RequestKind::Read => 0,
            RequestKind::Write => 1,
            RequestKind::Flush => 4,
            RequestKind::Identity => 8,
            RequestKind::Discard => 11,
            RequestKind::WriteZeroes => 13,
            RequestKind::Unknown(unknown) => unknown,
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&self.sector.to_le_bytes());
        bytes
    }
}

/// Range of a discard or of zeros.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlkRange {
    /// First sector.
    pub sector: u64,
    /// Number of sectors.
    pub sectors: u32,
    /// Set if the device may free the storage of the range.
    pub unmap: bool,
    /// Set if reserved bits of the flags are set.
    pub has_reserved: bool,
}

impl BlkRange {
    /// Decodes a range; accepts any bytes.
    pub fn from_bytes(bytes: &[u8; RANGE_BYTES]) -> BlkRange {
        let [a0, a1, a2, a3, a4, a5, a6, a7, n0, n1, n2, n3, f0, f1, f2, f3] = *bytes;
        let flags = u32::from_le_bytes([f0, f1, f2, f3]);
        BlkRange {
            sector: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            sectors: u32::from_le_bytes([n0, n1, n2, n3]),
            unmap: flags & UNMAP != 0,
            has_reserved: flags & !UNMAP != 0,
        }
    }
}

/// Configuration space of a disk. Every field is valid with its feature alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlkConfig {
    /// Size of the disk in units of [`SECTOR`].
    pub capacity: u64,
    /// Maximum length of a segment in bytes.
    pub size_max: u32,
    /// Maximum number of segments of a request.
    pub seg_max: u32,
    /// Block size in bytes.
    pub blk_size: u32,
    /// Physical block size: 2 to this power blocks.
    pub physical_block_exp: u8,
    /// Number of queues.
    pub queues: u16,
    /// Maximum number of sectors of a discard.
    pub max_discard_sectors: u32,
    /// Unit of discards in sectors.
    pub discard_alignment: u32,
    /// Maximum number of sectors of a request for zeros.
    pub max_write_zeroes_sectors: u32,
    /// Set if zeros can free storage.
    pub write_zeroes_may_unmap: bool,
}

impl BlkConfig {
    /// Encodes the configuration space. A discard and a request for zeros have one range.
    pub fn to_bytes(self) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &self.capacity.to_le_bytes());
        put(8, &self.size_max.to_le_bytes());
        put(12, &self.seg_max.to_le_bytes());
        put(20, &self.blk_size.to_le_bytes());
        put(24, &[self.physical_block_exp]);
        put(34, &self.queues.to_le_bytes());
        put(36, &self.max_discard_sectors.to_le_bytes());
        put(40, &1_u32.to_le_bytes());
        put(44, &self.discard_alignment.to_le_bytes());
        put(48, &self.max_write_zeroes_sectors.to_le_bytes());
        put(52, &1_u32.to_le_bytes());
        put(56, &[u8::from(self.write_zeroes_may_unmap)]);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn header_bytes_match_layout() {
        let header = RequestHeader { kind: RequestKind::WriteZeroes, sector: 0x0102_0304_0506 };
        let bytes = [13, 0, 0, 0, 0, 0, 0, 0, 6, 5, 4, 3, 2, 1, 0, 0];
        assert_eq!(header.to_bytes(), bytes);
        assert_eq!(RequestHeader::from_bytes(&bytes), header);
    }

    #[test]
    fn range_bytes_match_layout() {
        let bytes = [1, 0, 0, 0, 0, 0, 0, 2, 3, 0, 0, 4, 3, 0, 0, 0];
        let range = BlkRange {
            sector: 0x0200_0000_0000_0001,
            sectors: 0x0400_0003,
            unmap: true,
            has_reserved: true,
        };
        assert_eq!(BlkRange::from_bytes(&bytes), range);
    }

    #[test]
    fn configuration_bytes_match_layout() {
        let config = BlkConfig {
            capacity: 1,
            size_max: 2,
            seg_max: 3,
            blk_size: 4,
            physical_block_exp: 5,
            queues: 6,
            max_discard_sectors: 7,
            discard_alignment: 8,
            max_write_zeroes_sectors: 9,
            write_zeroes_may_unmap: true,
        };
        let bytes = config.to_bytes();
        let fields = [0, 8, 12, 20, 24, 34, 36, 40, 44, 48, 52, 56].map(|at: usize| bytes[at]);
        assert_eq!(fields, [1, 2, 3, 4, 5, 6, 7, 1, 8, 9, 1, 1]);
        assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), fields.len());
    }

    proptest! {
        #[test]
        fn header_of_any_bytes_survives_a_round_trip(bytes in any::<[u8; HEADER_BYTES]>()) {
            let header = RequestHeader::from_bytes(&bytes);
            prop_assert_eq!(RequestHeader::from_bytes(&header.to_bytes()), header);
        }
    }
}

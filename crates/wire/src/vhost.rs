//! Kernel vhost: ioctl numbers and argument layouts (Linux' `vhost.h`, `vhost_types.h`).
//!
//! Integers are in native byte order, as in every system call. The functions encode ioctl arguments as
//! bytes; the caller issues the ioctls.

/// Numbers of the ioctls, in the encoding of every architecture except MIPS, PowerPC, SPARC and Alpha.
pub mod ioctl {
    /// Reads the features that the device offers: a u64.
    pub const GET_FEATURES: u32 = 0x8008_af00;
    /// Sets the features in use: a u64.
    pub const SET_FEATURES: u32 = 0x4008_af00;
    /// Makes the caller's address space the one that the device accesses.
    pub const SET_OWNER: u32 = 0x0000_af01;
    /// Sets the memory that the device may access: [`memory_table`](super::memory_table).
    pub const SET_MEM_TABLE: u32 = 0x4008_af03;
    /// Sets the entries of a queue: [`vring_state`](super::vring_state).
    pub const SET_VRING_NUM: u32 = 0x4008_af10;
    /// Sets the addresses of a queue's tables: [`vring_address`](super::vring_address).
    pub const SET_VRING_ADDR: u32 = 0x4028_af11;
    /// Sets the next available index: [`vring_state`](super::vring_state).
    pub const SET_VRING_BASE: u32 = 0x4008_af12;
    /// Reads the next available index: [`vring_state`](super::vring_state).
    pub const GET_VRING_BASE: u32 = 0xc008_af12;
    /// Sets the eventfd that the driver kicks: [`vring_file`](super::vring_file).
    pub const SET_VRING_KICK: u32 = 0x4008_af20;
    /// Sets the eventfd that the device interrupts: [`vring_file`](super::vring_file).
    pub const SET_VRING_CALL: u32 = 0x4008_af21;
    /// Sets the eventfd by which the device reports an error: [`vring_file`](super::vring_file).
    pub const SET_VRING_ERR: u32 = 0x4008_af22;
    /// Sets the worker's busy-polling time in µs: [`vring_state`](super::vring_state).
    pub const SET_VRING_BUSYLOOP_TIMEOUT: u32 = 0x4008_af23;
    /// Sets the backend features in use: a u64.
    pub const SET_BACKEND_FEATURES: u32 = 0x4008_af25;
    /// Reads the backend features offered: a u64. The number encodes "write" but the kernel reads.
    pub const GET_BACKEND_FEATURES: u32 = 0x8008_af26;
    /// Sets the file that frames come from and go to: [`vring_file`](super::vring_file).
    pub const NET_SET_BACKEND: u32 = 0x4008_af30;
}

/// Maximum regions of the memory table with the module's default parameter.
pub const REGIONS_MAX: usize = 64;

/// Index of vhost-net's receive queue: frames for the driver.
pub const NET_RECEIVE: u32 = 0;
/// Index of vhost-net's transmit queue: frames from the driver.
pub const NET_TRANSMIT: u32 = 1;

/// Region of the memory table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// Address by which descriptors name the region.
    pub device_address: u64,
    /// Length of the region in bytes.
    pub len: u64,
    /// Address in the owner's address space.
    pub user_address: u64,
}

/// Bytes of the largest memory table.
pub const MEMORY_TABLE_MAX: usize = 8 + REGIONS_MAX * 32;

/// Encodes `struct vhost_memory` followed by its regions; `None` beyond [`REGIONS_MAX`].
pub fn memory_table(regions: &[Region]) -> Option<Vec<u8>> {
    let count = u32::try_from(regions.len()).ok().filter(|_| regions.len() <= REGIONS_MAX)?;
    let mut bytes = Vec::with_capacity(8 + 32 * regions.len());
    bytes.extend(count.to_ne_bytes());
    bytes.extend([0; 4]);
    for region in regions {
        bytes.extend(region.device_address.to_ne_bytes());
        bytes.extend(region.len.to_ne_bytes());
        bytes.extend(region.user_address.to_ne_bytes());
        bytes.extend([0; 8]);
    }
    Some(bytes)
}

/// Encodes `struct vhost_vring_state` for one queue.
pub fn vring_state(queue: u32, value: u32) -> [u8; 8] {
    let ([q0, q1, q2, q3], [v0, v1, v2, v3]) = (queue.to_ne_bytes(), value.to_ne_bytes());
    [q0, q1, q2, q3, v0, v1, v2, v3]
}

/// Encodes `struct vhost_vring_file`; `file` -1 removes the file.
pub fn vring_file(queue: u32, file: i32) -> [u8; 8] {
    let ([q0, q1, q2, q3], [f0, f1, f2, f3]) = (queue.to_ne_bytes(), file.to_ne_bytes());
    [q0, q1, q2, q3, f0, f1, f2, f3]
}

/// Encodes `struct vhost_vring_addr` without a log.
pub fn vring_address(queue: u32, descriptors: u64, used: u64, available: u64) -> [u8; 40] {
    let mut bytes = [0; 40];
    bytes[..4].copy_from_slice(&queue.to_ne_bytes());
    bytes[8..16].copy_from_slice(&descriptors.to_ne_bytes());
    bytes[16..24].copy_from_slice(&used.to_ne_bytes());
    bytes[24..32].copy_from_slice(&available.to_ne_bytes());
    bytes
}

/// Backend feature: IOTLB messages of the second version, encoded by [`iotlb_message`].
pub const BACKEND_MESSAGE_V2: u64 = 1 << 1;

/// Bytes of an IOTLB message in either direction (`struct vhost_msg_v2`).
pub const IOTLB_MESSAGE_LEN: usize = 72;

/// Device's permission at an I/O address (`VHOST_ACCESS_*`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IotlbAccess {
    Read,
    Write,
    ReadWrite,
}

impl IotlbAccess {
    fn bits(self) -> u8 {
        match self {
            IotlbAccess::Read => 1,
            IotlbAccess::Write => 2,
            IotlbAccess::ReadWrite => 3,
        }
    }
}

/// IOTLB message about a range of I/O addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Iotlb {
    /// Report of the device: an address has no translation.
    Miss {
        address: u64,
        /// Access that the device needs.
        access: IotlbAccess,
    },
    /// Adds a range to the table.
    Update {
        address: u64,
        /// Length of the range in bytes.
        len: u64,
        /// Address in the owner's address space.
        user_address: u64,
        access: IotlbAccess,
    },
    /// Removes a range from the table.
    Invalidate {
        address: u64,
        /// Length of the range in bytes.
        len: u64,
    },
}

/// Encodes `struct vhost_msg_v2` for address space 0.
pub fn iotlb_message(message: Iotlb) -> [u8; IOTLB_MESSAGE_LEN] {
    let (kind, address, len, user, access) = match message {
        Iotlb::Miss { address, access } => (1, address, 0, 0, access.bits()),
        Iotlb::Update { address, len, user_address, access } => {
            (2, address, len, user_address, access.bits())
        }
        Iotlb::Invalidate { address, len } => (3, address, len, 0, 0),
    };
    let mut bytes = [0; IOTLB_MESSAGE_LEN];
    bytes[..4].copy_from_slice(&2u32.to_ne_bytes());
    bytes[8..16].copy_from_slice(&address.to_ne_bytes());
    bytes[16..24].copy_from_slice(&len.to_ne_bytes());
    bytes[24..32].copy_from_slice(&user.to_ne_bytes());
    bytes[32] = access;
    bytes[33] = kind;
    bytes
}

/// Decodes a message from the device; `None` for any message except [`Iotlb::Miss`].
pub fn parse_miss(bytes: &[u8; IOTLB_MESSAGE_LEN]) -> Option<Iotlb> {
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[at..at + 8]);
        u64::from_ne_bytes(word)
    };
    let access = match bytes[32] {
        1 => IotlbAccess::Read,
        2 => IotlbAccess::Write,
        3 => IotlbAccess::ReadWrite,
        _ => return None,
    };
    let known = bytes[..4] == 2u32.to_ne_bytes() && bytes[33] == 1;
    known.then(|| Iotlb::Miss { address: word(8), access })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parse_miss_of_any_bytes_accepts_only_misses(
            mut bytes in prop::array::uniform32(any::<u8>()).prop_map(|start| {
                let mut bytes = [0xff; IOTLB_MESSAGE_LEN];
                bytes[..32].copy_from_slice(&start);
                bytes
            }),
            version in 0u8..4,
            access in 0u8..5,
            kind in 0u8..7,
        ) {
            bytes[..4].copy_from_slice(&u32::from(version).to_ne_bytes());
            (bytes[32], bytes[33]) = (access, kind);
            let is_miss = version == 2 && kind == 1 && (1..=3).contains(&access);
            match parse_miss(&bytes) {
                None => prop_assert!(!is_miss),
                Some(miss) => {
                    prop_assert!(is_miss);
                    let again = iotlb_message(miss);
                    prop_assert_eq!(&again[8..16], &bytes[8..16]);
                    prop_assert_eq!(&again[32..34], &bytes[32..34]);
                }
            }
        }
    }

    #[test]
    fn iotlb_message_fields_match_header_layout() {
        let access = IotlbAccess::ReadWrite;
        let update = Iotlb::Update { address: 0x10, len: 0x20, user_address: 0x30, access };
        let bytes = iotlb_message(update);
        let at = |offset: usize| u64::from_ne_bytes(bytes[offset..offset + 8].try_into().unwrap());
        assert_eq!((at(8), at(16), at(24), bytes[32], bytes[33]), (0x10, 0x20, 0x30, 3, 2));
        assert_eq!(parse_miss(&bytes), None);
        for access in [IotlbAccess::Read, IotlbAccess::Write, IotlbAccess::ReadWrite] {
            let miss = Iotlb::Miss { address: 7 << 12, access };
            assert_eq!(parse_miss(&iotlb_message(miss)), Some(miss));
        }
        assert_eq!(iotlb_message(Iotlb::Invalidate { address: 1, len: 2 })[33], 3);
    }

    /// Fields of `_IOC`: direction, size of the argument, type 0xAF, number.
    #[test]
    fn ioctl_numbers_encode_argument_sizes() {
        let (none, write, read) = (0u32, 1u32, 2u32);
        for (number, direction, size, nr) in [
            (ioctl::GET_FEATURES, read, 8, 0x00),
            (ioctl::SET_FEATURES, write, 8, 0x00),
            (ioctl::SET_OWNER, none, 0, 0x01),
            (ioctl::SET_MEM_TABLE, write, 8, 0x03),
            (ioctl::SET_VRING_NUM, write, vring_state(0, 0).len(), 0x10),
            (ioctl::SET_VRING_ADDR, write, vring_address(0, 0, 0, 0).len(), 0x11),
            (ioctl::SET_VRING_BASE, write, vring_state(0, 0).len(), 0x12),
            (ioctl::GET_VRING_BASE, read | write, vring_state(0, 0).len(), 0x12),
            (ioctl::SET_VRING_KICK, write, vring_file(0, 0).len(), 0x20),
            (ioctl::SET_VRING_CALL, write, vring_file(0, 0).len(), 0x21),
            (ioctl::SET_VRING_ERR, write, vring_file(0, 0).len(), 0x22),
            (ioctl::SET_VRING_BUSYLOOP_TIMEOUT, write, vring_state(0, 0).len(), 0x23),
            (ioctl::SET_BACKEND_FEATURES, write, 8, 0x25),
            (ioctl::GET_BACKEND_FEATURES, read, 8, 0x26),
            (ioctl::NET_SET_BACKEND, write, vring_file(0, 0).len(), 0x30),
        ] {
            let size = u32::try_from(size).unwrap();
            assert_eq!(number, direction << 30 | size << 16 | 0xaf << 8 | nr, "{nr:#x}");
        }
    }

    #[test]
    fn memory_table_bytes_match_header_layout() {
        let region = Region { device_address: 1, len: 2, user_address: 3 };
        let bytes = memory_table(&[region, region]).unwrap();
        assert_eq!(bytes.len(), 8 + 2 * 32);
        let words: Vec<u64> = bytes
            .chunks_exact(8)
            .map(|word| u64::from_ne_bytes(word.try_into().unwrap()))
            .collect();
        assert_eq!(words[1..], [1, 2, 3, 0, 1, 2, 3, 0]);
        assert_eq!(bytes[..4], 2u32.to_ne_bytes());
        assert!(memory_table(&[region; REGIONS_MAX]).is_some_and(|t| t.len() == MEMORY_TABLE_MAX));
        assert_eq!(memory_table(&[region; REGIONS_MAX + 1]), None);
    }

    #[test]
    fn vring_address_fields_match_header_layout() {
        let bytes = vring_address(7, 0x10, 0x20, 0x30);
        let at = |offset: usize| u64::from_ne_bytes(bytes[offset..offset + 8].try_into().unwrap());
        assert_eq!((bytes[0], at(8), at(16), at(24), at(32)), (7, 0x10, 0x20, 0x30, 0));
    }
}

//! Split virtqueues and feature bits (virtio 1.x, sections 2.7, 5.1 and 6; Linux' `virtio_ring.h`).
//!
//! A queue of `n` entries (a power of two, at most 32768) is three tables in shared memory:
//!
//! ```text
//! descriptors  16 bytes each        written by the driver: address, length, flags, next
//! available    flags idx ring[n] used_event      u16 each; written by the driver
//! used         flags idx ring[n] avail_event     u16, but 8 bytes per ring entry; written by the device
//! ```
//!
//! Indices are free-running u16. `used_event` is the used index at which the driver wants an interrupt;
//! `avail_event` is the available index at which the device wants a kick. Both need
//! [`feature::EVENT_IDX`]. [`SplitLayout`] places the three tables in one piece of memory.

/// Feature bits, as masks of the 64-bit word.
pub mod feature {
    /// The device completes blank checksums (`VIRTIO_NET_F_CSUM`).
    pub const CSUM: u64 = 1 << 0;
    /// The driver takes frames with blank checksums (`VIRTIO_NET_F_GUEST_CSUM`).
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// The device tells its MTU (`VIRTIO_NET_F_MTU`).
    pub const MTU: u64 = 1 << 3;
    /// The driver takes super-packets of TCP over IPv4 (`VIRTIO_NET_F_GUEST_TSO4`).
    pub const GUEST_TSO4: u64 = 1 << 7;
    /// The driver takes super-packets of TCP over IPv6 (`VIRTIO_NET_F_GUEST_TSO6`).
    pub const GUEST_TSO6: u64 = 1 << 8;
    /// The driver takes super-packets with CWR set (`VIRTIO_NET_F_GUEST_ECN`).
    pub const GUEST_ECN: u64 = 1 << 9;
    /// The device takes super-packets of TCP over IPv4 (`VIRTIO_NET_F_HOST_TSO4`).
    pub const HOST_TSO4: u64 = 1 << 11;
    /// The device takes super-packets of TCP over IPv6 (`VIRTIO_NET_F_HOST_TSO6`).
    pub const HOST_TSO6: u64 = 1 << 12;
    /// The device takes super-packets with CWR set (`VIRTIO_NET_F_HOST_ECN`).
    pub const HOST_ECN: u64 = 1 << 13;
    /// Receive buffers may be merged for one frame (`VIRTIO_NET_F_MRG_RXBUF`).
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// The driver announces the machine when it is told to, after a migration (`VIRTIO_NET_F_GUEST_ANNOUNCE`).
    pub const GUEST_ANNOUNCE: u64 = 1 << 21;
    /// The device has several pairs of queues (`VIRTIO_NET_F_MQ`).
    pub const MULTIQUEUE: u64 = 1 << 22;
    /// The device itself adds and strips the virtio-net header (`VHOST_NET_F_VIRTIO_NET_HDR`).
    pub const VHOST_NET_HEADER: u64 = 1 << 27;
    /// A descriptor may name a table of descriptors (`VIRTIO_F_INDIRECT_DESC`).
    pub const INDIRECT: u64 = 1 << 28;
    /// Notifications are requested by index (`VIRTIO_F_EVENT_IDX`).
    pub const EVENT_IDX: u64 = 1 << 29;
    /// Modern device: little endian, headers in any layout (`VIRTIO_F_VERSION_1`).
    pub const VERSION_1: u64 = 1 << 32;
    /// Addresses are translated by an IOMMU (`VIRTIO_F_ACCESS_PLATFORM`).
    pub const ACCESS_PLATFORM: u64 = 1 << 33;
    /// The device uses buffers in the order of their availability (`VIRTIO_F_IN_ORDER`).
    pub const IN_ORDER: u64 = 1 << 35;
    /// The driver takes super-packets of UDP over IPv4 (`VIRTIO_NET_F_GUEST_USO4`).
    pub const GUEST_USO4: u64 = 1 << 54;
    /// The driver takes super-packets of UDP over IPv6 (`VIRTIO_NET_F_GUEST_USO6`).
    pub const GUEST_USO6: u64 = 1 << 55;
    /// The device takes super-packets of UDP (`VIRTIO_NET_F_HOST_USO`).
    pub const HOST_USO: u64 = 1 << 56;

    /// Names the bits of this module that are set in `features`, for messages.
    pub fn names(features: u64) -> Vec<&'static str> {
        let all = [
            (CSUM, "CSUM"),
            (GUEST_CSUM, "GUEST_CSUM"),
            (MTU, "MTU"),
            (GUEST_TSO4, "GUEST_TSO4"),
            (GUEST_TSO6, "GUEST_TSO6"),
            (GUEST_ECN, "GUEST_ECN"),
            (HOST_TSO4, "HOST_TSO4"),
            (HOST_TSO6, "HOST_TSO6"),
            (HOST_ECN, "HOST_ECN"),
            (MRG_RXBUF, "MRG_RXBUF"),
            (GUEST_ANNOUNCE, "GUEST_ANNOUNCE"),
            (MULTIQUEUE, "MQ"),
            (VHOST_NET_HEADER, "VIRTIO_NET_HDR"),
            (INDIRECT, "INDIRECT_DESC"),
            (EVENT_IDX, "EVENT_IDX"),
            (VERSION_1, "VERSION_1"),
            (ACCESS_PLATFORM, "ACCESS_PLATFORM"),
            (IN_ORDER, "IN_ORDER"),
            (GUEST_USO4, "GUEST_USO4"),
            (GUEST_USO6, "GUEST_USO6"),
            (HOST_USO, "HOST_USO"),
        ];
        all.into_iter().filter(|(bit, _)| features & bit != 0).map(|(_, name)| name).collect()
    }
}

/// Maximum entries of a queue.
pub const QUEUE_SIZE_MAX: u16 = 1 << 15;

/// Bytes of a descriptor.
pub const DESCRIPTOR_BYTES: usize = 16;

/// Bytes of an entry of the used ring.
pub const USED_BYTES: usize = 8;

/// Bit of the available ring's flags: the driver wants no interrupts.
pub const AVAIL_NO_INTERRUPT: u16 = 1;

/// Bit of the used ring's flags: the device wants no kicks.
pub const USED_NO_NOTIFY: u16 = 1;

/// Bits of the field [`Descriptor::flags`].
pub mod flag {
    /// The chain continues at `next`.
    pub const NEXT: u16 = 1;
    /// The device writes the buffer; without this bit, it reads it.
    pub const WRITE: u16 = 2;
    /// The buffer holds a table of descriptors.
    pub const INDIRECT: u16 = 4;
}

/// Descriptor of one buffer in a split virtqueue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Descriptor {
    /// Address of the buffer in the device's address space.
    pub address: u64,
    /// Length of the buffer in bytes.
    pub len: u32,
    /// Bits of the module [`flag`].
    pub flags: u16,
    /// Index of the chain's next descriptor, valid with [`flag::NEXT`].
    pub next: u16,
}

impl Descriptor {
    /// Encodes the descriptor as laid out in memory.
    pub fn to_bytes(self) -> [u8; DESCRIPTOR_BYTES] {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }

    /// Decodes a descriptor; accepts any bytes.
    pub fn from_bytes(bytes: &[u8; DESCRIPTOR_BYTES]) -> Descriptor {
        let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, f0, f1, n0, n1] = *bytes;
        Descriptor {
            address: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            len: u32::from_le_bytes([l0, l1, l2, l3]),
            flags: u16::from_le_bytes([f0, f1]),
            next: u16::from_le_bytes([n0, n1]),
        }
    }
}

/// Entry of the used ring: the device has finished a chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct UsedElement {
    /// Index of the chain's first descriptor.
    pub id: u32,
    /// Bytes that the device wrote.
    pub len: u32,
}

impl UsedElement {
    /// Encodes the element as laid out in memory.
    pub fn to_bytes(self) -> [u8; USED_BYTES] {
        let ([i0, i1, i2, i3], [l0, l1, l2, l3]) = (self.id.to_le_bytes(), self.len.to_le_bytes());
        [i0, i1, i2, i3, l0, l1, l2, l3]
    }

    /// Decodes an element; accepts any bytes.
    pub fn from_bytes(bytes: [u8; USED_BYTES]) -> UsedElement {
        let [i0, i1, i2, i3, l0, l1, l2, l3] = bytes;
        UsedElement {
            id: u32::from_le_bytes([i0, i1, i2, i3]),
            len: u32::from_le_bytes([l0, l1, l2, l3]),
        }
    }
}

/// Offsets of one queue's tables in one piece of memory: descriptors, available ring, used ring. Each
/// table begins on its own cache line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SplitLayout {
    size: u16,
}

/// Alignment of tables in bytes, stricter than the specification's 16, 2 and 4.
const TABLE_ALIGN: usize = 64;

impl SplitLayout {
    /// Returns the layout of a queue of `size` entries; `None` unless `size` is a power of two up to 32768.
    pub const fn new(size: u16) -> Option<SplitLayout> {
        if size.is_power_of_two() && size <= QUEUE_SIZE_MAX {
            Some(SplitLayout { size })
        } else {
            None
        }
    }

    /// Returns the number of entries.
    pub const fn size(self) -> u16 {
        self.size
    }

    /// Returns the offset of the descriptor at `index` modulo the size.
    pub const fn descriptor(self, index: u16) -> usize {
        (index & (self.size - 1)) as usize * DESCRIPTOR_BYTES
    }

    /// Returns the offset of the available ring's flags, which begin that table.
    pub const fn avail_flags(self) -> usize {
        (self.size as usize * DESCRIPTOR_BYTES).next_multiple_of(TABLE_ALIGN)
    }

    /// Returns the offset of the available ring's index.
    pub const fn avail_idx(self) -> usize {
        self.avail_flags() + 2
    }

    /// Returns the offset of the available ring's entry for the free-running `index`.
    pub const fn avail_entry(self, index: u16) -> usize {
        self.avail_flags() + 4 + (index & (self.size - 1)) as usize * 2
    }

    /// Returns the offset of the used index at which the driver wants an interrupt.
    pub const fn used_event(self) -> usize {
        self.avail_flags() + 4 + self.size as usize * 2
    }

    /// Returns the offset of the used ring's flags, which begin that table.
    pub const fn used_flags(self) -> usize {
        (self.used_event() + 2).next_multiple_of(TABLE_ALIGN)
    }

    /// Returns the offset of the used ring's index.
    pub const fn used_idx(self) -> usize {
        self.used_flags() + 2
    }

    /// Returns the offset of the used ring's entry for the free-running `index`.
    pub const fn used_entry(self, index: u16) -> usize {
        self.used_flags() + 4 + (index & (self.size - 1)) as usize * USED_BYTES
    }

    /// Returns the offset of the available index at which the device wants a kick.
    pub const fn avail_event(self) -> usize {
        self.used_flags() + 4 + self.size as usize * USED_BYTES
    }

    /// Returns the length of all tables in bytes.
    pub const fn bytes(self) -> usize {
        (self.avail_event() + 2).next_multiple_of(TABLE_ALIGN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DESCRIPTOR: Descriptor = Descriptor {
        address: 0x1122_3344_5566_7788,
        len: 0x99aa_bbcc,
        flags: 0x0102,
        next: 0x0304,
    };
    const BYTES: [u8; 16] = [
        0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0xcc, 0xbb, 0xaa, 0x99, 0x02, 0x01, 0x04,
        0x03,
    ];

    #[test]
    fn descriptor_bytes_match_header_layout() {
        assert_eq!(DESCRIPTOR.to_bytes(), BYTES);
        assert_eq!(Descriptor::from_bytes(&BYTES), DESCRIPTOR);
    }

    #[test]
    fn used_element_bytes_match_header_layout() {
        let element = UsedElement { id: 0x0102_0304, len: 0x0506_0708 };
        let bytes = [4, 3, 2, 1, 8, 7, 6, 5];
        assert_eq!(element.to_bytes(), bytes);
        assert_eq!(UsedElement::from_bytes(bytes), element);
    }

    /// Table sizes of virtio 1.x, 2.7: 16 n, 6 + 2 n and 6 + 8 n bytes.
    #[test]
    fn split_layout_tables_have_specified_sizes_and_do_not_overlap() {
        for size in (0..16).map(|log| 1u16 << log) {
            let layout = SplitLayout::new(size).unwrap();
            let n = usize::from(size);
            assert!(layout.avail_flags() >= 16 * n);
            assert_eq!(layout.used_event() + 2 - layout.avail_flags(), 6 + 2 * n);
            assert!(layout.used_flags() >= layout.used_event() + 2);
            assert_eq!(layout.avail_event() + 2 - layout.used_flags(), 6 + 8 * n);
            assert!(layout.bytes() >= layout.avail_event() + 2);
            assert_eq!(layout.avail_entry(size), layout.avail_entry(0));
            assert_eq!(layout.used_entry(u16::MAX), layout.used_entry(size - 1));
            assert_eq!(layout.descriptor(size - 1), 16 * (n - 1));
        }
    }

    #[test]
    fn split_layout_of_invalid_size_is_rejected() {
        for size in [0, 3, 100, 32769, 65535] {
            assert_eq!(SplitLayout::new(size), None);
        }
    }

    #[test]
    fn feature_names_list_set_bits() {
        assert_eq!(
            feature::names(feature::VERSION_1 | feature::EVENT_IDX),
            ["EVENT_IDX", "VERSION_1"]
        );
        assert_eq!(feature::names(1 << 63), [] as [&str; 0]);
    }
}

//! The control ring: messages from the frontend about a whole vif, not about packets.
//!
//! A request has 16 bytes: id u16 at 0, type u16 at 2, three u32 at 4, 8 and 12. A response has 12:
//! id u16 at 0, type u16 at 2, status u32 at 4, data u32 at 8. Each request gets one response, which
//! echoes id and type; responses may come in any order.
//!
//! Two families of messages exist. The *hash* messages say how packets to the guest are spread over its
//! queues. The *mapping* messages are those of staging grants: lists of pages that the backend is to
//! keep mapped. Such a list lies in a page that the frontend lends for the duration of the message,
//! from its first byte on, 8 bytes an entry ([`GrefEntry`]).
//!
//! Fields that a message does not use are ignored, as other implementations do.

use thiserror::Error;

use crate::grant::Gref;
use crate::macros::enum_with_unknown;

use super::extra::HashType;

enum_with_unknown! {
    /// The type of a control message (`XEN_NETIF_CTRL_TYPE_*`).
    pub enum CtrlType(u16) {
        /// Never to be used.
        Invalid = 0,
        /// Which parts of a packet can be hashed?
        GetHashFlags = 1,
        /// Hash these parts.
        SetHashFlags = 2,
        /// The key of the hash.
        SetHashKey = 3,
        /// How many entries may the table from hash to queue have?
        GetHashMappingSize = 4,
        /// It has so many.
        SetHashMappingSize = 5,
        /// Its entries, or some of them.
        SetHashMapping = 6,
        /// How to hash.
        SetHashAlgorithm = 7,
        /// How many pages may be kept mapped for a queue?
        GetGrefMappingSize = 8,
        /// Keep these pages mapped.
        AddGrefMapping = 9,
        /// No longer.
        DelGrefMapping = 10,
    }
}

enum_with_unknown! {
    /// How a control message ended (`XEN_NETIF_CTRL_STATUS_*`).
    pub enum CtrlStatus(u32) {
        /// Done.
        Success = 0,
        /// This end does not know the message, or not now.
        NotSupported = 1,
        /// A field is out of range, or a page could not be used.
        InvalidParameter = 2,
        /// More was given than there is room for.
        BufferOverflow = 3,
    }
}

/// Entries of a list of grant references: what a page holds.
pub const GREF_LIST_MAX: u32 = 512;

/// Entries of a page of the table from hash to queue.
pub const HASH_MAPPING_PAGE_MAX: u32 = 1024;

/// Bytes of the longest hash key that fits a page; ends bound it further.
pub const HASH_KEY_PAGE_MAX: u32 = 4096;

/// A set of [`HashType`]s (`XEN_NETIF_CTRL_HASH_TYPE_*`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct HashTypes(u32);

impl HashTypes {
    /// Every type that is defined.
    pub const ALL: HashTypes = HashTypes(0b1111);

    /// The set that `mask` names, if it names nothing that is not defined.
    pub fn from_mask(mask: u32) -> Option<HashTypes> {
        (mask & !HashTypes::ALL.0 == 0).then_some(HashTypes(mask))
    }

    /// As in a message.
    pub fn mask(self) -> u32 {
        self.0
    }

    /// Whether nothing is hashed.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether `kind` is hashed.
    pub fn contains(self, kind: HashType) -> bool {
        1u32.checked_shl(kind.to_raw().into()).is_some_and(|bit| self.0 & bit != 0)
    }
}

/// A list of grant references that a message refers to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GrefList {
    /// The queue whose table is meant; as the peer gave it.
    pub queue: u32,
    /// The page with the list.
    pub page: Gref,
    /// Entries in it: 1 to [`GREF_LIST_MAX`].
    pub entries: u16,
}

/// A control message. What needs more than its own three numbers to be judged (queues there are, the
/// longest key) is left to whoever has that.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CtrlMessage {
    /// [`CtrlType::GetHashFlags`]
    GetHashFlags,
    /// [`CtrlType::SetHashFlags`]
    SetHashFlags(HashTypes),
    /// [`CtrlType::SetHashKey`]
    SetHashKey {
        /// The page with the key. Means nothing for a key of no bytes.
        page: Gref,
        /// Bytes of the key, at most a page; 0 takes the key away.
        bytes: u16,
    },
    /// [`CtrlType::GetHashMappingSize`]
    GetHashMappingSize,
    /// [`CtrlType::SetHashMappingSize`]
    SetHashMappingSize {
        /// Entries; 0: the hash modulo the number of queues.
        entries: u32,
    },
    /// [`CtrlType::SetHashMapping`]
    SetHashMapping {
        /// The page with the entries, u32 each.
        page: Gref,
        /// Entries in the page: at most [`HASH_MAPPING_PAGE_MAX`].
        entries: u16,
        /// The first of them in the table.
        first: u32,
    },
    /// [`CtrlType::SetHashAlgorithm`]: 0 for none, 1 for Toeplitz; as the peer gave it.
    SetHashAlgorithm(u32),
    /// [`CtrlType::GetGrefMappingSize`], of a queue as the peer gave it.
    GetGrefMappingSize(u32),
    /// [`CtrlType::AddGrefMapping`]
    AddGrefMapping(GrefList),
    /// [`CtrlType::DelGrefMapping`]
    DelGrefMapping(GrefList),
}

/// Why a control message cannot be carried out, whatever the state of the vif.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Error)]
pub enum CtrlRefusal {
    /// No such message.
    #[error("control message of unknown type {kind}")]
    UnknownType {
        /// The type.
        kind: u16,
    },
    /// Hash types that are not defined.
    #[error("hash types {mask:#x}, of which some are not defined")]
    UnknownHashTypes {
        /// The mask.
        mask: u32,
    },
    /// More bytes than a page has.
    #[error("a hash key of {bytes} bytes")]
    KeyLength {
        /// The bytes.
        bytes: u32,
    },
    /// More entries than a page has, or none.
    #[error("a list of {entries} entries, {limit} at most")]
    ListLength {
        /// The entries.
        entries: u32,
        /// What a page holds.
        limit: u32,
    },
}

impl CtrlRefusal {
    /// What to answer.
    pub fn status(&self) -> CtrlStatus {
        match self {
            CtrlRefusal::UnknownType { .. } => CtrlStatus::NotSupported,
            _ => CtrlStatus::InvalidParameter,
        }
    }

    /// A name for counters.
    pub fn label(&self) -> &'static str {
        match self {
            CtrlRefusal::UnknownType { .. } => "ctrl_unknown_type",
            CtrlRefusal::UnknownHashTypes { .. } => "ctrl_unknown_hash_types",
            CtrlRefusal::KeyLength { .. } => "ctrl_key_length",
            CtrlRefusal::ListLength { .. } => "ctrl_list_length",
        }
    }
}

/// A request, as fetched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CtrlRequest {
    /// Comes back in the response.
    pub id: u16,
    /// The message.
    pub kind: CtrlType,
    /// What the type makes of it.
    pub data: [u32; 3],
}

impl CtrlRequest {
    /// Bytes on the ring.
    pub const SIZE: usize = 16;

    /// The request in a slot; total.
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> CtrlRequest {
        let [i0, i1, k0, k1, a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3] = bytes;
        let word = u32::from_le_bytes;
        CtrlRequest {
            id: u16::from_le_bytes([i0, i1]),
            kind: CtrlType::from_raw(u16::from_le_bytes([k0, k1])),
            data: [word([a0, a1, a2, a3]), word([b0, b1, b2, b3]), word([c0, c1, c2, c3])],
        }
    }

    /// The bytes for a slot.
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[..2].copy_from_slice(&self.id.to_le_bytes());
        bytes[2..4].copy_from_slice(&self.kind.to_raw().to_le_bytes());
        for (place, word) in bytes[4..].chunks_exact_mut(4).zip(self.data) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// What it says.
    ///
    /// # Errors
    ///
    /// [`CtrlRefusal`], which knows what to answer.
    pub fn parse(&self) -> Result<CtrlMessage, CtrlRefusal> {
        let [a, b, c] = self.data;
        Ok(match self.kind {
            CtrlType::Invalid | CtrlType::Unknown(_) => {
                return Err(CtrlRefusal::UnknownType { kind: self.kind.to_raw() });
            }
            CtrlType::GetHashFlags => CtrlMessage::GetHashFlags,
            CtrlType::SetHashFlags => CtrlMessage::SetHashFlags(
                HashTypes::from_mask(a).ok_or(CtrlRefusal::UnknownHashTypes { mask: a })?,
            ),
            CtrlType::SetHashKey => {
                let bytes = u16::try_from(b).ok().filter(|_| b <= HASH_KEY_PAGE_MAX);
                let bytes = bytes.ok_or(CtrlRefusal::KeyLength { bytes: b })?;
                CtrlMessage::SetHashKey { page: Gref(a), bytes }
            }
            CtrlType::GetHashMappingSize => CtrlMessage::GetHashMappingSize,
            CtrlType::SetHashMappingSize => CtrlMessage::SetHashMappingSize { entries: a },
            CtrlType::SetHashMapping => CtrlMessage::SetHashMapping {
                page: Gref(a),
                entries: list_length(b, HASH_MAPPING_PAGE_MAX)?,
                first: c,
            },
            CtrlType::SetHashAlgorithm => CtrlMessage::SetHashAlgorithm(a),
            CtrlType::GetGrefMappingSize => CtrlMessage::GetGrefMappingSize(a),
            CtrlType::AddGrefMapping => CtrlMessage::AddGrefMapping(gref_list(self.data)?),
            CtrlType::DelGrefMapping => CtrlMessage::DelGrefMapping(gref_list(self.data)?),
        })
    }

    /// The answer to it.
    pub fn answer(&self, status: CtrlStatus, data: u32) -> CtrlResponse {
        CtrlResponse { id: self.id, kind: self.kind, status, data }
    }
}

fn gref_list([queue, page, entries]: [u32; 3]) -> Result<GrefList, CtrlRefusal> {
    let entries = list_length(entries, GREF_LIST_MAX)?;
    Ok(GrefList { queue, page: Gref(page), entries })
}

/// A list of nothing asks for nothing: whoever sends one has miscounted.
fn list_length(entries: u32, limit: u32) -> Result<u16, CtrlRefusal> {
    let fits = (1..=limit).contains(&entries);
    let length = u16::try_from(entries).ok().filter(|_| fits);
    length.ok_or(CtrlRefusal::ListLength { entries, limit })
}

impl CtrlMessage {
    /// The request for a slot. The inverse of [`CtrlRequest::parse`].
    pub fn request(&self, id: u16) -> CtrlRequest {
        let list = |l: GrefList| [l.queue, l.page.0, l.entries.into()];
        let (kind, data) = match *self {
            CtrlMessage::GetHashFlags => (CtrlType::GetHashFlags, [0; 3]),
            CtrlMessage::SetHashFlags(types) => (CtrlType::SetHashFlags, [types.mask(), 0, 0]),
            CtrlMessage::SetHashKey { page, bytes } => {
                (CtrlType::SetHashKey, [page.0, bytes.into(), 0])
            }
            CtrlMessage::GetHashMappingSize => (CtrlType::GetHashMappingSize, [0; 3]),
            CtrlMessage::SetHashMappingSize { entries } => {
                (CtrlType::SetHashMappingSize, [entries, 0, 0])
            }
            CtrlMessage::SetHashMapping { page, entries, first } => {
                (CtrlType::SetHashMapping, [page.0, entries.into(), first])
            }
            CtrlMessage::SetHashAlgorithm(algorithm) => {
                (CtrlType::SetHashAlgorithm, [algorithm, 0, 0])
            }
            CtrlMessage::GetGrefMappingSize(queue) => (CtrlType::GetGrefMappingSize, [queue, 0, 0]),
            CtrlMessage::AddGrefMapping(l) => (CtrlType::AddGrefMapping, list(l)),
            CtrlMessage::DelGrefMapping(l) => (CtrlType::DelGrefMapping, list(l)),
        };
        CtrlRequest { id, kind, data }
    }
}

/// A response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CtrlResponse {
    /// Of the request.
    pub id: u16,
    /// Of the request.
    pub kind: CtrlType,
    /// How it ended.
    pub status: CtrlStatus,
    /// What was asked for; 0 where nothing was.
    pub data: u32,
}

impl CtrlResponse {
    /// Bytes on the ring. The slot has 16; the last four must be written too.
    pub const SIZE: usize = 12;

    /// The response in a slot; total.
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> CtrlResponse {
        let [i0, i1, k0, k1, s0, s1, s2, s3, d0, d1, d2, d3] = bytes;
        CtrlResponse {
            id: u16::from_le_bytes([i0, i1]),
            kind: CtrlType::from_raw(u16::from_le_bytes([k0, k1])),
            status: CtrlStatus::from_raw(u32::from_le_bytes([s0, s1, s2, s3])),
            data: u32::from_le_bytes([d0, d1, d2, d3]),
        }
    }

    /// The bytes for a slot, the unused end of it included (XSA-216).
    pub fn to_bytes(self) -> [u8; CtrlRequest::SIZE] {
        let mut bytes = [0; CtrlRequest::SIZE];
        bytes[..2].copy_from_slice(&self.id.to_le_bytes());
        bytes[2..4].copy_from_slice(&self.kind.to_raw().to_le_bytes());
        bytes[4..8].copy_from_slice(&self.status.to_raw().to_le_bytes());
        bytes[8..12].copy_from_slice(&self.data.to_le_bytes());
        bytes
    }
}

/// An entry of a list of grant references: ref u32 at 0, flags u16 at 4, status u16 at 6. The status is
/// the backend's word about that entry; only `DEL` sets it, and it need not be zero before.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GrefEntry {
    /// The page.
    pub gref: Gref,
    /// Only [`GrefEntry::READ_ONLY`] is defined; other bits are ignored.
    pub flags: u16,
    /// A [`CtrlStatus`] in 16 bits.
    pub status: u16,
}

impl GrefEntry {
    /// Bytes in the list.
    pub const SIZE: usize = 8;
    /// The page is lent for reading only.
    pub const READ_ONLY: u16 = 1;
    /// Where in an entry the status is.
    pub const STATUS_AT: usize = 6;

    /// An entry as a frontend writes it.
    pub fn new(gref: Gref, read_only: bool) -> GrefEntry {
        GrefEntry { gref, flags: if read_only { GrefEntry::READ_ONLY } else { 0 }, status: 0 }
    }

    /// Whether the page is lent for reading only.
    pub fn is_read_only(&self) -> bool {
        self.flags & GrefEntry::READ_ONLY != 0
    }

    /// The entry in a list; total.
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> GrefEntry {
        let [g0, g1, g2, g3, f0, f1, s0, s1] = bytes;
        GrefEntry {
            gref: Gref(u32::from_le_bytes([g0, g1, g2, g3])),
            flags: u16::from_le_bytes([f0, f1]),
            status: u16::from_le_bytes([s0, s1]),
        }
    }

    /// The bytes for a list.
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let [g0, g1, g2, g3] = self.gref.0.to_le_bytes();
        let [f0, f1] = self.flags.to_le_bytes();
        let [s0, s1] = self.status.to_le_bytes();
        [g0, g1, g2, g3, f0, f1, s0, s1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn layouts_of_the_header() {
        let request =
            CtrlRequest { id: 0x1122, kind: CtrlType::AddGrefMapping, data: [1, 0x0403_0201, 512] };
        let bytes = [0x22, 0x11, 9, 0, 1, 0, 0, 0, 1, 2, 3, 4, 0, 2, 0, 0];
        assert_eq!(request.to_bytes(), bytes);
        assert_eq!(CtrlRequest::from_bytes(bytes), request);
        let list = GrefList { queue: 1, page: Gref(0x0403_0201), entries: 512 };
        assert_eq!(request.parse(), Ok(CtrlMessage::AddGrefMapping(list)));

        let response = request.answer(CtrlStatus::InvalidParameter, 7);
        let slot = response.to_bytes();
        assert_eq!(slot, [0x22, 0x11, 9, 0, 2, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(CtrlResponse::from_bytes(*slot.first_chunk().unwrap()), response);

        let entry = GrefEntry { gref: Gref(9), flags: 1, status: 2 };
        assert_eq!(entry.to_bytes(), [9, 0, 0, 0, 1, 0, 2, 0]);
        assert!(entry.is_read_only());
        assert_eq!(entry.to_bytes()[GrefEntry::STATUS_AT], 2);
    }

    #[test]
    fn lists_longer_than_a_page_and_empty_ones_are_refused() {
        for kind in [CtrlType::AddGrefMapping, CtrlType::DelGrefMapping] {
            for entries in [0, 513, 0xFFFF, 0x1_0000, 0x1_0200, u32::MAX] {
                let refused = CtrlRequest { id: 0, kind, data: [0, 8, entries] }.parse();
                assert_eq!(refused, Err(CtrlRefusal::ListLength { entries, limit: 512 }));
                assert_eq!(refused.unwrap_err().status(), CtrlStatus::InvalidParameter);
            }
            assert!(CtrlRequest { id: 0, kind, data: [0, 8, 512] }.parse().is_ok());
        }
    }

    #[test]
    fn what_is_not_known_is_not_supported() {
        for kind in [0, 11, 0xFFFF] {
            let request = CtrlRequest { id: 3, kind: CtrlType::from_raw(kind), data: [0; 3] };
            let refused = request.parse().unwrap_err();
            assert_eq!(refused, CtrlRefusal::UnknownType { kind });
            assert_eq!(refused.status(), CtrlStatus::NotSupported);
        }
    }

    #[test]
    fn hash_types_are_bits_by_number() {
        let types = HashTypes::from_mask(0b0110).unwrap();
        assert!(types.contains(HashType::Ipv4Tcp) && types.contains(HashType::Ipv6));
        assert!(!types.contains(HashType::Ipv4) && !types.contains(HashType::Ipv6Tcp));
        assert!(!HashTypes::ALL.contains(HashType::Unknown(200)));
        assert_eq!(HashTypes::from_mask(16), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_a_refusal(bytes: [u8; CtrlRequest::SIZE]) {
            let request = CtrlRequest::from_bytes(bytes);
            prop_assert_eq!(request.to_bytes(), bytes);
            match request.parse() {
                // Fields that mean nothing are lost; what is left says the same again.
                Ok(message) => {
                    let again = message.request(request.id);
                    prop_assert_eq!(again.id, request.id);
                    prop_assert_eq!(again.kind, request.kind);
                    prop_assert_eq!(again.parse(), Ok(message));
                }
                Err(refusal) => {
                    let status = refusal.status();
                    prop_assert!(matches!(
                        status,
                        CtrlStatus::NotSupported | CtrlStatus::InvalidParameter
                    ));
                }
            }
        }

        #[test]
        fn entries_and_responses_are_their_bytes(entry: [u8; 8], response: [u8; 12]) {
            prop_assert_eq!(GrefEntry::from_bytes(entry).to_bytes(), entry);
            let slot = CtrlResponse::from_bytes(response).to_bytes();
            prop_assert_eq!(&slot[..12], &response[..]);
            prop_assert_eq!(&slot[12..], &[0; 4]);
        }
    }
}

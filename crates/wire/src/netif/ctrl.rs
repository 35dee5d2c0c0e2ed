//! Control ring: messages from the frontend about a whole vif, not about packets.
//!
//! A request has 16 bytes: id u16 at 0, type u16 at 2, three u32 at 4, 8 and 12. A response has 12:
//! id u16 at 0, type u16 at 2, status u32 at 4, data u32 at 8. Each request gets one response, which
//! echoes id and type. Responses may come in any order.
//!
//! There are two families of messages. *Hash* messages control how packets to the guest are spread
//! over its queues. *Mapping* messages control staging grants: they list pages that the backend keeps
//! mapped. The list lies in a page that the frontend grants for the duration of the message, from its
//! first byte on, 8 bytes per entry ([`GrefEntry`]).
//!
//! Unused fields of a message are ignored, as in other implementations.

use thiserror::Error;

use crate::grant::Gref;
use crate::macros::enum_with_unknown;

use super::extra::HashType;

enum_with_unknown! {
    /// Type of a control message (`XEN_NETIF_CTRL_TYPE_*`).
    pub enum CtrlType(u16) {
        /// Reserved type that is never valid.
        Invalid = 0,
        /// Reads the supported hash types.
        GetHashFlags = 1,
        /// Selects the hash types to use.
        SetHashFlags = 2,
        SetHashKey = 3,
        /// Reads the maximum size of the table from hash to queue.
        GetHashMappingSize = 4,
        /// Sets the size of the table from hash to queue.
        SetHashMappingSize = 5,
        /// Sets entries of the table from hash to queue.
        SetHashMapping = 6,
        SetHashAlgorithm = 7,
        /// Reads the maximum number of staged pages of a queue.
        GetGrefMappingSize = 8,
        /// Adds staged pages: the backend keeps them mapped.
        AddGrefMapping = 9,
        /// Removes staged pages: the backend unmaps them.
        DelGrefMapping = 10,
    }
}

enum_with_unknown! {
    /// Result of a control message (`XEN_NETIF_CTRL_STATUS_*`).
    pub enum CtrlStatus(u32) {
        Success = 0,
        /// Message unknown to this end, or not available now.
        NotSupported = 1,
        /// Field out of range, or unusable page.
        InvalidParameter = 2,
        /// More entries than there is room for.
        BufferOverflow = 3,
    }
}

/// Maximum entries of a gref list, which fills one page.
pub const GREF_LIST_MAX: u32 = 512;

/// Maximum entries of the hash table's page.
pub const HASH_MAPPING_PAGE_MAX: u32 = 1024;

/// Maximum bytes of a hash key, which fit one page; each end may set a lower limit.
pub const HASH_KEY_PAGE_MAX: u32 = 4096;

/// Set of [`HashType`]s (`XEN_NETIF_CTRL_HASH_TYPE_*`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct HashTypes(u32);

impl HashTypes {
    /// Set of all defined types.
    pub const ALL: HashTypes = HashTypes(0b1111);

    /// Converts a mask; returns `None` if it has undefined bits.
    pub fn from_mask(mask: u32) -> Option<HashTypes> {
        (mask & !HashTypes::ALL.0 == 0).then_some(HashTypes(mask))
    }

    /// Returns the mask as in a message.
    pub fn mask(self) -> u32 {
        self.0
    }

    /// Returns `true` if no type is selected.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns `true` if `kind` is selected.
    pub fn contains(self, kind: HashType) -> bool {
        1u32.checked_shl(kind.to_raw().into()).is_some_and(|bit| self.0 & bit != 0)
    }
}

/// Gref list of a control message.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GrefList {
    /// Queue whose table is meant, as the peer gave it.
    pub queue: u32,
    /// Page that holds the list.
    pub page: Gref,
    /// Entries of the list, 1 to [`GREF_LIST_MAX`].
    pub entries: u16,
}

/// Validated control message. The receiver checks the fields that depend on its own state, such as the
/// number of queues or the longest key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CtrlMessage {
    GetHashFlags,
    SetHashFlags(HashTypes),
    /// [`CtrlType::SetHashKey`] with its page.
    SetHashKey {
        /// Page that holds the key; meaningless for a key of 0 bytes.
        page: Gref,
        /// Length of the key, at most a page; 0 removes the key.
        bytes: u16,
    },
    GetHashMappingSize,
    /// [`CtrlType::SetHashMappingSize`] with the new size.
    SetHashMappingSize {
        /// Entries of the table; 0 selects the hash modulo the number of queues.
        entries: u32,
    },
    /// [`CtrlType::SetHashMapping`] with its page.
    SetHashMapping {
        /// Page that holds the entries, u32 each.
        page: Gref,
        /// Entries in the page, 1 to [`HASH_MAPPING_PAGE_MAX`].
        entries: u16,
        /// Index of the first entry in the table.
        first: u32,
    },
    /// [`CtrlType::SetHashAlgorithm`] with the number that the peer gave: 0 for none, 1 for Toeplitz.
    SetHashAlgorithm(u32),
    /// [`CtrlType::GetGrefMappingSize`] of the queue that the peer gave.
    GetGrefMappingSize(u32),
    AddGrefMapping(GrefList),
    DelGrefMapping(GrefList),
}

/// Reasons for which a control message is invalid in every state of the vif.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Error)]
pub enum CtrlRefusal {
    #[error("control message of unknown type {kind}")]
    UnknownType { kind: u16 },
    /// Mask with undefined hash types.
    #[error("hash types {mask:#x}, of which some are not defined")]
    UnknownHashTypes { mask: u32 },
    /// Hash key longer than a page.
    #[error("a hash key of {bytes} bytes")]
    KeyLength { bytes: u32 },
    /// List of no entries, or of more than a page holds.
    #[error("a list of {entries} entries, {limit} at most")]
    ListLength {
        entries: u32,
        /// Maximum entries of a page.
        limit: u32,
    },
}

impl CtrlRefusal {
    /// Returns the status of the response.
    pub fn status(&self) -> CtrlStatus {
        match self {
            CtrlRefusal::UnknownType { .. } => CtrlStatus::NotSupported,
            _ => CtrlStatus::InvalidParameter,
        }
    }

    /// Returns the label of the rule's counter.
    pub fn label(&self) -> &'static str {
        match self {
            CtrlRefusal::UnknownType { .. } => "ctrl_unknown_type",
            CtrlRefusal::UnknownHashTypes { .. } => "ctrl_unknown_hash_types",
            CtrlRefusal::KeyLength { .. } => "ctrl_key_length",
            CtrlRefusal::ListLength { .. } => "ctrl_list_length",
        }
    }
}

/// Unvalidated control request, as fetched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CtrlRequest {
    /// Id that the response echoes.
    pub id: u16,
    pub kind: CtrlType,
    /// Fields whose meaning depends on the type.
    pub data: [u32; 3],
}

impl CtrlRequest {
    /// Bytes on the ring.
    pub const SIZE: usize = 16;

    /// Decodes the request in a slot; accepts any bytes.
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> CtrlRequest {
        let [i0, i1, k0, k1, a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3] = bytes;
        let word = u32::from_le_bytes;
        CtrlRequest {
            id: u16::from_le_bytes([i0, i1]),
            kind: CtrlType::from_raw(u16::from_le_bytes([k0, k1])),
            data: [word([a0, a1, a2, a3]), word([b0, b1, b2, b3]), word([c0, c1, c2, c3])],
        }
    }

    /// Encodes the request for a slot.
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[..2].copy_from_slice(&self.id.to_le_bytes());
        bytes[2..4].copy_from_slice(&self.kind.to_raw().to_le_bytes());
        for (place, word) in bytes[4..].chunks_exact_mut(4).zip(self.data) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Validates the request.
    ///
    /// # Errors
    ///
    /// Returns [`CtrlRefusal`], whose [`status`](CtrlRefusal::status) is the response.
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

    /// Builds the response to this request.
    pub fn answer(&self, status: CtrlStatus, data: u32) -> CtrlResponse {
        CtrlResponse { id: self.id, kind: self.kind, status, data }
    }
}

fn gref_list([queue, page, entries]: [u32; 3]) -> Result<GrefList, CtrlRefusal> {
    let entries = list_length(entries, GREF_LIST_MAX)?;
    Ok(GrefList { queue, page: Gref(page), entries })
}

/// Validates a list's length. An empty list is a miscount of the sender, so it is refused.
fn list_length(entries: u32, limit: u32) -> Result<u16, CtrlRefusal> {
    let fits = (1..=limit).contains(&entries);
    let length = u16::try_from(entries).ok().filter(|_| fits);
    length.ok_or(CtrlRefusal::ListLength { entries, limit })
}

impl CtrlMessage {
    /// Encodes the message as a request. Inverse of [`CtrlRequest::parse`].
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

/// Response to a control request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CtrlResponse {
    pub id: u16,
    pub kind: CtrlType,
    pub status: CtrlStatus,
    /// Requested value; 0 if the message requests none.
    pub data: u32,
}

impl CtrlResponse {
    /// Bytes on the ring. The slot has 16; the last four must be written too.
    pub const SIZE: usize = 12;

    /// Decodes the response in a slot; accepts any bytes.
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> CtrlResponse {
        let [i0, i1, k0, k1, s0, s1, s2, s3, d0, d1, d2, d3] = bytes;
        CtrlResponse {
            id: u16::from_le_bytes([i0, i1]),
            kind: CtrlType::from_raw(u16::from_le_bytes([k0, k1])),
            status: CtrlStatus::from_raw(u32::from_le_bytes([s0, s1, s2, s3])),
            data: u32::from_le_bytes([d0, d1, d2, d3]),
        }
    }

    /// Encodes the response for a slot, with zeros in the unused last four bytes (XSA-216).
    pub fn to_bytes(self) -> [u8; CtrlRequest::SIZE] {
        let mut bytes = [0; CtrlRequest::SIZE];
        bytes[..2].copy_from_slice(&self.id.to_le_bytes());
        bytes[2..4].copy_from_slice(&self.kind.to_raw().to_le_bytes());
        bytes[4..8].copy_from_slice(&self.status.to_raw().to_le_bytes());
        bytes[8..12].copy_from_slice(&self.data.to_le_bytes());
        bytes
    }
}

/// Entry of a gref list: ref u32 at 0, flags u16 at 4, status u16 at 6. Only the backend sets the
/// status, only for `DEL`, and it need not be zero before.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GrefEntry {
    pub gref: Gref,
    /// Flag bits: only [`GrefEntry::READ_ONLY`] is defined, other bits are ignored.
    pub flags: u16,
    /// Result as a [`CtrlStatus`] in 16 bits.
    pub status: u16,
}

impl GrefEntry {
    /// Bytes in the list.
    pub const SIZE: usize = 8;
    /// Flag: the page is granted read-only.
    pub const READ_ONLY: u16 = 1;
    /// Offset of the status in an entry.
    pub const STATUS_AT: usize = 6;

    /// Creates an entry as a frontend writes it.
    pub fn new(gref: Gref, read_only: bool) -> GrefEntry {
        GrefEntry { gref, flags: if read_only { GrefEntry::READ_ONLY } else { 0 }, status: 0 }
    }

    /// Returns `true` if the page is granted read-only.
    pub fn is_read_only(&self) -> bool {
        self.flags & GrefEntry::READ_ONLY != 0
    }

    /// Decodes an entry of a list; accepts any bytes.
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> GrefEntry {
        let [g0, g1, g2, g3, f0, f1, s0, s1] = bytes;
        GrefEntry {
            gref: Gref(u32::from_le_bytes([g0, g1, g2, g3])),
            flags: u16::from_le_bytes([f0, f1]),
            status: u16::from_le_bytes([s0, s1]),
        }
    }

    /// Encodes the entry for a list.
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
    fn ctrl_layouts_match_header() {
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
    fn gref_list_empty_or_longer_than_page_is_refused() {
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
    fn unknown_message_type_is_not_supported() {
        for kind in [0, 11, 0xFFFF] {
            let request = CtrlRequest { id: 3, kind: CtrlType::from_raw(kind), data: [0; 3] };
            let refused = request.parse().unwrap_err();
            assert_eq!(refused, CtrlRefusal::UnknownType { kind });
            assert_eq!(refused.status(), CtrlStatus::NotSupported);
        }
    }

    #[test]
    fn hash_types_mask_selects_types_by_bit_number() {
        let types = HashTypes::from_mask(0b0110).unwrap();
        assert!(types.contains(HashType::Ipv4Tcp) && types.contains(HashType::Ipv6));
        assert!(!types.contains(HashType::Ipv4) && !types.contains(HashType::Ipv6Tcp));
        assert!(!HashTypes::ALL.contains(HashType::Unknown(200)));
        assert_eq!(HashTypes::from_mask(16), None);
    }

    proptest! {
        #[test]
        fn ctrl_request_of_any_bytes_round_trips_or_is_refused(bytes: [u8; CtrlRequest::SIZE]) {
            let request = CtrlRequest::from_bytes(bytes);
            prop_assert_eq!(request.to_bytes(), bytes);
            match request.parse() {
                // Ignored fields are lost; the remaining fields round-trip.
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
        fn gref_entry_and_response_of_any_bytes_round_trip(entry: [u8; 8], response: [u8; 12]) {
            prop_assert_eq!(GrefEntry::from_bytes(entry).to_bytes(), entry);
            let slot = CtrlResponse::from_bytes(response).to_bytes();
            prop_assert_eq!(&slot[..12], &response[..]);
            prop_assert_eq!(&slot[12..], &[0; 4]);
        }
    }
}

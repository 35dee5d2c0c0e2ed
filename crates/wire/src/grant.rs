//! Grant references, domain ids, grant-table entries and the status codes of grant operations
//! (Xen's `grant_table.h`).

use core::fmt;

/// Domain number. Values from [`DomId::FIRST_RESERVED`] on name no domain (`xen.h`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DomId(pub u16);

impl DomId {
    /// First reserved id (`DOMID_FIRST_RESERVED`, equal to `DOMID_SELF`).
    pub const FIRST_RESERVED: DomId = DomId(0x7FF0);
}

impl fmt::Display for DomId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Grant reference: an index into the granter's table. The first eight are reserved.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Gref(pub u32);

impl Gref {
    /// First reference that is not reserved (`GNTTAB_NR_RESERVED_ENTRIES`).
    pub const FIRST_FREE: Gref = Gref(8);
}

impl fmt::Display for Gref {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Access that a grant gives the grantee.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// The grantee may only read (`GTF_readonly` set).
    ReadOnly,
    /// The grantee may read and write.
    ReadWrite,
}

macro_rules! grant_status {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $text:literal;)*) => {
        /// Status of one grant operation (`GNTST_*`).
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum GrantStatus {
            $($(#[$doc])* $name,)*
            /// Number that the header does not define.
            Unknown(i16),
        }

        impl GrantStatus {
            /// Converts a number of the interface; never fails.
            pub fn from_raw(raw: i16) -> GrantStatus {
                match raw { $($value => GrantStatus::$name,)* other => GrantStatus::Unknown(other) }
            }

            /// Returns the number in the interface.
            pub fn to_raw(self) -> i16 {
                match self { $(GrantStatus::$name => $value,)* GrantStatus::Unknown(other) => other }
            }
        }

        impl fmt::Display for GrantStatus {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(GrantStatus::$name => f.write_str($text),)*
                    GrantStatus::Unknown(n) => write!(f, "unknown grant status {n}"),
                }
            }
        }
    };
}

grant_status! {
    /// `GNTST_okay`.
    Okay = 0, "okay";
    /// `GNTST_general_error`.
    GeneralError = -1, "general error";
    /// `GNTST_bad_domain`.
    BadDomain = -2, "bad domain";
    /// `GNTST_bad_gntref`.
    BadGref = -3, "bad grant reference";
    /// `GNTST_bad_handle`.
    BadHandle = -4, "bad handle";
    /// `GNTST_bad_virt_addr`.
    BadVirtAddr = -5, "bad virtual address";
    /// `GNTST_bad_dev_addr`.
    BadDevAddr = -6, "bad device address";
    /// `GNTST_no_device_space`.
    NoDeviceSpace = -7, "no device space";
    /// `GNTST_permission_denied`.
    PermissionDenied = -8, "permission denied";
    /// `GNTST_bad_page`.
    BadPage = -9, "bad page";
    /// `GNTST_bad_copy_arg`.
    BadCopyArg = -10, "copy arguments cross a page";
    /// `GNTST_address_too_big`.
    AddressTooBig = -11, "address too big";
    /// `GNTST_eagain`.
    Again = -12, "try again";
    /// `GNTST_no_space`.
    NoSpace = -13, "no space";
}

impl std::error::Error for GrantStatus {}

/// Bits of a version 1 entry's `flags` (`GTF_*`).
pub mod flags {
    /// Mask of the entry type.
    pub const TYPE_MASK: u16 = 3;
    /// Entry type: the entry is unused.
    pub const INVALID: u16 = 0;
    /// Entry type: the peer may use the page.
    pub const PERMIT_ACCESS: u16 = 1;
    /// Entry type: the granter accepts a page transfer from the peer.
    pub const ACCEPT_TRANSFER: u16 = 2;
    /// Entry type: passes on another domain's grant (version 2).
    pub const TRANSITIVE: u16 = 3;
    /// Set by the granter: the peer has read-only access.
    pub const READ_ONLY: u16 = 1 << 2;
    /// Set on behalf of the grantee: the page is mapped, or a copy reads it.
    pub const READING: u16 = 1 << 3;
    /// Set on behalf of the grantee: the page is mapped writable, or a copy writes it.
    pub const WRITING: u16 = 1 << 4;
    /// Both in-use bits. An entry with either bit set cannot be revoked.
    pub const IN_USE: u16 = READING | WRITING;
    /// Page cache attributes PWT, PCD and PAT, which Ringfence ignores.
    pub const CACHE_MASK: u16 = 0b111 << 5;
    /// The entry grants a part of a page (version 2).
    pub const SUB_PAGE: u16 = 1 << 8;
}

/// Entries in one page of a version 1 table.
pub const V1_ENTRIES_PER_PAGE: u32 = 512;

/// Unvalidated version 1 entry, one little-endian word: `flags` u16 at 0, `domid` u16 at 2, `frame`
/// u32 at 4. The granter may change the word at any time, so fetch it once.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RawGrantEntry(pub u64);

impl RawGrantEntry {
    /// Word of an unused entry.
    pub const INVALID: RawGrantEntry = RawGrantEntry(0);

    /// Packs the three fields into one word.
    #[inline]
    pub const fn from_fields(flags: u16, domid: u16, frame: u32) -> RawGrantEntry {
        let [f0, f1] = flags.to_le_bytes();
        let [d0, d1] = domid.to_le_bytes();
        let [p0, p1, p2, p3] = frame.to_le_bytes();
        RawGrantEntry(u64::from_le_bytes([f0, f1, d0, d1, p0, p1, p2, p3]))
    }

    /// Decodes 8 bytes of a table.
    #[inline]
    pub const fn from_bytes(bytes: [u8; 8]) -> RawGrantEntry {
        RawGrantEntry(u64::from_le_bytes(bytes))
    }

    /// Encodes the entry for a table.
    #[inline]
    pub const fn to_bytes(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }

    /// Returns the bits of the module [`flags`].
    #[inline]
    pub const fn flags(self) -> u16 {
        let [f0, f1, ..] = self.to_bytes();
        u16::from_le_bytes([f0, f1])
    }

    /// Returns the domain that may use the page.
    #[inline]
    pub const fn domain(self) -> DomId {
        let [_, _, d0, d1, ..] = self.to_bytes();
        DomId(u16::from_le_bytes([d0, d1]))
    }

    /// Returns the granted frame number.
    #[inline]
    pub const fn frame(self) -> u32 {
        let [_, _, _, _, p0, p1, p2, p3] = self.to_bytes();
        u32::from_le_bytes([p0, p1, p2, p3])
    }

    /// Validates the entry.
    ///
    /// # Errors
    /// Returns a [`GrantEntryError`] for an entry that grants nothing or needs version 2.
    #[inline]
    pub fn parse(self) -> Result<GrantEntry, GrantEntryError> {
        let bits = self.flags();
        if bits & flags::TYPE_MASK != flags::PERMIT_ACCESS {
            return Err(match bits & flags::TYPE_MASK {
                flags::INVALID => GrantEntryError::Invalid,
                kind => GrantEntryError::UnsupportedType { kind },
            });
        }
        let known = flags::TYPE_MASK | flags::READ_ONLY | flags::IN_USE | flags::CACHE_MASK;
        if bits & !known != 0 {
            return Err(GrantEntryError::UnknownFlags { bits: bits & !known });
        }
        let access =
            if bits & flags::READ_ONLY != 0 { Access::ReadOnly } else { Access::ReadWrite };
        Ok(GrantEntry { domain: self.domain(), frame: self.frame(), access })
    }
}

/// Reasons for which an entry gives no access.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GrantEntryError {
    /// Unused entry: nothing is granted.
    #[error("the entry grants nothing")]
    Invalid,
    /// Page transfer or transitive grant.
    #[error("entries of type {kind} are not supported")]
    UnsupportedType { kind: u16 },
    /// Flag that version 1 does not define.
    #[error("unknown flag bits {bits:#06x} in a grant entry")]
    UnknownFlags { bits: u16 },
}

/// Validated version 1 entry that permits access.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GrantEntry {
    /// Domain that may use the page.
    pub domain: DomId,
    /// Frame number as the granter wrote it; the caller bounds it.
    pub frame: u32,
    pub access: Access,
}

impl GrantEntry {
    /// Encodes the entry for the table, with the in-use bits clear. Inverse of [`RawGrantEntry::parse`].
    #[inline]
    pub fn emit(&self) -> RawGrantEntry {
        let bits = match self.access {
            Access::ReadOnly => flags::PERMIT_ACCESS | flags::READ_ONLY,
            Access::ReadWrite => flags::PERMIT_ACCESS,
        };
        RawGrantEntry::from_fields(bits, self.domain.0, self.frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Read-only access for domain 0x0102 to frame 0x00AB_CDEF.
    const BYTES: [u8; 8] = [5, 0, 2, 1, 0xEF, 0xCD, 0xAB, 0];
    const ENTRY: GrantEntry =
        GrantEntry { domain: DomId(0x0102), frame: 0x00AB_CDEF, access: Access::ReadOnly };

    #[test]
    fn entry_bytes_deconstruct_to_fields() {
        let raw = RawGrantEntry::from_bytes(BYTES);
        assert_eq!(raw.flags(), flags::PERMIT_ACCESS | flags::READ_ONLY);
        assert_eq!(raw.domain(), DomId(0x0102));
        assert_eq!(raw.frame(), 0x00AB_CDEF);
        assert_eq!(raw.0, 0x00AB_CDEF_0102_0005, "one little-endian word");
    }

    #[test]
    fn entry_fields_construct_bytes() {
        assert_eq!(RawGrantEntry::from_fields(5, 0x0102, 0x00AB_CDEF).to_bytes(), BYTES);
    }

    #[test]
    fn read_only_entry_parses() {
        assert_eq!(RawGrantEntry::from_bytes(BYTES).parse(), Ok(ENTRY));
    }

    #[test]
    fn read_only_entry_emits_its_bytes() {
        assert_eq!(ENTRY.emit().to_bytes(), BYTES);
    }

    #[test]
    fn unused_and_version_2_entries_are_rejected() {
        let parse = |bits| RawGrantEntry::from_fields(bits, 1, 1).parse();
        assert_eq!(RawGrantEntry::INVALID.parse(), Err(GrantEntryError::Invalid));
        assert_eq!(
            parse(flags::ACCEPT_TRANSFER),
            Err(GrantEntryError::UnsupportedType { kind: flags::ACCEPT_TRANSFER })
        );
        assert_eq!(
            parse(flags::PERMIT_ACCESS | flags::SUB_PAGE),
            Err(GrantEntryError::UnknownFlags { bits: flags::SUB_PAGE })
        );
        assert!(parse(flags::PERMIT_ACCESS | flags::IN_USE).is_ok(), "used, and granted");
    }

    #[test]
    fn every_status_number_round_trips() {
        for raw in i16::MIN..=i16::MAX {
            assert_eq!(GrantStatus::from_raw(raw).to_raw(), raw);
        }
    }

    proptest! {
        #[test]
        fn any_entry_word_is_rejected_or_round_trips(word: u64) {
            let raw = RawGrantEntry(word);
            prop_assert_eq!(
                RawGrantEntry::from_fields(raw.flags(), raw.domain().0, raw.frame()),
                raw
            );
            if let Ok(entry) = raw.parse() {
                prop_assert_eq!(entry.emit().parse(), Ok(entry));
            }
        }
    }
}

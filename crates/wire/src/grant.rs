//! Grant references, domain ids, grant-table entries and the status codes of grant operations
//! (Xen's `grant_table.h`).

use core::fmt;

/// A domain's number. Values from [`DomId::FIRST_RESERVED`] on name no domain (`xen.h`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DomId(pub u16);

impl DomId {
    /// The first reserved id (`DOMID_FIRST_RESERVED`, which is also `DOMID_SELF`).
    pub const FIRST_RESERVED: DomId = DomId(0x7FF0);
}

impl fmt::Display for DomId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A grant reference: an index into the granter's table. The first eight are reserved.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Gref(pub u32);

impl Gref {
    /// The first reference that is not reserved (`GNTTAB_NR_RESERVED_ENTRIES`).
    pub const FIRST_FREE: Gref = Gref(8);
}

impl fmt::Display for Gref {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What the grantee may do with the page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// The grantee may only read (`GTF_readonly` set).
    ReadOnly,
    /// The grantee may read and write.
    ReadWrite,
}

macro_rules! grant_status {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $text:literal;)*) => {
        /// The status of one grant operation (`GNTST_*`).
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum GrantStatus {
            $($(#[$doc])* $name,)*
            /// A number the header does not define.
            Unknown(i16),
        }

        impl GrantStatus {
            /// The value that stands for `raw`; total.
            pub fn from_raw(raw: i16) -> GrantStatus {
                match raw { $($value => GrantStatus::$name,)* other => GrantStatus::Unknown(other) }
            }

            /// The number in the interface.
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

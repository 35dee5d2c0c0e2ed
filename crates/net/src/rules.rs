//! Counts of broken rules, by name: each way in which a peer can misbehave has its own.

use ringfence_offload::accept::Refusal;
use ringfence_platform::GrantStatus;
pub use ringfence_sys::rules::RuleCounters;

macro_rules! grant_rules {
    ($($(#[$doc:meta])* $name:ident: $prefix:literal;)*) => {$(
        $(#[$doc])*
        pub(crate) fn $name(status: GrantStatus) -> &'static str {
            match status {
                GrantStatus::BadGref => concat!($prefix, "_gref_not_granted"),
                GrantStatus::PermissionDenied => concat!($prefix, "_grant_denied"),
                GrantStatus::BadPage => concat!($prefix, "_page_beyond_arena"),
                GrantStatus::Again => concat!($prefix, "_grant_revoked"),
                GrantStatus::NoSpace => concat!($prefix, "_too_many_mapped"),
                _ => concat!($prefix, "_grant_error"),
            }
        }
    )*};
}

grant_rules! {
    /// The rule that a page to be read broke: to be counted for the guest that named it.
    tx_grant_rule: "tx";
    /// The rule that a page to be written broke.
    rx_grant_rule: "rx";
}

macro_rules! offload_rules {
    ($($(#[$doc:meta])* $name:ident: $prefix:literal;)*) => {$(
        $(#[$doc])*
        pub(crate) fn $name(refusal: &Refusal) -> &'static str {
            match refusal {
                Refusal::ChecksumBeyondFrame { .. } => concat!($prefix, "_gso_checksum_beyond_frame"),
                Refusal::ChecksumNotCaptured { .. } => concat!($prefix, "_gso_headers_too_long"),
                Refusal::ChecksumInHeaders { .. } | Refusal::ChecksumElsewhere { .. } => {
                    concat!($prefix, "_gso_checksum_elsewhere")
                }
                Refusal::ChecksumOnFragment => concat!($prefix, "_gso_on_fragment"),
                Refusal::SizeZero => concat!($prefix, "_gso_size_zero"),
                Refusal::SizeReserved => concat!($prefix, "_gso_size_reserved"),
                Refusal::SegmentSize { .. } | Refusal::FragmentSize { .. } => {
                    concat!($prefix, "_gso_size_too_small")
                }
                Refusal::EcnWithoutTcp | Refusal::KindMismatch { .. } => {
                    concat!($prefix, "_gso_kind_mismatch")
                }
                Refusal::LengthMismatch { .. } => concat!($prefix, "_gso_length_mismatch"),
                Refusal::UdpWithoutChecksum | Refusal::CannotBlank(_) => {
                    concat!($prefix, "_gso_no_checksum")
                }
                Refusal::TooManySegments { .. } => concat!($prefix, "_gso_too_many_segments"),
            }
        }
    )*};
}

offload_rules! {
    /// The rule that a segmentation order of a guest broke.
    tx_gso_rule: "tx";
    /// The rule that a segmentation order of a backend broke.
    rx_gso_rule: "rx";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_in_which_a_grant_fails_has_a_name_of_its_own() {
        use GrantStatus::{Again, BadGref, BadPage, GeneralError, NoSpace, PermissionDenied};
        let statuses = [BadGref, PermissionDenied, BadPage, Again, NoSpace, GeneralError];
        let names = statuses.into_iter().flat_map(|s| [tx_grant_rule(s), rx_grant_rule(s)]);
        assert_eq!(names.collect::<std::collections::BTreeSet<_>>().len(), 12);
    }
}

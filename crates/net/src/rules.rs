//! Counters of rule violations, with a name for each rule.

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
    /// Returns the rule name for a failed read of a guest's page.
    tx_grant_rule: "tx";
    /// Returns the rule name for a failed write to a guest's page.
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
    /// Returns the rule name for a refused segmentation request of a guest.
    tx_gso_rule: "tx";
    /// Returns the rule name for a refused segmentation request of a backend.
    rx_gso_rule: "rx";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grant_statuses_have_distinct_rule_names() {
        use GrantStatus::{Again, BadGref, BadPage, GeneralError, NoSpace, PermissionDenied};
        let statuses = [BadGref, PermissionDenied, BadPage, Again, NoSpace, GeneralError];
        let names = statuses.into_iter().flat_map(|s| [tx_grant_rule(s), rx_grant_rule(s)]);
        assert_eq!(names.collect::<std::collections::BTreeSet<_>>().len(), 12);
    }
}

//! Properties of a disk as announced to its guest.

use ringfence_wire::blkif::keys;
use ringfence_xenbus::end::BackendEnd;
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use crate::blkback::{BlkbackOptions, rules_for};
use crate::storage::Geometry;

/// Geometry and flags after the toolstack's restrictions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct AnnouncedDisk {
    pub(super) geometry: Geometry,
    pub(super) removable: bool,
}

impl AnnouncedDisk {
    /// Applies the toolstack's settings for this guest to the geometry of the disk.
    pub(super) fn of(
        mut geometry: Geometry,
        end: &BackendEnd,
        store: &mut StoreClient,
    ) -> Result<AnnouncedDisk, StoreError> {
        let mode = store.read_opt(&end.back(keys::MODE))?;
        // Any mode that does not begin with `w` is read-only.
        geometry.read_only |= mode.is_some_and(|mode| mode.first() != Some(&b'w'));
        let discard = store.read_opt(&end.back(keys::DISCARD_ENABLE))?;
        if discard.is_some_and(|text| text == b"0") || geometry.read_only {
            geometry.discard = None;
        }
        let removable = store.read_flag(&end.back(keys::REMOVABLE)).unwrap_or(false);
        Ok(AnnouncedDisk { geometry, removable })
    }
}

/// Returns the feature keys of a disk.
pub(super) fn features(
    geometry: &Geometry,
    options: &BlkbackOptions,
) -> Vec<(&'static str, String)> {
    let rules = rules_for(geometry, options);
    let mut entries = vec![
        (keys::FEATURE_FLUSH_CACHE, flag(rules.flush)),
        (keys::FEATURE_BARRIER, flag(rules.barrier)),
        (keys::FEATURE_DISCARD, flag(rules.discard)),
        (keys::FEATURE_RINGFENCE_EXTENTS, flag(rules.extents)),
        (keys::FEATURE_RINGFENCE_WRITE_ZEROES, flag(rules.write_zeroes)),
    ];
    if let Some(discard) = geometry.discard.filter(|_| rules.discard) {
        entries.extend([
            (keys::DISCARD_GRANULARITY, discard.granularity.to_string()),
            (keys::DISCARD_ALIGNMENT, discard.alignment.to_string()),
            (keys::DISCARD_SECURE, flag(discard.secure)),
        ]);
    }
    entries
}

/// Returns the value of a feature key.
pub(super) fn flag(on: bool) -> String {
    u8::from(on).to_string()
}

//! Sections `[disks]` and `[[disk]]` of the configuration.

use std::path::PathBuf;
use std::time::Duration;

use ringfence_access::Mode;
use ringfence_block::blkback::{BlkbackOptions, PersistentLimits};
use ringfence_block::storage::file::{Bounce, CacheMode, Engine};
use serde::Deserialize;
use serde::de::{Deserializer, Error};

use super::values::{self, OVERRIDES_MAX};

pub(super) const QUEUES_MAX: u64 = 16;
/// Maximum order of a ring's pages.
pub(super) const RING_ORDER_MAX: u64 = 4;
/// Maximum number of segments of an indirect request.
pub(super) const SEGMENTS_MAX: u64 = 256;
/// Maximum number of pages that a ring keeps mapped. A queue may have 4096 pages of its guest mapped,
/// which include the ring's own and those of requests in flight.
pub(super) const PERSISTENT_MAX: u64 = 3072;
/// Maximum time after which an unused page is unmapped, in seconds.
pub(super) const IDLE_MAX: u64 = 3600;
/// Maximum number of folders in `paths`.
const PATHS_MAX: usize = 256;

/// Section `[disks]`: options of guests' disks.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Disks {
    /// Set if the daemon serves disks.
    pub serve: bool,
    /// Folders below which files, devices and sockets of disks must be.
    #[serde(deserialize_with = "folders")]
    pub paths: Vec<PathBuf>,
    /// Set if a disk may be an NBD server's, reached over TCP.
    pub nbd: bool,
    /// Access mode of guests' pages.
    #[serde(deserialize_with = "values::disk_mode")]
    pub mode: Mode,
    /// Use of the host's page cache.
    #[serde(deserialize_with = "values::parsed")]
    pub cache: CacheMode,
    /// Use of private memory for the bytes of requests.
    #[serde(deserialize_with = "values::parsed")]
    pub bounce: Bounce,
    /// Engine that executes the I/O of files.
    #[serde(deserialize_with = "values::parsed")]
    pub engine: Engine,
    /// Sector size, 512 or 4096 bytes. `None` stands for the medium's own.
    #[serde(deserialize_with = "sector_size")]
    pub sector_size: Option<u32>,
    /// Maximum number of queues that a guest is offered.
    #[serde(deserialize_with = "values::within::<1, { QUEUES_MAX }, _, _>")]
    pub max_queues: u32,
    /// Order of the largest ring that a guest is offered.
    #[serde(deserialize_with = "values::within::<0, { RING_ORDER_MAX }, _, _>")]
    pub ring_page_order: u32,
    /// Segments of an indirect request that a guest is offered. 0 offers no indirect requests.
    #[serde(deserialize_with = "values::within::<0, { SEGMENTS_MAX }, _, _>")]
    pub indirect_segments: u16,
    /// Maximum number of pages that each ring keeps mapped.
    #[serde(deserialize_with = "values::within::<0, { PERSISTENT_MAX }, _, _>")]
    pub persistent_pages: u16,
    /// Time after which an unused page is unmapped.
    #[serde(deserialize_with = "values::within::<1, { IDLE_MAX }, _, _>")]
    pub persistent_seconds: u16,
}

impl Default for Disks {
    fn default() -> Disks {
        Disks {
            serve: true,
            paths: vec!["/dev".into(), "/var/lib/xen/images".into()],
            nbd: true,
            mode: Mode::Persistent,
            cache: CacheMode::None,
            bounce: Bounce::Auto,
            engine: Engine::Auto,
            sector_size: None,
            max_queues: 4,
            ring_page_order: 4,
            indirect_segments: 256,
            persistent_pages: 1056,
            persistent_seconds: 60,
        }
    }
}

/// Override for disks of one domain, or with one name in their guests, or with both.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DiskOverride {
    /// Name of the domain.
    #[serde(default, deserialize_with = "values::domain_name")]
    pub domain: Option<String>,
    /// Name of the disk in the guest's configuration: `xvda`.
    #[serde(default)]
    pub vdev: Option<String>,
    /// Replaces [`Disks::mode`].
    #[serde(default, deserialize_with = "values::some_disk_mode")]
    pub mode: Option<Mode>,
    /// Replaces [`Disks::cache`].
    #[serde(default, deserialize_with = "values::some_parsed")]
    pub cache: Option<CacheMode>,
    /// Replaces [`Disks::bounce`].
    #[serde(default, deserialize_with = "values::some_parsed")]
    pub bounce: Option<Bounce>,
    /// Replaces [`Disks::engine`].
    #[serde(default, deserialize_with = "values::some_parsed")]
    pub engine: Option<Engine>,
    /// Replaces [`Disks::sector_size`].
    #[serde(default, deserialize_with = "some_sector_size")]
    pub sector_size: Option<Option<u32>>,
    /// Replaces [`Disks::max_queues`].
    #[serde(default, deserialize_with = "values::some_within::<1, { QUEUES_MAX }, _, _>")]
    pub max_queues: Option<u32>,
    /// Replaces [`Disks::ring_page_order`].
    #[serde(default, deserialize_with = "values::some_within::<0, { RING_ORDER_MAX }, _, _>")]
    pub ring_page_order: Option<u32>,
    /// Replaces [`Disks::indirect_segments`].
    #[serde(default, deserialize_with = "values::some_within::<0, { SEGMENTS_MAX }, _, _>")]
    pub indirect_segments: Option<u16>,
    /// Replaces [`Disks::persistent_pages`].
    #[serde(default, deserialize_with = "values::some_within::<0, { PERSISTENT_MAX }, _, _>")]
    pub persistent_pages: Option<u16>,
    /// Replaces [`Disks::persistent_seconds`].
    #[serde(default, deserialize_with = "values::some_within::<1, { IDLE_MAX }, _, _>")]
    pub persistent_seconds: Option<u16>,
}

impl DiskOverride {
    pub(super) fn matches_disk(&self, domain: Option<&str>, vdev: Option<&str>) -> bool {
        self.domain.as_deref().is_none_or(|name| Some(name) == domain)
            && self.vdev.as_deref().is_none_or(|own| Some(own) == vdev)
    }
}

/// Settings of one disk: the defaults with the matching overrides applied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskSettings {
    /// Access mode of the disk's pages.
    pub mode: Mode,
    /// Use of the host's page cache.
    pub cache: CacheMode,
    /// Use of private memory for the bytes of requests.
    pub bounce: Bounce,
    /// Engine that executes the I/O of files.
    pub engine: Engine,
    /// Sector size in bytes. `None` stands for the medium's own.
    pub sector_size: Option<u32>,
    /// Maximum number of queues that the guest is offered.
    pub max_queues: u32,
    /// Order of the largest ring that the guest is offered.
    pub ring_page_order: u32,
    /// Segments of an indirect request that the guest is offered.
    pub indirect_segments: u16,
    /// Maximum number of pages that each ring keeps mapped.
    pub persistent_pages: u16,
    /// Time after which an unused page is unmapped.
    pub persistent_seconds: u16,
}

impl DiskSettings {
    /// Returns the settings as options of the backend.
    pub fn options(&self) -> BlkbackOptions {
        BlkbackOptions {
            mode: self.mode,
            persistent: PersistentLimits {
                pages: self.persistent_pages,
                idle: Duration::from_secs(self.persistent_seconds.into()),
                ..PersistentLimits::default()
            },
            queues: self.max_queues,
            ring_order: self.ring_page_order,
            indirect_segments: self.indirect_segments,
            ..BlkbackOptions::default()
        }
    }
}

/// Parses a sector size. 0 stands for the medium's own.
fn sector_size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    match i64::deserialize(from)? {
        0 => Ok(None),
        512 => Ok(Some(512)),
        4096 => Ok(Some(4096)),
        other => Err(Error::custom(format!(
            "{other} is no size of a sector: 512, 4096, or 0 for that of the medium"
        ))),
    }
}

fn some_sector_size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Option<u32>>, D::Error> {
    sector_size(from).map(Some)
}

fn folders<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<PathBuf>, D::Error> {
    let list = Vec::<String>::deserialize(from)?;
    if list.len() > PATHS_MAX {
        let why = format!("{} folders, at most {PATHS_MAX} are read", list.len());
        return Err(Error::custom(why));
    }
    list.into_iter()
        .map(|text| {
            let path = PathBuf::from(&text);
            let plain = |part| !matches!(part, std::path::Component::ParentDir);
            if path.is_absolute() && path.components().all(plain) && !text.contains('\0') {
                Ok(path)
            } else {
                let why = format!("`{text}` is no absolute path of a folder, without `..`");
                Err(Error::custom(why))
            }
        })
        .collect()
}

/// Parses the overrides for disks. Each must name a domain or a disk.
pub(super) fn overrides<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<DiskOverride>, D::Error> {
    let list = Vec::<DiskOverride>::deserialize(from)?;
    if list.len() > OVERRIDES_MAX {
        let why = format!("{} exceptions, at most {OVERRIDES_MAX} are read", list.len());
        return Err(Error::custom(why));
    }
    match list.iter().position(|other| other.domain.is_none() && other.vdev.is_none()) {
        Some(index) => Err(Error::custom(format!(
            "exception {} names neither a `domain` nor a `vdev`; what holds for all disks belongs in \
             [disks]",
            index + 1
        ))),
        None => Ok(list),
    }
}

/// Returns `true` if the option `name` of `[disks]` differs.
pub(super) fn differs(name: &str, old: &Disks, new: &Disks) -> bool {
    match name {
        "disks.serve" => old.serve != new.serve,
        "disks.paths" => old.paths != new.paths,
        "disks.nbd" => old.nbd != new.nbd,
        "disks.mode" => old.mode != new.mode,
        "disks.cache" => old.cache != new.cache,
        "disks.bounce" => old.bounce != new.bounce,
        "disks.engine" => old.engine != new.engine,
        "disks.sector-size" => old.sector_size != new.sector_size,
        "disks.max-queues" => old.max_queues != new.max_queues,
        "disks.ring-page-order" => old.ring_page_order != new.ring_page_order,
        "disks.indirect-segments" => old.indirect_segments != new.indirect_segments,
        "disks.persistent-pages" => old.persistent_pages != new.persistent_pages,
        "disks.persistent-seconds" => old.persistent_seconds != new.persistent_seconds,
        _ => false,
    }
}

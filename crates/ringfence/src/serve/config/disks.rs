//! The part of the configuration that is about disks.

use std::path::PathBuf;
use std::time::Duration;

use ringfence_block::blkback::{BlkbackOptions, Mode, PersistentLimits};
use ringfence_block::storage::file::{Bounce, CacheMode};
use serde::Deserialize;
use serde::de::{Deserializer, Error};

use super::{OVERRIDES_MAX, values};

/// Queues of one disk.
pub(super) const QUEUES_MAX: u64 = 16;
/// The order of a ring's pages.
pub(super) const RING_ORDER_MAX: u64 = 4;
/// Segments of an indirect request.
pub(super) const SEGMENTS_MAX: u64 = 256;
/// Pages that a ring keeps: a guest's may have 4096 mapped at a time, the ring's own and those of
/// requests among them.
pub(super) const PERSISTENT_MAX: u64 = 3072;
/// Seconds.
pub(super) const IDLE_MAX: u64 = 3600;
/// Folders that may be listed.
const PATHS_MAX: usize = 256;

/// Guests' disks.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Disks {
    /// Whether they are served.
    pub serve: bool,
    /// The folders below which their files, devices and sockets are.
    #[serde(deserialize_with = "folders")]
    pub paths: Vec<PathBuf>,
    /// Whether a disk may be an NBD server's, over TCP.
    pub nbd: bool,
    /// How pages are reached.
    #[serde(deserialize_with = "values::parsed")]
    pub mode: Mode,
    /// The host's page cache.
    #[serde(deserialize_with = "values::parsed")]
    pub cache: CacheMode,
    /// When bytes are copied first.
    #[serde(deserialize_with = "values::parsed")]
    pub bounce: Bounce,
    /// 512 or 4096; `None`: the medium's.
    #[serde(deserialize_with = "sector_size")]
    pub sector_size: Option<u32>,
    /// Queues offered.
    #[serde(deserialize_with = "values::within::<1, { QUEUES_MAX }, _, _>")]
    pub max_queues: u32,
    /// Order of the largest ring offered.
    #[serde(deserialize_with = "values::within::<0, { RING_ORDER_MAX }, _, _>")]
    pub ring_page_order: u32,
    /// Segments of an indirect request offered; 0 for no such requests.
    #[serde(deserialize_with = "values::within::<0, { SEGMENTS_MAX }, _, _>")]
    pub indirect_segments: u16,
    /// Pages that a ring keeps mapped.
    #[serde(deserialize_with = "values::within::<0, { PERSISTENT_MAX }, _, _>")]
    pub persistent_pages: u16,
    /// When a page that was not used is let go.
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
            sector_size: None,
            max_queues: 4,
            ring_page_order: 4,
            indirect_segments: 256,
            persistent_pages: 1056,
            persistent_seconds: 60,
        }
    }
}

/// Exceptions for disks of one domain, or with one name in their guests, or both.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DiskOverride {
    /// The domain's name.
    #[serde(default, deserialize_with = "values::domain_name")]
    pub domain: Option<String>,
    /// What the guest's configuration calls it: `xvda`.
    #[serde(default)]
    pub vdev: Option<String>,
    /// In place of [`Disks::mode`].
    #[serde(default, deserialize_with = "values::some_parsed")]
    pub mode: Option<Mode>,
    /// In place of [`Disks::cache`].
    #[serde(default, deserialize_with = "values::some_parsed")]
    pub cache: Option<CacheMode>,
    /// In place of [`Disks::bounce`].
    #[serde(default, deserialize_with = "values::some_parsed")]
    pub bounce: Option<Bounce>,
    /// In place of [`Disks::sector_size`].
    #[serde(default, deserialize_with = "some_sector_size")]
    pub sector_size: Option<Option<u32>>,
    /// In place of [`Disks::max_queues`].
    #[serde(default, deserialize_with = "values::some_within::<1, { QUEUES_MAX }, _, _>")]
    pub max_queues: Option<u32>,
    /// In place of [`Disks::ring_page_order`].
    #[serde(default, deserialize_with = "values::some_within::<0, { RING_ORDER_MAX }, _, _>")]
    pub ring_page_order: Option<u32>,
    /// In place of [`Disks::indirect_segments`].
    #[serde(default, deserialize_with = "values::some_within::<0, { SEGMENTS_MAX }, _, _>")]
    pub indirect_segments: Option<u16>,
    /// In place of [`Disks::persistent_pages`].
    #[serde(default, deserialize_with = "values::some_within::<0, { PERSISTENT_MAX }, _, _>")]
    pub persistent_pages: Option<u16>,
    /// In place of [`Disks::persistent_seconds`].
    #[serde(default, deserialize_with = "values::some_within::<1, { IDLE_MAX }, _, _>")]
    pub persistent_seconds: Option<u16>,
}

impl DiskOverride {
    fn fits(&self, domain: Option<&str>, vdev: Option<&str>) -> bool {
        self.domain.as_deref().is_none_or(|name| Some(name) == domain)
            && self.vdev.as_deref().is_none_or(|own| Some(own) == vdev)
    }
}

/// What holds for one disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskSettings {
    /// How its pages are reached.
    pub mode: Mode,
    /// The host's page cache.
    pub cache: CacheMode,
    /// When its bytes are copied first.
    pub bounce: Bounce,
    /// Bytes of a sector, where not the medium's.
    pub sector_size: Option<u32>,
    /// Queues it is offered.
    pub max_queues: u32,
    /// Order of the largest ring it is offered.
    pub ring_page_order: u32,
    /// Segments of an indirect request it is offered.
    pub indirect_segments: u16,
    /// Pages that each of its rings keeps.
    pub persistent_pages: u16,
    /// When one that was not used is let go.
    pub persistent_seconds: u16,
}

impl DiskSettings {
    /// As the backend takes them.
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

impl super::Config {
    /// What holds for a disk: the defaults, and the exceptions that fit it, in the file's order.
    pub fn disk(&self, domain: Option<&str>, vdev: Option<&str>) -> DiskSettings {
        let disks = &self.disks;
        let mut settings = DiskSettings {
            mode: disks.mode,
            cache: disks.cache,
            bounce: disks.bounce,
            sector_size: disks.sector_size,
            max_queues: disks.max_queues,
            ring_page_order: disks.ring_page_order,
            indirect_segments: disks.indirect_segments,
            persistent_pages: disks.persistent_pages,
            persistent_seconds: disks.persistent_seconds,
        };
        for other in self.disk.iter().filter(|other| other.fits(domain, vdev)) {
            let s = &mut settings;
            s.mode = other.mode.unwrap_or(s.mode);
            s.cache = other.cache.unwrap_or(s.cache);
            s.bounce = other.bounce.unwrap_or(s.bounce);
            s.sector_size = other.sector_size.unwrap_or(s.sector_size);
            s.max_queues = other.max_queues.unwrap_or(s.max_queues);
            s.ring_page_order = other.ring_page_order.unwrap_or(s.ring_page_order);
            s.indirect_segments = other.indirect_segments.unwrap_or(s.indirect_segments);
            s.persistent_pages = other.persistent_pages.unwrap_or(s.persistent_pages);
            s.persistent_seconds = other.persistent_seconds.unwrap_or(s.persistent_seconds);
        }
        settings
    }
}

/// 0 is the medium's own.
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

/// Each of which names something.
pub(super) fn overrides<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<DiskOverride>, D::Error> {
    let list = Vec::<DiskOverride>::deserialize(from)?;
    if list.len() > OVERRIDES_MAX {
        let why = format!("{} exceptions, at most {OVERRIDES_MAX} are read", list.len());
        return Err(Error::custom(why));
    }
    match list.iter().position(|other| other.domain.is_none() && other.vdev.is_none()) {
        Some(place) => Err(Error::custom(format!(
            "exception {} names neither a `domain` nor a `vdev`; what holds for all disks belongs in \
             [disks]",
            place + 1
        ))),
        None => Ok(list),
    }
}

/// Which options of `[disks]` differ.
pub(super) fn differs(name: &str, old: &Disks, new: &Disks) -> bool {
    match name {
        "disks.serve" => old.serve != new.serve,
        "disks.paths" => old.paths != new.paths,
        "disks.nbd" => old.nbd != new.nbd,
        "disks.mode" => old.mode != new.mode,
        "disks.cache" => old.cache != new.cache,
        "disks.bounce" => old.bounce != new.bounce,
        "disks.sector-size" => old.sector_size != new.sector_size,
        "disks.max-queues" => old.max_queues != new.max_queues,
        "disks.ring-page-order" => old.ring_page_order != new.ring_page_order,
        "disks.indirect-segments" => old.indirect_segments != new.indirect_segments,
        "disks.persistent-pages" => old.persistent_pages != new.persistent_pages,
        "disks.persistent-seconds" => old.persistent_seconds != new.persistent_seconds,
        _ => false,
    }
}

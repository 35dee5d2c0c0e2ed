//! What a toolstack writes about a disk, and where that says its storage is.
//!
//! libxl writes nothing about the format of a disk that a backend like this one serves, and takes it for
//! raw. The prefix `raw:` of `target=` says that a file is raw although it begins like an image of another
//! format.
//!
//! libxl writes `params` (what stands behind `target=`, or the path), `script`, `mode` (`w` or `r`),
//! `discard-enable`, `direct-io-safe`, `dev` (`xvda`), `device-type`. Then it runs the script. Ours leaves
//! `params` to the daemon. Xen's own `block` script, and others of its kind, make a device of what
//! `params` says, and write its number (`physical-device`, hexadecimal) and its path
//! (`physical-device-path`).

use std::path::PathBuf;

use ringfence_nbd::client::NbdAddress;
use ringfence_wire::blkif::keys;
use ringfence_wire::decimal;
use ringfence_wire::xenbus::{self, DeviceId, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

/// The name of our script.
const OUR_SCRIPT: &str = "block-ringfence";

/// Prefix of `target=` for a file that is raw although it begins like an image of another format.
const RAW: &str = "raw:";

/// What libxl itself writes.
const SCRIPT: &str = "script";
const DEV: &str = "dev";
const PHYSICAL_DEVICE: &str = "physical-device";
const PHYSICAL_DEVICE_PATH: &str = "physical-device-path";
const DIRECT_IO_SAFE: &str = "direct-io-safe";

/// Where the bytes of a disk are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Source {
    /// A file or a block device.
    Path(PathBuf),
    /// A file whose content is raw, whatever it begins with.
    Raw(PathBuf),
    /// An NBD server's disk.
    Nbd(NbdAddress),
}

/// Why there is no telling where a disk is.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum NoSource {
    /// A script is still to say.
    #[error("its script has not said yet which device it is (physical-device-path)")]
    Script,
    /// A drive without a medium.
    #[error("it has no medium")]
    NoMedium,
    /// Not a path, not an address.
    #[error("`{0}` is neither an absolute path nor the address of an NBD server")]
    Unknown(String),
    /// An address that cannot be read.
    #[error("{0}")]
    Address(String),
}

/// What the toolstack wrote.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct VbdKeys {
    pub(super) source: Result<Source, NoSource>,
    /// What the guest's configuration calls it.
    pub(super) vdev: Option<String>,
    pub(super) domain_name: Option<String>,
    pub(super) read_only: bool,
    pub(super) discard: bool,
    pub(super) direct_io_safe: bool,
    /// The size of a sector that the guest was told, by a daemon before this one. It holds.
    pub(super) told_sector: Option<u32>,
}

impl VbdKeys {
    /// Reads them, from the backend's directory alone: the guest can write the other one.
    pub(super) fn read(store: &mut StoreClient, device: &DeviceId) -> Result<VbdKeys, StoreError> {
        let back = device.backend_path();
        let mut read = |key: &str| store.read_opt(&format!("{back}/{key}"));
        let state = read(xenbus::STATE)?;
        let connected = state.and_then(|text| XenbusState::parse(&text).ok());
        let told = read(keys::SECTOR_SIZE)?.and_then(|text| decimal::parse_u32(&text).ok());
        let [params, script, physical, path, vdev] =
            [keys::PARAMS, SCRIPT, PHYSICAL_DEVICE, PHYSICAL_DEVICE_PATH, DEV].map(&mut read);
        let written =
            Written { params: params?, script: script?, physical: physical?, path: path? };
        let mode = read(keys::MODE)?;
        let discard = read(keys::DISCARD_ENABLE)?;
        let direct_io_safe = read(DIRECT_IO_SAFE)?;
        let name = store.read_opt(&format!("/local/domain/{}/name", device.frontend));
        // A driver domain may not be allowed to know.
        let domain_name = match name {
            Ok(name) => name.and_then(text),
            Err(StoreError::Refused { .. }) => None,
            Err(error) => return Err(error),
        };
        Ok(VbdKeys {
            source: written.source(),
            vdev: vdev?.and_then(text),
            domain_name,
            // Whatever does not say that it may write, may not.
            read_only: mode.is_some_and(|mode| mode.first() != Some(&b'w')),
            discard: discard.is_none_or(|flag| flag != b"0"),
            direct_io_safe: direct_io_safe.is_some_and(|flag| flag == b"1"),
            told_sector: told.filter(|_| connected == Some(XenbusState::Connected)),
        })
    }
}

fn text(bytes: Vec<u8>) -> Option<String> {
    String::from_utf8(bytes).ok().filter(|text| !text.is_empty())
}

/// The keys that say where.
#[derive(Default)]
struct Written {
    params: Option<Vec<u8>>,
    script: Option<Vec<u8>>,
    physical: Option<Vec<u8>>,
    path: Option<Vec<u8>>,
}

impl Written {
    fn source(self) -> Result<Source, NoSource> {
        let script = self.script.and_then(text);
        let others = script.is_some_and(|script| script.rsplit('/').next() != Some(OUR_SCRIPT));
        if others {
            let path = self.path.and_then(text).map(PathBuf::from);
            let path = path.or_else(|| self.physical.and_then(text).and_then(|n| by_number(&n)));
            return path.map(Source::Path).ok_or(NoSource::Script);
        }
        let params = self.params.and_then(text).ok_or(NoSource::NoMedium)?;
        if let Some(path) = params.strip_prefix(RAW).filter(|path| path.starts_with('/')) {
            return Ok(Source::Raw(path.into()));
        }
        if params.starts_with('/') {
            return Ok(Source::Path(params.into()));
        }
        if params.starts_with("nbd") && params.contains("://") {
            let address = params.parse::<NbdAddress>();
            return address.map(Source::Nbd).map_err(|error| NoSource::Address(error.to_string()));
        }
        Err(NoSource::Unknown(params.chars().take(256).collect()))
    }
}

/// The device with this number, `MAJOR:MINOR` in hexadecimal.
fn by_number(text: &str) -> Option<PathBuf> {
    let (major, minor) = text.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    Some(PathBuf::from(format!("/dev/block/{}:{}", number(major)?, number(minor)?)))
}

impl core::fmt::Display for Source {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Source::Path(path) | Source::Raw(path) => path.display().fmt(f),
            Source::Nbd(address) => address.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(params: &str, script: &str, physical: &str, path: &str) -> Result<String, NoSource> {
        let key = |text: &str| Some(text.as_bytes().to_vec()).filter(|text| !text.is_empty());
        let written = Written {
            params: key(params),
            script: key(script),
            physical: key(physical),
            path: key(path),
        };
        written.source().map(|source| source.to_string())
    }

    #[test]
    fn our_script_leaves_params_to_the_daemon() {
        for script in ["", "/etc/xen/scripts/block-ringfence", "block-ringfence"] {
            let of = |params| source(params, script, "fd:1", "/dev/other");
            assert_eq!(of("/srv/a disk.img").unwrap(), "/srv/a disk.img");
            assert_eq!(of("nbd://[::1]/x").unwrap(), "nbd://[::1]:10809/x");
            assert_eq!(of("nbd+unix:///x?socket=/run/s").unwrap(), "nbd+unix:///x?socket=/run/s");
            assert_eq!(of("raw:/srv/b.img").unwrap(), "/srv/b.img");
            assert_eq!(of("raw:b.img"), Err(NoSource::Unknown("raw:b.img".to_owned())));
            assert_eq!(of(""), Err(NoSource::NoMedium));
            assert_eq!(of("a.img"), Err(NoSource::Unknown("a.img".to_owned())));
            assert!(matches!(of("nbd://"), Err(NoSource::Address(why)) if why.contains("host")));
        }
    }

    #[test]
    fn other_scripts_say_which_device_they_made() {
        let of = |physical, path| source("iqn.2001:x", "/etc/xen/scripts/block", physical, path);
        assert_eq!(of("", ""), Err(NoSource::Script));
        assert_eq!(of("fd:1a", "").unwrap(), "/dev/block/253:26");
        assert_eq!(of("fd:1a", "/dev/dm-26").unwrap(), "/dev/dm-26");
        assert_eq!(of("no number", ""), Err(NoSource::Script));
    }
}

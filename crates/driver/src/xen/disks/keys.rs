//! Keys of a disk that the toolstack writes, and the storage that they name.
//!
//! libxl writes `params` (the text behind `target=`, or the path), `script`, `mode` (`w` or `r`),
//! `discard-enable`, `direct-io-safe`, `dev` (`xvda`) and `device-type`. Then it runs the script.
//!
//! * The script `block-ringfence` leaves `params` to the daemon.
//! * Xen's own `block` script and others of its kind make a block device from `params`. They write its
//!   number (`physical-device`, hexadecimal) and its path (`physical-device-path`).
//!
//! libxl treats a disk of a backend like this one as raw and writes no format: it refuses `format=qcow2` of such a disk.
//! The format is a prefix of `target=` instead. `raw:` says that a file is raw although it begins like an image of
//! another format; `qcow2:` that it is an image, and `qcow2,backing=any:` that its backing files may lie in other folders.

use std::path::{Path, PathBuf};

use ringfence_nbd::client::NbdAddress;
use ringfence_wire::blkif::keys;
use ringfence_wire::decimal;
use ringfence_wire::xenbus::{self, DeviceId, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use crate::xen::vif_keys::is_script;

/// File name of Ringfence's own script.
const OUR_SCRIPT: &str = "block-ringfence";

/// Prefix of `target=` for a file that is raw although it begins like an image of another format.
const RAW: &str = "raw:";

/// Prefixes of `target=` for an image, and if its backing files may lie in other folders than its own.
const IMAGE: [(&str, bool); 2] = [("qcow2:", false), ("qcow2,backing=any:", true)];

// Keys that libxl and its scripts write, and that `blkif.h` does not name.
const SCRIPT: &str = "script";
const DEV: &str = "dev";
const PHYSICAL_DEVICE: &str = "physical-device";
const PHYSICAL_DEVICE_PATH: &str = "physical-device-path";
const DIRECT_IO_SAFE: &str = "direct-io-safe";

/// Location of a disk's bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Source {
    Path(PathBuf),
    /// Raw file, although it may begin like an image of another format.
    Raw(PathBuf),
    /// qcow2 image.
    Image {
        path: PathBuf,
        /// Its backing files may lie outside its folder.
        any_folder: bool,
    },
    Nbd(NbdAddress),
}

/// Reasons for which the location of a disk is unknown.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum NoSource {
    /// Script has not written the device yet.
    #[error("its script has not said yet which device it is (physical-device-path)")]
    Script,
    #[error("it has no medium")]
    NoMedium,
    /// Neither a path nor the address of a server.
    #[error("`{0}` is neither an absolute path nor the address of an NBD server")]
    Unknown(String),
    #[error("{0}")]
    Address(String),
}

/// Keys of a disk in the backend's directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct VbdKeys {
    pub(super) source: Result<Source, NoSource>,
    /// The source is in `params`, and not in the keys of another script.
    pub(super) is_in_params: bool,
    /// Name of the disk in the guest's configuration.
    pub(super) vdev: Option<String>,
    pub(super) domain_name: Option<String>,
    pub(super) read_only: bool,
    pub(super) discard: bool,
    pub(super) direct_io_safe: bool,
    /// Sector size that an earlier daemon told the guest. It must not change.
    pub(super) fixed_sector_size: Option<u32>,
}

impl VbdKeys {
    /// Reads the keys. Uses only the backend's directory, because the guest can write to the other one.
    pub(super) fn read(store: &mut StoreClient, device: &DeviceId) -> Result<VbdKeys, StoreError> {
        let back = device.backend_path();
        let mut read = |key: &str| store.read_opt(&format!("{back}/{key}"));
        let state = read(xenbus::STATE)?;
        let connected = state.and_then(|text| XenbusState::parse(&text).ok());
        let sector_size = read(keys::SECTOR_SIZE)?.and_then(|text| decimal::parse_u32(&text).ok());
        let [params, script, physical, path, vdev] =
            [keys::PARAMS, SCRIPT, PHYSICAL_DEVICE, PHYSICAL_DEVICE_PATH, DEV].map(&mut read);
        let written =
            Written { params: params?, script: script?, physical: physical?, path: path? };
        let mode = read(keys::MODE)?;
        let discard = read(keys::DISCARD_ENABLE)?;
        let direct_io_safe = read(DIRECT_IO_SAFE)?;
        let name = store.read_opt(&format!("/local/domain/{}/name", device.frontend));
        // A driver domain may have no right to read the name.
        let domain_name = match name {
            Ok(name) => name.and_then(text),
            Err(StoreError::Refused { .. }) => None,
            Err(error) => return Err(error),
        };
        Ok(VbdKeys {
            is_in_params: !written.has_other_script(),
            source: written.source(),
            vdev: vdev?.and_then(text),
            domain_name,
            // A mode other than `w` makes the disk read-only.
            read_only: mode.is_some_and(|mode| mode.first() != Some(&b'w')),
            discard: discard.is_none_or(|flag| flag != b"0"),
            direct_io_safe: direct_io_safe.is_some_and(|flag| flag == b"1"),
            fixed_sector_size: sector_size.filter(|_| connected == Some(XenbusState::Connected)),
        })
    }
}

fn text(bytes: Vec<u8>) -> Option<String> {
    String::from_utf8(bytes).ok().filter(|text| !text.is_empty())
}

/// Keys that locate the storage.
#[derive(Default)]
struct Written {
    params: Option<Vec<u8>>,
    script: Option<Vec<u8>>,
    physical: Option<Vec<u8>>,
    path: Option<Vec<u8>>,
}

impl Written {
    fn has_other_script(&self) -> bool {
        let script = self.script.clone().and_then(text);
        script.is_some_and(|script| !is_script(&script, OUR_SCRIPT))
    }

    fn source(self) -> Result<Source, NoSource> {
        if self.has_other_script() {
            let path = self.path.and_then(text).map(PathBuf::from);
            let path =
                path.or_else(|| self.physical.and_then(text).and_then(|n| device_by_number(&n)));
            return path.map(Source::Path).ok_or(NoSource::Script);
        }
        let params = self.params.and_then(text).ok_or(NoSource::NoMedium)?;
        if let Some(path) = params.strip_prefix(RAW).filter(|path| path.starts_with('/')) {
            return Ok(Source::Raw(path.into()));
        }
        for (prefix, any_folder) in IMAGE {
            if let Some(path) = params.strip_prefix(prefix).filter(|path| path.starts_with('/')) {
                return Ok(Source::Image { path: path.into(), any_folder });
            }
        }
        if params.starts_with('/') {
            return Ok(Source::Path(params.into()));
        }
        if NbdAddress::is_meant(&params) {
            let address = params.parse::<NbdAddress>();
            return address.map(Source::Nbd).map_err(|error| NoSource::Address(error.to_string()));
        }
        Err(NoSource::Unknown(params.chars().take(256).collect()))
    }
}

/// Returns the path of the device with the number `MAJOR:MINOR` in hexadecimal.
fn device_by_number(text: &str) -> Option<PathBuf> {
    let (major, minor) = text.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    Some(PathBuf::from(format!("/dev/block/{}:{}", number(major)?, number(minor)?)))
}

impl Source {
    /// Returns the path of a file or device.
    pub(super) fn path(&self) -> Option<&Path> {
        match self {
            Source::Path(path) | Source::Raw(path) | Source::Image { path, .. } => Some(path),
            Source::Nbd(_) => None,
        }
    }

    /// Returns the format of a file or device.
    pub(super) fn format(&self) -> Option<&'static str> {
        match self {
            Source::Path(_) | Source::Raw(_) => Some("raw"),
            Source::Image { .. } => Some("qcow2"),
            Source::Nbd(_) => None,
        }
    }

    /// Returns the text of an image in `params`. `None` for another source, and for a path that is no UTF-8.
    pub(super) fn image_params(&self) -> Option<String> {
        let Source::Image { path, any_folder } = self else { return None };
        let (prefix, _) = IMAGE.iter().find(|(_, any)| any == any_folder)?;
        Some(format!("{prefix}{}", path.to_str()?))
    }
}

impl core::fmt::Display for Source {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Source::Path(path) | Source::Raw(path) | Source::Image { path, .. } => {
                path.display().fmt(f)
            }
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
    fn params_behind_own_script_are_parsed_as_path_or_address() {
        for script in ["", "/etc/xen/scripts/block-ringfence", "block-ringfence"] {
            let of = |params| source(params, script, "fd:1", "/dev/other");
            assert_eq!(of("/srv/a disk.img").unwrap(), "/srv/a disk.img");
            assert_eq!(of("nbd://[::1]/x").unwrap(), "nbd://[::1]:10809/x");
            assert_eq!(of("nbd+unix:///x?socket=/run/s").unwrap(), "nbd+unix:///x?socket=/run/s");
            assert_eq!(of("raw:/srv/b.img").unwrap(), "/srv/b.img");
            assert_eq!(of("raw:b.img"), Err(NoSource::Unknown("raw:b.img".to_owned())));
            assert_eq!(of("qcow2:/srv/b.qcow2").unwrap(), "/srv/b.qcow2");
            assert_eq!(of("qcow2,backing=any:/srv/b.qcow2").unwrap(), "/srv/b.qcow2");
            assert_eq!(of("qcow2:b"), Err(NoSource::Unknown("qcow2:b".to_owned())));
            assert_eq!(of(""), Err(NoSource::NoMedium));
            assert_eq!(of("a.img"), Err(NoSource::Unknown("a.img".to_owned())));
            for (params, expected) in [
                ("nbd://", "host"),
                ("NBD://x", "small letters"),
                ("nbd:unix:/run/s", "nbd+unix:///?socket=/run/s"),
                ("nbd+vsock://2:1/x", "vsock"),
                ("nbd://x/?export=y", "export is not known"),
            ] {
                let refused = of(params).unwrap_err();
                assert!(
                    matches!(&refused, NoSource::Address(why) if why.contains(expected)),
                    "{refused:?}"
                );
            }
        }
    }

    #[test]
    fn params_of_image_are_parsed_to_the_same_image() {
        for any_folder in [false, true] {
            let image = Source::Image { path: "/srv/b.qcow2".into(), any_folder };
            let written = Written {
                params: image.image_params().map(String::into_bytes),
                ..Written::default()
            };
            assert_eq!(written.source(), Ok(image));
        }
        assert_eq!(Source::Path("/srv/a".into()).image_params(), None);
    }

    #[test]
    fn device_keys_of_other_script_locate_the_storage() {
        let of = |physical, path| source("iqn.2001:x", "/etc/xen/scripts/block", physical, path);
        assert_eq!(of("", ""), Err(NoSource::Script));
        assert_eq!(of("fd:1a", "").unwrap(), "/dev/block/253:26");
        assert_eq!(of("fd:1a", "/dev/dm-26").unwrap(), "/dev/dm-26");
        assert_eq!(of("no number", ""), Err(NoSource::Script));
    }
}

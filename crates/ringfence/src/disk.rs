//! Disks of a guest, as its user asks for them: `--disk PATH[,ro][,mode=…][,cache=…]…`.

use std::path::PathBuf;
use std::str::FromStr;

use ringfence_block::blkback::Mode;
use ringfence_block::storage::file::FileOptions;

/// Disks of one guest: as many as there are sockets in the frontend's orders.
pub const DISKS_MAX: usize = 8;

/// A disk as its user asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSpec {
    /// A file or a block device.
    pub path: PathBuf,
    /// How its pages are shared with the driver domain.
    pub mode: Mode,
    /// How the file is used.
    pub options: FileOptions,
}

impl FromStr for DiskSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<DiskSpec, String> {
        let mut parts = text.split(',');
        let path = parts.next().filter(|path| !path.is_empty()).ok_or("the path is missing")?;
        let mut spec =
            DiskSpec { path: path.into(), mode: Mode::Persistent, options: FileOptions::default() };
        for part in parts {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let options = &mut spec.options;
            let error = |error: &dyn std::fmt::Display| error.to_string();
            match (name, value) {
                ("ro", "") => options.read_only = true,
                ("discard", "") => options.discard = true,
                ("mode", _) => spec.mode = value.parse().map_err(|e| error(&e))?,
                ("cache", _) => options.cache = value.parse().map_err(|e| error(&e))?,
                ("bounce", _) => options.bounce = value.parse().map_err(|e| error(&e))?,
                ("sector", "512") => options.sector_size = Some(512),
                ("sector", "4096") => options.sector_size = Some(4096),
                _ => {
                    return Err(format!(
                        "`{part}` is no option of a disk: there are ro, discard, mode=, cache=, \
                         bounce= and sector=512|4096 (a path cannot have a comma)"
                    ));
                }
            }
        }
        Ok(spec)
    }
}

/// The variable in which a command finds the socket of its disk `number`.
pub(crate) fn variable(number: usize) -> String {
    format!("RINGFENCE_DISK{number}")
}

#[cfg(test)]
mod tests {
    use ringfence_block::storage::file::{Bounce, CacheMode};

    use super::*;

    #[test]
    fn a_disk_is_a_path_and_options() {
        let spec: DiskSpec = "/a=b.img".parse().unwrap();
        assert_eq!(spec.path, PathBuf::from("/a=b.img"));
        assert_eq!((spec.mode, spec.options), (Mode::Persistent, FileOptions::default()));
        let text = "x,ro,mode=map,cache=writethrough,bounce=always,sector=4096,discard";
        let spec: DiskSpec = text.parse().unwrap();
        assert_eq!(spec.mode, Mode::Map);
        let wanted = FileOptions {
            read_only: true,
            cache: CacheMode::WriteThrough,
            bounce: Bounce::Always,
            sector_size: Some(4096),
            discard: true,
            ..FileOptions::default()
        };
        assert_eq!(spec.options, wanted);
    }

    #[test]
    fn what_is_no_disk_is_refused_with_a_reason() {
        for (text, why) in [
            ("", "path"),
            (",ro", "path"),
            ("x,rw", "`rw` is no option"),
            ("x,ro=1", "`ro=1` is no option"),
            ("x,sector=1024", "sector"),
            ("x,cache=direct", "writethrough"),
            ("x,mode=window", "persistent"),
        ] {
            let error = text.parse::<DiskSpec>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}

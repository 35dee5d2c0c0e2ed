//! Options of a file that serves as a disk.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Use of the host's page cache, and durability of a completed write. Names and meanings are QEMU's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum CacheMode {
    /// `none`: O_DIRECT if the file supports it; durable after a flush.
    #[default]
    None,
    /// `writeback`: the host's page cache; durable after a flush.
    WriteBack,
    /// `writethrough`: the host's page cache for reads; each write is durable when it completes.
    WriteThrough,
    /// `directsync`: O_DIRECT if the file supports it; each write is durable when it completes.
    DirectSync,
    /// `unsafe`: the host's page cache, and flushes are ignored. For data that may be lost.
    Unsafe,
}

impl CacheMode {
    /// Returns `true` if the mode uses O_DIRECT.
    pub fn is_direct(self) -> bool {
        matches!(self, CacheMode::None | CacheMode::DirectSync)
    }

    /// Returns `true` if each write is durable when it completes.
    pub fn is_synchronous(self) -> bool {
        matches!(self, CacheMode::WriteThrough | CacheMode::DirectSync)
    }
}

/// Use of private bounce buffers for the data of requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Bounce {
    /// `auto`: if the storage computes checksums (btrfs, ZFS, bcachefs, devices that require stable pages)
    /// and O_DIRECT is used; and where the alignment requires it.
    #[default]
    Auto,
    /// `always`: for all requests.
    Always,
    /// `never`: only where the alignment requires it.
    Never,
}

/// Engine that executes the I/O.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Engine {
    /// `auto`: io_uring, or threads where the kernel refuses io_uring or no ring is left.
    #[default]
    Auto,
    /// `io_uring`; opening a queue fails where it is refused.
    IoUring,
    /// `threads`: a pool of threads that block.
    Threads,
}

/// Options of a file that serves as a disk.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct FileOptions {
    pub read_only: bool,
    /// Use of the page cache.
    pub cache: CacheMode,
    pub bounce: Bounce,
    /// Engine that executes the I/O.
    pub engine: Engine,
    /// Sector size in bytes: 512 or 4096. `None` selects that of the device, or 512 for a file.
    pub sector_size: Option<u32>,
    /// Discards reach the file, and zeros free its storage. Off by default: discarded space must be allocated again,
    /// which fails if the file system is full by then. Zeros free the storage of a file that has holes already
    /// even so.
    pub discard: bool,
    /// The content is raw, whatever its signature.
    pub raw: bool,
    /// A guest uses the file already, and only the process that serves it is new: content and size are
    /// accepted without checks.
    pub in_use: bool,
}

/// Value that an option does not have.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{option}={value} is not known: use one of {known}")]
pub struct UnknownOption {
    option: &'static str,
    value: String,
    known: String,
}

/// Implements conversions between the values of an option and their names.
macro_rules! named {
    ($type:ty, $option:literal, $($name:literal => $value:path),+ $(,)?) => {
        impl $type {
            /// Names of all values, in the order of the manual.
            pub const NAMES: &[&str] = &[$($name),+];
        }

        impl FromStr for $type {
            type Err = UnknownOption;

            fn from_str(value: &str) -> Result<Self, UnknownOption> {
                match value {
                    $($name => Ok($value),)+
                    _ => Err(UnknownOption {
                        option: $option,
                        value: value.to_owned(),
                        known: Self::NAMES.join(", "),
                    }),
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($value => $name),+ })
            }
        }
    };
}

named!(CacheMode, "cache",
    "none" => CacheMode::None,
    "writeback" => CacheMode::WriteBack,
    "writethrough" => CacheMode::WriteThrough,
    "directsync" => CacheMode::DirectSync,
    "unsafe" => CacheMode::Unsafe,
);
named!(Bounce, "bounce",
    "auto" => Bounce::Auto,
    "always" => Bounce::Always,
    "never" => Bounce::Never,
);
named!(Engine, "engine",
    "auto" => Engine::Auto,
    "io_uring" => Engine::IoUring,
    "threads" => Engine::Threads,
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_name_parses_to_a_value_with_that_name() {
        for name in CacheMode::NAMES {
            assert_eq!(name.parse::<CacheMode>().unwrap().to_string(), *name);
        }
        for name in Bounce::NAMES {
            assert_eq!(name.parse::<Bounce>().unwrap().to_string(), *name);
        }
        for name in Engine::NAMES {
            assert_eq!(name.parse::<Engine>().unwrap().to_string(), *name);
        }
        assert_eq!(
            "direct".parse::<CacheMode>().unwrap_err().to_string(),
            "cache=direct is not known: use one of none, writeback, writethrough, directsync, unsafe"
        );
    }
}

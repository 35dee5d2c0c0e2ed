//! How a file is to be used.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Whether the host's page cache stands between the guest and the file, and what a write that is
/// done means. The names and meanings are QEMU's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum CacheMode {
    /// `none`: O_DIRECT where the file can; durable after a flush.
    #[default]
    None,
    /// `writeback`: the host's page cache; durable after a flush.
    WriteBack,
    /// `writethrough`: the host's page cache for reads; each write is durable when it is done.
    WriteThrough,
    /// `directsync`: O_DIRECT where the file can; each write is durable when it is done.
    DirectSync,
    /// `unsafe`: the host's page cache, and flushes are ignored. For what may be lost.
    Unsafe,
}

impl CacheMode {
    /// O_DIRECT is wanted.
    pub fn is_direct(self) -> bool {
        matches!(self, CacheMode::None | CacheMode::DirectSync)
    }

    /// Each write is durable when it is done.
    pub fn is_synchronous(self) -> bool {
        matches!(self, CacheMode::WriteThrough | CacheMode::DirectSync)
    }
}

/// When the bytes of a request go through private memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Bounce {
    /// `auto`: where the storage computes checksums (btrfs, ZFS, bcachefs, devices that ask for
    /// stable pages) and O_DIRECT is used; and where alignment asks for it.
    #[default]
    Auto,
    /// `always`.
    Always,
    /// `never`: only where alignment asks for it.
    Never,
}

/// What does the I/O.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Engine {
    /// `auto`: io_uring; threads where the kernel refuses it.
    #[default]
    Auto,
    /// `io_uring`, or nothing.
    IoUring,
    /// `threads` that block.
    Threads,
}

/// How a file is to be used.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct FileOptions {
    /// Nothing is written.
    pub read_only: bool,
    /// The page cache.
    pub cache: CacheMode,
    /// Bounce buffers.
    pub bounce: Bounce,
    /// What does the I/O.
    pub engine: Engine,
    /// 512 or 4096; `None`: that of the device, and 512 for a file.
    pub sector_size: Option<u32>,
    /// Discards are passed on, and zeros need not be allocated. Off by default: what was given up
    /// must be allocated again, and then the file system may be full.
    pub discard: bool,
    /// The content is raw, whatever it begins with.
    pub raw: bool,
    /// A guest uses the file already, and only the process that serves it is new: content and size are
    /// accepted as they are.
    pub in_use: bool,
}

/// A word that is none of the values of an option.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{option}={value} is not known: use one of {known}")]
pub struct UnknownOption {
    option: &'static str,
    value: String,
    known: String,
}

/// Names for the values of an option, both ways.
macro_rules! named {
    ($type:ty, $option:literal, $($name:literal => $value:path),+ $(,)?) => {
        impl $type {
            /// The names, in the order in which they are explained.
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
    fn every_name_is_read_as_what_is_written() {
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

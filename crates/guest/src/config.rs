//! Configuration of a guest, as the launcher sends it to init.

use std::path::PathBuf;

use ringfence_hostnet::interface::{InterfaceConfig, ResolverConfig, UplinkInterface};
use serde::{Deserialize, Serialize};

/// Configuration of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestConfig {
    pub host_name: String,
    /// Interface on the switch. Without it and without an uplink there is only loopback.
    pub interface: Option<InterfaceConfig>,
    /// Interface to the host's network.
    pub uplink: Option<UplinkInterface>,
    /// Names of guests on the switch.
    pub names: Option<NamesConfig>,
    /// Name servers for all other names.
    pub resolver: Option<ResolverConfig>,
    /// Numbers of the signals that the command has blocked.
    pub blocked_signals: Vec<i32>,
    /// Limit of open files of the command, at most three quarters of the hard limit of its launcher.
    pub open_files: Option<u64>,
    /// Environment variables added to those of the launcher.
    pub environment: Vec<(String, String)>,
    /// Environment variables removed: they name sockets that the guest does not see.
    pub removed_variables: Vec<String>,
    /// Files that the command sees.
    pub view: ViewConfig,
}

/// Configuration of names on a switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamesConfig {
    /// Name of the switch.
    pub switch: String,
    /// Name by which other guests find this one.
    pub own: Option<String>,
}

/// Changes of the host's file tree for a guest's command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ViewConfig {
    /// Directory in which the command finds the sockets of its disks.
    pub runtime_dir: PathBuf,
    /// All directories that a launcher of this user may use as its runtime directory.
    pub runtime_dirs: Vec<PathBuf>,
    /// Runtime directory of the user's session, if it is to be covered.
    pub session: Option<PathBuf>,
    /// Sockets of the guest's disks, at the launcher's paths.
    pub disks: Vec<PathBuf>,
    /// Keeps the host's sockets and the session's directory visible.
    pub share_runtime: bool,
    /// Set if the command has the rights of the host's root over files.
    pub is_host_root: bool,
    /// New root directory.
    pub root: Option<PathBuf>,
    /// Paths made read-only, with everything below.
    pub read_only: Vec<PathBuf>,
    /// Exceptions from `read_only`.
    pub writable: Vec<PathBuf>,
    /// Directories replaced by empty ones.
    pub empty: Vec<PathBuf>,
    /// Directories and files made invisible.
    pub hidden: Vec<PathBuf>,
    /// View of `--strict`. `read_only` then has the root directory.
    pub strict: Option<StrictView>,
}

/// Parts of a view under `--strict`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StrictView {
    /// Directories replaced by empty ones, as far as they exist.
    pub empty: Vec<PathBuf>,
    /// Paths that stay visible in these, as far as they exist, and `true` for those that are writable.
    pub shown: Vec<(PathBuf, bool)>,
}

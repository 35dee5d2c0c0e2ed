//! Configuration of a guest, as the launcher sends it to init.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use ringfence_hostnet::interface::{InterfaceConfig, ResolverConfig, UplinkInterface};
use serde::{Deserialize, Serialize};

/// Set-up of a guest: its name, interfaces and name service, and the limits, environment and files of its command.
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
    /// Numbers of the signals that the command ignores, besides those that init ignores.
    pub ignored_signals: Vec<i32>,
    /// Terminal of the command.
    pub terminal: TerminalKind,
    /// Limit of open files of the command, at most three quarters of the hard limit of its launcher.
    pub open_files: Option<u64>,
    /// Environment variables added to those of the launcher.
    pub environment: Vec<(String, String)>,
    /// Environment variables removed: they name sockets that the guest does not see.
    pub removed_variables: Vec<String>,
    /// Cgroups that the command sees.
    pub cgroups: CgroupConfig,
    /// Files that the command sees.
    pub view: ViewConfig,
}

/// Terminal of a guest's command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TerminalKind {
    /// The launcher has none.
    #[default]
    None,
    /// A new one, which replaces the caller's.
    Own {
        /// Set if the caller's is the controlling terminal of the launcher. Otherwise any terminal is replaced.
        controlling: bool,
    },
    /// The controlling terminal of the launcher.
    Shared,
}

/// Hierarchies of cgroups in the guest. All of them are read-only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupConfig {
    /// Mount points of hierarchies, each with the directory that takes the place of the hierarchy's root.
    pub shown: Vec<(PathBuf, PathBuf)>,
    /// Set if the guest's processes may make cgroup namespaces. By one of its own, a process can mount a hierarchy anew,
    /// and change its cgroup and those below as far as its user may.
    pub namespaces: bool,
}

/// Name service of a guest on a switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamesConfig {
    pub switch: String,
    /// Name by which other guests find this one.
    pub own: Option<String>,
}

/// Changes of the host's file tree for a guest's command. Paths are absolute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ViewConfig {
    /// Directory in which the command finds the sockets of its disks.
    pub runtime_dir: PathBuf,
    /// All directories that a launcher of this user may use as its runtime directory.
    pub runtime_dirs: Vec<PathBuf>,
    /// Runtime directory of the user's session, if it is to be covered.
    pub session: Option<PathBuf>,
    /// Number of the guest's disks.
    pub disks: usize,
    /// Keeps the host's sockets, shared memory, message queues and the session's directory visible.
    pub share_runtime: bool,
    /// User id of the launcher.
    pub user: u32,
    /// The user's home directory.
    pub home: Option<PathBuf>,
    /// Directories of the host in which other processes have bound sockets.
    pub socket_directories: Vec<HostPath>,
    /// Set if the command has the rights of the host's root over files.
    pub is_host_root: bool,
    /// New root directory.
    pub root: Option<PathBuf>,
    /// Paths made read-only, with everything below.
    pub read_only: Vec<PathBuf>,
    /// Exceptions from `read_only`.
    pub writable: Vec<PathBuf>,
    /// Directories replaced by empty ones, with their modes. The working directory and the paths of `read_only` and
    /// `writable` within stay visible.
    pub private: Vec<(PathBuf, u32)>,
    /// Directories replaced by empty ones.
    pub empty: Vec<PathBuf>,
    /// Directories and files made invisible.
    pub hidden: Vec<PathBuf>,
    /// Devices of a `/dev` of the guest's own. `None`: the host's `/dev`.
    pub devices: Option<DeviceConfig>,
}

/// Devices of a guest beside those that every guest has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceConfig {
    /// Device nodes, and directories with device nodes.
    pub given: Vec<PathBuf>,
    /// Terminal of the launcher's standard streams. The command finds it as `/dev/console`.
    pub terminal: Option<PathBuf>,
    /// Nodes of which `Start` names those that the command sees.
    pub late: Vec<PathBuf>,
}

/// Path of any bytes, which the messages between launcher and init carry as text where it is text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "PathText", into = "PathText")]
pub struct HostPath(pub PathBuf);

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum PathText {
    Text(String),
    Bytes(Vec<u8>),
}

impl From<PathText> for HostPath {
    fn from(text: PathText) -> HostPath {
        let bytes = match text {
            PathText::Text(text) => text.into_bytes(),
            PathText::Bytes(bytes) => bytes,
        };
        HostPath(OsString::from_vec(bytes).into())
    }
}

impl From<HostPath> for PathText {
    fn from(path: HostPath) -> PathText {
        let bytes = path.0.into_os_string().into_vec();
        String::from_utf8(bytes)
            .map_or_else(|error| PathText::Bytes(error.into_bytes()), PathText::Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_path_of_any_bytes_passes_through_a_message() {
        for bytes in [&b"/tmp/a"[..], b"/tmp/\xff\n"] {
            let path = HostPath(OsString::from_vec(bytes.to_vec()).into());
            let text = PathText::from(path.clone());
            assert_eq!(matches!(text, PathText::Text(_)), bytes.is_ascii());
            assert_eq!(HostPath::from(text), path);
        }
    }
}

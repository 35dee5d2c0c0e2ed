//! Register of the host interfaces that daemons created.
//!
//! A TAP interface outlives its daemon, and the next daemon opens it again if its guest still exists. No
//! daemon removes the interface of a guest that was destroyed while none ran. The register is for these:
//! one file for each interface, which contains the kernel's index of it. A daemon that starts removes
//! registered interfaces that are no longer needed. An interface with another index was created by
//! another program, and stays.

use std::io;
use std::path::{Path, PathBuf};

use ringfence_platform::DomId;
use ringfence_sys::tap::Tap;
use ringfence_wire::decimal;
use ringfence_wire::xenbus::{DeviceId, DeviceKind, STATE};
use ringfence_xenstore::{StoreAccess, StoreClient};
use rustix::fs::Mode;

use super::config::{Attach, Network};
use ringfence_hostnet::netlink::Netlink;

/// Register, in a directory that only the daemon's user can enter.
#[derive(Debug)]
pub(super) struct MadeInterfaces {
    directory: PathBuf,
}

impl MadeInterfaces {
    /// Opens the directory `path`. Creates it if it does not exist.
    pub(super) fn open(path: &Path) -> io::Result<MadeInterfaces> {
        match rustix::fs::mkdir(path, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(MadeInterfaces { directory: path.to_owned() })
    }

    /// Registers an interface. A failure is logged, and the interface is served nevertheless.
    pub(super) fn register(&self, name: &str) {
        let noted = Netlink::open()
            .and_then(|netlink| netlink.index_of(name))
            .and_then(|index| self.write(name, index));
        if let Err(error) = noted {
            tracing::warn!(%name, %error, "it is not noted that this interface is the daemon's");
        }
    }

    /// Removes an interface from the register.
    pub(super) fn forget(&self, name: &str) {
        match std::fs::remove_file(self.directory.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%name, %error, "the note of its interface was not removed");
            }
            _ => {}
        }
    }

    /// Removes the registered interfaces that are no longer needed: those of guests that `own`, this domain,
    /// does not serve, and those that the switch replaces.
    pub(super) fn sweep(&self, network: &Network, own: DomId, store: &mut StoreClient) {
        let switched = network.attach == Attach::Switch;
        let wanted = |name: &str| match device_of(name, own) {
            Some(device) if !switched => {
                // If the store gives no answer, the interface stays.
                let state = store.read_opt(&format!("{}/{STATE}", device.backend_path()));
                state.map_or(true, |state| state.is_some())
            }
            _ => switched && network.host_interface.as_deref() == Some(name),
        };
        let index_of = |name: &str| Netlink::open()?.index_of(name);
        if let Err(error) = self.sweep_by(wanted, index_of, remove) {
            tracing::warn!(%error, "interfaces that nobody needs may be left");
        }
    }

    fn sweep_by(
        &self,
        mut wanted: impl FnMut(&str) -> bool,
        index_of: impl Fn(&str) -> io::Result<u32>,
        mut remove: impl FnMut(&str) -> io::Result<()>,
    ) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.directory)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if wanted(&name) {
                continue;
            }
            let noted: Option<u32> = std::fs::read_to_string(entry.path())
                .ok()
                .and_then(|text| text.trim().parse().ok());
            if noted.is_some() && index_of(&name).ok() == noted {
                if let Err(error) = remove(&name) {
                    tracing::warn!(%name, %error, "an interface that a daemon before made stays");
                    continue;
                }
                tracing::info!(%name, "removed: its guest went away while no daemon ran");
            }
            self.forget(&name);
        }
        Ok(())
    }

    fn write(&self, name: &str, index: u32) -> io::Result<()> {
        std::fs::write(self.directory.join(name), format!("{index}\n"))
    }
}

/// Returns the vif that an interface is named after.
fn device_of(name: &str, backend: DomId) -> Option<DeviceId> {
    let (frontend, handle) = name.strip_prefix(DeviceKind::Vif.as_str())?.split_once('.')?;
    let frontend = DomId(decimal::parse_u16(frontend.as_bytes()).ok()?);
    let handle = decimal::parse_u32(handle.as_bytes()).ok()?;
    Some(DeviceId { kind: DeviceKind::Vif, frontend, backend, handle })
}

/// Makes a TAP non-persistent, which removes it once no process has it open. Only one queue is opened; a
/// TAP with several queues goes when that queue is closed.
fn remove(name: &str) -> io::Result<()> {
    let taps = Tap::take_up_queues(name, 1).map_err(io::Error::other)?;
    taps.iter().try_for_each(|tap| tap.keep(false)).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sweep_removes_only_registered_interfaces_that_are_not_needed() {
        let outer = tempfile::tempdir().unwrap();
        let made = MadeInterfaces::open(&outer.path().join("interfaces")).unwrap();
        for (name, index) in [("vif1.0", 11), ("vif2.0", 12), ("vif3.0", 13), ("vif4.0", 14)] {
            made.write(name, index).unwrap();
        }
        std::fs::write(made.directory.join("vif5.0"), "no number").unwrap();
        // 1 is needed. 2 is left over. 3 was created again by another program. 4 is gone. 6 is not registered.
        let index_of = |name: &str| match name {
            "vif1.0" => Ok(11),
            "vif2.0" => Ok(12),
            "vif3.0" => Ok(33),
            "vif5.0" => Ok(15),
            "vif6.0" => Ok(16),
            _ => Err(io::ErrorKind::NotFound.into()),
        };
        let mut removed = Vec::new();
        let mut sweep = |works: bool| {
            made.sweep_by(
                |name| name == "vif1.0",
                index_of,
                |name| {
                    removed.push(name.to_owned());
                    if works { Ok(()) } else { Err(io::ErrorKind::ResourceBusy.into()) }
                },
            )
            .unwrap();
            let notes = std::fs::read_dir(&made.directory).unwrap();
            let mut notes: Vec<_> = notes.map(|entry| entry.unwrap().file_name()).collect();
            notes.sort();
            notes
        };
        assert_eq!(sweep(false), ["vif1.0", "vif2.0"], "somebody has it open: it is tried again");
        assert_eq!(sweep(true), ["vif1.0"]);
        assert_eq!(removed, ["vif2.0", "vif2.0"]);
    }
}

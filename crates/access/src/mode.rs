//! Access modes of a backend.

use core::fmt;

/// Access modes of a backend, for network interfaces and disks.
///
/// A kind of device has some of them ([`Mode::NETWORK`], [`Mode::DISK`]). A mode that the device does not
/// have acts as [`Mode::Map`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mode {
    /// The platform copies between the guest's pages and private memory; the backend maps nothing.
    Copy,
    /// The backend maps pages for each I/O and unmaps them after it.
    Map,
    /// Pages of a disk stay mapped if the frontend agreed to reuse them; otherwise as [`Mode::Map`].
    Persistent,
    /// Pages that an interface's frontend staged stay mapped and are looked up; the platform copies the
    /// others.
    Staging,
    /// Pages of the peer's grant window are looked up; the others are accessed as in [`Mode::Staging`], or
    /// in [`Mode::Persistent`] on a disk.
    Window,
}

impl Mode {
    /// Modes of a network interface.
    pub const NETWORK: [Mode; 4] = [Mode::Copy, Mode::Map, Mode::Staging, Mode::Window];

    /// Modes of a disk.
    pub const DISK: [Mode; 4] = [Mode::Map, Mode::Copy, Mode::Persistent, Mode::Window];

    /// Returns the mode of a network interface with this name.
    ///
    /// # Errors
    ///
    /// Returns [`UnknownMode`] if interfaces have no such mode.
    pub fn for_network(name: &str) -> Result<Mode, UnknownMode> {
        Mode::among(Mode::NETWORK, name)
    }

    /// Returns the mode of a disk with this name.
    ///
    /// # Errors
    ///
    /// Returns [`UnknownMode`] if disks have no such mode.
    pub fn for_disk(name: &str) -> Result<Mode, UnknownMode> {
        Mode::among(Mode::DISK, name)
    }

    fn among(modes: [Mode; 4], name: &str) -> Result<Mode, UnknownMode> {
        let found = modes.into_iter().find(|mode| mode.name() == name);
        found.ok_or_else(|| UnknownMode { name: name.chars().take(32).collect(), modes })
    }

    /// Returns the name on the command line and in the store.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Copy => "copy",
            Mode::Map => "map",
            Mode::Persistent => "persistent",
            Mode::Staging => "staging",
            Mode::Window => "window",
        }
    }

    /// Returns a description of one line for users.
    pub fn meaning(self) -> &'static str {
        match self {
            Mode::Copy => "the kernel copies each slot; nothing is mapped",
            Mode::Map => "each page is mapped for its I/O and unmapped after it",
            Mode::Persistent => "pages stay mapped between requests, if the guest reuses them",
            Mode::Staging => "pages that the guest staged stay mapped; what it did not is copied",
            Mode::Window => {
                "the guest issues and revokes pages of a window that is mapped whole, alone"
            }
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Word that is not the name of a mode of its kind of device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "`{name}` is no mode; there are {}, {}, {} and {}",
    modes[0], modes[1], modes[2], modes[3]
)]
pub struct UnknownMode {
    name: String,
    modes: [Mode; 4],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mode_of_other_device_kind_is_rejected_with_names_of_its_own() {
        assert_eq!(Mode::for_network("staging"), Ok(Mode::Staging));
        assert_eq!(Mode::for_disk("persistent"), Ok(Mode::Persistent));
        assert_eq!(
            Mode::for_network("persistent").unwrap_err().to_string(),
            "`persistent` is no mode; there are copy, map, staging and window",
        );
        assert_eq!(
            Mode::for_disk("staging").unwrap_err().to_string(),
            "`staging` is no mode; there are map, copy, persistent and window",
        );
    }
}

//! The configuration of `ringfence serve`: a file in TOML, read strictly.
//!
//! Every option has a default, so that an empty file, or none, is a configuration. What is not known,
//! out of range or contradictory is refused with the place in the file ([`ConfigError`]). The file
//! `dist/ringfence.toml` documents each option, and a test holds its values to be the defaults.
//!
//! A configuration is a value: it can be read again at any time and compared with the one in effect
//! ([`Config::changes_to`]), which tells what takes effect now, at the next connection, or at a restart.

mod changes;
mod disks;
mod error;
mod values;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use ringfence_access::Mode;
use ringfence_net::features::OffloadKeys;
use ringfence_switch::forwarding::Mac;
use serde::Deserialize;

pub use changes::{Changes, Effect};
pub use disks::{DiskOverride, DiskSettings, Disks};
pub use error::ConfigError;
pub use values::{Attach, Listen, LogLevel};

/// Where the file is, unless the command line says otherwise.
pub const PATH_DEFAULT: &str = "/etc/ringfence/ringfence.toml";

/// Octets that the file may have.
const FILE_MAX: u64 = 1 << 20;

/// Exceptions that the file may list.
const OVERRIDES_MAX: usize = 4096;

/// All of it.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// The daemon itself.
    pub serve: Serve,
    /// Guests' interfaces.
    pub network: Network,
    /// Guests' disks.
    pub disks: Disks,
    /// What is bounded.
    pub limits: Limits,
    /// What is exported.
    pub metrics: Metrics,
    /// Exceptions for some interfaces.
    #[serde(deserialize_with = "values::overrides")]
    pub device: Vec<Override>,
    /// Exceptions for some disks.
    #[serde(deserialize_with = "disks::overrides")]
    pub disk: Vec<DiskOverride>,
}

/// The daemon itself.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Serve {
    /// The socket that `ringfence status` asks.
    #[serde(deserialize_with = "values::absolute_path")]
    pub status_socket: PathBuf,
    /// What is logged.
    pub log_level: LogLevel,
}

impl Default for Serve {
    fn default() -> Self {
        let status_socket = PathBuf::from("/run/ringfence/serve.sock");
        Serve { status_socket, log_level: LogLevel::default() }
    }
}

/// Guests' interfaces.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Network {
    /// What they are attached to.
    pub attach: Attach,
    /// The bridge of those whose toolstack names none.
    #[serde(deserialize_with = "values::interface")]
    pub bridge: Option<String>,
    /// The host's leg on the switch.
    #[serde(deserialize_with = "values::interface")]
    pub host_interface: Option<String>,
    /// How pages are reached.
    #[serde(deserialize_with = "values::parsed")]
    pub mode: Mode,
    /// What is offered.
    #[serde(deserialize_with = "values::offloads")]
    pub offloads: OffloadKeys,
    /// Queues offered.
    #[serde(deserialize_with = "values::within::<1, { values::QUEUES_MAX }, _, _>")]
    pub max_queues: u32,
    /// Whether the source address is enforced.
    pub check_source: bool,
    /// Addresses behind one interface where it is not.
    #[serde(deserialize_with = "values::within::<1, { values::ADDRESSES_MAX }, _, _>")]
    pub addresses: u16,
    /// Whether multicast control is offered.
    pub multicast_control: bool,
    /// When a guest counts as stalled.
    #[serde(deserialize_with = "values::within::<1, { values::STALL_MAX }, _, _>")]
    pub stall_seconds: u16,
}

impl Default for Network {
    fn default() -> Self {
        Network {
            attach: Attach::Bridge,
            bridge: Some("xenbr0".to_owned()),
            host_interface: None,
            mode: Mode::Copy,
            offloads: OffloadKeys::ALL,
            max_queues: 1,
            check_source: true,
            addresses: 32,
            multicast_control: true,
            stall_seconds: 60,
        }
    }
}

/// What is bounded.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Limits {
    /// Interfaces served at a time.
    #[serde(deserialize_with = "values::within::<1, { values::DEVICES_MAX }, _, _>")]
    pub devices: u16,
    /// Interfaces of one guest.
    #[serde(deserialize_with = "values::within::<1, { values::DEVICES_MAX }, _, _>")]
    pub devices_per_domain: u16,
    /// Disks served at a time.
    #[serde(deserialize_with = "values::within::<1, { values::DISKS_MAX }, _, _>")]
    pub disks: u16,
    /// Disks of one guest.
    #[serde(deserialize_with = "values::within::<1, { values::DISKS_MAX }, _, _>")]
    pub disks_per_domain: u16,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { devices: 250, devices_per_domain: 16, disks: 250, disks_per_domain: 32 }
    }
}

/// What is exported.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Metrics {
    /// Where Prometheus may ask.
    #[serde(deserialize_with = "values::listen")]
    pub listen: Option<Listen>,
}

/// Exceptions for devices of one domain, or with one address, or both.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Override {
    /// The domain's name.
    #[serde(default, deserialize_with = "values::domain_name")]
    pub domain: Option<String>,
    /// The interface's address.
    #[serde(default, deserialize_with = "values::mac")]
    pub mac: Option<Mac>,
    /// In place of [`Network::mode`].
    #[serde(default, deserialize_with = "values::some_parsed")]
    pub mode: Option<Mode>,
    /// In place of [`Network::offloads`].
    #[serde(default, deserialize_with = "values::some_offloads")]
    pub offloads: Option<OffloadKeys>,
    /// In place of [`Network::max_queues`].
    #[serde(default, deserialize_with = "values::some_within::<1, { values::QUEUES_MAX }, _, _>")]
    pub max_queues: Option<u32>,
    /// In place of [`Network::check_source`].
    #[serde(default)]
    pub check_source: Option<bool>,
    /// In place of [`Network::addresses`].
    #[serde(
        default,
        deserialize_with = "values::some_within::<1, { values::ADDRESSES_MAX }, _, _>"
    )]
    pub addresses: Option<u16>,
    /// In place of [`Network::multicast_control`].
    #[serde(default)]
    pub multicast_control: Option<bool>,
    /// In place of [`Network::stall_seconds`].
    #[serde(default, deserialize_with = "values::some_within::<1, { values::STALL_MAX }, _, _>")]
    pub stall_seconds: Option<u16>,
}

impl Override {
    fn fits(&self, domain: Option<&str>, mac: Option<Mac>) -> bool {
        self.domain.as_deref().is_none_or(|name| Some(name) == domain)
            && self.mac.is_none_or(|own| Some(own) == mac)
    }
}

/// What holds for one device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceSettings {
    /// How its pages are reached.
    pub mode: Mode,
    /// The offloads it is offered.
    pub offloads: OffloadKeys,
    /// Queues it is offered.
    pub max_queues: u32,
    /// Whether its source address is enforced.
    pub check_source: bool,
    /// Addresses that may be behind it where not.
    pub addresses: u16,
    /// Whether it is offered multicast control.
    pub multicast_control: bool,
    /// When it counts as stalled.
    pub stall_seconds: u16,
}

impl Config {
    /// Reads a file. One that does not exist is no error where it `may_be_missing`: the defaults hold.
    ///
    /// # Errors
    ///
    /// [`ConfigError`].
    pub fn load(path: &Path, may_be_missing: bool) -> Result<Config, ConfigError> {
        match error::read_bounded(path, FILE_MAX) {
            Ok(text) => Config::parse(&text, path),
            Err(error) if may_be_missing && error.is_missing_file() => Ok(Config::default()),
            Err(error) => Err(error),
        }
    }

    /// Reads a text; `path` is what messages call it.
    ///
    /// # Errors
    ///
    /// [`ConfigError`].
    pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
        toml::from_str(text).map_err(|error| ConfigError::at(path, text, &error))
    }

    /// What holds for a device: the defaults, and the exceptions that fit it, in the file's order.
    pub fn device(&self, domain: Option<&str>, mac: Option<Mac>) -> DeviceSettings {
        let network = &self.network;
        let mut settings = DeviceSettings {
            mode: network.mode,
            offloads: network.offloads,
            max_queues: network.max_queues,
            check_source: network.check_source,
            addresses: network.addresses,
            multicast_control: network.multicast_control,
            stall_seconds: network.stall_seconds,
        };
        for other in self.device.iter().filter(|other| other.fits(domain, mac)) {
            let s = &mut settings;
            s.mode = other.mode.unwrap_or(s.mode);
            s.offloads = other.offloads.unwrap_or(s.offloads);
            s.max_queues = other.max_queues.unwrap_or(s.max_queues);
            s.check_source = other.check_source.unwrap_or(s.check_source);
            s.addresses = other.addresses.unwrap_or(s.addresses);
            s.multicast_control = other.multicast_control.unwrap_or(s.multicast_control);
            s.stall_seconds = other.stall_seconds.unwrap_or(s.stall_seconds);
        }
        settings
    }
}

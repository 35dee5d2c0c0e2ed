//! Options of the file, and the settings of a device.

use std::path::{Path, PathBuf};

use ringfence_access::Mode;
use ringfence_net::features::OffloadKeys;
use ringfence_switch::forwarding::Mac;
use serde::de::Error;
use serde::{Deserialize, Deserializer};

use super::disks::{self, DiskOverride, DiskSettings, Disks};
use super::error::{self, ConfigError};
use super::values::{self, Attach, Listen, LogLevel, OVERRIDES_MAX};

/// Path of the file, unless the command line names another.
pub const PATH_DEFAULT: &str = "/etc/ringfence/ringfence.toml";

/// Maximum size of the file in bytes.
const FILE_MAX: u64 = 1 << 20;

/// Complete configuration of the daemon.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// Options of the daemon itself.
    pub serve: Serve,
    /// Options of guests' interfaces.
    pub network: Network,
    /// Options of guests' disks.
    pub disks: Disks,
    pub limits: Limits,
    pub metrics: Metrics,
    /// Overrides for some interfaces.
    #[serde(deserialize_with = "overrides")]
    pub device: Vec<Override>,
    /// Overrides for some disks.
    #[serde(deserialize_with = "disks::overrides")]
    pub disk: Vec<DiskOverride>,
}

/// Section `[serve]`: options of the daemon itself.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Serve {
    #[serde(deserialize_with = "values::absolute_path")]
    pub status_socket: PathBuf,
    /// Least severe level that is logged.
    pub log_level: LogLevel,
}

impl Default for Serve {
    fn default() -> Self {
        let status_socket = PathBuf::from("/run/ringfence/serve.sock");
        Serve { status_socket, log_level: LogLevel::default() }
    }
}

/// Section `[network]`: options of guests' interfaces.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Network {
    pub attach: Attach,
    /// Bridge of interfaces for which the toolstack names none.
    #[serde(deserialize_with = "values::interface")]
    pub bridge: Option<String>,
    /// Host's interface on the switch.
    #[serde(deserialize_with = "values::interface")]
    pub host_interface: Option<String>,
    /// Access mode of guests' pages.
    #[serde(deserialize_with = "values::network_mode")]
    pub mode: Mode,
    /// Offloads that guests are offered.
    #[serde(deserialize_with = "values::offloads")]
    pub offloads: OffloadKeys,
    /// Maximum number of queues that a guest is offered.
    #[serde(deserialize_with = "values::within::<1, { values::QUEUES_MAX }, _, _>")]
    pub max_queues: u32,
    /// Set if the switch drops frames from an address other than the vif's own.
    pub check_source: bool,
    /// Maximum number of addresses behind one interface without `check_source`.
    #[serde(deserialize_with = "values::within::<1, { values::ADDRESSES_MAX }, _, _>")]
    pub addresses: u16,
    /// Set if guests are offered multicast control.
    pub multicast_control: bool,
    /// Time after which a guest that takes no frames counts as stalled.
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

/// Section `[limits]`: maximum numbers of devices.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Limits {
    /// Maximum number of interfaces served at a time.
    #[serde(deserialize_with = "values::within::<1, { values::DEVICES_MAX }, _, _>")]
    pub devices: u16,
    /// Maximum number of interfaces of one guest.
    #[serde(deserialize_with = "values::within::<1, { values::DEVICES_MAX }, _, _>")]
    pub devices_per_domain: u16,
    /// Maximum number of disks served at a time.
    #[serde(deserialize_with = "values::within::<1, { values::DISKS_MAX }, _, _>")]
    pub disks: u16,
    /// Maximum number of disks of one guest.
    #[serde(deserialize_with = "values::within::<1, { values::DISKS_MAX }, _, _>")]
    pub disks_per_domain: u16,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { devices: 250, devices_per_domain: 16, disks: 250, disks_per_domain: 32 }
    }
}

/// Section `[metrics]`: export to Prometheus.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Metrics {
    /// Address of the exporter. No metrics are exported without it.
    #[serde(deserialize_with = "values::listen")]
    pub listen: Option<Listen>,
}

/// Override for interfaces of one domain, or with one address, or with both.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Override {
    /// Name of the domain.
    #[serde(default, deserialize_with = "values::domain_name")]
    pub domain: Option<String>,
    /// Ethernet address of the interface.
    #[serde(default, deserialize_with = "values::mac")]
    pub mac: Option<Mac>,
    /// Replaces [`Network::mode`].
    #[serde(default, deserialize_with = "values::some_network_mode")]
    pub mode: Option<Mode>,
    /// Replaces [`Network::offloads`].
    #[serde(default, deserialize_with = "values::some_offloads")]
    pub offloads: Option<OffloadKeys>,
    /// Replaces [`Network::max_queues`].
    #[serde(default, deserialize_with = "values::some_within::<1, { values::QUEUES_MAX }, _, _>")]
    pub max_queues: Option<u32>,
    /// Replaces [`Network::check_source`].
    #[serde(default)]
    pub check_source: Option<bool>,
    /// Replaces [`Network::addresses`].
    #[serde(
        default,
        deserialize_with = "values::some_within::<1, { values::ADDRESSES_MAX }, _, _>"
    )]
    pub addresses: Option<u16>,
    /// Replaces [`Network::multicast_control`].
    #[serde(default)]
    pub multicast_control: Option<bool>,
    /// Replaces [`Network::stall_seconds`].
    #[serde(default, deserialize_with = "values::some_within::<1, { values::STALL_MAX }, _, _>")]
    pub stall_seconds: Option<u16>,
}

impl Override {
    fn matches_device(&self, domain: Option<&str>, mac: Option<Mac>) -> bool {
        self.domain.as_deref().is_none_or(|name| Some(name) == domain)
            && self.mac.is_none_or(|own| Some(own) == mac)
    }
}

/// Settings of one interface: the defaults with the matching overrides applied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceSettings {
    /// Access mode of the interface's pages.
    pub mode: Mode,
    /// Offloads that the guest is offered.
    pub offloads: OffloadKeys,
    /// Maximum number of queues that the guest is offered.
    pub max_queues: u32,
    /// Set if the source address of frames is enforced.
    pub check_source: bool,
    /// Maximum number of addresses behind the interface without `check_source`.
    pub addresses: u16,
    /// Set if the guest is offered multicast control.
    pub multicast_control: bool,
    /// Time after which the guest counts as stalled.
    pub stall_seconds: u16,
}

impl Config {
    /// Reads a file. With `may_be_missing`, a file that does not exist yields the defaults.
    ///
    /// # Errors
    ///
    /// Returns [`ConfigError`] if the file cannot be read or is not valid.
    pub fn load(path: &Path, may_be_missing: bool) -> Result<Config, ConfigError> {
        match error::read_bounded(path, FILE_MAX) {
            Ok(text) => Config::parse(&text, path),
            Err(error) if may_be_missing && error.is_missing_file() => Ok(Config::default()),
            Err(error) => Err(error),
        }
    }

    /// Parses a text. Messages name `path` as its file.
    ///
    /// # Errors
    ///
    /// Returns [`ConfigError`] if the text is not valid.
    pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
        toml::from_str(text).map_err(|error| ConfigError::at(path, text, &error))
    }

    /// Returns the settings of an interface. Matching overrides apply in the order of the file.
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
        for other in self.device.iter().filter(|other| other.matches_device(domain, mac)) {
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

    /// Returns the settings of a disk. Matching overrides apply in the order of the file.
    pub fn disk(&self, domain: Option<&str>, vdev: Option<&str>) -> DiskSettings {
        let disks = &self.disks;
        let mut settings = DiskSettings {
            mode: disks.mode,
            cache: disks.cache,
            bounce: disks.bounce,
            engine: disks.engine,
            sector_size: disks.sector_size,
            max_queues: disks.max_queues,
            ring_page_order: disks.ring_page_order,
            indirect_segments: disks.indirect_segments,
            persistent_pages: disks.persistent_pages,
            persistent_seconds: disks.persistent_seconds,
        };
        for other in self.disk.iter().filter(|other| other.matches_disk(domain, vdev)) {
            let s = &mut settings;
            s.mode = other.mode.unwrap_or(s.mode);
            s.cache = other.cache.unwrap_or(s.cache);
            s.bounce = other.bounce.unwrap_or(s.bounce);
            s.engine = other.engine.unwrap_or(s.engine);
            s.sector_size = other.sector_size.unwrap_or(s.sector_size);
            s.max_queues = other.max_queues.unwrap_or(s.max_queues);
            s.ring_page_order = other.ring_page_order.unwrap_or(s.ring_page_order);
            s.indirect_segments = other.indirect_segments.unwrap_or(s.indirect_segments);
            s.persistent_pages = other.persistent_pages.unwrap_or(s.persistent_pages);
            s.persistent_seconds = other.persistent_seconds.unwrap_or(s.persistent_seconds);
        }
        settings
    }
}

/// Parses the overrides for interfaces. Each must name a domain or an address.
fn overrides<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Override>, D::Error> {
    let list = Vec::<Override>::deserialize(from)?;
    if list.len() > OVERRIDES_MAX {
        let why = format!("{} exceptions, at most {OVERRIDES_MAX} are read", list.len());
        return Err(Error::custom(why));
    }
    let nameless = list.iter().position(|other| other.domain.is_none() && other.mac.is_none());
    match nameless {
        Some(index) => Err(Error::custom(format!(
            "exception {} names neither a `domain` nor a `mac`; what holds for all devices belongs \
             in [network]",
            index + 1
        ))),
        None => Ok(list),
    }
}

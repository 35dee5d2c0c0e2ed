//! Parsers for the values of the configuration, and their limits.

use core::fmt::Display;
use core::str::FromStr;
use std::net::SocketAddr;
use std::path::PathBuf;

use ringfence_access::Mode;
use ringfence_net::features::OffloadKeys;
use ringfence_net::vif::values::parse_mac;
use ringfence_switch::forwarding::Mac;
use serde::de::{Deserialize, Deserializer, Error, Unexpected};
use tracing::Level;

use ringfence_hostnet::interface::parse_interface;

/// Maximum number of queues of one interface.
pub(super) const QUEUES_MAX: u64 = 16;
/// Maximum number of addresses behind one interface.
pub(super) const ADDRESSES_MAX: u64 = 1024;
/// Maximum time after which a guest counts as stalled, in seconds.
pub(super) const STALL_MAX: u64 = 3600;
/// Maximum number of interfaces: the ports of a switch, less those of the host.
pub(super) const DEVICES_MAX: u64 = 250;
/// Maximum number of disks. Each has a thread for each of its queues.
pub(super) const DISKS_MAX: u64 = 1000;
/// Maximum number of overrides in each list of the file.
pub(super) const OVERRIDES_MAX: usize = 4096;
/// Maximum length of a Unix socket's path in bytes, without the terminator.
const SOCKET_PATH_MAX: usize = 107;
/// Maximum length in bytes of a domain's name, as in libxl.
const DOMAIN_NAME_MAX: usize = 255;

/// Attachment of guests' interfaces.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Attach {
    /// One TAP interface each, on a bridge of the host.
    Bridge,
    /// One switch in the daemon.
    Switch,
}

/// Levels of the log. Each includes those before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogLevel {
    Error,
    /// Rule violations of guests.
    Warn,
    /// Devices that connect and disconnect.
    #[default]
    Info,
    Debug,
}

impl LogLevel {
    /// Returns the level of the log's library.
    pub fn level(self) -> Level {
        match self {
            LogLevel::Error => Level::ERROR,
            LogLevel::Warn => Level::WARN,
            LogLevel::Info => Level::INFO,
            LogLevel::Debug => Level::DEBUG,
        }
    }
}

/// Address of the metrics exporter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Listen {
    Unix(PathBuf),
    /// Address and port of the loopback interface.
    Loopback(SocketAddr),
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Listen, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return socket_path(path).map(Listen::Unix);
        }
        let address: SocketAddr = text.parse().map_err(|_| {
            format!("`{text}` is neither unix:/PATH nor an address and port like 127.0.0.1:9709")
        })?;
        if !address.ip().is_loopback() {
            return Err(format!(
                "{} is not an address of the loopback interface: what is told about guests is for \
                 this host alone; put a proxy with authentication before it",
                address.ip()
            ));
        }
        if address.port() == 0 {
            return Err(
                "port 0 is none that anybody could ask at: choose one, as in 127.0.0.1:9709"
                    .to_owned(),
            );
        }
        Ok(Listen::Loopback(address))
    }
}

fn socket_path(text: &str) -> Result<PathBuf, String> {
    if !text.starts_with('/') || text.ends_with('/') {
        return Err(format!("`{text}` is no absolute path of a file"));
    }
    if text.len() > SOCKET_PATH_MAX || text.contains('\0') {
        return Err(format!("a socket's path has at most {SOCKET_PATH_MAX} bytes"));
    }
    Ok(PathBuf::from(text))
}

pub(super) fn absolute_path<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
    socket_path(&String::deserialize(from)?).map_err(Error::custom)
}

/// Parses a number of `MIN..=MAX`.
pub(super) fn within<'de, const MIN: u64, const MAX: u64, T, D>(from: D) -> Result<T, D::Error>
where
    T: TryFrom<u64>,
    D: Deserializer<'de>,
{
    let number = i64::deserialize(from)?;
    u64::try_from(number)
        .ok()
        .filter(|number| (MIN..=MAX).contains(number))
        .and_then(|number| T::try_from(number).ok())
        .ok_or_else(|| Error::custom(format!("{number} is not within {MIN} to {MAX}")))
}

pub(super) fn some_within<'de, const MIN: u64, const MAX: u64, T, D>(
    from: D,
) -> Result<Option<T>, D::Error>
where
    T: TryFrom<u64>,
    D: Deserializer<'de>,
{
    within::<MIN, MAX, T, D>(from).map(Some)
}

pub(super) fn parsed<'de, T, D>(from: D) -> Result<T, D::Error>
where
    T: FromStr<Err: Display>,
    D: Deserializer<'de>,
{
    String::deserialize(from)?.parse().map_err(Error::custom)
}

pub(super) fn some_parsed<'de, T, D>(from: D) -> Result<Option<T>, D::Error>
where
    T: FromStr<Err: Display>,
    D: Deserializer<'de>,
{
    parsed(from).map(Some)
}

pub(super) fn network_mode<'de, D: Deserializer<'de>>(from: D) -> Result<Mode, D::Error> {
    Mode::for_network(&String::deserialize(from)?).map_err(Error::custom)
}

pub(super) fn some_network_mode<'de, D>(from: D) -> Result<Option<Mode>, D::Error>
where
    D: Deserializer<'de>,
{
    network_mode(from).map(Some)
}

pub(super) fn disk_mode<'de, D: Deserializer<'de>>(from: D) -> Result<Mode, D::Error> {
    Mode::for_disk(&String::deserialize(from)?).map_err(Error::custom)
}

pub(super) fn some_disk_mode<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Mode>, D::Error> {
    disk_mode(from).map(Some)
}

/// Parses offloads. TSO needs scatter-gather, because a super-packet takes several slots.
pub(super) fn offloads<'de, D: Deserializer<'de>>(from: D) -> Result<OffloadKeys, D::Error> {
    let keys: OffloadKeys = parsed(from)?;
    if (keys.gso_tcp_v4 || keys.gso_tcp_v6) && !keys.scatter_gather {
        return Err(Error::custom("tso4 and tso6 need sg: add it, or take them out"));
    }
    Ok(keys)
}

pub(super) fn some_offloads<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<OffloadKeys>, D::Error> {
    offloads(from).map(Some)
}

/// Parses the name of an interface. An empty text means none.
pub(super) fn interface<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let text = String::deserialize(from)?;
    if text.is_empty() {
        return Ok(None);
    }
    parse_interface(&text).map(Some).map_err(Error::custom)
}

/// Parses the exporter's address. An empty text means none.
pub(super) fn listen<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Listen>, D::Error> {
    let text = String::deserialize(from)?;
    if text.is_empty() { Ok(None) } else { text.parse().map(Some).map_err(Error::custom) }
}

pub(super) fn domain_name<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let name = String::deserialize(from)?;
    if name.is_empty() || name.len() > DOMAIN_NAME_MAX || name.contains(['/', '\0']) {
        let expected = "the name of a domain, as `xl list` shows it";
        return Err(Error::invalid_value(Unexpected::Str(&name), &expected));
    }
    Ok(Some(name))
}

pub(super) fn mac<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Mac>, D::Error> {
    let text = String::deserialize(from)?;
    parse_mac(text.as_bytes()).map(Some).map_err(Error::custom)
}

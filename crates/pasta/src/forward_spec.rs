//! Port grammar of `-t`, `-u`, `-T` and `-U`, as pasta's manual page has it.
//!
//! ```text
//! spec   = "none" | [ [address] [ "%" interface ] "/" ] entry { "," entry }
//! entry  = "all" [ ":" to ] | "auto" | "~" range | range [ ":" target ]
//! target = range | to | to "/" range
//! range  = port [ "-" port ]
//! ```
//!
//! A specification without a range means all ports but the excluded ones. The parser reads text of the command
//! line; programs put a container's configuration into it. It allocates no more than the text is long.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// Longest name of an interface in bytes.
const INTERFACE_MAX: usize = ringfence_sys::tap::NAME_MAX;

/// Ports from the first to the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub first: u16,
    pub last: u16,
}

impl Range {
    pub(crate) fn contains(self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }

    fn offset(self) -> u16 {
        self.last - self.first
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { first, last } = self;
        if first == last { write!(f, "{first}") } else { write!(f, "{first}-{last}") }
    }
}

/// Ports that lead to ports of the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    pub from: Range,
    /// Ports of the target, as many as `from` has.
    pub to: Range,
    /// Address of the target, in place of the guest's own.
    pub address: Option<IpAddr>,
}

/// Argument of an option for ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PastaForwardSpec {
    /// No port.
    None,
    /// Ports at one listening address.
    Listen(Listen),
}

/// Ports, and the address and interface at which they listen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listen {
    pub address: Option<IpAddr>,
    pub interface: Option<String>,
    pub mappings: Vec<Mapping>,
    pub excluded: Vec<Range>,
    /// Set for every port that is not excluded.
    pub all: bool,
    /// Address of the target of all ports.
    pub all_to: Option<IpAddr>,
    /// Set if only ports with a listener on the other side are forwarded.
    pub auto: bool,
}

/// Reasons for which a specification of ports is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PastaForwardError {
    /// The text is not a number from 1 to 65535.
    #[error("`{0}` is not a port: 1 to 65535")]
    Port(String),
    /// The first port is greater than the last.
    #[error("the range `{0}` runs backwards")]
    Backwards(String),
    /// Both ranges of a mapping must be equally long.
    #[error("`{entry}` maps {from} ports to {to}")]
    Lengths { entry: String, from: u32, to: u32 },
    /// Text before `/` that is neither an address nor an interface.
    #[error("`{0}` is not an address to listen at: ADDRESS, ADDRESS%INTERFACE or %INTERFACE")]
    Address(String),
    /// An entry between two commas has no text.
    #[error("an entry is empty")]
    Empty,
    /// `none` stands among other entries.
    #[error("`none` cannot be combined with ports")]
    None,
}

impl FromStr for PastaForwardSpec {
    type Err = PastaForwardError;

    fn from_str(text: &str) -> Result<PastaForwardSpec, PastaForwardError> {
        if text == "none" {
            return Ok(PastaForwardSpec::None);
        }
        let (mut listen, entries) = split_address(text)?;
        for entry in entries.split(',') {
            read_entry(entry, &mut listen)?;
        }
        if listen.mappings.is_empty() && !listen.auto {
            listen.all = true;
        }
        Ok(PastaForwardSpec::Listen(listen))
    }
}

/// Splits off the listening address and interface, if the text has them.
fn split_address(text: &str) -> Result<(Listen, &str), PastaForwardError> {
    // A slash behind a comma belongs to the target of a mapping.
    let head = text.split_once('/').filter(|(head, _)| !head.contains(','));
    let Some((head, rest)) = head else { return Ok((Listen::default(), text)) };
    let wrong = || PastaForwardError::Address(head.to_owned());
    let (ip, interface) = match head.split_once('%') {
        Some((ip, interface)) => (ip, Some(interface)),
        None => (head, None),
    };
    let address = match ip {
        "" if interface.is_some() => None,
        _ => match address(ip) {
            Some(ip) => Some(ip),
            // The slash belongs to the target of the first mapping: `80:192.0.2.1/81`.
            None if interface.is_none()
                && ip.bytes().next().is_some_and(|b| b.is_ascii_digit()) =>
            {
                return Ok((Listen::default(), text));
            }
            None => return Err(wrong()),
        },
    };
    let is_name = |name: &&str| {
        (1..=INTERFACE_MAX).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic())
    };
    if !interface.iter().all(is_name) {
        return Err(wrong());
    }
    let interface = interface.map(str::to_owned);
    Ok((Listen { address, interface, ..Listen::default() }, rest))
}

/// Parses an address, which may be in brackets if it is of IPv6.
fn address(text: &str) -> Option<IpAddr> {
    let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    match inner {
        Some(inner) => inner.parse().ok().map(IpAddr::V6),
        None => text.parse().ok(),
    }
}

fn read_entry(entry: &str, listen: &mut Listen) -> Result<(), PastaForwardError> {
    match entry {
        "" => return Err(PastaForwardError::Empty),
        "none" => return Err(PastaForwardError::None),
        "auto" => listen.auto = true,
        "all" => listen.all = true,
        _ => {
            if let Some(excluded) = entry.strip_prefix('~') {
                listen.excluded.push(range(excluded)?);
            } else if let Some(to) = entry.strip_prefix("all:") {
                let to = address(to).ok_or_else(|| PastaForwardError::Address(to.to_owned()))?;
                (listen.all, listen.all_to) = (true, Some(to));
            } else {
                listen.mappings.push(mapping(entry)?);
            }
        }
    }
    Ok(())
}

fn mapping(entry: &str) -> Result<Mapping, PastaForwardError> {
    let (from, target) = match entry.split_once(':') {
        Some((from, target)) => (range(from)?, Some(target)),
        None => (range(entry)?, None),
    };
    let (address, to) = match target {
        None => (None, from),
        Some(target) => match target.split_once('/') {
            Some((ip, ports)) => {
                let ip = address(ip).ok_or_else(|| PastaForwardError::Address(ip.to_owned()))?;
                (Some(ip), range(ports)?)
            }
            None => match address(target) {
                Some(ip) => (Some(ip), from),
                None => (None, range(target)?),
            },
        },
    };
    if from.offset() != to.offset() {
        let [from, to] = [from, to].map(|range| u32::from(range.offset()) + 1);
        return Err(PastaForwardError::Lengths { entry: entry.to_owned(), from, to });
    }
    Ok(Mapping { from, to, address })
}

fn range(text: &str) -> Result<Range, PastaForwardError> {
    let port = |text: &str| {
        let is_number = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let number = text.parse::<u16>().ok().filter(|port| *port > 0 && is_number);
        number.ok_or_else(|| PastaForwardError::Port(text.to_owned()))
    };
    let (first, last) = match text.split_once('-') {
        Some((first, last)) => (port(first)?, port(last)?),
        None => (port(text)?, port(text)?),
    };
    if first > last {
        Err(PastaForwardError::Backwards(text.to_owned()))
    } else {
        Ok(Range { first, last })
    }
}

impl Listen {
    /// Iterates over the ports of the mappings, without the excluded ones: the listening port, the target's
    /// port, and its address if it is not the guest's own.
    pub fn ports(&self) -> impl Iterator<Item = (u16, u16, Option<IpAddr>)> + '_ {
        let each = |mapping: &Mapping| {
            let Mapping { from, to, address } = *mapping;
            (from.first..=from.last)
                .map(move |port| (port, to.first + (port - from.first), address))
        };
        self.mappings.iter().flat_map(each).filter(|(port, ..)| !self.is_excluded(*port))
    }

    /// Returns `true` for a port that is never forwarded.
    pub fn is_excluded(&self, port: u16) -> bool {
        self.excluded.iter().any(|range| range.contains(port))
    }
}

impl fmt::Display for PastaForwardSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PastaForwardSpec::None => f.write_str("none"),
            PastaForwardSpec::Listen(listen) => listen.fmt(f),
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(address) = self.address {
            write!(f, "{address}")?;
        }
        if let Some(interface) = &self.interface {
            write!(f, "%{interface}")?;
        }
        if self.address.is_some() || self.interface.is_some() {
            f.write_str("/")?;
        }
        let mut entries: Vec<String> = Vec::new();
        match self.all_to {
            Some(to) => entries.push(format!("all:{to}")),
            None if self.all => entries.push("all".to_owned()),
            None => {}
        }
        entries.extend(self.auto.then(|| "auto".to_owned()));
        entries.extend(self.mappings.iter().map(|Mapping { from, to, address }| match address {
            Some(IpAddr::V6(ip)) => format!("{from}:[{ip}]/{to}"),
            Some(ip) => format!("{from}:{ip}/{to}"),
            None => format!("{from}:{to}"),
        }));
        entries.extend(self.excluded.iter().map(|range| format!("~{range}")));
        f.write_str(&entries.join(","))
    }
}

/// Function of the fuzz target.
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing {
    use super::{PastaForwardSpec, Range};

    /// Parses arbitrary bytes. Accepted text must survive a round trip, and yield valid ports only.
    ///
    /// # Panics
    ///
    /// Panics if one of these rules is broken.
    pub fn port_spec(data: &[u8]) {
        let Ok(text) = std::str::from_utf8(data) else { return };
        let Ok(spec) = text.parse::<PastaForwardSpec>() else { return };
        let written = spec.to_string();
        assert_eq!(
            written.parse::<PastaForwardSpec>().as_ref(),
            Ok(&spec),
            "{text:?} as {written:?}"
        );
        let PastaForwardSpec::Listen(listen) = spec else { return };
        let in_range = |range: &Range, port: u16| range.first <= port && port <= range.last;
        for (port, target, _) in listen.ports().take(1 << 17) {
            assert!(port > 0 && target > 0, "{text:?}");
            assert!(
                listen.mappings.iter().any(|mapping| in_range(&mapping.from, port)),
                "{text:?}"
            );
            assert!(!listen.excluded.iter().any(|range| in_range(range, port)), "{text:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn listen(text: &str) -> Listen {
        match text.parse::<PastaForwardSpec>().unwrap() {
            PastaForwardSpec::Listen(listen) => listen,
            PastaForwardSpec::None => panic!("{text} is no port"),
        }
    }

    fn ports(text: &str) -> Vec<(u16, u16)> {
        listen(text).ports().map(|(port, target, _)| (port, target)).collect()
    }

    #[test]
    fn examples_of_the_manual_page_are_understood() {
        assert_eq!("none".parse(), Ok(PastaForwardSpec::None));
        assert_eq!(ports("22"), [(22, 22)]);
        assert_eq!(ports("22:23"), [(22, 23)]);
        assert_eq!(ports("22,25"), [(22, 22), (25, 25)]);
        assert_eq!(ports("22-24:32-34"), [(22, 32), (23, 33), (24, 34)]);
        assert_eq!(ports("20-23,~21-22"), [(20, 20), (23, 23)]);
        assert_eq!(ports("8080-8080:80-80"), [(8080, 80)]);
        let bound = listen("192.0.2.1%eth0/22");
        assert_eq!(bound.address, Some("192.0.2.1".parse().unwrap()));
        assert_eq!(bound.interface.as_deref(), Some("eth0"));
        assert_eq!(listen("%eth0/22").address, None);
        assert_eq!(listen("::1/8082-8082:80-80").address, Some("::1".parse().unwrap()));
        assert_eq!(listen("[::]/8086").address, Some("::".parse().unwrap()));
        assert!(listen("all").all && listen("~20000-20010").all && listen("::1/all").all);
        assert!(listen("auto").auto && !listen("auto").all && listen("8000-8010,auto").auto);
        let to = listen("0.0.0.0/5000:192.0.2.5/6000").mappings[0];
        assert_eq!((to.to.first, to.address), (6000, Some("192.0.2.5".parse().unwrap())));
        let bare = listen("5000:192.0.2.5/6000");
        assert_eq!((bare.address, bare.mappings[0]), (None, to));
        assert_eq!(listen("127.0.0.6/all:192.0.2.6").all_to, Some("192.0.2.6".parse().unwrap()));
    }

    #[test]
    fn malformed_specification_returns_its_own_error() {
        let error = |text: &str| text.parse::<PastaForwardSpec>().unwrap_err();
        assert_eq!(error("80:0"), PastaForwardError::Port("0".into()));
        assert_eq!(error("http"), PastaForwardError::Port("http".into()));
        assert_eq!(error("65536"), PastaForwardError::Port("65536".into()));
        assert_eq!(error("9-8"), PastaForwardError::Backwards("9-8".into()));
        let lengths = PastaForwardError::Lengths { entry: "1-5:1-3".into(), from: 5, to: 3 };
        assert_eq!(error("1-5:1-3"), lengths);
        assert_eq!(error("eth0/22"), PastaForwardError::Address("eth0".into()));
        assert_eq!(error("192.0.2.1%/22"), PastaForwardError::Address("192.0.2.1%".into()));
        assert_eq!(error("/22"), PastaForwardError::Address(String::new()));
        assert_eq!(error("22,"), PastaForwardError::Empty);
        assert_eq!(error(""), PastaForwardError::Empty);
        assert_eq!(error("22,none"), PastaForwardError::None);
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_parsed_or_rejected(text in "[0-9a-z.:/\\[\\],%~-]{0,32}") {
            fuzzing::port_spec(text.as_bytes());
        }

        #[test]
        fn specification_made_of_entries_is_accepted(
            address in proptest::option::of("(127\\.0\\.0\\.1|::1|%eth0|10\\.0\\.0\\.1%a)"),
            entries in proptest::collection::vec("(all|auto|~[1-9][0-9]{0,3}|[1-9][0-9]{0,3}(:[1-9][0-9]{0,3})?)", 1..6),
        ) {
            let address = address.map_or(String::new(), |address| address + "/");
            let text = address + &entries.join(",");
            prop_assert!(text.parse::<PastaForwardSpec>().is_ok(), "{}", text);
            fuzzing::port_spec(text.as_bytes());
        }
    }
}

//! Rules: their grammar, and errors that point at a character.
//!
//! ```text
//! rule    = "icmp" | target [":" ports] ["/" ("tcp" | "udp")]
//! target  = NAME | "*." NAME | IPV4 ["/" LEN] | IPV6 ["/" LEN] | "[" IPV6 "]" ["/" LEN]
//! ports   = "*" | port *("," port)        port = NUMBER ["-" NUMBER]
//! ```
//!
//! An IPv6 address without brackets has no ports: its last group could be one.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::ops::RangeInclusive;

use smallvec::{SmallVec, smallvec};

use ringfence_base::address::IpPrefix;

use crate::name::{HostName, NameFault};

/// Maximum length of a rule's text in bytes.
pub const RULE_MAX: usize = 512;
/// Ports that a name without ports does not include: DNS, and DNS over TLS or QUIC.
pub const NOT_BY_DEFAULT: [u16; 2] = [53, 853];

/// Verdict that a matching rule gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    Allow,
    Deny,
}

/// Protocols that rules distinguish.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    Tcp,
    Udp,
    /// Echo requests, which have no port.
    Icmp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
            Protocol::Icmp => "icmp",
        })
    }
}

/// Names, addresses or echo requests that a rule covers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    Name(HostName),
    /// All names below this one, at any depth, but not the name itself.
    Below(HostName),
    /// Addresses that begin with these bits. The other bits are zero.
    Prefix(IpPrefix),
    /// Echo requests to destinations that other rules allow.
    Icmp,
}

/// Ports of a rule; all if empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ports(SmallVec<[RangeInclusive<u16>; 2]>);

impl Ports {
    /// Returns `true` if the rule lists its ports.
    pub fn are_listed(&self) -> bool {
        !self.0.is_empty()
    }

    /// Returns `true` if the rule lists every port: `*`.
    pub fn is_every_port(&self) -> bool {
        self.0.first().is_some_and(|range| *range == (1..=u16::MAX))
    }

    /// Returns `true` if a list contains the port, or there is no list.
    pub fn contain(&self, port: u16) -> bool {
        self.0.is_empty() || self.0.iter().any(|range| range.contains(&port))
    }
}

/// One rule: destination, ports and protocol.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Rule {
    pub target: Target,
    pub ports: Ports,
    /// Protocol; TCP and UDP if absent.
    pub protocol: Option<Protocol>,
}

/// Rules of the grammar that a text breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleFault {
    #[error("a rule has at most {RULE_MAX} characters")]
    Length,
    #[error(transparent)]
    Name(#[from] NameFault),
    #[error("a wildcard is `*.` and a name: `*.example.org`")]
    Wildcard,
    #[error("this is no IPv6 address")]
    Address,
    #[error("`]` is missing")]
    Bracket,
    #[error("write this address as an IPv4 address")]
    Mapped,
    #[error("the length of a prefix is 0 to {0}")]
    PrefixLen(u8),
    #[error("the address has bits behind its prefix: write {0}")]
    HostBits(IpAddr),
    #[error("a port is a number from 1 to 65535; several are `80,443` or `8000-8010`, all are `*`")]
    Port,
    #[error("the first port of a range is the lower one")]
    Range,
    #[error("a protocol is `tcp` or `udp`; echo requests have the rule `icmp`")]
    Protocol,
    #[error("`:PORTS`, `/tcp`, `/udp` or the end is expected here")]
    Rest,
}

/// Error of a text that is no rule, with its position.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{fault}")]
pub struct RuleError {
    /// Offset of the first wrong character, in bytes.
    pub at: usize,
    /// Rule of the grammar that the text breaks.
    pub fault: RuleFault,
}

impl RuleError {
    /// Returns two lines: the text, and a caret below the wrong character.
    pub fn caret(&self, text: &str) -> String {
        let shown: String =
            text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        let before = text.get(..self.at).map_or(0, |before| before.chars().count());
        format!("  {shown}\n  {:before$}^", "")
    }
}

fn fail<T>(at: usize, fault: impl Into<RuleFault>) -> Result<T, RuleError> {
    Err(RuleError { at, fault: fault.into() })
}

impl core::str::FromStr for Rule {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Rule, RuleError> {
        if text.len() > RULE_MAX {
            return fail(0, RuleFault::Length);
        }
        if text == "icmp" {
            let ports = Ports::default();
            return Ok(Rule { target: Target::Icmp, ports, protocol: Some(Protocol::Icmp) });
        }
        let (target, at) = target(text)?;
        let (ports, at) = ports(text, at)?;
        let protocol = match text.get(at..).unwrap_or_default() {
            "" => None,
            "/tcp" => Some(Protocol::Tcp),
            "/udp" => Some(Protocol::Udp),
            rest if rest.starts_with('/') => return fail(at + 1, RuleFault::Protocol),
            _ => return fail(at, RuleFault::Rest),
        };
        Ok(Rule { target, ports, protocol })
    }
}

/// Parses the target at the beginning of a rule. Returns it with the offset behind it.
fn target(text: &str) -> Result<(Target, usize), RuleError> {
    if let Some(inner) = text.strip_prefix('[') {
        let Some(end) = inner.find(']') else { return fail(text.len(), RuleFault::Bracket) };
        return prefix(v6(&inner[..end], 1)?, 0, text, end + 2);
    }
    if text.matches(':').count() > 1 {
        let end = text.find('/').unwrap_or(text.len());
        return prefix(v6(&text[..end], 0)?, 0, text, end);
    }
    let end = text.find([':', '/']).unwrap_or(text.len());
    let host = &text[..end];
    if let Ok(ip) = host.parse::<Ipv4Addr>() {
        return prefix(ip.into(), 0, text, end);
    }
    let (name, start) = match host.strip_prefix('*') {
        Some(rest) => (rest.strip_prefix('.'), 2),
        None => (Some(host), 0),
    };
    let Some(name) = name else { return fail(1, RuleFault::Wildcard) };
    match HostName::parse(name) {
        Ok(name) if start > 0 => Ok((Target::Below(name), end)),
        Ok(name) => Ok((Target::Name(name), end)),
        Err(error) => fail(start + error.at, error.fault),
    }
}

fn v6(text: &str, at: usize) -> Result<IpAddr, RuleError> {
    match text.parse::<Ipv6Addr>() {
        Ok(ip) if ip.to_ipv4_mapped().is_some() => fail(at, RuleFault::Mapped),
        Ok(ip) => Ok(ip.into()),
        Err(_) => {
            let is_wrong = |c: char| !c.is_ascii_hexdigit() && c != ':' && c != '.';
            fail(at + text.find(is_wrong).unwrap_or(0), RuleFault::Address)
        }
    }
}

/// Parses the prefix length behind an address, if there is one.
fn prefix(ip: IpAddr, start: usize, text: &str, end: usize) -> Result<(Target, usize), RuleError> {
    let all = IpPrefix::new(ip, 0).full_len();
    let rest = text.get(end..).unwrap_or_default();
    let digits = rest.strip_prefix('/').filter(|len| len.starts_with(|c: char| c.is_ascii_digit()));
    let Some(digits) = digits else {
        return Ok((Target::Prefix(IpPrefix::new(ip, all)), end));
    };
    let count = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    let len = digits[..count].parse::<u8>().ok().filter(|len| *len <= all);
    let Some(len) = len else { return fail(end + 1, RuleFault::PrefixLen(all)) };
    let network = IpPrefix::new(ip, len).masked().ip;
    if network != ip {
        return fail(start, RuleFault::HostBits(network));
    }
    Ok((Target::Prefix(IpPrefix::new(ip, len)), end + 1 + count))
}

fn ports(text: &str, start: usize) -> Result<(Ports, usize), RuleError> {
    let Some(list) = text.get(start..).and_then(|rest| rest.strip_prefix(':')) else {
        return Ok((Ports::default(), start));
    };
    let end = list.find('/').unwrap_or(list.len());
    let (mut at, mut ranges) = (start + 1, SmallVec::new());
    if &list[..end] == "*" {
        return Ok((Ports(smallvec![1..=u16::MAX]), at + end));
    }
    for part in list[..end].split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let Some(low) = port(first) else { return fail(at, RuleFault::Port) };
        let Some(high) = port(last) else {
            return fail(at + part.len() - last.len(), RuleFault::Port);
        };
        if low > high {
            return fail(at, RuleFault::Range);
        }
        ranges.push(low..=high);
        at += part.len() + 1;
    }
    Ok((Ports(ranges), start + 1 + end))
}

fn port(text: &str) -> Option<u16> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|port| is_number && *port > 0)
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_every_port() {
            return f.write_str("*");
        }
        for (number, range) in self.0.iter().enumerate() {
            let comma = if number > 0 { "," } else { "" };
            let (first, last) = (range.start(), range.end());
            match first == last {
                true => write!(f, "{comma}{first}")?,
                false => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.target {
            Target::Icmp => return f.write_str("icmp"),
            Target::Name(name) => write!(f, "{name}")?,
            Target::Below(name) => write!(f, "*.{name}")?,
            Target::Prefix(IpPrefix { ip: IpAddr::V6(ip), len: 128 }) => write!(f, "[{ip}]")?,
            Target::Prefix(IpPrefix { ip: IpAddr::V6(ip), len }) => write!(f, "[{ip}]/{len}")?,
            Target::Prefix(IpPrefix { ip, len: 32 }) => write!(f, "{ip}")?,
            Target::Prefix(IpPrefix { ip, len }) => write!(f, "{ip}/{len}")?,
        }
        if self.ports.are_listed() {
            write!(f, ":{}", self.ports)?;
        }
        match self.protocol {
            Some(protocol) => write!(f, "/{protocol}"),
            None => Ok(()),
        }
    }
}

impl Rule {
    /// Returns `true` if port and protocol of a packet are the rule's.
    pub fn covers(&self, port: u16, protocol: Protocol) -> bool {
        if protocol == Protocol::Icmp {
            // Echo requests go where the rule leads on any port; the rule `icmp` allows them.
            return true;
        }
        if self.protocol.is_some_and(|own| own != protocol) {
            return false;
        }
        let is_name = matches!(self.target, Target::Name(_) | Target::Below(_));
        if is_name && !self.ports.are_listed() && NOT_BY_DEFAULT.contains(&port) {
            return false;
        }
        self.ports.contain(port)
    }

    /// Returns `true` if the rule, as one that denies, concerns port and protocol of a packet.
    pub fn concerns(&self, port: u16, protocol: Protocol) -> bool {
        if protocol == Protocol::Icmp {
            return self.is_for_everything();
        }
        self.protocol.is_none_or(|own| own == protocol) && self.ports.contain(port)
    }

    /// Returns `true` if the rule names neither ports nor a protocol.
    pub fn is_for_everything(&self) -> bool {
        let every = !self.ports.are_listed() || self.ports.is_every_port();
        every && self.protocol.is_none()
    }
}

#[cfg(test)]
mod tests;

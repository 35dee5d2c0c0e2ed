//! Rules: their grammar, and errors that point at a character.
//!
//! ```text
//! rule    = "icmp" | target [":" ports] ["/" ("tcp" | "udp")] *(" " limit)
//! target  = NAME | "*." NAME | "." NAME | IPV4 ["/" LEN] | IPV6 ["/" LEN] | "[" IPV6 "]" ["/" LEN]
//! ports   = "*" | port *("," port)        port = NUMBER ["-" NUMBER]
//! limit   = "bytes=" NUMBER ["K" | "M" | "G" | "T"] | "connections=" NUMBER | "at-once=" NUMBER
//! ```
//!
//! An IPv6 address without brackets has no ports. One whose last group could be a port is an error: `::1:80`.

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
    /// This name, and all names below it.
    Domain(HostName),
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

/// Kinds of limits of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LimitKind {
    Bytes,
    Connections,
    AtOnce,
}

impl fmt::Display for LimitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LimitKind::Bytes => "bytes",
            LimitKind::Connections => "connections",
            LimitKind::AtOnce => "connections at once",
        })
    }
}

/// Limits of one guest's use of a rule that allows something. TCP connections and UDP associations count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Limits {
    /// Maximum of payload bytes in both directions.
    pub bytes: Option<u64>,
    /// Maximum number of connections while the guest runs.
    pub connections: Option<u32>,
    /// Maximum number of connections that are open.
    pub at_once: Option<u32>,
}

impl Limits {
    /// Returns `true` if there is none.
    pub fn are_none(&self) -> bool {
        *self == Limits::default()
    }
}

/// One rule: destination, ports, protocol and limits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Rule {
    pub target: Target,
    pub ports: Ports,
    /// Protocol; TCP and UDP if absent.
    pub protocol: Option<Protocol>,
    pub limits: Limits,
}

/// Rules of the grammar that a text breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleFault {
    #[error("a rule has at most {RULE_MAX} characters")]
    Length,
    #[error(transparent)]
    Name(#[from] NameFault),
    #[error(
        "a wildcard is `*.` and a name: `*.example.org`; `.example.org` covers the name itself, too"
    )]
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
    #[error("a rule has no scheme and no path: write {0}")]
    Url(String),
    #[error("a name is written in its ASCII form: write {0}")]
    International(String),
    #[error(
        "the last group could be a port: write [{address}]:{port} for the port, [{address}:{port}] for the address"
    )]
    Ambiguous { address: String, port: String },
    #[error("a port is a number from 1 to 65535; several are `80,443` or `8000-8010`, all are `*`")]
    Port,
    #[error("the first port of a range is the lower one")]
    Range,
    #[error("a protocol is `tcp` or `udp`; echo requests have the rule `icmp`; a rule has no path")]
    Protocol,
    #[error("`:PORTS`, `/tcp`, `/udp`, a limit or the end is expected here")]
    Rest,
    #[error(
        "a limit is `bytes=10M`, `connections=100` or `at-once=5`, each once, behind one blank"
    )]
    Limit,
    #[error(
        "a limit is a number from 1 on; that of bytes may end in K, M, G or T (1024 bytes and so on)"
    )]
    LimitNumber,
    #[error("only a rule that allows something has limits")]
    LimitOfDenial,
    #[error("echo requests have no limits")]
    LimitOfEcho,
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
            let (protocol, limits) = (Some(Protocol::Icmp), Limits::default());
            return Ok(Rule { target: Target::Icmp, ports, protocol, limits });
        }
        let whole = text;
        let text = destination(text);
        if text == "icmp" {
            return fail(text.len() + 1, RuleFault::LimitOfEcho);
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
        let limits = limits(whole, text.len())?;
        Ok(Rule { target, ports, protocol, limits })
    }
}

/// Returns the part of a rule before its limits.
pub(crate) fn destination(text: &str) -> &str {
    // A blank elsewhere is an error of the name.
    let is_limit = |(at, _): &(usize, &str)| {
        text.get(at + 1..)
            .is_some_and(|rest| rest.split(' ').next().is_some_and(|word| word.contains('=')))
    };
    let at = text.match_indices(' ').find(is_limit);
    text.get(..at.map_or(text.len(), |(at, _)| at)).unwrap_or(text)
}

/// Parses the limits that begin at `start`.
fn limits(text: &str, start: usize) -> Result<Limits, RuleError> {
    let (mut limits, mut at) = (Limits::default(), start);
    for word in text.get(start..).unwrap_or_default().split(' ').skip(1) {
        at += 1;
        let Some((name, value)) = word.split_once('=') else { return fail(at, RuleFault::Limit) };
        let number_at = at + name.len() + 1;
        let is_new = match name {
            "bytes" => set(&mut limits.bytes, size(value), number_at)?,
            "connections" => set(&mut limits.connections, number(value), number_at)?,
            "at-once" => set(&mut limits.at_once, number(value), number_at)?,
            _ => false,
        };
        if !is_new {
            return fail(at, RuleFault::Limit);
        }
        at += word.len();
    }
    Ok(limits)
}

/// Sets a limit. Returns `false` if it is set already.
fn set<T>(limit: &mut Option<T>, value: Option<T>, at: usize) -> Result<bool, RuleError> {
    let Some(value) = value else { return fail(at, RuleFault::LimitNumber) };
    Ok(limit.replace(value).is_none())
}

/// Letters for multiples of bytes, each 1024 times the one before.
const UNITS: [char; 4] = ['K', 'M', 'G', 'T'];

/// Parses a number of bytes.
fn size(text: &str) -> Option<u64> {
    let unit = UNITS.iter().position(|unit| text.ends_with(*unit));
    let digits = text.strip_suffix(UNITS).unwrap_or(text);
    let shift = unit.map_or(0, |unit| 10 * (unit + 1));
    number::<u64>(digits)?.checked_mul(1 << shift)
}

/// Parses a number that is not zero.
fn number<T: core::str::FromStr + Default + PartialEq>(text: &str) -> Option<T> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|number| is_number && *number != T::default())
}

/// Well-known ports of the schemes that users write before names.
const SCHEMES: [(&str, u16); 8] = [
    ("http", 80),
    ("https", 443),
    ("ws", 80),
    ("wss", 443),
    ("ssh", 22),
    ("git", 9418),
    ("git+ssh", 22),
    ("git+https", 443),
];

/// Returns the rule for the server of a URL, if the text is one.
fn rule_of_url(text: &str) -> Option<String> {
    let (scheme, rest) = text.split_once("://")?;
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let host = authority.rsplit('@').next().unwrap_or_default();
    let has_port = host.rsplit(']').next().is_some_and(|behind| behind.contains(':'));
    let known = SCHEMES.iter().find(|(name, _)| scheme.eq_ignore_ascii_case(name));
    let rule = match known {
        Some((_, port)) if !has_port => format!("{host}:{port}"),
        _ => host.to_owned(),
    };
    Some(if rule.parse::<Rule>().is_ok() { rule } else { "the name alone".to_owned() })
}

/// Returns the ASCII form of a name with labels in other scripts (RFC 3492).
fn ascii_form(name: &str) -> String {
    let label = |label: &str| match label.is_ascii() {
        true => label.to_owned(),
        false => match idna::punycode::encode_str(&label.to_lowercase()) {
            Some(ascii) => format!("xn--{ascii}"),
            None => label.to_owned(),
        },
    };
    // Three other characters separate labels, too (RFC 3490, 3.1).
    name.split(['.', '\u{3002}', '\u{ff0e}', '\u{ff61}']).map(label).collect::<Vec<_>>().join(".")
}

/// Parses the target at the beginning of a rule. Returns it with the offset behind it.
fn target(text: &str) -> Result<(Target, usize), RuleError> {
    if let (Some(at), Some(rule)) = (text.find("://"), rule_of_url(text)) {
        return fail(at + 1, RuleFault::Url(rule));
    }
    if let Some(inner) = text.strip_prefix('[') {
        let Some(end) = inner.find(']') else { return fail(text.len(), RuleFault::Bracket) };
        return prefix(v6(&inner[..end], 1)?, 0, text, end + 2);
    }
    if text.matches(':').count() > 1 {
        let end = text.find('/').unwrap_or(text.len());
        let target = prefix(v6(&text[..end], 0)?, 0, text, end)?;
        let has_length = target.1 > end;
        if let Some((address, port)) = text[..end].rsplit_once(':').filter(|_| !has_length)
            && address.parse::<Ipv6Addr>().is_ok()
            && self::port(port).is_some()
        {
            let (address, port) = (address.to_owned(), port.to_owned());
            return fail(end - port.len(), RuleFault::Ambiguous { address, port });
        }
        return Ok(target);
    }
    let end = text.find([':', '/']).unwrap_or(text.len());
    let host = &text[..end];
    if let Ok(ip) = host.parse::<Ipv4Addr>() {
        return prefix(ip.into(), 0, text, end);
    }
    let (name, start) = match (host.strip_prefix('*'), host.strip_prefix('.')) {
        (Some(rest), _) => (rest.strip_prefix('.'), 2),
        (None, Some(rest)) => (Some(rest), 1),
        (None, None) => (Some(host), 0),
    };
    let Some(name) = name else { return fail(1, RuleFault::Wildcard) };
    if let Some(at) = name.find(|c: char| !c.is_ascii()) {
        let rest = text.get(end..).unwrap_or_default();
        let written = format!("{}{}{rest}", &host[..start], ascii_form(name));
        if written.parse::<Rule>().is_ok() {
            return fail(start + at, RuleFault::International(written));
        }
    }
    match HostName::parse(name) {
        Ok(name) => Ok((
            match start {
                0 => Target::Name(name),
                1 => Target::Domain(name),
                _ => Target::Below(name),
            },
            end,
        )),
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
    number(text)
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
            Target::Domain(name) => write!(f, ".{name}")?,
            Target::Prefix(IpPrefix { ip: IpAddr::V6(ip), len: 128 }) => write!(f, "[{ip}]")?,
            Target::Prefix(IpPrefix { ip: IpAddr::V6(ip), len }) => write!(f, "[{ip}]/{len}")?,
            Target::Prefix(IpPrefix { ip, len: 32 }) => write!(f, "{ip}")?,
            Target::Prefix(IpPrefix { ip, len }) => write!(f, "{ip}/{len}")?,
        }
        if self.ports.are_listed() {
            write!(f, ":{}", self.ports)?;
        }
        if let Some(protocol) = self.protocol {
            write!(f, "/{protocol}")?;
        }
        self.limits.fmt(f)
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(bytes) = self.bytes {
            let is_multiple = |unit: &usize| bytes % (1 << (10 * (unit + 1))) == 0;
            match (0..UNITS.len()).rev().find(is_multiple) {
                Some(unit) => write!(f, " bytes={}{}", bytes >> (10 * (unit + 1)), UNITS[unit])?,
                None => write!(f, " bytes={bytes}")?,
            }
        }
        let counts = [("connections", self.connections), ("at-once", self.at_once)];
        counts.iter().try_for_each(|(name, count)| match count {
            Some(count) => write!(f, " {name}={count}"),
            None => Ok(()),
        })
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
        if self.is_for_names() && !self.ports.are_listed() && NOT_BY_DEFAULT.contains(&port) {
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

    /// Returns `true` if the rule covers names.
    pub fn is_for_names(&self) -> bool {
        matches!(self.target, Target::Name(_) | Target::Below(_) | Target::Domain(_))
    }

    /// Returns `true` if the rule names neither ports nor a protocol.
    pub fn is_for_everything(&self) -> bool {
        let every = !self.ports.are_listed() || self.ports.is_every_port();
        every && self.protocol.is_none()
    }
}

#[cfg(test)]
mod tests;

//! Control protocol of passt and pasta, version 2: a client reads the forwarding rules of a running program, and replaces
//! them (`--conf-path`).
//!
//! ```text
//! server ──> greeting, tables, 0        table  = number, name, capabilities, count, rules
//! client ──> updates, 0                 update = number, count, rules
//! ```
//!
//! | message | fields, in bytes |
//! |---|---|
//! | greeting | magic 8, version 4, length of a table's name 4, length of an interface's name 4 |
//! | table | number 1, name 128, capabilities 4, count 4, rules of 56 bytes |
//! | update | number 1, count 4, rules of 56 bytes |
//! | rule | listening address 16, target 16, interface 16, first port 2, last port 2, first port of the target 2, protocol 1, flags 1 |
//!
//! Integers are big-endian. IPv4 addresses are mapped to IPv6. The server sends greeting and tables unasked. There is no
//! answer to an update: it is in force when the server closes the connection.
//!
//! A rule's values come from a client and are checked once, by [`Rule::parse`]. Both parsers take as many bytes as there
//! are, and return `None` as long as the message is incomplete. They allocate at most [`RULES_MAX`] rules for a table.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::forward_spec::{Listen, Mapping};
use ringfence_sys::numbers::bounded;

/// Version of the protocol. Version 1 had rules without a target.
const VERSION: u32 = 2;
const MAGIC: &[u8; 8] = b"basil:s\0";
const GREETING_SIZE: usize = 20;
const NAME_SIZE: usize = 128;
const INTERFACE_SIZE: usize = 16;
/// Length of a rule in bytes.
pub const RULE_SIZE: usize = 56;
/// Maximum number of rules of a table.
pub const RULES_MAX: usize = 255;
/// Maximum number of tables.
const TABLES_MAX: usize = 3;
/// Number that ends a message.
const END: u8 = 0;
/// Maximum length of a client's message in bytes.
pub const UPDATE_MAX: usize = TABLES_MAX * (5 + RULES_MAX * RULE_SIZE) + 1;
/// Maximum length of a server's message in bytes.
pub const TABLES_SIZE_MAX: usize =
    GREETING_SIZE + TABLES_MAX * (9 + NAME_SIZE + RULES_MAX * RULE_SIZE) + 1;

/// Table of the ports of the host that lead to the namespace or the machine: its number and name.
pub const INBOUND: (u8, &str) = (1, "HOST");

/// Capabilities of a table: rules that it can have.
pub mod capabilities {
    pub const IPV4: u32 = 1;
    pub const IPV6: u32 = 2;
    pub const TCP: u32 = 4;
    pub const UDP: u32 = 8;
}

const FLAG_BOTH_FAMILIES: u8 = 1;
const FLAG_IS_OPTIONAL: u8 = 2;
const FLAG_FOLLOWS_LISTENERS: u8 = 4;
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;

/// Reasons for which a message is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    #[error("the greeting is none of pasta's")]
    Greeting,
    #[error("protocol version {0} is not {VERSION}")]
    Version(u32),
    #[error("names have other lengths than {NAME_SIZE} and {INTERFACE_SIZE} bytes")]
    Lengths,
    #[error("more than {RULES_MAX} rules, or {TABLES_MAX} tables")]
    TooMany,
    #[error("table {0} comes twice")]
    Twice(u8),
    #[error("a name is no text of ASCII characters with a zero byte behind it")]
    Name,
    #[error("{0} is no protocol of a rule: 6 or 17")]
    Protocol(u8),
    #[error("unknown flags {0:#x}")]
    Flags(u8),
    #[error("no range of ports from 1: {first}-{last} to {to}")]
    Ports { first: u16, last: u16, to: u16 },
    #[error("a rule of both families has an address of its own")]
    Families,
}

/// Forwarding rule: ports of one protocol that lead to ports of the other side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub is_udp: bool,
    /// Address to listen at; `None` for all addresses of both families.
    pub address: Option<IpAddr>,
    /// Address to which connections lead, in place of the other side's own.
    pub target: Option<IpAddr>,
    pub interface: Option<String>,
    pub first: u16,
    pub last: u16,
    /// Port to which `first` leads.
    pub to: u16,
    /// Set if ports of the range may be missing.
    pub is_optional: bool,
    /// Set if a port is open only while the other side has a listener there.
    pub follows_listeners: bool,
}

impl Rule {
    /// Parses a rule, and checks all of its values.
    ///
    /// # Errors
    ///
    /// Returns the first value that is none of the protocol's.
    pub fn parse(bytes: &[u8; RULE_SIZE]) -> Result<Rule, RuleError> {
        let mut rest = Reader(bytes);
        let (address, target) = (rest.address(), rest.address());
        let interface = name(rest.take(INTERFACE_SIZE))?;
        let (first, last, to) = (rest.u16(), rest.u16(), rest.u16());
        let (protocol, flags) = (rest.u8(), rest.u8());
        let is_udp = match protocol {
            PROTOCOL_TCP => false,
            PROTOCOL_UDP => true,
            other => return Err(RuleError::Protocol(other)),
        };
        let known = FLAG_BOTH_FAMILIES | FLAG_IS_OPTIONAL | FLAG_FOLLOWS_LISTENERS;
        if flags & !known != 0 {
            return Err(RuleError::Flags(flags & !known));
        }
        let fits = |last_offset: u16| to.checked_add(last_offset).is_some();
        if first == 0 || to == 0 || !last.checked_sub(first).is_some_and(fits) {
            return Err(RuleError::Ports { first, last, to });
        }
        let has_both = flags & FLAG_BOTH_FAMILIES != 0;
        if has_both && address != Ipv6Addr::UNSPECIFIED {
            return Err(RuleError::Families);
        }
        Ok(Rule {
            is_udp,
            address: (!has_both).then_some(address),
            target: Some(target).filter(|ip| !ip.is_unspecified()),
            interface: Some(interface).filter(|name| !name.is_empty()),
            first,
            last,
            to,
            is_optional: flags & FLAG_IS_OPTIONAL != 0,
            follows_listeners: flags & FLAG_FOLLOWS_LISTENERS != 0,
        })
    }

    /// Appends the bytes of the rule.
    pub fn write(&self, to: &mut Vec<u8>) {
        let any = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        for ip in [self.address, self.target] {
            let mapped = match ip.unwrap_or(any) {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            to.extend_from_slice(&mapped.octets());
        }
        write_name(self.interface.as_deref().unwrap_or(""), INTERFACE_SIZE, to);
        for port in [self.first, self.last, self.to] {
            to.extend_from_slice(&port.to_be_bytes());
        }
        let flags = [
            (self.address.is_none(), FLAG_BOTH_FAMILIES),
            (self.is_optional, FLAG_IS_OPTIONAL),
            (self.follows_listeners, FLAG_FOLLOWS_LISTENERS),
        ];
        let flags = flags.iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag);
        to.push(if self.is_udp { PROTOCOL_UDP } else { PROTOCOL_TCP });
        to.push(flags.sum());
    }

    /// Returns the rules of an option such as `-t`: one for each range without excluded ports. Without an address they
    /// are of the families that the capabilities name.
    pub fn of_option(is_udp: bool, listen: &Listen, capabilities: u32) -> Vec<Rule> {
        let has = |one: u32| capabilities & one != 0;
        let any = match (has(capabilities::IPV4), has(capabilities::IPV6)) {
            (true, false) => Some(IpAddr::from(Ipv4Addr::UNSPECIFIED)),
            (false, true) => Some(IpAddr::from(Ipv6Addr::UNSPECIFIED)),
            _ => None,
        };
        let rule = |mapping: &Mapping, port: u16| Rule {
            is_udp,
            address: listen.address.or(any),
            target: mapping.address,
            interface: listen.interface.clone(),
            first: port,
            last: port,
            to: mapping.to.first + (port - mapping.from.first),
            is_optional: false,
            follows_listeners: listen.auto,
        };
        let mut rules = Vec::new();
        for mapping in &listen.mappings {
            let mut range: Option<Rule> = None;
            for port in mapping.from.first..=mapping.from.last {
                match &mut range {
                    _ if listen.is_excluded(port) => rules.extend(range.take()),
                    Some(rule) => rule.last = port,
                    None => range = Some(rule(mapping, port)),
                }
            }
            rules.extend(range);
        }
        rules
    }

    /// Returns `true` if both rules listen at the same address and port.
    pub fn conflicts_with(&self, other: &Rule) -> bool {
        let is_same_address = match (self.address, other.address) {
            (Some(one), Some(other)) => one == other,
            (None, Some(ip)) | (Some(ip), None) => ip.is_unspecified(),
            (None, None) => true,
        };
        self.is_udp == other.is_udp
            && is_same_address
            && self.interface == other.interface
            && self.first <= other.last
            && other.first <= self.last
    }

    /// Iterates over the ports: the listening port, and the port to which it leads.
    pub fn ports(&self) -> impl Iterator<Item = (u16, u16)> + use<> {
        let (first, to) = (self.first, self.to);
        (first..=self.last).map(move |port| (port, to + (port - first)))
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rule { first, last, to, .. } = *self;
        f.write_str(if self.is_udp { "udp " } else { "tcp " })?;
        match (self.address, &self.interface) {
            (Some(ip), Some(name)) => write!(f, "{ip}%{name}")?,
            (Some(ip), None) => write!(f, "{ip}")?,
            (None, Some(name)) => write!(f, "%{name}")?,
            (None, None) => f.write_str("*")?,
        }
        f.write_str(" ")?;
        range(f, first, last)?;
        f.write_str(" -> ")?;
        if let Some(ip) = self.target {
            write!(f, "{ip} ")?;
        }
        range(f, to, to + (last - first))
    }
}

fn range(f: &mut fmt::Formatter<'_>, first: u16, last: u16) -> fmt::Result {
    if first == last { write!(f, "{first}") } else { write!(f, "{first}-{last}") }
}

/// Table of rules, as a server sends it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleTable {
    pub number: u8,
    pub name: String,
    /// Sum of [`capabilities`].
    pub capabilities: u32,
    pub rules: Vec<Rule>,
}

/// Returns the message of a server.
///
/// A table beyond the limits of the protocol is cut.
pub fn write_tables(tables: &[RuleTable]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    for number in [VERSION as usize, NAME_SIZE, INTERFACE_SIZE] {
        write_count(number, &mut bytes);
    }
    for table in tables.iter().take(TABLES_MAX) {
        bytes.push(table.number);
        write_name(&table.name, NAME_SIZE, &mut bytes);
        bytes.extend_from_slice(&table.capabilities.to_be_bytes());
        write_rules(&table.rules, &mut bytes);
    }
    bytes.push(END);
    bytes
}

/// Parses the message of a server. Returns `None` if it is incomplete.
///
/// # Errors
///
/// Returns the first rule of the protocol that the message breaks.
pub fn parse_tables(bytes: &[u8]) -> Result<Option<Vec<RuleTable>>, RuleError> {
    if bytes.len() < GREETING_SIZE {
        return Ok(None);
    }
    let mut rest = Reader(bytes);
    if rest.take(MAGIC.len()) != MAGIC {
        return Err(RuleError::Greeting);
    }
    match rest.u32() {
        VERSION => {}
        other => return Err(RuleError::Version(other)),
    }
    if [rest.u32() as usize, rest.u32() as usize] != [NAME_SIZE, INTERFACE_SIZE] {
        return Err(RuleError::Lengths);
    }
    let mut tables: Vec<RuleTable> = Vec::new();
    while let Some(number) = rest.next_number() {
        if number == END {
            return Ok(Some(tables));
        }
        check_number(number, tables.iter().map(|table| table.number))?;
        if rest.0.len() < NAME_SIZE + 8 {
            return Ok(None);
        }
        let name = name(rest.take(NAME_SIZE))?;
        let capabilities = rest.u32();
        let Some(rules) = rest.rules()? else { return Ok(None) };
        tables.push(RuleTable { number, name, capabilities, rules });
    }
    Ok(None)
}

/// New rules of a table, as a client sends them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    pub number: u8,
    pub rules: Vec<Rule>,
}

/// Returns the message of a client. Tables that are not named keep no rule.
pub fn write_updates(updates: &[Update]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for update in updates.iter().take(TABLES_MAX) {
        bytes.push(update.number);
        write_rules(&update.rules, &mut bytes);
    }
    bytes.push(END);
    bytes
}

/// Parses the message of a client. Returns `None` if it is incomplete.
///
/// # Errors
///
/// Returns the first rule of the protocol that the message breaks.
pub fn parse_updates(bytes: &[u8]) -> Result<Option<Vec<Update>>, RuleError> {
    let mut rest = Reader(bytes);
    let mut updates: Vec<Update> = Vec::new();
    while let Some(number) = rest.next_number() {
        if number == END {
            return Ok(Some(updates));
        }
        check_number(number, updates.iter().map(|update| update.number))?;
        if rest.0.len() < 4 {
            return Ok(None);
        }
        let Some(rules) = rest.rules()? else { return Ok(None) };
        updates.push(Update { number, rules });
    }
    Ok(None)
}

fn check_number(number: u8, before: impl ExactSizeIterator<Item = u8>) -> Result<(), RuleError> {
    let mut before = before;
    if before.len() >= TABLES_MAX {
        Err(RuleError::TooMany)
    } else if before.any(|one| one == number) {
        Err(RuleError::Twice(number))
    } else {
        Ok(())
    }
}

fn write_rules(rules: &[Rule], to: &mut Vec<u8>) {
    let rules = &rules[..rules.len().min(RULES_MAX)];
    write_count(rules.len(), to);
    rules.iter().for_each(|rule| rule.write(to));
}

fn write_count(count: usize, to: &mut Vec<u8>) {
    to.extend_from_slice(&bounded(count, u32::MAX).to_be_bytes());
}

/// Appends a name with zero bytes up to `size` bytes. A longer name is cut.
fn write_name(name: &str, size: usize, to: &mut Vec<u8>) {
    let end = to.len() + size;
    to.extend_from_slice(&name.as_bytes()[..name.len().min(size - 1)]);
    to.resize(end, 0);
}

fn name(bytes: &[u8]) -> Result<String, RuleError> {
    let end = bytes.iter().position(|byte| *byte == 0).ok_or(RuleError::Name)?;
    let text = &bytes[..end];
    let is_text = text.iter().all(u8::is_ascii_graphic);
    is_text.then(|| String::from_utf8_lossy(text).into_owned()).ok_or(RuleError::Name)
}

/// Rest of a message. Fields of fixed size are read only after a check of the length.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(len);
        self.0 = rest;
        head
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N));
        bytes
    }

    fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.array())
    }

    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.array())
    }

    /// Reads an address. An unspecified IPv4 address stays one of IPv4.
    fn address(&mut self) -> IpAddr {
        let ip = Ipv6Addr::from(self.array::<16>());
        ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), |ip: Ipv4Addr| IpAddr::V4(ip))
    }

    fn next_number(&mut self) -> Option<u8> {
        let (number, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*number)
    }

    /// Reads a count and as many rules. The count must be there.
    fn rules(&mut self) -> Result<Option<Vec<Rule>>, RuleError> {
        let count = self.u32() as usize;
        if count > RULES_MAX {
            return Err(RuleError::TooMany);
        }
        if self.0.len() < count * RULE_SIZE {
            return Ok(None);
        }
        (0..count).map(|_| Rule::parse(&self.array())).collect::<Result<_, _>>().map(Some)
    }
}

/// Functions of the fuzz target.
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing {
    use super::{RULES_MAX, parse_tables, parse_updates, write_tables, write_updates};

    /// Parses arbitrary bytes as the message of a client and of a server. An accepted message has valid rules, and
    /// survives a round trip.
    ///
    /// # Panics
    ///
    /// Panics if one of these rules is broken.
    pub fn port_rules(data: &[u8]) {
        if let Ok(Some(updates)) = parse_updates(data) {
            for rule in updates.iter().flat_map(|update| &update.rules) {
                assert!(rule.ports().all(|(port, to)| port > 0 && to > 0), "{rule}");
            }
            assert!(updates.iter().all(|update| update.rules.len() <= RULES_MAX));
            assert_eq!(parse_updates(&write_updates(&updates)), Ok(Some(updates)));
        }
        if let Ok(Some(tables)) = parse_tables(data) {
            assert_eq!(parse_tables(&write_tables(&tables)), Ok(Some(tables)));
        }
    }
}

#[cfg(test)]
mod tests;

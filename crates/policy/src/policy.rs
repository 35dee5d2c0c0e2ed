//! Policy: an ordered set of rules, and the verdicts on names and addresses.
//!
//! A rule that denies wins over every rule that allows, in any order. With a rule that allows, everything
//! else is denied; with none, everything else is allowed. Look-ups take hash tables: their cost does not
//! grow with the number of rules.

use core::net::{IpAddr, SocketAddr};
use std::collections::HashMap;

use smallvec::SmallVec;

use ringfence_base::address::IpPrefix;

use crate::name::HostName;
use crate::ranges::is_special;
use crate::rule::{
    Action, LimitKind, Limits, Protocol, Rule, RuleError, RuleFault, Target, destination,
};

/// Maximum number of rules of a policy.
pub const RULES_MAX: usize = 20_000;

/// Names of public resolvers that answer DNS over HTTPS. A wildcard above such a name does not include it.
const KNOWN_DOH: [&str; 18] = [
    "dns.google",
    "dns64.dns.google",
    "8888.google",
    "cloudflare-dns.com",
    "one.one.one.one",
    "dns.quad9.net",
    "dns9.quad9.net",
    "dns10.quad9.net",
    "dns11.quad9.net",
    "doh.opendns.com",
    "dns.nextdns.io",
    "dns.adguard-dns.com",
    "doh.cleanbrowsing.org",
    "dns.mullvad.net",
    "freedns.controld.com",
    "doh.dns.sb",
    "dns.alidns.com",
    "doh.pub",
];

/// Text of one rule, its effect and its origin.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RuleSource {
    pub action: Action,
    pub text: String,
    /// Place where the user wrote the rule: `--allow`, or `FILE:LINE`.
    pub origin: String,
}

/// Policy in the form in which processes pass it on. [`Policy::new`] parses it.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PolicySource {
    pub rules: Vec<RuleSource>,
    /// Verdict on destinations that no rule covers. `None`: denied if a rule allows something, else allowed.
    pub default: Option<Action>,
    /// Refuses TLS without a readable name, and unknown protocols on ports 80 and 443.
    pub strict_sni: bool,
}

impl PolicySource {
    /// Returns `true` if the policy restricts nothing.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty() && self.default != Some(Action::Deny)
    }

    /// Appends the rules of another policy. Its settings win where they are stricter.
    pub fn append(&mut self, other: PolicySource) {
        self.rules.extend(other.rules);
        self.strict_sni |= other.strict_sni;
        self.default = match (self.default, other.default) {
            (Some(Action::Deny), _) | (_, Some(Action::Deny)) => Some(Action::Deny),
            (own, other) => own.or(other),
        };
    }
}

/// Reasons for which rules do not form a policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    #[error("{}: {error}\n{}", .rule.origin, .error.caret(&.rule.text))]
    Rule { rule: Box<RuleSource>, error: RuleError },
    #[error("{0} rules; a policy has at most {RULES_MAX}")]
    TooMany(usize),
}

/// Reasons for a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    Rule(usize),
    /// No rule covers the destination.
    NoRule,
    /// No current DNS answer for an allowed name contains the address.
    NoPin,
    /// The address is private, link-local or reserved, and no rule for addresses covers it.
    Special,
    /// The name is a known resolver for DNS over HTTPS, and only a wildcard covers it.
    KnownDoh,
    /// The DNS answer for a public name contains a private address.
    Rebinding,
    /// A name below a wildcard is too long, or there are too many of them in a short time.
    WildcardLimit,
    /// The name server was asked in a way that the gate does not pass on.
    DnsForm,
    /// A rule covers the name, but UDP to a web port is no QUIC of version 1 or 2, which shows its name.
    Quic,
    /// The first bytes of the connection are a malformed TLS, QUIC or HTTP message.
    Malformed,
    /// The policy requires a readable name, and the connection shows none.
    NoReadableName,
    /// The query asks for a verdict of the policy ([`crate::refusal`]).
    Why,
    /// No rule covers the destination, and the question about it has this result.
    Asked(AskResult),
    /// The guest has used up what this rule allows.
    Limit(usize, LimitKind),
}

/// Results of a question about a destination that no rule covers ([`crate::approvals`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AskResult {
    Approved,
    Denied,
    /// Nobody has answered in time.
    Unanswered,
    /// Nobody can answer.
    Unattended,
    /// Too many questions wait for answers, or were asked.
    TooMany,
}

/// Decision on a name, an address or a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Verdict {
    pub action: Action,
    pub cause: Cause,
}

impl Verdict {
    pub(crate) fn allow(cause: Cause) -> Verdict {
        Verdict { action: Action::Allow, cause }
    }

    pub(crate) fn deny(cause: Cause) -> Verdict {
        Verdict { action: Action::Deny, cause }
    }

    /// Returns `true` if the verdict is to allow.
    pub fn is_allowed(self) -> bool {
        self.action == Action::Allow
    }
}

struct RuleEntry {
    rule: Rule,
    source: RuleSource,
}

/// Indices of the rules for one name or prefix. Most have one, which then needs no memory of its own.
type Indices = SmallVec<[usize; 2]>;

/// Parsed rules with their indices.
pub struct Policy {
    entries: Vec<RuleEntry>,
    default: Action,
    strict_sni: bool,
    exact: HashMap<HostName, Indices>,
    below: HashMap<HostName, Indices>,
    prefixes: HashMap<IpPrefix, Indices>,
    /// Lengths of the prefixes in use, for IPv4 and IPv6.
    lengths: [Vec<u8>; 2],
    echo: Vec<usize>,
    /// Set if a rule denies a name. Every connection asks for it.
    denies_names: bool,
    /// Set if a rule has limits.
    has_limits: bool,
}

/// Parses a rule, whose limits must suit its action.
fn parse(source: &RuleSource) -> Result<Rule, RuleError> {
    let rule: Rule = source.text.parse()?;
    if source.action == Action::Deny && !rule.limits.are_none() {
        let at = destination(&source.text).len() + 1;
        return Err(RuleError { at, fault: RuleFault::LimitOfDenial });
    }
    Ok(rule)
}

impl Policy {
    /// Parses the rules of a policy.
    ///
    /// # Errors
    ///
    /// Returns the first rule that is malformed, with the position of the error.
    pub fn new(source: PolicySource) -> Result<Policy, PolicyError> {
        if source.rules.len() > RULES_MAX {
            return Err(PolicyError::TooMany(source.rules.len()));
        }
        let allows = source.rules.iter().any(|rule| rule.action == Action::Allow);
        let mut policy = Policy {
            entries: Vec::new(),
            default: source.default.unwrap_or(if allows { Action::Deny } else { Action::Allow }),
            strict_sni: source.strict_sni,
            exact: HashMap::new(),
            below: HashMap::new(),
            prefixes: HashMap::new(),
            lengths: [Vec::new(), Vec::new()],
            echo: Vec::new(),
            denies_names: false,
            has_limits: false,
        };
        for source in source.rules {
            match parse(&source) {
                Ok(rule) => policy.add(rule, source),
                Err(error) => {
                    return Err(PolicyError::Rule { rule: Box::new(source), error });
                }
            }
        }
        Ok(policy)
    }

    fn add(&mut self, rule: Rule, source: RuleSource) {
        let index = self.entries.len();
        self.has_limits |= !rule.limits.are_none();
        self.denies_names |= rule.is_for_names() && source.action == Action::Deny;
        let list = match &rule.target {
            Target::Name(name) => self.exact.entry(name.clone()).or_default(),
            Target::Below(name) => self.below.entry(name.clone()).or_default(),
            Target::Domain(name) => {
                self.exact.entry(name.clone()).or_default().push(index);
                self.below.entry(name.clone()).or_default()
            }
            Target::Icmp => {
                self.echo.push(index);
                return self.entries.push(RuleEntry { rule, source });
            }
            Target::Prefix(prefix) => {
                let lengths = &mut self.lengths[usize::from(prefix.ip.is_ipv6())];
                if !lengths.contains(&prefix.len) {
                    lengths.push(prefix.len);
                }
                self.prefixes.entry(*prefix).or_default()
            }
        };
        list.push(index);
        self.entries.push(RuleEntry { rule, source });
    }

    /// Returns the verdict on destinations that no rule covers.
    pub fn default_action(&self) -> Action {
        self.default
    }

    /// Returns `true` if TLS connections must show a readable name.
    pub fn is_strict(&self) -> bool {
        self.strict_sni
    }

    /// Returns `true` if a verdict rests on a rule that names its protocol.
    pub fn names_protocol(&self, cause: Cause) -> bool {
        let Cause::Rule(index) = cause else { return false };
        self.entries.get(index).is_some_and(|entry| entry.rule.protocol.is_some())
    }

    /// Returns `true` if a rule has limits.
    pub fn has_limits(&self) -> bool {
        self.has_limits
    }

    /// Returns the limits of a rule.
    pub fn limits(&self, index: usize) -> Limits {
        self.entries.get(index).map(|entry| entry.rule.limits).unwrap_or_default()
    }

    /// Returns the rules with limits that cover a flow which was allowed for this cause: those for names if a rule for names has
    /// allowed it, else those for addresses. Limits of all of them apply, in any order.
    pub fn limited(
        &self,
        cause: Cause,
        name: Option<&HostName>,
        to: SocketAddr,
        protocol: Protocol,
    ) -> Vec<usize> {
        let Cause::Rule(index) = cause else { return Vec::new() };
        let Some(entry) = self.entries.get(index).filter(|_| self.has_limits) else {
            return Vec::new();
        };
        let applies = |index: &usize| {
            self.entries.get(*index).is_some_and(|entry| {
                entry.source.action == Action::Allow
                    && !entry.rule.limits.are_none()
                    && entry.rule.covers(to.port(), protocol)
            })
        };
        match name.filter(|_| entry.rule.is_for_names()) {
            Some(name) => self.of_name(name).filter(applies).collect(),
            None => self.of_address(to.ip()).filter(applies).collect(),
        }
    }

    /// Returns the number of rules.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns `true` if there is no rule.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the rule's own copy of a name if a rule has exactly this one. Copies of the name then share its memory.
    pub(crate) fn shared<'a>(&'a self, name: &'a HostName) -> &'a HostName {
        self.exact.get_key_value(name).map_or(name, |(own, _)| own)
    }

    /// Returns the text of a rule and its origin.
    pub fn source(&self, index: usize) -> Option<&RuleSource> {
        self.entries.get(index).map(|entry| &entry.source)
    }

    /// Returns the policy in the form in which processes pass it on.
    pub fn to_source(&self) -> PolicySource {
        PolicySource {
            rules: self.entries.iter().map(|entry| entry.source.clone()).collect(),
            default: Some(self.default),
            strict_sni: self.strict_sni,
        }
    }

    /// Returns `true` if a rule denies names: connections to any address are then inspected.
    pub fn denies_names(&self) -> bool {
        self.denies_names
    }

    fn denies(&self, index: usize) -> bool {
        self.entries.get(index).is_some_and(|entry| entry.source.action == Action::Deny)
    }

    /// Iterates over the rules that cover a name, on any port.
    fn of_name(&self, name: &HostName) -> impl Iterator<Item = usize> {
        let exact = self.exact.get(name).into_iter().flatten().copied();
        let below = name.parents().filter_map(|parent| self.below.get(parent)).flatten().copied();
        exact.chain(below)
    }

    /// Returns `true` if a wildcard may not stand for this name: it is a known resolver, and the wildcard
    /// does not name the resolver itself.
    fn is_hidden_doh(&self, name: &HostName, index: usize) -> bool {
        let target = self.entries.get(index).map(|entry| &entry.rule.target);
        let Some(Target::Below(parent) | Target::Domain(parent)) = target else { return false };
        let is_or_below = |name: &HostName, known: &str| {
            name.as_str() == known || name.parents().any(|parent| parent == known)
        };
        KNOWN_DOH.iter().any(|known| is_or_below(name, known) && !is_or_below(parent, known))
    }

    /// Decides by the rules with these indices: `concerns` selects those that deny, `covers` those that allow.
    fn decide(
        &self,
        rules: impl Iterator<Item = usize>,
        concerns: impl Fn(&Rule) -> bool,
        covers: impl Fn(&Rule) -> bool,
    ) -> Option<Verdict> {
        let mut allowed = None;
        for index in rules {
            let Some(entry) = self.entries.get(index) else { continue };
            match entry.source.action {
                Action::Deny if concerns(&entry.rule) => {
                    return Some(Verdict::deny(Cause::Rule(index)));
                }
                Action::Allow if allowed.is_none() && covers(&entry.rule) => allowed = Some(index),
                _ => {}
            }
        }
        allowed.map(|index| Verdict::allow(Cause::Rule(index)))
    }

    /// Returns the verdict on a destination that no rule covers.
    pub fn otherwise(&self, protocol: Protocol) -> Verdict {
        let verdict = Verdict { action: self.default, cause: Cause::NoRule };
        self.with_echo(verdict, protocol)
    }

    fn refuse_doh(&self, name: &HostName, verdict: Verdict) -> Verdict {
        match verdict {
            Verdict { action: Action::Allow, cause: Cause::Rule(index) }
                if self.is_hidden_doh(name, index) =>
            {
                Verdict::deny(Cause::KnownDoh)
            }
            other => other,
        }
    }

    /// Decides if a name may be asked for.
    pub fn resolve(&self, name: &HostName) -> Verdict {
        let verdict = self.decide(self.of_name(name), Rule::is_for_everything, |_| true);
        self.refuse_doh(name, verdict.unwrap_or_else(|| self.otherwise(Protocol::Tcp)))
    }

    /// Returns the parent of the wildcard that a name needs. `None` if a rule has the name itself.
    pub fn wildcard_of(&self, name: &HostName) -> Option<&HostName> {
        let is_exact = |index: &usize| !self.denies(*index);
        if self.exact.get(name).is_some_and(|rules| rules.iter().any(is_exact)) {
            return None;
        }
        name.parents().find_map(|parent| {
            let (parent, rules) = self.below.get_key_value(parent)?;
            rules.iter().any(is_exact).then_some(parent)
        })
    }

    /// Decides on a connection to a name.
    pub fn name(&self, name: &HostName, port: u16, protocol: Protocol) -> Verdict {
        let concerns = |rule: &Rule| rule.concerns(port, protocol);
        let covers = |rule: &Rule| rule.covers(port, protocol);
        let verdict = self.decide(self.of_name(name), concerns, covers);
        let verdict =
            self.refuse_doh(name, verdict.unwrap_or_else(|| self.otherwise(Protocol::Tcp)));
        self.with_echo(verdict, protocol)
    }

    /// Applies the rules `icmp` to a verdict on the destination of echo requests.
    fn with_echo(&self, verdict: Verdict, protocol: Protocol) -> Verdict {
        if protocol != Protocol::Icmp || !verdict.is_allowed() {
            return verdict;
        }
        let echo = self.decide(self.echo.iter().copied(), |_| true, |_| true);
        match echo {
            Some(denied) if !denied.is_allowed() => denied,
            None if self.default == Action::Deny => Verdict::deny(Cause::NoRule),
            _ => verdict,
        }
    }

    fn of_address(&self, ip: IpAddr) -> impl Iterator<Item = usize> {
        let lengths = &self.lengths[usize::from(ip.is_ipv6())];
        let rules = lengths
            .iter()
            .filter_map(move |&len| self.prefixes.get(&IpPrefix::new(ip, len).masked()));
        rules.flatten().copied()
    }

    /// Decides on a connection to an address by the rules for addresses. Returns `None` if none covers it.
    pub fn address(&self, ip: IpAddr, port: u16, protocol: Protocol) -> Option<Verdict> {
        let concerns = |rule: &Rule| rule.concerns(port, protocol);
        let covers = |rule: &Rule| rule.covers(port, protocol);
        let verdict = self.decide(self.of_address(ip), concerns, covers)?;
        Some(self.with_echo(verdict, protocol))
    }

    /// Returns `true` if DNS answers for public names may contain the address: it is public, or a rule for
    /// addresses allows it.
    pub fn accepts_in_answers(&self, ip: IpAddr) -> bool {
        let mut rules = self.of_address(ip);
        !is_special(ip) || self.default == Action::Allow || rules.any(|index| !self.denies(index))
    }

    /// Describes a cause for a log line or an error message.
    pub fn describe(&self, cause: Cause) -> String {
        let text = match cause {
            Cause::Rule(index) => {
                let Some(source) = self.source(index) else { return "a former rule".into() };
                let action = if source.action == Action::Allow { "allow" } else { "deny" };
                return format!("{action} {} ({})", source.text, source.origin);
            }
            Cause::Limit(index, kind) => {
                return format!("limit on {kind} of {}", self.describe(Cause::Rule(index)));
            }
            Cause::NoRule => "no rule",
            Cause::NoPin => "no current answer for an allowed name has this address",
            Cause::Special => "private address, which only a rule for addresses opens",
            Cause::KnownDoh => "known DNS over HTTPS resolver, which a wildcard does not include",
            Cause::Rebinding => "private address in the answer for a public name",
            Cause::WildcardLimit => "limit of names below a wildcard",
            Cause::DnsForm => "form of DNS query that is not passed on",
            Cause::Quic => "UDP to a web port that is not QUIC of version 1 or 2",
            Cause::Malformed => "malformed TLS, QUIC or HTTP",
            Cause::NoReadableName => "no readable server name (--strict-sni)",
            Cause::Why => "question about the policy",
            Cause::Asked(AskResult::Approved) => "approved while the guest runs (--ask)",
            Cause::Asked(AskResult::Denied) => "no rule, and denied when asked for (--ask)",
            Cause::Asked(AskResult::Unanswered) => "no rule, and no answer in time (--ask)",
            Cause::Asked(AskResult::Unattended) => "no rule, and nobody to ask (--ask)",
            Cause::Asked(AskResult::TooMany) => "no rule, and too many questions (--ask)",
        };
        text.to_owned()
    }

    /// Describes a cause to the guest: as [`Policy::describe`], without the place where a rule is written.
    pub fn describe_to_guest(&self, cause: Cause) -> String {
        match cause {
            Cause::Rule(index) => match self.source(index) {
                Some(source) if source.action == Action::Allow => format!("allow {}", source.text),
                Some(source) => format!("deny {}", source.text),
                None => self.describe(cause),
            },
            Cause::Limit(index, kind) => {
                format!("limit on {kind} of {}", self.describe_to_guest(Cause::Rule(index)))
            }
            _ => self.describe(cause),
        }
    }

    /// Returns the rule that would allow what was denied for this cause. `to` is the destination of a flow; a name that was
    /// only asked for gets the port of HTTPS. `None`: a rule that denies must go, or no rule helps.
    pub fn missing_rule(
        &self,
        cause: Cause,
        name: Option<&HostName>,
        to: Option<(SocketAddr, Protocol)>,
    ) -> Option<String> {
        let is_about_name =
            matches!(cause, Cause::NoRule | Cause::KnownDoh | Cause::Quic | Cause::Asked(_));
        if !is_about_name && !matches!(cause, Cause::NoPin | Cause::Special) {
            return None;
        }
        let host = match (name.filter(|_| is_about_name), to) {
            (Some(name), _) => name.to_string(),
            (None, Some((SocketAddr::V4(to), _))) => to.ip().to_string(),
            (None, Some((SocketAddr::V6(to), _))) => format!("[{}]", to.ip()),
            (None, None) => return None,
        };
        Some(match to {
            Some((_, Protocol::Icmp)) => "icmp".to_owned(),
            Some((to, Protocol::Udp)) => format!("{host}:{}/udp", to.port()),
            Some((to, Protocol::Tcp)) => format!("{host}:{}", to.port()),
            None => format!("{host}:443"),
        })
    }
}

#[cfg(test)]
pub(crate) mod tests;

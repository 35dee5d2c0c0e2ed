//! Approvals: destinations that a person or a program has allowed while the guest runs.
//!
//! A [`Subject`] is one name or one address with one port. An approved subject acts as a rule that allows it, beside those of
//! the policy: a name's addresses come from answers of the name server as ever, so no approval of a name opens an address that
//! another name has. A rule that denies wins, and so do the limits of [`is_approvable`].
//!
//! An approval holds until the policy is replaced, or until its time is over. Flows that it has opened stay then.

use core::fmt;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use std::collections::HashMap;

use smallvec::SmallVec;

use crate::name::HostName;
use crate::ranges::is_approvable;
use crate::rule::Protocol;

/// Maximum number of approvals of a guest.
pub const APPROVALS_MAX: usize = 4096;
/// Port that the question about a name has which was only asked for: that of HTTPS.
pub const PORT_OF_NAMES: u16 = 443;

/// Host of a subject.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Host {
    Name(HostName),
    Address(IpAddr),
}

/// Destination that can be approved.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Subject {
    pub host: Host,
    /// Port, never 0.
    pub port: u16,
    pub protocol: Protocol,
}

impl Subject {
    /// Returns the subject of a name that the guest has asked for. `None` if no question about it makes sense: names below
    /// `arpa` stand for addresses.
    pub fn of_query(name: &HostName) -> Option<Subject> {
        let is_reverse = name.as_str() == "arpa" || name.parents().last() == Some("arpa");
        let host = Host::Name(name.clone());
        (!is_reverse).then_some(Subject { host, port: PORT_OF_NAMES, protocol: Protocol::Tcp })
    }

    /// Returns the subject of a flow, to a name if one is known. `None` if it can never be approved.
    pub fn of_flow(name: Option<&HostName>, to: SocketAddr, protocol: Protocol) -> Option<Subject> {
        let host = name.cloned().map_or(Host::Address(to.ip()), Host::Name);
        let is_possible = protocol != Protocol::Icmp && is_approvable(to.ip());
        Subject { host, port: to.port(), protocol }.checked().filter(|_| is_possible)
    }

    /// Returns the subject unless it can never be approved, whoever made it.
    pub fn checked(self) -> Option<Subject> {
        let is_approvable = match &self.host {
            Host::Name(_) => true,
            Host::Address(ip) => is_approvable(*ip),
        };
        (is_approvable && self.port > 0 && self.protocol != Protocol::Icmp).then_some(self)
    }

    /// Returns the name, unless the subject is an address.
    pub fn name(&self) -> Option<&HostName> {
        match &self.host {
            Host::Name(name) => Some(name),
            Host::Address(_) => None,
        }
    }
}

/// Writes the rule that an approval adds.
impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Name(name) => write!(f, "{name}:{}", self.port)?,
            Host::Address(ip) => write!(f, "{}", SocketAddr::new(*ip, self.port))?,
        }
        if self.protocol == Protocol::Udp { f.write_str("/udp") } else { Ok(()) }
    }
}

/// Approval of one port of a host.
#[derive(Clone, Copy, Debug)]
struct Approval {
    port: u16,
    /// Approved for UDP alone.
    is_udp: bool,
    /// End of its time. `None`: it has none.
    until: Option<Duration>,
}

impl Approval {
    fn covers(&self, port: u16, protocol: Protocol) -> bool {
        let has_protocol = match protocol {
            Protocol::Tcp => !self.is_udp,
            Protocol::Udp => true,
            Protocol::Icmp => false,
        };
        self.port == port && has_protocol
    }
}

/// Approvals of one guest. Times are those of the caller's clock.
#[derive(Debug, Default)]
pub struct Approvals {
    by_host: HashMap<Host, SmallVec<[Approval; 2]>>,
    count: usize,
}

impl Approvals {
    /// Adds an approval, until a time if one is given. Returns `false` if there are too many.
    pub fn add(&mut self, subject: &Subject, until: Option<Duration>) -> bool {
        let is_udp = subject.protocol == Protocol::Udp;
        let approvals = self.by_host.entry(subject.host.clone()).or_default();
        let is_same = |known: &&mut Approval| known.port == subject.port && known.is_udp == is_udp;
        if let Some(known) = approvals.iter_mut().find(is_same) {
            known.until = match (known.until, until) {
                (Some(known), Some(until)) => Some(known.max(until)),
                _ => None,
            };
            return true;
        }
        if self.count >= APPROVALS_MAX {
            self.by_host.retain(|_, approvals| !approvals.is_empty());
            return false;
        }
        self.count += 1;
        approvals.push(Approval { port: subject.port, is_udp, until });
        true
    }

    fn of(&self, host: &Host, now: Option<Duration>) -> impl Iterator<Item = &Approval> {
        let is_in_force = move |approval: &&Approval| match (approval.until, now) {
            (Some(until), Some(now)) => now < until,
            _ => true,
        };
        self.by_host.get(host).into_iter().flatten().filter(is_in_force)
    }

    /// Returns `true` if a name may be asked for.
    pub fn resolves(&self, name: &HostName, now: Duration) -> bool {
        // Most guests have none, and the key needs a copy of the name.
        self.count > 0 && self.of(&Host::Name(name.clone()), Some(now)).next().is_some()
    }

    /// Returns `true` if a flow to a host is approved. Without a time, approvals that are over count, too.
    pub fn covers(
        &self,
        host: impl FnOnce() -> Host,
        port: u16,
        protocol: Protocol,
        now: Option<Duration>,
    ) -> bool {
        self.count > 0 && self.of(&host(), now).any(|approval| approval.covers(port, protocol))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn name(text: &str) -> HostName {
        HostName::parse(text).unwrap()
    }

    fn of_name(text: &str, port: u16, protocol: Protocol) -> Subject {
        Subject { host: Host::Name(name(text)), port, protocol }
    }

    #[test]
    fn approval_covers_its_port_for_its_time() {
        let mut approvals = Approvals::default();
        assert!(approvals.add(&of_name("a.org", 443, Protocol::Tcp), Some(SECOND * 10)));
        assert!(approvals.add(&of_name("a.org", 53, Protocol::Udp), None));
        let covers = |approvals: &Approvals, port, protocol, now: Option<u32>| {
            let host = || Host::Name(name("a.org"));
            approvals.covers(host, port, protocol, now.map(|now| SECOND * now))
        };
        for (port, protocol, now, is_covered) in [
            (443, Protocol::Tcp, Some(9), true),
            (443, Protocol::Udp, Some(9), true),
            (443, Protocol::Tcp, Some(10), false),
            // Open flows stay.
            (443, Protocol::Tcp, None, true),
            (80, Protocol::Tcp, Some(1), false),
            (53, Protocol::Udp, Some(9999), true),
            (53, Protocol::Tcp, Some(1), false),
            (443, Protocol::Icmp, Some(1), false),
        ] {
            assert_eq!(covers(&approvals, port, protocol, now), is_covered, "{port} {protocol}");
        }
        assert!(approvals.resolves(&name("a.org"), SECOND));
        assert!(!approvals.resolves(&name("x.a.org"), SECOND));
        // An approval without an end wins, in either order.
        for until in [None, Some(SECOND)] {
            assert!(approvals.add(&of_name("a.org", 443, Protocol::Tcp), until));
            assert!(covers(&approvals, 443, Protocol::Tcp, Some(9999)));
        }
    }

    #[test]
    fn number_of_approvals_is_bounded() {
        let mut approvals = Approvals::default();
        let add = |approvals: &mut Approvals, number: usize| {
            approvals.add(&of_name(&format!("n{number}.org"), 443, Protocol::Tcp), None)
        };
        for number in 0..2 * APPROVALS_MAX {
            assert_eq!(add(&mut approvals, number), number < APPROVALS_MAX);
        }
        assert_eq!(approvals.by_host.len(), APPROVALS_MAX);
        assert!(add(&mut approvals, 0), "a known one stays");
    }

    #[test]
    fn subject_is_written_as_a_rule_that_means_it() {
        let v6 = "[2001:db8::1]:80".parse().unwrap();
        let subjects = [
            Subject::of_query(&name("a.org")),
            Subject::of_flow(Some(&name("a.org")), v6, Protocol::Udp),
            Subject::of_flow(None, v6, Protocol::Tcp),
            Subject::of_flow(None, "10.0.0.1:22".parse().unwrap(), Protocol::Tcp),
        ];
        let texts = subjects.map(|subject| subject.unwrap().to_string());
        assert_eq!(texts, ["a.org:443", "a.org:80/udp", "[2001:db8::1]:80", "10.0.0.1:22"]);
        for text in texts {
            assert_eq!(text.parse::<crate::Rule>().unwrap().to_string(), text);
        }
        assert_eq!(Subject::of_query(&name("1.113.0.203.in-addr.arpa")), None);
    }

    #[test]
    fn metadata_link_local_and_unroutable_addresses_are_no_subject() {
        let host = name("a.org");
        for to in ["169.254.169.254:80", "[fe80::1]:80", "[fd00:ec2::254]:80", "127.0.0.1:80"] {
            let to = to.parse().unwrap();
            for name in [None, Some(&host)] {
                assert_eq!(Subject::of_flow(name, to, Protocol::Tcp), None, "{to}");
            }
        }
        let to = "203.0.113.1:0".parse().unwrap();
        assert_eq!(Subject::of_flow(None, to, Protocol::Icmp), None);
        assert_eq!(Subject::of_flow(None, to, Protocol::Tcp), None);
    }
}

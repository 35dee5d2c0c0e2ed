//! Open flows of a guest whose policy was replaced.
//!
//! A flow stays if the new policy allows its name, or its address by a rule. A name counts only where first bytes were read: those
//! of a connection that was opened without a policy, or under one that reads none, may have shown any name. Such a connection
//! stays if the new policy allows a new one to the same address without reading.

use core::net::SocketAddr;
use core::time::Duration;

use super::{APPROVED, Decision, Gate, Inspection, NAMED_PORTS};
use crate::approvals::Host;
use crate::first::Shown;
use crate::name::HostName;
use crate::policy::Cause;
use crate::ranges::is_approvable;
use crate::rule::{Action, Protocol};

/// State of the first bytes of an open flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FirstRead {
    /// Nobody has read them: there was no policy, or it needed none.
    #[default]
    Unread,
    /// They wait for a verdict, or have not come yet.
    Pending,
    /// They show no name.
    Nameless,
    /// They show a name.
    Named,
}

impl FirstRead {
    /// Returns the state of first bytes that show this.
    pub fn of(shown: &Shown) -> FirstRead {
        if shown.name().is_some() { FirstRead::Named } else { FirstRead::Nameless }
    }
}

impl Gate {
    /// Decides again on an open flow, after the policy was replaced. Returns `None` if it must end. A flow outlives the pin of its
    /// name. `name`: the one for which it was allowed, or that it has shown.
    pub fn decide_again(
        &self,
        to: SocketAddr,
        protocol: Protocol,
        name: Option<&HostName>,
        read: FirstRead,
        now: Duration,
    ) -> Option<Decision> {
        let is_approved = || {
            let host = || Host::Address(to.ip());
            is_approvable(to.ip()) && self.approvals.covers(host, to.port(), protocol, None)
        };
        let denied_names = self.denied_names();
        let by_name = || match self.policy.default_action() {
            Action::Allow => denied_names,
            Action::Deny => Inspection::AllowedNames,
        };
        let (verdict, inspection) = match (self.policy.address(to.ip(), to.port(), protocol), name)
        {
            (Some(verdict), _) => (verdict, denied_names),
            (None, _) if is_approved() => (APPROVED, denied_names),
            (None, Some(name)) => (self.name(name, to.port(), protocol, None), by_name()),
            (None, None) => {
                let decision = self.connect(to, protocol, now);
                (decision.verdict, decision.inspection)
            }
        };
        let decision = Decision { verdict, name: name.cloned(), inspection };
        self.keeps(&decision, to.port(), protocol, read).then_some(decision)
    }

    /// Decides again on an open TCP connection to a name ([`Gate::connect_to_name`]), after the policy was replaced. Returns `None` if
    /// it must end.
    pub fn decide_again_on_name(
        &self,
        name: &HostName,
        port: u16,
        read: FirstRead,
    ) -> Option<Decision> {
        let verdict = self.name(name, port, Protocol::Tcp, None);
        let decision = self.decision_on_name(name, verdict);
        self.keeps(&decision, port, Protocol::Tcp, read).then_some(decision)
    }

    /// Returns `true` if an open flow stays by this decision, and by the first bytes that were read. They are gone, so a flow whose
    /// first bytes the policy must read ends if nobody has read them.
    fn keeps(&self, decision: &Decision, port: u16, protocol: Protocol, read: FirstRead) -> bool {
        if !decision.verdict.is_allowed() || decision.inspection == Inspection::None {
            return decision.verdict.is_allowed();
        }
        match (read, &decision.name) {
            (FirstRead::Unread, _) => false,
            (FirstRead::Pending, _) => true,
            (FirstRead::Nameless, _) => !self.policy.is_strict() || !NAMED_PORTS.contains(&port),
            (FirstRead::Named, Some(name)) => {
                let verdict = self.policy.name(name, port, protocol);
                verdict.is_allowed() || !matches!(verdict.cause, Cause::Rule(_))
            }
            (FirstRead::Named, None) => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::tests::{NOW, gate, name, resolve};

    const TO: &str = "203.0.113.1:443";

    /// Returns `true` if a flow stays that was opened by one policy, once the other one is in force.
    fn stays(first: &str, then: &str, shown: Option<&str>, read: FirstRead) -> bool {
        let mut gate = gate(first);
        resolve(&mut gate, "a.org.", &[("a.org.", 300, "203.0.113.1")]);
        gate.replace(crate::Policy::new(crate::testing::source(then)).unwrap());
        let shown = shown.map(name);
        let to = TO.parse().unwrap();
        gate.decide_again(to, Protocol::Tcp, shown.as_ref(), read, NOW).is_some()
    }

    #[test]
    fn flow_whose_first_bytes_nobody_has_read_stays_by_no_name() {
        for (then, unread, named) in [
            ("+a.org", false, true),
            ("-b.org", false, true),
            ("+203.0.113.0/24", true, true),
            ("-198.51.100.0/24", true, true),
            ("+203.0.113.0/24 -b.org", false, true),
            ("+b.org", false, false),
            ("-203.0.113.0/24", false, false),
        ] {
            // The name is that of the address alone.
            let by_pin = Some("a.org");
            assert_eq!(stays("-c.org", then, by_pin, FirstRead::Unread), unread, "{then}");
            assert_eq!(stays("-c.org", then, by_pin, FirstRead::Named), named, "{then}");
        }
    }

    #[test]
    fn flow_that_shows_a_denied_name_ends_although_its_address_is_allowed() {
        let then = "+203.0.113.0/24 -b.org";
        assert!(!stays("+*.org", then, Some("b.org"), FirstRead::Named));
        assert!(stays("+*.org", then, Some("c.org"), FirstRead::Named));
        assert!(!stays("+*.org", "-b.org", Some("b.org"), FirstRead::Named));
    }

    #[test]
    fn flow_without_a_readable_name_ends_under_a_strict_policy() {
        let by_pin = Some("a.org");
        assert!(stays("+a.org", "+a.org", by_pin, FirstRead::Nameless));
        assert!(!stays("+a.org", "+a.org strict", by_pin, FirstRead::Nameless));
        assert!(stays("+a.org", "+a.org strict", by_pin, FirstRead::Pending), "it is read");
    }

    #[test]
    fn flow_whose_first_bytes_are_pending_is_read_by_the_new_policy() {
        let mut gate = gate("-c.org");
        resolve(&mut gate, "a.org.", &[("a.org.", 300, "203.0.113.1")]);
        gate.replace(crate::Policy::new(crate::testing::source("+a.org")).unwrap());
        let (to, asked) = (TO.parse().unwrap(), name("a.org"));
        let again = gate.decide_again(to, Protocol::Tcp, Some(&asked), FirstRead::Pending, NOW);
        let again = again.unwrap();
        assert_eq!(again.inspection, Inspection::AllowedNames);
        let shown = Shown::Http(crate::http::Host::Name(name("b.org")));
        assert!(!gate.check(to, Protocol::Tcp, &again, &shown, NOW).verdict.is_allowed());
    }
}

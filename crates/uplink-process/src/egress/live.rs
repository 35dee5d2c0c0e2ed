//! Policy of a running guest: clients that replace it, list its denials and watch its verdicts (`ringfence policy set`, `why` and
//! `watch`).
//!
//! ```text
//! client ── PolicyRequest ──> launcher of `run`, session of `pasta` ── UplinkOrder::Policy, RecordAll ──> uplink's process
//!        <── PolicyReply ───  [`PolicyClients`], [`GuestEgress`]    <── FromUplink::Policy, Records ────
//! ```
//!
//! The process that started the uplink owns the socket for its clients, and has checked who they are. Here is what their requests
//! do. Nothing blocks. One policy at a time is on its way to the uplink.

use std::collections::BTreeSet;

use ringfence_policy::denials::Denial;
use ringfence_policy::{Policy, PolicySource};
use ringfence_sandbox::channel::Channel;
use ringfence_sys::descriptors::{Descriptors, dispose};
use serde::{Deserialize, Serialize};

use super::document;
use super::guest::GuestEgress;
use ringfence_hostnet::text::printable;

/// Maximum length in bytes of the denials, or of the verdicts, in one reply.
const REPLY_BYTES_MAX: usize = 12 << 10;

/// Number of a client, never used again.
pub type ClientId = u64;

/// Request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PolicyRequest {
    /// Replaces the policy by that in the descriptor ([`document`]).
    Set,
    /// Asks for the denials behind the first `after` ones.
    Denials { after: usize },
    /// Asks for the verdicts from now on.
    Watch,
}

/// Answer to a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum PolicyReply {
    /// The uplink applies the policy that the client sent.
    Set,
    /// Denials, the latest first, as many as fit. None: there are no others.
    Denials(Vec<Denial>),
    /// Lines of verdicts, each with its end. The first reply has none: the client watches now.
    Verdicts(String),
    /// The request failed, for this reason.
    Failed(String),
}

/// Clients of one guest's policy.
#[derive(Debug, Default)]
pub struct PolicyClients {
    /// Client whose policy is on its way to the uplink, and the policy.
    pending: Option<(ClientId, PolicySource)>,
    watching: BTreeSet<ClientId>,
}

impl PolicyClients {
    /// Handles a request. Returns the reply, unless the uplink's answer decides it ([`PolicyClients::policy_is_set`]).
    pub fn serve(
        &mut self,
        id: ClientId,
        request: PolicyRequest,
        fds: Descriptors,
        uplink: Option<(&mut GuestEgress, &Channel)>,
    ) -> Option<PolicyReply> {
        let done = match (request, uplink) {
            (PolicyRequest::Denials { after }, uplink) => {
                let denials = uplink.map(|(egress, _)| latest(egress, after));
                Ok(Some(PolicyReply::Denials(denials.unwrap_or_default())))
            }
            (_, None) => Err("it has no uplink".to_owned()),
            (PolicyRequest::Set, Some((egress, channel))) => {
                self.set(id, fds, egress, channel).map(|()| None)
            }
            (PolicyRequest::Watch, Some((egress, channel))) => {
                egress.watch(channel, true).map(|()| {
                    self.watching.insert(id);
                    Some(PolicyReply::Verdicts(String::new()))
                })
            }
        };
        done.unwrap_or_else(|why| Some(PolicyReply::Failed(why)))
    }

    /// Hands the policy of a client over to the uplink.
    fn set(
        &mut self,
        id: ClientId,
        fds: Descriptors,
        egress: &GuestEgress,
        channel: &Channel,
    ) -> Result<(), String> {
        let [file] = fds.exactly().map_err(|_| "it came without a policy".to_owned())?;
        let source = document::check_and_read(&file);
        dispose(file);
        let source = source.map_err(|error| error.to_string())?;
        Policy::new(source.clone()).map_err(|error| error.to_string())?;
        if self.pending.is_some() {
            return Err("another policy is on its way to the uplink; try again".to_owned());
        }
        egress.replace(channel, &source)?;
        self.pending = Some((id, source));
        Ok(())
    }

    /// Takes the uplink's answer to a policy. Returns the reply to the client that sent it.
    pub fn policy_is_set(
        &mut self,
        error: Option<String>,
        egress: &mut GuestEgress,
    ) -> Option<(ClientId, PolicyReply)> {
        let (id, source) = self.pending.take()?;
        let reply = match error {
            None => {
                egress.is_replaced_by(source);
                PolicyReply::Set
            }
            Some(why) => PolicyReply::Failed(printable(&why)),
        };
        Some((id, reply))
    }

    /// Takes the verdicts since the last call. Returns the clients that watch them, and the replies for each. The verdicts
    /// end with the last client.
    pub fn take_verdicts(
        &mut self,
        egress: &mut GuestEgress,
        channel: &Channel,
    ) -> (Vec<ClientId>, Vec<PolicyReply>) {
        let verdicts = egress.take_watched();
        if !verdicts.is_empty() && self.watching.is_empty() {
            // An uplink without a channel has no more verdicts.
            let _ = egress.watch(channel, false);
        }
        let replies = verdict_parts(&verdicts).map(PolicyReply::Verdicts).collect();
        (self.watching.iter().copied().collect(), replies)
    }

    /// Forgets a client that is gone.
    pub fn forget(&mut self, id: ClientId) {
        self.watching.remove(&id);
    }
}

/// Returns the denials behind the first `after` ones, as many as fit in one reply, the latest first.
fn latest(egress: &GuestEgress, after: usize) -> Vec<Denial> {
    let rest = egress.denials().into_iter().flat_map(|denials| denials.latest().skip(after));
    let mut bytes = 0;
    let fits = |denial: &&Denial| {
        bytes += serde_json::to_string(denial).map_or(0, |text| text.len());
        bytes <= REPLY_BYTES_MAX
    };
    rest.take_while(fits).cloned().collect()
}

/// Divides lines into parts that fit in a message each. A longer line is left out.
fn verdict_parts(lines: &str) -> impl Iterator<Item = String> {
    let mut parts: Vec<String> = Vec::new();
    for line in lines.split_inclusive('\n').filter(|line| line.len() <= REPLY_BYTES_MAX) {
        match parts.last_mut() {
            Some(part) if part.len() + line.len() <= REPLY_BYTES_MAX => part.push_str(line),
            _ => parts.push(line.to_owned()),
        }
    }
    parts.into_iter()
}

/// Describes a policy by the places of its rules. Returns `None` for one that restricts nothing.
pub fn describe(policy: &PolicySource) -> Option<String> {
    if policy.is_empty() && !policy.strict_sni {
        return None;
    }
    let place = |origin: &str| match origin.rsplit_once(':') {
        Some((file, line)) if line.bytes().all(|byte| byte.is_ascii_digit()) => file.to_owned(),
        _ => origin.to_owned(),
    };
    let places: BTreeSet<_> = policy.rules.iter().map(|rule| place(&rule.origin)).collect();
    let places = places.into_iter().collect::<Vec<_>>().join(", ");
    let rules = match policy.rules.len() {
        1 => "1 rule".to_owned(),
        count => format!("{count} rules"),
    };
    Some(if places.is_empty() { rules } else { format!("{rules} ({places})") })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use ringfence_policy::{Action, RuleSource};

    use super::*;
    use crate::egress::EgressArgs;
    use crate::messages::FromUplink;
    use crate::orders::UplinkOrder;

    /// Egress of a guest that may reach one name.
    fn guest() -> GuestEgress {
        let options = EgressArgs { allow: vec!["a.org".to_owned()], ..EgressArgs::default() };
        let policy = options.source().unwrap();
        GuestEgress::open(policy, &options, "guest".to_owned()).unwrap().with_denials()
    }

    /// Returns the descriptors of a request for a policy of one rule.
    fn policy(rule: &str) -> Descriptors {
        let rule = RuleSource {
            action: Action::Allow,
            text: rule.to_owned(),
            origin: "p.toml:1".to_owned(),
        };
        let source = PolicySource { rules: vec![rule], ..PolicySource::default() };
        let (near, far) = Channel::pair().unwrap();
        near.send(&(), &[document::write(&source).unwrap().as_fd()]).unwrap();
        far.receive::<()>().unwrap().1
    }

    #[test]
    fn policy_of_a_client_is_in_force_once_the_uplink_confirms_it() {
        let (mut clients, mut egress) = (PolicyClients::default(), guest());
        let (channel, uplink) = Channel::pair().unwrap();
        let set = |clients: &mut PolicyClients, egress: &mut GuestEgress, id, rule| {
            clients.serve(id, PolicyRequest::Set, policy(rule), Some((egress, &channel)))
        };
        assert_eq!(set(&mut clients, &mut egress, 1, "b.org"), None);
        let other = set(&mut clients, &mut egress, 2, "c.org");
        assert!(matches!(other, Some(PolicyReply::Failed(why)) if why.contains("on its way")));
        let (order, _) = uplink.receive::<UplinkOrder>().unwrap();
        assert!(matches!(order, UplinkOrder::Policy { .. }));
        assert_eq!(egress.policy().unwrap().rules[0].text, "a.org");
        let reply = clients.policy_is_set(None, &mut egress);
        assert_eq!(reply, Some((1, PolicyReply::Set)));
        assert_eq!(egress.policy().unwrap().rules[0].text, "b.org");
        assert_eq!(clients.policy_is_set(None, &mut egress), None, "nobody asked");

        assert_eq!(set(&mut clients, &mut egress, 2, "c.org"), None);
        let refused = clients.policy_is_set(Some("why".to_owned()), &mut egress);
        assert_eq!(refused, Some((2, PolicyReply::Failed("why".to_owned()))));
        assert_eq!(egress.policy().unwrap().rules[0].text, "b.org");
        let wrong = set(&mut clients, &mut egress, 3, "b@d");
        assert!(matches!(wrong, Some(PolicyReply::Failed(why)) if why.contains('^')));
    }

    #[test]
    fn verdicts_end_with_the_last_client_that_watches_them() {
        let (mut clients, mut egress) = (PolicyClients::default(), guest());
        let (channel, uplink) = Channel::pair().unwrap();
        let none = Descriptors::default;
        let reply = clients.serve(7, PolicyRequest::Watch, none(), Some((&mut egress, &channel)));
        assert_eq!(reply, Some(PolicyReply::Verdicts(String::new())));
        let (order, _) = uplink.receive::<UplinkOrder>().unwrap();
        assert_eq!(order, UplinkOrder::RecordAll(true));
        let line = || Some(FromUplink::Records("{}\n".to_owned()));
        let mut report = |clients: &mut PolicyClients| {
            let mut lines = line();
            assert_eq!(egress.take(|| lines.take()), None);
            clients.take_verdicts(&mut egress, &channel)
        };
        assert_eq!(report(&mut clients), (vec![7], vec![PolicyReply::Verdicts("{}\n".to_owned())]));
        clients.forget(7);
        assert!(report(&mut clients).0.is_empty());
        let (order, _) = uplink.receive::<UplinkOrder>().unwrap();
        assert_eq!(order, UplinkOrder::RecordAll(false));
    }

    #[test]
    fn request_without_an_uplink_fails() {
        let mut clients = PolicyClients::default();
        let mut ask = |request| clients.serve(1, request, Descriptors::default(), None);
        assert_eq!(
            ask(PolicyRequest::Denials { after: 0 }),
            Some(PolicyReply::Denials(Vec::new()))
        );
        for request in [PolicyRequest::Set, PolicyRequest::Watch] {
            assert_eq!(ask(request), Some(PolicyReply::Failed("it has no uplink".to_owned())));
        }
    }

    #[test]
    fn description_of_a_policy_names_each_place_once() {
        let rule = |origin: &str| RuleSource {
            action: Action::Allow,
            text: "a.org".to_owned(),
            origin: origin.to_owned(),
        };
        let origins = ["--allow", "p.toml:3", "p.toml:14", "preset pypi:2"];
        let rules = origins.map(rule).to_vec();
        let policy = PolicySource { rules, ..PolicySource::default() };
        assert_eq!(describe(&policy).unwrap(), "4 rules (--allow, p.toml, preset pypi)");
        assert_eq!(describe(&PolicySource::default()), None);
        let closed = PolicySource { default: Some(Action::Deny), ..PolicySource::default() };
        assert_eq!(describe(&closed).unwrap(), "0 rules");
    }

    #[test]
    fn verdicts_are_sent_in_parts_that_fit_a_message() {
        let line = format!("{}\n", "x".repeat(1000));
        let lines = line.repeat(100) + &"y".repeat(REPLY_BYTES_MAX + 1);
        let parts: Vec<_> = verdict_parts(&lines).collect();
        assert!(parts.iter().all(|part| part.len() <= REPLY_BYTES_MAX));
        assert_eq!(parts.concat(), line.repeat(100));
    }
}

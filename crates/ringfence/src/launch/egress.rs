//! Denials and verdicts of the egress policy in the launcher: announcements, `ringfence policy why` and `policy watch`.

use std::collections::BTreeSet;

use ringfence_policy::PolicySource;
use ringfence_policy::denials::Denial;
use ringfence_sandbox::STATUS_FAILED;

use super::clients::ClientId;
use super::guest_processes::GuestProcesses;
use crate::commands::Reply;

/// Maximum length in bytes of the denials, or of the verdicts, in one reply.
const REPLY_BYTES_MAX: usize = 12 << 10;

impl GuestProcesses<'_> {
    /// Prints sentences about new denials, and sends verdicts to the clients that watch them.
    pub(super) fn report_denials(&mut self) {
        let Some((uplink, channel)) = self.uplink.with_channel() else { return };
        let (sentences, verdicts) = (uplink.egress.take_sentences(), uplink.egress.take_watched());
        let is_watched = self.clients.as_mut().is_some_and(|clients| {
            verdict_parts(&verdicts).for_each(|part| clients.send_verdicts(part));
            clients.are_watching()
        });
        if !verdicts.is_empty() && !is_watched {
            // The last one has gone. An uplink without a channel has no more verdicts.
            let _ = uplink.egress.watch(channel, false);
        }
        let name = self.host_name();
        for sentence in sentences {
            self.reporter.summary(format_args!("guest {name}: {sentence}"));
        }
    }

    /// Sends the verdicts from now on to a client.
    pub(super) fn watch(&mut self, id: ClientId) {
        let watched = match self.uplink.with_channel() {
            Some((uplink, channel)) => uplink.egress.watch(channel, true),
            None => Err("it has no uplink".to_owned()),
        };
        match (watched, &mut self.clients) {
            (Ok(()), Some(clients)) => {
                clients.watch(id);
                self.reporter.step("verdicts are watched");
            }
            (Ok(()), None) => {}
            (Err(why), _) => self.reply(id, &Reply::Failed { status: STATUS_FAILED, why }),
        }
    }

    /// Sends the denials behind the first `after` ones to a client, as many as fit in one reply, the latest first.
    pub(super) fn tell_denials(&mut self, id: ClientId, after: usize) {
        let denials = self.uplink.with_channel().and_then(|(uplink, _)| uplink.egress.denials());
        let rest = denials.into_iter().flat_map(|denials| denials.latest().skip(after));
        let mut bytes = 0;
        let fits = |denial: &&Denial| {
            bytes += serde_json::to_string(denial).map_or(0, |text| text.len());
            bytes <= REPLY_BYTES_MAX
        };
        let found = rest.take_while(fits).cloned().collect();
        self.reply(id, &Reply::Denials(found));
    }
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
pub(super) fn describe(policy: &PolicySource) -> Option<String> {
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
    use ringfence_policy::{Action, RuleSource};

    use super::*;

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

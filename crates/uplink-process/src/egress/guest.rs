//! Egress policy of one guest in the process that starts its uplink: the rules for the uplink's process, and the files
//! of its records.
//!
//! The launcher of `run` and the session of `pasta` and `passt` use it in the same way:
//!
//! ```text
//! open ──> head: in the uplink's configuration ──> send_rules ──> take: while it runs ──> finish: at its end
//! ```

use std::os::fd::AsFd;
use std::time::Duration;

use ringfence_policy::denials::Denials;
use ringfence_policy::{Action, PolicySource};
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_uplink::egress::AskLimits;

use super::EgressArgs;
use super::document;
use super::records::{Records, without_controls};
use crate::config::{AskHead, PolicyHead};
use crate::messages::{FromUplink, RULES_IN_MESSAGE, UplinkRules};
use crate::orders::UplinkOrder;
use crate::totals::EgressTotals;

/// Maximum number of records that are written before other events.
const RECORDS_IN_A_ROW: usize = 64;
/// Maximum number of messages after the end of the guest.
const LAST_RECORDS_MAX: usize = 4096;
/// Maximum number of bytes of verdicts that wait for the clients that watch them. Further ones are lost.
const WATCHED_MAX: usize = 256 << 10;
/// Time limit for each of the last records.
const LAST_RECORDS_WITHIN: Duration = Duration::from_secs(1);

/// Policy of a guest, and its open files.
#[derive(Debug)]
pub struct GuestEgress {
    policy: Option<PolicySource>,
    records: Records,
    /// Name of the guest in records.
    name: String,
    /// Totals that came last. An uplink that ends by itself sends them before.
    totals: Option<EgressTotals>,
    /// Denials, if they are listed and announced.
    denials: Option<Denials>,
    /// Sentences about new denials.
    sentences: Vec<String>,
    /// Lines of verdicts for clients that watch them. `None` without such clients.
    watched: Option<String>,
    /// Limits of questions about destinations that no rule covers.
    asks: Option<AskHead>,
}

impl GuestEgress {
    /// Opens the files of records that the options name. `policy` is that of the options ([`EgressArgs::source`]).
    ///
    /// # Errors
    ///
    /// Returns the reason for which a file cannot be opened.
    pub fn open(
        policy: Option<PolicySource>,
        options: &EgressArgs,
        name: String,
    ) -> anyhow::Result<GuestEgress> {
        Ok(GuestEgress {
            policy,
            records: Records::open(options)?,
            name,
            totals: None,
            denials: None,
            sentences: Vec::new(),
            watched: None,
            asks: None,
        })
    }

    /// Has the uplink's process ask about destinations that no rule covers.
    #[must_use]
    pub fn with_questions(mut self, limits: Option<AskLimits>) -> GuestEgress {
        let milliseconds = |within: Duration| u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
        self.asks = limits.map(|AskLimits { within, at_a_time }| AskHead {
            within: milliseconds(within),
            at_a_time,
        });
        self
    }

    /// Lists denials, and announces new ones ([`GuestEgress::take_sentences`]).
    #[must_use]
    pub fn with_denials(mut self) -> GuestEgress {
        self.denials = Some(Denials::default());
        self
    }

    /// Returns the denials that are listed.
    pub fn denials(&self) -> Option<&Denials> {
        self.denials.as_ref()
    }

    /// Returns `true` if there is something to take: sentences, or lines of verdicts.
    pub fn has_reports(&self) -> bool {
        !self.sentences.is_empty() || self.watched.as_ref().is_some_and(|lines| !lines.is_empty())
    }

    /// Takes the sentences about denials that are new since the last call.
    pub fn take_sentences(&mut self) -> Vec<String> {
        std::mem::take(&mut self.sentences)
    }

    /// Keeps the lines of all verdicts for [`GuestEgress::take_watched`], or no more.
    ///
    /// # Errors
    ///
    /// Returns the reason for which there are no verdicts to watch.
    pub fn watch(&mut self, channel: &Channel, is_watched: bool) -> Result<(), String> {
        if self.policy.is_none() {
            return Err("it has no egress policy".to_owned());
        }
        if self.watched.is_some() == is_watched {
            return Ok(());
        }
        self.watched = is_watched.then(String::new);
        if self.records.are_wanted() {
            return Ok(());
        }
        let sent = channel.send_now(&UplinkOrder::RecordAll(is_watched), &[]);
        sent.map_err(|error| format!("the uplink: {error}"))
    }

    /// Takes the lines of verdicts since the last call. Control characters are replaced.
    pub fn take_watched(&mut self) -> String {
        self.watched.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Returns the policy, if there is one.
    pub fn policy(&self) -> Option<&PolicySource> {
        self.policy.as_ref()
    }

    /// Records that the uplink applies another policy.
    pub fn is_replaced_by(&mut self, policy: PolicySource) {
        self.policy = Some(policy);
    }

    /// Reads lines of the uplink, which is not trusted.
    fn note(&mut self, lines: &str) {
        for line in lines.lines() {
            let sentence = self.denials.as_mut().and_then(|denials| denials.add(line));
            self.sentences.extend(sentence);
        }
        if let Some(watched) = &mut self.watched
            && watched.len() + lines.len() <= WATCHED_MAX
        {
            watched.push_str(&without_controls(lines));
        }
    }

    /// Returns `true` if there is a policy, or records are wanted.
    pub fn has_policy(&self) -> bool {
        self.policy.is_some()
    }

    /// Returns the settings for the configuration of the uplink's process.
    pub fn head(&self) -> Option<PolicyHead> {
        let (all, learns) = (self.records.are_wanted(), self.records.learns());
        let head = PolicyHead::of(self.policy.as_ref()?, self.recorded_as(), all, learns);
        Some(PolicyHead { asks: self.asks, ..head })
    }

    /// Returns the guest's name in records, if some are wanted.
    fn recorded_as(&self) -> Option<String> {
        (self.records.are_wanted() || self.denials.is_some()).then(|| self.name.clone())
    }

    /// Sends the rules to the uplink's process, behind its configuration and sockets.
    pub fn send_rules(&self, channel: &Channel) -> Result<(), ChannelError> {
        let rules = self.policy.iter().flat_map(|policy| policy.rules.chunks(RULES_IN_MESSAGE));
        for rules in rules {
            channel.send(&UplinkRules(rules.to_vec()), &[])?;
        }
        Ok(())
    }

    /// Takes messages of the uplink's process and writes those that are records. Returns the first other one.
    pub fn take(&mut self, mut next: impl FnMut() -> Option<FromUplink>) -> Option<FromUplink> {
        // Other processes have their events, too.
        for _ in 0..RECORDS_IN_A_ROW {
            let other = self.accept(next()?);
            if let Some(FromUplink::Totals(totals)) = &other {
                self.totals = totals.egress;
            }
            if other.is_some() {
                return other;
            }
        }
        None
    }

    /// Handles the message if it is a record. Returns other messages.
    fn accept(&mut self, message: FromUplink) -> Option<FromUplink> {
        if let FromUplink::Records(lines) = &message {
            self.note(lines);
        }
        self.records.accept(message)
    }

    /// Ends the uplink's process if it writes records or `wants_totals`. Writes the last records, and returns the totals
    /// of the policy if there is one.
    pub fn finish(&mut self, channel: &Channel, wants_totals: bool) -> Option<EgressTotals> {
        let has_records = self.policy.is_some() && self.recorded_as().is_some();
        if !has_records && !wants_totals {
            return None;
        }
        // The process stops when its orders end.
        let _ = rustix::net::shutdown(channel.as_fd(), rustix::net::Shutdown::Write);
        for _ in 0..LAST_RECORDS_MAX {
            let Ok((message, _)) = channel.receive_within(LAST_RECORDS_WITHIN) else { break };
            if let Some(FromUplink::Totals(totals)) = self.accept(message) {
                self.totals = totals.egress;
            }
        }
        self.totals
    }

    /// Sends another policy to the uplink's process.
    ///
    /// # Errors
    ///
    /// Returns the reason for which the guest keeps its policy.
    pub fn replace(&self, channel: &Channel, policy: &PolicySource) -> Result<(), String> {
        if self.records.learns() {
            return Err("it is started with --egress-learn, which allows everything".to_owned());
        }
        let mut policy = policy.clone();
        if self.asks.is_some() && policy.default.is_none() {
            policy.default = Some(Action::Deny);
        }
        let document = document::write(&policy).map_err(|error| error.to_string())?;
        let order = UplinkOrder::Policy { recorded_as: self.recorded_as() };
        let sent = channel.send_now(&order, &[document.as_fd()]);
        sent.map_err(|error| format!("the uplink: {error}"))
    }
}

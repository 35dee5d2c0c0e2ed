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

use ringfence_policy::PolicySource;
use ringfence_sandbox::channel::{Channel, ChannelError};

use super::EgressArgs;
use super::document;
use super::records::Records;
use crate::config::PolicyHead;
use crate::messages::{FromUplink, RULES_IN_MESSAGE, UplinkRules};
use crate::orders::UplinkOrder;
use crate::totals::EgressTotals;

/// Maximum number of records that are written before other events.
const RECORDS_IN_A_ROW: usize = 64;
/// Maximum number of messages after the end of the guest.
const LAST_RECORDS_MAX: usize = 4096;
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
        Ok(GuestEgress { policy, records: Records::open(options)?, name, totals: None })
    }

    /// Returns `true` if there is a policy, or records are wanted.
    pub fn has_policy(&self) -> bool {
        self.policy.is_some()
    }

    /// Returns the settings for the configuration of the uplink's process.
    pub fn head(&self) -> Option<PolicyHead> {
        let recorded_as = self.records.are_wanted().then(|| self.name.clone());
        Some(PolicyHead::of(self.policy.as_ref()?, recorded_as, self.records.learns()))
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
        let mut messages = (0..RECORDS_IN_A_ROW).map_while(|_| next());
        let other = messages.find_map(|message| self.records.accept(message));
        if let Some(FromUplink::Totals(totals)) = &other {
            self.totals = *totals;
        }
        other
    }

    /// Ends the uplink's process if it writes records or `wants_totals`. Writes the last records, and returns the totals
    /// of the policy if there is one.
    pub fn finish(&mut self, channel: &Channel, wants_totals: bool) -> Option<EgressTotals> {
        if !self.records.are_wanted() && !wants_totals {
            return None;
        }
        // The process stops when its orders end.
        let _ = rustix::net::shutdown(channel.as_fd(), rustix::net::Shutdown::Write);
        for _ in 0..LAST_RECORDS_MAX {
            let Ok((message, _)) = channel.receive_within(LAST_RECORDS_WITHIN) else { break };
            if let Some(FromUplink::Totals(totals)) = self.records.accept(message) {
                self.totals = totals;
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
        let document = document::write(policy).map_err(|error| error.to_string())?;
        let sent = channel.send_now(&UplinkOrder::Policy, &[document.as_fd()]);
        sent.map_err(|error| format!("the uplink: {error}"))
    }
}

//! What may change of a vif while it is connected, and where the store says it.
//!
//! The control thread reads the keys when a watch fires (`Followed::look`) and orders the port to follow
//! what changed ([`PortCommand::SetPolicy`](ringfence_frame::commands::PortCommand::SetPolicy)).

use core::time::Duration;

use ringfence_wire::netif::keys;
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use crate::netback::{GuestPolicyConfig, STALL_DEFAULT};
use crate::rules::RuleCounters;
use ringfence_frame::commands::PortPolicy;
use ringfence_frame::rate::Rate;
use ringfence_sys::clock::Clock;
use ringfence_xenbus::end::is_about_a_key;

/// What the owner of a backend decides about a guest's behaviour over time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VifPolicy {
    /// Announce multicast control.
    pub multicast_control: bool,
    /// How long a guest may take nothing.
    pub stall: Duration,
}

impl Default for VifPolicy {
    fn default() -> Self {
        VifPolicy { multicast_control: false, stall: STALL_DEFAULT }
    }
}

/// The keys of one vif that are followed while it is connected.
#[derive(Debug, Default)]
pub(super) struct Followed {
    pub(super) policy: VifPolicy,
    pub(super) clock: Clock,
    /// What the port was made with, or ordered since.
    wanted: PortPolicy,
    /// The last text of the key that is no rate: to be said once.
    bad_rate: Option<Vec<u8>>,
}

impl Followed {
    /// The keys to announce.
    pub(super) fn entries(&self) -> [(&'static str, &'static str); 2] {
        let digit = if self.policy.multicast_control { "1" } else { "0" };
        [(keys::FEATURE_MULTICAST_CONTROL, digit), (keys::FEATURE_DYNAMIC_MULTICAST_CONTROL, digit)]
    }

    /// Whether multicast control was announced, by whoever served the device before.
    pub(super) fn read(store: &mut StoreClient, back: &str) -> Result<bool, StoreError> {
        store.read_flag(&format!("{back}/{}", keys::FEATURE_MULTICAST_CONTROL))
    }

    /// What a port is to enforce that connects now, or is taken over; `name` is for the log, and
    /// `multicast_control` is what was announced to the guest.
    pub(super) fn policy(
        &self,
        name: &str,
        adopted: bool,
        multicast_control: bool,
    ) -> GuestPolicyConfig {
        GuestPolicyConfig {
            wanted: self.wanted,
            multicast_control,
            adopted,
            stall: self.policy.stall,
            clock: self.clock.clone(),
            name: name.to_owned(),
        }
    }

    /// Reads the keys; what is wanted now, where that is something else than before.
    pub(super) fn look(
        &mut self,
        store: &mut StoreClient,
        front: &str,
        back: &str,
        rules: &RuleCounters,
    ) -> Result<Option<PortPolicy>, StoreError> {
        let rate = store.read_opt(&format!("{back}/{}", keys::RATE))?;
        let rate = rate.and_then(|text| self.rate(text, back, rules));
        let wants = format!("{front}/{}", keys::REQUEST_MULTICAST_CONTROL);
        let multicast_control = match store.read_flag(&wants) {
            Ok(wants) => wants,
            Err(error) if is_about_a_key(&error) => {
                rules.count("multicast_request_unusable");
                false
            }
            Err(error) => return Err(error),
        };
        let wanted = PortPolicy { rate, multicast_control };
        let before = core::mem::replace(&mut self.wanted, wanted);
        Ok(Some(wanted).filter(|wanted| *wanted != before))
    }

    /// A rate that is none is no limit, as with Linux's netback; it is said, and counted.
    fn rate(&mut self, text: Vec<u8>, back: &str, rules: &RuleCounters) -> Option<Rate> {
        match Rate::parse(&text) {
            Ok(rate) => {
                self.bad_rate = None;
                Some(rate)
            }
            Err(why) => {
                if self.bad_rate.as_ref() != Some(&text) {
                    rules.count("rate_unusable");
                    tracing::error!(device = %back, %why, "the rate is unusable: the guest's sending is not limited");
                    self.bad_rate = Some(text);
                }
                None
            }
        }
    }
}

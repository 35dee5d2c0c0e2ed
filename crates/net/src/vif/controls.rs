//! Keys of a vif that may change while it is connected: rate limit and multicast control.
//!
//! The control thread reads the keys after a watch event (`Followed::look`). It passes changes to the port
//! ([`VifSettings`]).

use core::time::Duration;

use ringfence_wire::netif::keys;
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use crate::commands::VifSettings;
use crate::netback::{GuestPolicyConfig, STALL_DEFAULT};
use crate::rate::Rate;
use crate::rules::RuleCounters;
use ringfence_sys::clock::Clock;
use ringfence_xenbus::end::{BackendEnd, is_about_a_key};

/// Policy of a backend's owner for a guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VifPolicy {
    /// Set if multicast control is announced.
    pub multicast_control: bool,
    /// Time without accepted frames after which the guest counts as stalled.
    pub stall: Duration,
}

impl Default for VifPolicy {
    fn default() -> Self {
        VifPolicy { multicast_control: false, stall: STALL_DEFAULT }
    }
}

/// Keys of one vif that are watched while it is connected.
#[derive(Debug, Default)]
pub(super) struct Followed {
    pub(super) policy: VifPolicy,
    pub(super) clock: Clock,
    /// Values that the port has.
    wanted: VifSettings,
    /// Last unusable text of the rate key, which is logged once.
    bad_rate: Option<Vec<u8>>,
}

impl Followed {
    /// Returns the keys to announce.
    pub(super) fn entries(&self) -> [(&'static str, &'static str); 2] {
        let digit = if self.policy.multicast_control { "1" } else { "0" };
        [(keys::FEATURE_MULTICAST_CONTROL, digit), (keys::FEATURE_DYNAMIC_MULTICAST_CONTROL, digit)]
    }

    /// Reads whether multicast control was announced, by this process or a previous one.
    pub(super) fn read(store: &mut StoreClient, end: &BackendEnd) -> Result<bool, StoreError> {
        store.read_flag(&end.back(keys::FEATURE_MULTICAST_CONTROL))
    }

    /// Returns the policy of a port that connects or is taken over. `name` is the device name in the log.
    /// `multicast_control` is the value that was announced to the guest.
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

    /// Reads the keys; returns the new values if they have changed.
    pub(super) fn look(
        &mut self,
        store: &mut StoreClient,
        end: &BackendEnd,
    ) -> Result<Option<VifSettings>, StoreError> {
        let rate = store.read_opt(&end.back(keys::RATE))?;
        let rate = rate.and_then(|text| self.rate(text, end.back_path(), end.rules()));
        let wants = end.front(keys::REQUEST_MULTICAST_CONTROL);
        let multicast_control = match store.read_flag(&wants) {
            Ok(wants) => wants,
            Err(error) if is_about_a_key(&error) => {
                end.rules().count("multicast_request_unusable");
                false
            }
            Err(error) => return Err(error),
        };
        let wanted = VifSettings { rate, multicast_control };
        let before = core::mem::replace(&mut self.wanted, wanted);
        Ok(Some(wanted).filter(|wanted| *wanted != before))
    }

    /// Parses the rate. An unusable rate is logged and counted, and does not limit, as with Linux's netback.
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

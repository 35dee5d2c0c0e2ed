//! Guest policy: rate limit, multicast filter and stall detection of a vif.
//!
//! A [`GuestPolicy`] belongs to one port and runs on its datapath worker. Changes of the store's keys arrive
//! as commands between two rounds. Each part of a split port has its own policy on its own worker. The parts
//! share the credit and the list of groups behind locks. A lock is taken only if the rate is limited, or
//! multicast control is requested.

mod filter;
mod limiter;
mod stall;

use core::time::Duration;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_wire::netif::extra::MulticastChange;

use crate::commands::VifSettings;
use crate::rules::RuleCounters;
use filter::MulticastFilter;
use limiter::Limiter;
use ringfence_frame::batch::Batch;
use ringfence_frame::counters::{DropReason, PortCounters};
use ringfence_sys::clock::Clock;
use stall::{Change, Stall};

pub use stall::STALL_DEFAULT;

/// Settings from which the limits of one guest's port are made.
#[derive(Clone, Debug)]
pub struct GuestPolicyConfig {
    /// Keys of the store at the time when the port is made.
    pub wanted: VifSettings,
    /// Set if `feature-multicast-control` was announced.
    pub multicast_control: bool,
    /// Set if a previous process served the guest and may have received its groups.
    pub adopted: bool,
    /// Time without accepted frames after which the guest counts as stalled.
    pub stall: Duration,
    /// Clock for all times.
    pub clock: Clock,
    /// Device name in the log.
    pub name: String,
}

impl Default for GuestPolicyConfig {
    fn default() -> Self {
        GuestPolicyConfig {
            wanted: VifSettings::default(),
            multicast_control: false,
            adopted: false,
            stall: STALL_DEFAULT,
            clock: Clock::default(),
            name: String::new(),
        }
    }
}

/// Maximum time between two checks of a guest without credit: its rate may change meanwhile, which wakes no
/// worker.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Locks shared state. Holders only compute, so they cannot block or panic.
fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) struct GuestPolicy {
    name: String,
    /// Time of the stall that was logged.
    stalled_at: Option<Duration>,
    clock: Clock,
    /// Time at which the guest was last found without credit.
    held_up: Duration,
    /// Set if there is a rate limit.
    limited: bool,
    limiter: Arc<Mutex<Option<Limiter>>>,
    filter: Option<MulticastFilter>,
    /// Frames that pass the multicast filter.
    passed: Vec<u32>,
    stall: Stall,
    rules: Arc<RuleCounters>,
    counters: Arc<PortCounters>,
}

impl GuestPolicy {
    pub(super) fn new(
        config: GuestPolicyConfig,
        rules: &Arc<RuleCounters>,
        counters: &Arc<PortCounters>,
    ) -> GuestPolicy {
        let GuestPolicyConfig { wanted, multicast_control, adopted, stall, clock, name } = config;
        let mut filter = MulticastFilter::default();
        filter.unknown = adopted;
        let mut policy = GuestPolicy {
            name,
            stalled_at: None,
            clock,
            held_up: Duration::ZERO,
            limited: false,
            limiter: Arc::default(),
            filter: multicast_control.then_some(filter),
            passed: Vec::new(),
            stall: Stall::new(stall),
            rules: Arc::clone(rules),
            counters: Arc::clone(counters),
        };
        policy.apply(wanted);
        policy
    }

    /// Makes the policy of another part of the same port.
    pub(super) fn for_part(&self, counters: &Arc<PortCounters>) -> GuestPolicy {
        GuestPolicy {
            name: self.name.clone(),
            stalled_at: None,
            clock: self.clock.clone(),
            held_up: self.held_up,
            limited: self.limited,
            limiter: Arc::clone(&self.limiter),
            filter: self.filter.clone(),
            passed: Vec::new(),
            stall: Stall::new(self.stall.limit()),
            rules: Arc::clone(&self.rules),
            counters: Arc::clone(counters),
        }
    }

    /// Applies new values of the store's keys.
    pub(super) fn apply(&mut self, wanted: VifSettings) {
        let now = self.clock.now();
        self.limited = wanted.rate.is_some();
        match (wanted.rate, &mut *lock(&self.limiter)) {
            (None, limiter) => *limiter = None,
            (Some(rate), Some(limiter)) if limiter.rate() != rate => limiter.change(rate, now),
            (Some(_), Some(_)) => {}
            (Some(rate), limiter) => *limiter = Some(Limiter::new(rate, now)),
        }
        if let Some(filter) = &mut self.filter {
            filter.asked = wanted.multicast_control;
        }
    }

    /// Returns true if the guest has to wait for credit.
    #[inline]
    pub(super) fn waits_for_credit(&mut self) -> bool {
        if !self.limited {
            return false;
        }
        let mut limiter = lock(&self.limiter);
        let Some(limiter) = limiter.as_mut().filter(|l| l.until().is_some()) else {
            return false;
        };
        self.held_up = self.clock.now();
        limiter.waits(self.held_up)
    }

    /// Returns true if the guest has a rate limit, so that [`GuestPolicy::admits`] must be called.
    #[inline]
    pub(super) fn is_limited(&self) -> bool {
        self.limited
    }

    /// Subtracts a packet of `bytes` bytes from the guest's credit; returns false if there is too little.
    #[inline]
    pub(super) fn admits(&mut self, bytes: usize) -> bool {
        if !self.limited {
            return true;
        }
        let now = self.clock.now();
        let admitted =
            lock(&self.limiter).as_mut().is_none_or(|limiter| limiter.take(bytes as u64, now));
        if !admitted {
            self.counters.rate_limited.add(1);
        }
        admitted
    }

    /// Applies changes to the multicast filter; returns true if all succeeded.
    pub(super) fn change_filter(&mut self, changes: &[MulticastChange]) -> bool {
        let Some(filter) = &mut self.filter else {
            self.rules.count("tx_multicast_not_offered");
            return false;
        };
        let mut done = true;
        for change in changes {
            if let Err(rule) = filter.change(*change) {
                self.rules.count(rule);
                done = false;
            }
        }
        done
    }

    /// Returns the frames that pass the multicast filter, and counts the others as dropped.
    pub(super) fn filter_frames<'a>(&'a mut self, batch: &Batch, frames: &'a [u32]) -> &'a [u32] {
        let Some(filter) = self.filter.as_ref().filter(|filter| filter.is_active()) else {
            return frames;
        };
        let groups = filter.groups();
        let wants = |frame: &u32| batch.get(*frame).is_none_or(|f| groups.passes(f.header()));
        if frames.iter().all(wants) {
            return frames;
        }
        self.passed.clear();
        self.passed.extend(frames.iter().copied().filter(|frame| wants(frame)));
        drop(groups);
        let filtered = (frames.len() - self.passed.len()) as u64;
        self.counters.dropped_many(DropReason::MulticastFilter, filtered);
        &self.passed
    }

    /// Returns true if the guest is stalled.
    pub(super) fn is_stalled(&self) -> bool {
        self.stall.is_stalled()
    }

    /// Records that the longest frame fits.
    pub(super) fn record_fit(&mut self) {
        if self.stall.record_fit() != Change::Recovered {
            return;
        }
        self.counters.stall_ends.add(1);
        if let Some(since) = self.stalled_at.take() {
            let seconds = self.clock.now().saturating_sub(since).as_secs();
            tracing::info!(device = %self.name, seconds, "the guest takes frames again");
        }
    }

    /// Records that the guest accepted a frame.
    pub(super) fn record_accepted(&mut self) {
        self.stall.record_accepted();
    }

    /// Records that the guest accepted nothing and the longest frame does not fit. Returns true if the guest is
    /// stalled from now on and the caller must [log](GuestPolicy::log_stalled) it.
    pub(super) fn record_refusal(&mut self) -> bool {
        let now = self.clock.now();
        if self.stall.is_stalled() || self.stall.record_refusal(now) != Change::Stalled {
            return false;
        }
        self.counters.stalls.add(1);
        let times = self.rules.count("rx_stalled") + 1;
        self.stalled_at = times.is_power_of_two().then_some(now);
        self.stalled_at.is_some()
    }

    /// Logs that the guest is stalled. `posted` is the minimum number of posted buffers of its queues.
    pub(super) fn log_stalled(&self, queues: usize, posted: usize, longest: usize) {
        tracing::warn!(
            device = %self.name,
            times = self.rules.get("rx_stalled"),
            seconds = self.stall.limit().as_secs(),
            queues,
            posted,
            longest,
            "the guest took no frame for so long, and its buffers do not hold the longest one: what is sent to it is dropped (drop_link_down) until they do"
        );
    }

    /// Returns true if the stall check is due.
    pub(super) fn is_overdue(&self) -> bool {
        self.stall.until().is_some_and(|until| until <= self.clock.now())
    }

    /// Returns the time at which the worker must call the port again without an event.
    pub(super) fn deadline(&self) -> Option<Duration> {
        let credit = if self.limited { lock(&self.limiter) } else { return self.stall.until() };
        let credit = credit.as_ref().and_then(Limiter::until);
        let credit = credit.map(|until| until.min(self.held_up.saturating_add(CHECK_INTERVAL)));
        credit.into_iter().chain(self.stall.until()).min()
    }
}

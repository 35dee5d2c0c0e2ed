//! What holds for a guest over time: how much it may send, which groups' frames it wants, and whether it
//! still takes any.
//!
//! A [`GuestPolicy`] belongs to one port and is used on the data plane's thread. What the store says meanwhile
//! comes to it as an order, between two rounds. The parts of a port that was split have one each, on
//! threads of their own. Credit and the list of groups are the guest's, so these are the same for all of
//! them, behind a lock that is taken only for a guest whose rate is limited, or which asked for multicast
//! control, respectively.

mod filter;
mod limiter;
mod stall;

use core::time::Duration;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_wire::netif::extra::MulticastChange;

use crate::rules::RuleCounters;
use filter::MulticastFilter;
use limiter::Limiter;
use ringfence_frame::batch::Batch;
use ringfence_frame::commands::PortPolicy;
use ringfence_frame::counters::{DropReason, PortCounters};
use ringfence_sys::clock::Clock;
use stall::{Change, Stall};

pub use stall::STALL_DEFAULT;

/// What a port is to enforce.
#[derive(Clone, Debug)]
pub struct GuestPolicyConfig {
    /// What the store says when the port is made.
    pub wanted: PortPolicy,
    /// Whether `feature-multicast-control` was announced.
    pub multicast_control: bool,
    /// The guest may have said which groups it wants to whoever served it before.
    pub adopted: bool,
    /// How long a guest may take nothing.
    pub stall: Duration,
    /// The time.
    pub clock: Clock,
    /// What the device is called in the log.
    pub name: String,
}

impl Default for GuestPolicyConfig {
    fn default() -> Self {
        GuestPolicyConfig {
            wanted: PortPolicy::default(),
            multicast_control: false,
            adopted: false,
            stall: STALL_DEFAULT,
            clock: Clock::default(),
            name: String::new(),
        }
    }
}

/// The longest that a guest without credit is left alone: its rate may be changed meanwhile, and nobody
/// wakes the data plane for that.
const ASKED_EVERY: Duration = Duration::from_secs(1);

/// Whoever holds it does arithmetic and nothing else.
fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) struct GuestPolicy {
    name: String,
    /// Since when the guest is stalled, if the log says that it is.
    stalled_at: Option<Duration>,
    clock: Clock,
    /// When the guest was last found to have no credit.
    held_up: Duration,
    /// Whether there is a limiter.
    limited: bool,
    limiter: Arc<Mutex<Option<Limiter>>>,
    filter: Option<MulticastFilter>,
    /// Frames that pass the filter.
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
        policy.follow(wanted);
        policy
    }

    /// What another part of the same port is to have.
    pub(super) fn of_part(&self, counters: &Arc<PortCounters>) -> GuestPolicy {
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

    /// Takes over what the store says by now.
    pub(super) fn follow(&mut self, wanted: PortPolicy) {
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

    /// Whether nothing may be taken from the guest now.
    #[inline]
    pub(super) fn holds_up(&mut self) -> bool {
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

    /// Whether the guest has a rate at all: if not, [`GuestPolicy::admits`] need not be asked.
    #[inline]
    pub(super) fn is_limited(&self) -> bool {
        self.limited
    }

    /// Whether the guest has credit for a packet of `bytes` bytes, which is then taken off.
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

    /// Carries out changes of the multicast filter; whether all were.
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

    /// Those of `frames` that the guest wants, the others being counted.
    pub(super) fn wanted<'a>(&'a mut self, batch: &Batch, frames: &'a [u32]) -> &'a [u32] {
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

    /// Whether the guest counts as one that takes no frames.
    pub(super) fn is_stalled(&self) -> bool {
        self.stall.is_stalled()
    }

    /// The largest frame fits.
    pub(super) fn fits(&mut self) {
        if self.stall.fits() != Change::Recovered {
            return;
        }
        self.counters.stall_ends.add(1);
        if let Some(since) = self.stalled_at.take() {
            let seconds = self.clock.now().saturating_sub(since).as_secs();
            tracing::info!(device = %self.name, seconds, "the guest takes frames again");
        }
    }

    /// A frame was taken.
    pub(super) fn taken(&mut self) {
        self.stall.taken();
    }

    /// Nothing was taken, and the largest frame does not fit. True if the guest counts as stalled from
    /// now on, and that is to be [said](GuestPolicy::say_stalled).
    pub(super) fn refused(&mut self) -> bool {
        let now = self.clock.now();
        if self.stall.is_stalled() || self.stall.refused(now) != Change::Stalled {
            return false;
        }
        self.counters.stalls.add(1);
        let times = self.rules.count("rx_stalled") + 1;
        self.stalled_at = times.is_power_of_two().then_some(now);
        self.stalled_at.is_some()
    }

    /// Says that the guest is stalled: `posted` are the buffers that it left, of the queue that has
    /// fewest.
    pub(super) fn say_stalled(&self, queues: usize, posted: usize, longest: usize) {
        tracing::warn!(
            device = %self.name,
            times = self.rules.get("rx_stalled"),
            seconds = self.stall.limit().as_secs(),
            queues,
            posted,
            longest,
            "the guest took no frame for so long, and its buffers do not hold the longest one: what              is sent to it is dropped (drop_link_down) until they do"
        );
    }

    /// Whether it is time to see whether the guest is stalled.
    pub(super) fn is_overdue(&self) -> bool {
        self.stall.until().is_some_and(|until| until <= self.clock.now())
    }

    /// When the port is to be asked again though no event comes.
    pub(super) fn deadline(&self) -> Option<Duration> {
        let credit = if self.limited { lock(&self.limiter) } else { return self.stall.until() };
        let credit = credit.as_ref().and_then(Limiter::until);
        let credit = credit.map(|until| until.min(self.held_up.saturating_add(ASKED_EVERY)));
        credit.into_iter().chain(self.stall.until()).min()
    }
}

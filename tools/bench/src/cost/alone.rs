//! Operations that no pair of paths separates, each timed alone in a loop.

use std::hint::black_box;
use std::net::SocketAddr;

use anyhow::{Context, ensure};
use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_policy::rule::Protocol;
use ringfence_sys::clock::{monotonic, time_stamp};
use ringfence_uplink::UplinkCounters;

use super::components::PUBLISHED_COPY;
use super::uplink::{egress, server};
use crate::grant::cases::{ALL, Bench, GrantCase};

/// Pages between which copies alternate.
const PAGES: usize = 64;
/// Operations between two readings of the counter.
const TIMES: u32 = 4096;

/// Names of the operations.
const STAGED: &str = "staged look-up";
const WINDOW: &str = "look-up in a window";
const COPY: &str = "copy from a lent page";
const FLOW: &str = "policy, new flow";
pub(super) const NAMES: [&str; 4] = [STAGED, WINDOW, COPY, FLOW];

/// Operation of the data path.
pub(super) struct Operation {
    pub(super) name: &'static str,
    /// Ticks of the time-stamp counter in each round.
    pub(super) cycles: Vec<f64>,
}

/// Returns the cycles that others published for an operation on this many bytes.
pub(super) fn published(name: &str, size: u32) -> Option<[u32; 2]> {
    (name == COPY && size == 1500).then_some(PUBLISHED_COPY)
}

/// Times all operations in each round.
pub(super) fn measure(size: u32, rounds: u32, ticks: f64) -> anyhow::Result<Vec<Operation>> {
    let mut bench = Bench::new(1, 1)?;
    let mut look_up = |name, operation: &str, pages| -> anyhow::Result<Operation> {
        let is_it = |case: &&GrantCase| case.operation == operation && case.pages == pages;
        let case = ALL.iter().find(is_it).context("an operation on grants")?;
        let cycles = (0..rounds).map(|_| Ok(bench.median(case)?.ns * ticks));
        let cycles = cycles.collect::<anyhow::Result<_>>()?;
        Ok(Operation { name, cycles })
    };
    let mut found = vec![look_up(STAGED, "look up (kept)", 1)?, look_up(WINDOW, "look up", 32)?];
    let repeat = |run: &dyn Fn() -> anyhow::Result<f64>| {
        // The first run warms the caches.
        (0..=rounds).map(|_| run()).skip(1).collect::<anyhow::Result<Vec<f64>>>()
    };
    found.push(Operation { name: COPY, cycles: repeat(&|| copy(size))? });
    found.push(Operation { name: FLOW, cycles: repeat(&new_flow)? });
    Ok(found)
}

/// Returns the ticks that each of [`TIMES`] operations takes.
fn timed(mut operation: impl FnMut(u32) -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let read = || time_stamp().context("this processor has no time-stamp counter to read");
    let began = read()?;
    (0..TIMES).try_for_each(&mut operation)?;
    Ok(read()?.saturating_sub(began) as f64 / f64::from(TIMES))
}

fn copy(size: u32) -> anyhow::Result<f64> {
    let lent = LentSlice::anonymous(PAGES * PAGE_SIZE);
    lent.zero(0, lent.len())?;
    let mut private = vec![0; size as usize];
    timed(|n| {
        lent.copy_to(n as usize % PAGES * PAGE_SIZE, black_box(&mut private))?;
        Ok(())
    })
}

/// Times the verdict on a new flow by a policy.
fn new_flow() -> anyhow::Result<f64> {
    let (egress, counters) = (egress()?, UplinkCounters::default());
    let (to, now): (SocketAddr, _) = (server(), monotonic());
    timed(|_| {
        let decision = egress.connect(black_box(to), Protocol::Udp, now, &counters);
        ensure!(decision.is_some(), "the policy denied {to}");
        Ok(())
    })
}

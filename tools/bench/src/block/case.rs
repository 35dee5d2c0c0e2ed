//! Rows of Ringfence's own disks: one driver domain, and guests that work at the same time.

use std::time::Duration;

use anyhow::{Context, bail};
use ringfence_access::Mode;
use ringfence_block::storage::file::{CacheMode, Engine};
use ringfence_platform::DomId;

use super::args::{BlockArgs, Rw, Storage};
use super::latency::Latencies;
use super::orders::{DiskAnswer, DiskSetup, GuestSetup, HANDLE, Worked, span};
use super::process::{DiskDomain, work};
use super::report::{DiskRow, DomainCounters};
use crate::hub::RunningHub;
use crate::usage::Usage;
use ringfence_driver::switchboard::DiskFrontend;

/// Warm-up time of rings, tables and caches.
const WARM_UP: Duration = Duration::from_millis(300);

/// Settings common to all rows.
pub(super) struct Settings {
    pub(super) storage: Storage,
    pub(super) cache: CacheMode,
    pub(super) engine: Engine,
    pub(super) seconds: Duration,
    /// Runs of each row, of which the median one is printed.
    pub(super) repeat: u16,
    pub(super) depth: u16,
    pub(super) queues: u16,
}

impl Settings {
    pub(super) fn of(args: &BlockArgs) -> Settings {
        let BlockArgs { ref storage, cache, engine, seconds, repeat, depth, queues, .. } = *args;
        Settings { storage: storage.clone(), cache, engine, seconds, repeat, depth, queues }
    }
}

/// Returns the median run by rate.
pub(super) fn middle(mut runs: Vec<DiskRow>) -> Option<DiskRow> {
    runs.sort_by(|a, b| a.iops.total_cmp(&b.iops));
    let middle = runs.len() / 2;
    runs.into_iter().nth(middle)
}

/// Returns the number of TLB flush interrupts of the whole machine so far, if the kernel counts them.
fn tlb_shootdowns() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/interrupts").ok()?;
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix("TLB:"))?;
    Some(line.split_whitespace().map_while(|field| field.parse::<u64>().ok()).sum())
}

/// Parameters of one row.
#[derive(Clone, Copy)]
pub(super) struct DiskCase {
    pub(super) mode: Mode,
    pub(super) guests: u16,
    /// Bytes of a request.
    pub(super) block: u32,
    pub(super) rw: Rw,
    /// Requests that each guest keeps in flight.
    pub(super) depth: u16,
    pub(super) queues: u16,
}

impl DiskCase {
    /// Measures the row as often as the settings ask for. Returns the median run.
    pub(super) fn median(&self, settings: &Settings) -> anyhow::Result<DiskRow> {
        let DiskCase { mode, guests, block, rw, .. } = *self;
        let runs: anyhow::Result<Vec<DiskRow>> =
            (0..settings.repeat.max(1)).map(|_| self.measure(settings)).collect();
        let what = || format!("mode {mode}, {guests} guests, {} of {block} bytes", rw.name());
        middle(runs.with_context(what)?).context("there was no run")
    }

    fn measure(&self, settings: &Settings) -> anyhow::Result<DiskRow> {
        let Settings { storage, seconds: length, .. } = settings;
        let hub = RunningHub::start()?;
        let (_, back_hub) = hub.0.admit(Some(DomId(0)), true)?;
        let mut admitted = Vec::new();
        for _ in 0..self.guests {
            admitted.push(hub.0.admit(None, false)?);
        }
        let span = span(self.guests);
        let setup = DiskSetup::Backend {
            span,
            mode: self.mode.name().to_owned(),
            storage: storage.clone(),
            cache: settings.cache,
            engine: settings.engine,
            guests: admitted.iter().map(|(domain, _)| domain.0).collect(),
            queues: self.queues,
        };
        let back = DiskDomain::start("driver domain", &setup, back_hub)?;
        match back.hear()? {
            DiskAnswer::DevicesMade => {}
            other => bail!("the driver domain said {other:?}"),
        }
        let mut guests = Vec::new();
        for (number, (domain, socket)) in (0u64..).zip(admitted) {
            let base = if *storage == Storage::Memory { 0 } else { number * span };
            let setup = DiskSetup::Guest(GuestSetup {
                domain: domain.0,
                handle: HANDLE,
                core: None,
                frontend: DiskFrontend::of(self.mode),
                block: self.block,
                rw: self.rw,
                depth: self.depth,
                queues: self.queues,
                base,
                span,
            });
            guests.push(DiskDomain::start("guest", &setup, socket)?);
        }
        for domain in guests.iter().chain([&back]) {
            match domain.hear()? {
                DiskAnswer::Ready => {}
                other => bail!("a domain said {other:?}"),
            }
        }
        work(&guests, WARM_UP)?;
        let (before, shot) = (back.usage()?, tlb_shootdowns());
        let worked = work(&guests, *length)?;
        let shot = tlb_shootdowns().zip(shot).map(|(after, before)| after.saturating_sub(before));
        let backend = back.usage()?.since(&before);
        Ok(self.row(storage, &worked, &backend, shot))
    }

    fn row(
        &self,
        storage: &Storage,
        worked: &[Worked],
        backend: &Usage,
        tlb_shootdowns: Option<u64>,
    ) -> DiskRow {
        let mut latencies = Latencies::default();
        let (mut requests, mut iops, mut usage) = (0, 0.0, Usage::default());
        for one in worked {
            latencies.merge(&one.latencies);
            requests += one.requests;
            iops += one.requests as f64 / (one.nanos.max(1) as f64 / 1e9);
            usage = usage.plus(&one.usage);
        }
        DiskRow {
            peer: "ringfence",
            mode: self.mode.name(),
            guests: self.guests,
            block: self.block,
            rw: self.rw,
            depth: self.depth,
            storage: storage.name(),
            requests,
            iops,
            p50_us: latencies.quantile_us(0.5),
            p99_us: latencies.quantile_us(0.99),
            cpu_ns: backend.plus(&usage).cpu_ns,
            backend_cpu_ns: backend.cpu_ns,
            domains: Some(DomainCounters {
                backend_threads: u32::from(self.guests) * u32::from(self.queues),
                backend: *backend,
                guests: usage,
                tlb_shootdowns,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tlb_shootdowns_sum_over_all_processors() {
        let before = tlb_shootdowns();
        assert!(before.is_none_or(|n| tlb_shootdowns().is_some_and(|later| later >= n)));
    }
}

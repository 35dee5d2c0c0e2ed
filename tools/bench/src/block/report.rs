//! Report of the disk benchmark: rows as text and JSON.

use serde::Serialize;

use super::Case;
use super::peers::Served;
use crate::usage::Usage;

/// Result of one row.
pub(super) struct Measured {
    pub(super) case: Case,
    pub(super) storage: String,
    pub(super) requests: u64,
    pub(super) iops: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) backend: Usage,
    pub(super) guests: Usage,
    /// TLB flush interrupts of the whole machine, if the kernel counts them.
    pub(super) tlb_shootdowns: Option<u64>,
}

/// Row as it is printed. Field names are part of the command's interface. Counters of Ringfence's own
/// domains are `null` for programs that serve over NBD.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) mode: &'static str,
    pub(super) guests: u16,
    block: u32,
    rw: &'static str,
    depth: u16,
    storage: String,
    pub(super) iops: f64,
    mib_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    pub(super) map_calls_per_request: Option<f64>,
    pub(super) unmap_calls_per_request: Option<f64>,
    copy_calls_per_request: Option<f64>,
    syscalls_per_request: Option<f64>,
    pub(super) cpu_ns_per_request: f64,
    /// Program that served the disk.
    pub(super) peer: &'static str,
    // Fields below are not printed by every version.
    requests: u64,
    /// Threads that serve rings.
    pub(super) backend_threads: Option<u32>,
    backend_syscalls_per_request: Option<f64>,
    backend_cpu_ns_per_request: f64,
    backend_wakeups_per_request: Option<f64>,
    notifications_per_request: Option<f64>,
    /// TLB flush interrupts of the whole machine for each request.
    pub(super) tlb_shootdowns_per_request: Option<f64>,
}

impl Row {
    pub(super) fn new(measured: Measured) -> Row {
        let Measured { case, storage, requests, iops, p50_us, p99_us, backend, guests, .. } =
            measured;
        let per_request = |count: u64| count as f64 / requests.max(1) as f64;
        let both = backend.plus(&guests);
        Row {
            mode: case.mode.name(),
            guests: case.guests,
            block: case.block,
            rw: case.rw.name(),
            depth: case.depth,
            storage,
            iops,
            mib_per_s: iops * f64::from(case.block) / f64::from(1 << 20),
            p50_us,
            p99_us,
            map_calls_per_request: Some(per_request(backend.maps)),
            unmap_calls_per_request: Some(per_request(backend.unmaps)),
            copy_calls_per_request: Some(per_request(backend.copies)),
            syscalls_per_request: Some(per_request(both.syscalls)),
            cpu_ns_per_request: per_request(both.cpu_ns),
            peer: "ringfence",
            requests,
            backend_threads: Some(u32::from(case.guests) * u32::from(case.queues)),
            backend_syscalls_per_request: Some(per_request(backend.syscalls)),
            backend_cpu_ns_per_request: per_request(backend.cpu_ns),
            backend_wakeups_per_request: Some(per_request(backend.wakeups)),
            notifications_per_request: Some(per_request(both.notifications)),
            tlb_shootdowns_per_request: measured.tlb_shootdowns.map(per_request),
        }
    }

    /// Builds the row of a program that served fio over NBD.
    pub(super) fn served(served: Served, storage: String) -> Row {
        let Served { peer, mode, block, rw, depth, requests, iops, p50_us, p99_us, cpu_ns } =
            served;
        let cpu_ns_per_request = cpu_ns as f64 / requests.max(1) as f64;
        Row {
            mode,
            guests: 1,
            block,
            rw: rw.name(),
            depth,
            storage,
            iops,
            mib_per_s: iops * f64::from(block) / f64::from(1 << 20),
            p50_us,
            p99_us,
            map_calls_per_request: None,
            unmap_calls_per_request: None,
            copy_calls_per_request: None,
            syscalls_per_request: None,
            cpu_ns_per_request,
            peer,
            requests,
            backend_threads: None,
            backend_syscalls_per_request: None,
            backend_cpu_ns_per_request: cpu_ns_per_request,
            backend_wakeups_per_request: None,
            notifications_per_request: None,
            tlb_shootdowns_per_request: None,
        }
    }

    /// Formats the row as a line of the table.
    pub(super) fn line(&self) -> String {
        let count = |n: Option<f64>| n.map_or_else(|| "-".to_owned(), |n| format!("{n:.3}"));
        format!(
            "{:<19} {:<10} {:>6} {:>7} {:<9} {:>5} {:>9.0} {:>8.1} {:>8.1} {:>8.1} {:>7} {:>7} {:>7} \
             {:>8} {:>8.0}",
            self.peer,
            self.mode,
            self.guests,
            self.block,
            self.rw,
            self.depth,
            self.iops,
            self.mib_per_s,
            self.p50_us,
            self.p99_us,
            count(self.map_calls_per_request),
            count(self.unmap_calls_per_request),
            count(self.copy_calls_per_request),
            count(self.syscalls_per_request),
            self.cpu_ns_per_request,
        )
    }
}

/// Returns the heading of the table.
pub(super) fn heading() -> String {
    format!(
        "{:<19} {:<10} {:>6} {:>7} {:<9} {:>5} {:>9} {:>8} {:>8} {:>8} {:>7} {:>7} {:>7} {:>8} {:>8}",
        "peer",
        "mode",
        "guests",
        "block",
        "rw",
        "depth",
        "IOPS",
        "MiB/s",
        "p50 us",
        "p99 us",
        "map",
        "unmap",
        "copy",
        "syscalls",
        "cpu ns"
    )
}

/// Legend below the table.
pub(super) const LEGEND: &str = "\
IOPS and MiB/s: all guests together; every read was checked. `map`, `unmap`, `copy`: grant operations
of the driver domain for each request. `syscalls`, `cpu ns`: for each request, all domains together
(of a program that serves over NBD: without fio).
All columns: docs/perf/howto.md";

#[cfg(test)]
mod tests {
    use ringfence_access::Mode;

    use super::super::args::Rw;
    use super::*;

    #[test]
    fn row_figures_are_per_request_and_fill_every_column() {
        let case =
            Case { mode: Mode::Map, guests: 2, block: 65536, rw: Rw::SeqRead, depth: 8, queues: 3 };
        let backend = Usage { maps: 3200, unmaps: 1600, syscalls: 100, ..Usage::default() };
        let guests = Usage { syscalls: 100, cpu_ns: 40_000, ..Usage::default() };
        let row = Row::new(Measured {
            case,
            storage: "memory".into(),
            requests: 200,
            iops: 1600.0,
            p50_us: 1.0,
            p99_us: 2.0,
            backend,
            guests,
            tlb_shootdowns: Some(400),
        });
        assert_eq!((row.mib_per_s, row.map_calls_per_request), (100.0, Some(16.0)));
        assert_eq!((row.syscalls_per_request, row.cpu_ns_per_request), (Some(1.0), 200.0));
        assert_eq!((row.backend_threads, row.tlb_shootdowns_per_request), (Some(6), Some(2.0)));
        assert_eq!(row.line().len(), heading().len());
    }
}

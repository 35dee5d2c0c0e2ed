//! Report of the disk benchmark: rows and their columns.

use super::args::Rw;
use crate::harness::{Layout, Value, left, right};
use crate::usage::Usage;

/// Row of the disk benchmark: Ringfence's own disks, or a program that served fio over NBD.
#[derive(Clone, Debug)]
pub(super) struct DiskRow {
    /// Program that served the disk.
    pub(super) peer: &'static str,
    pub(super) mode: &'static str,
    pub(super) guests: u16,
    /// Bytes of a request.
    pub(super) block: u32,
    pub(super) rw: Rw,
    pub(super) depth: u16,
    pub(super) storage: String,
    pub(super) requests: u64,
    pub(super) iops: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    /// CPU time of all domains, or of the program's processes without fio.
    pub(super) cpu_ns: u64,
    pub(super) backend_cpu_ns: u64,
    /// Counters of Ringfence's own domains; `None` for a program that serves over NBD.
    pub(super) domains: Option<DomainCounters>,
}

/// Counters of the driver domain and its guests.
#[derive(Clone, Copy, Debug)]
pub(super) struct DomainCounters {
    /// Threads that serve rings.
    pub(super) backend_threads: u32,
    pub(super) backend: Usage,
    /// Sum of all guests.
    pub(super) guests: Usage,
    /// TLB flush interrupts of the whole machine, if the kernel counts them.
    pub(super) tlb_shootdowns: Option<u64>,
}

impl DiskRow {
    fn per_request(&self, count: u64) -> f64 {
        count as f64 / self.requests.max(1) as f64
    }

    fn mib_per_s(&self) -> f64 {
        self.iops * f64::from(self.block) / f64::from(1 << 20)
    }

    /// Returns a counter of Ringfence's own domains for each request.
    fn count(&self, count: impl Fn(&DomainCounters) -> u64) -> Option<f64> {
        self.domains.as_ref().map(|domains| self.per_request(count(domains)))
    }

    /// Returns a counter of all domains together for each request.
    fn total(&self, count: impl Fn(&Usage) -> u64) -> Option<f64> {
        self.count(|domains| count(&domains.backend.plus(&domains.guests)))
    }

    pub(super) fn map_calls(&self) -> Option<f64> {
        self.count(|domains| domains.backend.maps)
    }

    pub(super) fn unmap_calls(&self) -> Option<f64> {
        self.count(|domains| domains.backend.unmaps)
    }

    pub(super) fn tlb_shootdowns(&self) -> Option<f64> {
        let shootdowns = self.domains.as_ref()?.tlb_shootdowns;
        shootdowns.map(|count| self.per_request(count))
    }

    /// Returns the CPU time of all domains in nanoseconds for each request.
    pub(super) fn cost(&self) -> f64 {
        self.per_request(self.cpu_ns)
    }

    /// Returns the threads that serve rings; 0 in a program that serves over NBD.
    pub(super) fn backend_threads(&self) -> u32 {
        self.domains.as_ref().map_or(0, |domains| domains.backend_threads)
    }
}

/// Returns the columns of a row. Counters of Ringfence's own domains are `null` for programs that serve over NBD.
pub(super) fn layout() -> Layout<DiskRow> {
    let calls = |heading| right(heading, 7).digits(3);
    Layout::new()
        .column("mode", |row: &DiskRow| row.mode, left("mode", 10))
        .column("guests", |row| row.guests, right("guests", 6))
        .column("block", |row| row.block, right("block", 7))
        .column("rw", |row| row.rw.name(), left("rw", 9))
        .column("depth", |row| row.depth, right("depth", 5))
        .field("storage", |row| row.storage.clone())
        .column("iops", |row| row.iops, right("IOPS", 9))
        .column("mib_per_s", DiskRow::mib_per_s, right("MiB/s", 8).digits(1))
        .column("p50_us", |row| row.p50_us, right("p50 us", 8).digits(1))
        .column("p99_us", |row| row.p99_us, right("p99 us", 8).digits(1))
        .column("map_calls_per_request", DiskRow::map_calls, calls("map"))
        .column("unmap_calls_per_request", DiskRow::unmap_calls, calls("unmap"))
        .column(
            "copy_calls_per_request",
            |row| row.count(|domains| domains.backend.copies),
            calls("copy"),
        )
        .column(
            "syscalls_per_request",
            |row| row.total(|usage| usage.syscalls),
            right("syscalls", 8).digits(3),
        )
        .column("cpu_ns_per_request", DiskRow::cost, right("cpu ns", 8))
        .column("peer", |row| row.peer, left("peer", 19))
        .field("requests", |row| row.requests)
        .field("backend_threads", |row| {
            Value::from(row.domains.as_ref().map(|domains| domains.backend_threads))
        })
        .field("backend_syscalls_per_request", |row| row.count(|domains| domains.backend.syscalls))
        .field("backend_cpu_ns_per_request", |row| row.per_request(row.backend_cpu_ns))
        .field("backend_wakeups_per_request", |row| row.count(|domains| domains.backend.wakeups))
        .field("notifications_per_request", |row| row.total(|usage| usage.notifications))
        .field("tlb_shootdowns_per_request", DiskRow::tlb_shootdowns)
        .order(&["peer"])
        .legend(LEGEND)
}

const LEGEND: &str = "\
IOPS and MiB/s: all guests together; every read was checked. `map`, `unmap`, `copy`: grant operations
of the driver domain for each request. `syscalls`, `cpu ns`: for each request, all domains together
(of a program that serves over NBD: without fio).
All columns: docs/perf/howto.md";

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> DiskRow {
        let backend = Usage { maps: 3200, unmaps: 1600, syscalls: 100, ..Usage::default() };
        let guests = Usage { syscalls: 100, ..Usage::default() };
        DiskRow {
            peer: "ringfence",
            mode: "map",
            guests: 2,
            block: 65536,
            rw: Rw::SeqRead,
            depth: 8,
            storage: "memory".into(),
            requests: 200,
            iops: 1600.0,
            p50_us: 1.0,
            p99_us: 2.0,
            cpu_ns: 40_000,
            backend_cpu_ns: 0,
            domains: Some(DomainCounters {
                backend_threads: 6,
                backend,
                guests,
                tlb_shootdowns: Some(400),
            }),
        }
    }

    #[test]
    fn row_figures_are_per_request_and_fill_every_column() {
        let row = row();
        assert_eq!((row.mib_per_s(), row.map_calls()), (100.0, Some(16.0)));
        assert_eq!((row.total(|usage| usage.syscalls), row.cost()), (Some(1.0), 200.0));
        assert_eq!((row.backend_threads(), row.tlb_shootdowns()), (6, Some(2.0)));
        assert_eq!(layout().line(&row).len(), layout().heading().len());
    }

    #[test]
    fn counters_of_another_program_are_null() {
        let json = layout().json(&DiskRow { domains: None, ..row() }).unwrap();
        for field in ["map_calls_per_request", "backend_threads", "tlb_shootdowns_per_request"] {
            assert!(json.contains(&format!("\"{field}\":null")), "{field}: {json}");
        }
    }
}

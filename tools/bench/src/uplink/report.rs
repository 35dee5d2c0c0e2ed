//! Report of the uplink benchmark: rows and their columns.

use hdrhistogram::Histogram;

use super::args::{UplinkPeer, Workload};
use super::end::{self, CaseResult, WorkloadKind};
use crate::harness::{Layout, Value, left, median, right};

pub(super) struct UplinkRun {
    pub(super) came: CaseResult,
    /// CPU time of all processes, clients and servers included.
    pub(super) cpu_ns: u64,
    /// System calls of the forwarding process, if they were counted.
    pub(super) syscalls: Option<u64>,
}

impl UplinkRun {
    fn seconds(&self) -> f64 {
        self.came.nanos.max(1) as f64 / 1e9
    }

    fn gbps(&self) -> f64 {
        self.came.bytes as f64 * 8.0 / 1e9 / self.seconds()
    }

    /// Returns the requests or datagrams that arrived each second.
    fn rate(&self) -> f64 {
        self.came.arrived as f64 / self.seconds()
    }

    fn loss(&self) -> f64 {
        1.0 - self.came.arrived as f64 / self.came.sent.max(1) as f64
    }

    fn cpu_ns_per_kb(&self) -> f64 {
        self.cpu_ns as f64 * 1e3 / self.came.bytes.max(1) as f64
    }

    fn syscalls_per_mib(&self) -> Option<f64> {
        let mib = self.came.bytes.max(1) as f64 / f64::from(1 << 20);
        self.syscalls.map(|calls| calls as f64 / mib)
    }
}

/// Row: the runs of a workload behind one peer.
pub(super) struct UplinkRow {
    peer: UplinkPeer,
    case: Workload,
    congestion: String,
    runs: Vec<UplinkRun>,
    /// Nanoseconds of each request in all runs.
    times: Histogram<u64>,
    /// Ratio of Ringfence's figure to that of this peer; Ringfence is better above 1.
    pub(super) ours_to_this: Option<f64>,
}

impl UplinkRow {
    pub(super) fn new(
        peer: UplinkPeer,
        case: Workload,
        congestion: &str,
        runs: Vec<UplinkRun>,
    ) -> anyhow::Result<UplinkRow> {
        let mut times = end::histogram()?;
        for (value, count) in runs.iter().flat_map(|run| &run.came.times) {
            times.saturating_record_n(*value, *count);
        }
        let congestion = congestion.to_owned();
        Ok(UplinkRow { peer, case, congestion, runs, times, ours_to_this: None })
    }

    fn median(&self, figure: impl Fn(&UplinkRun) -> f64) -> f64 {
        median(self.runs.iter().map(figure))
    }

    fn is_datagrams(&self) -> bool {
        self.case.kind == WorkloadKind::UdpStream
    }

    fn is_lookups(&self) -> bool {
        self.case.kind == WorkloadKind::BulkDns
    }

    fn is_timed(&self) -> bool {
        use WorkloadKind::{Http, TcpCrr, TcpRr};
        self.is_lookups() || matches!(self.case.kind, TcpRr | TcpCrr | Http)
    }

    fn gbps(&self) -> Option<f64> {
        let is_bulk = !matches!(self.case.kind, WorkloadKind::TcpRr | WorkloadKind::TcpCrr);
        (is_bulk && !self.is_lookups()).then(|| self.median(UplinkRun::gbps))
    }

    fn pps(&self) -> Option<f64> {
        self.is_datagrams().then(|| self.median(UplinkRun::rate))
    }

    fn loss(&self) -> Option<f64> {
        (self.is_datagrams() || self.is_lookups()).then(|| self.median(UplinkRun::loss))
    }

    fn per_second(&self) -> Option<f64> {
        self.is_timed().then(|| self.median(UplinkRun::rate))
    }

    fn quantile_us(&self, part: f64) -> Option<f64> {
        self.is_timed().then(|| self.times.value_at_quantile(part) as f64 / 1e3)
    }

    /// Returns the retransmission timeouts of the clients' kernels, of a row about slow peers.
    fn timeouts(&self) -> Option<f64> {
        let is_slow = self.case.kind == WorkloadKind::SlowPeer;
        is_slow.then(|| self.median(|run| run.came.timeouts as f64))
    }

    fn syscalls_per_mib(&self) -> Option<f64> {
        let calls: Vec<f64> = self.runs.iter().filter_map(UplinkRun::syscalls_per_mib).collect();
        (!calls.is_empty()).then(|| median(calls.into_iter()))
    }

    /// Returns the figure by which peers are compared.
    pub(super) fn figure(&self) -> Option<f64> {
        self.per_second().or(self.pps()).or(self.gbps())
    }
}

/// Returns the columns of a row.
pub(super) fn layout() -> Layout<UplinkRow> {
    // Datagrams have no congestion control.
    let congestion = |row: &UplinkRow| {
        let is_tcp = !row.is_datagrams() && !row.is_lookups();
        if is_tcp { row.congestion.clone() } else { "none".to_owned() }
    };
    Layout::new()
        .field("experiment", |_: &UplinkRow| "uplink")
        .column("peer", |row| row.peer.name(), left("peer", 11))
        .column("case", |row| row.case.name, left("case", 15))
        .column("direction", |row| row.case.direction.name(), left("way", 7))
        .column("mtu", |row| row.case.mtu, right("mtu", 5))
        .column("streams", |row| row.case.streams, right("n", 3))
        .column("size", |row| row.case.size, right("size", 5))
        .column("congestion", congestion, left("tcp", 6))
        .field("rounds", |row| row.runs.len())
        .column("gbps", |row| Value::if_some(row.gbps()), right("Gbit/s", 8).digits(3))
        .column("pps", |row| Value::if_some(row.pps()), right("kpps", 9).unit(1e3).digits(1))
        .column("loss", |row| Value::if_some(row.loss()), right("loss %", 7).unit(0.01).digits(1))
        .column("p50_us", |row| Value::if_some(row.quantile_us(0.5)), right("p50 us", 9).digits(1))
        .column("p99_us", |row| Value::if_some(row.quantile_us(0.99)), right("p99 us", 9).digits(1))
        .column("per_second", |row| Value::if_some(row.per_second()), right("per s", 9))
        .column("timeouts", |row| Value::if_some(row.timeouts()), right("RTOs", 5))
        .column("cpu_ns_per_kb", |row| row.median(UplinkRun::cpu_ns_per_kb), right("cpu ns/kB", 9))
        .column(
            "syscalls_per_mib",
            |row| Value::if_some(row.syscalls_per_mib()),
            right("calls/MiB", 9).digits(1),
        )
        .column("ours_to_this", |row| Value::if_some(row.ours_to_this), right("ratio", 6).digits(2))
        .order(&["case", "direction", "mtu", "streams", "size", "congestion", "peer"])
        .legend(LEGEND)
}

const LEGEND: &str = "\
`ratio`: ours to this one's, of what each row is about (requests, datagrams, bytes a second): above 1
we are ahead. `n`: connections. `cpu`: of all processes, clients and servers included. `loss`: of what
was sent as fast as it could be; kpps are those that arrived. `calls`: system calls of the process that
carries packets, with --syscalls. `RTOs`: retransmission timeouts of the client's kernel.";

#[cfg(test)]
mod tests {
    use super::super::args::UplinkDirection;
    use super::*;

    fn row(kind: WorkloadKind) -> UplinkRow {
        let case = Workload {
            name: "a-case",
            kind,
            direction: UplinkDirection::HostNs,
            mtu: 1500,
            streams: 2,
            size: 64,
            inbound: false,
            shape: None,
        };
        let came = CaseResult {
            nanos: 2_000_000_000,
            bytes: 1 << 20,
            sent: 40,
            arrived: 30,
            times: vec![(5000, 99), (90_000, 1)],
            timeouts: 0,
        };
        let runs = vec![UplinkRun { came, cpu_ns: 1 << 20, syscalls: Some(50) }];
        UplinkRow::new(UplinkPeer::Pasta, case, "bbr", runs).unwrap()
    }

    fn json(row: &UplinkRow) -> serde_json::Value {
        serde_json::from_str(&layout().json(row).unwrap()).unwrap()
    }

    #[test]
    fn figures_depend_on_the_workload() {
        let timed = json(&row(WorkloadKind::TcpRr));
        assert_eq!((&timed["per_second"], &timed["congestion"]), (&15.0.into(), &"bbr".into()));
        assert!(timed["p50_us"].as_f64().is_some_and(|us| (us - 5.0).abs() < 0.1), "{timed}");
        assert_eq!(timed.get("gbps").or(timed.get("pps")).or(timed.get("ours_to_this")), None);
        let datagrams = json(&row(WorkloadKind::UdpStream));
        assert_eq!((&datagrams["pps"], &datagrams["loss"]), (&15.0.into(), &0.25.into()));
        assert_eq!(
            (&datagrams["congestion"], &datagrams["direction"]),
            (&"none".into(), &"host-ns".into())
        );
        let stream = json(&row(WorkloadKind::TcpStream));
        assert_eq!(
            (&stream["syscalls_per_mib"], &stream["cpu_ns_per_kb"]),
            (&50.0.into(), &1000.0.into())
        );
        assert_eq!(stream["gbps"], f64::from(1 << 20) * 4e-9);
    }

    #[test]
    fn row_line_has_one_cell_per_heading() {
        let line = layout().line(&row(WorkloadKind::UdpStream));
        assert_eq!(line.len(), layout().heading().len(), "{line}");
        assert_eq!(line.split_whitespace().count(), 17, "{line}");
        assert!(line.contains("   25.0 "), "{line}");
    }
}

//! Report of the redesigned experiments: text, JSON and page.

use clap::ValueEnum;
use ringfence_access::Mode;
use ringfence_driver::switchboard::WindowLevels;

use super::args::RedesignedExperiment;
use super::revoke::Revoke;
use crate::gso::case::{Modes, StreamCase};
use crate::gso::cpu::Times;
use crate::gso::report::{StreamRun, reuse_sum};
use crate::harness::{Attempt, Bar, BarChart, BarGroup, Case, Layout, Page, Summary, left, right};

/// One experiment with the guests' pages in one access mode.
#[derive(Clone)]
pub(super) struct ExperimentCase {
    pub(super) experiment: RedesignedExperiment,
    pub(super) stream: StreamCase,
}

impl ExperimentCase {
    fn mode(&self) -> String {
        self.experiment.name_of(self.stream.modes)
    }

    fn is_window(&self) -> bool {
        self.stream.modes == Modes::both(Mode::Window)
    }

    /// Returns `true` if this is the original mechanism of the other case's experiment.
    pub(super) fn is_original_of(&self, other: &ExperimentCase) -> bool {
        self.experiment == other.experiment && self.stream.modes == other.experiment.original()
    }
}

impl Case for ExperimentCase {
    type Measured = StreamRun;

    fn name(&self) -> String {
        format!("{} {}", self.experiment.name(), self.mode())
    }

    fn run(&self, attempt: &Attempt<'_>) -> anyhow::Result<StreamRun> {
        self.stream.run(attempt)
    }
}

/// Returns the published throughput ratio and maximum cost ratio of the redesigned mechanism to the
/// original one, on hardware with two links of 10 Gbit/s.
fn published(experiment: RedesignedExperiment) -> (Option<f64>, f64) {
    match experiment {
        RedesignedExperiment::Receive => (Some(1.18), 0.69),
        RedesignedExperiment::Transmit => (None, 0.69),
        RedesignedExperiment::GuestGuest => (Some(1.52), 0.69),
    }
}

/// Returns the published ratios for a row that was measured on Xen: those of windows to the original mechanism.
pub(crate) fn published_text(experiment: &str, setup: &str) -> Option<String> {
    let known =
        RedesignedExperiment::value_variants().iter().find(|known| known.name() == experiment)?;
    if !setup.starts_with(Mode::Window.name()) {
        return None;
    }
    let (gbps, cost) = published(*known);
    let throughput = gbps.map(|ratio| format!("throughput {ratio:.2}, ")).unwrap_or_default();
    Some(format!("{throughput}cost {cost:.2}"))
}

/// Returns the columns of an experiment. Times are nanoseconds of CPU time for each received kilobyte (1000 bytes). Ratios are to
/// the original mechanism in the same round.
fn layout() -> Layout<Summary<ExperimentCase>> {
    type Row = Summary<ExperimentCase>;
    let published_gbps =
        |row: &Row| published(row.case.experiment).0.filter(|_| row.case.is_window());
    let published_cost =
        |row: &Row| row.case.is_window().then_some(published(row.case.experiment).1);
    let time = |heading| right(heading, 10).digits(1);
    Layout::new()
        .column("experiment", |row: &Row| row.case.experiment.name(), left("experiment", 12))
        .column("mode", |row| row.case.mode(), right("mode", 10))
        .column("gbps", |row| row.median(StreamRun::gbps), right("Gbit/s", 10).digits(2))
        .column("cost_ns_per_kb", |row| row.median(StreamRun::cost), time("cost"))
        .column(
            "frontend_user",
            |row| row.median(|run| run.per_kb(run.split.frontend.user_ns)),
            time("fe user"),
        )
        .column(
            "frontend_sys",
            |row| row.median(|run| run.per_kb(run.split.frontend.sys_ns)),
            time("fe sys"),
        )
        .column(
            "backend_user",
            |row| row.median(|run| run.per_kb(run.split.backend.user_ns)),
            time("be user"),
        )
        .column(
            "backend_sys",
            |row| row.median(|run| run.per_kb(run.split.backend.sys_ns)),
            time("be sys"),
        )
        .written(
            "reused_share",
            |row| reuse(row).reused_share(),
            right("reused", 10),
            |row| {
                let share = reuse(row).reused_share();
                share.map_or_else(|| "-".to_owned(), |share| format!("{:.4} %", share * 100.0))
            },
        )
        .column(
            "issued",
            |row| row.case.is_window().then(|| reuse(row).issued),
            right("issued", 10),
        )
        .written(
            "gbps_ratio",
            |row| row.ratio(StreamRun::gbps),
            right("ratio", 10),
            move |row| beside(row.ratio(StreamRun::gbps), published_gbps(row)),
        )
        .written(
            "cost_ratio",
            |row| row.ratio(StreamRun::cost),
            right("ratio", 10),
            move |row| beside(row.ratio(StreamRun::cost), published_cost(row)),
        )
        .field("published_gbps_ratio", published_gbps)
        .field("published_cost_ratio", published_cost)
        .order(&["experiment", "mode", "gbps", "gbps_ratio", "cost_ns_per_kb", "cost_ratio"])
}

/// Returns the uses of grants in all rounds of a row.
fn reuse(row: &Summary<ExperimentCase>) -> WindowLevels {
    reuse_sum(row.runs.iter().map(|run| run.reuse))
}

/// Returns the columns of a revocation time.
fn revoke_layout() -> Layout<Revoke> {
    Layout::new()
        .field("experiment", |_: &Revoke| "revoke")
        .column("peer", |row| row.peer, left("peer", 12))
        .written(
            "handshake_us",
            |row| row.handshake_us,
            right("handshake", 10),
            |row| row.handshake_us.map_or_else(|| "never".to_owned(), |us| format!("{us:.2}")),
        )
        .column("one_sided_us", |row| row.one_sided_us, right("alone", 10).digits(2))
        .column("forced_us", |row| row.forced_us, right("by force", 10).digits(2))
}

/// All results of the experiments.
pub(super) struct RedesignedReport {
    pub(super) rows: Vec<Summary<ExperimentCase>>,
    pub(super) revokes: Vec<Revoke>,
}

impl RedesignedReport {
    /// Returns one line of JSON for each row.
    pub(super) fn json(&self) -> serde_json::Result<Vec<String>> {
        let (layout, revoke_layout) = (layout(), revoke_layout());
        let rows = self.rows.iter().map(|row| layout.json(row));
        rows.chain(self.revokes.iter().map(|row| revoke_layout.json(row))).collect()
    }

    /// Returns the tables as text for a terminal.
    pub(super) fn text(&self) -> String {
        let experiments = layout().table(&self.rows);
        let revokes = revoke_layout().table(&self.revokes);
        format!("{experiments}\n{revokes}\n{LEGEND}\n")
    }

    /// Returns a page with the tables and plots.
    pub(super) fn page(&self) -> Page {
        let mut page = Page::new("Redesigned grants: original mechanism and windows");
        page.text(
            "One TCP stream of super-packets between kernels. The first row of each experiment is the original mechanism, \
             mode window the redesigned one. Ratios are to the first row, in the same round; what was published stands \
             behind the stroke. Times are nanoseconds of processor time for each kilobyte that arrived.",
        );
        page.rows("Streams", &layout(), &self.rows);
        let mut figure = |title: &str, unit: &str, less_is_better, figure: Figure<'_>| {
            page.chart(&BarChart {
                id: title.to_owned(),
                title: title.to_owned(),
                unit: unit.to_owned(),
                less_is_better,
                groups: groups(&self.rows, figure),
            });
        };
        figure("Throughput", "Gbit/s", false, &StreamRun::gbps);
        figure("Cost of everything", "ns/kB", true, &StreamRun::cost);
        figure("Cost of the driver domain", "ns/kB", true, &|run| {
            both_times(run, run.split.backend)
        });
        figure("Cost of frontends", "ns/kB", true, &|run| both_times(run, run.split.frontend));
        page.heading("To have a page back");
        page.rows("Time of a revocation, µs for each page", &revoke_layout(), &self.revokes);
        page
    }
}

/// Figure of a run that a chart shows.
type Figure<'a> = &'a dyn Fn(&StreamRun) -> f64;

/// Returns the CPU time for each received kilobyte in user space and in the kernel together.
fn both_times(run: &StreamRun, times: Times) -> f64 {
    run.per_kb(times.user_ns) + run.per_kb(times.sys_ns)
}

/// Returns a group for each experiment, with a bar for each mode.
fn groups(rows: &[Summary<ExperimentCase>], figure: Figure<'_>) -> Vec<BarGroup> {
    let mut groups: Vec<BarGroup> = Vec::new();
    for row in rows {
        let name = row.case.experiment.name();
        let values = row.runs.iter().map(figure).collect();
        let bar =
            Bar { name: row.case.mode(), values, published: None, ours: row.case.is_window() };
        match groups.iter_mut().find(|group| group.name == name) {
            Some(group) => group.bars.push(bar),
            None => groups.push(BarGroup { name: name.to_owned(), bars: vec![bar] }),
        }
    }
    groups
}

const LEGEND: &str = "\
Times are ns of processor time for each kB that arrived, or us for each page. Ratios are to the
first row, in the same round; what was published stands behind the stroke.";

/// Formats a measured ratio with the published one.
fn beside(ratio: f64, published: Option<f64>) -> String {
    published
        .map_or_else(|| format!("{ratio:.2}"), |published| format!("{ratio:.2}/{published:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    use ringfence_access::window::Revocation;

    use crate::gso::args::{StreamPath, StreamSetup};
    use crate::gso::cpu::Split;
    use crate::gso::report::Moved;

    const ORIGINAL: Modes = Modes { sender: Mode::Map, receiver: Mode::Copy };
    const WINDOW: Modes = Modes { sender: Mode::Window, receiver: Mode::Window };

    fn run(modes: Modes, bytes: u64) -> StreamRun {
        let reused = if modes == WINDOW { 99 } else { 0 };
        let issued = reused / 99;
        let cpu_ns = 1_000_000;
        let backend = Times { user_ns: cpu_ns / 4, sys_ns: cpu_ns / 8 };
        StreamRun {
            bytes,
            nanos: 1_000_000_000,
            cpu_ns,
            split: Split { frontend: Times::default(), backend },
            moved: Moved::default(),
            total: Moved::default(),
            reuse: WindowLevels { reused, issued, ..WindowLevels::default() },
        }
    }

    fn row(modes: Modes, bytes: [u64; 2]) -> Summary<ExperimentCase> {
        let stream = StreamCase {
            path: StreamPath::GuestGuest,
            setup: StreamSetup::Whole,
            modes,
            revocation: Revocation::Plain,
            length: Duration::ZERO,
        };
        Summary {
            case: ExperimentCase { experiment: RedesignedExperiment::GuestGuest, stream },
            runs: bytes.map(|bytes| run(modes, bytes)).to_vec(),
            baseline: [1_000_000, 10_000_000].map(|bytes| run(ORIGINAL, bytes)).to_vec(),
        }
    }

    #[test]
    fn ratios_compare_with_original_mode_of_same_round() {
        let rows =
            vec![row(ORIGINAL, [1_000_000, 10_000_000]), row(WINDOW, [2_000_000, 20_000_000])];
        let revoke =
            Revoke { peer: "stopped", handshake_us: None, one_sided_us: 1.0, forced_us: 2.0 };
        let report = RedesignedReport { rows, revokes: vec![revoke] };
        let lines = report.json().unwrap();
        let values = lines.iter().map(|line| serde_json::from_str::<serde_json::Value>(line));
        let values = values.collect::<Result<Vec<_>, _>>().unwrap();
        let [original, window, _] = values.as_slice() else { panic!("{lines:?}") };
        assert_eq!((&window["gbps_ratio"], &window["cost_ratio"]), (&2.0.into(), &0.5.into()));
        assert_eq!((&window["reused_share"], &window["issued"]), (&0.99.into(), &2.into()));
        assert_eq!(original["mode"], "map+copy");
        assert_eq!(window["published_gbps_ratio"], 1.52);
        assert_eq!(window["cost_ns_per_kb"], 50.0);
        assert_eq!((&window["backend_user"], &window["backend_sys"]), (&12.5.into(), &6.25.into()));
        assert_eq!(original["gbps_ratio"], 1.0);
        assert!(original["reused_share"].is_null() && original["issued"].is_null());
        assert!(original["published_cost_ratio"].is_null(), "{original}");
        assert!(lines[1].contains("\"backend_sys\":6.25"), "{}", lines[1]);
        assert!(lines[2].contains("\"handshake_us\":null"), "{}", lines[2]);
        let text = report.text();
        assert!(text.contains("2.00/1.52") && text.contains("never"), "{text}");
        assert!(report.page().finish().contains("guest-guest"));
    }
}

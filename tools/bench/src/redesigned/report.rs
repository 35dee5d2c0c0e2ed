//! Report of the redesigned experiments: text, JSON and page.

use clap::ValueEnum;
use ringfence_access::Mode;
use serde::Serialize;

use super::args::Experiment;
use super::revoke::Revoke;
use crate::gso::case::Modes;
use crate::gso::report::{Measured, reuse_sum};
use crate::median;
use crate::page::{Page, Plot, Scale, Series};

/// Result of one run.
pub(super) struct MeasuredRun {
    pub(super) round: u32,
    pub(super) experiment: Experiment,
    pub(super) modes: Modes,
    pub(super) measured: Measured,
}

/// Returns the published throughput ratio and maximum cost ratio of the redesigned mechanism to the
/// original one, on hardware with two links of 10 Gbit/s.
fn published(experiment: Experiment) -> (Option<f64>, f64) {
    match experiment {
        Experiment::Receive => (Some(1.18), 0.69),
        Experiment::Transmit => (None, 0.69),
        Experiment::GuestGuest => (Some(1.52), 0.69),
    }
}

/// Returns the published ratios for a row that was measured on Xen: those of windows to the original mechanism.
pub(crate) fn published_text(experiment: &str, setup: &str) -> Option<String> {
    let known = Experiment::value_variants().iter().find(|known| known.name() == experiment)?;
    if !setup.starts_with(Mode::Window.name()) {
        return None;
    }
    let (gbps, cost) = published(*known);
    let throughput = gbps.map(|ratio| format!("throughput {ratio:.2}, ")).unwrap_or_default();
    Some(format!("{throughput}cost {cost:.2}"))
}

/// Row as it is printed. Field names are part of the command's interface. Times are nanoseconds of
/// CPU time for each received kilobyte (1000 bytes).
#[derive(Clone, Debug, Serialize)]
struct Row {
    experiment: &'static str,
    mode: String,
    gbps: f64,
    cost_ns_per_kb: f64,
    frontend_user: f64,
    frontend_sys: f64,
    backend_user: f64,
    backend_sys: f64,
    /// Share of uses of a page without a grant operation in the stream, and the number of the others.
    reused_share: Option<f64>,
    issued: Option<u64>,
    /// Throughput ratio to the original mechanism in the same round.
    gbps_ratio: f64,
    cost_ratio: f64,
    /// Published throughput ratio of the redesigned mechanism.
    published_gbps_ratio: Option<f64>,
    published_cost_ratio: Option<f64>,
}

/// Row of a revocation time.
#[derive(Clone, Debug, Serialize)]
struct RevokeRow {
    experiment: &'static str,
    peer: &'static str,
    /// Null if the peer never responded.
    handshake_us: Option<f64>,
    one_sided_us: f64,
    forced_us: f64,
}

/// All results of the experiments.
pub(super) struct Report {
    pub(super) runs: Vec<MeasuredRun>,
    pub(super) revokes: Vec<Revoke>,
}

impl Report {
    fn rows(&self) -> Vec<Row> {
        let mut rows: Vec<Row> = Vec::new();
        for run in self.runs.iter().filter(|run| run.round == 1) {
            rows.push(self.row(run.experiment, run.modes));
        }
        rows
    }

    fn row(&self, experiment: Experiment, modes: Modes) -> Row {
        let of = |modes| {
            let runs = self.runs.iter();
            runs.filter(move |run| run.experiment == experiment && run.modes == modes)
                .map(|run| &run.measured)
        };
        let figure = |figure: fn(&Measured) -> f64| median(of(modes).map(figure));
        let ratio = |figure: fn(&Measured) -> f64| {
            let pairs = of(modes).zip(of(experiment.original()));
            median(
                pairs.map(|(run, original)| figure(run) / figure(original).max(f64::MIN_POSITIVE)),
            )
        };
        let window = modes == Modes::both(Mode::Window);
        let reuse = reuse_sum(of(modes).map(|run| run.reuse));
        let (gbps, cost) = published(experiment);
        Row {
            experiment: experiment.name(),
            mode: experiment.name_of(modes),
            gbps: figure(Measured::gbps),
            cost_ns_per_kb: figure(|run| run.per_kb(run.cpu_ns)),
            frontend_user: figure(|run| run.per_kb(run.split.frontend.user_ns)),
            frontend_sys: figure(|run| run.per_kb(run.split.frontend.sys_ns)),
            backend_user: figure(|run| run.per_kb(run.split.backend.user_ns)),
            backend_sys: figure(|run| run.per_kb(run.split.backend.sys_ns)),
            reused_share: reuse.reused_share(),
            issued: window.then_some(reuse.issued),
            gbps_ratio: ratio(Measured::gbps),
            cost_ratio: ratio(|run| run.per_kb(run.cpu_ns)),
            published_gbps_ratio: gbps.filter(|_| window),
            published_cost_ratio: window.then_some(cost),
        }
    }

    fn revoke_rows(&self) -> impl Iterator<Item = RevokeRow> + '_ {
        self.revokes.iter().map(|revoke| RevokeRow {
            experiment: "revoke",
            peer: revoke.peer,
            handshake_us: revoke.handshake_us,
            one_sided_us: revoke.one_sided_us,
            forced_us: revoke.forced_us,
        })
    }

    /// Returns one line of JSON for each row.
    pub(super) fn json(&self) -> anyhow::Result<Vec<String>> {
        let rows = self.rows().into_iter().map(|row| Ok(serde_json::to_string(&row)?));
        rows.chain(self.revoke_rows().map(|row| Ok(serde_json::to_string(&row)?))).collect()
    }

    /// Returns the tables as text for a terminal.
    pub(super) fn text(&self) -> String {
        let mut text = line(HEADING.map(str::to_owned));
        for row in self.rows() {
            text += &line(row.cells());
        }
        text += "\n";
        text += &line(REVOKE_HEADING.map(str::to_owned));
        for row in self.revoke_rows() {
            text += &line(row.cells());
        }
        text + "\nTimes are ns of processor time for each kB that arrived, or us for each page. Ratios are to the\n\
                first row, in the same round; what was published stands behind the stroke.\n"
    }

    /// Returns a page with the tables and plots.
    pub(super) fn page(&self) -> anyhow::Result<Page> {
        let mut page = Page::new("Redesigned grants: original mechanism and windows");
        page.text(
            "One TCP stream of super-packets between kernels. The first row of each experiment is the original mechanism, \
             mode window the redesigned one. Ratios are to the first row, in the same round; what was published stands \
             behind the stroke. Times are nanoseconds of processor time for each kilobyte that arrived.",
        );
        let rows = self.rows();
        let cells: Vec<Vec<String>> = rows.iter().map(|row| row.cells().to_vec()).collect();
        page.table(&HEADING, &cells);
        let mut names: Vec<String> = rows.iter().map(|row| row.experiment.to_owned()).collect();
        names.dedup();
        let mut figure = |title: &str, unit, figure: fn(&Row) -> f64| {
            page.plot(&Plot {
                title: title.to_owned(),
                x: ("experiment", Scale::Names(names.clone())),
                y: (unit, Scale::Linear),
                series: series(&rows, &names, figure),
            })
        };
        figure("Throughput", "Gbit/s", |row| row.gbps)?;
        figure("Cost of everything", "ns/kB", |row| row.cost_ns_per_kb)?;
        figure("Cost of the driver domain", "ns/kB", |row| row.backend_user + row.backend_sys)?;
        figure("Cost of frontends", "ns/kB", |row| row.frontend_user + row.frontend_sys)?;
        page.heading("To have a page back");
        let cells: Vec<Vec<String>> = self.revoke_rows().map(|row| row.cells().to_vec()).collect();
        page.table(&REVOKE_HEADING, &cells);
        Ok(page)
    }
}

/// Returns a series for each mode, over the experiments.
fn series(rows: &[Row], names: &[String], figure: fn(&Row) -> f64) -> Vec<Series> {
    let of = |mode: &str| {
        let points = rows.iter().filter(|row| row.mode == mode).filter_map(|row| {
            let place = (0u8..).zip(names).find(|(_, name)| *name == row.experiment)?;
            Some((f64::from(place.0), figure(row)))
        });
        Series::new(mode, points.collect())
    };
    let mut modes: Vec<&str> = Vec::new();
    for row in rows {
        if !modes.contains(&row.mode.as_str()) {
            modes.push(&row.mode);
        }
    }
    modes.into_iter().map(of).collect()
}

const HEADING: [&str; 12] = [
    "experiment",
    "mode",
    "Gbit/s",
    "ratio",
    "cost",
    "ratio",
    "fe user",
    "fe sys",
    "be user",
    "be sys",
    "reused",
    "issued",
];
const REVOKE_HEADING: [&str; 4] = ["peer", "handshake", "alone", "by force"];

fn line<const N: usize>(cells: [String; N]) -> String {
    let mut text = String::new();
    for (n, cell) in cells.iter().enumerate() {
        text += &if n == 0 { format!("{cell:<12}") } else { format!(" {cell:>10}") };
    }
    text + "\n"
}

/// Formats a measured ratio with the published one.
fn beside(ratio: f64, published: Option<f64>) -> String {
    published
        .map_or_else(|| format!("{ratio:.2}"), |published| format!("{ratio:.2}/{published:.2}"))
}

impl Row {
    fn cells(&self) -> [String; 12] {
        [
            self.experiment.to_owned(),
            self.mode.clone(),
            format!("{:.2}", self.gbps),
            beside(self.gbps_ratio, self.published_gbps_ratio),
            format!("{:.1}", self.cost_ns_per_kb),
            beside(self.cost_ratio, self.published_cost_ratio),
            format!("{:.1}", self.frontend_user),
            format!("{:.1}", self.frontend_sys),
            format!("{:.1}", self.backend_user),
            format!("{:.1}", self.backend_sys),
            self.reused_share
                .map_or_else(|| "-".to_owned(), |share| format!("{:.4} %", share * 100.0)),
            self.issued.map_or_else(|| "-".to_owned(), |issued| issued.to_string()),
        ]
    }
}

impl RevokeRow {
    fn cells(&self) -> [String; 4] {
        [
            self.peer.to_owned(),
            self.handshake_us.map_or_else(|| "never".to_owned(), |us| format!("{us:.2}")),
            format!("{:.2}", self.one_sided_us),
            format!("{:.2}", self.forced_us),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gso::args::{Path, Setup};
    use crate::gso::cpu::{Split, Times};
    use crate::gso::report::Moved;
    use ringfence_driver::switchboard::WindowLevels;

    const ORIGINAL: Modes = Modes { sender: Mode::Map, receiver: Mode::Copy };
    const WINDOW: Modes = Modes { sender: Mode::Window, receiver: Mode::Window };

    fn run(round: u32, modes: Modes, bytes: u64, cpu_ns: u64) -> MeasuredRun {
        let reused = if modes == WINDOW { 99 } else { 0 };
        let issued = reused / 99;
        let backend = Times { user_ns: cpu_ns / 4, sys_ns: cpu_ns / 8 };
        let measured = Measured {
            path: Path::GuestGuest,
            setup: Setup::Whole,
            bytes,
            nanos: 1_000_000_000,
            cpu_ns,
            split: Split { frontend: Times::default(), backend },
            moved: Moved::default(),
            reuse: WindowLevels { reused, issued, ..WindowLevels::default() },
        };
        MeasuredRun { round, experiment: Experiment::GuestGuest, modes, measured }
    }

    #[test]
    fn ratios_compare_with_original_mode_of_same_round() {
        let runs = vec![
            run(1, ORIGINAL, 1_000_000, 1_000_000),
            run(1, WINDOW, 2_000_000, 1_000_000),
            run(2, ORIGINAL, 10_000_000, 1_000_000),
            run(2, WINDOW, 20_000_000, 1_000_000),
        ];
        let revoke =
            Revoke { peer: "stopped", handshake_us: None, one_sided_us: 1.0, forced_us: 2.0 };
        let report = Report { runs, revokes: vec![revoke] };
        let rows = report.rows();
        assert_eq!(rows.len(), 2);
        let window = &rows[1];
        assert_eq!((window.gbps_ratio, window.cost_ratio), (2.0, 0.5));
        assert_eq!((window.reused_share, window.issued), (Some(0.99), Some(2)));
        assert_eq!(rows[0].mode, "map+copy");
        assert_eq!(window.published_gbps_ratio, Some(1.52));
        assert_eq!(
            (window.cost_ns_per_kb, window.backend_user, window.backend_sys),
            (50.0, 12.5, 6.25)
        );
        assert_eq!((rows[0].gbps_ratio, rows[0].reused_share, rows[0].issued), (1.0, None, None));
        let lines = report.json().unwrap();
        assert!(lines[1].contains("\"backend_sys\":6.25"), "{}", lines[1]);
        assert!(lines[2].contains("\"handshake_us\":null"), "{}", lines[2]);
        let text = report.text();
        assert!(text.contains("2.00/1.52") && text.contains("never"), "{text}");
        assert!(report.page().unwrap().finish().contains("guest-guest"));
    }
}

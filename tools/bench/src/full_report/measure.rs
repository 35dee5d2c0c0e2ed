//! Measurement of the sections: each command is a process of this program, once in each round.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use ringfence_hostnet::causes::causes;
use ringfence_sandbox::owned_child::OwnedChild;
use ringfence_sandbox::spawn::THIS_PROGRAM;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use super::args::{ReportArgs, SectionName};
use super::document::{Document, Outcome, RunFacts, Section};
use super::machine;
use super::rows::{self, Rounds, Row};
use super::sections::{Plan, SECTIONS, Spec};
use crate::harness::{Attempt, Case, progress};

/// Name of the file that disks are measured with, in the directory of the run.
const DISK: &str = "disk.img";

/// Time limit for one command. The longest one of a whole run takes about a minute.
const SECTION_WITHIN: Duration = Duration::from_secs(600);
/// Pause between two looks at a command.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Measures the sections that are wanted. After each round the document so far goes to the file of `--save`, so that a run
/// that is cut short keeps its rounds.
///
/// # Errors
///
/// Returns an error if the measurement cannot begin or the file cannot be written. A section that fails is part of the
/// document.
pub(super) fn measure(args: &ReportArgs) -> anyhow::Result<Document> {
    let plan = Plan { quick: args.quick, root: rustix::process::geteuid().is_root() };
    let (began, busy_before) = (now()?, machine::busy()?);
    let directory = RunDirectory::new()?;
    let wanted: Vec<&Spec> = SECTIONS.iter().filter(|spec| args.wants(spec.name)).collect();
    let progress = progress(wanted.len() * args.rounds() as usize);
    let start = Instant::now();
    let case = |spec: &&'static Spec| SectionCase {
        spec,
        words: spec.words(&plan),
        directory: directory.0.clone(),
        start,
    };
    let cases: Vec<SectionCase> =
        wanted.iter().filter(|spec| spec.missing().is_none()).map(case).collect();
    progress.set_length(cases.len() as u64 * u64::from(args.rounds()));
    let (facts, programs) = (machine::facts()?, programs(&cases));
    let mut ends: HashMap<SectionName, Vec<RunEnd>> = HashMap::new();
    let document = |rounds, ends: &HashMap<SectionName, Vec<RunEnd>>| {
        let runs = |spec: &Spec| {
            let is_measured = cases.iter().any(|case| case.spec.name == spec.name);
            is_measured.then(|| ends.get(&spec.name).cloned().unwrap_or_default())
        };
        let sections = wanted.iter().map(|spec| section(spec, &plan, runs(spec))).collect();
        let run = RunFacts {
            began: began.clone(),
            command: std::env::args().skip(1).collect::<Vec<_>>().join(" "),
            rounds,
            quick: args.quick,
            busy_before,
            busy_after: machine::busy()?,
        };
        anyhow::Ok(Document::new(run, facts.clone(), programs.clone(), sections))
    };
    for round in 1..=args.rounds() {
        for case in &cases {
            progress.set_message(format!("round {round}: {}", case.name()));
            let end = case.run(&Attempt { number: 0, progress: &progress })?;
            ends.entry(case.spec.name).or_default().push(end);
            progress.inc(1);
        }
        if let Some(path) = &args.save
            && round < args.rounds()
        {
            document(round, &ends)?.write(path)?;
        }
    }
    progress.finish_and_clear();
    document(args.rounds(), &ends)
}

/// Returns the current time as in RFC 3339, in UTC.
fn now() -> anyhow::Result<String> {
    let mut text = String::new();
    SystemTime.format_time(&mut Writer::new(&mut text))?;
    // Fractions of a second are left out.
    let seconds = text.split('.').next().context("a time has a form of its own")?;
    Ok(format!("{seconds}Z"))
}

/// Returns this program and those that take part, with their versions.
fn programs(cases: &[SectionCase]) -> Vec<(String, String)> {
    let mut found = vec![("ringfence-bench".to_owned(), env!("CARGO_PKG_VERSION").to_owned())];
    for case in cases {
        for (_, program) in case.spec.installed() {
            if !found.iter().any(|(known, _)| known == program) {
                found.push((program.to_owned(), machine::version(program)));
            }
        }
    }
    found
}

/// Directory in which the commands run, removed on drop.
struct RunDirectory(PathBuf);

impl RunDirectory {
    fn new() -> anyhow::Result<RunDirectory> {
        let path = std::env::temp_dir().join(format!("ringfence-report-{}", std::process::id()));
        let made = fs::DirBuilder::new().mode(0o700).create(&path);
        made.with_context(|| format!("making {}", path.display()))?;
        Ok(RunDirectory(path))
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Section that this machine can run.
#[derive(Clone)]
struct SectionCase {
    spec: &'static Spec,
    words: Vec<String>,
    directory: PathBuf,
    /// Start of the first round.
    start: Instant,
}

/// End of one run: the rows, or the reason for which there are none.
#[derive(Clone, Debug)]
enum RunEnd {
    Rows {
        rows: Vec<Row>,
        /// Lines that the command wrote about programs that it left out.
        left_out: Vec<String>,
    },
    Failed(String),
}

impl Case for SectionCase {
    type Measured = RunEnd;

    fn name(&self) -> String {
        self.words.join(" ")
    }

    fn run(&self, attempt: &Attempt<'_>) -> anyhow::Result<RunEnd> {
        if attempt.progress.is_hidden() {
            // A log has lines in place of the bar.
            let (seconds, name) = (self.start.elapsed().as_secs(), self.name());
            eprintln!("ringfence-bench: {:>3} min {:02} s: {name}", seconds / 60, seconds % 60);
        }
        // A section that fails does not end the others.
        Ok(self.rows().unwrap_or_else(|error| RunEnd::Failed(causes(&error))))
    }
}

impl SectionCase {
    fn rows(&self) -> anyhow::Result<RunEnd> {
        if let Some(mib) = self.spec.disk_mib {
            File::create(self.directory.join(DISK))?.set_len(u64::from(mib) << 20)?;
        }
        // Processes that outlive the command would keep pipes open.
        let [out, errors] = ["rows", "errors"].map(|name| self.directory.join(name));
        let mut command = Command::new(THIS_PROGRAM);
        command
            .args(&self.words)
            .current_dir(&self.directory)
            .stdin(Stdio::null())
            .stdout(File::create(&out)?)
            .stderr(File::create(&errors)?);
        let status = status_within(&mut command, SECTION_WITHIN)?;
        let errors = String::from_utf8_lossy(&fs::read(&errors)?).into_owned();
        if !status.success() {
            return Ok(RunEnd::Failed(message(&status.to_string(), &errors)));
        }
        let rows = rows::parse(&fs::read_to_string(&out)?).context("a row")?;
        let left_out = errors.lines().filter(|line| line.contains(" is left out: "));
        let bare = |line: &str| line.strip_prefix("ringfence: ").unwrap_or(line).to_owned();
        Ok(RunEnd::Rows { rows, left_out: left_out.map(bare).collect() })
    }
}

/// Runs a command and ends it when its time is over.
fn status_within(command: &mut Command, limit: Duration) -> anyhow::Result<ExitStatus> {
    let mut child = OwnedChild(command.spawn().context("starting this program")?);
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.0.try_wait()? {
            return Ok(status);
        }
        // The owner of the child ends it.
        ensure!(Instant::now() < deadline, "it took more than {} s", limit.as_secs_f64());
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Returns the status of a command with the last line that it wrote.
fn message(status: &str, errors: &str) -> String {
    let last = errors.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message");
    format!("{status}: {}", ringfence_hostnet::text::printable(last))
}

/// Returns the lines of a shell that run a section once.
fn command(spec: &Spec, plan: &Plan) -> String {
    let line = format!("ringfence-bench {}", spec.words(plan).join(" "));
    match spec.disk_mib {
        Some(mib) => format!("truncate -s {mib}M {DISK}\n{line}"),
        None => line,
    }
}

/// Returns the section with the charts of all its runs; `None` stands for runs of a section that the machine lacks.
fn section(spec: &Spec, plan: &Plan, runs: Option<Vec<RunEnd>>) -> Section {
    let mut notes = spec.absent();
    let (mut rounds, mut failed) = (Rounds(Vec::new()), None);
    for run in runs.iter().flatten() {
        match run {
            RunEnd::Rows { rows, left_out } => {
                rounds.0.push(rows.clone());
                notes.extend(
                    left_out
                        .iter()
                        .filter(|line| !notes.contains(line))
                        .cloned()
                        .collect::<Vec<_>>(),
                );
            }
            RunEnd::Failed(why) => failed = Some(why.clone()),
        }
    }
    notes.extend(rounds.skipped());
    let charts: Vec<_> = (spec.charts)(&rounds).into_iter().flatten().collect();
    let outcome = match (runs, failed) {
        (None, _) => Outcome::Skipped(spec.missing().unwrap_or_default()),
        (_, Some(why)) => Outcome::Failed(why),
        _ if charts.is_empty() => Outcome::Failed("its rows have no figure of a chart".to_owned()),
        _ => Outcome::Measured,
    };
    let command = command(spec, plan);
    let [title, about] = [spec.title, spec.about].map(str::to_owned);
    Section { name: spec.name, title, about, command, outcome, notes, charts }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: Plan = Plan { quick: true, root: false };

    fn end(line: &str) -> RunEnd {
        let left_out = vec!["pasta is left out: pasta is not installed".to_owned()];
        RunEnd::Rows { rows: rows::parse(line).unwrap(), left_out }
    }

    #[test]
    fn section_has_the_values_of_every_round_and_each_note_once() {
        let row = r#"{"path":"guest-guest","setup":"tso","ratio":"#;
        let runs = vec![end(&format!("{row}8.0}}")), end(&format!("{row}9.0}}"))];
        let found = section(&SECTIONS[2], &PLAN, Some(runs));
        assert_eq!(found.outcome, Outcome::Measured);
        assert_eq!(found.charts[0].groups[0].bars[0].values, [8.0, 9.0]);
        assert_eq!(found.notes, ["pasta is left out: pasta is not installed"]);
        assert!(found.command.starts_with("ringfence-bench seeds gso --json"), "{}", found.command);
    }

    #[test]
    fn failed_round_fails_the_section_and_keeps_the_other_rounds() {
        let row = r#"{"path":"guest-guest","setup":"tso","ratio":8.0}"#;
        let runs = vec![end(row), RunEnd::Failed("exit status: 1: a packet was lost".to_owned())];
        let found = section(&SECTIONS[2], &PLAN, Some(runs));
        let why = "exit status: 1: a packet was lost".to_owned();
        assert_eq!(found.outcome, Outcome::Failed(why));
        assert_eq!(found.charts[0].groups[0].bars[0].values, [8.0]);
        let without = section(&SECTIONS[2], &PLAN, Some(vec![end("{}")]));
        assert!(matches!(without.outcome, Outcome::Failed(why) if why.contains("no figure")));
    }

    #[test]
    fn section_that_the_machine_lacks_is_skipped_with_the_reason() {
        let spec = Spec { peers: &[("memif", "ringfence-no-such")], ..SECTIONS[5] };
        let found = section(&spec, &PLAN, None);
        let why = "ringfence-no-such is not installed".to_owned();
        assert_eq!(found.outcome, Outcome::Skipped(why));
        assert!(found.charts.is_empty());
    }

    #[test]
    fn message_is_the_last_line_without_control_characters() {
        let errors = "first\nringfence-bench: \u{1b}[2Jbroken\n\n";
        let found = message("exit status: 1", errors);
        assert!(found.starts_with("exit status: 1: ringfence-bench: "), "{found}");
        assert!(found.ends_with("broken") && !found.contains('\u{1b}'), "{found:?}");
        assert_eq!(message("signal: 9", ""), "signal: 9: no message");
    }

    #[test]
    fn command_ends_with_its_status_or_when_its_time_is_over() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        let status = status_within(&mut shell("exit 3"), SECTION_WITHIN).unwrap();
        assert_eq!(status.code(), Some(3));
        let limit = Duration::from_millis(50);
        let error = status_within(&mut shell("exec sleep 600"), limit).unwrap_err();
        assert_eq!(error.to_string(), "it took more than 0.05 s");
    }

    #[test]
    fn time_has_a_date_and_seconds_in_utc() {
        let time = now().unwrap();
        let form: String = time.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        assert_eq!(form, "0000-00-00T00:00:00Z", "{time}");
    }

    #[test]
    fn command_of_disks_makes_their_file() {
        let disks = command(&SECTIONS[6], &PLAN);
        assert!(disks.starts_with("truncate -s 256M disk.img\nringfence-bench block "), "{disks}");
    }
}

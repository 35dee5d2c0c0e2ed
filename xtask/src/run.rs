//! Execution of `cargo xtask test`: choice of steps and parts, preparation of the machine, the runs, and the record of the
//! long set.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use clap::Args;
use taskkit::exec::TestRun;
use taskkit::text::duration;
use taskkit::tools::{self, Tool};

use crate::context::{Context, Ended};
use crate::programs::slowest;
use crate::record::Record;
use crate::report::{self, Outcome, Row};
use crate::steps::{STEPS, Step};

/// Steps that run integration tests, beside `unit`, which runs those of some crates.
const RUNS_PROGRAMS: [&str; 4] = ["build", "local", "attack", "empty-path"];
/// Number of tests in the list of `--durations`.
const SLOWEST: usize = 40;

/// Arguments of `cargo xtask test`.
#[derive(Args)]
#[allow(clippy::struct_excessive_bools, reason = "options of a command line")]
pub(crate) struct TestArgs {
    /// Run the long set instead of the default set: everything that takes longer
    #[arg(long, conflicts_with = "all")]
    long: bool,
    /// Run both sets
    #[arg(long)]
    all: bool,
    /// Run only these steps or parts of steps (see --list), also those of the other set
    #[arg(long, value_name = "STEP[/PART]", value_delimiter = ',', value_parser = step_or_part)]
    only: Vec<String>,
    /// Omit these steps or parts of steps
    #[arg(long, value_name = "STEP[/PART]", value_delimiter = ',', value_parser = step_or_part)]
    skip: Vec<String>,
    /// Omit the parts of the long set that have passed on this very commit
    #[arg(long)]
    resume: bool,
    /// Print the last result of each part of the long set, and run nothing
    #[arg(long)]
    status: bool,
    /// Print the steps and parts of the chosen set, and run nothing
    #[arg(long)]
    list: bool,
    /// Report the slowest tests, and the link time of each test program
    #[arg(long)]
    durations: bool,
    /// Exit with status 2 if something was skipped and nothing failed
    #[arg(long)]
    no_skips: bool,
    /// Install nothing and change nothing outside the target directory
    #[arg(long)]
    no_install: bool,
    /// Duration of fuzz-smoke for each fuzz target, in seconds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    fuzz_seconds: u32,
    /// Run only tests whose names contain one of these, of the steps and parts of --only
    #[arg(value_name = "TEST", requires = "only")]
    tests: Vec<String>,
}

fn step_or_part(text: &str) -> Result<String, String> {
    let name = text.split('/').next().unwrap_or_default();
    let names: Vec<&str> = STEPS.iter().map(|step| step.name).collect();
    if names.contains(&name) {
        Ok(text.to_owned())
    } else {
        Err(format!("no step is called {name}; the steps are {}", names.join(", ")))
    }
}

/// Step in the default set, or a part of a step in the long set.
struct Job {
    step: &'static Step,
    /// Name of the part in the long set; `None` in the default set.
    part: Option<String>,
}

impl Job {
    fn name(&self) -> String {
        match self.part.as_deref() {
            None | Some("") => self.step.name.to_owned(),
            Some(part) => format!("{}/{part}", self.step.name),
        }
    }
}

/// Runs the selected steps. Returns the exit status.
pub(crate) fn run(args: &TestArgs, mut context: Context) -> anyhow::Result<u8> {
    context.fuzz_seconds = args.fuzz_seconds;
    context.durations = args.durations;
    context.only.clone_from(&args.only);
    context.programs = integration_tests(&args.only);
    context.filter.clone_from(&args.tests);
    let mut jobs = choose(args, &context)?;
    if args.list {
        print!("{}", listing(&jobs));
        return Ok(0);
    }
    let mut record = Record::open(&context.root, &context.target)?;
    if args.status {
        let names: Vec<String> = jobs.iter().map(Job::name).collect();
        print!("{}", record.table(&names));
        return Ok(0);
    }
    if args.resume {
        jobs.retain(|job| job.part.is_none() || !record.is_done(&job.name()));
        if jobs.is_empty() {
            println!("every part has a result of this commit; `--long --status` shows them");
            return Ok(0);
        }
    }
    anyhow::ensure!(!jobs.is_empty(), "no step is left to run; `cargo xtask test --list`");
    heading("preparation", "programs that the steps need");
    prepare(&jobs, &mut context, !args.no_install)?;
    let mut rows = vec![];
    let mut times = TestRun::default();
    for (at, job) in jobs.iter().enumerate() {
        announce(&jobs, at, &rows, &record);
        let (row, run) = run_job(job, &context);
        if job.part.is_some() {
            record.store(&job.name(), &row.outcome, row.time, &row.failed_tests)?;
        }
        rows.push(row);
        times.times.extend(run.times);
    }
    heading("report", "");
    if args.durations {
        if let Some((times, programs)) = context.link_times() {
            print!("{}", report::link_times(times, programs));
        }
        print!("{}", report::durations(&slowest(&times, SLOWEST)));
    }
    print!("{}", report::summary(&rows));
    Ok(report::status(&rows, args.no_skips))
}

/// Returns the integration tests that `only` names. Returns none if it needs all test programs, or the unit tests of a crate.
fn integration_tests(only: &[String]) -> Vec<String> {
    let mut names = vec![];
    for chosen in only {
        let (step, part) = chosen.split_once('/').unwrap_or((chosen, ""));
        let is_unit = step == "unit";
        if !is_unit && !RUNS_PROGRAMS.contains(&step) {
            continue;
        }
        match part.rsplit_once('/') {
            Some((_, target)) => names.push(target.to_owned()),
            None if is_unit || part.is_empty() => return vec![],
            None => names.push(part.to_owned()),
        }
    }
    names
}

/// Returns the steps of the chosen set, restricted by `--only` and `--skip`.
fn choose(args: &TestArgs, context: &Context) -> anyhow::Result<Vec<Job>> {
    let matches = |list: &[String], step: &str, name: &str| {
        list.iter().any(|wanted| wanted == step || wanted == name)
    };
    let mut jobs = vec![];
    for step in STEPS {
        let is_named = args.only.iter().any(|name| name.split('/').next() == Some(step.name));
        let chosen = args.only.is_empty() || is_named;
        if !args.long && !args.status && step.default.is_some() && chosen {
            jobs.push(Job { step, part: None });
        }
    }
    for step in STEPS {
        // A step that is named is meant, also if only the long set has it.
        let is_meant = args.only.iter().any(|name| name.split('/').next() == Some(step.name))
            && step.default.is_none();
        let Some(long) = &step.long else { continue };
        if !(args.long || args.all || args.status || is_meant) {
            continue;
        }
        for part in (long.parts)(context)? {
            let job = Job { step, part: Some(part) };
            if args.only.is_empty() || matches(&args.only, step.name, &job.name()) {
                jobs.push(job);
            }
        }
    }
    jobs.retain(|job| !matches(&args.skip, job.step.name, &job.name()));
    Ok(jobs)
}

fn listing(jobs: &[Job]) -> String {
    let set = |job: &Job| if job.part.is_some() { "long   " } else { "default" };
    let lines: Vec<(String, String)> =
        jobs.iter().map(|job| (job.name(), format!("{}  {}", set(job), job.step.title))).collect();
    report::listing(&lines)
}

fn heading(name: &str, title: &str) {
    let separator = if title.is_empty() { "" } else { ": " };
    println!("\n==== {name}{separator}{title}");
}

/// Prints how far the run is, on standard error: there it stays visible beside a report in a file.
fn announce(jobs: &[Job], at: usize, rows: &[Row], record: &Record) {
    if jobs.len() < 2 || (jobs[at].part.is_none() && !std::io::stderr().is_terminal()) {
        return;
    }
    let spent: Duration = rows.iter().map(|row| row.time).sum();
    let failed = rows.iter().filter(|row| matches!(row.outcome, Outcome::Failed(_))).count();
    let left: Duration = jobs[at..].iter().filter_map(|job| record.last_time(&job.name())).sum();
    let unknown = jobs[at..].iter().filter(|job| record.last_time(&job.name()).is_none()).count();
    let mut text = format!(
        "[{}/{}] {}  {} so far, {failed} failed",
        at + 1,
        jobs.len(),
        jobs[at].name(),
        duration(spent)
    );
    if left > Duration::ZERO {
        text += &format!(", about {} min left", left.as_secs().div_ceil(60));
        if unknown > 0 {
            text += &format!(" and {unknown} that never ran");
        }
    }
    eprintln!("{text}");
}

fn run_job(job: &Job, context: &Context) -> (Row, TestRun) {
    let step = job.step;
    let name = job.name();
    heading(&name, step.title);
    let start = Instant::now();
    let missing = context.toolbox.missing(step.needs);
    let ended: Ended = if missing.is_empty() {
        let ended = match (&job.part, step.default, &step.long) {
            (None, Some(run), _) => run(context),
            (Some(part), _, Some(long)) => (long.run)(context, part),
            _ => Err(anyhow::anyhow!("this set has no such step")),
        };
        ended.unwrap_or_else(|error| Outcome::Failed(format!("could not run: {error:#}")).into())
    } else {
        Outcome::Skipped(tools::how_to_get(&missing)).into()
    };
    let time = start.elapsed();
    match &ended.outcome {
        Outcome::Passed(_) => println!("---- {name} passed in {}", duration(time)),
        Outcome::Failed(why) => println!("---- {name} FAILED: {why}"),
        Outcome::Skipped(why) => println!("---- {name} SKIPPED: {why}"),
    }
    let mut run = ended.run;
    let row = Row {
        name,
        outcome: ended.outcome,
        time,
        skipped_tests: std::mem::take(&mut run.skipped),
        failed_tests: std::mem::take(&mut run.failures),
    };
    (row, run)
}

/// Installs the programs that the selected steps lack, or prints the missing ones.
fn prepare(jobs: &[Job], context: &mut Context, may_install: bool) -> anyhow::Result<()> {
    let local =
        jobs.iter().any(|job| ["local", "attack", "empty-path", "place"].contains(&job.step.name));
    let is_long = jobs.iter().any(|job| job.part.is_some());
    let mut wanted: Vec<&'static Tool> =
        jobs.iter().flat_map(|job| job.step.needs).copied().collect();
    if local {
        wanted.extend(&tools::LOCAL_PROGRAMS);
    }
    let mut listed = std::collections::BTreeSet::new();
    wanted.retain(|tool| listed.insert(tool.name));
    let mut missing = context.toolbox.missing(&wanted);
    if may_install && !missing.is_empty() {
        if let Err(error) = context.toolbox.install(&missing) {
            println!("installing failed: {error}");
        }
        missing = context.toolbox.missing(&wanted);
        if is_long {
            context.toolbox.build(&missing)?;
            missing = context.toolbox.missing(&wanted);
        }
    }
    if missing.is_empty() {
        println!("every program that the steps need is installed");
    } else {
        println!("{}", tools::how_to_get(&missing));
    }
    if local {
        prepare_local(context, &missing, may_install);
    }
    Ok(())
}

/// Opens `/dev/net/tun`, and notes which programs the tests must not require.
fn prepare_local(context: &mut Context, missing: &[&'static Tool], may_install: bool) {
    let is_root = context.toolbox.is_root;
    if let Some(message) = tools::open_tun(is_root && may_install) {
        println!("{message}");
    }
    context.require_local = is_root && may_install;
    context.missing = missing.iter().map(|tool| tool.name).collect();
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        test: TestArgs,
    }

    fn names(line: &str) -> Vec<String> {
        let words = std::iter::once("test").chain(line.split_whitespace());
        let args = Line::try_parse_from(words).unwrap().test;
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let context = Context::new(root).unwrap();
        choose(&args, &context).unwrap().iter().map(Job::name).collect()
    }

    #[test]
    fn default_set_has_no_part() {
        let expected = ["fmt", "tidy", "deny", "clippy", "doc", "build", "unit", "local", "vm"];
        assert_eq!(names(""), expected);
        assert_eq!(names("--only unit,local/network --skip local"), ["unit"]);
    }

    #[test]
    fn long_set_has_parts_that_can_be_chosen() {
        let long = names("--long");
        for part in
            ["vm/xen", "vm/linux", "doc", "loom/ring", "attack/attack", "local/attack_random"]
        {
            assert!(long.iter().any(|name| name == part), "{part}: {long:?}");
        }
        assert!(!long.iter().any(|name| name == "fmt" || name == "vm"));
        assert_eq!(names("--long --only vm/xen"), ["vm/xen"]);
        assert_eq!(names("--only doc"), ["doc"]);
        assert_eq!(names("--long --only vm --skip vm/linux"), ["vm/xen"]);
        assert_eq!(names("--all").len(), 9 + long.len());
    }

    #[test]
    fn parts_need_their_programs_and_steps_need_all() {
        let needed =
            |only: &str| integration_tests(&only.split(',').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(needed("fmt,local/network,unit/net/vif,loom/ring"), ["network", "vif"]);
        assert_eq!(needed("local/bench/bench_gso"), ["bench_gso"]);
        for all in ["local/network,unit/net", "local/network,build", "local", "fmt"] {
            assert_eq!(needed(all), [] as [&str; 0], "{all}");
        }
    }

    #[test]
    fn names_of_tests_need_a_step() {
        assert!(Line::try_parse_from(["test", "a_test"]).is_err());
        assert!(Line::try_parse_from(["test", "--only", "unit", "a_test"]).is_ok());
    }

    #[test]
    fn unknown_step_is_refused() {
        assert!(Line::try_parse_from(["test", "--only", "no-such"]).is_err());
    }
}

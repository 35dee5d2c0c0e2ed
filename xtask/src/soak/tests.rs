//! The default set's tests, many times beside a load of busy loops. A test that fails in one round of many is a flaw of the
//! test or of the product.
//!
//! The record of the long set ([`crate::record`]) has the result of each round with its commit. A later call on the same
//! commit continues after the last round, and its report has the failures of all rounds. The output of each failed test is
//! in `xtask/soak` in the target directory.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use taskkit::exec::{Cmd, TestRun};
use taskkit::text::{count, duration};

use crate::context::Context;
use crate::programs::{self, Order};
use crate::record::Record;
use crate::report::Outcome;
use crate::steps::{all_orders, unit_orders};

/// Cases of each property in the last run; proptest has 256 otherwise. A property with a number of its own runs that many in
/// each round.
const CASES: &str = "5120";

/// Script of a busy loop. It ends when the process with the given id has ended.
const BUSY: &str = "while kill -0 $1; do i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done; done";

/// Processes that use a processor each. They end with this value.
struct Load(Vec<Child>);

impl Load {
    fn start(number: u32) -> anyhow::Result<Load> {
        let mut load = Load(vec![]);
        let own = std::process::id().to_string();
        for _ in 0..number {
            let busy = Cmd::new("sh").args(["-c", BUSY, "sh", &own]);
            load.0.push(busy.spawn_silently(Path::new("/"))?);
        }
        Ok(load)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // A child that has ended needs no signal.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Run of the test programs in a soak.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Round {
    /// All tests of the default set; the number begins with 1.
    All(u32),
    /// Unit and property tests, with [`CASES`].
    Properties,
}

impl Round {
    fn name(self) -> String {
        match self {
            Round::All(number) => number.to_string(),
            Round::Properties => "properties".to_owned(),
        }
    }

    fn orders(self, context: &Context) -> anyhow::Result<Vec<Order>> {
        match self {
            Round::All(_) => all_orders(context),
            Round::Properties => unit_orders(context),
        }
    }
}

/// Failures of a test: names of the rounds in which it failed, and its first panic.
type Failures = BTreeMap<String, (Vec<String>, String)>;

/// Runs the tests `rounds` times beside `load` busy loops, and the properties once more. Returns `false` if a test failed in
/// any round.
pub(super) fn run(root: &Path, rounds: u32, load: u32, filter: &[String]) -> anyhow::Result<bool> {
    let mut context = Context::new(root.to_owned())?;
    context.filter = filter.to_vec();
    context.built()?;
    let mut record = Record::open(root, &context.target)?;
    // Rounds of some tests are no rounds of all.
    let is_recorded = filter.is_empty();
    let key = |round: Round| format!("soak/tests/{load}/{}", round.name());
    let all: Vec<Round> = (1..=rounds).map(Round::All).chain([Round::Properties]).collect();
    let mut failures = Failures::new();
    let mut left = vec![];
    for round in &all {
        match record.result(&key(*round)).filter(|_| is_recorded) {
            Some(entry) => note(&mut failures, *round, &entry.failures),
            None => left.push(*round),
        }
    }
    let done = all.len() - left.len();
    let logs = context.target.join("xtask/soak");
    // Logs of another commit say nothing about this one.
    if done == 0 && logs.exists() {
        std::fs::remove_dir_all(&logs)?;
    }
    std::fs::create_dir_all(&logs)?;
    let _load = Load::start(load)?;
    let start = Instant::now();
    for (at, round) in left.iter().enumerate() {
        eprintln!("{}", progress(done + at, all.len(), (start.elapsed(), at), &failures));
        println!("\n==== round {}, beside {}", round.name(), count(load, "busy loop"));
        let mut setting = context.setting(false);
        setting.logs = Some((logs.clone(), format!("{}-", round.name())));
        if *round == Round::Properties {
            setting.env.push(("PROPTEST_CASES".to_owned(), CASES.into()));
        }
        let begin = Instant::now();
        let run = programs::run(round.orders(&context)?, &setting);
        anyhow::ensure!(run.ran() > 0, "no test ran");
        note(&mut failures, *round, &run.failures);
        let outcome = outcome(&run);
        if is_recorded {
            record.store(&key(*round), &outcome, begin.elapsed(), &run.failures)?;
        }
        println!("---- round {}: {}", round.name(), describe(&run, begin.elapsed()));
    }
    print!("{}", table(&failures, &all, &logs));
    Ok(failures.is_empty())
}

fn outcome(run: &TestRun) -> Outcome {
    let note = count(run.ran(), "test");
    if run.failed > 0 {
        Outcome::Failed(format!("{} of {note}", run.failed))
    } else {
        Outcome::Passed(note)
    }
}

fn describe(run: &TestRun, time: Duration) -> String {
    let skipped = run.skipped.len();
    let skipped = if skipped > 0 { format!(", {skipped} skipped") } else { String::new() };
    format!("{}, {} failed{skipped}, {}", count(run.ran(), "test"), run.failed, duration(time))
}

/// Returns a line about the progress. `spent` is the time of this call, and the number of rounds that it has run.
fn progress(done: usize, all: usize, spent: (Duration, usize), failures: &Failures) -> String {
    let (time, rounds) = spent;
    let mut text =
        format!("[round {} of {all}] {} failed so far", done + 1, count(failures.len(), "test"));
    if let Some(each) = time.checked_div(u32::try_from(rounds).unwrap_or(u32::MAX)) {
        let left = each.as_secs() * u64::try_from(all - done).unwrap_or(u64::MAX);
        text += &format!(", about {} min left", left.div_ceil(60));
    }
    text
}

fn note(failures: &mut Failures, round: Round, failed: &[(String, String)]) {
    for (test, panic) in failed {
        let entry = failures.entry(test.clone());
        entry.or_insert_with(|| (vec![], panic.clone())).0.push(round.name());
    }
}

fn table(failures: &Failures, rounds: &[Round], logs: &Path) -> String {
    let rounds = rounds.len();
    if failures.is_empty() {
        return format!(
            "\nno test failed in {}, the one of the properties included\n",
            count(rounds, "round")
        );
    }
    let mut text = "\nTests that failed, with their first panic:\n".to_owned();
    for (test, (names, panic)) in failures {
        text += &format!(
            "  {test}: {} of {rounds}, rounds {}: {panic}\n",
            names.len(),
            names.join(", ")
        );
    }
    text + &format!("Their output is in {}\n", logs.display())
}

#[cfg(test)]
mod unit_tests {
    use super::*;

    #[test]
    fn failures_are_counted_by_test() {
        let mut failures = Failures::new();
        let failed = |panic: &str| [("net a".to_owned(), panic.to_owned())];
        note(&mut failures, Round::All(1), &failed("first"));
        note(&mut failures, Round::Properties, &failed("second"));
        let rounds = [Round::All(1), Round::All(2), Round::Properties];
        let text = table(&failures, &rounds, Path::new("/logs"));
        let line = "  net a: 2 of 3, rounds 1, properties: first\n";
        assert!(text.contains(line) && text.ends_with("is in /logs\n"), "{text}");
        let text = table(&Failures::new(), &rounds, Path::new("/logs"));
        assert!(text.contains("no test failed in 3 rounds"), "{text}");
    }

    #[test]
    fn progress_estimates_from_rounds_of_this_call() {
        let none = Failures::new();
        let first = progress(4, 21, (Duration::ZERO, 0), &none);
        assert_eq!(first, "[round 5 of 21] 0 tests failed so far");
        let third = progress(6, 21, (Duration::from_secs(600), 2), &none);
        assert_eq!(third, "[round 7 of 21] 0 tests failed so far, about 75 min left");
    }

    #[test]
    fn load_ends_with_its_value() {
        let load = Load::start(2).unwrap();
        let ids: Vec<u32> = load.0.iter().map(Child::id).collect();
        drop(load);
        assert!(ids.iter().all(|id| !Path::new(&format!("/proc/{id}")).exists()));
    }

    #[test]
    fn busy_loop_ends_with_the_process_of_the_given_id() {
        let mut ended = Cmd::new("true").spawn_silently(Path::new("/")).unwrap();
        let id = ended.id().to_string();
        ended.wait().unwrap();
        let busy = Cmd::new("timeout").args(["60", "sh", "-c", BUSY, "sh", &id]);
        let status = busy.run_to_file(Path::new("/"), Path::new("/dev/null")).unwrap();
        assert_ne!(status, 124, "the time limit ended it");
    }
}

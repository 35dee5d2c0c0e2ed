//! The default set's tests, many times beside a load of busy loops. A test that fails in one round of many is a flaw of the
//! test or of the product.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Child;

use taskkit::exec::Cmd;
use taskkit::text::count;

use crate::context::Context;
use crate::programs;
use crate::steps::all_orders;

/// Cases of each property in the round with more of them; proptest has 256 otherwise.
const CASES: &str = "5120";

/// Processes that use a processor each. They end with this value.
struct Load(Vec<Child>);

impl Load {
    fn start(number: u32) -> anyhow::Result<Load> {
        let mut load = Load(vec![]);
        for _ in 0..number {
            let busy = Cmd::new("sh").args(["-c", "while :; do :; done"]);
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

/// Failures of a test: rounds in which it failed, and its first panic.
type Failures = BTreeMap<String, (Vec<u32>, String)>;

/// Runs the tests `rounds` times beside `load` busy loops. Returns `false` if one failed in any round.
pub(super) fn run(root: &Path, rounds: u32, load: u32, filter: &[String]) -> anyhow::Result<bool> {
    let mut context = Context::new(root.to_owned())?;
    context.filter = filter.to_vec();
    context.built()?;
    let _load = Load::start(load)?;
    let mut failures = Failures::new();
    for round in 1..=rounds {
        println!("\n==== round {round} of {rounds}, beside {}", count(load, "busy loop"));
        let mut setting = context.setting(false);
        // The last round looks for rare cases of properties.
        if round == rounds {
            setting.env.push(("PROPTEST_CASES".to_owned(), CASES.into()));
        }
        let run = programs::run(all_orders(&context)?, &setting);
        anyhow::ensure!(run.ran() > 0, "no test ran");
        println!("---- round {round}: {}, {} failed", count(run.ran(), "test"), run.failed);
        note(&mut failures, round, run.failures);
    }
    print!("{}", table(&failures, rounds));
    Ok(failures.is_empty())
}

fn note(failures: &mut Failures, round: u32, failed: Vec<(String, String)>) {
    for (test, panic) in failed {
        failures.entry(test).or_insert_with(|| (vec![], panic)).0.push(round);
    }
}

fn table(failures: &Failures, rounds: u32) -> String {
    if failures.is_empty() {
        return format!("\nno test failed in {}\n", count(rounds, "round"));
    }
    let mut text = "\nTests that failed, with their first panic:\n".to_owned();
    for (test, (in_rounds, panic)) in failures {
        text +=
            &format!("  {test}: {} of {rounds}, rounds {in_rounds:?}: {panic}\n", in_rounds.len());
    }
    text
}

#[cfg(test)]
mod unit_tests {
    use super::*;

    #[test]
    fn failures_are_counted_by_test() {
        let mut failures = Failures::new();
        note(&mut failures, 1, vec![("net a".to_owned(), "first".to_owned())]);
        note(&mut failures, 3, vec![("net a".to_owned(), "second".to_owned())]);
        let text = table(&failures, 20);
        assert!(text.ends_with("  net a: 2 of 20, rounds [1, 3]: first\n"), "{text}");
        assert!(table(&Failures::new(), 20).contains("no test failed in 20 rounds"));
    }

    #[test]
    fn load_ends_with_its_value() {
        let load = Load::start(2).unwrap();
        let ids: Vec<u32> = load.0.iter().map(Child::id).collect();
        drop(load);
        assert!(ids.iter().all(|id| !Path::new(&format!("/proc/{id}")).exists()));
    }
}

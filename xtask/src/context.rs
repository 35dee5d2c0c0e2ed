//! State that all steps share, and the outcome of a step.

use std::cell::OnceCell;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use taskkit::exec::{Cmd, TestRun, on_terminal};
use taskkit::text::count;
use taskkit::tools::Toolbox;

use crate::built::{self, Program};
use crate::links::Links;
use crate::packages::target_directory;
use crate::programs::Setting;
use crate::report::Outcome;

/// Outcome of a step without its duration.
pub(crate) struct Ended {
    pub(crate) outcome: Outcome,
    pub(crate) run: TestRun,
}

impl From<Outcome> for Ended {
    fn from(outcome: Outcome) -> Ended {
        Ended { outcome, run: TestRun::default() }
    }
}

/// State that all steps share.
pub(crate) struct Context {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
    pub(crate) toolbox: Toolbox,
    pub(crate) fuzz_seconds: u32,
    /// Parts of steps to which `--only` restricts the run.
    pub(crate) only: Vec<String>,
    /// Integration tests that the run needs; all test programs if empty.
    pub(crate) programs: Vec<String>,
    /// Names of tests to which the run is restricted; all if empty.
    pub(crate) filter: Vec<String>,
    /// Set if the duration of each test is reported.
    pub(crate) durations: bool,
    /// Set if no test may be skipped except for one of `missing`: this process is root and installed the rest.
    pub(crate) require_local: bool,
    /// Programs of the step `local` that could not be installed.
    pub(crate) missing: Vec<&'static str>,
    /// Test programs, once they are built; `None` after a failed build.
    built: OnceCell<Option<Vec<Program>>>,
    /// Link times of the programs that this run linked, if durations are reported.
    link_times: OnceCell<Vec<(String, Duration)>>,
}

impl Context {
    /// Creates the context for the repository at `root`.
    pub(crate) fn new(root: PathBuf) -> anyhow::Result<Context> {
        let target = target_directory(&root)?;
        let toolbox = Toolbox::new(&root, &target);
        Ok(Context {
            root,
            target,
            toolbox,
            fuzz_seconds: 5,
            only: vec![],
            programs: vec![],
            filter: vec![],
            durations: false,
            require_local: false,
            missing: vec![],
            built: OnceCell::new(),
            link_times: OnceCell::new(),
        })
    }

    /// Returns the test programs of this run. The first call builds them.
    pub(crate) fn built(&self) -> anyhow::Result<&[Program]> {
        if self.built.get().is_none() {
            let _ = self.built.set(self.build()?);
        }
        let programs = self.built.get().and_then(Option::as_deref);
        programs.ok_or_else(|| anyhow::anyhow!("the test programs do not build"))
    }

    fn build(&self) -> anyhow::Result<Option<Vec<Program>>> {
        let path = self.toolbox.path();
        let links = match self.durations {
            true => Links::begin(self.target.join("xtask/links"), path)?,
            false => None,
        };
        let mut cargo = self.cargo(&[]);
        if let Some(links) = &links {
            cargo = cargo.env("PATH", links.path(path));
        }
        let programs = built::build(&self.root, cargo, &self.programs)?;
        if let (Some(links), Some(programs)) = (&links, &programs) {
            let _ = self.link_times.set(links.times(programs)?);
        }
        Ok(programs)
    }

    /// Returns the link time of each test program that this run linked, and the number of all test programs.
    pub(crate) fn link_times(&self) -> Option<(&[(String, Duration)], usize)> {
        let programs = self.built.get()?.as_deref()?;
        Some((self.link_times.get()?, programs.len()))
    }

    /// Returns the environment of test programs. Those of the step `local` must not skip a test without need.
    pub(crate) fn setting(&self, is_local: bool) -> Setting {
        let mut env = vec![("PATH".to_owned(), self.toolbox.path().clone())];
        if is_local && self.require_local {
            env.push(("RINGFENCE_TEST_REQUIRE".to_owned(), "1".into()));
            env.push(("RINGFENCE_TEST_MISSING".to_owned(), self.missing.join(" ").into()));
        }
        Setting { env, durations: self.durations, ..Setting::default() }
    }

    pub(crate) fn cargo(&self, args: &[&str]) -> Cmd {
        let command = Cmd::cargo().args(args.iter().copied()).env("PATH", self.toolbox.path());
        if on_terminal() { command.env("CARGO_TERM_COLOR", "always") } else { command }
    }

    /// Returns a `cargo test` with its own arguments and those of the test programs.
    pub(crate) fn cargo_test(&self, args: &[&str], test_args: &[&str]) -> Cmd {
        // A skipped test prints its reason to standard error, which libtest hides by default.
        let command =
            self.cargo(&["test", "--no-fail-fast"]).args(args.iter().copied()).args(["--"]);
        let command = command.args(test_args.iter().copied()).args(["--show-output"]);
        if on_terminal() { command.args(["--color=always"]) } else { command }
    }

    /// Returns the path of this program, for steps that are commands of it.
    pub(crate) fn own_command(&self, args: &[&str]) -> anyhow::Result<Cmd> {
        let own: OsString = std::env::current_exe()?.into();
        Ok(Cmd::new(own).args(args.iter().copied()))
    }
}

/// Returns a success without a note, or the failure.
pub(crate) fn outcome_of(success: bool, failure: &str) -> Ended {
    let failed = || Outcome::Failed(failure.to_owned());
    if success { Outcome::Passed(String::new()) } else { failed() }.into()
}

/// Returns the outcome of test programs. Zero tests are a failure, because nothing was checked.
pub(crate) fn test_outcome(run: TestRun) -> Ended {
    let mut note = count(run.ran(), "test");
    if run.ignored > 0 {
        note += &format!(", {} of the long set left out", run.ignored);
    }
    if !run.skipped.is_empty() {
        note += &format!(", {} SKIPPED (see below)", run.skipped.len());
    }
    let outcome = if run.failed > 0 {
        Outcome::Failed(format!("{} of {note}", run.failed))
    } else if !run.success {
        Outcome::Failed(format!("cargo test failed; {note} ran"))
    } else if run.passed == 0 {
        Outcome::Failed("no test ran".to_owned())
    } else if run.ran() == 0 {
        Outcome::Skipped("every test lacked something (see below)".to_owned())
    } else {
        Outcome::Passed(note)
    };
    Ended { outcome, run }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_without_tests_is_a_failure() {
        let run = TestRun { success: true, ..TestRun::default() };
        assert_eq!(test_outcome(run).outcome, Outcome::Failed("no test ran".to_owned()));
    }

    #[test]
    fn run_with_only_skipped_tests_is_skipped() {
        let skipped = vec![("a".to_owned(), "no user namespaces".to_owned())];
        let run = TestRun { success: true, passed: 1, skipped, ..TestRun::default() };
        assert!(matches!(test_outcome(run).outcome, Outcome::Skipped(_)));
    }

    #[test]
    fn failed_build_is_a_failure_without_failed_tests() {
        let run = TestRun { success: false, passed: 3, ..TestRun::default() };
        assert!(matches!(test_outcome(run).outcome, Outcome::Failed(_)));
    }
}

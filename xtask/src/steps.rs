//! Steps of `cargo xtask test`: a table, and one function for each step.
//!
//! The default set runs before each commit and takes minutes. The long set has everything else; its steps have parts that run,
//! fail and are recorded one by one ([`crate::run`], [`crate::record`]).
//!
//! To add a step, write its function and add a row to [`STEPS`]. A step whose `needs` are missing is
//! reported as SKIPPED, with the way to install them. Missing parts of the checkout (no test ran, no fuzz
//! target exists) are a failure: otherwise a renamed file would remove a check unnoticed.

mod checks;
mod others;
mod tests;

use std::cell::OnceCell;
use std::ffi::OsString;
use std::path::PathBuf;

use taskkit::exec::{Cmd, TestRun, on_terminal};
use taskkit::text::count;
use taskkit::tools::{self, Tool, Toolbox};

use crate::built::{self, Program};
use crate::packages::target_directory;
use crate::programs::Setting;
use crate::report::Outcome;

pub(crate) use tests::all_orders;

/// Step of the test run, in one of the sets or in both.
pub(crate) struct Step {
    /// Name for `--only` and `--skip`.
    pub(crate) name: &'static str,
    /// Description of the checks.
    pub(crate) title: &'static str,
    /// Tools without which the step cannot run.
    pub(crate) needs: &'static [&'static Tool],
    /// Work of the step in the default set.
    pub(crate) default: Option<fn(&Context) -> anyhow::Result<Ended>>,
    /// Work of the step in the long set.
    pub(crate) long: Option<Long>,
}

/// Work of a step in the long set.
pub(crate) struct Long {
    /// Returns the names of the parts. The name of the only part of a step is empty.
    pub(crate) parts: fn(&Context) -> anyhow::Result<Vec<String>>,
    /// Runs one part.
    pub(crate) run: fn(&Context, &str) -> anyhow::Result<Ended>,
}

impl Long {
    /// Creates the work of a step with a single part.
    const fn whole(run: fn(&Context, &str) -> anyhow::Result<Ended>) -> Option<Long> {
        Some(Long { parts: |_| Ok(vec![String::new()]), run })
    }
}

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

/// All steps in the order of their execution, fast ones first.
pub(crate) static STEPS: &[Step] = &[
    Step {
        name: "fmt",
        title: "formatting (rustfmt)",
        needs: &[&tools::RUSTFMT],
        default: Some(checks::fmt),
        long: None,
    },
    Step {
        name: "tidy",
        title: "the project's rules for the sources (xtask/tidy.toml has the exceptions)",
        needs: &[],
        default: Some(checks::tidy),
        long: None,
    },
    Step {
        name: "deny",
        title: "licences, banned crates and sources of the dependencies",
        needs: &[&tools::CARGO_DENY],
        default: Some(checks::deny),
        long: Long::whole(|context, _| checks::deny(context)),
    },
    Step {
        name: "advisories",
        title: "known vulnerabilities in the dependencies (fetches the RustSec database)",
        needs: &[&tools::CARGO_DENY],
        default: None,
        long: Long::whole(|context, _| checks::advisories(context)),
    },
    Step {
        name: "clippy",
        title: "lints, warnings denied, all targets",
        needs: &[&tools::CLIPPY],
        default: Some(checks::clippy),
        long: None,
    },
    Step {
        name: "build",
        title: "all test programs, in one build (profile `suite`)",
        needs: &[],
        default: Some(tests::build),
        long: None,
    },
    Step {
        name: "unit",
        title: "unit, property and conformance tests of every crate; nothing installed is needed",
        needs: &[],
        default: Some(tests::unit),
        long: Some(Long { parts: tests::unit_parts, run: tests::long_part }),
    },
    Step {
        name: "local",
        title: "the ringfence command and disks, end to end: real processes, real kernel TCP, real NBD \
                clients and servers",
        needs: &[],
        default: Some(tests::local),
        long: Some(Long { parts: tests::local_parts, run: tests::long_part }),
    },
    Step {
        name: "vm",
        title: "real Xen with its guests, and a plain kernel, under emulation (`cargo xtask vm`)",
        needs: vm_lab::NEEDS,
        default: Some(others::vm_short),
        long: Some(Long { parts: |_| Ok(vec!["xen".into(), "linux".into()]), run: others::vm }),
    },
    Step {
        name: "doc",
        title: "examples in the documentation, and the documentation itself, warnings denied",
        needs: &[],
        default: None,
        long: Long::whole(|context, _| tests::doc(context)),
    },
    Step {
        name: "loom",
        title: "the lock-free protocols, in every interleaving of their threads (loom)",
        needs: &[],
        default: None,
        long: Some(Long { parts: tests::loom_parts, run: tests::loom }),
    },
    Step {
        name: "attack",
        title: "the attack suite as an ordinary user, which root becomes",
        needs: &[],
        default: None,
        long: Some(Long { parts: tests::attack_parts, run: tests::attack }),
    },
    Step {
        name: "fuzz-smoke",
        title: "every fuzz target for a few seconds (`unit` has the same bodies as property tests)",
        needs: &[&tools::CARGO_FUZZ, &tools::NIGHTLY],
        default: None,
        long: Long::whole(|context, _| others::fuzz_smoke(context)),
    },
    Step {
        name: "clients",
        title: "Podman, RootlessKit, QEMU and libvirt with Ringfence as pasta and passt (`cargo xtask clients`)",
        needs: &[&tools::DEBOOTSTRAP],
        default: None,
        long: Some(Long { parts: others::client_parts, run: others::clients }),
    },
    Step {
        name: "package",
        title: "Debian packages, installed, used and removed (`cargo xtask package --try`)",
        needs: &[&tools::DEBOOTSTRAP],
        default: None,
        long: Long::whole(|context, _| others::package(context)),
    },
];

/// State that all steps share.
pub(crate) struct Context {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
    pub(crate) toolbox: Toolbox,
    pub(crate) fuzz_seconds: u32,
    /// Parts of steps to which `--only` restricts the run.
    pub(crate) only: Vec<String>,
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
            filter: vec![],
            durations: false,
            require_local: false,
            missing: vec![],
            built: OnceCell::new(),
        })
    }

    /// Returns all test programs. The first call builds them.
    pub(crate) fn built(&self) -> anyhow::Result<&[Program]> {
        if self.built.get().is_none() {
            let programs = built::build(&self.root, self.cargo(&[]))?;
            let _ = self.built.set(programs);
        }
        let programs = self.built.get().and_then(Option::as_deref);
        programs.ok_or_else(|| anyhow::anyhow!("the test programs do not build"))
    }

    /// Returns the environment of test programs. Those of the step `local` must not skip a test without need.
    pub(crate) fn setting(&self, is_local: bool) -> Setting {
        let mut env = vec![("PATH".to_owned(), self.toolbox.path().clone())];
        if is_local && self.require_local {
            env.push(("RINGFENCE_TEST_REQUIRE".to_owned(), "1".into()));
            env.push(("RINGFENCE_TEST_MISSING".to_owned(), self.missing.join(" ").into()));
        }
        Setting { env, durations: self.durations, is_quiet: false }
    }

    fn cargo(&self, args: &[&str]) -> Cmd {
        let command = Cmd::cargo().args(args.iter().copied()).env("PATH", self.toolbox.path());
        if on_terminal() { command.env("CARGO_TERM_COLOR", "always") } else { command }
    }

    /// Returns a `cargo test` with its own arguments and those of the test programs.
    fn cargo_test(&self, args: &[&str], test_args: &[&str]) -> Cmd {
        // A skipped test prints its reason to standard error, which libtest hides by default.
        let command =
            self.cargo(&["test", "--no-fail-fast"]).args(args.iter().copied()).args(["--"]);
        let command = command.args(test_args.iter().copied()).args(["--show-output"]);
        if on_terminal() { command.args(["--color=always"]) } else { command }
    }

    /// Returns the path of this program, for steps that are commands of it.
    fn own_command(&self, args: &[&str]) -> anyhow::Result<Cmd> {
        let own: OsString = std::env::current_exe()?.into();
        Ok(Cmd::new(own).args(args.iter().copied()))
    }
}

fn outcome_of(success: bool, failure: &str) -> Ended {
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
mod unit_tests {
    use super::*;

    #[test]
    fn steps_have_distinct_names_and_a_set() {
        let mut names: Vec<_> = STEPS.iter().map(|step| step.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), STEPS.len());
        assert!(STEPS.iter().all(|step| step.default.is_some() || step.long.is_some()));
    }

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

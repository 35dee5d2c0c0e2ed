//! Steps of `cargo xtask test`: a table, and one function for each step.
//!
//! To add a step, write its function and add a row to [`STEPS`]. A step whose `needs` are missing is
//! reported as SKIPPED, with the way to install them. Missing parts of the checkout (no test ran, no fuzz
//! target exists) are a failure: otherwise a renamed file would remove a check unnoticed.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use taskkit::exec::{Cmd, TestRun, on_terminal};
use taskkit::text::{count, duration};
use taskkit::tools::{self, Tool, Toolbox};

use crate::attack;
use crate::packages::{crates, depends_on, integration_tests, package_name, target_directory};
use crate::report::{self, Outcome, Row};
use crate::tidy;

/// Step of the test run.
pub(crate) struct Step {
    /// Name for `--only` and `--skip`.
    pub(crate) name: &'static str,
    /// Description of the checks.
    pub(crate) title: &'static str,
    /// Tools without which the step cannot run.
    needs: &'static [&'static Tool],
    run: fn(&Context) -> anyhow::Result<Ended>,
}

/// Outcome of a step without its duration.
struct Ended {
    outcome: Outcome,
    skipped_tests: Vec<(String, String)>,
    /// Names and panics of the failed tests.
    failed_tests: Vec<(String, String)>,
}

impl From<Outcome> for Ended {
    fn from(outcome: Outcome) -> Ended {
        Ended { outcome, skipped_tests: vec![], failed_tests: vec![] }
    }
}

/// All steps in the order of their execution, fast ones first.
pub(crate) static STEPS: &[Step] = &[
    Step { name: "fmt", title: "formatting (rustfmt)", needs: &[&tools::RUSTFMT], run: fmt },
    Step {
        name: "tidy",
        title: "the project's rules for the sources (xtask/tidy.toml has the exceptions)",
        needs: &[],
        run: tidy,
    },
    Step {
        name: "deny",
        title: "licences, banned crates and sources of the dependencies",
        needs: &[&tools::CARGO_DENY],
        run: deny,
    },
    Step {
        name: "advisories",
        title: "known vulnerabilities in the dependencies (fetches the RustSec database)",
        needs: &[&tools::CARGO_DENY],
        run: advisories,
    },
    Step {
        name: "clippy",
        title: "lints, warnings denied, all targets",
        needs: &[&tools::CLIPPY],
        run: clippy,
    },
    Step {
        name: "unit",
        title: "unit, property and conformance tests of every crate; nothing installed is needed",
        needs: &[],
        run: unit,
    },
    Step {
        name: "doc",
        title: "examples in the documentation, and the documentation itself, warnings denied",
        needs: &[],
        run: doc,
    },
    Step {
        name: "loom",
        title: "the lock-free protocols, in every interleaving of their threads (loom)",
        needs: &[],
        run: loom,
    },
    Step {
        name: "local",
        title: "the ringfence command and disks, end to end: real processes, real kernel TCP, real NBD \
                clients and servers (release build)",
        needs: &[],
        run: local,
    },
    Step {
        name: "vm",
        title: "real Xen with its guests, and a plain kernel, under emulation (`cargo xtask vm`)",
        needs: vm_lab::NEEDS,
        run: vm,
    },
    Step {
        name: "fuzz-smoke",
        title: "every fuzz target for a few seconds (`unit` has the same bodies as property tests)",
        needs: &[&tools::CARGO_FUZZ, &tools::NIGHTLY],
        run: fuzz_smoke,
    },
];

/// State that all steps share.
pub(crate) struct Context {
    root: PathBuf,
    target: PathBuf,
    toolbox: Toolbox,
    fuzz_seconds: u32,
    /// Set if the step `local` must not skip a test: this process is root and could install everything.
    require_local: bool,
}

impl Context {
    /// Creates the context for the repository at `root`.
    pub(crate) fn new(root: PathBuf, fuzz_seconds: u32) -> anyhow::Result<Context> {
        let target = target_directory(&root)?;
        let toolbox = Toolbox::new(&root, &target);
        Ok(Context { root, target, toolbox, fuzz_seconds, require_local: false })
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
}

/// Prepares the machine, runs the steps and prints the report. Returns `true` if none failed.
pub(crate) fn run(selected: &[&Step], mut context: Context, may_install: bool) -> bool {
    heading("preparation", "programs that the steps need");
    prepare(selected, &mut context, may_install);
    let rows: Vec<Row> = selected.iter().map(|step| run_step(step, &context)).collect();
    heading("report", "");
    print!("{}", report::summary(&rows));
    report::succeeded(&rows)
}

fn heading(name: &str, title: &str) {
    let separator = if title.is_empty() { "" } else { ": " };
    println!("\n==== {name}{separator}{title}");
}

fn run_step(step: &Step, context: &Context) -> Row {
    heading(step.name, step.title);
    let start = Instant::now();
    let missing = context.toolbox.missing(step.needs);
    let ended = if missing.is_empty() {
        (step.run)(context)
            .unwrap_or_else(|error| Outcome::Failed(format!("could not run: {error:#}")).into())
    } else {
        Outcome::Skipped(tools::how_to_get(&missing)).into()
    };
    let time = start.elapsed();
    match &ended.outcome {
        Outcome::Passed(_) => println!("---- {} passed in {}", step.name, duration(time)),
        Outcome::Failed(why) => println!("---- {} FAILED: {why}", step.name),
        Outcome::Skipped(why) => println!("---- {} SKIPPED: {why}", step.name),
    }
    Row {
        name: step.name,
        outcome: ended.outcome,
        time,
        skipped_tests: ended.skipped_tests,
        failed_tests: ended.failed_tests,
    }
}

/// Installs the programs that the selected steps lack, or prints the missing ones.
fn prepare(selected: &[&Step], context: &mut Context, may_install: bool) {
    let local = selected.iter().any(|step| step.name == "local");
    let mut wanted: Vec<&'static Tool> = selected.iter().flat_map(|s| s.needs).copied().collect();
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
    }
    if missing.is_empty() {
        println!("every program that the steps need is installed");
    } else {
        println!("{}", tools::how_to_get(&missing));
    }
    if local {
        let is_root = context.toolbox.is_root;
        if let Some(message) = tools::open_tun(is_root && may_install) {
            println!("{message}");
        }
        let programs_missing = missing.iter().any(|tool| tools::LOCAL_PROGRAMS.contains(tool));
        context.require_local = is_root && may_install && !programs_missing;
    }
}

fn outcome_of(success: bool, failure: &str) -> Ended {
    let failed = || Outcome::Failed(failure.to_owned());
    if success { Outcome::Passed(String::new()) } else { failed() }.into()
}

/// Returns the outcome of test programs. Zero tests are a failure, because nothing was checked.
fn test_outcome(run: TestRun) -> Ended {
    let mut note = count(run.ran(), "test");
    if run.ignored > 0 {
        note += &format!(", {} ignored", run.ignored);
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
    Ended { outcome, skipped_tests: run.skipped, failed_tests: run.failures }
}

fn fmt(context: &Context) -> anyhow::Result<Ended> {
    let success = context.cargo(&["fmt", "--all", "--check"]).run(&context.root)?;
    Ok(outcome_of(success, "not formatted: run `cargo fmt --all`"))
}

fn tidy(context: &Context) -> anyhow::Result<Ended> {
    let findings = tidy::check(&context.root)?;
    print!("{}", tidy::describe(&findings));
    Ok(outcome_of(findings.is_empty(), &count(findings.len(), "finding")))
}

fn deny(context: &Context) -> anyhow::Result<Ended> {
    let command =
        context.cargo(&["deny", "check", "--hide-inclusion-graph", "licenses", "bans", "sources"]);
    Ok(outcome_of(command.run(&context.root)?, "see deny.toml for what is allowed, and why"))
}

fn advisories(context: &Context) -> anyhow::Result<Ended> {
    if let Err(error) = context.cargo(&["deny", "fetch", "db"]).output(&context.root)? {
        print!("{error}");
        let reason = "the database at github.com/RustSec/advisory-db cannot be fetched: \
                      needs the network and git";
        return Ok(Outcome::Skipped(reason.to_owned()).into());
    }
    let command = context.cargo(&["deny", "check", "--disable-fetch", "advisories"]);
    Ok(outcome_of(command.run(&context.root)?, "a dependency has a known vulnerability"))
}

fn clippy(context: &Context) -> anyhow::Result<Ended> {
    let args = ["clippy", "--workspace", "--all-targets", "--keep-going", "--", "-D", "warnings"];
    Ok(outcome_of(context.cargo(&args).run(&context.root)?, "clippy has warnings"))
}

/// Packages whose integration tests run programs that must be installed: the step `local` runs these.
const WITH_PROGRAMS: [&str; 4] = ["ringfence", "block", "nbd", "bench"];
/// Package of which only some integration tests do so, and the prefix of their names.
const SOME_WITH_PROGRAMS: (&str, &str) = ("testkit", "block_");

/// Runs the tests of libraries and programs, and the integration tests that the step `local` leaves.
fn unit(context: &Context) -> anyhow::Result<Ended> {
    let mut args: Vec<OsString> = ["--workspace", "--lib", "--bins"].map(Into::into).to_vec();
    for krate in crates(&context.root)? {
        if krate.file_name().is_some_and(|name| WITH_PROGRAMS.iter().any(|other| name == *other)) {
            continue;
        }
        let (some, prefix) = SOME_WITH_PROGRAMS;
        let some = krate.file_name().is_some_and(|name| name == some);
        for name in integration_tests(&krate)? {
            if some && name.to_string_lossy().starts_with(prefix) {
                continue;
            }
            args.extend(["--test".into(), name]);
        }
    }
    let args: Vec<String> = args.iter().map(|arg| arg.to_string_lossy().into_owned()).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    Ok(test_outcome(context.cargo_test(&args, &[]).run_tests(&context.root)?))
}

fn doc(context: &Context) -> anyhow::Result<Ended> {
    let mut run = context.cargo_test(&["--workspace", "--doc"], &[]).run_tests(&context.root)?;
    let built = context
        .cargo(&["doc", "--workspace", "--no-deps", "--keep-going"])
        .env("RUSTDOCFLAGS", "-D warnings")
        .run(&context.root)?;
    if run.success && built {
        return Ok(Outcome::Passed(count(run.ran(), "example")).into());
    }
    run.success = false;
    Ok(if built { test_outcome(run) } else { outcome_of(false, "cargo doc has warnings") })
}

/// Runs the tests named `loom` of every package that depends on loom, built with `--cfg loom`. Their own
/// target directory keeps the flag from invalidating the common one.
fn loom(context: &Context) -> anyhow::Result<Ended> {
    let mut total: Option<TestRun> = None;
    for krate in crates(&context.root)? {
        let manifest = std::fs::read_to_string(krate.join("Cargo.toml"))?;
        if !depends_on(&manifest, "loom")? {
            continue;
        }
        let package = package_name(&manifest)?;
        let mut flags = std::env::var_os("RUSTFLAGS").unwrap_or_default();
        flags.push(" --cfg loom");
        let mut command = context
            .cargo_test(&["--release", "--package", &package, "--lib"], &["loom"])
            .env("RUSTFLAGS", flags.to_string_lossy().trim())
            .env("CARGO_TARGET_DIR", context.target.join("loom"));
        // Few preemptions find most bugs, and the number of interleavings grows steeply with them.
        if std::env::var_os("LOOM_MAX_PREEMPTIONS").is_none() {
            command = command.env("LOOM_MAX_PREEMPTIONS", "3");
        }
        let run = command.run_tests(&context.root)?;
        if run.success && run.passed == 0 {
            let why = format!("{package} depends on loom, but has no test named loom");
            return Ok(Outcome::Failed(why).into());
        }
        match &mut total {
            Some(total) => total.add(run),
            None => total = Some(run),
        }
    }
    Ok(total.map_or_else(|| outcome_of(false, "no crate depends on loom"), test_outcome))
}

/// Runs the integration tests of the binary and of disks. Each test checks its own requirements. A missing
/// one is a failure where everything could be installed.
fn local(context: &Context) -> anyhow::Result<Ended> {
    if integration_tests(&context.root.join("crates/ringfence"))?.is_empty() {
        return Ok(outcome_of(false, "crates/ringfence/tests has no test"));
    }
    if !context.require_local {
        println!("a test that lacks something will be skipped, and named in the report");
    }
    // A test of the product uses a role of the benchmark program.
    let bench = ["build", "--release", "--package", "ringfence-bench"];
    if !Cmd::cargo().args(bench).run(&context.root)? {
        return Ok(outcome_of(false, "ringfence-bench does not build"));
    }
    // The product is built apart from the tools, whose features of shared crates must not change it.
    let of = |packages: &[&str], tests: &str| {
        let packages = packages.iter().flat_map(|package| ["--package", package]);
        let args: Vec<&str> =
            ["--release"].into_iter().chain(packages).chain(["--test", tests]).collect();
        let mut command = context.cargo_test(&args, &[]);
        if context.require_local {
            command = command.env("RINGFENCE_TEST_REQUIRE", "1");
        }
        command.run_tests(&context.root)
    };
    let mut run = of(&["ringfence", "ringfence-block", "ringfence-nbd"], "*")?;
    run.add(of(&["ringfence-bench"], "*")?);
    run.add(of(&["ringfence-testkit"], "block_*")?);
    if rustix::process::geteuid().is_root() {
        run.add(attack::run_as_ordinary_user(&context.root)?);
    }
    Ok(test_outcome(run))
}

/// Runs the core scenarios of `cargo xtask vm`.
fn vm(context: &Context) -> anyhow::Result<Ended> {
    match vm_lab::core(&context.root, &context.target, &context.toolbox) {
        Ok(Ok(note)) => Ok(Outcome::Passed(note).into()),
        Ok(Err(failed)) => Ok(Outcome::Failed(failed).into()),
        Err(error) => {
            error.downcast().map(|vm_lab::Unavailable(reason)| Outcome::Skipped(reason).into())
        }
    }
}

fn fuzz_smoke(context: &Context) -> anyhow::Result<Ended> {
    let manifest = context.root.join("fuzz/Cargo.toml");
    let manifest = std::fs::read_to_string(&manifest)
        .with_context(|| format!("reading {}", manifest.display()))?;
    let targets = tidy::fuzz_targets(&manifest)?;
    if targets.is_empty() {
        return Ok(outcome_of(false, "fuzz/Cargo.toml lists no fuzz target"));
    }
    if !fuzz(context, &["build"]).run(&context.root)? {
        return Ok(outcome_of(false, "the fuzz targets do not build"));
    }
    let limit = format!("-max_total_time={}", context.fuzz_seconds);
    let mut failed = vec![];
    for target in &targets {
        // libFuzzer writes its findings to the first corpus and only reads the second, which is checked in.
        let found = context.target.join("fuzz-corpus").join(target);
        std::fs::create_dir_all(&found)?;
        let mut command = fuzz(context, &["run", target]).args([found.as_os_str()]);
        let seeds = context.root.join("fuzz/seeds").join(target);
        if seeds.is_dir() {
            command = command.args([seeds.as_os_str()]);
        }
        let command = command.args([
            "--",
            limit.as_str(),
            "-timeout=10",
            "-rss_limit_mb=2048",
            "-verbosity=0",
        ]);
        if !command.run(&context.root)? {
            failed.push(target.as_str());
        }
    }
    Ok(if failed.is_empty() {
        let note = format!("{}, {} s each", count(targets.len(), "target"), context.fuzz_seconds);
        Outcome::Passed(note).into()
    } else {
        outcome_of(false, &format!("{} (the input is below fuzz/artifacts)", failed.join(", ")))
    })
}

/// Returns a `cargo fuzz` of the nightly toolchain, independent of the toolchain of this xtask.
fn fuzz(context: &Context, args: &[&str]) -> Cmd {
    Cmd::new("rustup")
        .args(["run", "nightly", "cargo", "fuzz"])
        .args(args.iter().copied())
        .env("PATH", context.toolbox.path())
        .env("CARGO_TARGET_DIR", context.target.join("fuzz"))
        .env_remove("CARGO")
        .env_remove("RUSTUP_TOOLCHAIN")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_have_distinct_names() {
        let mut names: Vec<_> = STEPS.iter().map(|step| step.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), STEPS.len());
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

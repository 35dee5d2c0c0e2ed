//! `cargo xtask attack`: the attack suite, as root and as an ordinary user, and the random attack.
//!
//! The suite is every test program `attack*` of `crates/ringfence/tests`, found by name. Under root each
//! program runs twice: as root, and as an ordinary user with its own runtime directory. The programs are
//! built once and copied to a directory that the ordinary user may read.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use taskkit::exec::{Cmd, TestRun};
use taskkit::tools;

use crate::built::{Kind, Program};
use crate::context::{Context, Ended, test_outcome};
use crate::packages::{PRODUCT, integration_tests};
use crate::test_program;

/// User id and group id of the ordinary user: `nobody` on most systems, which owns no files.
const ORDINARY: u32 = 65534;
/// Name of the suite's largest test program, and start of the names of the others.
const PREFIX: &str = "attack";
/// Arguments of the suite's programs: the long tests run, too.
const ARGUMENTS: [&str; 2] = ["--show-output", "--include-ignored"];
/// Test program of the random attack.
const RANDOM: &str = "attack_random";

/// Arguments of `cargo xtask attack`: the suite, or the random attack.
#[derive(Args)]
pub(crate) struct AttackArgs {
    #[command(subcommand)]
    random: Option<Attack>,
    /// Run only test programs whose names contain this
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
}

#[derive(Subcommand)]
enum Attack {
    /// Run random adversaries beside correct guests
    ///
    /// Three guests attack control socket, hub, store, event channels, NBD sockets, TAPs, the uplink and
    /// the runtime directory at random, with descriptors of all kinds. Two correct guests verify every
    /// byte of TCP streams and disks. Findings are: lost or damaged bytes, processes that crash, threads
    /// stuck for over a second, slow replies, and memory or descriptors that grow. Only root can see
    /// threads and descriptors of processes that are not dumpable.
    Random {
        /// Duration in minutes
        #[arg(long, default_value_t = 2.0)]
        minutes: f64,
        /// Seed of an earlier run, to repeat it
        #[arg(long)]
        seed: Option<u64>,
        /// Families of attacks: frames, spoof, nbd, control, files, uplink, frontend, server
        #[arg(long, value_delimiter = ',')]
        families: Vec<String>,
        /// Use this `ringfence` for the correct guests and the driver domain
        #[arg(long, value_name = "FILE")]
        program: Option<PathBuf>,
    },
}

/// Runs the suite or the random attack. Returns `false` after a finding.
pub(crate) fn run(args: &AttackArgs, root: &Path) -> anyhow::Result<bool> {
    match &args.random {
        None => suite(root, &args.only),
        Some(Attack::Random { minutes, seed, families, program }) => {
            let mut variables = vec![
                ("RINGFENCE_ATTACK_MINUTES", minutes.to_string().into()),
                ("RINGFENCE_TEST_REQUIRE", "1".into()),
            ];
            if let Some(seed) = seed {
                variables.push(("RINGFENCE_ATTACK_SEED", seed.to_string().into()));
            }
            if !families.is_empty() {
                variables.push(("RINGFENCE_ATTACK_FAMILIES", families.join(",").into()));
            }
            if let Some(program) = program {
                let program = std::path::absolute(program)?;
                anyhow::ensure!(program.is_file(), "{} is no file", program.display());
                variables.push(("RINGFENCE_ATTACK_PROGRAM", program.into()));
            }
            test_program::run(root, ("ringfence", RANDOM), &[], &variables)
        }
    }
}

/// Returns `true` if an integration test is a program of the suite.
pub(crate) fn is_of_suite(target: &str) -> bool {
    target.starts_with(PREFIX)
}

fn suite(root: &Path, only: &str) -> anyhow::Result<bool> {
    let programs = build(root, only)?;
    let is_root = rustix::process::geteuid().is_root();
    if let Some(message) = tools::open_tun(is_root) {
        println!("{message}");
    }
    if is_root && let Some(why) = programs.first().and_then(inaccessible) {
        anyhow::bail!("{why}");
    }
    let mut success = true;
    for program in &programs {
        let own = Cmd::new(&program.file).args(ARGUMENTS).run_tests(&program.folder);
        if is_root {
            success &= report("root", &program.target, &own?);
            success &= report("an ordinary user", &program.target, &run_ordinary(program)?);
        } else {
            println!("SKIPPED: {} as root: only root can do that", program.target);
            success &= report("an ordinary user", &program.target, &own?);
        }
    }
    Ok(success)
}

/// Runs a program of the suite as an ordinary user. The caller is root, and has run it as root, so tests that need root do
/// not count.
pub(crate) fn run_as_ordinary_user(program: &Program) -> anyhow::Result<Ended> {
    if let Some(why) = inaccessible(program) {
        return Ok(crate::report::Outcome::Skipped(why).into());
    }
    let mut run = run_ordinary(program)?;
    run.passed = run.ran().saturating_sub(run.failed);
    run.skipped.clear();
    Ok(test_outcome(run))
}

/// Builds the suite's test programs. `only` is a part of a program's name.
fn build(root: &Path, only: &str) -> anyhow::Result<Vec<Program>> {
    let mut names = integration_tests(&root.join(PRODUCT))?;
    names.retain(|name| name.to_str().is_some_and(|name| is_of_suite(name) && name.contains(only)));
    anyhow::ensure!(!names.is_empty(), "{PRODUCT}/tests has no test program {PREFIX}*{only}*");
    let mut context = Context::new(root.to_owned())?;
    context.programs = names.iter().map(|name| name.to_string_lossy().into_owned()).collect();
    let of_suite = |p: &&Program| p.kind == Kind::Integration && is_of_suite(&p.target);
    Ok(context.built()?.iter().filter(of_suite).cloned().collect())
}

/// Returns the reason for which the ordinary user cannot run a program, if there is one.
fn inaccessible(program: &Program) -> Option<String> {
    // The tests start the `ringfence` that was built in the same directory.
    let access = as_ordinary_user().args(["test", "-x"]).args([&program.file]);
    (!access.probe()).then(|| {
        format!(
            "user {ORDINARY} cannot access {}: use a checkout below directories that all users may enter",
            program.file.display()
        )
    })
}

/// Runs a test program as the ordinary user.
fn run_ordinary(program: &Program) -> anyhow::Result<TestRun> {
    let directory = UserDirectory::new(&program.target)?;
    Ok(directory.ordinary(&program.file)?.run_tests(&directory.0)?)
}

/// Returns the start of a command line that runs as the ordinary user, without groups and capabilities.
fn as_ordinary_user() -> Cmd {
    let user = [format!("--reuid={ORDINARY}"), format!("--regid={ORDINARY}")];
    Cmd::new("setpriv").args(user).args(["--clear-groups", "--inh-caps=-all"])
}

/// Prints the outcome of one test program. Returns `false` if a test failed or none ran.
fn report(user: &str, name: &str, run: &TestRun) -> bool {
    for (test, reason) in &run.skipped {
        println!("SKIPPED: {name}, {test}: {reason}");
    }
    let success = run.success && run.failed == 0 && run.passed > 0;
    let word = if success { "passed" } else { "FAILED" };
    println!(
        "---- {name} as {user}: {word}: {} ran, {} failed, {} skipped",
        run.ran(),
        run.failed,
        run.skipped.len()
    );
    success
}

/// Directory of the ordinary user with a copy of a test program. Removed on drop.
struct UserDirectory(PathBuf);

impl UserDirectory {
    fn new(name: &str) -> anyhow::Result<UserDirectory> {
        // The target directory does not serve: the ordinary user may not write there.
        let path = std::env::temp_dir().join(format!("ringfence-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        let directory = UserDirectory(path);
        std::fs::set_permissions(&directory.0, std::fs::Permissions::from_mode(0o700))?;
        chown(&directory.0, Some(ORDINARY), Some(ORDINARY))?;
        Ok(directory)
    }

    /// Returns a command that runs a copy of the test program as the ordinary user, with its own runtime directory.
    fn ordinary(&self, program: &Path) -> anyhow::Result<Cmd> {
        let (copy, session) = (self.0.join("program"), self.0.join("session"));
        std::fs::copy(program, &copy)?;
        std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o755))?;
        std::fs::create_dir(&session)?;
        std::fs::set_permissions(&session, std::fs::Permissions::from_mode(0o700))?;
        chown(&session, Some(ORDINARY), Some(ORDINARY))?;
        Ok(as_ordinary_user()
            .args([copy])
            .args(ARGUMENTS)
            // The user may not enter root's own directories.
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .env("HOME", self.0.as_os_str())
            .env("TMPDIR", self.0.as_os_str())
            .env("XDG_RUNTIME_DIR", session.as_os_str()))
    }
}

impl Drop for UserDirectory {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("{} stays: {error}", self.0.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_of_a_run_without_tests_is_a_failure() {
        let run = TestRun { success: true, ..TestRun::default() };
        assert!(!report("root", "attack_x", &run));
    }
}

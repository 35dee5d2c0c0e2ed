//! `cargo xtask attack`: the attack suite, as root and as an ordinary user, and the random attack.
//!
//! The suite is every test program `attack_*` of `crates/ringfence/tests`, found by name. Under root each
//! program runs twice: as root, and as an ordinary user with its own runtime directory. The programs are
//! built once and copied to a directory that the ordinary user may read.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use taskkit::exec::{Cmd, TestRun};
use taskkit::tools;

use crate::packages::integration_tests;

/// User id and group id of the ordinary user: `nobody` on most systems, which owns no files.
const ORDINARY: u32 = 65534;
/// Prefix of the names of the suite's test programs.
const PREFIX: &str = "attack_";
const CRATE: &str = "crates/ringfence";
/// Test program of the random attack.
const RANDOM: &str = "attack_random";

/// Arguments of `cargo xtask attack`: the suite, or the random attack.
#[derive(Args)]
pub(crate) struct AttackArgs {
    #[command(subcommand)]
    random: Option<Kind>,
    /// Run only test programs whose names contain this
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
}

#[derive(Subcommand)]
enum Kind {
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
        Some(Kind::Random { minutes, seed, families, program }) => {
            let test = ["test", "--release", "--package", "ringfence", "--test", RANDOM];
            let mut test = Cmd::cargo().args(test);
            test = test.env("RINGFENCE_ATTACK_MINUTES", minutes.to_string());
            test = test.env("RINGFENCE_TEST_REQUIRE", "1");
            if let Some(seed) = seed {
                test = test.env("RINGFENCE_ATTACK_SEED", seed.to_string());
            }
            if !families.is_empty() {
                test = test.env("RINGFENCE_ATTACK_FAMILIES", families.join(","));
            }
            if let Some(program) = program {
                let program = std::path::absolute(program)?;
                anyhow::ensure!(program.is_file(), "{} is no file", program.display());
                test = test.env("RINGFENCE_ATTACK_PROGRAM", program);
            }
            Ok(test.run(root)?)
        }
    }
}

fn suite(root: &Path, only: &str) -> anyhow::Result<bool> {
    let programs = build(root, only)?;
    let is_root = rustix::process::geteuid().is_root();
    if let Some(message) = tools::open_tun(is_root) {
        println!("{message}");
    }
    if is_root && let Some(why) = inaccessible(&programs) {
        anyhow::bail!("{why}");
    }
    let mut success = true;
    for (name, program) in programs {
        let own = test_program(&program).run_tests(&root.join(CRATE));
        if is_root {
            success &= report("root", &name, &own?);
            success &= report("an ordinary user", &name, &run_ordinary(&name, &program)?);
        } else {
            println!("SKIPPED: {name} as root: only root can do that");
            success &= report("an ordinary user", &name, &own?);
        }
    }
    Ok(success)
}

/// Runs the suite as an ordinary user. The caller is root, and has run it as root, so tests that need root do not
/// count.
pub(crate) fn run_as_ordinary_user(root: &Path) -> anyhow::Result<TestRun> {
    let programs = build(root, "")?;
    let mut all = TestRun { success: true, ..TestRun::default() };
    if let Some(why) = inaccessible(&programs) {
        all.skipped.push(("the attack suite as an ordinary user".to_owned(), why));
        return Ok(all);
    }
    for (name, program) in programs {
        let mut run = run_ordinary(&name, &program)?;
        run.success &= report("an ordinary user", &name, &run);
        run.passed = run.ran().saturating_sub(run.failed);
        run.skipped.clear();
        all.add(run);
    }
    Ok(all)
}

/// Builds the suite's test programs. Returns their names and files.
fn build(root: &Path, only: &str) -> anyhow::Result<Vec<(String, PathBuf)>> {
    let mut names = integration_tests(&root.join(CRATE))?;
    names.retain(|name| {
        name.to_str().is_some_and(|name| name.starts_with(PREFIX) && name.contains(only))
    });
    anyhow::ensure!(!names.is_empty(), "{CRATE}/tests has no test program {PREFIX}*{only}*");
    let mut build = Cmd::cargo().args(["test", "--release", "--no-run", "--package", "ringfence"]);
    build = build.args(["--message-format=json-render-diagnostics"]);
    for name in &names {
        build = build.args(["--test".into(), name.clone()]);
    }
    println!("building {} test programs of the attack suite", names.len());
    executables(&build.output(root)?.map_err(anyhow::Error::msg)?)
}

/// Returns the reason for which the ordinary user cannot run these programs, if there is one.
fn inaccessible(programs: &[(String, PathBuf)]) -> Option<String> {
    let (_, program) = programs.first()?;
    // The tests start the `ringfence` that was built in the same directory.
    let access = as_ordinary_user().args(["test", "-x"]).args([program]);
    (!access.probe()).then(|| {
        format!(
            "user {ORDINARY} cannot access {}: use a checkout below directories that all users may enter",
            program.display()
        )
    })
}

/// Runs a test program as the ordinary user.
fn run_ordinary(name: &str, program: &Path) -> anyhow::Result<TestRun> {
    let directory = UserDirectory::new(name)?;
    Ok(directory.ordinary(program)?.run_tests(&directory.0)?)
}

/// Returns the start of a command line that runs as the ordinary user, without groups and capabilities.
fn as_ordinary_user() -> Cmd {
    let user = [format!("--reuid={ORDINARY}"), format!("--regid={ORDINARY}")];
    Cmd::new("setpriv").args(user).args(["--clear-groups", "--inh-caps=-all"])
}

fn test_program(program: &Path) -> Cmd {
    Cmd::new(program).args(["--show-output"])
}

/// Returns name and file of the test programs in cargo's messages.
fn executables(messages: &str) -> anyhow::Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for line in messages.lines() {
        let message: serde_json::Value = serde_json::from_str(line).context("cargo's messages")?;
        let name = message.pointer("/target/name").and_then(serde_json::Value::as_str);
        let file = message.get("executable").and_then(serde_json::Value::as_str);
        if let (Some(name), Some(file)) = (name.filter(|n| n.starts_with(PREFIX)), file) {
            found.push((name.to_owned(), PathBuf::from(file)));
        }
    }
    anyhow::ensure!(!found.is_empty(), "cargo built no test program");
    Ok(found)
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
            .args(["--show-output"])
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
    fn executables_of_cargo_messages_are_test_programs_of_the_suite() {
        let messages = "{\"reason\":\"build-script-executed\"}\n\
            {\"target\":{\"name\":\"ringfence\"},\"executable\":\"/t/ringfence\"}\n\
            {\"target\":{\"name\":\"attack_x\"},\"executable\":\"/t/attack_x-1\"}\n\
            {\"target\":{\"name\":\"attack_y\"},\"executable\":null}\n";
        let expected = [("attack_x".to_owned(), PathBuf::from("/t/attack_x-1"))];
        assert_eq!(executables(messages).unwrap(), expected);
        assert!(executables("").is_err());
    }

    #[test]
    fn report_of_a_run_without_tests_is_a_failure() {
        let run = TestRun { success: true, ..TestRun::default() };
        assert!(!report("root", "attack_x", &run));
    }
}

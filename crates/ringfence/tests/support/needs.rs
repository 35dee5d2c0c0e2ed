//! What a test needs that a machine may lack.
//!
//! A test that lacks something says `SKIPPED: reason` and returns. Where `RINGFENCE_TEST_REQUIRE`
//! is 1 it fails instead: there nothing may be skipped unnoticed.

use std::path::Path;
use std::process::{Command, Stdio};

/// Something needed.
#[derive(Clone, Copy, Debug)]
pub enum Need {
    /// A program, of this Debian package.
    Program(&'static str, &'static str),
    /// TAP devices and user namespaces: what every guest needs.
    Guests,
    /// The rights of root.
    Root,
}

impl Need {
    /// What is missing, in words.
    pub fn missing(self) -> Option<String> {
        match self {
            Need::Program(name, package) => (!is_installed(name))
                .then(|| format!("{name} is not installed (Debian: {package})")),
            Need::Guests => guests_missing(),
            Need::Root => (!rustix::process::geteuid().is_root())
                .then(|| "only root may do what this test does".to_owned()),
        }
    }
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .any(|directory| directory.join(program).is_file())
}

fn guests_missing() -> Option<String> {
    let tun = Path::new("/dev/net/tun");
    if let Err(error) = std::fs::File::options().read(true).write(true).open(tun) {
        return Some(format!("{} cannot be opened: {error}", tun.display()));
    }
    let unshared = Command::new("unshare")
        .args(["--user", "--map-root-user", "--pid", "--fork", "true"])
        .stderr(Stdio::null())
        .status();
    let may = unshared.is_ok_and(|status| status.success());
    (!may).then(|| "user namespaces may not be made here".to_owned())
}

/// Fails where nothing may be skipped; else says that the test is.
pub fn skip(reason: &str) {
    let is_required = std::env::var_os("RINGFENCE_TEST_REQUIRE").is_some_and(|value| value == "1");
    assert!(!is_required, "RINGFENCE_TEST_REQUIRE is set, and {reason}");
    eprintln!("SKIPPED: {reason}");
}

/// Says that a test is skipped because of the machine's kernel, or of who keeps a container: nothing
/// that is installed would help. It runs in `cargo xtask vm linux` all the same.
pub fn skip_for_the_kernel(reason: &str) {
    eprintln!("SKIPPED: {reason}");
}

/// Says that a test is skipped for want of something that is not installed only to test: a server that
/// the package would start on the machine, a program that the distribution has not.
pub fn skip_what_is_not_installed(reason: &str) {
    eprintln!("SKIPPED: {reason}");
}

/// Returns from the test unless everything that it needs is there.
#[macro_export]
macro_rules! require {
    ($($need:expr),+ $(,)?) => {
        for need in [$($need),+] {
            if let Some(reason) = need.missing() {
                $crate::support::needs::skip(&reason);
                return;
            }
        }
    };
}

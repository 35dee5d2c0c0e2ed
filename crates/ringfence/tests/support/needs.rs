//! Requirements of tests that a machine may lack.
//!
//! A test without one of its requirements prints `SKIPPED: reason` and returns. With
//! `RINGFENCE_TEST_REQUIRE=1` it fails instead, so that no test is skipped unnoticed. The programs in
//! `RINGFENCE_TEST_MISSING`, separated by blanks, cannot be installed here, and tests that need one are skipped nevertheless. So are
//! those that need a device, a namespace or an attribute which the kernel does not give.
//!
//! With `RINGFENCE_TEST_PROGRAMS`, a PATH, the test's own PATH begins with an empty directory. Each program that a test asks for
//! is linked into it, so a test that starts a program without asking fails (`cargo xtask test --only empty-path`).

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Requirement of a test.
#[derive(Clone, Copy, Debug)]
pub enum Need {
    /// Program and its Debian package.
    Program(&'static str, &'static str),
    /// TAP devices and user namespaces, which every guest needs.
    Guests,
    Root,
    /// Device of the kernel, which no package brings.
    Device(&'static str),
    /// Extended attributes of users, on the file system of temporary files.
    Attributes,
    /// Module of Python and its package, which `pip` installs.
    Module(&'static str, &'static str),
    /// Program of this workspace that another package builds.
    Built(&'static str),
}

/// Device by which programs provide file systems.
pub const FUSE: Need = Need::Device("/dev/fuse");
/// Device by which files become block devices.
pub const LOOPS: Need = Need::Device("/dev/loop-control");
/// Program that sends echo requests.
pub const PING: Need = Need::Program("ping", "iputils-ping");

impl Need {
    /// Returns a description of what is missing, or `None`.
    pub fn missing(self) -> Option<String> {
        match self {
            Need::Program(name, package) => (!is_installed(name))
                .then(|| format!("{name} is not installed (Debian: {package})")),
            Need::Module(name, package) => (!has_module(name))
                .then(|| format!("python3 has no module {name} (pip install {package})")),
            Need::Guests => guests_missing(),
            Need::Device(path) => {
                let opened = std::fs::File::options().read(true).write(true).open(path);
                opened.err().map(|error| format!("{path} cannot be opened: {error}"))
            }
            Need::Attributes => attributes_missing(),
            Need::Built(name) => (!beside_product(name).is_file())
                .then(|| format!("{name} is not built (cargo build --release -p {name})")),
            Need::Root => (!rustix::process::geteuid().is_root())
                .then(|| "only root may do what this test does".to_owned()),
        }
    }
}

fn has_module(name: &str) -> bool {
    let code = format!("import {name}");
    let imported = Command::new("python3").args(["-c", &code]).stderr(Stdio::null()).status();
    is_installed("python3") && imported.is_ok_and(|status| status.success())
}

/// Returns the path of a program of this workspace. Cargo puts programs one folder above the test programs.
pub fn beside_product(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap_or_default();
    test.parent().and_then(Path::parent).unwrap_or(Path::new(".")).join(name)
}

fn is_installed(program: &str) -> bool {
    find_program(program).is_some()
}

/// Returns the path of an installed program. In a run with an empty PATH, the program is in the PATH from then on.
pub fn find_program(program: &str) -> Option<PathBuf> {
    let own = std::env::var_os("PATH").unwrap_or_default();
    let asked = asked_from();
    let found = std::env::split_paths(asked.as_ref().unwrap_or(&own))
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|directory| directory.join(program))
        .find(|file| file.is_file())?;
    if asked.is_some()
        && let Some(directory) = std::env::split_paths(&own).next()
    {
        // Another thread may have asked for it first.
        let _ = std::os::unix::fs::symlink(&found, directory.join(program));
    }
    Some(found)
}

/// Returns the PATH in which tests look for programs, if their own has nothing but what they ask for.
fn asked_from() -> Option<OsString> {
    std::env::var_os("RINGFENCE_TEST_PROGRAMS")
}

/// Returns the PATH for processes that a test starts: the test's own, and the directories of `ip` on Debian.
pub fn path_of_tests() -> String {
    let own = std::env::var("PATH").unwrap_or_default();
    if asked_from().is_some() { own } else { format!("{own}:/usr/sbin:/sbin") }
}

fn attributes_missing() -> Option<String> {
    let file = tempfile::NamedTempFile::new().ok()?;
    let flags = rustix::fs::XattrFlags::empty();
    let error = rustix::fs::setxattr(file.path(), "user.test", b"", flags).err()?;
    Some(format!("files below {} have no attributes: {error}", file.path().display()))
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

/// Prints that the test is skipped for lack of `need`. Panics if this machine must have it.
pub fn skip_for(need: Need, reason: &str) {
    let missing = std::env::var("RINGFENCE_TEST_MISSING").unwrap_or_default();
    match need {
        Need::Program(name, _) if missing.split(' ').any(|other| other == name) => {
            skip_what_is_not_installed(reason);
        }
        // No package brings a device, a file system or a kernel's permission.
        Need::Device(_) | Need::Attributes | Need::Guests => skip_for_the_kernel(reason),
        _ => skip(reason),
    }
}

/// Prints that the test is skipped. Panics if no test may be skipped.
pub fn skip(reason: &str) {
    let is_required = std::env::var_os("RINGFENCE_TEST_REQUIRE").is_some_and(|value| value == "1");
    assert!(!is_required, "RINGFENCE_TEST_REQUIRE is set, and {reason}");
    eprintln!("SKIPPED: {reason}");
}

/// Prints that a test is skipped because of the kernel, or of the container that the test runs in. No package
/// would help. The test runs in `cargo xtask vm linux` nevertheless.
pub fn skip_for_the_kernel(reason: &str) {
    eprintln!("SKIPPED: {reason}");
}

/// Prints that a test is skipped because a program is missing that nobody installs only for a test: the package
/// would start a server on the machine, or the distribution has none.
pub fn skip_what_is_not_installed(reason: &str) {
    eprintln!("SKIPPED: {reason}");
}

/// Returns from the test unless all its requirements are met.
#[macro_export]
macro_rules! require {
    ($($need:expr),+ $(,)?) => {
        for need in [$($need),+] {
            if let Some(reason) = need.missing() {
                $crate::support::needs::skip_for(need, &reason);
                return;
            }
        }
    };
}

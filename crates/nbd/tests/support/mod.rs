//! What a test needs that a machine may lack, and programs that it runs.
//!
//! A test that lacks something says `SKIPPED: reason` and returns. Where `RINGFENCE_TEST_REQUIRE`
//! is 1 it fails instead: there nothing may be skipped unnoticed.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Where a program is, if it is installed.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|directory| directory.join(program))
        .find(|file| file.is_file())
}

/// Fails where nothing may be skipped; else says that the test is.
pub(crate) fn skip(reason: &str) {
    let is_required = std::env::var_os("RINGFENCE_TEST_REQUIRE").is_some_and(|value| value == "1");
    assert!(!is_required, "RINGFENCE_TEST_REQUIRE is set, and {reason}");
    eprintln!("SKIPPED: {reason}");
}

/// Returns from the test unless these programs (each with its Debian package) are there.
#[macro_export]
macro_rules! require_programs {
    ($($program:literal of $package:literal),+ $(,)?) => {
        $(if $crate::support::find($program).is_none() {
            let (program, package) = ($program, $package);
            $crate::support::skip(&format!("{program} is not installed (Debian: {package})"));
            return;
        })+
    };
}

/// Runs a program to its end, which must come within a minute, and must be good.
pub(crate) fn run(program: &str, args: &[&str]) -> String {
    let output = output(program, args);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {}\n{text}\n{errors}", output.status);
    text
}

/// Runs a program to its end.
pub(crate) fn output(program: &str, args: &[&str]) -> Output {
    let path = find(program).unwrap_or_else(|| panic!("{program} is not installed"));
    Command::new("timeout")
        .arg("60")
        .arg(path)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"))
}

/// A program in the background, killed when dropped.
pub(crate) struct Background(pub(crate) Child);

impl Background {
    /// Starts a program.
    pub(crate) fn start(program: &str, args: &[&str]) -> Background {
        let path = find(program).unwrap_or_else(|| panic!("{program} is not installed"));
        let mut command = Command::new(path);
        command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Background(command.spawn().unwrap_or_else(|error| panic!("{program}: {error}")))
    }

    /// SIGKILL, and waits for the end.
    pub(crate) fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits until `ready`, at most ten seconds.
pub(crate) fn wait_until(what: &str, mut ready: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !ready() {
        assert!(Instant::now() < until, "{what}: not within ten seconds");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until something listens on a Unix socket.
pub(crate) fn wait_for_socket(path: &Path) {
    wait_until("a server listens", || std::os::unix::net::UnixStream::connect(path).is_ok());
}

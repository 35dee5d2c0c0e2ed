//! Programs that tests require and run.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part of it")]

#[path = "../../../ringfence/tests/support/needs.rs"]
pub(crate) mod needs;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Returns the path of a program, if it is installed. A test asks for it by [`require_programs`] before.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = needs::path_of_tests();
    let files = std::env::split_paths(&path).map(|directory| directory.join(program));
    files.into_iter().find(|file| file.is_file())
}

/// Returns from the test unless these programs (each with its Debian package) are installed.
#[macro_export]
macro_rules! require_programs {
    ($($program:literal of $package:literal),+ $(,)?) => {
        for need in [$($crate::support::needs::Need::Program($program, $package)),+] {
            if let Some(reason) = need.missing() {
                $crate::support::needs::skip_for(need, &reason);
                return;
            }
        }
    };
}

/// Runs a program, which must succeed within a minute, and returns its output.
pub(crate) fn run(program: &str, args: &[&str]) -> String {
    let output = output(program, args);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {}\n{text}\n{errors}", output.status);
    text
}

/// Runs a program to its end and returns its output.
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

/// Program in the background, killed when dropped.
pub(crate) struct Background(pub(crate) Child);

impl Background {
    /// Starts a program in the background.
    pub(crate) fn start(program: &str, args: &[&str]) -> Background {
        let path = find(program).unwrap_or_else(|| panic!("{program} is not installed"));
        let mut command = Command::new(path);
        command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Background(command.spawn().unwrap_or_else(|error| panic!("{program}: {error}")))
    }

    /// Sends SIGKILL and waits for the exit.
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

/// Waits until `ready` returns `true`, at most ten seconds.
pub(crate) fn wait_until(what: &str, mut ready: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !ready() {
        assert!(Instant::now() < until, "{what}: not within a minute");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until a process listens on a Unix socket.
pub(crate) fn wait_for_socket(path: &Path) {
    wait_until("a server listens", || std::os::unix::net::UnixStream::connect(path).is_ok());
}

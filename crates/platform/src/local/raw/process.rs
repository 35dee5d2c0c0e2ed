//! Resources of this process, for tests that check that nothing leaks.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

pub use ringfence_sys::testing::starts::close as close_at_once;
use ringfence_sys::testing::starts::spawn;

/// Returns the number of open descriptors.
pub fn descriptors() -> usize {
    // The listing itself holds one.
    std::fs::read_dir("/proc/self/fd").unwrap().count() - 1
}

/// Returns the number of open descriptors once it is at most `most`, or after a minute. A hub
/// closes its ends asynchronously.
pub fn descriptors_settled(most: usize) -> usize {
    let deadline = Instant::now() + Duration::from_secs(60);
    while descriptors() > most && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    descriptors()
}

/// Returns the number of pages resident in memory.
pub fn resident_pages() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse().unwrap()
}

/// Returns the number of memory mappings.
pub fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Runs a test's body in a separate process, because tests that run in parallel share the resources of
/// a process. `name` is the full name of the test.
///
/// # Panics
///
/// Panics with the output of the process if the body panics.
pub fn alone(name: &str, body: impl FnOnce()) {
    if std::env::var_os("RINGFENCE_TEST_ALONE").is_some() {
        return body();
    }
    let this = std::env::current_exe().unwrap();
    let mut command = Command::new(this);
    command.args(["--exact", name, "--nocapture"]).env("RINGFENCE_TEST_ALONE", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let run = spawn(&mut command).unwrap().wait_with_output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    // With a wrong name no test would have run.
    assert!(run.status.success() && out.contains("1 passed"), "{out}{err}");
}

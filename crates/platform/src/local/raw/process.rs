//! What this process holds, for tests that nothing is left behind.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::time::{Duration, Instant};

/// Open descriptors.
pub fn descriptors() -> usize {
    // The listing holds one itself.
    std::fs::read_dir("/proc/self/fd").unwrap().count() - 1
}

/// Open descriptors once there are no more than `most`, or after five seconds: a hub closes its ends
/// in its own time.
pub fn descriptors_settled(most: usize) -> usize {
    let deadline = Instant::now() + Duration::from_secs(5);
    while descriptors() > most && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    descriptors()
}

/// Pages resident in memory.
pub fn resident_pages() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse().unwrap()
}

/// Mappings.
pub fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Runs a test's body in a process of its own, since what a process holds is also what other tests
/// hold that run beside it. `name` is the test's full name.
///
/// # Panics
///
/// When the body does, with all that it said.
pub fn alone(name: &str, body: impl FnOnce()) {
    if std::env::var_os("RINGFENCE_TEST_ALONE").is_some() {
        return body();
    }
    let this = std::env::current_exe().unwrap();
    let run = std::process::Command::new(this)
        .args(["--exact", name, "--nocapture"])
        .env("RINGFENCE_TEST_ALONE", "1")
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    // The name must be right, else nothing ran.
    assert!(run.status.success() && out.contains("1 passed"), "{out}{err}");
}

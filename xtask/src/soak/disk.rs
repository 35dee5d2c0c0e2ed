//! Soak test of a disk whose frontend, driver domain or both are killed under load.

use std::path::Path;

use taskkit::exec::Cmd;

/// Runs the test `disk_killed` with `times` rounds.
pub(super) fn run(root: &Path, times: u32) -> anyhow::Result<bool> {
    let test = ["test", "--release", "--package", "ringfence", "--test", "disk_killed"];
    let test = Cmd::cargo().args(test).args(["--", "--nocapture", "--test-threads=1"]);
    let times = times.to_string();
    let test = test.env("RINGFENCE_SOAK_ROUNDS", &times).env("RINGFENCE_TEST_REQUIRE", "1");
    Ok(test.run(root)?)
}

//! Soak test of a disk whose frontend, driver domain or both are killed under load.

use std::path::Path;

use taskkit::exec::Cmd;

/// Runs the tests `disks::killed` with `times` rounds.
pub(super) fn run(root: &Path, times: u32) -> anyhow::Result<bool> {
    let test = ["test", "--release", "--package", "ringfence", "--test", "disks"];
    let test = Cmd::cargo().args(test).args([
        "--",
        "killed::",
        "--nocapture",
        "--test-threads=1",
        "--include-ignored",
    ]);
    let times = times.to_string();
    let test = test.env("RINGFENCE_SOAK_ROUNDS", &times).env("RINGFENCE_TEST_REQUIRE", "1");
    Ok(test.run(root)?)
}

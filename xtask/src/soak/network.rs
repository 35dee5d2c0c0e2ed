//! Soak test of real programs over an uplink whose network changes, loses and reorders.

use std::path::Path;

use taskkit::exec::Cmd;

/// Runs the test `soak` of `network` for `minutes`.
pub(super) fn run(root: &Path, minutes: u32) -> anyhow::Result<bool> {
    let test = ["test", "--release", "--package", "ringfence", "--test", "network"];
    let test = Cmd::cargo().args(test).args(["--", "soak::", "--nocapture", "--ignored"]);
    let minutes = minutes.to_string();
    let test = test.env("RINGFENCE_SOAK_MINUTES", &minutes).env("RINGFENCE_TEST_REQUIRE", "1");
    Ok(test.run(root)?)
}

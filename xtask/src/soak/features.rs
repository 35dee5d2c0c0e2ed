//! Soak test of every pair of offload key sets, in each mode.

use std::path::Path;

use taskkit::exec::Cmd;

/// Runs the test `features` of crates/net in each mode.
pub(super) fn run(root: &Path) -> anyhow::Result<bool> {
    let test = ["test", "--release", "--package", "ringfence-net", "--test", "features"];
    let test = Cmd::cargo().args(test).args(["--", "--nocapture", "--include-ignored"]);
    let test = test.env("RINGFENCE_TEST_EACH_MODE", "1").env("RINGFENCE_TEST_REQUIRE", "1");
    Ok(test.run(root)?)
}

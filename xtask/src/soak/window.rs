//! A window between two processes, issued and revoked again and again.

use std::path::Path;

use crate::exec::Cmd;

/// Runs the test that does it.
pub(super) fn run(root: &Path, rounds: u64) -> anyhow::Result<bool> {
    let test = ["test", "--release", "--package", "ringfence-testkit", "--test", "window_peer"];
    let test = Cmd::cargo().args(test).args(["--", "--nocapture", "nothing_is_used"]);
    let test = test.env("RINGFENCE_SOAK_ROUNDS", rounds.to_string());
    Ok(test.run(root)?)
}

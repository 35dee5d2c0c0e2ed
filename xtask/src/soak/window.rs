//! Soak test of a grant window between two processes: grants issued and revoked.

use std::path::Path;

use taskkit::exec::Cmd;

/// Runs the test `window_peer` of tools/testkit with `rounds` rounds.
pub(super) fn run(root: &Path, rounds: u64) -> anyhow::Result<bool> {
    let test = ["test", "--release", "--package", "ringfence-testkit", "--test", "window_peer"];
    let test =
        Cmd::cargo().args(test).args(["--", "--nocapture", "--include-ignored", "nothing_is_used"]);
    let test = test.env("RINGFENCE_SOAK_ROUNDS", rounds.to_string());
    Ok(test.run(root)?)
}

//! Soak test of a grant window between two processes: grants issued and revoked.

use std::path::Path;

use crate::test_program;

/// Runs the test `window_peer` of tools/testkit with `rounds` rounds.
pub(super) fn run(root: &Path, rounds: u64) -> anyhow::Result<bool> {
    let arguments = ["window_use_racing_revocation", "--nocapture", "--include-ignored"];
    let variables = [("RINGFENCE_SOAK_ROUNDS", rounds.to_string().into())];
    test_program::run(root, ("testkit", "window_peer"), &arguments, &variables)
}

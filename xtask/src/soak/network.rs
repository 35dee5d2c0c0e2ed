//! Soak test of real programs over an uplink whose network changes, loses and reorders.

use std::path::Path;

use crate::test_program;

/// Runs the test `soak` of `network` for `minutes`.
pub(super) fn run(root: &Path, minutes: u32) -> anyhow::Result<bool> {
    let arguments = ["soak::", "--nocapture", "--ignored"];
    let variables = [
        ("RINGFENCE_SOAK_MINUTES", minutes.to_string().into()),
        ("RINGFENCE_TEST_REQUIRE", "1".into()),
    ];
    test_program::run(root, ("ringfence", "network"), &arguments, &variables)
}

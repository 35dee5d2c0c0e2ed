//! Soak test of a disk whose frontend, driver domain or both are killed under load.

use std::path::Path;

use crate::test_program;

/// Runs the tests `disks::killed` with `times` rounds.
pub(super) fn run(root: &Path, times: u32) -> anyhow::Result<bool> {
    let arguments = ["killed::", "--nocapture", "--test-threads=1", "--include-ignored"];
    let variables = [
        ("RINGFENCE_SOAK_ROUNDS", times.to_string().into()),
        ("RINGFENCE_TEST_REQUIRE", "1".into()),
    ];
    test_program::run(root, ("ringfence", "disks"), &arguments, &variables)
}

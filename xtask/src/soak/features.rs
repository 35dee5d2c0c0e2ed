//! Soak test of every pair of offload key sets, in each mode.

use std::path::Path;

use crate::test_program;

/// Runs the test `features` of crates/net in each mode.
pub(super) fn run(root: &Path) -> anyhow::Result<bool> {
    let arguments = ["--nocapture", "--include-ignored"];
    let variables =
        [("RINGFENCE_TEST_EACH_MODE", "1".into()), ("RINGFENCE_TEST_REQUIRE", "1".into())];
    test_program::run(root, ("net", "features"), &arguments, &variables)
}

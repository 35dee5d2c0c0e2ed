//! Every subcommand of `ringfence-bench` has an end-to-end test.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::path::Path;

use clap::CommandFactory;
use ringfence_testkit::subcommands;

#[test]
fn every_subcommand_has_an_end_to_end_test() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let texts = subcommands::sources(&own.join("tests"), Some("tests/commands.rs")).unwrap();
    let command = ringfence_bench::cli::Cli::command();
    let missing = subcommands::untested("ringfence-bench", &command, &texts);
    assert!(missing.is_empty(), "no end-to-end test starts these subcommands: {missing:?}");
}

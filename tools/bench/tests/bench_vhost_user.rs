//! End-to-end tests of `ringfence-bench vhost-user`: its rows, and its failure without a file.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod support;

use std::process::{Command, Output, Stdio};

use serde_json::Value;
use support::needs::Need;

/// Arguments of a short run.
const SHORT: [&str; 6] = ["vhost-user", "blk", "--seconds", "0.2", "--rounds", "1"];

fn bench(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfence-bench"));
    command.args(SHORT).args(words).stdin(Stdio::null()).output().unwrap()
}

fn rows(words: &[&str]) -> Vec<Value> {
    let done = bench(&[words, &["--json"]].concat());
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{words:?}: {} {said}", done.status);
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    text.lines().map(|row| serde_json::from_str(row).unwrap()).collect()
}

#[track_caller]
fn number(row: &Value, field: &str) -> f64 {
    row[field].as_f64().unwrap_or_else(|| panic!("{field} is no number in {row}"))
}

#[test]
fn each_way_of_a_disk_has_a_row_with_its_ratio_to_trust() {
    require!(Need::Guests);
    let found = rows(&["--block", "4k,128k", "--depth", "8"]);
    let ways: Vec<_> = found.iter().map(|row| row["way"].as_str().unwrap()).collect();
    assert_eq!(ways, ["trust", "pool", "shield"].repeat(4));
    for row in &found {
        for field in ["iops", "front_cpu_ns_per_request"] {
            assert!(number(row, field) > 0.0, "{field}: {row}");
        }
        // A busy pair needs no notification.
        for field in ["kicks_per_request", "calls_per_request"] {
            assert!(number(row, field) >= 0.0, "{field}: {row}");
        }
        let is_trust = row["way"] == "trust";
        assert_eq!(row["to_trust"].is_null(), is_trust, "{row}");
        assert!(is_trust || number(row, "to_trust") > 0.0, "{row}");
        assert!(row["ours_to_this"].is_null(), "{row}");
    }
}

#[test]
fn other_program_serves_the_same_file_and_is_compared() {
    require!(Need::Guests, Need::Program("qemu-storage-daemon", "qemu-system-common"),);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(128 << 20).unwrap();
    let peers = "qemu-storage-daemon,qemu-storage-daemon-uring";
    let file = ["--file", path.to_str().unwrap(), "--rw", "randread", "--block", "4k"];
    let found = rows(&[&file[..], &["--ways", "trust", "--vs", peers]].concat());
    let programs: Vec<_> = found.iter().map(|row| row["program"].as_str().unwrap()).collect();
    assert_eq!(programs, ["ringfence", "qemu-storage-daemon", "qemu-storage-daemon-uring"]);
    for row in &found[1..] {
        assert!(number(row, "iops") > 0.0 && number(row, "ours_to_this") > 0.0, "{row}");
        assert!(row["to_trust"].is_null(), "{row}");
    }
    assert!(path.exists(), "the file of the user stays");
}

#[test]
fn file_that_cannot_be_written_ends_the_benchmark_with_its_name() {
    let refused = bench(&["--file", "/proc/version", "--rw", "randread"]);
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("/proc/version"), "{said}");
}

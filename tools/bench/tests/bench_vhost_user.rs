//! End-to-end tests of `ringfence-bench vhost-user`: its rows, other programs, and its failures.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod support;

use std::process::{Command, Output, Stdio};

use serde_json::Value;
use support::needs::{Need, skip_for_the_kernel, skip_what_is_not_installed};

/// Arguments of a short run.
const SHORT: [&str; 4] = ["--seconds", "0.2", "--rounds", "1"];

const BLK: [&str; 2] = ["vhost-user", "blk"];
const NET: [&str; 2] = ["vhost-user", "net"];

fn bench(device: [&str; 2], words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfence-bench"));
    command.args(device).args(SHORT).args(words);
    command.stdin(Stdio::null()).output().unwrap()
}

fn rows(device: [&str; 2], words: &[&str]) -> Vec<Value> {
    let done = bench(device, &[words, &["--json"]].concat());
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{words:?}: {} {said}", done.status);
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    text.lines().map(|row| serde_json::from_str(row).unwrap()).collect()
}

#[track_caller]
fn number(row: &Value, field: &str) -> f64 {
    row[field].as_f64().unwrap_or_else(|| panic!("{field} is no number in {row}"))
}

/// Returns the values of a field of text.
fn texts<'a>(rows: &'a [Value], field: &str) -> Vec<&'a str> {
    rows.iter().map(|row| row[field].as_str().unwrap()).collect()
}

/// Checks the ratios of a row of Ringfence.
fn check_ratios(row: &Value) {
    let is_trust = row["way"] == "trust";
    assert_eq!(row["to_trust"].is_null(), is_trust, "{row}");
    assert!(is_trust || number(row, "to_trust") > 0.0, "{row}");
    assert!(row["ours_to_this"].is_null(), "{row}");
}

/// Maximum of allocations for each request or packet of a device that is busy: chains and requests are passed without one, and
/// what is left are answers to questions about the state. One that sleeps between two requests, as beside a load, allocates a
/// few for each sleep.
const BUSY: f64 = 1.0;
const SLEEPING: f64 = 8.0;

/// Checks the counts of system calls and allocations, which only root and a kernel with tracepoints have. `each` is the end of
/// their names.
fn check_counts(row: &Value, each: &str, is_polling: bool, allocations: f64) {
    match row[format!("syscalls_{each}")].as_f64() {
        Some(count) => assert!(is_polling || count > 0.0, "{row}"),
        None => skip_for_the_kernel("perf counts no system calls here"),
    }
    match row[format!("allocations_{each}")].as_f64() {
        Some(count) => assert!(count < allocations || row["program"] != "ringfence", "{row}"),
        None => skip_for_the_kernel("perf counts no allocations here"),
    }
}

#[test]
fn each_way_of_a_disk_has_a_row_with_its_ratio_to_trust() {
    require!(Need::Guests);
    let found = rows(BLK, &["--block", "4k,128k", "--depth", "8"]);
    assert_eq!(texts(&found, "way"), ["trust", "pool", "shield"].repeat(4));
    for row in &found {
        for field in ["iops", "front_cpu_ns_per_request"] {
            assert!(number(row, field) > 0.0, "{field}: {row}");
        }
        // A shield copies headers and status bytes, too.
        let copies = number(row, "copies_per_byte");
        match row["way"].as_str() {
            Some("trust") => assert!(copies == 0.0, "{row}"),
            Some("pool") => assert!((copies - 1.0).abs() < f64::EPSILON, "{row}"),
            _ => assert!((1.0..1.1).contains(&copies), "{row}"),
        }
        // A busy pair needs no notification.
        for field in ["kicks_per_request", "calls_per_request"] {
            assert!(number(row, field) >= 0.0, "{field}: {row}");
        }
        check_ratios(row);
    }
}

#[test]
fn single_request_in_flight_is_notified_in_both_directions() {
    require!(Need::Guests);
    let found = rows(BLK, &["--block", "4k", "--depth", "1", "--rw", "randread"]);
    assert_eq!(found.len(), 3);
    for row in &found {
        // The device sleeps between two requests, at least once.
        for field in ["kicks_per_request", "calls_per_request"] {
            assert!(number(row, field) > 0.0, "{field}: {row}");
        }
        check_counts(row, "per_request", false, SLEEPING);
    }
}

#[test]
fn each_way_of_a_card_has_a_row_for_both_directions_and_super_packets() {
    require!(Need::Guests);
    let found = rows(NET, &["--size", "64,64k"]);
    assert_eq!(texts(&found, "way"), ["trust", "pool", "shield"].repeat(4));
    assert_eq!(texts(&found, "direction"), [["out"; 6], ["in"; 6]].concat());
    let sizes: Vec<_> = found.iter().map(|row| row["size"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [[64; 3], [65_535; 3]].concat().repeat(2));
    for row in &found {
        for field in ["pps", "gbps", "front_cpu_ns_per_packet"] {
            assert!(number(row, field) > 0.0, "{field}: {row}");
        }
        assert!(row.get("skipped").is_none(), "{row}");
        check_ratios(row);
        check_counts(row, "per_packet", false, BUSY);
    }
}

#[test]
fn testpmd_forwards_the_same_packets_and_is_compared() {
    require!(Need::Guests);
    if let Some(why) = Need::Program("dpdk-testpmd", "dpdk-dev").missing() {
        return skip_what_is_not_installed(&why);
    }
    let words = ["--size", "64,64k", "--direction", "out", "--ways", "trust", "--vs", "testpmd"];
    let found = rows(NET, &words);
    assert_eq!(texts(&found, "program"), ["ringfence", "testpmd"].repeat(2));
    let row = &found[1];
    assert!(number(row, "pps") > 0.0 && number(row, "ours_to_this") > 0.0, "{row}");
    assert!(row["to_trust"].is_null(), "{row}");
    check_counts(row, "per_packet", true, BUSY);
    assert_eq!(found[3]["skipped"], "super-packets arrive changed through testpmd");
}

#[test]
fn testpmd_that_is_not_installed_is_skipped_in_words() {
    require!(Need::Guests);
    let empty = tempfile::tempdir().unwrap();
    let words = ["--size", "64", "--direction", "in", "--ways", "trust", "--vs", "testpmd"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfence-bench"));
    command.args(NET).args(SHORT).args(words).env("PATH", empty.path());
    let done = command.stdin(Stdio::null()).output().unwrap();
    let table = String::from_utf8_lossy(&done.stdout).into_owned();
    let errors = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{errors}");
    let skipped = "SKIPPED: `dpdk-testpmd` is not installed (Debian: dpdk-dev)";
    assert!(table.contains(skipped), "{table}");
    // Without perf the system calls are not counted.
    assert!(errors.contains("the count of system calls is SKIPPED: perf is not"), "{errors}");
}

#[test]
fn other_program_serves_the_same_file_and_is_compared() {
    require!(Need::Guests, Need::Program("qemu-storage-daemon", "qemu-system-common"),);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(128 << 20).unwrap();
    let peers = "qemu-storage-daemon,qemu-storage-daemon-uring";
    let file = ["--file", path.to_str().unwrap(), "--rw", "randread", "--block", "4k"];
    let found = rows(BLK, &[&file[..], &["--ways", "trust", "--vs", peers]].concat());
    assert_eq!(
        texts(&found, "program"),
        ["ringfence", "qemu-storage-daemon", "qemu-storage-daemon-uring"]
    );
    for row in &found[1..] {
        assert!(number(row, "iops") > 0.0 && number(row, "ours_to_this") > 0.0, "{row}");
        assert!(row["to_trust"].is_null(), "{row}");
        check_counts(row, "per_request", false, BUSY);
    }
    assert!(path.exists(), "the file of the user stays");
}

#[test]
fn file_that_cannot_be_written_ends_the_benchmark_with_its_name() {
    let refused = bench(BLK, &["--file", "/proc/version", "--rw", "randread"]);
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("/proc/version"), "{said}");
}

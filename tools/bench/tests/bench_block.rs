//! End-to-end tests of `ringfence-bench block`: its output, and its failure on wrong data.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod support;

use std::process::{Command, Output, Stdio};

use serde_json::Value;
use support::needs::Need;

/// Fields that the command's interface guarantees for each row.
const FIELDS: [&str; 16] = [
    "mode",
    "guests",
    "block",
    "rw",
    "depth",
    "storage",
    "iops",
    "mib_per_s",
    "p50_us",
    "p99_us",
    "map_calls_per_request",
    "unmap_calls_per_request",
    "copy_calls_per_request",
    "syscalls_per_request",
    "cpu_ns_per_request",
    "peer",
];

fn bench(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfence-bench"));
    command.args(words).stdin(Stdio::null()).output().unwrap()
}

fn rows(words: &[&str]) -> Vec<Value> {
    let done = bench(words);
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
fn grant_operations_match_mode_and_are_zero_when_persistent() {
    let words = ["block", "--guests", "1,3", "--seconds", "0.3", "--depth", "8", "--json"];
    let found = rows(&words);
    assert_eq!(found.len(), 8, "four modes, two numbers of guests");
    for row in &found {
        for field in FIELDS {
            assert!(!row[field].is_null(), "{field} is missing in {row}");
        }
        let [map, unmap, copy] = ["map", "unmap", "copy"]
            .map(|operation| number(row, &format!("{operation}_calls_per_request")));
        let near_one = |n: f64| (n - 1.0).abs() < 0.1;
        match row["mode"].as_str().unwrap() {
            "map" => assert!(near_one(map) && near_one(unmap) && copy == 0.0, "{row}"),
            "copy" => assert!(map == 0.0 && unmap == 0.0 && near_one(copy), "{row}"),
            _ => assert_eq!((map, unmap, copy), (0.0, 0.0, 0.0), "{row}"),
        }
        assert!(number(row, "iops") > 0.0 && number(row, "p99_us") >= number(row, "p50_us"));
    }
}

#[test]
fn block_sizes_writes_and_file_storage_report_rows() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(128 << 20).unwrap();
    let storage = path.to_str().unwrap();
    let words = [
        "block",
        "--guests",
        "2",
        "--modes",
        "persistent",
        "--block",
        "4k,1m",
        "--rw",
        "randwrite,seqread",
        "--seconds",
        "0.2",
        "--storage",
        storage,
        "--json",
    ];
    let found = rows(&words);
    assert_eq!(found.len(), 4);
    assert!(found.iter().all(|row| row["storage"] == storage));
    let small = tempfile::NamedTempFile::new().unwrap();
    let refused = bench(&["block", "--guests", "1", "--storage", small.path().to_str().unwrap()]);
    assert!(!refused.status.success());
}

#[test]
fn persistent_experiment_writes_table_and_plot() {
    let words = ["seeds", "persistent", "--guests", "1,2", "--seconds", "0.2", "--repeat", "1"];
    let done = bench(&words);
    assert!(done.status.success());
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    assert_eq!(text.lines().filter(|line| line.contains(" threads)")).count(), 4, "{text}");
    assert!(text.contains("persistent: ") && text.contains("of its best with 2 guests"), "{text}");
}

#[test]
fn other_programs_run_the_same_job_on_the_same_file() {
    require!(
        Need::Guests,
        Need::Program("fio", "fio"),
        Need::Program("qemu-nbd", "qemu-utils"),
        Need::Program("qemu-storage-daemon", "qemu-system-common"),
    );
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(128 << 20).unwrap();
    let storage = ["--storage", path.to_str().unwrap(), "--cache", "writeback"];
    let words = ["block", "--guests", "1", "--modes", "persistent", "--seconds", "0.5"];
    let others = ["--vs", "qemu-nbd,qemu-storage-daemon", "--json"];
    let found = rows(&[&words[..], &storage, &others].concat());
    let peers: Vec<_> = found.iter().map(|row| row["peer"].as_str().unwrap()).collect();
    assert_eq!(peers, ["ringfence", "ringfence-nbd", "qemu-nbd", "qemu-storage-daemon"]);
    for row in &found {
        assert!(number(row, "iops") > 0.0 && number(row, "cpu_ns_per_request") > 0.0, "{row}");
    }
    let refused = bench(&[&words[..], &["--vs", "qemu-nbd"]].concat());
    assert!(!refused.status.success(), "memory cannot be served by others");
    let image = directory.path().join("image");
    let size = ["create", "-q", "-f", "qcow2", image.to_str().unwrap(), "1G"];
    assert!(Command::new("qemu-img").args(size).status().unwrap().success());
    let storage = ["--storage", image.to_str().unwrap(), "--cache", "writeback"];
    let found = rows(&[&words[..], &storage, &others, &["--format", "qcow2"]].concat());
    let peers: Vec<_> = found.iter().map(|row| row["peer"].as_str().unwrap()).collect();
    assert_eq!(peers, ["ringfence-nbd", "qemu-nbd", "qemu-storage-daemon"]);
    assert!(found.iter().all(|row| number(row, "iops") > 0.0), "{found:?}");
    let refused = bench(&[&words[..], &storage, &["--format", "qcow2"]].concat());
    assert!(!refused.status.success(), "the benchmark's own rows know no format");
}

//! End-to-end tests of `ringfence-bench gso`: its output, and counters that hold on any machine. No rate
//! is asserted here.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod support;

use std::process::{Command, Output, Stdio};

use serde_json::Value;

use support::needs::Need;

const FIELDS: [&str; 9] = [
    "path",
    "setup",
    "gbps",
    "segments_made",
    "checksums_computed",
    "frames_whole",
    "frames_coalesced",
    "copies_per_packet",
    "cpu_ns_per_kb",
];

fn bench(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfence-bench"));
    command.args(["gso"]).args(line.split_whitespace()).stdin(Stdio::null());
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn rows(line: &str) -> Vec<Value> {
    let done = bench(line);
    assert!(done.status.success(), "{line}: {} {}", done.status, text(&done.stderr));
    text(&done.stdout).lines().map(|row| serde_json::from_str(row).unwrap()).collect()
}

#[track_caller]
fn number(row: &Value, field: &str) -> f64 {
    row[field].as_f64().unwrap_or_else(|| panic!("{field} is no number in {row}"))
}

/// Checks the criteria of any row.
fn check(row: &Value) {
    for field in FIELDS {
        assert!(!row[field].is_null(), "{field} is missing in {row}");
    }
    assert!(number(row, "gbps") > 0.0 && number(row, "cpu_ns_per_kb") > 0.0, "{row}");
    assert!(number(row, "ratio") > 0.0 && number(row, "seconds") > 0.0, "{row}");
    assert_eq!(row["rounds"], 1);
    // With every offload, or with checksums alone, the driver domain changes no packet.
    assert_eq!(number(row, "segments_made"), 0.0, "{row}");
    assert_eq!(number(row, "checksums_computed"), 0.0, "{row}");
}

/// Checks the rows of one path through the switch, in their order.
fn check_path(rows: &[Value], path: &str, copies: f64) {
    let setups: Vec<_> = rows.iter().map(|row| row["setup"].as_str().unwrap()).collect();
    assert_eq!(setups, ["mtu1500", "mtu16436-sg", "tso"]);
    for row in rows {
        check(row);
        assert_eq!(row["path"], path);
        let bytes = number(row, "gbps") * number(row, "seconds") * 1e9 / 8.0;
        // The receiver's socket may hold 8 MiB that passed before the counters were read.
        let passed = number(row, "frames") * 65_536.0 + 8_388_608.0;
        assert!(passed > bytes, "it passed through the switch: {row}");
        let counted = number(row, "copies_per_packet");
        // The stream has stopped when the counters are read. A frame that is dropped is not copied out; there are many beside
        // other programs. Frames of the guests' kernels to all are copied to each port, and are few.
        let dropped = number(row, "frames_dropped") / number(row, "frames");
        assert!((copies - dropped - 0.05..copies + 0.05).contains(&counted), "{row}");
    }
    let [small, jumbo, whole] = rows else { panic!("{rows:?}") };
    for row in [small, jumbo] {
        assert_eq!(number(row, "frames_whole"), 0.0, "no order to segment: {row}");
        assert_eq!(number(row, "frames_coalesced"), 0.0, "{row}");
    }
    assert_eq!(number(small, "ratio"), 1.0);
    assert!(number(whole, "frames_whole") > 0.0, "{whole}");
    assert_eq!(
        (&small["mtu"], &jumbo["mtu"], &whole["mtu"]),
        (&1500.into(), &16436.into(), &1500.into())
    );
}

#[test]
fn guest_to_guest_stream_is_neither_segmented_nor_checksummed() {
    require!(Need::Guests);
    let rows = rows("--json --rounds 1 --seconds 0.3 --paths guest-guest");
    // One copy into the driver domain, one out of it.
    check_path(&rows, "guest-guest", 2.0);
}

#[test]
fn loopback_stream_bypasses_the_switch() {
    require!(Need::Guests, Need::Root);
    let rows = rows("--json --rounds 1 --seconds 0.3 --paths loopback --mode map");
    assert_eq!(rows.len(), 3);
    for row in &rows {
        check(row);
        assert!(number(row, "frames") < 100.0, "{row}");
    }
}

#[test]
fn driver_domain_paths_report_rows_as_others_do() {
    require!(Need::Guests, Need::Root);
    let rows = rows("--json --rounds 1 --seconds 0.3 --paths guest-driver,driver-guest");
    // The kernel makes the other copy when it takes the frame.
    check_path(&rows[..3], "guest-driver", 1.0);
    check_path(&rows[3..], "driver-guest", 1.0);
}

#[test]
fn table_has_one_line_per_row() {
    require!(Need::Guests);
    let done = bench("--rounds 1 --seconds 0.1 --paths guest-guest --setups tso");
    let table = text(&done.stdout);
    assert!(done.status.success(), "{table}{}", text(&done.stderr));
    let mut lines = table.lines();
    assert!(lines.next().is_some_and(|heading| heading.starts_with("path ")), "{table}");
    assert!(lines.next().is_some_and(|row| row.starts_with("guest-guest  mtu1500 ")), "{table}");
    assert!(lines.next().is_some_and(|row| row.starts_with("guest-guest  tso ")), "{table}");
    assert!(table.contains("All columns: docs/perf/howto.md"), "{table}");
}

#[test]
fn closed_output_ends_the_benchmark_quietly() {
    let mut running = Command::new(env!("CARGO_BIN_EXE_ringfence-bench"))
        .args(["net", "--packets", "1000", "--size", "64", "--modes", "copy"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(running.stdout.take());
    let done = running.wait_with_output().unwrap();
    assert_eq!((done.status.code(), text(&done.stderr)), (Some(0), String::new()));
}

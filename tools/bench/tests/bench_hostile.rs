//! End-to-end tests of `ringfence-bench hostile`: its output, the charge of every behaviour under its own
//! name, and an unharmed victim.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::collections::BTreeMap;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const FIELDS: [&str; 6] =
    ["behaviour", "victim_pps", "ratio", "victim_drops", "rules", "driver_rss_kib_growth"];

/// Charges of each hostile guest, on any machine.
const CHARGES: [(&str, &[&str]); 15] = [
    ("bad-sizes", &["tx_too_short", "tx_crosses_page", "tx_smaller_than_fragments"]),
    ("slots19", &["tx_too_many_slots"]),
    ("bad-grefs", &["tx_gref_not_granted"]),
    ("extra-chains", &["tx_too_many_extras"]),
    ("zero-fragments", &["tx_zero_length_fragment"]),
    ("made-up-addresses", &["drop_spoofed_source"]),
    ("deaf", &["drop_port_full"]),
    ("hoarder", &["drop_port_full"]),
    ("producer-overflow", &["tx_producer_overflow", "device_condemned"]),
    ("long-lists", &["ctrl_list_length"]),
    ("staging-twice", &["staging_gref_twice"]),
    ("control-deaf", &["staging_no_such_queue"]),
    ("state-flood", &["state_not_a_number"]),
    ("hub-flood", &["hub_unknown_request"]),
    ("rejoin", &["hub_malformed_message"]),
];

/// Charges of each hostile guest for attacks through its disk, on any machine.
const DISK_CHARGES: [(&str, &[&str]); 12] = [
    ("disk-segments-outside", &["blk_crosses_page", "pauses"]),
    ("disk-sectors-reversed", &["blk_sectors_reversed", "pauses"]),
    ("disk-beyond-end", &["blk_beyond_disk"]),
    ("disk-sector-overflow", &["blk_sector_overflow"]),
    ("disk-changing-lists", &["blk_crosses_page"]),
    ("disk-segments65535", &["blk_too_many_segments"]),
    ("disk-unknown-operations", &["blk_unknown_operation"]),
    ("disk-foreign-grefs", &["blk_gref_not_granted"]),
    ("disk-nonsense", &["blk_unknown_operation", "blk_bad_indirect_operation"]),
    ("disk-event-storm", &["spurious_wakeups"]),
    ("disk-producer-overflow", &["blk_producer_overflow"]),
    ("disk-fresh-grefs", &["persistent_over", "persistent_purged"]),
];

/// Maximum growth of a driver domain's memory in KiB: at most 1056 pages of a ring stay mapped, plus a
/// margin.
const FLAT_KIB: i64 = 16 << 10;

fn hostile(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfence-bench"));
    command.args(["hostile"]).args(line.split_whitespace()).stdin(Stdio::null());
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn rows(line: &str) -> BTreeMap<String, Value> {
    let done = hostile(line);
    assert!(done.status.success(), "{line}: {} {}", done.status, text(&done.stderr));
    let rows = text(&done.stdout).lines().map(|row| serde_json::from_str(row).unwrap()).collect();
    let rows: Vec<Value> = rows;
    rows.into_iter().map(|row| (row["behaviour"].as_str().unwrap().to_owned(), row)).collect()
}

/// Runs hostile guests for `seconds`, and ten times as long while a victim had no processor: beside a load that happens.
fn rows_with_victims(seconds: f64, options: &str) -> BTreeMap<String, Value> {
    let runs =
        [1.0, 10.0, 100.0].map(|factor| format!("--json --seconds {} {options}", seconds * factor));
    let mut runs = runs.iter().map(|line| rows(line));
    let has_run = |row: &Value| row["victim_pps"] != 0.0 && row["victim_iops"] != 0.0;
    let found = runs.find(|rows| rows.values().all(has_run));
    found.expect("a victim that sends in one of the runs")
}

/// Durations of runs in seconds. Beside a load, a neighbour may get too little of a processor to break its rule in the first.
const SECONDS: [f64; 3] = [0.5, 5.0, 30.0];

/// Runs hostile guests until each was charged under all its names, those without all charges once more and longer. Returns the
/// rows of the first runs, of which `others` are more.
fn charged(charges: &[(&str, &[&str])], others: &[&str]) -> BTreeMap<String, Value> {
    let mut waiting: Vec<_> = charges.to_vec();
    let (mut first, mut more) = (None, others);
    for seconds in SECONDS {
        let names: Vec<_> =
            more.iter().copied().chain(waiting.iter().map(|(name, _)| *name)).collect();
        let rows = rows_with_victims(seconds, &format!("--behaviours {}", names.join(",")));
        let is_charged = |behaviour: &str, rule: &str| {
            rows[behaviour]["rules"][rule].as_u64().is_some_and(|count| count > 0)
        };
        waiting.retain(|(name, rules)| !rules.iter().all(|rule| is_charged(name, rule)));
        first.get_or_insert(rows);
        more = &[];
        if waiting.is_empty() {
            break;
        }
    }
    assert!(waiting.is_empty(), "not all of these were counted: {waiting:?}");
    first.unwrap()
}

/// Checks the criteria of a row that hold on any machine.
fn check(row: &Value) {
    for field in FIELDS {
        assert!(!row[field].is_null(), "{field} is missing in {row}");
    }
    assert_eq!(row["victim_damaged"], 0, "{row}");
    assert!(row["victim_pps"].as_f64().unwrap() > 0.0, "{row}");
    assert!(row["ratio"].as_f64().unwrap() > 0.0, "{row}");
}

#[test]
fn every_packet_behaviour_is_charged_and_victim_is_unharmed() {
    let rows = charged(&CHARGES, &[]);
    assert_eq!(rows.len(), CHARGES.len() + 1, "{:?}", rows.keys());
    rows.values().for_each(check);
    assert_eq!(rows["honest"]["ratio"], 1.0);
    let broken = rows["honest"]["rules"].as_object().unwrap();
    assert!(broken.keys().all(|r| r.starts_with("drop_") || r == "spurious_wakeups"), "{broken:?}");
}

#[test]
fn behaviours_within_the_rules_leave_victim_unharmed() {
    let rows = rows_with_victims(
        0.2,
        "--mode map --size 1514 --behaviours absent,large-packets,flipping,broadcast,event-storm,reattach",
    );
    assert_eq!(rows.len(), 7);
    rows.values().for_each(check);
    for sending in ["honest", "large-packets", "broadcast"] {
        assert!(rows[sending]["neighbour_pps"].as_f64().unwrap() > 0.0, "{}", rows[sending]);
    }
    assert_eq!(rows["absent"]["neighbour_pps"], 0.0);
}

#[test]
fn control_ring_attacks_get_specified_responses() {
    let rows =
        rows_with_victims(0.2, "--behaviours changing-lists,staging-storm,staging-in-flight");
    assert_eq!(rows.len(), 4);
    rows.values().for_each(check);
}

#[test]
fn table_has_one_line_per_row_and_no_files_remain() {
    let before = leftovers();
    let done = hostile("--seconds 0.1 --behaviours bad-grefs");
    assert!(done.status.success(), "{}", text(&done.stderr));
    let table = text(&done.stdout);
    let names: Vec<_> =
        table.lines().take(3).map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(names, ["neighbour", "honest", "bad-grefs"], "{table}");
    assert!(table.contains("No packet of the victim's was damaged"), "{table}");
    assert!(leftovers() <= before, "sockets were left behind");
}

#[test]
fn every_disk_behaviour_is_charged_and_victim_is_unharmed() {
    let rows = charged(&DISK_CHARGES, &["disk-absent", "disk-reattach"]);
    assert_eq!(rows.len(), DISK_CHARGES.len() + 3, "{:?}", rows.keys());
    for (name, row) in &rows {
        assert!(name.starts_with("disk-"), "no packets were asked for: {row}");
        for field in ["victim_iops", "ratio", "victim_p99_us"] {
            assert!(row[field].as_f64().unwrap() > 0.0, "{field} in {row}");
        }
        let growth = row["driver_rss_kib_growth"].as_i64().unwrap();
        assert!(growth < FLAT_KIB, "{row}");
    }
    assert_eq!(rows["disk-honest"]["ratio"], 1.0);
    for quiet in ["disk-honest", "disk-absent", "disk-reattach"] {
        let charged = rows[quiet]["rules"].as_object().unwrap();
        assert!(charged.keys().all(|rule| !rule.starts_with("blk_")), "{quiet}: {charged:?}");
    }
}

#[test]
fn disk_rows_use_the_requested_mode() {
    let rows = rows("--json --seconds 0.2 --disk-mode map --behaviours disk-foreign-grefs");
    let row = &rows["disk-foreign-grefs"];
    assert_eq!(row["mode"], "map");
    assert!(row["rules"]["blk_gref_not_granted"].as_u64().unwrap() > 0, "{row}");
    assert!(row["rules"]["persistent_over"].is_null(), "{row}");
}

/// Counts directories that exited benchmark processes left behind; others may still be running.
fn leftovers() -> usize {
    let gone = |name: &str| {
        let pid = name.strip_prefix("ringfence-hostile-").and_then(|rest| rest.split('-').next());
        pid.is_some_and(|pid| !std::path::Path::new(&format!("/proc/{pid}")).exists())
    };
    let entries = std::fs::read_dir(std::env::temp_dir()).unwrap();
    entries.filter(|entry| gone(&entry.as_ref().unwrap().file_name().to_string_lossy())).count()
}

#[test]
fn list_explains_every_behaviour() {
    let done = hostile("--list");
    let list = text(&done.stdout);
    for (behaviour, _) in CHARGES.iter().chain(&DISK_CHARGES) {
        let line = list.lines().find(|line| line.starts_with(*behaviour)).unwrap_or(&list);
        assert!(line.len() > behaviour.len() + 10, "{line}");
    }
}

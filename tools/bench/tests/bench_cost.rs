//! End-to-end tests of `ringfence-bench cost` and `tail`: their rows, and that every packet arrived. No time is asserted.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::collections::BTreeMap;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn bench(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfence-bench"));
    command.args(line.split_whitespace().skip(1)).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn rows(line: &str, name: &str) -> BTreeMap<String, Value> {
    let done = bench(line);
    assert!(done.status.success(), "{line}: {} {}", done.status, text(&done.stderr));
    let row = |line: &str| serde_json::from_str::<Value>(line).unwrap();
    let rows = text(&done.stdout).lines().map(row).collect::<Vec<_>>();
    rows.into_iter().map(|row| (row[name].as_str().unwrap().to_owned(), row)).collect()
}

const PATHS: [&str; 7] = [
    "source, sink",
    "ring, window",
    "ring, staged pages",
    "ring, grant copies",
    "ring between two domains",
    "two domains, switch",
    "three domains, switch",
];

#[test]
#[cfg(target_arch = "x86_64")]
fn short_cost_run_has_every_path_component_and_operation() {
    let rows =
        rows("ringfence-bench cost --json --size 64 --rounds 2 --seconds 0.1 --rate 20000", "name");
    for path in PATHS {
        let row = &rows[path];
        assert_eq!(row["kind"], "path", "{row}");
        // A path that carried packets cost something; the command has checked that each of them arrived.
        assert!(row["cycles"].as_f64().unwrap() > 0.0 && row["load"].as_f64().unwrap() > 0.0);
        assert_eq!((&row["rate"], &row["burst"]), (&20_000.into(), &32.into()), "{row}");
    }
    for component in [
        "ring crossing, window",
        "ring crossing, staged pages",
        "grant copy",
        "domain boundary",
        "switch",
        "one more distrusting domain",
    ] {
        let row = &rows[component];
        assert_eq!((&row["kind"], &row["rounds"]), (&"component".into(), &2.into()), "{row}");
        let [least, median, most] =
            ["least", "cycles", "greatest"].map(|field| row[field].as_f64().unwrap());
        assert!(least <= median && median <= most, "{row}");
        // Without instructions there is a reason.
        assert!(row["instructions"].is_f64() != row["instructions_missing"].is_string(), "{row}");
    }
    assert_eq!(rows["one more distrusting domain"]["published"], serde_json::json!([350, 1500]));
    for operation in
        ["staged look-up", "look-up in a window", "copy from a lent page", "policy, new flow"]
    {
        assert!(rows[operation]["cycles"].as_f64().unwrap() > 0.0, "{}", rows[operation]);
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn uplink_paths_are_measured_or_left_out_with_the_reason() {
    let done = bench("ringfence-bench cost --size 1500 --rounds 1 --seconds 0.1 --rate 20000");
    let (table, errors) = (text(&done.stdout), text(&done.stderr));
    assert!(done.status.success(), "{errors}");
    let is_measured = table.contains("uplink with a policy");
    assert_ne!(is_measured, errors.contains("uplink is left out: "), "{table} {errors}");
    assert!(table.contains("For each packet: ticks of the time-stamp counter"), "{table}");
}

#[test]
fn tail_has_rows_alone_beside_an_honest_and_beside_hostile_neighbours() {
    let hostile = ["event-storm", "rejoin", "hoarder", "changing-lists"];
    let line =
        format!("ringfence-bench tail --json --seconds 0.2 --behaviours {}", hostile.join(","));
    let rows = rows(&line, "behaviour");
    assert_eq!(rows.len(), hostile.len() + 2, "{:?}", rows.keys());
    for row in rows.values() {
        let [p50, p99, p999, max] =
            ["p50_us", "p99_us", "p999_us", "max_us"].map(|field| row[field].as_f64().unwrap());
        assert!(0.0 < p50 && p50 <= p99 && p99 <= p999 && p999 <= max, "{row}");
        assert!(row["requests"].as_u64().unwrap() > 0 && row["p999_ratio"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(
        (&rows["absent"]["p999_ratio"], &rows["absent"]["within_goal"]),
        (&1.0.into(), &true.into())
    );
}

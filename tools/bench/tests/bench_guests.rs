//! End-to-end tests of benchmarks with guests of `ringfence run`, and of small ones: their output. No rate is asserted.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod support;

use std::process::{Command, Output, Stdio};

use serde_json::Value;

use support::needs::{Need, skip_for_the_kernel};

fn bench(words: &[&str], options: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfence-bench"));
    command.args(words).args(options.split_whitespace()).stdin(Stdio::null());
    command.output().unwrap()
}

/// Runs a benchmark and returns the rows that it prints.
fn rows(words: &[&str], options: &str) -> Vec<Value> {
    let done = bench(words, options);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(done.status.success(), "{words:?} {options}: {}", text(&done.stderr));
    text(&done.stdout).lines().map(|row| serde_json::from_str(row).unwrap()).collect()
}

#[track_caller]
fn number(row: &Value, field: &str) -> f64 {
    row[field].as_f64().unwrap_or_else(|| panic!("{field} is no number in {row}"))
}

#[test]
fn latency_has_quantiles_of_each_mode_and_protocol() {
    require!(Need::Guests);
    let rows = rows(&["latency"], "--json --seconds 0.5 --modes copy,map,staging,window");
    assert_eq!(rows.len(), 8);
    for row in &rows {
        assert!(number(row, "requests") > 0.0, "{row}");
        let quantiles = ["p50_us", "p99_us", "p999_us", "max_us"].map(|field| number(row, field));
        assert!(quantiles[0] > 0.0 && quantiles.is_sorted(), "{row}");
    }
}

#[test]
fn idle_counts_processes_of_all_guests() {
    require!(Need::Guests);
    let rows = rows(&["idle"], "--json --guests 2 --settle 0.5 --seconds 0.5");
    let [row] = &rows[..] else { panic!("{rows:?}") };
    // Each guest has a launcher, init and its command, a frontend and two supervisors; the driver domain has a supervisor.
    assert!(number(row, "processes") >= 14.0, "{row}");
    assert!(number(row, "cpu_share") >= 0.0 && number(row, "wakeups_per_second") >= 0.0, "{row}");
}

#[test]
fn grant_has_a_row_for_each_operation() {
    let rows = rows(&["grant"], "--json --cpus 1 --rounds 1 --mappings 10");
    assert!(rows.len() > 1, "{rows:?}");
    assert!(
        rows.iter().all(|row| row["operation"].is_string() && number(row, "ns") > 0.0),
        "{rows:?}"
    );
}

#[test]
fn copy_has_a_row_for_each_routine_and_memcpy() {
    let rows = rows(&["copy"], "--json --size 64,1500 --offset 2 --cache own --rounds 1");
    let of_memcpy = rows.iter().filter(|row| row["routine"] == "memcpy").count();
    assert_eq!(of_memcpy, 2, "{rows:?}");
    assert!(rows.iter().all(|row| number(row, "ns") > 0.0), "{rows:?}");
}

#[test]
fn uplink_measures_request_and_answer() {
    require!(Need::Guests, Need::Root, Need::Program("ip", "iproute2"));
    let rows =
        rows(&["uplink"], "--json --case tcp-rr --seconds 0.3 --rounds 1 --congestion cubic");
    assert!(!rows.is_empty() && rows.iter().all(Value::is_object), "{rows:?}");
}

#[test]
fn uplink_without_a_congestion_control_to_choose_fails() {
    require!(Need::Guests, Need::Root, Need::Program("ip", "iproute2"));
    let done = bench(&["uplink"], "--case tcp-rr --seconds 0.3 --rounds 1 --congestion none-such");
    let problem = String::from_utf8_lossy(&done.stderr);
    assert!(!done.status.success() && problem.contains("nothing was measured"), "{problem}");
}

#[test]
fn redesigned_measures_each_mode_and_revocation() {
    require!(Need::Guests);
    let options = "--json --seconds 0.3 --rounds 1 --experiments guest-guest --modes copy,window";
    let rows = rows(&["seeds", "redesigned"], options);
    for experiment in ["guest-guest", "revoke"] {
        assert!(rows.iter().any(|row| row["experiment"] == experiment), "{rows:?}");
    }
}

#[test]
fn gso_seeds_have_a_row_for_each_setup() {
    require!(Need::Guests);
    let options = "--json --seconds 0.3 --rounds 1 --paths guest-guest --setups tso";
    let rows = rows(&["seeds", "gso"], options);
    assert!(rows.iter().any(|row| row["setup"] == "tso"), "{rows:?}");
    assert!(rows.iter().all(|row| number(row, "gbps") > 0.0), "{rows:?}");
}

#[test]
fn vhost_seeds_measure_a_tap_beside_vhost() {
    require!(Need::Guests);
    if !std::path::Path::new("/dev/vhost-net").exists() {
        return skip_for_the_kernel("there is no /dev/vhost-net");
    }
    let vhost = rows(&["seeds", "vhost"], "--json --seconds 0.3 --rounds 1 --mtu 1500");
    let iommu = rows(&["seeds", "iommu"], "--json --seconds 0.2 --rounds 1 --size 1400");
    assert!(!vhost.is_empty() && !iommu.is_empty());
}

#[test]
fn pressure_shrinks_windows_in_the_middle_of_a_transfer() {
    require!(Need::Guests, Need::Root);
    let done = bench(&["pressure"], "--json --seconds 1");
    let problem = String::from_utf8_lossy(&done.stderr);
    if problem.contains("control group") {
        return skip_for_the_kernel(problem.trim());
    }
    assert!(done.status.success(), "{problem}");
    let text = String::from_utf8_lossy(&done.stdout);
    let rows: Vec<Value> = text.lines().map(|row| serde_json::from_str(row).unwrap()).collect();
    assert!(rows.len() > 1 && rows.iter().all(Value::is_object), "{text}");
}

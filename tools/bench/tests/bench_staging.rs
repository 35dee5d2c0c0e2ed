//! End-to-end test of `ringfence-bench seeds staging`: its output on any machine. No rate is asserted.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::process::{Command, Stdio};

use serde_json::Value;

#[test]
fn points_print_one_line_and_staging_makes_no_grant_operation() {
    let page = tempfile::NamedTempFile::new().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfence-bench"));
    command.args(["seeds", "staging", "--json", "--rounds", "1", "--seconds", "0.1"]);
    command.args(["--queues", "1", "--size", "64", "--direction", "tx", "--plot-size", "64,256"]);
    // testpmd is not on this path: the comparison is skipped with a message.
    command.args(["--vs", "memif", "--vs-size", "64"]).env("PATH", "/nonexistent");
    command.arg("--html").arg(page.path()).stdin(Stdio::null());
    let done = command.output().unwrap();
    assert!(done.status.success(), "{done:?}");
    let text = String::from_utf8(done.stdout).unwrap();
    let rows: Vec<Value> = text.lines().map(|row| serde_json::from_str(row).unwrap()).collect();
    let of = |mode: &str, verify: Value| {
        rows.iter().find(|row| row["mode"] == mode && row["verify"] == verify && row["size"] == 64)
    };
    for verify in ["sequence", "full"] {
        let staging = of("staging", verify.into()).unwrap();
        let copy = of("copy", verify.into()).unwrap();
        assert_eq!(staging["grant_ops_per_packet"], 0.0, "{staging}");
        assert!(copy["grant_ops_per_packet"].as_f64().unwrap() >= 1.0, "{copy}");
        assert!(staging["pps"].as_f64().unwrap() > 0.0, "{staging}");
        assert!(staging["staging_ratio"].as_f64().unwrap() > 0.0, "{staging}");
        assert!(staging["judgement"].is_string(), "{staging}");
        for (field, value) in [("experiment", "staging-grants"), ("peer", "ringfence")] {
            assert_eq!(staging[field], value, "{staging}");
        }
    }
    let memif = of("memif", Value::Null).unwrap();
    assert!(memif["skipped"].is_string() && memif["pps"].is_null(), "{memif}");
    let page = std::fs::read_to_string(page.path()).unwrap();
    assert!(page.contains("<svg") && page.contains("Rate against packet size"), "{page}");
}

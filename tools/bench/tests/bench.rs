//! End-to-end tests of `ringfence-bench net`: its output, and its failure on lost or damaged packets.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const FIELDS: [&str; 15] = [
    "mode",
    "direction",
    "size",
    "queues",
    "packets",
    "seconds",
    "pps",
    "gbps",
    "grant_ops_per_packet",
    "syscalls_per_packet",
    "faults_per_packet",
    "copies_per_packet",
    "cpu_ns_per_packet",
    "kernel_thread_cpu_ns_per_packet",
    "wakeups_per_packet",
];

fn bench(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfence-bench"));
    command.args(["net"]).args(line.split_whitespace());
    command
}

fn output(line: &str) -> Output {
    bench(line).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn rows(line: &str) -> Vec<Value> {
    let done = output(line);
    assert!(done.status.success(), "{line}: {} {}", done.status, text(&done.stderr));
    text(&done.stdout).lines().map(|row| serde_json::from_str(row).unwrap()).collect()
}

#[track_caller]
fn number(row: &Value, field: &str) -> f64 {
    row[field].as_f64().unwrap_or_else(|| panic!("{field} is no number in {row}"))
}

/// Checks the criteria of a row that hold on any machine.
fn check(row: &Value, packets: f64) {
    for field in FIELDS {
        assert!(!row[field].is_null(), "{field} is missing in {row}");
    }
    assert_eq!(number(row, "packets"), packets, "{row}");
    assert_eq!(row["verified"], true);
    assert_eq!(number(row, "kernel_thread_cpu_ns_per_packet"), 0.0);
    assert!(number(row, "cpu_ns_per_packet") > 0.0 && number(row, "bare_copy_ns") > 0.0, "{row}");
    let (pps, seconds) = (number(row, "pps"), number(row, "seconds"));
    assert!((pps * seconds / packets - 1.0).abs() < 1e-6, "{row}");
    let pages = (number(row, "size") / 4096.0).ceil();
    let (copies, maps, unmaps) =
        (number(row, "grant_copies"), number(row, "grant_maps"), number(row, "grant_unmaps"));
    match row["mode"].as_str().unwrap() {
        "copy" => {
            assert!(copies >= packets * pages, "{row}");
            assert_eq!((maps, unmaps), (0.0, 0.0), "{row}");
            // Adjacent pages are copied in one call; notifications and yields are additional calls.
            assert!(number(row, "syscalls_per_packet") > 0.0, "{row}");
            // One copy by the kernel, one by the frontend: of the whole packet or only its header.
            let copies = number(row, "copies_per_packet");
            assert!(copies > 1.0 && copies <= 2.0, "{row}");
        }
        "map" => {
            assert_eq!(copies, 0.0, "{row}");
            assert_eq!(maps, unmaps, "{row}");
            assert!(maps >= packets, "{row}");
            assert_eq!(number(row, "grant_ops_per_packet"), (maps + unmaps) / packets, "{row}");
            assert!(
                number(row, "faults_per_packet") > 0.0,
                "mapped afresh, so touched afresh: {row}"
            );
        }
        "staging" | "window" => {
            assert_eq!((copies, maps, unmaps), (0.0, 0.0, 0.0), "{row}");
            assert_eq!(number(row, "grant_ops_per_packet"), 0.0, "{row}");
        }
        other => panic!("a row of mode {other}"),
    }
}

#[test]
#[ignore = "long: all modes, sizes and directions"]
fn every_mode_size_and_direction_delivers_all_packets() {
    let small = rows(
        "--json --packets 20000 --size 64,1500 --modes copy,map,staging,window --direction tx,rx",
    );
    assert_eq!(small.len(), 16);
    small.iter().for_each(|row| check(row, 20_000.0));
    let large = rows("--json --packets 1500 --size 65000,65535");
    assert_eq!(large.len(), 16, "every mode and both directions by default");
    large.iter().for_each(|row| check(row, 1500.0));
    let key = |row: &Value| format!("{} {} {}", row["mode"], row["direction"], row["size"]);
    let mut keys: Vec<_> = small.iter().chain(&large).map(key).collect();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), 32, "{keys:?}");
}

#[test]
fn table_has_one_line_per_row() {
    let done = output("--packets 5000 --size 64 --modes copy --direction rx");
    let table = text(&done.stdout);
    let mut lines = table.lines();
    assert!(lines.next().is_some_and(|heading| heading.starts_with("mode ")), "{table}");
    assert!(lines.next().is_some_and(|row| row.starts_with("copy  rx ")), "{table}");
    assert!(table.contains("none lost, repeated, out of order or damaged"), "{table}");
}

#[test]
fn spoilt_packet_fails_the_run() {
    for direction in ["tx", "rx"] {
        for mode in ["copy", "map"] {
            for (spoil, why) in [
                ("damage", "arrived damaged: its checksum is wrong"),
                ("lose", "were lost"),
                ("repeat", "was repeated or out of order"),
            ] {
                let line = format!(
                    "--packets 3000 --size 300 --modes {mode} --direction {direction} --spoil {spoil}"
                );
                let done = output(&line);
                assert_eq!(done.status.code(), Some(1), "{line}");
                let stderr = text(&done.stderr);
                assert!(stderr.contains(why), "{line}: {stderr}");
                assert!(
                    stderr.contains(&format!("mode {mode}, {direction}, 300 bytes")),
                    "{stderr}"
                );
            }
        }
    }
}

#[test]
#[ignore = "long: many runs"]
fn queues_have_own_threads_and_sequence_numbers() {
    for queues in [2, 3] {
        let line = format!("--queues {queues} --size 64,1500 --packets 9000 --json");
        for row in rows(&line) {
            check(&row, 9000.0);
            assert_eq!(number(&row, "queues"), f64::from(queues));
            let cores = std::thread::available_parallelism().unwrap().get();
            let oversubscribed = 2 * usize::try_from(queues).unwrap() > cores;
            assert_eq!(row["oversubscribed"], oversubscribed, "{row}");
        }
    }
    // The lost packet of one queue fails the run, whatever the other queues do.
    let done = output("--queues 2 --size 64 --packets 9000 --modes staging --spoil lose");
    assert_eq!(done.status.code(), Some(1));
    assert!(text(&done.stderr).contains("were lost"), "{}", text(&done.stderr));
}

#[test]
fn killed_domain_fails_the_run_and_leaves_no_process() {
    let mut running = bench("--seconds 60 --size 64 --modes copy --direction tx -v")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(running.stderr.take().unwrap()).lines();
    let line = said.next().unwrap().unwrap();
    let pids: Vec<i32> =
        line.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect();
    // "copy tx 64: backend is process A, frontend is process B"
    let [64, backend, frontend] = pids[..] else { panic!("{line}") };
    let victim = rustix::process::Pid::from_raw(frontend).unwrap();
    rustix::process::kill_process(victim, rustix::process::Signal::KILL).unwrap();
    let status = running.wait().unwrap();
    assert_eq!(status.code(), Some(1));
    let rest: Vec<_> = said.map_while(Result::ok).collect();
    assert!(rest.iter().any(|line| line.contains("gone")), "{rest:?}");
    let backend = format!("/proc/{backend}/stat");
    assert!(!std::path::Path::new(&backend).exists(), "the other domain is still there");
}

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ringfence_sys::testing::FreePort;

use super::Exporter;
use super::http::{Request, parse_request};
use super::render::render;
use super::testing::read;
use crate::xen::config::Listen;
use crate::xen::status::{
    Attachment, Counts, DaemonStatus, DiskTotals, HostStatus, QUEUE_FULL, QueueStatus, Snapshot,
    VbdStatus, VifStatus,
};

fn counts<const N: usize>(counts: [(&str, u64); N]) -> Counts {
    counts.into_iter().map(|(name, count)| (name.to_owned(), count)).collect()
}

fn snapshot() -> Snapshot {
    let queue = |frames| QueueStatus {
        counters: counts([
            ("rx_frames", frames),
            ("rx_bytes", frames * 100),
            ("tx_frames", 5),
            ("tx_bytes", 500),
            ("drop_spoofed_source", 3),
            ("wakeups", 9),
            ("stalls", 1),
        ]),
    };
    let web = VifStatus {
        name: "vif5.0".to_owned(),
        domain: 5,
        // The guest's name would end the label and the line if it were not escaped.
        domain_name: Some("we\"b\\\n} 1\n# EOF".to_owned()),
        mac: Some("00:16:3e:00:00:01".to_owned()),
        mode: "copy".to_owned(),
        attachment: Attachment::Tap { interface: "vif5.0".to_owned(), bridge: None },
        connected: true,
        queues: vec![queue(10), queue(u64::MAX / 1000)],
        tap: Some(counts([("rx_frames", 1), (QUEUE_FULL, 2)])),
        rules: counts([("tx_too_short", 4)]),
        ..VifStatus::default()
    };
    let idle = VifStatus { name: "vif6.0".to_owned(), domain: 6, ..VifStatus::default() };
    let daemon = DaemonStatus {
        version: "0.1.0".to_owned(),
        platform: "xen".to_owned(),
        uptime_seconds: 77,
        path: counts([("grant_copies", 8)]),
        gone_ports: counts([("rx_frames", 2)]),
        adopted: 1,
        disks: DiskTotals { adopted: 3, gone: counts([("writes", 6)]), ..DiskTotals::default() },
        switch_addresses: Some(12),
        host_interface: Some(HostStatus {
            name: "rf0".to_owned(),
            counters: counts([("tx_frames", 6)]),
        }),
        ..DaemonStatus::default()
    };
    let ring = |reads| QueueStatus {
        counters: counts([("reads", reads), ("read_bytes", reads * 4096), ("persistent_hits", 3)]),
    };
    let disk = VbdStatus {
        name: "vbd5.51712".to_owned(),
        vdev: Some("xvda".to_owned()),
        storage: Some("/dev/vg/\"a\"".to_owned()),
        bytes: Some(1 << 30),
        connected: true,
        persistent: true,
        queues: vec![ring(4), ring(5)],
        rules: counts([("blk_sector_beyond_disk", 2)]),
        ..VbdStatus::default()
    };
    Snapshot { daemon, vifs: vec![web, idle], disks: vec![disk] }
}

#[test]
fn rendered_text_is_valid_openmetrics() {
    let text = render(&snapshot());
    let samples = read(&text).unwrap_or_else(|why| panic!("{why}\n{text}"));
    let get = |series: &str| samples.get(series).copied();
    assert_eq!(get("ringfence_uptime_seconds"), Some(77.0));
    assert_eq!(get("ringfence_vifs"), Some(2.0));
    assert_eq!(get("ringfence_vifs_adopted_total"), Some(1.0));
    assert_eq!(get("ringfence_vif_connected{vif=\"vif5.0\"}"), Some(1.0));
    assert_eq!(get("ringfence_vif_connected{vif=\"vif6.0\"}"), Some(0.0));
    assert_eq!(get("ringfence_vif_stalled{vif=\"vif5.0\"}"), Some(1.0));
    let sent = "ringfence_vif_frames_total{vif=\"vif5.0\",direction=\"sent\"}";
    #[allow(clippy::cast_precision_loss, reason = "what the format does to large numbers")]
    let sum = (u64::MAX / 1000 + 10) as f64;
    assert_eq!(get(sent), Some(sum), "both queues");
    let received = "ringfence_vif_bytes_total{vif=\"vif5.0\",direction=\"received\"}";
    assert_eq!(get(received), Some(1000.0));
    let drops = "ringfence_vif_drops_total{vif=\"vif5.0\",reason=\"spoofed_source\"}";
    assert_eq!(get(drops), Some(6.0));
    assert_eq!(get("ringfence_vif_port_total{vif=\"vif5.0\",counter=\"wakeups\"}"), Some(18.0));
    let full = "ringfence_vif_tap_total{vif=\"vif5.0\",counter=\"drop_queue_full\"}";
    assert_eq!(get(full), Some(2.0));
    let rule = "ringfence_vif_rule_violations_total{vif=\"vif5.0\",rule=\"tx_too_short\"}";
    assert_eq!(get(rule), Some(4.0));
    assert_eq!(get("ringfence_path_operations_total{operation=\"grant_copies\"}"), Some(8.0));
    assert_eq!(get("ringfence_gone_ports_total{counter=\"rx_frames\"}"), Some(2.0));
    assert_eq!(
        get("ringfence_host_port_total{interface=\"rf0\",counter=\"tx_frames\"}"),
        Some(6.0)
    );
    assert_eq!(get("ringfence_switch_addresses"), Some(12.0));
    assert_eq!(get("ringfence_vbds"), Some(1.0));
    assert_eq!(get("ringfence_vbds_adopted_total"), Some(3.0));
    assert_eq!(get("ringfence_gone_vbds_total{counter=\"writes\"}"), Some(6.0));
    let of = |rest: &str| get(&format!("ringfence_vbd_{rest}"));
    assert_eq!(of("connected{vbd=\"vbd5.51712\"}"), Some(1.0));
    assert_eq!(of("size_bytes{vbd=\"vbd5.51712\"}"), Some(1_073_741_824.0));
    assert_eq!(of("requests_total{vbd=\"vbd5.51712\",operation=\"read\"}"), Some(9.0));
    assert_eq!(of("requests_total{vbd=\"vbd5.51712\",operation=\"write\"}"), Some(0.0));
    assert_eq!(of("bytes_total{vbd=\"vbd5.51712\",direction=\"read\"}"), Some(36864.0));
    assert_eq!(of("queue_total{vbd=\"vbd5.51712\",counter=\"persistent_hits\"}"), Some(6.0));
    let rule = "rule_violations_total{vbd=\"vbd5.51712\",rule=\"blk_sector_beyond_disk\"}";
    assert_eq!(of(rule), Some(2.0));
    let info =
        samples.keys().find(|series| series.starts_with("ringfence_vif_info{vif=\"vif5.0\""));
    assert!(info.unwrap().contains("domain=\"we\\\"b\\\\\\n} 1\\n# EOF\""), "{info:?}");
}

#[test]
fn daemon_without_devices_renders_metrics() {
    let samples = read(&render(&Snapshot::default())).unwrap();
    assert_eq!(samples.get("ringfence_vifs"), Some(&0.0));
}

#[test]
fn test_parser_refuses_invalid_openmetrics() {
    for wrong in [
        "a 1\n# EOF\n",
        "# TYPE a gauge\na 1\n",
        "# TYPE a counter\na 1\n# EOF\n",
        "# TYPE a gauge\nb 1\n# EOF\n",
        "# TYPE a gauge\na 1\na 2\n# EOF\n",
        "# TYPE a gauge\na{x=\"1} 1\n# EOF\n",
        "# TYPE a gauge\na{x=\"\\q\"} 1\n# EOF\n",
        "# TYPE a gauge\na one\n# EOF\n",
        "# TYPE a gauge\na 1\n# TYPE b gauge\nb 1\n# TYPE a gauge\na{x=\"1\"} 1\n# EOF\n",
    ] {
        assert!(read(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn request_is_parsed_or_refused() {
    let parsed = |text: &str| parse_request(text.as_bytes());
    assert_eq!(
        parsed("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"),
        Some(Request::Metrics { body: true })
    );
    assert_eq!(parsed("GET /metrics?x=1 HTTP/1.0\r\n\r\n"), Some(Request::Metrics { body: true }));
    assert_eq!(parsed("HEAD /metrics HTTP/1.1\r\n\r\n"), Some(Request::Metrics { body: false }));
    assert_eq!(parsed("POST /metrics HTTP/1.1\r\n\r\n"), Some(Request::Method));
    assert_eq!(parsed("GET / HTTP/1.1\r\n\r\n"), Some(Request::Path));
    assert_eq!(parsed("GET /metrics HTTP/1.1\r\nHost:"), None);
    assert_eq!(parsed("\x16\x03\x01"), Some(Request::Invalid));
    let headers = "a: b\r\n".repeat(65);
    assert_eq!(parsed(&format!("GET /metrics HTTP/1.1\r\n{headers}\r\n")), Some(Request::Invalid));
}

proptest::proptest! {
    #[test]
    fn random_bytes_do_not_panic_request_parser(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300)) {
        let _ = parse_request(&bytes);
    }
}

fn ask(mut client: impl Read + Write, request: &str) -> String {
    client.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    answer
}

const GET: &str = "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";

#[test]
fn get_over_tcp_or_unix_socket_returns_metrics() {
    let port = FreePort::new();
    let address = port.address();
    Exporter::start(&Listen::Loopback(address), || Some(snapshot())).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.sock");
    // The exporter replaces the socket of an earlier daemon, but no file of another kind.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    Exporter::start(&Listen::Unix(path.clone()), || Some(snapshot())).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    for answer in [
        ask(TcpStream::connect(address).unwrap(), GET),
        ask(UnixStream::connect(&path).unwrap(), GET),
    ] {
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
        assert!(head.contains("openmetrics-text"), "{head}");
        assert_eq!(read(body).unwrap().get("ringfence_vifs"), Some(&2.0));
    }
    let answer = ask(TcpStream::connect(address).unwrap(), "GET / HTTP/1.1\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
    let file = dir.path().join("file");
    std::fs::write(&file, "mine").unwrap();
    let error = Exporter::start(&Listen::Unix(file.clone()), || None).unwrap_err().to_string();
    assert!(error.contains("in use"), "{error}");
    assert_eq!(std::fs::read(&file).unwrap(), b"mine");
}

#[test]
fn get_without_answer_of_daemon_returns_503() {
    let port = FreePort::new();
    let address = port.address();
    Exporter::start(&Listen::Loopback(address), || None).unwrap();
    let answer = ask(TcpStream::connect(address).unwrap(), GET);
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
}

#[test]
fn frequent_requests_share_one_snapshot_a_second() {
    let port = FreePort::new();
    let address = port.address();
    let (parsed, count) = std::sync::mpsc::channel();
    let daemon = move || {
        parsed.send(()).unwrap();
        Some(snapshot())
    };
    Exporter::start(&Listen::Loopback(address), daemon).unwrap();
    let begin = Instant::now();
    for _ in 0..50 {
        let answer = ask(TcpStream::connect(address).unwrap(), GET);
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }
    let seconds = begin.elapsed().as_secs();
    let times = count.try_iter().count() as u64;
    assert!((1..=seconds + 1).contains(&times), "{times} in {seconds} s");
}

/// One client sends a byte now and then, one sends without end, and one disconnects at once.
#[test]
fn slow_or_endless_client_delays_others_for_bounded_time() {
    let port = FreePort::new();
    let address = port.address();
    Exporter::start(&Listen::Loopback(address), || Some(snapshot())).unwrap();
    drop(TcpStream::connect(address).unwrap());
    let mut endless = TcpStream::connect(address).unwrap();
    let head = format!("GET /metrics HTTP/1.1\r\nx: {}", "y".repeat(9000));
    // The server may cut the connection before the request is complete.
    let _ = endless.write_all(head.as_bytes());
    let slow = TcpStream::connect(address).unwrap();
    let mut drip = slow.try_clone().unwrap();
    let dripping = std::thread::spawn(move || {
        while drip.write_all(b"G").is_ok() {
            std::thread::sleep(Duration::from_millis(200));
        }
    });
    let begin = Instant::now();
    let answer = ask(TcpStream::connect(address).unwrap(), GET);
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
    drop(slow);
    dripping.join().unwrap();
}

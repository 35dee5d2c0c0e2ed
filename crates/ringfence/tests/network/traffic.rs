//! Traffic between guests: kernel TCP, UDP and ICMP at both ends. Every byte passes through frontends, rings,
//! grants and the driver domain's switch.
//!
//! The tests check that everything arrives undamaged, and that the counters of the driver domain agree. They check
//! no rates, which are for the benchmarks.

use std::sync::mpsc;
use std::time::Duration;

use ringfence_driver::switchboard::DriverStats;
use rustix::process::Signal;
use serde_json::Value;

use crate::require;
use crate::support::needs::Need;
use crate::support::processes::Process;
use crate::support::{Lab, MOMENT, Noise, Running, sha256, write_noise};

const IPERF: Need = Need::Program("iperf3", "iperf3");
const CURL: Need = Need::Program("curl", "curl");
const PYTHON: Need = Need::Program("python3", "python3");
const PING: Need = Need::Program("ping", "iputils-ping");
const IP: Need = Need::Program("ip", "iproute2");

/// Kernel counters of damaged packets, as in `/proc/net/snmp` (a line of names, a line of values) and
/// `/proc/net/snmp6` (one name and value a line).
// Tcp:InErrs is missing because it also counts a repeated handshake segment, which loss causes.
const DAMAGE: [&str; 7] = [
    "Ip:InHdrErrors",
    "Icmp:InCsumErrors",
    "Tcp:InCsumErrors",
    "Udp:InCsumErrors",
    "Ip6InHdrErrors",
    "Udp6InCsumErrors",
    "Icmp6InCsumErrors",
];
const COPY_SNMP: &str = "cat /proc/net/snmp /proc/net/snmp6";

/// Returns the values of [`DAMAGE`] in a copy of both files.
fn damage(snmp: &str) -> Vec<(String, u64)> {
    let lines: Vec<&str> = snmp.lines().collect();
    let mut found = Vec::new();
    for pair in lines.windows(2) {
        let (Some((kind, names)), Some((same, values))) =
            (pair[0].split_once(": "), pair[1].split_once(": "))
        else {
            continue;
        };
        if kind == same {
            let values = values.split_whitespace().map(|value| value.parse().unwrap_or(0));
            let names = names.split_whitespace().map(|name| format!("{kind}:{name}"));
            found.extend(names.zip(values));
        }
    }
    for line in &lines {
        if let Some((name, value)) = line.split_once(char::is_whitespace)
            && !name.ends_with(':')
        {
            found.push((name.to_owned(), value.trim().parse().unwrap_or(0)));
        }
    }
    found.retain(|(name, _)| DAMAGE.contains(&name.as_str()));
    found
}

fn assert_undamaged(snmp: &str) {
    let counts = damage(snmp);
    assert_eq!(counts.len(), DAMAGE.len(), "the kernel's counters are named otherwise: {snmp}");
    assert!(counts.iter().all(|(_, count)| *count == 0), "damage was seen: {counts:?}");
}

/// Checks that no correct guest counted as breaking a rule. A guest that leaves while the driver domain is stopped is
/// an exception: its event channels are closed by the time the driver domain reads its state.
fn assert_no_violations(stats: &DriverStats) {
    for (guest, broken) in &stats.rules {
        let has_left = |rule: &String| guest == "gone" && rule == "channel_closed";
        assert!(broken.keys().all(has_left), "rules broken: {:?}", stats.rules);
    }
    let hub = stats.hub.values().all(|count| *count == 0);
    assert!(hub, "rules of the hub broken: {:?}", stats.hub);
}

/// Returns the number of ports of present guests. The counters of earlier guests are under one name.
fn ports(stats: &DriverStats) -> usize {
    stats.ports.keys().filter(|name| *name != "gone").count()
}

fn counter(stats: &DriverStats, name: &str) -> u64 {
    stats.ports.values().filter_map(|port| port.get(name)).sum()
}

/// Ports of iperf3 servers, one for each run.
const IPERF_PORTS: std::ops::RangeInclusive<u16> = 5201..=5208;

/// Starts a guest named `a` with iperf3 servers, each for one run, because a server stays busy for a while after each
/// run. The guest prints its kernel's counters when it is stopped.
fn iperf_server(lab: &Lab, options: &str) -> Running {
    let (first, last) = (IPERF_PORTS.start(), IPERF_PORTS.end());
    let count = IPERF_PORTS.count();
    let script = format!(
        "for port in $(seq {first} {last}); do iperf3 -s -1 -p $port > server$port.log 2>&1 & done; \
         until [ $(cat /proc/net/tcp /proc/net/tcp6 | grep -c ' 0A ') -ge {count} ]; do \
           sleep 0.05; done; \
         echo ready; until [ -e stop ]; do sleep 0.05; done; {COPY_SNMP} > server.snmp"
    );
    let server = lab.script(&format!("--name a {options}"), &script);
    server.wait_for_output("ready");
    server
}

/// Runs TCP and UDP over IPv4 and IPv6, in both directions, between two guests of this mode and MTU. Each run ends by its
/// bytes, which no buffer holds: beside a load one that ends by its time may have sent nothing that has arrived.
fn iperf_matrix(mode: &str, mtu: u32) {
    require!(Need::Guests, IPERF);
    let lab = Lab::new();
    let options = format!("--switch s --mode {mode} --mtu {mtu}");
    let server = iperf_server(&lab, &options);
    // A datagram that nearly fills a packet.
    let datagram = if mtu > 60_000 { 60_000 } else { 1400 };
    let script = format!(
        "port={first}; for family in -4 -6; do for direction in '' -R; do \
           for transport in '-n 64M' '-u -b 300M -l {datagram} -n 16M'; do \
             iperf3 -c a -p $port $family $direction $transport --json > run$port.json; \
             port=$((port+1)); \
         done; done; done; {COPY_SNMP} > client.snmp",
        first = IPERF_PORTS.start()
    );
    let client = lab.script(&options, &script);
    client.succeed(Duration::from_secs(60));
    let stats = lab.stats("s");
    std::fs::write(lab.file("stop"), "").unwrap();
    server.succeed(MOMENT);

    for run in IPERF_PORTS {
        let report: Value = serde_json::from_str(&lab.read(&format!("run{run}.json"))).unwrap();
        let what = &report["start"]["test_start"];
        let end = &report["end"];
        if what["protocol"] == "UDP" {
            let count = |name: &str| end["sum"][name].as_i64();
            let arrived = count("packets").zip(count("lost_packets")).map(|(all, lost)| all - lost);
            assert!(arrived.is_some_and(|arrived| arrived > 0), "run {run}: {report}");
        } else {
            let bytes = end["sum_received"]["bytes"].as_u64();
            assert!(bytes.is_some_and(|bytes| bytes > 1 << 20), "run {run}: {report}");
        }
    }
    assert_undamaged(&lab.read("client.snmp"));
    assert_undamaged(&lab.read("server.snmp"));
    assert_no_violations(&stats);
    assert_eq!(ports(&stats), 1, "the client has left: {stats:?}");
    assert!(counter(&stats, "rx_bytes") > 4 << 20, "{stats:?}");
    assert!(counter(&stats, "tx_bytes") > 4 << 20, "{stats:?}");
    let path = |name: &str| stats.path.get(name).copied().unwrap_or(0);
    let (maps, copies) = (path("grant_maps"), path("grant_copies"));
    if mode == "map" {
        assert!(maps > 1000 && copies == 0, "in map mode packets are mapped: {stats:?}");
    } else if mode.starts_with("window") {
        assert!(
            maps < 100 && copies == 0,
            "only rings are mapped, and nothing is copied: {stats:?}"
        );
    } else if mode.starts_with("staging") {
        let frames = counter(&stats, "rx_frames") + counter(&stats, "tx_frames");
        assert!(maps > 1000, "the guests' pages are mapped once: {stats:?}");
        assert!((maps + copies) * 4 < frames, "and then used again and again: {stats:?}");
    } else {
        assert!(maps < 100 && copies > 1000, "in copy mode only rings are mapped: {stats:?}");
    }
}

#[test]
fn iperf3_in_copy_mode() {
    iperf_matrix("copy", 1500);
}

#[test]
fn iperf3_in_copy_mode_with_the_largest_packets() {
    iperf_matrix("copy", 65520);
}

#[test]
fn iperf3_in_map_mode() {
    iperf_matrix("map", 1500);
}

#[test]
fn iperf3_in_map_mode_with_the_largest_packets() {
    iperf_matrix("map", 65520);
}

#[test]
fn iperf3_in_staging_mode_over_three_queues() {
    iperf_matrix("staging --queues 3", 1500);
}

#[test]
fn iperf3_in_window_mode_over_three_queues() {
    iperf_matrix("window --queues 3", 1500);
}

#[test]
fn iperf3_in_window_mode_with_the_largest_packets() {
    iperf_matrix("window", 65520);
}

#[test]
fn iperf3_in_staging_mode_with_the_largest_packets() {
    iperf_matrix("staging", 65520);
}

/// Runs a TCP bulk transfer between guests with these options. Returns the counters of the driver domain.
fn bulk(server_options: &str, client_options: &str) -> DriverStats {
    let lab = Lab::new();
    let server = iperf_server(&lab, &format!("--switch s {server_options}"));
    let script = format!("iperf3 -c a -p 5201 -t 1 --json > run.json; {COPY_SNMP} > client.snmp");
    lab.script(&format!("--switch s {client_options}"), &script).succeed(MOMENT);
    let stats = lab.stats("s");
    std::fs::write(lab.file("stop"), "").unwrap();
    server.succeed(MOMENT);
    let report: Value = serde_json::from_str(&lab.read("run.json")).unwrap();
    assert!(report["end"]["sum_received"]["bytes"].as_u64().unwrap() > 1 << 20, "{report}");
    assert_undamaged(&lab.read("client.snmp"));
    assert_undamaged(&lab.read("server.snmp"));
    assert_no_violations(&stats);
    stats
}

#[test]
fn tcp_super_packets_pass_between_guests_unsegmented() {
    require!(Need::Guests, IPERF);
    let stats = bulk("", "");
    assert!(counter(&stats, "frames_whole") > 10, "{stats:?}");
    assert_eq!(counter(&stats, "segments_made"), 0, "{stats:?}");
    assert_eq!(counter(&stats, "checksums_computed"), 0, "{stats:?}");
    let mean = counter(&stats, "rx_bytes") / counter(&stats, "rx_frames").max(1);
    assert!(mean > 1514, "{mean} octets a frame, acknowledgements counted: {stats:?}");
}

#[test]
fn guest_without_offloads_receives_segmented_packets() {
    require!(Need::Guests, IPERF);
    let stats = bulk("--offload none", "");
    assert!(counter(&stats, "frames_segmented") > 10, "{stats:?}");
    let made = counter(&stats, "segments_made");
    assert!(made > counter(&stats, "frames_segmented"), "{stats:?}");
    assert!(counter(&stats, "checksums_computed") >= made, "{stats:?}");
}

#[test]
fn segments_of_guest_without_offloads_are_coalesced() {
    require!(Need::Guests, IPERF);
    for mode in ["copy", "map"] {
        let stats = bulk(&format!("--mode {mode}"), &format!("--mode {mode} --offload none"));
        let joined = counter(&stats, "frames_coalesced");
        assert!(joined > 100, "{stats:?}");
        assert!(counter(&stats, "frames_whole") < joined / 2, "{stats:?}");
    }
}

/// Program that sends 30 datagrams with each call, 20 times, each after the answer to those before: a socket has room for a
/// few calls. The kernel leaves each 30 in one packet.
const SEND_WHOLE: &str = "
import hashlib, os, socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(17, 103, 1400)
s.settimeout(20)
h = hashlib.sha256()
for _ in range(20):
    octets = os.urandom(42000)
    s.sendto(octets, ('a', 7000))
    h.update(octets)
    s.recv(1)
print(600, h.hexdigest())
";

/// Program that receives the same number of datagrams, one by one, and answers every thirtieth. It stays: the last answer may
/// still be in its interface, which ends with it.
const RECEIVE_EACH: &str = "
import hashlib, socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(('', 7000))
s.settimeout(20)
print('ready', flush=True)
h = hashlib.sha256()
for n in range(600):
    octets, sender = s.recvfrom(65536)
    assert len(octets) == 1400, len(octets)
    h.update(octets)
    if n % 30 == 29:
        s.sendto(b'x', sender)
print(600, h.hexdigest(), flush=True)
s.settimeout(None)
s.recv(1)
";

#[test]
fn datagrams_sent_in_one_packet_arrive_one_by_one() {
    require!(Need::Guests, PYTHON);
    let lab = Lab::new();
    let options = "--switch s --name a";
    let receiver = lab.run(options, &["python3", "-c", RECEIVE_EACH]);
    receiver.wait_for_output("ready");
    let sent = lab.run("--switch s", &["python3", "-c", SEND_WHOLE]).succeed(MOMENT);
    receiver.wait_for_output(&format!("ready\n{sent}"));
}

#[test]
fn guests_of_different_modes_and_mtus_exchange_traffic() {
    require!(Need::Guests, IPERF);
    let lab = Lab::new();
    let server = iperf_server(&lab, "--switch s --mode map --mtu 1500");
    let client = lab.script(
        "--switch s --mode copy --mtu 1500",
        &format!("iperf3 -c a -p 5203 -t 1 --json > run.json; {COPY_SNMP} > client.snmp"),
    );
    client.succeed(MOMENT);
    assert_no_violations(&lab.stats("s"));
    std::fs::write(lab.file("stop"), "").unwrap();
    server.succeed(MOMENT);
    let report: Value = serde_json::from_str(&lab.read("run.json")).unwrap();
    assert!(report["end"]["sum_received"]["bytes"].as_u64().unwrap() > 1 << 20);
    assert_undamaged(&lab.read("client.snmp"));
    assert_undamaged(&lab.read("server.snmp"));
}

/// Stops and continues a process at random times until `end` has a message.
fn disturb(process: &Process, end: &mpsc::Receiver<()>) -> u32 {
    let mut noise = Noise::from_seed(0xd157);
    let mut times = 0;
    loop {
        process.signal(Signal::STOP);
        std::thread::sleep(Duration::from_millis(noise.below(40)));
        process.signal(Signal::CONT);
        times += 1;
        let pause = Duration::from_millis(noise.below(40));
        if !matches!(end.recv_timeout(pause), Err(mpsc::RecvTimeoutError::Timeout)) {
            return times;
        }
    }
}

/// Checks that a file from a web server is intact while the driver domain is stopped at random times.
fn transfer_while_disturbed(mode: &str) {
    require!(Need::Guests, CURL, PYTHON);
    let lab = Lab::new();
    write_noise(&lab.file("noise"), 64);
    let options = format!("--switch s --mode {mode}");
    let web = lab.run(&format!("{options} --name web"), &["python3", "-m", "http.server"]);
    let driver = web.wait_up().inner("driver");
    let (end, ended) = mpsc::channel();
    let disturbance = std::thread::spawn(move || disturb(&driver, &ended));
    let client = lab.run(
        &options,
        &[
            "curl",
            "-sSfo",
            "copy",
            "--retry",
            "30",
            "--retry-delay",
            "1",
            "--retry-connrefused",
            "http://web:8000/noise",
        ],
    );
    client.succeed(Duration::from_secs(90));
    drop(end);
    let times = disturbance.join().unwrap();
    assert!(times > 2, "it was disturbed {times} times only");
    assert_eq!(sha256(&lab.file("copy")), sha256(&lab.file("noise")));
    assert_no_violations(&lab.stats("s"));
    web.end();
    lab.assert_no_switch();
}

#[test]
fn curl_survives_a_disturbed_driver_domain_in_copy_mode() {
    transfer_while_disturbed("copy");
}

#[test]
fn curl_survives_a_disturbed_driver_domain_in_map_mode() {
    transfer_while_disturbed("map");
}

#[test]
fn client_started_before_server_connects() {
    require!(Need::Guests, CURL, PYTHON);
    let lab = Lab::new();
    write_noise(&lab.file("noise"), 1);
    let client = lab.run(
        "--switch s",
        &[
            "curl",
            "-sSfo",
            "copy",
            "--retry",
            "30",
            "--retry-delay",
            "1",
            "--retry-connrefused",
            "http://web:8000/noise",
        ],
    );
    client.wait_up();
    std::thread::sleep(Duration::from_secs(1));
    let web = lab.run("--switch s --name web", &["python3", "-m", "http.server"]);
    client.succeed(MOMENT);
    assert_eq!(sha256(&lab.file("copy")), sha256(&lab.file("noise")));
    web.end();
    lab.assert_no_switch();
}

#[test]
fn guest_name_resolves_to_both_families() {
    require!(Need::Guests, CURL, PYTHON, PING);
    let lab = Lab::new();
    std::fs::write(lab.file("hello"), "hello\n").unwrap();
    let addresses = "--address 10.9.8.7/24 --address fd00:9::7/64";
    let web = lab.run(
        &format!("--switch s --name web {addresses}"),
        &["python3", "-m", "http.server", "--bind", "::"],
    );
    web.wait_up();
    let client = lab.script(
        "--switch s --address 10.9.8.8/24 --address fd00:9::8/64",
        "for target in web 10.9.8.7 '[fd00:9::7]'; do \
           curl -sSfg --retry 20 --retry-connrefused --retry-delay 1 http://$target:8000/hello; \
         done; \
         curl -4 -sSf http://web:8000/hello; curl -6 -sSf http://web:8000/hello; \
         getent ahostsv4 web; getent ahostsv6 web; \
         ping -4 -c1 -W20 web; ping -6 -c1 -W20 web; \
         ! getent hosts nobody.s",
    );
    let said = client.succeed(Duration::from_secs(40));
    assert_eq!(said.matches("hello\n").count(), 5, "{said}");
    assert!(said.contains("10.9.8.7  ") && said.contains("fd00:9::7 "), "{said}");
    assert_eq!(said.matches(" 0% packet loss").count(), 2, "{said}");
    web.end();
}

#[test]
fn ping_of_any_length_is_answered() {
    require!(Need::Guests, PING);
    for mtu in [1500, 65520] {
        let lab = Lab::new();
        let options = format!("--switch s --mtu {mtu}");
        let target = lab.run(&format!("{options} --name a"), &["sleep", "300"]);
        target.wait_up();
        // One at a time, because `ping` waits for a second answer no longer than for the first. The lengths are around one
        // packet, around the capacity of a ring slot, and the maximum, which is fragmented with a small MTU.
        let client = lab.script(
            &options,
            "for size in 56 1391 1472 1473 4000 4096 8100 9000 17000 32768 65000; do \
               ping -4 -c 1 -W 20 -s $size a; ping -6 -c 1 -W 20 -s $size a; \
             done",
        );
        let said = client.succeed(Duration::from_secs(60));
        // `ping` compares the answer with its request.
        assert!(!said.contains("wrong data"), "{said}");
        assert_eq!(said.matches("1 received, 0% packet loss").count(), 22, "{said}");
        assert_no_violations(&lab.stats("s"));
        target.end();
    }
}

#[test]
fn interface_has_requested_mtu() {
    require!(Need::Guests, IP);
    let lab = Lab::new();
    for mtu in [576, 1280, 9000, 65521] {
        let guest = lab.run(&format!("--mtu {mtu}"), &["ip", "link", "show", "eth0"]);
        let said = guest.succeed(MOMENT);
        assert!(said.contains(&format!(" mtu {mtu} ")), "{said}");
    }
    let refused = lab.run("--mtu 65522", &["true"]).finish(MOMENT);
    assert_eq!(refused.status, Some(125), "{}", refused.stderr);
}

#[test]
fn three_guests_transfer_at_once() {
    require!(Need::Guests, CURL, PYTHON);
    let lab = Lab::new();
    write_noise(&lab.file("noise"), 8);
    let expected = sha256(&lab.file("noise"));
    // Each guest serves, fetches from both others at the same time, and then waits for them.
    let guests: Vec<Running> = ["a", "b", "c"]
        .iter()
        .map(|own| {
            let others = ["a", "b", "c"].into_iter().filter(|name| name != own);
            let fetches: String = others
                .map(|name| {
                    format!(
                        "curl --retry 20 --retry-delay 1 --retry-connrefused -sSfo {own}-{name} http://{name}:8000/noise & pids=\"$pids $!\"; "
                    )
                })
                .collect();
            let script = format!(
                "python3 -m http.server > {own}.log 2>&1 & {fetches} \
                 for pid in $pids; do wait $pid; done; : > {own}.done; \
                 until [ -e a.done -a -e b.done -a -e c.done ]; do sleep 0.05; done"
            );
            lab.script(&format!("--switch s --name {own}"), &script)
        })
        .collect();
    for guest in guests {
        guest.succeed(Duration::from_secs(60));
    }
    for pair in ["a-b", "a-c", "b-a", "b-c", "c-a", "c-b"] {
        assert_eq!(sha256(&lab.file(pair)), expected, "{pair}");
    }
    lab.assert_no_switch();
}

#[test]
fn guests_of_different_switches_cannot_reach_each_other() {
    require!(Need::Guests, PING);
    let lab = Lab::new();
    let target = lab.run(
        "--switch blue --name a --address 10.9.0.1/24 --address fd09::1/64",
        &["sleep", "300"],
    );
    target.wait_up();
    let from = |switch: &str, script: &str| {
        let options = format!("--switch {switch} --address 10.9.0.2/24 --address fd09::2/64");
        lab.script(&options, script).finish(MOMENT)
    };
    let ping = "ping -c2 -i0.1 -w60 10.9.0.1 && ping -c2 -i0.1 -w60 fd09::1";
    let here = from("blue", ping);
    assert_eq!(here.status, Some(0), "{here:?}");
    for script in ["ping -c2 -i0.1 -W1 10.9.0.1", "ping -c2 -i0.1 -W1 fd09::1"] {
        let there = from("green", script);
        assert_eq!(there.status, Some(1), "{there:?}");
        assert!(there.stdout.contains(" 0 received"), "{there:?}");
    }
    let blue = lab.stats("blue");
    assert_eq!(ports(&blue), 1, "{blue:?}");
    target.end();
}

#[test]
fn address_or_name_in_use_is_refused() {
    require!(Need::Guests);
    let lab = Lab::new();
    let first = lab.run("--switch s --name a --address 10.9.0.1/24", &["sleep", "300"]);
    first.wait_up();
    let refused = |options: &str| {
        let finished = lab.run(&format!("--switch s {options}"), &["true"]).finish(MOMENT);
        assert_eq!(finished.status, Some(125), "{finished:?}");
        assert_eq!(finished.stdout, "");
        finished.stderr
    };
    let said = refused("--address 10.9.0.1/24");
    assert!(said.contains("10.9.0.1"), "{said}");
    let said = refused("--name a");
    assert!(said.contains("the name `a` is taken"), "{said}");
    let said = refused("--name A");
    assert!(said.contains("the name `a` is taken"), "letters have no case: {said}");
    // A refused guest holds nothing, not even the address that came with a name in use.
    refused("--name a --address 10.9.0.7/24");
    let free = lab.run("--switch s --name b --address 10.9.0.7/24", &["true"]);
    free.succeed(MOMENT);
    assert_eq!(ports(&lab.stats("s")), 1);
    first.end();
    let next = lab.run("--switch s --name a --address 10.9.0.1/24", &["true"]);
    next.succeed(MOMENT);
    lab.assert_no_switch();
}

/// The test's own network namespace takes the place of the host.
#[test]
fn host_tap_connects_host_to_switch() {
    require!(Need::Guests, Need::Root, CURL, PYTHON, PING, IP);
    let lab = Lab::new();
    std::fs::write(lab.file("hello"), "hello\n").unwrap();
    let program = env!("CARGO_BIN_EXE_ringfence");
    let host = format!(
        "ip link set lo up\n\
         {program} run --switch s --name web --host-tap rf0 -- python3 -m http.server 2>web.err &\n\
         web=$!\n\
         until grep -q 'is the host.s leg' web.err && grep -q 'eth0: ' web.err; do \
           kill -0 $web; sleep 0.05; done\n\
         sed -n 's/.*: rf0 (\\([0-9.]*\\).*/\\1/p' web.err > leg\n\
         sed -n 's/.*eth0: \\([0-9.]*\\).*/\\1/p' web.err > guest\n\
         until curl -sf http://$(cat guest):8000/hello; do sleep 0.1; done\n\
         ping -c1 -W20 -s 1400 $(cat guest)\n\
         python3 -m http.server --bind $(cat leg) 9000 2>host.log & host=$!\n\
         {program} run -q --switch s -- curl -sSf --retry 10 --retry-connrefused \
           http://$(cat leg):9000/hello\n\
         {program} run -q --switch s -- ping -c1 -W20 -s 20000 $(cat leg)\n\
         if {program} run --switch s --host-tap rf1 -- true; then exit 9; fi\n\
         kill $host; kill $web; wait $web || true\n\
         for i in $(seq 400); do ip link show rf0 2>/dev/null || break; sleep 0.05; done\n\
         ! ip link show rf0 2>/dev/null\n"
    );
    let outer = lab.spawn(&["unshare", "--net", "sh", "-ec", &host]);
    let finished = outer.finish(Duration::from_secs(60));
    let web = lab.read("web.err");
    assert_eq!(finished.status, Some(0), "{finished:?}\n{web}");
    assert_eq!(finished.stdout.matches("hello\n").count(), 2, "{finished:?}");
    assert_eq!(finished.stdout.matches("1 received, 0% packet loss").count(), 2, "{finished:?}");
    assert!(finished.stderr.contains("has a leg on this switch already"), "{finished:?}");
    assert!(!std::path::Path::new("/sys/class/net/rf0").exists(), "it was made on the real host");
    lab.assert_no_switch();
}

#[test]
fn damage_counters_are_parsed_from_kernel_files() {
    let snmp = "Ip: Forwarding InHdrErrors\nIp: 1 3\nTcp: InErrs InCsumErrors\nTcp: 4 5\n\
                Ip6InHdrErrors                  \t6\nUdpLite: InCsumErrors\nUdpLite: 9\n";
    let found = damage(snmp);
    let expected = [("Ip:InHdrErrors", 3), ("Tcp:InCsumErrors", 5), ("Ip6InHdrErrors", 6)];
    assert_eq!(found, expected.map(|(name, count)| (name.to_owned(), count)));
}

//! End-to-end tests of `ringfence run --uplink host`. The host of a guest is a network namespace, and servers and
//! clients are in another one. The tests compare transferred data by hash.

use std::time::Duration;

use crate::require;
use crate::support::needs::{Need, skip_for_the_kernel};
use crate::support::world::{
    FAR_V4, FAR_V6, Families, HOST_V4, HOST_V6, OUTSIDE_V4, OUTSIDE_V6, World, name_server,
};
use crate::support::{MOMENT, write_noise};
use ringfence_driver::switch::addresses::AddressPlan;
use ringfence_hostnet::address::Address;

const PING: Need = Need::Program("ping", "iputils-ping");
const DNSMASQ: Need = Need::Program("dnsmasq", "dnsmasq-base");
const BUSYBOX: Need = Need::Program("busybox", "busybox");

/// Time limit for a complete guest.
const LONG: Duration = Duration::from_secs(90);

/// Creates a world with both families, or returns from the test.
macro_rules! world {
    ($families:expr) => {
        match World::new($families) {
            Some(world) => world,
            None => return,
        }
    };
}

/// Transfers data over TCP in both directions, with a server at each address.
fn tcp_both_ways(world: &World, options: &str, addresses: &[&str]) {
    write_noise(&world.file("noise"), 8);
    let servers: Vec<_> =
        addresses.iter().map(|address| world.server("tcp_server", address, 7000)).collect();
    let script: String =
        addresses.iter().map(|ip| format!("python3 peer.py tcp_client {ip} 7000; ")).collect();
    let output = world.lone_guest(options, &script).succeed(LONG);
    assert_eq!(output.matches("equal").count(), addresses.len(), "{output}");
    servers.into_iter().for_each(|server| drop(server.end()));
}

#[test]
fn tcp_data_arrives_undamaged_in_both_directions() {
    let world = world!(Families::Both);
    tcp_both_ways(&world, "", &[OUTSIDE_V4, OUTSIDE_V6, FAR_V4, FAR_V6]);
}

#[test]
fn tcp_data_arrives_undamaged_with_ethernet_mtu() {
    let world = world!(Families::Both);
    tcp_both_ways(&world, "--mtu 1500", &[OUTSIDE_V4, OUTSIDE_V6]);
}

#[test]
#[ignore = "long: several worlds"]
fn guest_uses_host_with_one_address_family() {
    for (families, near, far) in
        [(Families::V4, OUTSIDE_V4, FAR_V4), (Families::V6, OUTSIDE_V6, FAR_V6)]
    {
        let world = world!(families);
        tcp_both_ways(&world, "", &[near, far]);
    }
}

#[test]
#[ignore = "long: hundreds of transfers"]
fn hundreds_of_connections_transfer_at_once() {
    let world = world!(Families::V4);
    std::fs::write(world.file("noise"), vec![7; 20_000]).unwrap();
    let server = world.server("tcp_server", FAR_V4, 7000);
    let script = format!("ulimit -n 1024; python3 peer.py many {FAR_V4} 7000");
    let output = world.lone_guest("", &script).succeed(LONG);
    assert!(output.contains("equal"), "{output}");
    server.end();
}

#[test]
#[ignore = "long: datagrams of every length class"]
fn datagram_of_any_length_is_echoed() {
    let world = world!(Families::Both);
    write_noise(&world.file("noise"), 1);
    let mut servers = Vec::new();
    let addresses = [OUTSIDE_V4, OUTSIDE_V6, FAR_V4];
    for address in addresses {
        servers.push(world.server("udp_server", address, 7001));
    }
    // Datagrams longer than the MTU are fragmented in both directions.
    for options in ["", "--mtu 1500"] {
        let script = addresses.map(|ip| format!("python3 peer.py udp_client {ip} 7001; "));
        let script = script.concat();
        let output = world.lone_guest(options, &script).succeed(LONG);
        assert_eq!(output.matches("equal").count(), 3, "{output}");
    }
    servers.into_iter().for_each(|server| drop(server.end()));
}

#[test]
fn echo_request_is_answered() {
    require!(PING);
    let world = world!(Families::Both);
    let script: String = [OUTSIDE_V4, FAR_V4, OUTSIDE_V6, FAR_V6]
        .iter()
        .flat_map(|ip| [0, 56, 1400, 9000].map(|size| format!("ping -c 1 -W 20 -s {size} {ip}; ")))
        .collect();
    for options in ["", "--mtu 1500"] {
        let output = world.lone_guest(options, &script).succeed(LONG);
        assert_eq!(output.matches(" 0% packet loss").count(), 16, "{output}");
    }
}

/// Two workers, on a machine with two processors. The kernel chooses the worker of a packet.
#[test]
fn flows_use_several_queues() {
    require!(PING);
    let world = world!(Families::Both);
    write_noise(&world.file("noise"), 1);
    let servers = [FAR_V4, FAR_V6].map(|ip| world.server("tcp_server", ip, 7000));
    let echo = world.server("udp_server", FAR_V4, 7001);
    let options = "--queues 2 --mtu 1500 -p 8080:7000 -p 8053:7001/udp";
    // With -W, once an answer has come, `ping` waits for the others two times as long as for that one.
    let script = format!(
        "python3 peer.py tcp_server {HOST_V4} 7000 & python3 peer.py udp_server 0.0.0.0 7001 & \
         until [ -e start ]; do sleep 0.05; done; \
         for i in $(seq 4); do python3 peer.py udp_client {FAR_V4} 7001; done; \
         for ip in {FAR_V4} {FAR_V6}; do ping -c 2 -w 60 -s 4000 $ip; \
           for i in $(seq 4); do python3 peer.py tcp_client $ip 7000; done; done; \
         until [ -e stop ]; do sleep 0.05; done"
    );
    let guest = world.lone_guest(options, &script);
    guest.wait_for_output("listening\nlistening");
    std::fs::write(world.file("start"), "").unwrap();
    for (mode, port) in [("tcp_clients_late", 8080), ("udp_client", 8053), ("udp_client", 8053)] {
        let words = ["python3", "peer.py", mode, HOST_V4, &port.to_string()];
        let output = world.outside(&words).succeed(LONG);
        let due = if mode == "udp_client" { 1 } else { 8 };
        assert_eq!(output.matches("equal").count(), due, "{mode}: {output}");
    }
    std::fs::write(world.file("stop"), "").unwrap();
    let output = guest.succeed(LONG);
    assert_eq!(output.matches(" 0% packet loss").count(), 2, "{output}");
    assert_eq!(output.matches("equal").count(), 12, "{output}");
    servers.into_iter().for_each(|server| drop(server.end()));
    echo.end();
}

/// Returns the bytes that each queue of the guest `web` has received, by `ringfence status`.
fn received_by_queue(world: &World) -> Vec<u64> {
    let words = [world.lab.program(), "status", "--json", "web"];
    let status = world.host(&words).succeed(MOMENT);
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let queues = status["uplink_queues"].as_array().unwrap();
    queues.iter().map(|queue| queue["tcp_bytes_out"].as_u64().unwrap_or(0)).collect()
}

/// Transfers, one after the other, so that a change of the counters belongs to one of them.
#[test]
fn each_connection_stays_on_one_queue_and_connections_use_all_queues() {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    if processors < 2 {
        return skip_for_the_kernel("there is one processor, so there is one queue");
    }
    let world = world!(Families::Both);
    write_noise(&world.file("noise"), 1);
    let servers = [FAR_V4, FAR_V6].map(|ip| world.server("tcp_server", ip, 7000));
    let script = "until [ -e stop ]; do sleep 0.05; done";
    let guest = world.guest("--name web --queues auto", script);
    guest.wait_up();
    let mut before = received_by_queue(&world);
    let count = before.len();
    assert!((2..=processors.min(8)).contains(&count), "{count} queues on {processors} processors");
    let mut used = vec![false; count];
    for ip in [FAR_V4, FAR_V6].into_iter().cycle().take(40) {
        let client = ["exec", "web", "--", "python3", "peer.py", "tcp_client", ip, "7000"];
        let words = [&[world.lab.program()][..], &client].concat();
        world.host(&words).succeed(LONG);
        let now = received_by_queue(&world);
        let grown: Vec<usize> = (0..count).filter(|&at| now[at] > before[at]).collect();
        assert_eq!(grown.len(), 1, "{ip}: from {before:?} to {now:?}");
        used[grown[0]] = true;
        before = now;
        if used.iter().all(|used| *used) {
            break;
        }
    }
    assert!(used.iter().all(|used| *used), "{before:?}");
    let text = world.host(&[world.lab.program(), "status", "web"]).succeed(MOMENT);
    assert!(text.contains("up0.1:          ") && text.contains(" handed over"), "{text}");
    std::fs::write(world.file("stop"), "").unwrap();
    guest.succeed(MOMENT);
    servers.into_iter().for_each(|server| drop(server.end()));
}

/// A guest's port has one host port for all peers (RFC 4787, REQ-1), whatever queue its datagrams take.
#[test]
fn udp_port_has_one_host_port_for_all_peers_over_several_queues() {
    let world = world!(Families::V4);
    let mirrors = [FAR_V4, OUTSIDE_V4].map(|ip| world.server("udp_mirror", ip, 7001));
    let script = format!(
        "import socket\n\
         for port in range(30000, 30020):\n\
        \x20   s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
        \x20   s.bind(('0.0.0.0', port)); s.settimeout(20)\n\
        \x20   seen = set()\n\
        \x20   for peer in ('{FAR_V4}', '{OUTSIDE_V4}'):\n\
        \x20       s.sendto(b'x', (peer, 7001)); seen.add(s.recv(100))\n\
        \x20   print('ports', len(seen), flush=True)\n"
    );
    std::fs::write(world.file("ports.py"), script).unwrap();
    let output = world.lone_guest("--queues auto", "python3 ports.py").succeed(LONG);
    assert_eq!(output.matches("ports 1\n").count(), 20, "{output}");
    mirrors.into_iter().for_each(|mirror| drop(mirror.end()));
}

#[test]
fn uplink_is_created_by_default() {
    require!(DNSMASQ);
    let world = world!(Families::Both);
    let server = world.outside(&name_server(OUTSIDE_V4));
    world.name_servers(&[OUTSIDE_V4]);
    // The same resolver knows names of guests and of the world, also over TCP.
    let first = world.guest("--name first", "until [ -e stop ]; do sleep 0.05; done");
    first.wait_for_error("is on the host's network");
    let script = format!(
        "getent hosts first; {LOOK_UP}; ip -6 route show default; \
         python3 -c 'import os; print(os.path.getsize(\"/etc/resolv.conf\") > 0)'; touch stop"
    );
    let output = world.guest("", &script).succeed(LONG);
    assert!(output.contains(FAR_V4) && output.contains(FAR_V6), "{output}");
    assert!(output.contains("first"), "{output}");
    assert_eq!(output.matches("default via").count(), 1, "{output}");
    first.succeed(MOMENT);
    server.end();
}

#[test]
fn switch_avoids_networks_of_host() {
    let world = world!(Families::Both);
    let usual = AddressPlan::new("default").assign(1, None, &[]).unwrap().addresses;
    // Until duplicate address detection is over, an IPv6 address is none of the host's.
    let nodad = |a: &Address| if a.to_string().contains(':') { "nodad" } else { "" };
    let add = usual.iter().map(|a| format!("ip addr add {a} dev wan0 {}; ", nodad(a)));
    let add: String = add.collect();
    world.host(&["sh", "-ec", &add]).succeed(MOMENT);
    let script = "ip -o addr show eth0 > eth0; ip -o addr show up0 > up0";
    let guest = world.plain_guest("", script).finish(LONG);
    assert_eq!(guest.status, Some(0), "{}", guest.stderr);
    assert!(!guest.stderr.contains("no uplink"), "{}", guest.stderr);
    let [switch, host] = ["eth0", "up0"].map(|name| world.lab.read(name));
    let addresses = |text: &str| -> Vec<Address> {
        text.split_whitespace().filter_map(|word| word.parse().ok()).collect()
    };
    assert!(usual.iter().all(|a| addresses(&host).contains(a)), "{host}");
    let on_switch = addresses(&switch);
    assert!(on_switch.len() >= usual.len(), "{switch}");
    assert!(!on_switch.iter().any(|a| usual.iter().any(|b| a.overlaps(*b))), "{switch}");
}

#[test]
fn guest_of_host_without_network_has_private_addresses() {
    let world = world!(Families::Both);
    world.host(&["sh", "-ec", "ip link del wan0"]).succeed(MOMENT);
    for options in ["", "--uplink host --switch none"] {
        let guest = world.plain_guest(options, "ip -o addr show dev up0").finish(LONG);
        assert_eq!(guest.status, Some(0), "{}", guest.stderr);
        assert!(guest.stdout.contains("10.0.2.100/24"), "{}", guest.stdout);
        let said = "the host has no network now";
        // Long lines are wrapped.
        let whole = guest.stderr.replace("\nringfence:   ", " ");
        assert_eq!(whole.matches(said).count(), 1, "{}", guest.stderr);
    }
}

const LOOK_UP: &str = "for i in $(seq 50); do getent ahostsv4 www.far.example && break; sleep 0.1; done; \
                       getent ahostsv6 www.far.example; ! getent hosts unknown.example";

#[test]
fn names_are_resolved_by_name_servers_of_host() {
    require!(DNSMASQ);
    let world = world!(Families::Both);
    // Three cases: a server that the guest can reach as the host does, one that only the host can reach, and both.
    let outside = world.outside(&name_server(OUTSIDE_V4));
    let inside = world.host(&name_server("127.0.0.53"));
    for servers in [&[OUTSIDE_V4][..], &["127.0.0.53"], &["127.0.0.53", OUTSIDE_V4]] {
        world.name_servers(servers);
        let output = world.lone_guest("", LOOK_UP).succeed(LONG);
        assert!(output.contains(FAR_V4) && output.contains(FAR_V6), "{servers:?}: {output}");
    }
    drop((outside.end(), inside.end()));
}

#[test]
fn name_server_of_one_link_is_asked_by_the_interface_that_its_zone_names() {
    require!(DNSMASQ);
    let world = world!(Families::Both);
    world.outside(&["ip", "addr", "add", "fe80::53/64", "dev", "out0", "nodad"]).succeed(MOMENT);
    let mut words = name_server(OUTSIDE_V4);
    words.pop();
    words.push("--interface=out0".to_owned());
    let server = world.outside(&words);
    world.name_servers(&["fe80::53%wan0"]);
    let output = world.lone_guest("", LOOK_UP).succeed(LONG);
    assert!(output.contains(FAR_V4) && output.contains(FAR_V6), "{output}");
    server.end();
}

#[test]
fn client_at_an_address_of_the_host_that_the_guest_does_not_share_is_known_by_it() {
    let world = world!(Families::V4);
    write_noise(&world.file("noise"), 1);
    let add = "ip link add docker0 type veth peer name docker1; ip addr add 172.17.0.1/16 dev docker0; \
               ip link set docker0 up; ip link set docker1 up";
    world.host(&["sh", "-ec", add]).succeed(MOMENT);
    let script = format!(
        "python3 peer.py tcp_server {HOST_V4} 7000 & python3 peer.py udp_server 0.0.0.0 7001 & \
         until [ -e stop ]; do sleep 0.05; done"
    );
    let guest = world.lone_guest("-p 8080:7000 -p 8053:7001/udp", &script);
    guest.wait_for_output("listening\nlistening");
    for (mode, port) in [("tcp_client", "8080"), ("udp_client", "8053")] {
        let output = world.host(&["python3", "peer.py", mode, "172.17.0.1", port]).succeed(LONG);
        assert!(output.contains("equal"), "{mode}: {output}");
    }
    std::fs::write(world.file("stop"), "").unwrap();
    let output = guest.succeed(MOMENT);
    let known: Vec<_> = output.lines().filter(|line| line.starts_with("client ")).collect();
    assert!(known.len() > 1 && known.iter().all(|line| *line == "client 172.17.0.1"), "{output}");
}

#[test]
fn range_beyond_the_limit_of_open_files_is_refused_with_the_limit() {
    let world = world!(Families::Both);
    let run = ["prlimit", "--nofile=1024:1024", world.lab.program(), "run", "--uplink", "host"];
    let start = |ports| [&run[..], &["--switch", "none", "-p", ports, "--", "true"]].concat();
    let refused = world.host(&start("20000-20999")).finish(LONG);
    assert_eq!(refused.status, Some(125), "{}", refused.stderr);
    let said = refused.stderr.replace("\nringfence:   ", " ");
    assert!(said.contains("the limit of open files is 1024"), "{said}");
    assert!(said.contains("--publish-default IP"), "{said}");
    world.host(&start("127.0.0.1:20000-20599")).succeed(LONG);
}

#[test]
fn published_port_reaches_guest_with_address_of_client() {
    let world = world!(Families::Both);
    write_noise(&world.file("noise"), 2);
    // Ports of an ordinary user, a range, another address, and UDP.
    let options = "-p 8080:7000 -p 9000-9002:7000 -p 8053:7001/udp -p 127.0.0.1:8081:7000";
    let script = "python3 peer.py tcp_server 0.0.0.0 7000 & python3 peer.py udp_server 0.0.0.0 7001 & \
                  python3 peer.py tcp_server :: 7000 2>/dev/null & \
                  until [ -e stop ]; do sleep 0.05; done";
    let script = script.replace("tcp_server 0.0.0.0 7000", &format!("tcp_server {HOST_V4} 7000"));
    let script = script.replace("tcp_server :: 7000", &format!("tcp_server {HOST_V6} 7000"));
    let guest = world.lone_guest(options, &script);
    guest.wait_for_output("listening\nlistening\nlistening");
    let client = |mode: &str, address: &str, port: u16| {
        let words = ["python3", "peer.py", mode, address, &port.to_string()];
        let output = world.outside(&words).succeed(LONG);
        assert!(output.contains("equal"), "{mode} {address} {port}: {output}");
    };
    client("tcp_client", HOST_V4, 8080);
    client("tcp_client", HOST_V6, 8080);
    client("tcp_client", HOST_V4, 9000);
    client("udp_client", HOST_V4, 8053);
    // This port listens only at the host's loopback.
    let local = world.host(&["python3", "peer.py", "tcp_client", "127.0.0.1", "8081"]);
    assert!(local.succeed(LONG).contains("equal"));
    world.outside(&["python3", "peer.py", "refused", HOST_V4, "8081"]).succeed(LONG);
    std::fs::write(world.file("stop"), "").unwrap();
    let output = guest.succeed(MOMENT);
    for client in [OUTSIDE_V4, OUTSIDE_V6] {
        assert!(output.contains(&format!("client {client}\n")), "{output}");
    }
}

#[test]
fn guest_port_has_one_host_port_for_all_peers() {
    let world = world!(Families::Both);
    let pairs = [(FAR_V4, OUTSIDE_V4), (FAR_V6, OUTSIDE_V6)];
    let all = pairs.iter().flat_map(|(a, b)| [a, b]);
    let servers: Vec<_> = all.map(|ip| world.server("udp_mirror", ip, 7001)).collect();
    let script =
        pairs.map(|(a, b)| format!("python3 peer.py udp_identity {a},{b} 7001; ")).concat();
    // The host's port is that of the guest, another one if that is in use, or the published one.
    let holder = "import socket, time; s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM); \
                  s.bind(('', 41641)); print('bound', flush=True); time.sleep(99)";
    for (options, expected) in [
        ("", Some("41641")),
        ("-p 41642:41641/udp", Some("41642")),
        ("-p 41641:41641/udp -p 127.0.0.1:41643:41641/udp", Some("41641")),
        ("", None),
    ] {
        let held = expected.is_none().then(|| {
            let held = world.host(&["python3", "-c", holder]);
            held.wait_for_output("bound");
            held
        });
        let output = world.lone_guest(options, &script).succeed(LONG);
        let known: Vec<_> = output.lines().filter_map(|l| l.strip_prefix("known by ")).collect();
        assert_eq!(known.len(), 2, "{output}");
        // Each mirror has answered from another port first. A published port hears everybody.
        let strangers = if options.is_empty() { "strangers 0" } else { "strangers 4" };
        assert_eq!(output.matches(strangers).count(), 2, "{options}: {output}");
        for ports in known {
            assert_eq!(ports.split(' ').count(), 1, "{options}: {output}");
            match expected {
                Some(expected) => assert_eq!(ports, expected, "{options}: {output}"),
                None => assert_ne!(ports, "41641", "{output}"),
            }
        }
        held.into_iter().for_each(|held| drop(held.end()));
    }
    servers.into_iter().for_each(|server| drop(server.end()));
}

#[test]
fn datagrams_keep_traffic_class_and_hop_limit() {
    let world = world!(Families::Both);
    let addresses = [FAR_V4, FAR_V6];
    let servers = addresses.map(|ip| world.server("marks_server", ip, 7001));
    let script = addresses.map(|ip| format!("python3 peer.py marks_client {ip} 7001; ")).concat();
    let output = world.lone_guest("", &script).succeed(LONG);
    // The router is in the namespace of the server, so no hop is counted.
    let one = "marks 1 [33, 185] answer 107\nmarks 1 [0, 64] answer 107\n";
    assert_eq!(output, one.repeat(2));
    servers.into_iter().for_each(|server| drop(server.end()));
}

#[test]
fn connection_keeps_dscp_that_changes_while_it_is_open() {
    let world = world!(Families::Both);
    for ip in [FAR_V4, FAR_V6] {
        let server = world.server("tcp_marks_server", ip, 7000);
        world.lone_guest("", &format!("python3 peer.py tcp_marks_client {ip} 7000")).succeed(LONG);
        let output = server.succeed(LONG);
        assert!(output.contains("dscp 10 46 0\n"), "{output}");
    }
}

#[test]
fn echo_reply_keeps_its_hop_limit() {
    require!(PING);
    let world = world!(Families::V4);
    world.outside(&["sysctl", "-qw", "net.ipv4.ip_default_ttl=77"]).succeed(MOMENT);
    let output = world.lone_guest("", &format!("ping -c 1 -W 20 {FAR_V4}")).succeed(LONG);
    assert!(output.contains("ttl=77 "), "{output}");
}

/// Addresses behind a link that carries packets of at most 1300 bytes, with a server of datagrams.
const NARROW_V4: &str = "203.0.113.9";
const NARROW_V6: &str = "2001:db8:2::9";

/// Adds the link behind the router of a world.
fn narrow(world: &World) -> crate::support::Running {
    let inside = format!(
        "echo $$ > narrow.new; mv narrow.new narrow; \
         until ip link set nar1 mtu 1300 up 2> /dev/null; do sleep 0.05; done; \
         ip link set lo up; ip addr add {NARROW_V4}/24 dev nar1; ip route add default via 203.0.113.1; \
         ip addr add {NARROW_V6}/64 dev nar1 nodad; ip -6 route add default via 2001:db8:2::1; \
         exec python3 peer.py udp_server :: 7001"
    );
    let files = world.file("").to_str().unwrap().to_owned();
    let server =
        world.outside(&["unshare", "--net", "sh", "-ec", &format!("cd {files}; {inside}")]);
    let router = format!(
        "cd {files}; until [ -e narrow ]; do sleep 0.05; done; \
         sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1; \
         ip link add nar0 mtu 1300 type veth peer name nar1 netns $(cat narrow); \
         ip addr add 203.0.113.1/24 dev nar0; ip addr add 2001:db8:2::1/64 dev nar0 nodad; ip link set nar0 up"
    );
    world.outside(&["sh", "-ec", &router]).succeed(MOMENT);
    server.wait_for_output("listening");
    server
}

#[test]
fn path_mtu_is_discovered_by_datagrams_that_must_not_be_fragmented() {
    let world = world!(Families::Both);
    write_noise(&world.file("noise"), 1);
    let server = narrow(&world);
    let script =
        [NARROW_V4, NARROW_V6].map(|ip| format!("python3 peer.py path_mtu {ip} 7001; ")).concat();
    let output = world.lone_guest("", &script).succeed(LONG);
    assert_eq!(output, "path 2 1300 1300\npath 3 1300 1300\n".repeat(2));
    // Without an address for which it is known, a program that asks has the answer all the same.
    let script = format!("python3 peer.py path_mtu_alone {FAR_V4} 7009");
    let output = world.lone_guest("", &script).succeed(LONG);
    assert_eq!(output, format!("report EMSGSIZE 3 4 1500 {OUTSIDE_V4}\n"));
    drop(server.end());
}

#[test]
fn long_datagram_of_a_program_that_does_not_ask_for_the_path_is_fragmented() {
    let world = world!(Families::Both);
    write_noise(&world.file("noise"), 1);
    let servers = [FAR_V4, FAR_V6].map(|ip| world.server("udp_server", ip, 7001));
    let script =
        [FAR_V4, FAR_V6].map(|ip| format!("python3 peer.py udp_long {ip} 7001; ")).concat();
    let output = world.lone_guest("", &script).succeed(LONG);
    assert_eq!(output.matches("equal").count(), 2, "{output}");
    servers.into_iter().for_each(|server| drop(server.end()));
}

#[test]
fn error_about_a_datagram_has_its_type_code_and_reporter() {
    let world = world!(Families::Both);
    let add = "ip route add prohibit 203.0.113.1; ip route add unreachable 203.0.113.2; \
               ip -6 route add prohibit 2001:db8:9::1; ip -6 route add unreachable 2001:db8:9::2; \
               ip route add 203.0.113.3 via 192.0.2.2; ip -6 route add 2001:db8:9::3 via 2001:db8:1::2; \
               sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv4.icmp_ratelimit=0 \
               net.ipv6.icmp.ratelimit=0";
    world.outside(&["sh", "-ec", add]).succeed(MOMENT);
    let script = [
        [1, 2, 3].map(|n| format!("203.0.113.{n}")),
        [1, 2, 3].map(|n| format!("2001:db8:9::{n}")),
    ]
    .map(|ips| format!("python3 peer.py reports {} 7001; ", ips.join(",")))
    .concat();
    let expected = world.host(&["sh", "-ec", &script]).succeed(LONG);
    let output = world.lone_guest("", &script).succeed(LONG);
    assert_eq!(output, expected);
    for report in [
        "EHOSTUNREACH 3 13 0 192.0.2.1",
        "EHOSTUNREACH 11 0 0 192.0.2.1",
        "EACCES 1 1 0 2001:db8:1::1",
    ] {
        assert!(output.contains(&format!("report {report}\n")), "{output}");
    }
}

#[test]
fn unreachable_network_is_reported_as_on_the_host() {
    let world = world!(Families::Both);
    let remove = "ip route del default; ip -6 route del default; \
                  ip route add unreachable 203.0.113.0/24; ip -6 route add unreachable 2001:db8:99::/48";
    let connect = "import errno, socket\nfor ip in ['198.51.100.9', '203.0.113.9', '2001:db8:ffff::9', '2001:db8:99::9']:\n \
                   s = socket.socket(socket.AF_INET6 if ':' in ip else socket.AF_INET)\n \
                   s.settimeout(20)\n print(ip, errno.errorcode.get(s.connect_ex((ip, 7000))))\n";
    // The guest keeps its default routes.
    let script = "touch ready; until [ -e go ]; do sleep 0.05; done; python3 connect.py";
    std::fs::write(world.file("connect.py"), connect).unwrap();
    let guest = world.lone_guest("", script);
    let is_ready = crate::support::eventually(LONG, || world.file("ready").exists());
    assert!(is_ready);
    world.host(&["sh", "-ec", remove]).succeed(MOMENT);
    let expected = world.host(&["python3", "connect.py"]).succeed(MOMENT);
    std::fs::write(world.file("go"), "").unwrap();
    let output = guest.succeed(LONG);
    assert!(expected.contains("ENETUNREACH") && expected.contains("EHOSTUNREACH"), "{expected}");
    assert_eq!(output, expected);
}

#[test]
fn published_udp_port_answers_at_each_ipv6_address_of_the_host() {
    let world = world!(Families::V6);
    write_noise(&world.file("noise"), 1);
    let others = ["2001:db8:1::7", "2001:db8:1::9"];
    let add = others.map(|ip| format!("ip addr add {ip}/64 dev wan0 nodad; ")).concat();
    world.host(&["sh", "-ec", &add]).succeed(MOMENT);
    let script = "python3 peer.py udp_server :: 7001 & until [ -e stop ]; do sleep 0.05; done";
    let guest = world.lone_guest("-p 8053:7001/udp", script);
    guest.wait_for_output("listening");
    for ip in [HOST_V6, others[0], others[1]] {
        let output = world.outside(&["python3", "peer.py", "udp_client", ip, "8053"]).succeed(LONG);
        assert!(output.contains("equal"), "{ip}: {output}");
    }
    std::fs::write(world.file("stop"), "").unwrap();
    guest.succeed(MOMENT);
}

#[test]
fn address_that_is_tentative_at_the_start_serves_the_guest() {
    let world = world!(Families::V6);
    write_noise(&world.file("noise"), 1);
    let server = world.server("tcp_server", OUTSIDE_V6, 7000);
    // Without its other address, the host has no IPv6 until duplicate address detection is over.
    let add = format!(
        "ip addr del {HOST_V6}/64 dev wan0; sysctl -qw net.ipv6.conf.wan0.accept_dad=1 \
         net.ipv6.conf.wan0.dad_transmits=3; ip addr add {HOST_V6}/64 dev wan0; \
         ip -6 route replace default via {OUTSIDE_V6}; ip -6 addr show dev wan0 tentative"
    );
    let said = world.host(&["sh", "-ec", &add]).succeed(MOMENT);
    assert!(said.contains(HOST_V6), "not tentative: {said}");
    let script = format!(
        "ip -6 -o addr show dev up0; for i in $(seq 100); do \
         python3 peer.py tcp_client {OUTSIDE_V6} 7000 2>/dev/null && exit 0; sleep 0.1; done; exit 1"
    );
    let output = world.lone_guest("", &script).succeed(LONG);
    assert!(output.contains(HOST_V6) && output.contains("equal"), "{output}");
    server.end();
}

#[test]
fn host_loopback_is_reachable_only_with_option() {
    let world = world!(Families::V4);
    write_noise(&world.file("noise"), 1);
    let server = world.host(&["python3", "peer.py", "tcp_server", "127.0.0.1", "7000"]);
    server.wait_for_output("listening");
    let script = "for ip in 127.0.0.1 192.0.2.2 192.0.2.99 169.254.53.254; do \
                  python3 peer.py refused $ip 7000; done";
    let output = world.lone_guest("", script).succeed(LONG);
    assert_eq!(
        output.matches("refused [").count() + output.matches("timed out").count(),
        4,
        "{output}"
    );
    let script =
        "python3 peer.py tcp_client 192.0.2.99 7000; python3 peer.py refused 127.0.0.1 7000";
    let output = world.lone_guest("--host-loopback 192.0.2.99", script).succeed(LONG);
    assert!(output.contains("equal") && output.contains("refused"), "{output}");
    server.end();
}

#[test]
fn dhcp_returns_configured_address() {
    require!(BUSYBOX);
    let world = world!(Families::Both);
    world.name_servers(&[OUTSIDE_V4]);
    let lease = world.file("lease");
    std::fs::write(&lease, "#!/bin/sh\n[ \"$1\" != bound ] || env > told\n").unwrap();
    let script = "chmod +x lease; busybox udhcpc -i up0 -n -q -f -t 5 -T 1 -s ./lease";
    world.lone_guest("", script).succeed(LONG);
    let told = world.lab.read("told");
    for line in ["ip=192.0.2.2", "router=192.0.2.1", "dns=192.0.2.1", "mask=24"] {
        assert!(told.lines().any(|told| told == line), "no {line}: {told}");
    }
}

#[test]
fn guest_reaches_switch_and_host_network() {
    require!(PING);
    let world = world!(Families::Both);
    write_noise(&world.file("noise"), 1);
    let server = world.server("tcp_server", FAR_V4, 7000);
    let script = "until [ -e stop ]; do sleep 0.05; done";
    let first = world.guest("--uplink host --name first", script);
    first.wait_for_error("is on the host's network");
    let script =
        format!("ping -c 1 -W 20 first; python3 peer.py tcp_client {FAR_V4} 7000; touch stop");
    let output = world.guest("--uplink host", &script).succeed(LONG);
    assert!(output.contains("equal"), "{output}");
    first.succeed(MOMENT);
    server.end();
}

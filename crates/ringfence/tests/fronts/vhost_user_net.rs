//! End-to-end tests of `ringfence vhost-user net`: a virtual machine on the host's network, on a switch with a guest of
//! `run`, and on a TAP. The machine is a namespace whose network card is on the socket (`machine.py`).

use ringfence_memory::DeviceAccess;
use ringfence_vhost_user::testing::{FrontShape, Frontend};
use ringfence_wire::virtio::feature;
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::Signal;

use crate::require;
use crate::support::machine::{self, CONFIGURE};
use crate::support::needs::Need;
use crate::support::world::{FAR_V4, FAR_V6, Families, HOST_V4, World};
use crate::support::{MOMENT, Running, eventually, write_noise};

/// Time limit for a complete scenario.
const LONG: std::time::Duration = std::time::Duration::from_secs(90);

/// Addresses of the machine and of a guest on its switch.
const MACHINE: &str = "10.9.0.2";
const GUEST: &str = "10.9.0.3";

/// Creates a world with both families and the files of a machine, or returns from the test.
macro_rules! world {
    () => {{
        require!(Need::Program("busybox", "busybox"));
        match World::new(Families::Both) {
            Some(world) => {
                write_noise(&world.file("noise"), 4);
                machine::prepare(&world);
                world
            }
            None => return,
        }
    }};
}

/// Starts the command with these options, and waits until it serves.
fn net(world: &World, options: &str) -> Running {
    let mut words = vec![world.lab.program(), "vhost-user", "net", "--socket", "vm.socket"];
    words.extend(options.split_whitespace());
    let running = world.host(&words);
    let is_uplink = options.contains("--uplink");
    running.wait_for_error(if is_uplink { "listens at " } else { "vm.socket leads to" });
    running
}

/// Starts a machine whose card is attached there.
fn machine(world: &World, attach: &str, script: &str) -> Running {
    world.host(&["python3", "machine.py", attach, script])
}

fn status(world: &World) -> String {
    world.host(&[world.lab.program(), "status", "--socket", "status"]).succeed(MOMENT)
}

/// Waits until the status has this text.
fn wait_for_status(world: &World, text: &str) {
    let found = eventually(MOMENT, || status(world).contains(text));
    assert!(found, "{text}: {}", status(world));
}

/// Returns a counter of the card from the status as JSON.
fn traffic(world: &World, name: &str) -> u64 {
    let words = [world.lab.program(), "status", "--json", "--socket", "status"];
    let ask = || -> serde_json::Value {
        serde_json::from_str(&world.host(&words).succeed(MOMENT)).unwrap()
    };
    // Beside a load the process may answer later than the session waits.
    let status = std::iter::repeat_with(ask).find(|status| status["current"] == true);
    status.unwrap()["traffic"][name].as_u64().unwrap_or(0)
}

/// Commands of a machine with this address, which exchanges data with a server at another one.
fn exchange(own: &str, other: &str) -> String {
    format!(
        "ip addr add {own}/24 dev eth0; ip link set eth0 up
         python3 peer.py tcp_client {other} 7000"
    )
}

/// Guest of `run` on the machine's switch, which serves TCP.
fn guest(world: &World) -> Running {
    let options = format!("--switch lab --uplink none --address {GUEST}/24");
    let guest = world.plain_guest(&options, "exec python3 peer.py tcp_server 0.0.0.0 7000");
    guest.wait_for_output("listening");
    guest
}

#[test]
fn machine_on_the_hosts_network_exchanges_data_in_both_directions() {
    let world = world!();
    let server = world.server("tcp_server", FAR_V4, 7000);
    let server_v6 = world.server("tcp_server", FAR_V6, 7000);
    let running = net(
        &world,
        "--uplink --queues 4 --require-pool 16M --status-socket status -t 8080:80 --verbose",
    );
    let script = format!(
        "{CONFIGURE}
         python3 peer.py tcp_client {FAR_V4} 7000; python3 peer.py tcp_client {FAR_V6} 7000
         python3 peer.py tcp_server 0.0.0.0 80 & server=$!
         until [ -e asked ]; do sleep 0.05; done; kill $server"
    );
    let machine = machine(&world, "vhost-user-pool:vm.socket", &script);
    assert!(eventually(LONG, || machine.stdout.text().contains("listening")));
    let client = world.outside(&["python3", "peer.py", "tcp_client", HOST_V4, "8080"]);
    assert!(client.succeed(LONG).contains("equal"));
    let found = status(&world);
    assert!(found.contains(" vhost-user net for vm.socket, process "), "{found}");
    assert!(found.contains("vhost-user: lent 16 MiB\n"), "{found}");
    assert!(!found.contains("vhost-user: 0 B sent"), "{found}");
    std::fs::write(world.file("asked"), "").unwrap();
    let output = machine.succeed(LONG);
    assert_eq!(output.matches("equal").count(), 2, "{output}");
    assert_eq!(running.end().status, Some(0));
    server.end();
    server_v6.end();
}

#[test]
fn machine_reaches_what_its_egress_policy_allows_and_nothing_else() {
    let world = world!();
    let servers = [7000, 7001].map(|port| world.server("tcp_server", FAR_V4, port));
    let running = net(&world, &format!("--uplink --allow {FAR_V4}:7000"));
    let script = format!(
        "{CONFIGURE} python3 peer.py tcp_client {FAR_V4} 7000
         python3 -c 'import socket; socket.create_connection((\"{FAR_V4}\", 7001), 20)' 2>&1 || echo denied"
    );
    let output = machine(&world, "vhost-user:vm.socket", &script).succeed(LONG);
    assert!(output.contains("equal") && output.contains("denied"), "{output}");
    running.wait_for_error(&format!("{FAR_V4}:7001"));
    assert_eq!(running.end().status, Some(0));
    drop(servers.map(Running::end));
}

#[test]
fn super_packets_pass_whole_between_a_machine_and_a_guest_on_a_switch() {
    require!(Need::Root);
    let world = world!();
    let options = format!("--switch lab --address {MACHINE}/24 --status-socket status --name card");
    let running = net(&world, &options);
    let guest = guest(&world);
    let script = format!(
        "{}
         python3 peer.py tcp_server 0.0.0.0 7001 & server=$!
         until [ -e asked ]; do sleep 0.05; done; kill $server",
        exchange(MACHINE, GUEST)
    );
    let machine = machine(&world, "vhost-user:vm.socket", &script);
    assert!(eventually(LONG, || machine.stdout.text().contains("listening")));
    // The guest finds the machine by its name, which no host of the tests has.
    let client = world.plain_guest(
        "-q --uplink none --switch lab --address 10.9.0.4/24",
        "exec python3 peer.py tcp_client card 7001",
    );
    assert!(client.succeed(LONG).contains("equal"));
    let stats = world.lab.stats("lab");
    let of_ports = |name: &str| -> Vec<u64> {
        stats.ports.values().map(|port| port.get(name).copied().unwrap_or(0)).collect()
    };
    let whole = of_ports("tx_gso").into_iter().filter(|count| *count > 10).count();
    assert!(whole >= 2, "super-packets to the machine, and to guests: {:?}", stats.ports);
    assert_eq!(of_ports("segments_made").iter().sum::<u64>(), 0, "{:?}", stats.ports);
    assert!(traffic(&world, "tx_gso") > 10, "{}", status(&world));
    let mean = traffic(&world, "rx_bytes") / traffic(&world, "rx_frames").max(1);
    assert!(mean > 1514, "{mean} bytes a frame of the machine, acknowledgements counted");
    std::fs::write(world.file("asked"), "").unwrap();
    assert!(machine.succeed(LONG).contains("equal"));
    guest.end();
    assert_eq!(running.end().status, Some(0));
    assert!(!world.file("vm.socket").exists(), "the socket is removed");
    world.lab.assert_no_switch();
}

#[test]
fn machine_with_another_address_than_that_of_its_card_reaches_nobody() {
    let world = world!();
    let running = net(&world, &format!("--switch lab --address {MACHINE}/24"));
    let guest = guest(&world);
    let connect = format!("python3 peer.py tcp_client {GUEST} 7000");
    let silent = format!(
        "python3 -c 'import socket; socket.create_connection((\"{GUEST}\", 7000), 1)' 2>&1 || echo dropped"
    );
    let script = format!(
        "ip addr add 10.9.0.77/24 dev eth0; ip link set eth0 up; {silent}
         ip addr flush dev eth0; ip addr add {MACHINE}/24 dev eth0
         ip link set eth0 address 52:54:00:12:34:57; {silent}
         ip link set eth0 address 52:54:00:12:34:56; {connect}"
    );
    let output = machine(&world, "vhost-user:vm.socket", &script).succeed(LONG);
    assert_eq!(output.matches("dropped").count(), 2, "{output}");
    assert!(output.contains("equal"), "{output}");
    guest.end();
    running.end();
}

#[test]
fn second_machine_with_the_same_ethernet_address_is_refused_by_the_switch() {
    let world = world!();
    let running = net(&world, "--switch lab");
    let mut words = vec![world.lab.program(), "vhost-user", "net", "-s", "two", "--switch", "lab"];
    let refused = world.host(&words).finish(MOMENT);
    assert_ne!(refused.status, Some(0));
    let text = "52:54:00:12:34:56 is taken on this switch";
    assert!(refused.stderr.contains(text), "{}", refused.stderr);
    words.extend(["--mac", "52:54:00:12:34:57"]);
    let second = world.host(&words);
    second.wait_for_error("two leads to switch `lab`: mac=52:54:00:12:34:57, 10.");
    assert_eq!(second.end().status, Some(0));
    running.end();
}

#[test]
fn machine_on_a_tap_exchanges_data_with_the_host() {
    let world = world!();
    let running = net(&world, "--tap vm0 --status-socket status");
    world
        .host(&["sh", "-ec", "ip addr add 10.8.0.1/24 dev vm0; ip link set vm0 up"])
        .succeed(MOMENT);
    let server = world.host(&["python3", "peer.py", "tcp_server", "10.8.0.1", "7000"]);
    server.wait_for_output("listening");
    let script = exchange("10.8.0.2", "10.8.0.1");
    assert!(machine(&world, "vhost-user:vm.socket", &script).succeed(LONG).contains("equal"));
    assert!(traffic(&world, "tx_gso") > 10, "{}", status(&world));
    assert_eq!(traffic(&world, "segments_made"), 0);
    server.end();
    assert_eq!(running.end().status, Some(0));
    let gone = world.host(&["ip", "link", "show", "vm0"]).finish(MOMENT);
    assert_ne!(gone.status, Some(0), "the interface is removed");
}

#[test]
fn tap_that_exists_already_is_taken_up_and_stays() {
    let world = world!();
    world.host(&["sh", "-ec", "ip tuntap add dev vm1 mode tap"]).succeed(MOMENT);
    let running = net(&world, "--tap vm1");
    assert_eq!(running.end().status, Some(0));
    world.host(&["ip", "link", "show", "vm1"]).succeed(MOMENT);
    let words = [world.lab.program(), "vhost-user", "net", "-s", "s", "--tap", "a/b"];
    let refused = world.host(&words).finish(MOMENT);
    assert!(refused.stderr.contains("--tap a/b"), "{}", refused.stderr);
}

#[test]
fn machine_connects_again_after_its_end_and_after_the_end_of_the_program() {
    let world = world!();
    let guest = guest(&world);
    let script = exchange(MACHINE, GUEST);
    for round in 0..3 {
        let running = net(&world, &format!("--switch lab --address {MACHINE}/24"));
        for _ in 0..2 {
            let output = machine(&world, "vhost-user:vm.socket", &script).succeed(LONG);
            assert!(output.contains("equal"), "{round}: {output}");
        }
        match round {
            0 => {
                running.inner("card").signal(Signal::KILL);
                let finished = running.finish(MOMENT);
                assert!(finished.stderr.contains("the card process was killed"), "{finished:?}");
            }
            1 => {
                rustix::process::kill_process(running.pid(), Signal::KILL).unwrap();
                running.finish(MOMENT);
            }
            _ => assert_eq!(running.end().status, Some(0)),
        }
    }
    guest.end();
}

/// Frontend of tests with one pair of vrings.
fn frontend(world: &World) -> Frontend {
    let shape = FrontShape {
        vrings: 2,
        size: 16,
        buffers: 64 << 10,
        features: feature::VERSION_1,
        protocol: 0,
        has_mark: false,
    };
    let mut front = Frontend::new(shape).unwrap();
    front.connect(&world.file("vm.socket")).unwrap();
    front
}

/// Sends an ARP request of the machine. Returns once the card has returned the buffer.
fn send_frame(front: &mut Frontend) {
    let at = front.buffers_at();
    let frame = [&[0; 12][..], &[0xff; 6], &[0x52, 0x54, 0, 0x12, 0x34, 0x56], &[8, 6], &[0; 46]];
    let frame = frame.concat();
    front.memory.copy_from(at, &frame).unwrap();
    let range = front.range(at, frame.len(), DeviceAccess::Read);
    front.vrings[1].driver.push(&[range], 0).unwrap();
    front.kick(1);
}

#[test]
fn machine_that_truncates_its_memory_costs_its_own_connection() {
    for end in ["--switch lab --address 10.9.0.2/24", "--tap vm2"] {
        let world = world!();
        let guest = guest(&world);
        let running = net(&world, &format!("{end} --status-socket status"));
        let mut front = frontend(&world);
        front.set_up().unwrap();
        send_frame(&mut front);
        let is_returned = eventually(MOMENT, || front.vrings[1].driver.pop().unwrap().is_some());
        assert!(is_returned, "the card does not serve its queue");
        rustix::fs::ftruncate(&front.file, 0).unwrap();
        rustix::io::write(&front.vrings[1].kick, &1_u64.to_ne_bytes()).unwrap();
        running.wait_for_error("truncated the file of its memory");
        wait_for_status(&world, "vhost-user: 1 clients were disconnected");
        drop(front);
        if end.starts_with("--switch") {
            let script = exchange(MACHINE, GUEST);
            let output = machine(&world, "vhost-user:vm.socket", &script).succeed(LONG);
            assert!(output.contains("equal"), "{output}");
        } else {
            let served = eventually(MOMENT, || frontend(&world).set_up().is_ok());
            assert!(served, "the next one is not served");
        }
        guest.end();
        assert_eq!(running.end().status, Some(0));
    }
}

#[test]
fn client_whose_eventfds_are_full_and_block_does_not_hold_the_next_one_up() {
    let world = world!();
    let guest = guest(&world);
    let running = net(&world, &format!("--switch lab --address {MACHINE}/24"));
    let mut front = frontend(&world);
    for vring in &mut front.vrings {
        vring.call = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&vring.call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    }
    front.set_up().unwrap();
    for _ in 0..20 {
        send_frame(&mut front);
        let is_returned = eventually(MOMENT, || front.vrings[1].driver.pop().unwrap().is_some());
        assert!(is_returned, "the card is blocked");
    }
    drop(front);
    let script = exchange(MACHINE, GUEST);
    assert!(machine(&world, "vhost-user:vm.socket", &script).succeed(LONG).contains("equal"));
    guest.end();
    running.end();
}

#[test]
fn machine_that_hands_over_more_than_the_pool_is_refused_and_counted() {
    let world = world!();
    let running = net(&world, "--switch lab --require-pool auto --status-socket status");
    let mut front = frontend(&world);
    // The connection ends while the device is set up, or behind that.
    let _ = front.set_up();
    running.wait_for_error("ivshmem-plain");
    wait_for_status(&world, "vhost-user: 1 clients were disconnected");
    wait_for_status(&world, "vhost-user: no memory of a machine");
    let script = "ip link set eth0 up; until [ -e seen ]; do sleep 0.05; done";
    let machine = machine(&world, "vhost-user-pool:vm.socket", script);
    wait_for_status(&world, "vhost-user: lent 16 MiB");
    std::fs::write(world.file("seen"), "").unwrap();
    machine.succeed(LONG);
    running.end();
}

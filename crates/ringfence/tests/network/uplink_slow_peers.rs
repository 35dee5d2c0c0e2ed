//! Peers that take a guest's data slowly: small receive windows, pauses, slow links. The guest's kernel counts what it
//! sends again: the uplink must never make it wait for a timeout.

use std::time::Duration;

use crate::require;
use crate::support::needs::Need;
use crate::support::world::{FAR_V4, Families, World};
use crate::support::{MOMENT, write_noise};

const TC: Need = Need::Program("tc", "iproute2");

/// Time limit for a complete guest.
const LONG: Duration = Duration::from_secs(180);

/// Maximum of timeouts of the guest's kernel that a busy machine may cause, one whenever the uplink's thread has to wait for a
/// processor for 200 ms. Without the backlog there are dozens.
const TIMEOUTS_MAX: u64 = 8;

/// Sends the noise to a server of this kind, and checks what the guest's kernel has counted.
fn send_to(world: &World, options: &str, server: &str) {
    let serving = world.server(server, FAR_V4, 7000);
    let script = format!("python3 peer.py sender {FAR_V4} 7000");
    let output = world.lone_guest(options, &script).succeed(LONG);
    println!("{server} {options}: {}", output.replace('\n', ", "));
    let count = |name: &str| -> u64 {
        let line = output.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|number| number.trim().parse().ok()).unwrap()
    };
    assert!(output.contains("equal"), "{output}");
    assert!(count("timeouts") <= TIMEOUTS_MAX, "{server} {options}: {output}");
    serving.end();
}

#[test]
fn small_window_of_a_peer_makes_the_guest_repeat_nothing() {
    let Some(world) = World::new(Families::V4) else { return };
    write_noise(&world.file("noise"), 5);
    for options in ["", "--mtu 1500"] {
        send_to(&world, options, "small_server");
    }
}

#[test]
#[ignore = "long: pauses, and windows of some hundred bytes"]
fn pause_of_a_peer_makes_the_guest_repeat_nothing() {
    let Some(world) = World::new(Families::V4) else { return };
    write_noise(&world.file("noise"), 16);
    for options in ["", "--mtu 1500"] {
        send_to(&world, options, "pausing_server");
    }
    write_noise(&world.file("noise"), 1);
    for options in ["", "--mtu 1500"] {
        send_to(&world, options, "tiny_server");
    }
}

#[test]
#[ignore = "long: slow links"]
fn slow_link_makes_the_guest_repeat_nothing() {
    require!(TC);
    let Some(world) = World::new(Families::V4) else { return };
    for (rate, megabytes) in [("1mbit", 1), ("20mbit", 5), ("1gbit", 64)] {
        let shape =
            format!("tc qdisc replace dev wan0 root tbf rate {rate} burst 32k latency 50ms");
        world.host(&["sh", "-ec", &shape]).succeed(MOMENT);
        write_noise(&world.file("noise"), megabytes);
        for options in ["", "--mtu 1500"] {
            send_to(&world, options, "small_server");
            send_to(&world, options, "tcp_sink");
        }
    }
}

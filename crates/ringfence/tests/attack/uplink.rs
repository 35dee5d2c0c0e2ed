//! End-to-end attacks on the uplink and through it. Guests steal each other's datagrams, outsiders inject
//! replies, guests connect to the host's own addresses, and clients of a published port crowd out the guest's
//! own connections.

use std::time::Duration;

use crate::require;
use crate::support::needs::Need;
use crate::support::world::{FAR_V4, Families, HOST_V4, OUTSIDE_V4, World, dnsmasq};
use crate::support::{MOMENT, Running};

/// Time limit for a complete guest.
const LONG: Duration = Duration::from_secs(120);
/// Addresses of the host that its guest does not copy: of other interfaces, and routed to the host.
const OTHER_V4: &str = "10.77.0.1";
const OTHER_V6: &str = "fd77::1";
const ROUTED: &str = "198.51.100.99";
/// Address that the host gets while the guest runs.
const LATE: &str = "10.78.0.1";
/// Address of the metadata service of clouds. It is outside.
const METADATA: &str = "169.254.169.254";

/// Creates a world that contains the attacker's program.
fn world(families: Families) -> Option<World> {
    let world = World::new(families)?;
    std::fs::write(world.file("attack.py"), include_str!("../support/attack_uplink.py")).unwrap();
    Some(world)
}

fn python<'a>(words: &[&'a str]) -> Vec<&'a str> {
    ["python3", "attack.py"].iter().chain(words).copied().collect()
}

/// Starts a server outside, and waits until it listens.
fn outside(world: &World, words: &[&str]) -> Running {
    let server = world.outside(&python(words));
    server.wait_for_output("listening");
    server
}

/// Starts a server on the host, and waits until it listens.
fn host(world: &World, words: &[&str]) -> Running {
    let server = world.host(&python(words));
    server.wait_for_output("listening");
    server
}

/// Waits for a line, with a generous limit.
fn wait_for(running: &Running, text: &str) {
    let found = crate::support::eventually(LONG, || running.stdout.text().contains(text));
    assert!(found, "never said {text:?}: {} {}", running.stdout.text(), running.stderr.text());
}

#[test]
fn datagrams_for_equal_ports_reach_only_their_own_guest() {
    let Some(world) = world(Families::V4) else { return };
    let server = outside(&world, &["udp_echo", FAR_V4, "7001"]);
    let client = |tag: &str| {
        let script = format!("python3 attack.py tagged {FAR_V4} 7001 4000 {tag}");
        world.lone_guest("", &script)
    };
    let first = client("first");
    wait_for(&first, "heard");
    let second = client("second");
    wait_for(&second, "heard");
    // A program of the host that tries to share the port does not get the datagrams.
    let program = world.host(&python(&["reuse", "4000"])).succeed(MOMENT);
    assert!(program.contains("refused 98"), "a program of the host shares the port: {program}");
    std::fs::write(world.file("stop"), "").unwrap();
    for guest in [first, second] {
        let output = guest.succeed(LONG);
        assert!(output.contains("own True foreign 0"), "{output}");
    }
    server.end();
}

#[test]
#[ignore = "long: every form of reply"]
fn echo_reply_of_other_host_is_not_delivered() {
    let Some(world) = world(Families::V4) else { return };
    let forger = world.outside(&python(&["forge_replies", HOST_V4, "4660"]));
    let script = format!("python3 attack.py ping {FAR_V4} 4660; touch stop");
    let output = world.lone_guest("", &script).succeed(LONG);
    assert!(output.contains("payloads honest\n"), "{output}");
    forger.succeed(MOMENT);
}

/// Starts servers at every address of the host, and one outside at the metadata service's address.
fn servers(world: &World) -> Vec<Running> {
    let addresses = format!(
        "ip addr add {OTHER_V4}/32 dev lo; ip addr add {OTHER_V6}/128 dev lo nodad; \
         ip route add local {ROUTED}/32 dev lo"
    );
    world.host(&["sh", "-ec", &addresses]).succeed(MOMENT);
    let metadata = format!("ip addr add {METADATA}/32 dev lo");
    world.outside(&["sh", "-ec", &metadata]).succeed(MOMENT);
    vec![
        host(world, &["greet", "0.0.0.0", "7000"]),
        host(world, &["greet", "::", "7000"]),
        host(world, &["udp_echo", "::", "7001"]),
        outside(world, &["greet", "0.0.0.0", "7000"]),
        outside(world, &["udp_echo", "::", "7001"]),
    ]
}

#[test]
fn host_and_link_local_addresses_are_unreachable_unless_allowed() {
    let Some(world) = world(Families::Both) else { return };
    let servers = servers(&world);
    // The uplink learns of the address a moment after the kernel has it.
    let late = format!(
        "touch ready; until [ -e late ]; do sleep 0.05; done; \
         for i in $(seq 20); do python3 attack.py tries {LATE} > last; grep -q nothing last && break; sleep 0.2; done; \
         cat last"
    );
    let script = format!(
        "python3 attack.py tries {OTHER_V4} {OTHER_V6} {ROUTED} {METADATA} {FAR_V4}; {late}"
    );
    let guest = world.lone_guest("", &script);
    assert!(crate::support::eventually(LONG, || world.file("ready").exists()));
    let add = format!("ip addr add {LATE}/32 dev lo; touch late");
    world.host(&["sh", "-ec", &add]).succeed(MOMENT);
    let output = guest.succeed(LONG);
    for address in [OTHER_V4, OTHER_V6, ROUTED, METADATA, LATE] {
        assert!(output.contains(&format!("tried {address} nothing")), "{address}: {output}");
    }
    assert!(output.contains(&format!("tried {FAR_V4} tcp+udp")), "{output}");
    // Each server answers with the option, so the guard was the reason for the failures.
    let all = [OTHER_V4, OTHER_V6, ROUTED, METADATA, LATE];
    let options = all.map(|address| format!("--allow-local {address} ")).concat();
    let script = format!("python3 attack.py tries {}", all.join(" "));
    let output = world.lone_guest(&options, &script).succeed(LONG);
    for address in all {
        assert!(output.contains(&format!("tried {address} tcp+udp")), "{address}: {output}");
    }
    servers.into_iter().for_each(|server| drop(server.end()));
}

#[test]
#[ignore = "long: every kind of frame"]
fn raw_frames_reach_no_server_of_the_host() {
    let Some(world) = world(Families::Both) else { return };
    let servers = servers(&world);
    // Destinations: the address that guest and host share, other addresses, and those of the uplink itself.
    let targets = format!("{HOST_V4} {OTHER_V4} 127.0.0.1 0.0.0.0 192.0.2.255 {FAR_V4}");
    let script = format!("python3 attack.py raw {HOST_V4} {targets}");
    let output = world.lone_guest("", &script).succeed(LONG);
    assert!(output.contains("sent"), "{output}");
    wait_for(&servers[4], &format!("raw-{FAR_V4}"));
    wait_for(&servers[3], "client 192.0.2.2");
    for server in &servers[..3] {
        let said = server.stdout.text();
        assert!(!said.contains("client") && !said.contains("datagram"), "{said}");
    }
    servers.into_iter().for_each(|server| drop(server.end()));
}

#[test]
fn name_server_at_host_address_is_reachable_only_on_port_53() {
    require!(Need::Program("dnsmasq", "dnsmasq-base"));
    let Some(world) = world(Families::Both) else { return };
    let servers = servers(&world);
    let record = "--host-record=www.far.example,198.51.100.1";
    let names = world.host(&dnsmasq(&[OTHER_V4], &[record]));
    world.name_servers(&[OTHER_V4]);
    let script = format!(
        "for i in $(seq 200); do getent ahostsv4 www.far.example && break; sleep 0.1; done; \
         python3 attack.py tries {OTHER_V4}"
    );
    let output = world.lone_guest("", &script).succeed(LONG);
    assert!(output.contains(FAR_V4), "{output}");
    assert!(output.contains(&format!("tried {OTHER_V4} nothing")), "{output}");
    names.end();
    servers.into_iter().for_each(|server| drop(server.end()));
}

#[test]
fn connections_to_published_port_evict_no_connection_of_guest() {
    let Some(world) = world(Families::V4) else { return };
    let server = outside(&world, &["echo", FAR_V4, "7100"]);
    let script = format!(
        "python3 attack.py accept_all {HOST_V4} 7000 & python3 attack.py idle {FAR_V4} 7100; \
         touch stop; kill $!"
    );
    // With few descriptors, at most half of 616 connections may come from outside.
    let run = ["prlimit", "--nofile=256:1024", world.lab.program(), "run", "-v"];
    let options = ["--uplink", "host", "--switch", "none", "-p", "8080:7000"];
    let command = ["--", "sh", "-ec", &script];
    let guest = world.host(&[&run[..], &options, &command].concat());
    wait_for(&guest, "connected");
    wait_for(&guest, "listening");
    let flood = world.outside(&python(&["flood", HOST_V4, "8080", "900"]));
    wait_for(&guest, "back");
    let output = guest.stdout.text();
    assert!(output.contains("back alive"), "{output} {}", flood.stdout.text());
    flood.wait_for_output("flooded");
    flood.succeed(LONG);
    drop(guest.finish(LONG));
    server.end();
}

#[test]
fn published_port_listens_at_publish_default() {
    let Some(world) = world(Families::V4) else { return };
    let script = format!(
        "python3 attack.py greet {HOST_V4} 7000 & until [ -e stop ]; do sleep 0.05; done; kill $!"
    );
    let options = "-v -p 8080:7000 --publish-default 127.0.0.1";
    let guest = world.lone_guest(options, &script);
    guest.wait_for_output("listening");
    guest.wait_for_error("listens at 127.0.0.1");
    let reach = |address: &str| format!("exec 3<>/dev/tcp/{address}/8080");
    let local = world.host(&["bash", "-c", &reach("127.0.0.1")]).finish(MOMENT);
    assert_eq!(local.status, Some(0), "{}", local.stderr);
    let remote = world.outside(&["bash", "-c", &reach(HOST_V4)]).finish(MOMENT);
    assert_ne!(remote.status, Some(0), "{OUTSIDE_V4} reached the port");
    std::fs::write(world.file("stop"), "").unwrap();
    drop(guest.finish(LONG));
}

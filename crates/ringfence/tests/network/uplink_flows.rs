//! Ten thousand flows of a guest at once, over real sockets. The uplink's resources for them are bounded, every flow
//! transfers data, and a further transfer arrives undamaged meanwhile.

use std::time::Duration;

use crate::support::needs::{skip, skip_for_the_kernel};
use crate::support::processes::Process;
use crate::support::world::{FAR_V4, Families, OUTSIDE_V4, World};
use crate::support::{Running, write_noise};
use rustix::process::{Resource, getrlimit};

/// Time limit for a complete guest, and for any of its steps.
const LONG: Duration = Duration::from_secs(180);
/// Maximum number of UDP associations with sockets.
const UDP: usize = 4096;
/// Maximum number of echo associations with sockets, and of other open files of the process.
const OTHERS: usize = 256 + 128;

/// Creates a world with an echo server and the files of the test.
fn world() -> Option<(World, [Running; 2])> {
    let world = World::new(Families::V4)?;
    std::fs::write(world.file("flows.py"), include_str!("../support/flows.py")).unwrap();
    write_noise(&world.file("noise"), 16);
    let echo = world.outside(&["python3", "flows.py", "echo_server", OUTSIDE_V4, "7100"]);
    echo.wait_for_output("listening");
    let server = world.server("tcp_server", FAR_V4, 7000);
    Some((world, [echo, server]))
}

/// Returns the guest's script. It opens the connections and waits for permission. Then it sends the datagrams, with a
/// transfer beside them, and tries every connection again.
fn script(connections: usize, datagrams: usize) -> String {
    format!(
        "python3 flows.py connections {OUTSIDE_V4} 7100 {connections} & \
         until [ -e flood ]; do sleep 0.05; done; \
         python3 flows.py datagrams {FAR_V4} 10000 {datagrams}; \
         python3 peer.py tcp_client {FAR_V4} 7000; touch again; wait"
    )
}

/// Waits for a line, with a generous limit.
fn wait_for(guest: &Running, text: &str) {
    let found = crate::support::eventually(LONG, || guest.stdout.text().contains(text));
    assert!(found, "never said {text:?}: {} {}", guest.stdout.text(), guest.stderr.text());
}

/// Checks the number of the uplink's open descriptors. Only root can read it.
fn assert_descriptors(uplink: &Process, most: usize, least: usize) {
    if rustix::process::geteuid().is_root() {
        let open = uplink.descriptors();
        assert!((least..=most).contains(&open), "{open} descriptors, not {least} to {most}");
    } else {
        skip("descriptors are not counted: only root may look into a process that is not dumpable");
    }
}

#[test]
#[ignore = "long: 10,000 connections"]
fn ten_thousand_connections_survive_flood_of_datagrams() {
    const CONNECTIONS: usize = 10_000;
    let needed = CONNECTIONS + UDP + OTHERS;
    let may_have = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    if may_have < needed as u64 {
        return skip_for_the_kernel(&format!(
            "there may be {may_have} files open in a process, not {needed}: ulimit -Hn"
        ));
    }
    let Some((world, servers)) = world() else { return };
    let script = script(CONNECTIONS, 20_000);
    let guest = world.lone_guest("", &script);
    wait_for(&guest, "open 10000");
    let uplink = guest.inner("uplink");
    assert_descriptors(&uplink, CONNECTIONS + OTHERS, CONNECTIONS);
    let before = uplink.own_memory_kib();
    std::fs::write(world.file("flood"), "").unwrap();
    wait_for(&guest, "flooded");
    assert_descriptors(&uplink, needed, CONNECTIONS);
    // A further connection transfers its data beside all the others, and each of these still works.
    wait_for(&guest, "equal");
    wait_for(&guest, "moved");
    let output = guest.stdout.text();
    assert!(output.contains("moved 10000 lost 0"), "{output}");
    let after = uplink.own_memory_kib();
    println!(
        "memory of the uplink: {before} KiB with the connections, {after} KiB after the flood"
    );
    assert!(after > 0 && after < 48 << 10, "{after} KiB");
    std::fs::write(world.file("stop"), "").unwrap();
    guest.succeed(LONG);
    servers.into_iter().for_each(|server| drop(server.end()));
}

#[test]
#[ignore = "long: thousands of connections"]
fn longest_idle_connection_is_evicted_when_descriptors_run_out() {
    const LIMIT: usize = 1024;
    // More than the uplink holds, fewer than the command's own limit, which is three quarters.
    const CONNECTIONS: usize = 700;
    let Some((world, servers)) = world() else { return };
    let script = script(CONNECTIONS, 5000);
    // The soft limit is lower, as in a login session. The uplink raises it.
    let limit = format!("--nofile=256:{LIMIT}");
    let run = [
        "prlimit",
        &limit,
        world.lab.program(),
        "run",
        "-v",
        "--uplink",
        "host",
        "--switch",
        "none",
    ];
    let guest = world.host(&[&run[..], &["--", "sh", "-ec", &script]].concat());
    wait_for(&guest, &format!("open {CONNECTIONS}"));
    let uplink = guest.inner("uplink");
    assert_descriptors(&uplink, LIMIT, 500);
    std::fs::write(world.file("flood"), "").unwrap();
    wait_for(&guest, "equal");
    assert_descriptors(&uplink, LIMIT, 500);
    wait_for(&guest, "moved");
    // 1024 less 128 of its own. A 32nd is kept for ports that are added later, another for relays of six descriptors
    // each, and a third for relayed datagrams. A quarter of the others is for UDP, a sixteenth for echo requests. A
    // 16th of all is kept for clients of added ports, and the further connection takes one of the rest.
    let output = guest.stdout.text();
    let shared = 896 - 2 * (896 / 32) - 896 / 32 / 6 * 6;
    let left = shared - shared / 4 - shared / 16 - 896 / 16;
    let expected = format!("moved {} lost {}", left - 1, CONNECTIONS - left + 1);
    assert!(output.contains(&expected), "not {expected:?}: {output}");
    std::fs::write(world.file("stop"), "").unwrap();
    let finished = guest.finish(LONG);
    assert_eq!(finished.status, Some(0), "{}", finished.stderr);
    let said = format!("at most {left} connections at a time");
    assert_eq!(finished.stderr.matches(&said).count(), 1, "{}", finished.stderr);
    servers.into_iter().for_each(|server| drop(server.end()));
}

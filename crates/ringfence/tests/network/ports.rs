//! End-to-end tests of published ports of `ringfence run`: connections from the host's loopback, and ports that change
//! while the guest runs. The host is a network namespace, and clients are in it and in another one.

use std::time::Duration;

use crate::support::world::{Families, HOST_V4, HOST_V6, OUTSIDE_V4, World};
use crate::support::{Finished, MOMENT, Running, eventually, write_noise};

/// Time limit for a complete scenario.
const LONG: Duration = Duration::from_secs(90);
/// Script of a guest that runs until a file exists.
const UNTIL_STOP: &str = "echo started; until [ -e stop ]; do sleep 0.05; done";

/// Creates a world with both families and a file of noise, or returns from the test.
macro_rules! world {
    () => {
        match World::new(Families::Both) {
            Some(world) => {
                write_noise(&world.file("noise"), 1);
                world
            }
            None => return,
        }
    };
}

/// Runs `peer.py MODE ADDRESS PORT`.
fn peer(run: impl Fn(&[&str]) -> Running, mode: &str, address: &str, port: &str) -> String {
    run(&["python3", "peer.py", mode, address, port]).succeed(LONG)
}

/// Runs `ringfence` on the host.
fn ringfence(world: &World, words: &[&str]) -> Finished {
    world.host(&[&[world.lab.program()], words].concat()).finish(LONG)
}

/// Starts a guest with a name that runs until [`end`].
fn guest(world: &World, options: &str) -> Running {
    let guest = world.lone_guest(&format!("--name web {options}"), UNTIL_STOP);
    guest.wait_for_output("started");
    assert!(eventually(MOMENT, || ringfence(world, &["port", "web"]).status == Some(0)));
    guest
}

/// Starts a server in the guest.
fn serve(world: &World, mode: &str, address: &str, port: &str) -> Running {
    let words = [world.lab.program(), "exec", "web", "--", "python3", "peer.py", mode, address];
    let server = world.host(&[&words[..], &[port]].concat());
    server.wait_for_output("listening");
    server
}

fn end(world: &World, guest: Running) {
    std::fs::write(world.file("stop"), "").unwrap();
    guest.succeed(LONG);
}

#[test]
fn server_at_the_guests_loopback_is_reached_from_the_hosts_loopback_only() {
    let world = world!();
    let guest = guest(&world, "-p 8080:80");
    let (host, outside) =
        (|words: &[&str]| world.host(words), |words: &[&str]| world.outside(words));
    let servers =
        ["127.0.0.1", "::1"].map(|address| (address, serve(&world, "tcp_server", address, "80")));
    for (address, server) in &servers {
        assert!(peer(host, "tcp_client", address, "8080").contains("equal"), "{address}");
        server.wait_for_output(&format!("client {address}\n"));
    }
    peer(outside, "unserved", HOST_V4, "8080");
    peer(outside, "unserved", HOST_V6, "8080");
    // More connections at a time than the first sockets of the guest.
    assert!(peer(host, "several", "127.0.0.1", "8080").contains("equal"));
    servers.into_iter().for_each(|(_, server)| drop(server.end()));
    peer(host, "unserved", "127.0.0.1", "8080");
    // A server that listens at another address is reached by the interface.
    let server = serve(&world, "tcp_server", HOST_V4, "80");
    assert!(peer(host, "tcp_client", "127.0.0.1", "8080").contains("equal"));
    assert!(peer(outside, "tcp_client", HOST_V4, "8080").contains("equal"));
    assert!(server.end().stdout.contains(&format!("client {OUTSIDE_V4}\n")));
    end(&world, guest);
}

#[test]
fn guests_loopback_is_not_reached_without_a_published_port() {
    let world = world!();
    let guest = guest(&world, "-p 8081:81");
    let server = serve(&world, "tcp_server", "127.0.0.1", "80");
    for address in ["127.0.0.1", "::1"] {
        peer(|words| world.host(words), "refused", address, "80");
        peer(|words| world.host(words), "unserved", address, "8081");
    }
    server.end();
    end(&world, guest);
}

#[test]
fn ports_are_listed_added_and_removed_while_the_guest_runs() {
    let world = world!();
    let guest = guest(&world, "-p 8080:80");
    let port = |words: &[&str]| {
        let finished = ringfence(&world, &[&["port", "web"], words].concat());
        assert_eq!(finished.status, Some(0), "{words:?}: {}", finished.stderr);
        finished.stdout
    };
    let fails = |words: &[&str], why: &str| {
        let finished = ringfence(&world, &[&["port"], words].concat());
        assert_eq!(finished.status, Some(125), "{words:?}: {}", finished.stdout);
        assert!(finished.stderr.contains(why), "{words:?}: {}", finished.stderr);
    };
    assert_eq!(port(&[]), "8080:80/tcp\n");
    port(&["add", "8000-8001:80", "127.0.0.1:5353:53/udp"]);
    let all = "8080:80/tcp\n8000-8001:80-81/tcp\n127.0.0.1:5353:53/udp\n";
    assert_eq!(port(&[]), all);
    let (host, outside) =
        (|words: &[&str]| world.host(words), |words: &[&str]| world.outside(words));
    let servers =
        [serve(&world, "tcp_server", "::", "80"), serve(&world, "udp_server", "0.0.0.0", "53")];
    assert!(peer(outside, "tcp_client", HOST_V4, "8000").contains("equal"));
    assert!(peer(outside, "tcp_client", HOST_V6, "8000").contains("equal"));
    assert!(peer(host, "udp_client", "127.0.0.1", "5353").contains("equal"));
    fails(&["web", "add", "8000"], "another program has it");
    fails(&["web", "remove", "8000"], "8000:8000/tcp is not published");
    fails(&["nobody", "add", "8000"], "no guest of yours is called `nobody`");
    let finished = ringfence(&world, &["port", "web", "add", "[::1]:70000"]);
    assert_eq!(finished.status, Some(2), "{}", finished.stderr);
    assert_eq!(port(&[]), all, "a change that fails leaves the ports as they were");
    // An accepted connection outlives its port.
    let held = outside(&["python3", "peer.py", "tcp_client_held", HOST_V4, "8000"]);
    held.wait_for_output("connected");
    port(&["remove", "8000-8001:80-81", "8080:80"]);
    assert_eq!(port(&[]), "127.0.0.1:5353:53/udp\n");
    let ps: serde_json::Value =
        serde_json::from_str(&ringfence(&world, &["ps", "--json"]).stdout).unwrap();
    assert_eq!(ps[0]["ports"], serde_json::json!(["127.0.0.1:5353:53/udp"]));
    for address in [HOST_V4, HOST_V6] {
        for port in ["8000", "8001", "8080"] {
            peer(outside, "refused", address, port);
        }
    }
    std::fs::write(world.file("go"), "").unwrap();
    assert!(held.succeed(LONG).contains("equal"));
    port(&["add", "8080:80"]);
    assert!(peer(outside, "tcp_client", HOST_V4, "8080").contains("equal"));
    servers.into_iter().for_each(|server| drop(server.end()));
    end(&world, guest);
}

#[test]
fn port_added_to_a_guest_without_ports_reaches_its_loopback() {
    let world = world!();
    let guest = guest(&world, "--publish-default 127.0.0.1");
    assert_eq!(ringfence(&world, &["port", "web"]).stdout, "");
    let added = ringfence(&world, &["port", "web", "add", "8080:80"]);
    assert_eq!(added.status, Some(0), "{}", added.stderr);
    let server = serve(&world, "tcp_server", "127.0.0.1", "80");
    assert!(peer(|words| world.host(words), "tcp_client", "127.0.0.1", "8080").contains("equal"));
    peer(|words| world.outside(words), "refused", HOST_V4, "8080");
    server.end();
    end(&world, guest);
}

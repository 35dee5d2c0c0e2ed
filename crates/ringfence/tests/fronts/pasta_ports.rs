//! End-to-end tests of ports that change while an uplink of `ringfence pasta` or `slirp4netns` runs. The host is a
//! network namespace, and clients are in it and in another one.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::support::world::{Families, HOST_V4, HOST_V6, World};
use crate::support::{MOMENT, Running, eventually, write_noise};

/// Time limit for a complete scenario.
const LONG: Duration = Duration::from_secs(90);

/// Creates a world with both families and a file of noise, or returns from the test.
macro_rules! world {
    () => {
        match World::new(Families::Both) {
            Some(world) => {
                write_noise(&world.file("noise"), 1);
                for name in ["pasta", "slirp4netns"] {
                    std::os::unix::fs::symlink(world.lab.program(), world.file(name)).unwrap();
                }
                world
            }
            None => return,
        }
    };
}

/// Starts a process with namespaces of its own, and waits for its id.
fn child_with_namespaces(world: &World) -> (Running, String) {
    let script = "echo $$; exec sleep 1000";
    let child = world.host(&["unshare", "--user", "--map-root-user", "--net", "sh", "-c", script]);
    assert!(eventually(MOMENT, || child.stdout.text().ends_with('\n')));
    let pid = child.stdout.text().trim().to_owned();
    (child, pid)
}

/// Starts a program in the namespaces of a process.
fn inside(world: &World, pid: &str, words: &[&str]) -> Running {
    let enter = ["nsenter", "--user", "--net", "--preserve-credentials", "--target", pid];
    world.host(&[&enter[..], words].concat())
}

/// Returns `true` once a client gets all data from the port.
fn is_reached(run: impl Fn(&[&str]) -> Running, mode: &str, address: &str, port: &str) -> bool {
    run(&["python3", "peer.py", mode, address, port]).succeed(LONG).contains("equal")
}

/// Returns `true` if nobody listens at the port.
fn is_refused(run: impl Fn(&[&str]) -> Running, address: &str, port: &str) -> bool {
    run(&["python3", "peer.py", "refused", address, port]).succeed(LONG).contains("refused")
}

/// Returns `true` if no server answers at the port.
fn is_unserved(run: impl Fn(&[&str]) -> Running, address: &str, port: &str) -> bool {
    run(&["python3", "peer.py", "unserved", address, port]).succeed(LONG).contains("refused")
}

/// Returns `true` if no server answers to datagrams at the port.
fn is_unanswered(run: impl Fn(&[&str]) -> Running, address: &str, port: &str) -> bool {
    run(&["python3", "peer.py", "udp_unserved", address, port]).succeed(LONG).contains("refused")
}

/// Starts slirp4netns with an API socket, and waits until the network is usable.
fn start_slirp4netns(world: &World, pid: &str) -> Running {
    let script =
        "exec ./slirp4netns -c --mtu=65520 --enable-ipv6 --api-socket api.sock -r 3 $1 tap0 3>&1";
    let slirp = world.host(&["sh", "-c", script, "sh", pid]);
    slirp.wait_for_output("1");
    slirp
}

/// Sends a request to an API socket, and returns the reply.
fn ask(world: &World, request: &str) -> String {
    let mut client = UnixStream::connect(world.file("api.sock")).unwrap();
    client.set_read_timeout(Some(LONG)).unwrap();
    client.write_all(request.as_bytes()).unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let mut reply = String::new();
    client.read_to_string(&mut reply).unwrap();
    reply
}

fn add_request(arguments: &str) -> String {
    format!("{{\"execute\": \"add_hostfwd\", \"arguments\": {{{arguments}}}}}")
}

#[test]
fn ports_are_added_listed_and_removed_by_the_api_of_slirp4netns() {
    let world = world!();
    let (child, pid) = child_with_namespaces(&world);
    let slirp = start_slirp4netns(&world, &pid);
    let servers = [("tcp_server", "80"), ("udp_server", "53")].map(|(mode, port)| {
        let server = inside(&world, &pid, &["python3", "peer.py", mode, "::", port]);
        server.wait_for_output("listening");
        server
    });
    let outside = |words: &[&str]| world.outside(words);
    assert!(is_refused(outside, HOST_V4, "8080"));
    let tcp = "\"proto\": \"tcp\", \"host_addr\": \"0.0.0.0\", \"host_port\": 8080, \
               \"guest_addr\": \"10.0.2.100\", \"guest_port\": 80";
    assert_eq!(ask(&world, &add_request(tcp)), "{\"return\": {\"id\": 1}}");
    let udp = "\"proto\": \"udp4\", \"host_port\": 5353, \"guest_port\": 53";
    assert_eq!(ask(&world, &add_request(udp)), "{\"return\": {\"id\": 2}}");
    assert!(is_reached(outside, "tcp_client", HOST_V4, "8080"));
    assert!(is_reached(outside, "tcp_client", HOST_V6, "8080"));
    assert!(is_reached(outside, "udp_client", HOST_V4, "5353"));
    let entries = ask(&world, "{\"execute\": \"list_hostfwd\"}");
    assert_eq!(
        entries,
        "{\"return\": {\"entries\": [{\"id\": 1, \"proto\": \"tcp\", \"host_addr\": \"0.0.0.0\", \
         \"host_addr6\": \"::\", \"host_port\": 8080, \"guest_addr\": \"10.0.2.100\", \
         \"guest_addr6\": \"fd00::100\", \"guest_port\": 80}, {\"id\": 2, \"proto\": \"udp\", \
         \"host_addr\": \"0.0.0.0\", \"host_port\": 5353, \"guest_addr\": \"10.0.2.100\", \"guest_port\": 53}]}}"
    );
    for (request, reason) in [
        (add_request(tcp), "cannot listen at 0.0.0.0:8080/tcp"),
        (add_request(&tcp.replace("10.0.2.100", "192.0.2.9")), "guest_addr 192.0.2.9"),
        ("}{".to_owned(), "bad request"),
    ] {
        let reply = ask(&world, &request);
        assert!(reply.starts_with("{\"error\"") && reply.contains(reason), "{request}: {reply}");
    }
    let remove =
        |id: u32| format!("{{\"execute\": \"remove_hostfwd\", \"arguments\": {{\"id\": {id}}}}}");
    for id in [1, 2] {
        assert_eq!(ask(&world, &remove(id)), "{\"return\": {}}");
        assert!(ask(&world, &remove(id)).contains("there is no id"));
    }
    assert!(is_refused(outside, HOST_V4, "8080") && is_refused(outside, HOST_V6, "8080"));
    // The port is free, and can be added again.
    assert_eq!(ask(&world, &add_request(tcp)), "{\"return\": {\"id\": 3}}");
    assert!(is_reached(outside, "tcp_client", HOST_V4, "8080"));
    servers.into_iter().for_each(|server| drop(server.end()));
    drop((slirp.end(), child));
}

#[test]
fn connection_outlives_the_removal_of_its_port() {
    let world = world!();
    let (child, pid) = child_with_namespaces(&world);
    let slirp = start_slirp4netns(&world, &pid);
    let server = inside(&world, &pid, &["python3", "peer.py", "tcp_server", "0.0.0.0", "80"]);
    server.wait_for_output("listening");
    let tcp = "\"proto\": \"tcp4\", \"host_port\": 8080, \"guest_port\": 80";
    assert_eq!(ask(&world, &add_request(tcp)), "{\"return\": {\"id\": 1}}");
    let client = world.outside(&["python3", "peer.py", "tcp_client_held", HOST_V4, "8080"]);
    client.wait_for_output("connected");
    server.wait_for_output("client");
    let remove = "{\"execute\": \"remove_hostfwd\", \"arguments\": {\"id\": 1}}";
    assert_eq!(ask(&world, remove), "{\"return\": {}}");
    std::fs::write(world.file("go"), "").unwrap();
    assert!(client.succeed(LONG).contains("equal"));
    assert!(is_refused(|words| world.outside(words), HOST_V4, "8080"));
    server.end();
    drop((slirp.end(), child));
}

#[test]
fn automatic_ports_follow_the_listeners_of_the_namespace() {
    let world = world!();
    let (child, pid) = child_with_namespaces(&world);
    let pasta =
        ["./pasta", "--foreground", "--config-net", "-t", "auto,~8082", "-u", "auto", "-P", "pid"];
    let pasta = world.host(&[&pasta[..], &[&pid]].concat());
    let is_ready =
        || std::fs::read_to_string(world.file("pid")).is_ok_and(|text| text.ends_with('\n'));
    assert!(eventually(MOMENT, is_ready));
    let serve = |mode: &str, port: &str| {
        let server = inside(&world, &pid, &["python3", "peer.py", mode, "::", port]);
        server.wait_for_output("listening");
        server
    };
    let servers =
        [serve("tcp_server", "8081"), serve("tcp_server", "8082"), serve("udp_server", "5353")];
    let outside = |words: &[&str]| world.outside(words);
    // A client tries again until the next scan has found the listener.
    assert!(is_reached(outside, "tcp_client", HOST_V4, "8081"));
    assert!(is_reached(outside, "tcp_client", HOST_V6, "8081"));
    let is_open = || {
        let client = outside(&["python3", "peer.py", "udp_client", HOST_V4, "5353"]);
        client.finish(LONG).status == Some(0)
    };
    assert!(eventually(LONG, is_open), "the UDP port is not open");
    assert!(is_refused(outside, HOST_V4, "8082"));
    servers.into_iter().for_each(|server| drop(server.end()));
    let is_closed = || {
        let client = world.outside(&["python3", "peer.py", "refused", HOST_V4, "8081"]);
        client.finish(LONG).status == Some(0)
    };
    assert!(eventually(LONG, is_closed), "the port is open without a listener");
    let again = serve("tcp_server", "8081");
    assert!(is_reached(outside, "tcp_client", HOST_V4, "8081"));
    again.end();
    assert_eq!(pasta.end().status, Some(0));
    drop(child);
}

/// Starts pasta with a port that leads to port 80 of the namespace, and waits until the network is usable.
fn start_pasta(world: &World, pid: &str, options: &[&str]) -> Running {
    let _ = std::fs::remove_file(world.file("pid"));
    let words = ["./pasta", "--foreground", "--config-net", "-P", "pid", "-t", "8080:80"];
    let pasta = world.host(&[&words[..], options, &[pid]].concat());
    let is_ready =
        || std::fs::read_to_string(world.file("pid")).is_ok_and(|text| text.ends_with('\n'));
    assert!(eventually(MOMENT, is_ready));
    pasta
}

#[test]
fn server_at_the_namespaces_loopback_is_reached_from_the_hosts_loopback_only() {
    let world = world!();
    let (child, pid) = child_with_namespaces(&world);
    let pasta = start_pasta(&world, &pid, &["--host-lo-to-ns-lo"]);
    inside(&world, &pid, &["ip", "link", "set", "lo", "up"]).succeed(LONG);
    let servers = ["127.0.0.1", "::1"].map(|address| {
        let server = inside(&world, &pid, &["python3", "peer.py", "tcp_server", address, "80"]);
        server.wait_for_output("listening");
        server
    });
    let (host, outside) =
        (|words: &[&str]| world.host(words), |words: &[&str]| world.outside(words));
    for (address, server) in ["127.0.0.1", "::1"].into_iter().zip(&servers) {
        assert!(is_reached(host, "tcp_client", address, "8080"), "{address}");
        server.wait_for_output(&format!("client {address}\n"));
    }
    assert!(is_unserved(outside, HOST_V4, "8080") && is_unserved(outside, HOST_V6, "8080"));
    // More connections at a time than the first sockets of the namespace.
    assert!(is_reached(host, "several", "127.0.0.1", "8080"));
    servers.into_iter().for_each(|server| drop(server.end()));
    assert!(is_unserved(host, "127.0.0.1", "8080"));
    // Every other server is reached as well: through the interface.
    let server = inside(&world, &pid, &["python3", "peer.py", "tcp_server", HOST_V4, "80"]);
    server.wait_for_output("listening");
    assert!(is_reached(host, "tcp_client", "127.0.0.1", "8080"));
    assert!(is_reached(outside, "tcp_client", HOST_V4, "8080"));
    server.end();
    assert_eq!(pasta.end().status, Some(0));
    drop(child);
}

#[test]
fn udp_server_at_the_namespaces_loopback_is_reached_from_the_hosts_loopback_only() {
    let world = world!();
    let (child, pid) = child_with_namespaces(&world);
    let pasta = start_pasta(&world, &pid, &["--host-lo-to-ns-lo", "-u", "5353:53"]);
    inside(&world, &pid, &["ip", "link", "set", "lo", "up"]).succeed(LONG);
    let (host, outside) =
        (|words: &[&str]| world.host(words), |words: &[&str]| world.outside(words));
    let serve = |address: &str| {
        let server = inside(&world, &pid, &["python3", "peer.py", "udp_server", address, "53"]);
        server.wait_for_output("listening");
        server
    };
    for address in ["127.0.0.1", "::1"] {
        let server = serve(address);
        assert!(is_reached(host, "udp_client", address, "5353"), "{address}");
        let said = server.end().stdout;
        assert!(said.contains(&format!("client {address}\n")), "{address}: {said}");
    }
    let server = serve("127.0.0.1");
    assert!(is_unanswered(outside, HOST_V4, "5353"));
    server.end();
    // Every other server is reached as well: through the interface.
    let server = serve(HOST_V4);
    assert!(is_reached(host, "udp_client", "127.0.0.1", "5353"));
    assert!(is_reached(outside, "udp_client", HOST_V4, "5353"));
    server.end();
    assert_eq!(pasta.end().status, Some(0));
    drop(child);
}

#[test]
fn namespaces_loopback_is_not_reached_without_the_option() {
    let world = world!();
    let (child, pid) = child_with_namespaces(&world);
    let host = |words: &[&str]| world.host(words);
    for (options, client) in [(&[][..], HOST_V4), (&["--no-splice"][..], "192.0.2.1")] {
        let pasta = start_pasta(&world, &pid, options);
        inside(&world, &pid, &["ip", "link", "set", "lo", "up"]).succeed(LONG);
        let hidden = inside(&world, &pid, &["python3", "peer.py", "tcp_server", "127.0.0.1", "80"]);
        hidden.wait_for_output("listening");
        assert!(is_unserved(host, "127.0.0.1", "8080"), "{options:?}");
        hidden.end();
        let server = inside(&world, &pid, &["python3", "peer.py", "tcp_server", "0.0.0.0", "80"]);
        server.wait_for_output("listening");
        assert!(is_reached(host, "tcp_client", "127.0.0.1", "8080"), "{options:?}");
        let said = server.end().stdout;
        assert!(said.contains(&format!("client {client}\n")), "{options:?}: {said}");
        assert_eq!(pasta.end().status, Some(0));
    }
    drop(child);
}

#[test]
fn port_of_the_namespaces_loopback_leads_to_the_hosts_only_with_the_option() {
    let world = world!();
    let (child, pid) = child_with_namespaces(&world);
    let (host, outside) =
        (|words: &[&str]| world.host(words), |words: &[&str]| world.outside(words));
    let inner = |words: &[&str]| inside(&world, &pid, words);
    let servers = ["127.0.0.1", "::1"].map(|address| {
        let server = host(&["python3", "peer.py", "tcp_server", address, "7000"]);
        server.wait_for_output("listening");
        (address, server)
    });
    let pasta = start_pasta(&world, &pid, &["-T", "7001-7002:7000-7001,~7003"]);
    for (address, server) in &servers {
        assert!(is_reached(inner, "tcp_client", address, "7001"), "{address}");
        server.wait_for_output(&format!("client {address}\n"));
        // Neither another port of the host, nor a port without a server.
        assert!(is_refused(inner, address, "7000"), "{address}");
        assert!(is_unserved(inner, address, "7002"), "{address}");
    }
    assert!(is_reached(inner, "several", "127.0.0.1", "7001"));
    // The ports are the namespace's own.
    assert!(is_refused(host, "127.0.0.1", "7001") && is_refused(outside, HOST_V4, "7001"));
    assert_eq!(pasta.end().status, Some(0));
    let pasta = start_pasta(&world, &pid, &[]);
    assert!(is_refused(inner, "127.0.0.1", "7001"));
    assert_eq!(pasta.end().status, Some(0));
    servers.into_iter().for_each(|(_, server)| drop(server.end()));
    drop(child);
}

#[test]
fn ports_of_the_namespaces_loopback_follow_listeners_of_the_hosts_if_asked_to() {
    let world = world!();
    let (child, pid) = child_with_namespaces(&world);
    let host = |words: &[&str]| world.host(words);
    let inner = |words: &[&str]| inside(&world, &pid, words);
    let serve = |mode: &str, address: &str, port: &str| {
        let server = host(&["python3", "peer.py", mode, address, port]);
        server.wait_for_output("listening");
        server
    };
    let options = ["-T", "auto,~7003", "-U", "auto", "-t", "auto", "-u", "auto"];
    let pasta = start_pasta(&world, &pid, &options);
    // At another address of the host, nobody of the namespace can reach it by its loopback.
    let servers = [
        serve("tcp_server", "127.0.0.1", "7000"),
        serve("tcp_server", "::1", "7001"),
        serve("tcp_server", HOST_V4, "7002"),
        serve("tcp_server", "127.0.0.1", "7003"),
        serve("udp_server", "127.0.0.1", "7004"),
    ];
    assert!(is_reached(inner, "tcp_client", "127.0.0.1", "7000"));
    assert!(is_reached(inner, "tcp_client", "::1", "7001"));
    let is_open = || {
        let client = inner(&["python3", "peer.py", "udp_client", "127.0.0.1", "7004"]);
        client.finish(LONG).status == Some(0)
    };
    assert!(eventually(LONG, is_open), "the UDP port is not open");
    for port in ["7002", "7003"] {
        assert!(is_refused(inner, "127.0.0.1", port), "{port}");
    }
    assert!(is_refused(inner, "::1", "7000"));
    // A listener of ours in the namespace opens no port of the host, nor the other way round: after two scans the port is free
    // at the host's other addresses.
    std::thread::sleep(Duration::from_millis(2500));
    for (address, port) in [(HOST_V4, "7001"), (HOST_V6, "7000")] {
        serve("tcp_server", address, port).end();
    }
    for address in [HOST_V4, HOST_V6] {
        assert!(is_refused(|words| world.outside(words), address, "7000"), "{address}");
    }
    servers.into_iter().for_each(|server| drop(server.end()));
    let is_closed = || {
        let client = inner(&["python3", "peer.py", "refused", "127.0.0.1", "7000"]);
        client.finish(LONG).status == Some(0)
    };
    assert!(eventually(LONG, is_closed), "the port is open without a listener");
    assert_eq!(pasta.end().status, Some(0));
    let pasta = start_pasta(&world, &pid, &["-t", "auto"]);
    let server = serve("tcp_server", "127.0.0.1", "7000");
    std::thread::sleep(Duration::from_millis(2500));
    assert!(is_refused(inner, "127.0.0.1", "7000"), "it is off unless it is given");
    server.end();
    assert_eq!(pasta.end().status, Some(0));
    drop(child);
}

#[test]
fn udp_port_of_the_namespaces_loopback_leads_to_the_hosts_only_with_the_option() {
    let world = world!();
    let (child, pid) = child_with_namespaces(&world);
    let (host, outside) =
        (|words: &[&str]| world.host(words), |words: &[&str]| world.outside(words));
    let inner = |words: &[&str]| inside(&world, &pid, words);
    let servers = ["127.0.0.1", "::1"].map(|address| {
        let server = host(&["python3", "peer.py", "udp_server", address, "7000"]);
        server.wait_for_output("listening");
        (address, server)
    });
    let pasta = start_pasta(&world, &pid, &["-U", "7001-7002:7000-7001"]);
    for (address, server) in &servers {
        // Datagrams of every length, each answered to the client that sent it.
        assert!(is_reached(inner, "udp_client", address, "7001"), "{address}");
        server.wait_for_output(&format!("client {address}\n"));
        // Neither another port of the host, nor a port without a server.
        for port in ["7000", "7002"] {
            assert!(is_unanswered(inner, address, port), "{address} {port}");
        }
    }
    // The ports are the namespace's own.
    assert!(is_unanswered(host, "127.0.0.1", "7001"));
    assert!(is_unanswered(outside, HOST_V4, "7001"));
    assert_eq!(pasta.end().status, Some(0));
    let pasta = start_pasta(&world, &pid, &[]);
    assert!(is_unanswered(inner, "127.0.0.1", "7001"));
    assert_eq!(pasta.end().status, Some(0));
    servers.into_iter().for_each(|(_, server)| drop(server.end()));
    drop(child);
}

#[test]
fn ports_are_added_listed_and_removed_by_pesto() {
    let world = world!();
    std::os::unix::fs::symlink(world.lab.program(), world.file("pesto")).unwrap();
    let (child, pid) = child_with_namespaces(&world);
    let pasta =
        start_pasta(&world, &pid, &["--conf-path", "pasta.sock", "-t", "none", "-t", "9000:80"]);
    let servers = [("tcp_server", "80"), ("udp_server", "53")].map(|(mode, port)| {
        let server = inside(&world, &pid, &["python3", "peer.py", mode, "::", port]);
        server.wait_for_output("listening");
        server
    });
    let (host, outside) =
        (|words: &[&str]| world.host(words), |words: &[&str]| world.outside(words));
    let pesto = |line: &str| {
        let words = std::iter::once("./pesto").chain(line.split(' ')).chain(["pasta.sock"]);
        world.host(&words.collect::<Vec<_>>()).finish(LONG)
    };
    assert!(is_refused(outside, HOST_V4, "8080"));
    // As Podman 6 and RootlessKit 3 call it.
    for line in ["--add -t 0.0.0.0/8080:80 -t [::]/8080:80", "-A --udp-ports=0.0.0.0/5353:53"] {
        let ended = pesto(line);
        assert_eq!((ended.status, ended.stdout.as_str()), (Some(0), ""), "{ended:?}");
    }
    assert!(is_reached(outside, "tcp_client", HOST_V4, "8080"));
    assert!(is_reached(outside, "tcp_client", HOST_V6, "8080"));
    assert!(is_reached(outside, "udp_client", HOST_V4, "5353"));
    assert!(is_reached(host, "tcp_client", "127.0.0.1", "8080"));
    let listed = pesto("--show").stdout;
    let first = "tcp * 9000 -> 80\n";
    let added = "tcp 0.0.0.0 8080 -> 80\ntcp :: 8080 -> 80\nudp 0.0.0.0 5353 -> 53\n";
    assert_eq!(listed, format!("{first}{added}"));
    // One port of several is taken: none is added.
    let ended = pesto("--add -t 0.0.0.0/8079-8080:80-81");
    assert_eq!(ended.status, Some(1), "{ended:?}");
    assert!(ended.stderr.starts_with("pesto: ") && ended.stderr.contains("8080"), "{ended:?}");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    assert_eq!(pesto("--show").stdout, listed);
    // Nor if another program has it.
    let taken = world.host(&["python3", "peer.py", "tcp_server", "0.0.0.0", "8078"]);
    taken.wait_for_output("listening");
    let ended = pesto("--add -t 0.0.0.0/8077-8078:80-81");
    assert!(ended.status == Some(1) && ended.stderr.contains("0.0.0.0:8078"), "{ended:?}");
    assert!(is_refused(outside, HOST_V4, "8077"));
    assert_eq!(pesto("--show").stdout, listed);
    drop(taken.end());
    assert_eq!(pesto("--delete -t 0.0.0.0/8080:80 -u 0.0.0.0/5353:53").status, Some(0));
    assert!(is_refused(outside, HOST_V4, "8080"));
    assert!(is_reached(outside, "tcp_client", HOST_V6, "8080"));
    assert_eq!(pesto("--delete -t 0.0.0.0/8080:80").status, Some(1));
    assert_eq!(pesto("--show").stdout, format!("{first}tcp :: 8080 -> 80\n"));
    // A port of the command line goes like any other, and a new list replaces what there is.
    assert!(is_reached(outside, "tcp_client", HOST_V4, "9000"));
    assert_eq!(pesto("-t 0.0.0.0/9001:80").status, Some(0));
    assert_eq!(pesto("--show").stdout, "tcp 0.0.0.0 9001 -> 80\n");
    assert!(is_refused(outside, HOST_V4, "9000") && is_refused(outside, HOST_V6, "8080"));
    assert!(is_reached(outside, "tcp_client", HOST_V4, "9001"));
    assert_eq!(pasta.end().status, Some(0));
    servers.into_iter().for_each(|server| drop(server.end()));
    drop(child);
}

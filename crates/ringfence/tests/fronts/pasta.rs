//! End-to-end tests of `ringfence pasta`, as Podman, RootlessKit and users start it. The host is a network namespace,
//! and servers and clients are in another one. Where the real pasta is installed, it passes Podman's scenario, too.

use std::time::Duration;

use crate::require;
use crate::support::needs::{Need, PING, skip_what_is_not_installed};
use crate::support::users::copy_program;
use crate::support::world::{FAR_V4, FAR_V6, Families, HOST_V4, HOST_V6, OUTSIDE_V4, World};
use crate::support::{Lab, MOMENT, Running, eventually, write_noise};

/// Time limit for a complete scenario.
const LONG: Duration = Duration::from_secs(90);

/// Name server's address in Podman's containers.
const DNS_FORWARD: &str = "169.254.1.1";

/// Creates a world with both families and a file of noise, or returns from the test.
macro_rules! world {
    () => {
        match World::new(Families::Both) {
            Some(world) => {
                write_noise(&world.file("noise"), 1);
                let program = world.lab.program().to_owned();
                std::os::unix::fs::symlink(program, world.file("pasta")).unwrap();
                world
            }
            None => return,
        }
    };
}

/// Starts a script as root of a user namespace, in which Podman works, with `pasta` as $1.
fn in_user_namespace(world: &World, pasta: &str, script: &str) -> Running {
    let words =
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", script, "sh", pasta];
    world.host(&words)
}

/// Makes a network namespace as Podman does: a file, and no process in it.
const MAKE_NAMESPACE: &str = "
    touch netns; unshare --net sleep 1000 & holder=$!
    until [ /proc/$holder/ns/net -ef /proc/$holder/ns/net ] &&
        [ \"$(readlink /proc/$holder/ns/net)\" != \"$(readlink /proc/self/ns/net)\" ]; do sleep 0.05; done
    mount --bind /proc/$holder/ns/net netns; kill $holder; wait $holder || :
    inside='nsenter --net=netns'
";

/// Deletes the namespace's file, as Podman does, and waits for the end of the process in the background.
const REMOVE_NAMESPACE: &str = "
    umount -l netns; rm netns
    for i in $(seq 400); do grep -q '^State:.[ZX]' /proc/$(cat pid)/status 2>/dev/null ||
        [ ! -e /proc/$(cat pid) ] || { sleep 0.05; continue; }; echo gone; break; done
";

/// Waits until a file exists.
fn wait(name: &str) -> String {
    format!("until [ -e {name} ]; do sleep 0.05; done\n")
}

/// Returns the words of a web server for the shared files.
fn web_server(address: &str, port: &str) -> Vec<String> {
    ["python3", "-u", "-m", "http.server", "--bind", address, port].map(str::to_owned).into()
}

/// Returns a script that fetches `noise` and compares it. pasta of 2023 hangs at half-closed connections, as
/// `peer.py` has them.
fn fetch(authority: &str, name: &str) -> String {
    format!(
        "curl -sS --max-time 60 --retry 20 --retry-delay 1 --retry-connrefused -o {name} http://{authority}/noise; \
         cmp {name} noise; rm {name}; echo equal\n"
    )
}

/// Runs the scenario of a container with published ports.
fn podman_scenario(world: &World, pasta: &str) {
    world.name_servers(&[OUTSIDE_V4]);
    let web = web_server(FAR_V4, "7000");
    let web = world.outside(&web.iter().map(String::as_str).collect::<Vec<_>>());
    let dns = world.server("udp_server", OUTSIDE_V4, 53);
    let start = format!(
        "start() {{ \"$pasta\" --config-net -P pid -t 8080-8080:80-80 --dns-forward {DNS_FORWARD} \
             -u 5353-5353:53-53 -T none -U none --no-map-gw --quiet --netns $PWD/netns \"$@\" \
             </dev/null >said 2>&1; }}
         pasta=$1
         # As Podman does, if the program is too old.
         start --map-guest-addr 169.254.1.2 || {{ grep -q \"unrecognized option '--map-guest-addr\" said; start; }}
        "
    );
    let in_container = format!(
        "cat > inside.sh <<'END'\n{}python3 peer.py udp_client {DNS_FORWARD} 53\nEND\n",
        fetch(&format!("{FAR_V4}:7000"), "fetched")
    );
    let script = [
        MAKE_NAMESPACE,
        &start,
        "$inside ip -o address show scope global | grep -q 192.0.2.2/24 && echo configured\n",
        &in_container,
        "$inside sh -ec '. ./inside.sh'\n",
        &format!("$inside {} & tcp=$!\n", web_server("0.0.0.0", "80").join(" ")),
        "$inside python3 peer.py udp_server 0.0.0.0 53 & udp=$!\n",
        &wait("asked"),
        "kill $tcp $udp; wait $tcp $udp || :\n",
        REMOVE_NAMESPACE,
    ];
    let container = in_user_namespace(world, pasta, &script.concat());
    container.wait_for_output("listening");
    container.wait_for_output("Serving HTTP");
    let outside = fetch(&format!("{HOST_V4}:8080"), "outside");
    assert!(world.outside(&["sh", "-ec", &outside]).succeed(LONG).contains("equal"));
    let udp = world.outside(&["python3", "peer.py", "udp_client", HOST_V4, "5353"]);
    assert!(udp.succeed(LONG).contains("equal"));
    let local = fetch("127.0.0.1:8080", "local");
    assert!(world.host(&["sh", "-ec", &local]).succeed(LONG).contains("equal"));
    std::fs::write(world.file("asked"), "").unwrap();
    let ended = container.finish(LONG);
    let output = &ended.stdout;
    assert_eq!(ended.status, Some(0), "{ended:?}");
    assert!(output.starts_with("configured\n") && output.ends_with("gone\n"), "{output}");
    assert_eq!(output.matches("equal").count(), 2, "{output}");
    // The container sees the real address of a client outside.
    assert!(output.contains("client 192.0.2.1\n"), "{output}");
    assert!(ended.stderr.contains("192.0.2.1 - - "), "{ended:?}");
    drop((web.end(), dns.end()));
    for name in ["asked", "pid", "said"] {
        std::fs::remove_file(world.file(name)).unwrap();
    }
}

#[test]
fn container_of_podman_is_connected_as_by_pasta() {
    require!(Need::Program("curl", "curl"));
    let world = world!();
    podman_scenario(&world, "./pasta");
    match Need::Program("pasta", "passt").missing() {
        None => podman_scenario(&world, "/usr/bin/pasta"),
        Some(why) => skip_what_is_not_installed(&format!("comparison with pasta: {why}")),
    }
}

#[test]
fn command_gets_the_hosts_network_and_returns_its_status() {
    require!(PING);
    let world = world!();
    let servers = [FAR_V4, FAR_V6].map(|ip| world.server("tcp_server", ip, 7000));
    let script = format!(
        "ip -o address show dev wan0; python3 peer.py tcp_client {FAR_V4} 7000; \
         python3 peer.py tcp_client {FAR_V6} 7000; ping -c 1 -W 20 {FAR_V4}; \
         echo process $$ user $(id -u); exit 7"
    );
    let command = world.host(&["./pasta", "--config-net", "--", "sh", "-c", &script]);
    let ended = command.finish(LONG);
    assert_eq!(ended.status, Some(7), "{ended:?}");
    let output = ended.stdout;
    assert!(output.contains("192.0.2.2/24") && output.contains("2001:db8:1::2/64"), "{output}");
    assert!(output.contains("process 1 user 0"), "{output}");
    assert_eq!(output.matches("equal").count(), 2, "{output}");
    servers.into_iter().for_each(|server| drop(server.end()));
}

#[test]
fn interface_without_config_net_is_left_to_dhcp() {
    let world = world!();
    let script = "ip -o link show t0; ip -o address show dev t0";
    let words = [
        "./pasta",
        "-I",
        "t0",
        "-m",
        "1400",
        "--ns-mac-addr",
        "2:0:0:0:0:9",
        "--",
        "sh",
        "-c",
        script,
    ];
    let output = world.host(&words).succeed(LONG);
    assert!(output.contains("mtu 1400") && output.contains("02:00:00:00:00:09"), "{output}");
    assert!(output.contains("state DOWN") && !output.contains("192.0.2.2"), "{output}");
}

/// Starts a process with namespaces of its own, as RootlessKit's child is.
fn child_with_namespaces(world: &World) -> (Running, String) {
    let script = "echo $$; exec sleep 1000";
    let child = world.host(&["unshare", "--user", "--map-root-user", "--net", "sh", "-c", script]);
    assert!(eventually(MOMENT, || child.stdout.text().ends_with('\n')));
    let pid = child.stdout.text().trim().to_owned();
    (child, pid)
}

#[test]
fn process_is_connected_by_its_id_until_it_ends() {
    let world = world!();
    let server = world.server("tcp_server", FAR_V4, 7000);
    let (child, pid) = child_with_namespaces(&world);
    let words = "./pasta --stderr --ns-ifname=tap0 --mtu=65520 --config-net --address=10.0.2.100 --netmask=24 \
                 --gateway=10.0.2.2 --dns-forward=10.0.2.3 --ipv4-only --tcp-ports=none --udp-ports=none -P pid";
    let words: Vec<_> = words.split_whitespace().chain([&pid[..]]).collect();
    world.host(&words).succeed(LONG);
    let session: u32 = std::fs::read_to_string(world.file("pid")).unwrap().trim().parse().unwrap();
    let enter = ["nsenter", "--user", "--net", "--preserve-credentials", "--target", &pid];
    let script = format!("ip -o address show tap0; python3 peer.py tcp_client {FAR_V4} 7000");
    let output = world.host(&[&enter[..], &["sh", "-ec", &script]].concat()).succeed(LONG);
    assert!(output.contains("10.0.2.100/24") && output.contains("equal"), "{output}");
    drop(child);
    let has_ended = || !is_running(session);
    assert!(eventually(MOMENT, has_ended), "the session outlives the process");
    server.end();
}

/// Returns `false` for a process that has ended, reaped or not.
fn is_running(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains('Z'))
}

/// Becomes the command of `pasta` with standard input as the pipe of its parent.
const AS_COMMAND: &str =
    "exec \"$0\" internal pasta-command --parent 9 -- echo started 9<&0 </dev/null";

#[test]
fn command_whose_parent_ended_before_it_was_ready_does_not_start() {
    let lab = Lab::new();
    let start = |script: String| lab.spawn(&["bash", "-c", &script, lab.program()]).finish(LONG);
    // `cat` waits until the other end is closed.
    let orphan = start(format!("true | {{ cat; {AS_COMMAND}; }}"));
    assert_eq!((orphan.status, &*orphan.stdout), (Some(125), ""), "{}", orphan.stderr);
    assert!(orphan.stderr.contains("the process that started this one has ended"));
    // The shell has the other end itself.
    let child = start(format!("exec 0<> <(:); {AS_COMMAND}"));
    assert_eq!((child.status, &*child.stdout), (Some(0), "started\n"), "{}", child.stderr);
}

#[test]
fn signal_ends_the_process_in_the_foreground_with_success() {
    let world = world!();
    let (child, pid) = child_with_namespaces(&world);
    let pasta = world.host(&["./pasta", "-f", "--config-net", "-P", "pid", &pid]);
    assert!(eventually(MOMENT, || {
        std::fs::read_to_string(world.file("pid")).is_ok_and(|text| text.ends_with('\n'))
    }));
    let written = std::fs::read_to_string(world.file("pid")).unwrap();
    assert_eq!(written.trim(), pasta.pid().to_string());
    assert_eq!(pasta.end().status, Some(0));
    drop(child);
}

#[test]
fn failure_is_one_line_and_status_1() {
    let world = world!();
    let taken = world.host(&["python3", "peer.py", "tcp_server", "127.0.0.1", "8081"]);
    taken.wait_for_output("listening");
    let (child, pid) = child_with_namespaces(&world);
    for (arguments, text) in [
        ("--netns ./missing", "cannot open the namespace ./missing"),
        ("-t 127.0.0.1/8081:80", "-t 127.0.0.1/8081:80: cannot listen at 127.0.0.1:8081/tcp"),
        ("-t 192.0.2.99/8082", "cannot listen at 192.0.2.99:8082/tcp"),
        ("-t all", "-t all: "),
        ("-U all", "-U all: "),
        ("-o 192.0.2.99", "--outbound 192.0.2.99: the host has no such address"),
        ("--outbound-if4 nothere", "--outbound-if4 nothere"),
        ("-i nothere", "--interface nothere"),
        ("-P /nothere/pid", "--pid /nothere/pid"),
        ("--pcap /nothere/file", "--pcap /nothere/file"),
        ("--pcap file --queues 8", "--pcap captures one queue: leave out --queues"),
        ("--fqdn name", "--fqdn is not supported"),
        ("--mtu many", "invalid value 'many'"),
    ] {
        let target = if arguments.contains("netns") { "" } else { &pid };
        let words = ["./pasta"].into_iter().chain(arguments.split(' ')).chain([target]);
        let words: Vec<_> = words.filter(|word| !word.is_empty()).collect();
        let ended = world.host(&words).finish(LONG);
        assert_eq!((ended.status, ended.stdout.as_str()), (Some(1), ""), "{arguments}: {ended:?}");
        assert!(ended.stderr.starts_with("pasta: ") && ended.stderr.contains(text), "{ended:?}");
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
    }
    let inside = ["nsenter", "--user", "--net", "--preserve-credentials", "--target", &pid];
    // The kernel removes an interface while the process that has made it ends.
    let left = || world.host(&[&inside[..], &["ip", "-o", "link"]].concat()).succeed(MOMENT);
    let only_loopback = || left().lines().count() == 1;
    assert!(eventually(MOMENT, only_loopback), "an interface is left: {}", left());
    drop(child);
    taken.end();
}

#[test]
fn published_ports_lead_to_the_namespace_over_both_families() {
    let world = world!();
    let script = "python3 peer.py tcp_server :: 80 & python3 peer.py udp_server :: 53 & wait";
    let ports = "-t 8080:80 -t 127.0.0.1/8081,8082-8083:79-80,~8082 -u [::]/5353:53";
    let mut words = vec!["./pasta", "--config-net"];
    words.extend(ports.split(' ').chain(["--", "sh", "-c", script]));
    // One listener in the namespace has both families.
    let command = world.host(&words);
    command.wait_for_output("listening\nlistening");
    let client = |mode: &str, ip: &str, port: &str| {
        let said = world.outside(&["python3", "peer.py", mode, ip, port]).succeed(LONG);
        assert!(said.contains("equal"), "{mode} {ip} {port}: {said}");
    };
    client("tcp_client", HOST_V4, "8080");
    client("tcp_client", HOST_V6, "8080");
    client("udp_client", HOST_V6, "5353");
    let local = |port: &str, mode: &str| {
        world.host(&["python3", "peer.py", mode, "127.0.0.1", port]).succeed(LONG)
    };
    assert!(local("8083", "tcp_client").contains("equal"));
    assert!(local("8082", "refused").contains("refused"));
    let from_outside = world.outside(&["python3", "peer.py", "refused", HOST_V4, "8083"]);
    assert!(from_outside.succeed(LONG).contains("refused"));
    command.end();
}

#[test]
fn host_is_reachable_only_with_an_option() {
    let world = world!();
    let servers = [("127.0.0.1", 7001), (HOST_V4, 7002)].map(|(ip, port)| {
        let server = world.host(&["python3", "peer.py", "tcp_server", ip, &port.to_string()]);
        server.wait_for_output("listening");
        server
    });
    let run = |options: &str, script: &str| {
        let words = ["./pasta", "--config-net", "-4"].into_iter();
        let words: Vec<_> =
            words.chain(options.split_whitespace()).chain(["--", "sh", "-ec", script]).collect();
        world.host(&words).succeed(LONG)
    };
    let closed = "for to in '192.0.2.1 7001' '169.254.1.2 7002' '127.0.0.1 7001'; do \
                    python3 peer.py refused $to; done";
    let said = run("", closed);
    assert_eq!(said.lines().filter(|line| line.starts_with("refused")).count(), 3, "{said}");
    for (options, address, port) in [
        ("--map-gw", "192.0.2.1", "7001"),
        ("--map-guest-addr 169.254.1.2", "169.254.1.2", "7002"),
        ("--map-host-loopback 169.254.1.3", "169.254.1.3", "7001"),
    ] {
        let output = run(options, &format!("python3 peer.py tcp_client {address} {port}"));
        assert!(output.contains("equal"), "{options}: {output}");
    }
    servers.into_iter().for_each(|server| drop(server.end()));
}

#[test]
fn protocol_that_is_switched_off_is_not_carried() {
    require!(PING);
    let world = world!();
    let servers =
        [world.server("tcp_server", FAR_V4, 7000), world.server("udp_server", FAR_V4, 7001)];
    let script = format!(
        "python3 peer.py refused {FAR_V4} 7000; python3 peer.py udp_client {FAR_V4} 7001; \
         ! ping -c 1 -W 1 {FAR_V4} >/dev/null"
    );
    let words = ["./pasta", "--config-net", "--no-tcp", "--no-icmp", "--", "sh", "-ec", &script];
    let output = world.host(&words).succeed(LONG);
    assert!(output.contains("timed out") && output.contains("equal"), "{output}");
    servers.into_iter().for_each(|server| drop(server.end()));
}

#[test]
fn connections_have_the_source_address_and_interface_of_the_options() {
    require!(PING);
    let world = world!();
    world.cable("wan1", "out1").succeed(MOMENT);
    let set_up = "ip addr add 192.0.2.3/24 dev wan0; ip addr add 203.0.113.2/24 dev wan1; ip link set wan1 up";
    world.host(&["sh", "-ec", set_up]).succeed(MOMENT);
    let set_up = "ip addr add 203.0.113.1/24 dev out1; ip link set out1 up";
    world.outside(&["sh", "-ec", set_up]).succeed(MOMENT);
    let servers =
        [world.server("tcp_server", FAR_V4, 7000), world.server("udp_server", FAR_V4, 7001)];
    let script = format!(
        "ip -o -4 address show scope global; python3 peer.py tcp_client {FAR_V4} 7000; \
         python3 peer.py udp_client {FAR_V4} 7001; ping -c 1 -W 20 {FAR_V4} >/dev/null && echo pinged"
    );
    // The second interface has no route to the servers, so the host's main table would not choose it.
    let route = "ip route add default via 203.0.113.1 dev wan1 metric 1000";
    world.host(&["sh", "-ec", route]).succeed(MOMENT);
    for (options, own, client) in [
        ("-o 192.0.2.3", "192.0.2.2/24", "192.0.2.3"),
        ("--outbound-if4 wan1", "203.0.113.2/24", "203.0.113.2"),
        ("--outbound-if4 wan1 -i wan0", "192.0.2.2/24", "203.0.113.2"),
    ] {
        let words = ["./pasta", "--config-net", "-4"].into_iter().chain(options.split(' '));
        let words: Vec<_> = words.chain(["--", "sh", "-ec", &script]).collect();
        let output = world.host(&words).succeed(LONG);
        assert!(output.contains(own) && output.contains("pinged"), "{options}: {output}");
        assert_eq!(output.matches("equal").count(), 2, "{options}: {output}");
        for server in &servers {
            // Another thread reads what the server says.
            let said = || server.stdout.text();
            let expected = format!("client {client}");
            let is_last =
                || said().lines().rfind(|l| l.starts_with("client")) == Some(expected.as_str());
            assert!(eventually(MOMENT, is_last), "{options}: {}", said());
        }
    }
    servers.into_iter().for_each(|server| drop(server.end()));
}

#[test]
fn packets_in_both_directions_are_captured_into_a_file() {
    let world = world!();
    let server = world.server("tcp_server", FAR_V4, 7000);
    let script = format!("python3 peer.py tcp_client {FAR_V4} 7000");
    let words = ["./pasta", "--config-net", "-p", "packets", "--", "sh", "-ec", &script];
    world.host(&words).succeed(LONG);
    server.end();
    let bytes = std::fs::read(world.file("packets")).unwrap();
    let field = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!((field(0), field(20)), (0xa1b2_c3d4, 1));
    let (mut at, mut sent, mut received) = (24, 0, 0);
    while at < bytes.len() {
        let len = field(at + 8) as usize;
        let frame = &bytes[at + 16..at + 16 + len];
        // IPv4 and TCP, from or to port 7000 of the server.
        if frame[12..14] == [8, 0] && frame[23] == 6 {
            let payload = len - 14 - 20 - usize::from(frame[46] >> 4) * 4;
            match frame[26..30] == [198, 51, 100, 1] {
                true => received += payload,
                false => sent += payload,
            }
        }
        at += 16 + len;
    }
    let noise = usize::try_from(world.file("noise").metadata().unwrap().len()).unwrap();
    assert!(sent >= noise && received > noise, "{sent} and {received} of {noise} bytes");
}

#[test]
fn host_without_network_still_gets_an_interface() {
    let world = world!();
    let script = "ip link set wan0 down; ./pasta --config-net -- ip -o address show tap0";
    let output = world.host(&["sh", "-ec", script]).succeed(LONG);
    assert!(output.contains("169.254.2.1/16"), "{output}");
}

#[test]
fn namespace_of_another_user_is_refused() {
    require!(Need::Root, Need::Program("setpriv", "util-linux"));
    let world = world!();
    // Every user can execute the copy.
    let place = tempfile::Builder::new().permissions(readable_by_all()).tempdir().unwrap();
    let copy = place.path().join("pasta");
    copy_program(&copy);
    let (child, pid) = child_with_namespaces(&world);
    let netns = format!("/proc/{pid}/ns/net");
    let copy = copy.to_str().unwrap();
    let other = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups", "env", "--chdir=/"];
    for target in [&["--netns", &netns][..], &[&pid]] {
        let words = [&other[..], &[copy, "--config-net"], target].concat();
        let ended = world.host(&words).finish(LONG);
        assert_eq!(ended.status, Some(1), "{ended:?}");
        assert!(ended.stderr.contains("ermission denied"), "{}", ended.stderr);
    }
    drop(child);
}

fn readable_by_all() -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o755)
}

#[test]
fn alternatives_give_and_take_the_names() {
    require!(Need::Program("update-alternatives", "dpkg"));
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    for name in ["bin", "alt", "admin"] {
        std::fs::create_dir(path(name)).unwrap();
    }
    copy_program(&path("bin/ringfence"));
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist/pasta-alternatives");
    let run = |action: &str| {
        let mut command = std::process::Command::new(script);
        let places = [("BINDIR", "bin"), ("ALTDIR", "alt"), ("ADMINDIR", "admin")];
        command.arg(action).envs(places.map(|(name, place)| (name, path(place))));
        command.output().unwrap()
    };
    assert!(run("install").status.success());
    for name in ["pasta", "passt", "pesto"] {
        let program = path("bin").join(name);
        let version = std::process::Command::new(program).arg("--version").output().unwrap();
        let expected = format!("{name} (Ringfence)");
        assert!(String::from_utf8_lossy(&version.stdout).starts_with(&expected), "{version:?}");
    }
    assert!(run("remove").status.success());
    assert!(["pasta", "passt", "pesto"].iter().all(|name| !path("bin").join(name).exists()));
    std::fs::write(path("bin/pasta"), "of another package").unwrap();
    let refused = run("install");
    assert!(!refused.status.success(), "{refused:?}");
    assert_eq!(std::fs::read_to_string(path("bin/pasta")).unwrap(), "of another package");
}

#[test]
fn container_of_podman_4_is_connected_as_by_slirp4netns() {
    let world = world!();
    let program = world.lab.program().to_owned();
    std::os::unix::fs::symlink(program, world.file("slirp4netns")).unwrap();
    world.name_servers(&[OUTSIDE_V4]);
    let servers =
        [world.server("tcp_server", FAR_V4, 7000), world.server("udp_server", OUTSIDE_V4, 53)];
    // Podman holds the other ends of both pipes.
    let script = [
        MAKE_NAMESPACE,
        "mkfifo ready exit; sleep 1000 > exit & keeper=$!
         ./slirp4netns --disable-host-loopback --mtu=65520 --enable-sandbox --enable-seccomp --enable-ipv6 -c \
             -r 3 -e 4 --netns-type=path $PWD/netns tap0 3> ready 4< exit & slirp=$!
         [ \"$(cat ready)\" = 1 ]; echo ready\n",
        "$inside ip -o address show tap0\n",
        &format!("$inside python3 peer.py tcp_client {FAR_V4} 7000\n"),
        "$inside python3 peer.py udp_client 10.0.2.3 53\n",
        "$inside python3 peer.py refused 10.0.2.2 7000\n",
        "kill $keeper; wait $keeper || :; wait $slirp; echo ended\n",
        "umount -l netns; rm netns\n",
    ];
    let output = in_user_namespace(&world, "", &script.concat()).succeed(LONG);
    assert!(output.starts_with("ready\n") && output.ends_with("ended\n"), "{output}");
    assert!(output.contains("10.0.2.100/24") && output.contains("fd00::100/64"), "{output}");
    assert_eq!(output.matches("equal").count(), 2, "{output}");
    let help = world.host(&["./slirp4netns", "--help"]).succeed(MOMENT);
    for option in [
        "--disable-host-loopback",
        "--mtu",
        "--enable-sandbox",
        "--enable-seccomp",
        "--enable-ipv6",
        "--outbound-addr",
    ] {
        assert!(help.contains(option), "Podman looks for {option} in the help: {help}");
    }
    servers.into_iter().for_each(|server| drop(server.end()));
}

#[test]
fn namespace_with_several_queues_exchanges_data_and_shows_each_queue() {
    let world = world!();
    let servers = [FAR_V4, FAR_V6].map(|ip| world.server("tcp_server", ip, 7000));
    let script = format!(
        "for i in $(seq 4); do for ip in {FAR_V4} {FAR_V6}; do python3 peer.py tcp_client $ip 7000; done; done; \
         echo done; until [ -e asked ]; do sleep 0.05; done"
    );
    let options = "--config-net --queues auto --status-socket status -q";
    let mut words = vec!["./pasta"];
    words.extend(options.split(' ').chain(["--", "sh", "-ec", &script]));
    let guest = world.host(&words);
    guest.wait_for_output("done");
    let status = world.host(&[world.lab.program(), "status", "--socket", "status"]);
    let status = status.succeed(MOMENT);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let queues = if processors > 1 { processors.min(8) } else { 0 };
    assert_eq!(status.matches("tap: queue ").count(), queues, "{status}");
    assert!(!status.contains(" lost by full queues"), "{status}");
    std::fs::write(world.file("asked"), "").unwrap();
    let output = guest.succeed(LONG);
    assert_eq!(output.matches("equal").count(), 8, "{output}");
    servers.into_iter().for_each(|server| drop(server.end()));
}

#[test]
fn status_socket_shows_the_traffic_of_a_namespace() {
    require!(Need::Program("bash", "bash"));
    let world = world!();
    let script = format!("echo x > /dev/udp/{FAR_V4}/9; until [ -e asked ]; do sleep 0.05; done");
    let words =
        ["./pasta", "--config-net", "--status-socket", "status", "-q", "--", "bash", "-c", &script];
    let guest = world.host(&words);
    let start =
        |words: &[&str]| world.host(&[&[world.lab.program()], words].concat()).finish(MOMENT);
    // The socket has its name before the session listens there.
    let is_asked = || start(&["status", "--socket", "status"]).status == Some(0);
    assert!(eventually(MOMENT, is_asked));
    let ringfence =
        |words: &[&str]| world.host(&[&[world.lab.program()], words].concat()).succeed(MOMENT);
    let status = || ringfence(&["status", "--socket", "status"]);
    let sent = || status().contains("tap: 2 B sent by the guest, 0 B received\n");
    assert!(eventually(MOMENT, sent), "{}", status());
    assert!(status().contains(" pasta for pasta, process "), "{}", status());
    let table = ringfence(&["top", "--interval", "0.1", "--socket", "status"]);
    assert!(table.contains("FRONT  ") && table.contains(" pasta tap\n"), "{table}");
    let json = ringfence(&["top", "--json", "--interval", "0.1", "--socket", "status"]);
    let all: serde_json::Value = serde_json::from_str(&json).unwrap();
    let front =
        all["items"].as_array().unwrap().iter().find(|item| item["kind"] == "front").unwrap();
    assert_eq!(front["counters"]["udp_bytes_in"], 2, "{all:#}");
    std::fs::write(world.file("asked"), "").unwrap();
    assert_eq!(guest.finish(LONG).status, Some(0));
}

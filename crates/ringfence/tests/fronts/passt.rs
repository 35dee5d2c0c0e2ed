//! End-to-end tests of `ringfence passt`, as QEMU, libkrun and libvirt start it. The host is a network namespace, and
//! servers and clients are in another one. A virtual machine is a third one, whose network card is on the socket
//! (`machine.py`); `cargo xtask vm linux passt` boots a real one.

use std::time::Duration;

use crate::require;
use crate::support::machine::{self, CONFIGURE, CONFIGURE_V4};
use crate::support::needs::{Need, PING};
use crate::support::world::{FAR_V4, FAR_V6, Families, HOST_V4, HOST_V6, OUTSIDE_V4, World};
use crate::support::{Finished, MOMENT, Running, eventually, write_noise};

/// Time limit for a complete scenario.
const LONG: Duration = Duration::from_secs(90);

/// Creates a world with both families and the files of a machine, or returns from the test.
macro_rules! world {
    () => {{
        require!(Need::Program("busybox", "busybox"));
        match World::new(Families::Both) {
            Some(world) => {
                write_noise(&world.file("noise"), 4);
                machine::prepare(&world);
                let program = world.lab.program().to_owned();
                std::os::unix::fs::symlink(program, world.file("passt")).unwrap();
                world
            }
            None => return,
        }
    }};
}

/// Program in the background, by the file with its id. Dropping it ends the program, also after a failure.
struct Background<'a> {
    world: &'a World,
    pid_file: &'static str,
}

impl<'a> Background<'a> {
    /// Starts `passt OPTIONS --pid FILE`, which has nothing to say.
    fn start(world: &'a World, pid_file: &'static str, options: &str) -> Background<'a> {
        let started = passt(world, &format!("{options} --pid {pid_file}"));
        assert_eq!((started.status, started.stderr.as_str()), (Some(0), ""), "{started:?}");
        Background { world, pid_file }
    }

    fn runs(&self) -> bool {
        runs(self.world, self.pid_file)
    }
}

impl Drop for Background<'_> {
    fn drop(&mut self) {
        if self.runs() {
            let pid = std::fs::read_to_string(self.world.file(self.pid_file)).unwrap();
            let _ = self.world.host(&["kill", pid.trim()]).finish(MOMENT);
            let ended = eventually(MOMENT, || !self.runs());
            assert!(ended || std::thread::panicking(), "it does not end by SIGTERM");
        }
    }
}

/// Starts `passt OPTIONS` on the host, which returns once it is in the background.
fn passt(world: &World, options: &str) -> Finished {
    let words: Vec<&str> = ["./passt"].into_iter().chain(options.split_whitespace()).collect();
    world.host(&words).finish(MOMENT)
}

/// Starts a machine whose card is attached there.
fn machine(world: &World, attach: &str, script: &str) -> Running {
    world.host(&["python3", "machine.py", attach, script])
}

/// Returns `true` while the process of a file with its id runs.
fn runs(world: &World, pid_file: &str) -> bool {
    let pid = std::fs::read_to_string(world.file(pid_file)).unwrap();
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid.trim()));
    status.is_ok_and(|status| !status.contains("State:\tZ") && !status.contains("State:\tX"))
}

#[test]
fn machine_configures_itself_and_exchanges_data_in_both_directions() {
    exchange("", "vm.socket");
}

#[test]
fn machine_on_vhost_user_exchanges_data_in_both_directions_by_its_memory() {
    exchange("--vhost-user", "vhost-user:vm.socket");
}

#[test]
fn machine_that_lends_a_pool_exchanges_data_in_both_directions() {
    exchange("--vhost-user --require-pool 16M", "vhost-user-pool:vm.socket");
}

/// Asks a `passt` with `--status-socket status`.
fn status(world: &World) -> String {
    world.host(&[world.lab.program(), "status", "--socket", "status"]).succeed(MOMENT)
}

#[test]
fn machine_that_lends_a_pool_is_told_from_one_that_shares_all_its_memory() {
    let world = world!();
    let _background =
        Background::start(&world, "pid", "--vhost-user -s vm.socket -l log --status-socket status");
    assert!(status(&world).contains("vhost-user: no memory of a machine\n"));
    for (attach, seen) in [
        ("vhost-user-pool:vm.socket", "lent 16 MiB"),
        ("vhost-user:vm.socket", "sees all of the machine's memory (16 MiB)"),
    ] {
        let script =
            format!("{CONFIGURE} echo configured; until [ -e asked ]; do sleep 0.05; done");
        let machine = machine(&world, attach, &script);
        assert!(eventually(LONG, || machine.stdout.text().contains("configured")));
        let found = status(&world);
        assert!(found.contains(&format!("vhost-user: {seen}\n")), "{found}");
        assert!(world.lab.read("log").contains(seen), "{}", world.lab.read("log"));
        std::fs::write(world.file("asked"), "").unwrap();
        assert_eq!(machine.finish(LONG).status, Some(0));
        std::fs::remove_file(world.file("asked")).unwrap();
    }
    let log = world.lab.read("log");
    assert_eq!(log.matches("warning: ").count(), 1, "{log}");
    assert!(eventually(MOMENT, || status(&world).contains("no memory of a machine")));
}

#[test]
fn machine_that_shares_more_than_a_pool_is_refused_with_the_options_to_use() {
    for (rule, attach) in [
        ("8M", "vhost-user-pool:vm.socket"),
        ("8M", "vhost-user:vm.socket"),
        ("auto", "vhost-user:vm.socket"),
    ] {
        let world = world!();
        let options = format!(
            "--vhost-user --require-pool {rule} -s vm.socket -l log --status-socket status"
        );
        let _background = Background::start(&world, "pid", &options);
        // The connection ends while the machine is set up, or behind that.
        machine(&world, attach, "true").finish(LONG);
        let refused = "vhost-user: 1 clients were disconnected";
        assert!(eventually(MOMENT, || status(&world).contains(refused)), "{}", status(&world));
        let log = || world.lab.read("log");
        for word in ["hands over 16 MiB", "-device ivshmem-plain", "iommu_platform=on"] {
            assert!(eventually(MOMENT, || log().contains(word)), "{rule} {attach}: {}", log());
        }
        let none = "vhost-user: no memory of a machine\n";
        assert!(eventually(MOMENT, || status(&world).contains(none)), "{}", status(&world));
    }
}

/// Hypervisor that shares memory with a secret, or a pool and keeps the secret beside it.
const MACHINE_WITH_A_SECRET: &str = r#"
import sys, time, vhost_user
secret = open("secret", "rb").read() * 1000
has_pool = sys.argv[1] == "pool"
card = vhost_user.Card("vm.socket", None, has_pool)
memory = card.to_guest.memory
if not has_pool:
    memory[-len(secret):] = secret
print("shared", flush=True)
time.sleep(600)
"#;

#[test]
fn secret_beside_the_pool_is_not_found_in_the_memory_of_passt() {
    let canary = include_str!("../../../../vm/linux/canary.py");
    for (kind, rule, is_found) in [("pool", "--require-pool auto", false), ("all", "", true)] {
        let world = world!();
        std::fs::write(world.file("canary.py"), canary).unwrap();
        std::fs::write(world.file("secret"), "a-secret-of-32-bytes-in-a-machine").unwrap();
        std::fs::write(world.file("scan"), "").unwrap();
        let options = format!("--vhost-user {rule} -s vm.socket -q --status-socket status");
        let _background = Background::start(&world, "pid", &options);
        let machine = world.host(&["python3", "-c", MACHINE_WITH_A_SECRET, kind]);
        machine.wait_for_output("shared");
        assert!(eventually(MOMENT, || status(&world).contains("16 MiB")), "{}", status(&world));
        world.host(&["python3", "canary.py", ".", "pid"]).succeed(LONG);
        let found = world.lab.read("scanned");
        assert_eq!(!found.starts_with("hits 0 "), is_found, "{kind}: {found}");
        assert!(found.starts_with("hits "), "{found}");
        machine.end();
    }
}

#[test]
fn machine_on_vfkit_socket_exchanges_data_in_both_directions() {
    exchange("--vfkit", "vfkit:vm.socket");
}

/// A datagram socket has no end of a connection: the kernel tells it to the next frame. The program then ends, and its
/// socket is gone.
#[test]
fn program_on_vfkit_socket_ends_with_its_machine_and_serves_nobody_else() {
    require!(PING);
    let world = world!();
    let background = Background::start(&world, "pid", "--vfkit -s vm.socket -u 5353:53 --quiet");
    // The ping tells the uplink the machine's Ethernet address.
    let script = format!(
        "{CONFIGURE_V4}
         ping -c 1 -W 20 {OUTSIDE_V4} >/dev/null; echo configured
         until [ -e asked ]; do sleep 0.05; done"
    );
    let machine = machine(&world, "vfkit:vm.socket", &script);
    assert!(eventually(LONG, || machine.stdout.text().contains("configured")));
    let other = "import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.bind('other.socket')
try: s.sendto(b'VFKT', 'vm.socket')
except PermissionError: print('refused')";
    let other = world.host(&["python3", "-c", other]).finish(MOMENT);
    assert_eq!(other.stdout.trim(), "refused", "{other:?}");
    std::fs::write(world.file("asked"), "").unwrap();
    assert_eq!(machine.finish(LONG).status, Some(0));
    // A datagram to a port of the machine becomes a frame.
    let send = format!(
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('{HOST_V4}', 5353))"
    );
    let ended = eventually(LONG, || {
        world.outside(&["python3", "-c", &send]).finish(MOMENT);
        !background.runs()
    });
    assert!(ended, "it still waits for its machine");
}

/// A machine that is attached there exchanges data with a program that has this option.
fn exchange(transport: &str, attach: &str) {
    require!(PING);
    let world = world!();
    world.name_servers(&[OUTSIDE_V4]);
    let servers = [
        world.server("tcp_server", FAR_V4, 7000),
        world.server("tcp_server", FAR_V6, 7000),
        world.server("udp_server", OUTSIDE_V4, 53),
    ];
    let options = format!("{transport} -s vm.socket -t 8080:80 -t 8081:81 -u 5353:53 --quiet");
    let background = Background::start(&world, "pid", &options);
    let script = format!(
        "{CONFIGURE}
         ping -c 1 -W 20 {FAR_V4} >/dev/null; ping -6 -c 1 -W 20 {FAR_V6} >/dev/null && echo pinged
         python3 peer.py tcp_client {FAR_V4} 7000
         python3 peer.py tcp_client {FAR_V6} 7000
         python3 peer.py udp_client {OUTSIDE_V4} 53
         python3 peer.py tcp_server 0.0.0.0 80 & one=$!
         python3 peer.py tcp_server :: 81 & two=$!
         python3 peer.py udp_server 0.0.0.0 53 & three=$!
         until [ -e asked ]; do sleep 0.05; done; kill $one $two $three"
    );
    let machine = machine(&world, attach, &script);
    assert!(eventually(LONG, || machine.stdout.text().matches("listening").count() == 3));
    for (mode, address, port) in [
        ("tcp_client", HOST_V4, "8080"),
        ("tcp_client", HOST_V6, "8081"),
        ("udp_client", HOST_V4, "5353"),
    ] {
        let client = world.outside(&["python3", "peer.py", mode, address, port]);
        assert!(client.succeed(LONG).contains("equal"));
    }
    std::fs::write(world.file("asked"), "").unwrap();
    let ended = machine.finish(LONG);
    let output = &ended.stdout;
    assert_eq!(ended.status, Some(0), "{ended:?}");
    let lease = format!("{HOST_V4}/24 mtu 65520 router {OUTSIDE_V4} dns {OUTSIDE_V4}");
    assert!(output.contains(&lease) && output.contains("pinged"), "{output}");
    assert_eq!(output.matches("equal").count(), 3, "{output}");
    // The machine sees the real addresses of its clients.
    for client in ["client 192.0.2.1\n", "client 2001:db8:1::1\n"] {
        assert!(output.contains(client), "{output}");
    }
    assert!(background.runs(), "it waits for the next machine");
    drop(servers.map(Running::end));
}

#[test]
fn machine_connects_again_after_its_end() {
    for (transport, attach) in [("", "vm.socket"), ("--vhost-user", "vhost-user:vm.socket")] {
        let world = world!();
        let server = world.server("tcp_server", FAR_V4, 7000);
        let _background = Background::start(&world, "pid", &format!("{transport} -s vm.socket -q"));
        let script = format!("{CONFIGURE} python3 peer.py tcp_client {FAR_V4} 7000");
        for _ in 0..3 {
            let ended = machine(&world, attach, &script).succeed(LONG);
            assert!(ended.contains("equal"), "{ended}");
        }
        server.end();
    }
}

#[test]
fn hostile_hypervisor_is_disconnected_and_the_next_machine_is_served() {
    let world = world!();
    let server = world.server("tcp_server", FAR_V4, 7000);
    let _background = Background::start(&world, "pid", "--vhost-user -s vm.socket -l log");
    let attack = "
import array, os, socket, struct
def request(number, payload=b''):
    return struct.pack('=III', number, 1, len(payload)) + payload
file = os.memfd_create('memory')
os.ftruncate(file, 4096)
region = lambda *words: request(5, struct.pack('=IIQQQQ', 1, 0, *words))
for message in (os.urandom(500), request(1)[:7], request(99), region(0, 8192, 0, 0), region(0, 4096, 0, 1),
                request(12, bytes(8)), request(2, b'\\xff' * 8), request(8, struct.pack('=II', 7, 16))):
    client = socket.socket(socket.AF_UNIX)
    client.connect('vm.socket')
    files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [file]))]
    client.sendmsg([message], files)
    try:
        while client.recv(65536): pass
    except ConnectionError: pass
";
    world.host(&["python3", "-c", attack]).succeed(LONG);
    let script = format!("{CONFIGURE} python3 peer.py tcp_client {FAR_V4} 7000");
    let output = machine(&world, "vhost-user:vm.socket", &script).succeed(LONG);
    assert!(output.contains("equal"), "{output}");
    let log = world.lab.read("log");
    assert_eq!(log.matches("the client is disconnected: ").count(), 8, "{log}");
    server.end();
}

#[test]
fn capabilities_of_vhost_user_are_printed() {
    let world = world!();
    let printed = passt(&world, "--print-capabilities");
    assert_eq!((printed.status, printed.stdout.as_str()), (Some(0), "{\n  \"type\": \"net\"\n}\n"));
}

#[test]
fn one_off_ends_with_its_client_and_removes_the_socket() {
    let world = world!();
    // Root of the host would have no right to remove the file any more.
    let start =
        "exec unshare --user --map-root-user ./passt --one-off --socket vm.socket -P pid -q";
    world.host(&["sh", "-ec", start]).succeed(MOMENT);
    let background = Background { world: &world, pid_file: "pid" };
    assert!(world.file("vm.socket").exists() && background.runs());
    machine(&world, "vm.socket", CONFIGURE).succeed(LONG);
    assert!(eventually(MOMENT, || !background.runs()));
    assert!(!world.file("vm.socket").exists());
    // In the foreground the exit status tells it.
    let front = world.host(&["./passt", "-1", "-f", "-s", "vm.socket"]);
    front.wait_for_error("listens at");
    machine(&world, "vm.socket", CONFIGURE).succeed(LONG);
    assert_eq!(front.finish(MOMENT).status, Some(0));
}

#[test]
fn connected_socket_is_taken_by_number_and_ends_with_its_client() {
    let world = world!();
    let server = world.server("tcp_server", FAR_V4, 7000);
    let script = format!("{CONFIGURE} python3 peer.py tcp_client {FAR_V4} 7000");
    // As QEMU starts it.
    let started = machine(&world, "fd:./passt --quiet --mtu 9000 --pid pid", &script);
    let output = started.succeed(LONG);
    assert!(output.contains("equal") && output.contains("mtu 9000"), "{output}");
    assert!(eventually(MOMENT, || !runs(&world, "pid")));
    server.end();
}

#[test]
fn descriptor_that_is_no_connected_stream_socket_is_refused() {
    let world = world!();
    for (fd, why) in [("9", "--fd 9"), ("2", "--fd 2"), ("5", "connected stream socket")] {
        let script = format!("exec 5</dev/null; ./passt --fd {fd}");
        let ended = world.host(&["sh", "-c", &script]).finish(MOMENT);
        assert_eq!(ended.status, Some(1), "{ended:?}");
        assert!(ended.stderr.contains(why) && ended.stderr.lines().count() == 1, "{ended:?}");
    }
}

#[test]
fn arguments_of_libvirt_start_it() {
    let world = world!();
    let server = world.server("tcp_server", FAR_V4, 7000);
    let options = format!(
        "--one-off --socket {0}/1-net0.socket --interface wan0 --log-file {0}/log \
         --address 10.77.0.2 --netmask 24 --address 2001:db8:77::2 --tcp-ports 2022:22 \
         --udp-ports 127.0.0.1%lo/5000-5020:6000-6020,~5010-5015",
        world.file("").display()
    );
    let background = Background::start(&world, "1-net0-passt.pid", &options);
    // The router is not in the machine's network, so it comes with a route of its own.
    let script = format!(
        "ip link set eth0 up; busybox udhcpc -i eth0 -n -q -f -s ./on-lease 2>/dev/null
         python3 peer.py tcp_client {FAR_V4} 7000; python3 peer.py tcp_server 0.0.0.0 22 & server=$!
         until [ -e asked ]; do sleep 0.05; done; kill $server"
    );
    let machine = machine(&world, "1-net0.socket", &script);
    assert!(eventually(LONG, || machine.stdout.text().contains("listening")));
    let client = world.outside(&["python3", "peer.py", "tcp_client", HOST_V4, "2022"]);
    assert!(client.succeed(LONG).contains("equal"));
    std::fs::write(world.file("asked"), "").unwrap();
    let output = machine.succeed(LONG);
    assert!(output.contains("10.77.0.2/24") && output.contains("equal"), "{output}");
    assert!(eventually(MOMENT, || !background.runs()));
    assert!(world.lab.read("log").contains("10.77.0.2/24"));
    server.end();
}

#[test]
fn second_program_at_the_same_socket_fails_with_one_line() {
    let world = world!();
    let background = Background::start(&world, "pid", "-s vm.socket -q");
    let second = passt(&world, "-s vm.socket -P pid2");
    assert_eq!(second.status, Some(1), "{second:?}");
    assert!(second.stderr.starts_with("passt: --socket vm.socket: "), "{second:?}");
    assert_eq!(second.stderr.lines().count(), 1, "{second:?}");
    assert!(background.runs() && world.file("vm.socket").exists());
}

#[test]
fn default_socket_is_the_first_free_one() {
    let world = world!();
    // The program may be below /tmp, which is empty here. The working directory stays.
    let script = "cp --dereference passt own; mount -t tmpfs none /mnt; mv own /mnt/passt
                  mount -t tmpfs none /tmp; /mnt/passt -P one; /mnt/passt -P two; ls /tmp
                  kill $(cat one) $(cat two)";
    let ended = world.host(&["unshare", "--mount", "sh", "-ec", script]).finish(LONG);
    assert_eq!(ended.status, Some(0), "{ended:?}");
    assert_eq!(ended.stdout, "passt_1.socket\npasst_2.socket\n");
    assert!(ended.stderr.contains("passt: listens at /tmp/passt_2.socket"), "{ended:?}");
}

#[test]
fn hostile_client_is_disconnected_and_the_next_machine_is_served() {
    let world = world!();
    let server = world.server("tcp_server", FAR_V4, 7000);
    let _background = Background::start(&world, "pid", "-s vm.socket -l log");
    let attack = "
import os, socket
for attack in (b'\\xff' * 70000, b'\\0\\1\\0\\x20', b'\\0\\0\\0\\x0e' * 5000, os.urandom(100000), b'\\0'):
    for _ in range(20):
        client = socket.socket(socket.AF_UNIX)
        client.connect('vm.socket')
        try:
            client.sendall(attack)
            client.shutdown(socket.SHUT_WR)
            while client.recv(65536): pass
        except ConnectionError: pass
";
    world.host(&["python3", "-c", attack]).succeed(LONG);
    let script = format!("{CONFIGURE} python3 peer.py tcp_client {FAR_V4} 7000");
    assert!(machine(&world, "vm.socket", &script).succeed(LONG).contains("equal"));
    let log = world.lab.read("log");
    let complaints = log.matches("the stream announces a frame").count();
    assert!((1..=8).contains(&complaints), "{complaints} in {log}");
    server.end();
}

#[test]
fn machine_reaches_neither_the_hosts_loopback_nor_its_own_addresses() {
    let world = world!();
    let start = |address: &str| {
        let server = world.host(&["python3", "peer.py", "tcp_server", address, "7000"]);
        server.wait_for_output("listening");
        server
    };
    let servers = ["127.0.0.1", HOST_V6].map(start);
    let background = Background::start(&world, "pid", "-s vm.socket -q");
    let script = format!(
        "{CONFIGURE}
         for to in {OUTSIDE_V4} {HOST_V6}; do python3 peer.py refused $to 7000; done"
    );
    let output = machine(&world, "vm.socket", &script).succeed(LONG);
    assert_eq!(output.matches("refused [").count(), 2, "{output}");
    drop(background);
    // With the option, an address leads to the loopback.
    let _background = Background::start(&world, "pid", "-s vm.socket -q --map-gw");
    let script = format!("{CONFIGURE} python3 peer.py tcp_client {OUTSIDE_V4} 7000");
    assert!(machine(&world, "vm.socket", &script).succeed(LONG).contains("equal"));
    drop(servers.map(Running::end));
}

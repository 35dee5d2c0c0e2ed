//! Soak test of the uplink: real programs in a guest, over a network that changes, loses, delays, reorders and repeats
//! (`path.py`). `cargo xtask soak network` runs it for two hours.
//!
//! ```text
//! guest: soak.py ── up0 ── uplink ── host ─┬─ wan1 ── path.py ── out1 ─┬─ outside: mirrors, servers
//!                                          └─ wan0 ─── veth ──── out0 ─┘
//! ```
//!
//! Every [`STEP`] the path changes. Attempts fail only with an address of the host that was removed meanwhile, and programs
//! by failures of their own ([`Program::own_failure`]). Between
//! the parts of the time the guest pauses: all its flows end, and then the uplink must have as many descriptors as at
//! the start, spare sockets aside, and as much memory as in the second pause. The first part fills lists and caches, of which a
//! run of a few minutes has fewer by then.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::require;
use crate::support::mirror::{self, Client};
use crate::support::needs::{Need, skip_what_is_not_installed};
use crate::support::world::{FAR_V4, FAR_V6, Families, World};
use crate::support::{MOMENT, Running, eventually, write_noise};

/// Time limit for steps of the set-up.
const LONG: Duration = Duration::from_secs(90);
/// Time between two changes of the path.
const STEP: Duration = Duration::from_secs(10);
/// Number of pauses of the guest.
const PAUSES: u32 = 4;
/// Time that a guest's load may take, beside its longest attempt, to see that it pauses or ends.
const NOTICED: Duration = Duration::from_secs(30);
/// Time limit for the end of flows that no program uses: mappings of UDP end after three minutes.
const FORGOTTEN: Duration = Duration::from_secs(240);
/// Sockets of an uplink's thread that are opened ahead of the next connections, of both families.
const SPARES: usize = 2 * 4;
/// Growth of memory that the allocator may cause, in KiB.
const NOISE_KIB: u64 = 2048;
/// Programs at a time.
const WORKERS: &str = "3";

/// Addresses of the host on the bad path, one after the other, and of its router.
const ADDRESSES: [&str; 2] = ["203.0.113.2", "203.0.113.3"];
const ROUTER: &str = "203.0.113.1";

/// Change of the path.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// Settings of `path.py`.
    Path(&'static str),
    Mtu(u16),
    /// The default route leads over the other link; connections keep their addresses.
    OtherLink,
    BadLink,
    /// The link carries nothing for two seconds.
    Outage,
    /// Another address takes the place of the host's.
    Address,
}

const CHANGES: [Change; 12] = [
    Change::Path(r#"{"delay": 5}"#),
    Change::Path(r#"{"delay": 20, "loss": 0.01}"#),
    Change::Mtu(1280),
    Change::Path(r#"{"delay": 5, "jitter": 30}"#),
    Change::OtherLink,
    Change::Path(r#"{"delay": 10, "jitter": 20, "loss": 0.02, "repeat": 0.02}"#),
    Change::BadLink,
    Change::Outage,
    Change::Mtu(1500),
    Change::Address,
    Change::Path(r#"{"delay": 60, "loss": 0.005}"#),
    Change::Path("{}"),
];

/// Program besides those of the mirrors. `{v4}`, `{v6}` and `{at}` stand for the servers and its directory.
struct Program {
    name: &'static str,
    needs: &'static [Need],
    /// Server outside, if it needs one of its own.
    server: Option<&'static str>,
    command: &'static str,
    /// Text of a failure that is the program's own when the MTU falls meanwhile.
    own_failure: Option<&'static str>,
}

const CURL: Need = Need::Program("curl", "curl");
const OPENSSL: Need = Need::Program("openssl", "openssl");
const GIT: Need = Need::Program("git", "git");

/// Server that answers with the version of TLS, each connection in a thread. `openssl s_server` serves one after the other: a
/// client whose address was removed kept it from all others for the quarter of an hour in which the kernel repeats its bytes.
const TLS_SERVER: &str = "exec python3 -c \"
import http.server, ssl
class Version(http.server.BaseHTTPRequestHandler):
    timeout = 60
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.connection.version().encode())
    def log_message(self, *words):
        pass
server = http.server.ThreadingHTTPServer(('{v4}', 4434), Version)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain('cert.pem', 'key.pem')
server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
server.serve_forever()
\"";

const PROGRAMS: [Program; 10] = [
    Program {
        name: "curl-file",
        needs: &[CURL],
        server: Some("exec python3 -m http.server --bind {v4} 8000 2>/dev/null"),
        command: "curl -sSf --max-time 80 -o {at}/noise http://{v4}:8000/noise; cmp {at}/noise noise",
        own_failure: None,
    },
    Program {
        name: "curl-upload",
        needs: &[CURL],
        server: None,
        command: "test \"$(curl -sSf --max-time 80 -T noise http://{v4}:7302/)\" = \"$(sha256sum < noise | cut -d' ' -f1)\"",
        own_failure: None,
    },
    Program {
        name: "curl-http2",
        needs: &[CURL, OPENSSL, Need::Program("nghttpd", "nghttp2-server")],
        server: Some("exec nghttpd -a {v6} 8443 key.pem cert.pem -d ."),
        command: "curl -sSfk --max-time 80 --http2 -o {at}/noise https://[{v6}]:8443/noise; cmp {at}/noise noise",
        own_failure: None,
    },
    Program {
        name: "git-clone",
        needs: &[GIT],
        server: Some(
            "exec git -c safe.directory='*' daemon --export-all --reuseaddr --listen={v4} --base-path=$PWD/repositories",
        ),
        command: "git clone -q git://{v4}/one {at}/one; cmp {at}/one/noise noise",
        own_failure: None,
    },
    Program {
        name: "openssl",
        needs: &[OPENSSL],
        server: Some(TLS_SERVER),
        command: "echo 'GET / HTTP/1.0\n' | timeout 80 openssl s_client -quiet -connect {v4}:4434 2>/dev/null | grep -q TLS",
        own_failure: None,
    },
    Program {
        name: "browser",
        needs: &[Need::Program("chromium", "chromium")],
        server: None,
        command: "timeout 80 chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage \
                  --user-data-dir=$PWD/{at}/profile --dump-dom http://{v4}:8000/page.html >{at}/dom 2>{at}/errors || echo status $?; \
                  grep -q 'page of the soak' {at}/dom || { tail -n 2 {at}/errors; grep -o 'ERR_[A-Z_]*' {at}/dom | tail -n 1; false; }",
        own_failure: None,
    },
    Program {
        name: "ssh",
        needs: &[
            Need::Program("ssh", "openssh-client"),
            Need::Program("ssh-keygen", "openssh-client"),
            Need::Program("sshd", "openssh-server"),
        ],
        server: Some(
            "ssh-keygen -q -t ed25519 -N '' -f host_key; ssh-keygen -q -t ed25519 -N '' -f id; cp id.pub authorized; \
             mkdir -p /run/sshd; exec $(command -v sshd || echo /usr/sbin/sshd) -D -e -f /dev/null -h $PWD/host_key -p 2222 \
             -o ListenAddress={v4} -o StrictModes=no -o AuthorizedKeysFile=$PWD/authorized -o PidFile=none -o UsePAM=no",
        ),
        command: "for i in 1 2 3 4 5 6; do echo line $i; sleep 5; done | \
                  ssh -F none -i id -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o ServerAliveInterval=2 \
                  -o ServerAliveCountMax=15 -p 2222 root@{v4} cat | grep -c line | grep -qx 6",
        own_failure: None,
    },
    Program {
        name: "http3",
        needs: &[
            OPENSSL,
            Need::Program("gtlsclient", "ngtcp2-client"),
            Need::Program("gtlsserver", "ngtcp2-server"),
        ],
        server: Some(
            "exec $(command -v gtlsserver || echo /usr/sbin/gtlsserver) -q -d . {v4} 4433 key.pem cert.pem",
        ),
        command: "timeout 80 gtlsclient -q --exit-on-all-streams-close --download={at} {v4} 4433 \
                  https://{v4}:4433/noise; cmp {at}/noise noise",
        // ngtcp2 forbids fragments and does not make its packets smaller: gtlsserver says "Message too long" for each
        // one until the client gives up. It does so between two namespaces that a veth joins, too.
        own_failure: Some("ERR_IDLE_CLOSE"),
    },
    Program {
        name: "mqtt",
        needs: &[
            Need::Program("mosquitto", "mosquitto"),
            Need::Program("mosquitto_sub", "mosquitto-clients"),
        ],
        server: Some(
            "printf 'listener 1883 {v4}\nallow_anonymous true\n' > mosquitto.conf; mosquitto -c mosquitto.conf & \
             while sleep 40; do mosquitto_pub -h {v4} -t soak -m woke || :; done",
        ),
        // It sleeps until the next message.
        command: "mosquitto_sub -h {v4} -t soak -k 30 -C 1 -W 80 | grep -qx woke",
        own_failure: None,
    },
    // WireGuard in user space at both ends, and a file through the tunnel.
    Program {
        name: "wireguard",
        needs: &[
            CURL,
            Need::Program("wireguard-go", "wireguard-go"),
            Need::Program("wg", "wireguard-tools"),
        ],
        server: Some(
            "umask 77; wg genkey > tunnel.key; wg genkey > tunnel.own; mkdir -p /run/wireguard; \
             rm -f /run/wireguard/soak1.sock; LOG_LEVEL=error wireguard-go -f soak1 2>/dev/null & \
             until [ -S /run/wireguard/soak1.sock ]; do sleep 0.1; done; \
             wg set soak1 private-key tunnel.key listen-port 51820 \
             peer $(wg pubkey < tunnel.own) allowed-ips 10.77.0.2/32; \
             ip addr add 10.77.0.1/24 dev soak1; ip link set soak1 up; wg pubkey < tunnel.key > tunnel.pub; \
             exec python3 -m http.server --bind 10.77.0.1 8000 2>/dev/null",
        ),
        command: "rm -f /run/wireguard/soak0.sock; mkdir -p /run/wireguard; \
                  LOG_LEVEL=error wireguard-go -f soak0 2>/dev/null & tunnel=$!; trap 'kill $tunnel' EXIT; \
                  until [ -S /run/wireguard/soak0.sock ]; do sleep 0.1; done; \
                  wg set soak0 private-key tunnel.own listen-port 51821 \
                  peer $(cat tunnel.pub) endpoint {v4}:51820 allowed-ips 10.77.0.1/32 persistent-keepalive 5; \
                  ip addr add 10.77.0.2/32 dev soak0; ip link set soak0 up; ip route add 10.77.0.1 dev soak0; \
                  curl -sSf --max-time 80 -o {at}/noise http://10.77.0.1:8000/noise; cmp {at}/noise noise",
        own_failure: None,
    },
];

/// Returns the time of the test: `RINGFENCE_SOAK_MINUTES`.
fn time() -> Duration {
    let minutes = std::env::var("RINGFENCE_SOAK_MINUTES").map_or(5, |text| text.parse().unwrap());
    Duration::from_secs(60 * minutes)
}

/// Runs a script on the host.
fn host(world: &World, script: &str) {
    world.host(&["sh", "-ec", script]).succeed(MOMENT);
}

/// Builds the bad path, which is the default one.
fn build_path(world: &World) -> Running {
    std::fs::write(world.file("path.py"), include_str!("../support/path.py")).unwrap();
    std::fs::write(world.file("path"), "{}").unwrap();
    // The script's own process is outside, so its file names that namespace.
    let outside = world.outside(&["sh", "-c", "echo $$; exec sleep infinity"]);
    outside.wait_for_output("\n");
    let netns = format!("/proc/{}/ns/net", outside.stdout.text().trim());
    let path = world.host(&["python3", "path.py", &netns, "wan1", "out1"]);
    path.wait_for_output("ready");
    let script = format!(
        "for i in all wan1; do echo 0 > /proc/sys/net/ipv4/conf/$i/rp_filter; done; ip link set wan1 mtu 1500 up; \
         ip addr add {}/24 dev wan1; ip route replace default via {ROUTER} dev wan1",
        ADDRESSES[0]
    );
    let outside_script = format!(
        "for i in all out1 out0; do echo 0 > /proc/sys/net/ipv4/conf/$i/rp_filter; done; \
         ip link set out1 mtu 1500 up; ip addr add {ROUTER}/24 dev out1"
    );
    world.outside(&["sh", "-ec", &outside_script]).succeed(MOMENT);
    host(world, &script);
    outside.end();
    path
}

/// State of the path that changes.
struct Path<'a> {
    world: &'a World,
    address: usize,
    epoch: u32,
    mtu: u16,
    /// Number of times that the MTU has fallen.
    falls: u32,
    settings: &'static str,
}

impl Path<'_> {
    fn change(&mut self, change: Change) {
        let world = self.world;
        match change {
            Change::Path(settings) => {
                self.settings = settings;
                self.set(settings);
            }
            Change::Mtu(mtu) => {
                self.falls += u32::from(mtu < self.mtu);
                self.mtu = mtu;
                std::fs::write(world.file("falls"), self.falls.to_string()).unwrap();
                let both = |name: &str| format!("ip link set {name} mtu {mtu}");
                host(world, &both("wan1"));
                world.outside(&["sh", "-ec", &both("out1")]).succeed(MOMENT);
            }
            Change::OtherLink => {
                host(world, "ip route replace default via 192.0.2.1 dev wan0");
            }
            Change::BadLink => {
                host(world, &format!("ip route replace default via {ROUTER} dev wan1"));
            }
            Change::Outage => {
                self.set(r#"{"up": false}"#);
                std::thread::sleep(Duration::from_secs(2));
                self.set(self.settings);
            }
            Change::Address => {
                let old = ADDRESSES[self.address];
                self.address = 1 - self.address;
                let new = ADDRESSES[self.address];
                self.begin_epoch();
                // The kernel would remove the second address with the first.
                host(
                    world,
                    &format!(
                        "ip addr del {old}/24 dev wan1; ip addr add {new}/24 dev wan1; \
                         ip route replace default via {ROUTER} dev wan1"
                    ),
                );
                self.begin_epoch();
            }
        }
    }

    fn set(&self, settings: &str) {
        let (new, path) = (self.world.file("path.new"), self.world.file("path"));
        std::fs::write(&new, settings).unwrap();
        std::fs::rename(new, path).unwrap();
    }

    /// Excuses attempts that have begun before.
    fn begin_epoch(&mut self) {
        self.epoch += 1;
        std::fs::write(self.world.file("epoch"), self.epoch.to_string()).unwrap();
    }
}

/// Command of a program, and the text of a failure that is its own when the MTU falls.
type Command = (String, Option<&'static str>);

/// Returns the programs that are installed, with their commands, and starts their servers.
fn start_programs(world: &World) -> (BTreeMap<String, Command>, Vec<Running>) {
    let fill = |text: &str| text.replace("{v4}", FAR_V4).replace("{v6}", FAR_V6);
    write_noise(&world.file("noise"), 2);
    std::fs::write(world.file("page.html"), "<p>page of the soak</p>").unwrap();
    let certificate = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 \
                       -subj /CN=www.example -keyout key.pem -out cert.pem 2>/dev/null";
    world.outside(&["sh", "-ec", certificate]).succeed(LONG);
    let repository = "export HOME=$PWD GIT_CONFIG_NOSYSTEM=1; mkdir -p repositories/one; cd repositories/one; \
                      git init -q; cp ../../noise .; git add noise; \
                      git -c user.name=a -c user.email=a@example commit -qm one";
    world.outside(&["sh", "-ec", repository]).succeed(LONG);
    let mut servers = vec![mirror::start(world, FAR_V4)];
    let mut commands = BTreeMap::new();
    for client in mirror::installed_clients().into_iter().filter(|client| client.name != "node") {
        let Client { name, port, .. } = client;
        commands.insert((*name).to_owned(), (client.command_for(FAR_V4, *port), None));
    }
    for Program { name, needs, server, command, own_failure } in PROGRAMS {
        if let Some(reason) = needs.iter().find_map(|need| need.missing()) {
            skip_what_is_not_installed(&format!("{name}: {reason}"));
            continue;
        }
        commands.insert(name.to_owned(), (fill(command), own_failure));
        servers.extend(server.map(|server| world.outside(&["sh", "-ec", &fill(server)])));
    }
    (commands, servers)
}

/// Returns the time limit for attempts to end once the guest pauses. The load says how long its longest attempt takes.
fn pause_limit(guest: &Running) -> Duration {
    let output = guest.stdout.text();
    let longest = output.lines().find_map(|line| line.strip_prefix("longest ")).unwrap();
    NOTICED + Duration::from_secs(longest.parse().unwrap())
}

/// Pauses the guest, and waits until the uplink has no flow left. Returns its memory in KiB.
fn pause(world: &World, guest: &Running, at_rest: usize, number: usize) -> u64 {
    std::fs::write(world.file("pause"), "").unwrap();
    let count = |word: &str| guest.stdout.text().lines().filter(|line| *line == word).count();
    let limit = pause_limit(guest);
    assert!(eventually(limit, || count("paused") == number), "the guest's attempts do not end");
    let uplink = guest.inner("uplink");
    let paused = Instant::now();
    let forgotten = eventually(FORGOTTEN, || uplink.descriptors() <= at_rest);
    let (descriptors, memory) = (uplink.descriptors(), uplink.own_memory_kib());
    let took = paused.elapsed();
    println!("pause {number}: {descriptors} descriptors after {took:.1?}, {memory} KiB");
    assert!(forgotten, "flows are older than their programs: {at_rest} descriptors are of no flow");
    std::fs::remove_file(world.file("pause")).unwrap();
    assert!(eventually(MOMENT, || count("resumed") == number), "the guest does not go on");
    memory
}

/// Attempts of one kind.
#[derive(Default)]
struct Tally {
    ok: u32,
    excused: u32,
    failed: Vec<String>,
    longest_ms: u64,
}

/// Reads the guest's output. Returns the attempts by their names.
fn tally(output: &str) -> BTreeMap<String, Tally> {
    let mut all = BTreeMap::<String, Tally>::new();
    for line in output.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        let [name, outcome, took, detail] = words[..] else { continue };
        let Ok(took) = took.parse::<u64>() else { continue };
        let tally = all.entry(name.to_owned()).or_default();
        match outcome {
            "ok" => {
                tally.ok += 1;
                tally.longest_ms = tally.longest_ms.max(took);
            }
            "excused" => tally.excused += 1,
            _ => tally.failed.push(format!("{took} ms: {detail}")),
        }
    }
    all
}

/// Ends a server. The sessions of sshd whose client lost its address go on after it, with its standard streams.
fn end_with_sessions(server: Running) {
    for process in server.processes() {
        // One that has ended needs no signal.
        let _ = rustix::process::kill_process(process.pid, Signal::KILL);
    }
    server.finish(MOMENT);
}

#[test]
#[ignore = "long: two hours by cargo xtask soak network, at least five minutes"]
fn real_programs_lose_nothing_over_a_network_that_changes_loses_and_reorders() {
    require!(CURL, OPENSSL, GIT, Need::Program("dpkg-deb", "dpkg"), Need::Root);
    let Some(world) = World::new(Families::Both) else { return };
    let bad_path = build_path(&world);
    let (commands, servers) = start_programs(&world);
    let names: Vec<&str> = commands.keys().map(String::as_str).collect();
    println!("programs: {}", names.join(", "));
    std::fs::write(world.file("programs"), serde_json::to_string(&commands).unwrap()).unwrap();
    std::fs::write(world.file("soak.py"), include_str!("../support/soak.py")).unwrap();
    let flows = world.outside(&["python3", "soak.py", "serve", FAR_V4]);
    flows.wait_for_output("listening");
    let mut path =
        Path { world: &world, address: 0, epoch: 0, mtu: 1500, falls: 0, settings: "{}" };
    path.begin_epoch();
    let script = format!(
        "touch up; until [ -e begin ]; do sleep 0.05; done; \
         exec python3 soak.py guest {FAR_V4} programs {WORKERS}"
    );
    let guest = world.lone_guest("--uplink-address private --queues auto", &script);
    assert!(eventually(LONG, || world.file("up").exists()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    let at_rest = guest.inner("uplink").descriptors() + threads * SPARES;
    std::fs::write(world.file("begin"), "").unwrap();
    guest.wait_for_output("loaded");
    let part = time() / PAUSES;
    let mut changes = CHANGES.into_iter().cycle();
    let mut memory = Vec::new();
    for number in 1..=PAUSES as usize {
        let until = Instant::now() + part;
        while Instant::now() < until {
            path.change(changes.next().unwrap());
            std::thread::sleep(STEP.min(until.saturating_duration_since(Instant::now())));
        }
        memory.push(pause(&world, &guest, at_rest, number));
    }
    std::fs::write(world.file("end"), "").unwrap();
    let limit = pause_limit(&guest);
    let output = guest.succeed(limit);
    // Before the checks: their sessions outlive a test that fails.
    servers.into_iter().for_each(end_with_sessions);
    drop((flows.end(), bad_path.end()));
    let all = tally(&output);
    println!("{:<12} {:>6} {:>8} {:>7} {:>8}", "program", "ok", "excused", "failed", "longest");
    for (name, Tally { ok, excused, failed, longest_ms }) in &all {
        println!("{name:<12} {ok:>6} {excused:>8} {:>7} {longest_ms:>5} ms", failed.len());
        failed.iter().for_each(|failed| println!("  {failed}"));
    }
    let failed: usize = all.values().map(|tally| tally.failed.len()).sum();
    assert_eq!(failed, 0, "attempts failed while the host's address stayed");
    let own = ["stream", "sleeper", "datagrams"];
    for name in names.into_iter().chain(own) {
        assert!(all.get(name).is_some_and(|tally| tally.ok > 0), "{name} never succeeded");
    }
    let grown = memory[memory.len() - 1].saturating_sub(memory[1]);
    assert!(grown <= NOISE_KIB, "the uplink's memory grows: {memory:?} KiB");
}

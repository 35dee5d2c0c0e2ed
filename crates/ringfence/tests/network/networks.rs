//! End-to-end tests of host networks that change while an uplink runs: no network at first, an address that changes, a
//! default route that moves to another link, a link that goes down and comes back, and other name servers. The host is a
//! network namespace. Guests are those of `run`, of `pasta`, and a virtual machine of `passt` (`machine.py`).
//!
//! A guest reaches a server again soon after each change: before the host itself has fetched the same page a number of times
//! ([`HOST_FETCHES`]), which takes about two seconds on an idle machine and longer beside a load.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::require;
use crate::support::needs::Need;
use crate::support::world::{FAR_V4, FAR_V6, Families, HOST_V4, OUTSIDE_V4, World, name_server};
use crate::support::{MOMENT, Running, eventually, write_noise};

const DNSMASQ: Need = Need::Program("dnsmasq", "dnsmasq-base");
const CURL: Need = Need::Program("curl", "curl");
const BUSYBOX: Need = Need::Program("busybox", "busybox");

/// Time limit for a complete scenario.
const LONG: Duration = Duration::from_secs(90);
/// Number of times that the host fetches a page, from a change of its network on, before the guest's `curl` must have
/// succeeded.
const HOST_FETCHES: usize = 50;
/// Number of attempts, from a change of the name servers on, one of which must resolve a name.
const ATTEMPTS: usize = 20;
/// Tries to fetch a URL until told to stop: its arguments. Writes the time, in ns, at which each attempt that succeeded
/// began, and at which it ended. An attempt without a connection ends soon, because the next one may have it.
const PROBE: &str = r#"
    touch "$2.begun"
    until [ -e "$3" ]; do
        begun=$(date +%s%N)
        curl -sS -o /dev/null --connect-timeout 0.4 --max-time 30 "$1" 2>/dev/null && echo $begun $(date +%s%N) >> "$2"
        sleep 0.02
    done
"#;
/// Addresses of the host on its second link, one after the other, and of that link's router.
const SECOND_V4: &str = "203.0.113.2";
const THIRD_V4: &str = "203.0.113.3";
const SECOND_ROUTER: &str = "203.0.113.1";
/// Address of the name server as guests of pasta and passt see it.
const STAND_IN: &str = "192.0.2.53";

/// Way of connecting a guest to the host's network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Front {
    Run,
    Pasta,
    Passt,
}

impl Front {
    const ALL: [Front; 3] = [Front::Run, Front::Pasta, Front::Passt];
}

/// Guest of one of the fronts, on the host of a world.
struct Guest<'a> {
    world: &'a World,
    front: Front,
    pid: String,
    processes: Vec<Running>,
}

impl Guest<'_> {
    fn start(world: &World, front: Front) -> Guest<'_> {
        let (pid, processes) = match front {
            Front::Run => (String::new(), vec![start_run(world)]),
            Front::Pasta => start_pasta(world),
            Front::Passt => start_passt(world),
        };
        Guest { world, front, pid, processes }
    }

    /// Starts a command in the guest.
    fn spawn(&self, words: &[&str]) -> Running {
        let program = self.world.lab.program().to_owned();
        let enter = match self.front {
            Front::Run => vec![&program, "exec", "web", "--"],
            Front::Pasta => {
                vec!["nsenter", "--user", "--net", "--preserve-credentials", "--target", &self.pid]
            }
            Front::Passt => vec!["nsenter", "--net", "--target", &self.pid],
        };
        self.world.host(&[&enter[..], words].concat())
    }

    /// Changes the host's network. The guest then reaches a server again, before the host has reached it
    /// [`HOST_FETCHES`] times.
    fn reaches_after(&self, url: &str, change: impl FnOnce()) {
        let [guest, host, stop] = ["guest", "host", "probe.stop"].map(|name| self.world.file(name));
        let words = |url: &str, file: &std::path::Path| {
            ["sh", "-c", PROBE, "probe", url, file.to_str().unwrap(), stop.to_str().unwrap()]
                .map(str::to_owned)
        };
        // The server's log tells the two apart.
        let [of_guest, of_host] = [words(url, &guest), words(&format!("{url}?host"), &host)];
        let probes = [
            self.spawn(&of_guest.each_ref().map(String::as_str)),
            self.world.host(&of_host.each_ref().map(String::as_str)),
        ];
        let begun = [&guest, &host].map(|file| file.with_extension("begun"));
        assert!(eventually(LONG, || begun.iter().all(|file| file.exists())));
        change();
        let changed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
        let reached = eventually(LONG, || !successes(&guest, changed).is_empty());
        // The host's list is complete up to its next success.
        let first = successes(&guest, changed).first().copied().unwrap_or(u128::MAX);
        eventually(MOMENT, || successes(&host, changed).last().is_some_and(|last| *last > first));
        std::fs::write(&stop, "").unwrap();
        probes.into_iter().for_each(|probe| drop(probe.succeed(LONG)));
        let before = successes(&host, changed).iter().filter(|ended| **ended < first).count();
        for file in [&guest, &host, &stop].into_iter().chain(&begun) {
            let _ = std::fs::remove_file(file);
        }
        let front = self.front;
        assert!(reached, "{front:?} does not reach {url}");
        let took = Duration::from_nanos(u64::try_from(first - changed).unwrap());
        println!("{front:?} reaches {url} after {took:?} and {before} fetches of the host");
        assert!(before <= HOST_FETCHES, "{front:?}, {url}: {before} fetches of the host, {took:?}");
    }

    /// Waits until the guest resolves a name by the host's name servers, in few attempts.
    fn resolves(&self) {
        let mut attempts = 0;
        let resolved = || {
            attempts += 1;
            let words = match self.front {
                Front::Run => &["getent", "ahostsv4", "www.far.example"][..],
                Front::Pasta | Front::Passt => &["python3", "peer.py", "query", STAND_IN, "53"],
            };
            let found = self.spawn(words).finish(LONG);
            found.status == Some(0) && found.stdout.contains(FAR_V4)
        };
        assert!(eventually(LONG, resolved), "{:?} resolves no name", self.front);
        assert!(attempts <= ATTEMPTS, "{:?} resolves a name in attempt {attempts}", self.front);
    }

    fn end(self) {
        std::fs::write(self.world.file("stop"), "").unwrap();
        for process in self.processes {
            process.end();
        }
        std::fs::remove_file(self.world.file("stop")).unwrap();
    }
}

/// Returns the ends of the successful attempts in a file that began after the time `since`, both in ns.
fn successes(file: &std::path::Path, since: u128) -> Vec<u128> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let times = |line: &str| {
        let (begun, ended) = line.split_once(' ')?;
        Some((begun.parse::<u128>().ok()?, ended.parse::<u128>().ok()?))
    };
    let after = text.lines().filter_map(times).filter(|(begun, _)| *begun >= since);
    after.map(|(_, ended)| ended).collect()
}

fn start_run(world: &World) -> Running {
    let script = "echo started; until [ -e stop ]; do sleep 0.05; done";
    let guest = world.lone_guest("--name web", script);
    guest.wait_for_output("started");
    let found = || world.host(&[world.lab.program(), "port", "web"]).finish(LONG).status == Some(0);
    assert!(eventually(MOMENT, found));
    guest
}

fn start_pasta(world: &World) -> (String, Vec<Running>) {
    let script = "echo $$; exec sleep 1000";
    let child = world.host(&["unshare", "--user", "--map-root-user", "--net", "sh", "-c", script]);
    assert!(eventually(MOMENT, || child.stdout.text().ends_with('\n')));
    let pid = child.stdout.text().trim().to_owned();
    let _ = std::fs::remove_file(world.file("pid"));
    let options = ["--foreground", "--config-net", "-P", "pid", "--dns-forward", STAND_IN, &pid];
    let pasta = world.host(&[&[world.lab.program(), "pasta"], &options[..]].concat());
    let is_ready =
        || std::fs::read_to_string(world.file("pid")).is_ok_and(|text| text.ends_with('\n'));
    assert!(eventually(MOMENT, is_ready));
    (pid, vec![pasta, child])
}

/// Starts a virtual machine that configures itself by DHCP and by router advertisements.
fn start_passt(world: &World) -> (String, Vec<Running>) {
    crate::support::machine::prepare(world);
    let options = ["--foreground", "--dns-forward", STAND_IN, "-s", "vm.socket"];
    let passt = world.host(&[&[world.lab.program(), "passt"], &options[..]].concat());
    passt.wait_for_error("listens at");
    let script = format!(
        "{} echo pid $$; until [ -e stop ]; do sleep 0.05; done",
        crate::support::machine::CONFIGURE_V4
    );
    let machine = world.host(&["python3", "machine.py", "vm.socket", &script]);
    machine.wait_for_output("pid");
    assert!(eventually(MOMENT, || machine.stdout.text().ends_with('\n')));
    let text = machine.stdout.text();
    let pid = text.lines().find_map(|line| line.strip_prefix("pid ")).unwrap().to_owned();
    (pid, vec![passt, machine])
}

/// Changes the host's network.
fn on_host(world: &World, commands: &str) {
    world.host(&["sh", "-ec", commands]).succeed(MOMENT);
}

/// Starts a web server outside, at all addresses of both families.
fn web_server(world: &World) -> Running {
    let server = world.outside(&["python3", "-u", "-m", "http.server", "--bind", "::", "8000"]);
    server.wait_for_output("Serving");
    server
}

#[test]
#[ignore = "long: three fronts"]
fn guest_started_without_network_reaches_it_once_there_is_one() {
    require!(BUSYBOX);
    require!(DNSMASQ);
    require!(CURL);
    for front in Front::ALL {
        let Some(world) = World::new(Families::Both) else { return };
        let servers = [web_server(&world), world.outside(&name_server(OUTSIDE_V4))];
        on_host(&world, "ip addr flush dev wan0; ip link set wan0 down");
        let guest = Guest::start(&world, front);
        let curl = guest.spawn(&["curl", "-sS", "--max-time", "2", "http://198.51.100.1:8000/"]);
        assert_ne!(curl.finish(LONG).status, Some(0));
        // An address without a route, then a route.
        guest.reaches_after(&format!("http://{OUTSIDE_V4}:8000/"), || {
            on_host(&world, &format!("ip link set wan0 up; ip addr add {HOST_V4}/24 dev wan0"));
        });
        guest.reaches_after(&format!("http://{FAR_V4}:8000/"), || {
            on_host(&world, &format!("ip route add default via {OUTSIDE_V4}"));
        });
        std::fs::write(world.file("resolv.conf"), format!("nameserver {OUTSIDE_V4}\n")).unwrap();
        guest.resolves();
        guest.end();
        servers.into_iter().for_each(|server| drop(server.end()));
    }
}

#[test]
#[ignore = "long: many changes with each front"]
fn guest_follows_an_address_a_route_and_name_servers_that_change() {
    require!(BUSYBOX);
    require!(DNSMASQ);
    require!(CURL);
    for front in Front::ALL {
        let Some(world) = World::new(Families::Both) else { return };
        write_noise(&world.file("noise"), 1);
        world.name_servers(&[OUTSIDE_V4]);
        let web = web_server(&world);
        let servers =
            [world.host(&name_server("127.0.0.53")), world.server("tcp_server", "0.0.0.0", 7000)];
        let far_name_server = world.outside(&name_server(OUTSIDE_V4));
        let guest = Guest::start(&world, front);
        guest.resolves();
        let held = guest.spawn(&["python3", "peer.py", "tcp_client_held", OUTSIDE_V4, "7000"]);
        held.wait_for_output("connected");
        // The default route moves to another link.
        world.cable("wan1", "out1").succeed(MOMENT);
        let second = format!("ip addr add {SECOND_ROUTER}/24 dev out1; ip link set out1 up");
        world.outside(&["sh", "-ec", &second]).succeed(MOMENT);
        let route = format!("ip route replace default via {SECOND_ROUTER}");
        let far = format!("http://{FAR_V4}:8000/");
        guest.reaches_after(&far, || {
            let moved =
                format!("ip addr add {SECOND_V4}/24 dev wan1; ip link set wan1 up; {route}");
            on_host(&world, &moved);
        });
        let by_guest = |line: &str, address: &str| {
            line.starts_with(&format!("::ffff:{address} ")) && line.contains("\"GET / ")
        };
        let seen = |address: &str| {
            eventually(MOMENT, || web.stderr.text().lines().any(|line| by_guest(line, address)))
        };
        assert!(seen(SECOND_V4), "{}", web.stderr.text());
        // The address of that link changes.
        let changed = format!(
            "ip addr del {SECOND_V4}/24 dev wan1; ip addr add {THIRD_V4}/24 dev wan1; {route}"
        );
        guest.reaches_after(&far, || on_host(&world, &changed));
        assert!(seen(THIRD_V4), "{}", web.stderr.text());
        // Name servers that only the host can reach, in a file that replaces the old one.
        std::fs::write(world.file("resolv.conf"), "nameserver 127.0.0.53\n").unwrap();
        far_name_server.end();
        guest.resolves();
        // The second link is gone, as a tunnel that ends.
        guest.reaches_after(&far, || {
            on_host(&world, &format!("ip link del wan1; ip route add default via {OUTSIDE_V4}"));
        });
        // A connection over the first link, which stayed as it was, goes on.
        std::fs::write(world.file("go"), "").unwrap();
        assert!(held.succeed(LONG).contains("equal"), "{front:?}");
        guest.end();
        servers.into_iter().chain([web]).for_each(|server| drop(server.end()));
    }
}

#[test]
fn guest_reaches_the_network_again_after_a_link_was_down() {
    require!(BUSYBOX);
    require!(CURL);
    for front in Front::ALL {
        let Some(world) = World::new(Families::Both) else { return };
        write_noise(&world.file("noise"), 1);
        let servers = [web_server(&world), world.server("tcp_server", "0.0.0.0", 7000)];
        let guest = Guest::start(&world, front);
        let held = guest.spawn(&["python3", "peer.py", "tcp_client_held", OUTSIDE_V4, "7000"]);
        held.wait_for_output("connected");
        // As after a suspend, or where a wireless network ends: the link loses its routes, and its address stays.
        on_host(&world, "ip link set wan0 down");
        let curl =
            guest.spawn(&["curl", "-sS", "--max-time", "2", &format!("http://{FAR_V4}:8000/")]);
        assert_ne!(curl.finish(LONG).status, Some(0));
        guest.reaches_after(&format!("http://{FAR_V4}:8000/"), || {
            on_host(&world, &format!("ip link set wan0 up; ip route add default via {OUTSIDE_V4}"));
        });
        std::fs::write(world.file("go"), "").unwrap();
        assert!(held.succeed(LONG).contains("equal"), "{front:?}");
        guest.end();
        servers.into_iter().for_each(|server| drop(server.end()));
    }
}

#[test]
fn private_addresses_do_not_depend_on_the_host() {
    require!(CURL);
    let Some(world) = World::new(Families::Both) else { return };
    let server = web_server(&world);
    let script = format!(
        "ip -o addr show dev up0; ip route; curl -sS -o /dev/null http://{FAR_V4}:8000/; \
         curl -sS -o /dev/null http://[{FAR_V6}]:8000/; echo reached"
    );
    let output = world.lone_guest("--uplink-address private", &script).succeed(LONG);
    for text in ["10.0.2.100/24", "fd00::100/64", "default via 10.0.2.2", "reached"] {
        assert!(output.contains(text), "{text}: {output}");
    }
    let refused = world.lone_guest("--uplink-address private --uplink-address 10.0.0.2/24", "true");
    assert_eq!(refused.finish(LONG).status, Some(125));
    server.end();
}

/// Asks a UDP server again and again from one port, until the file `end`. Each answer is a line.
const ASKS: &str = r#"
import os, socket, sys
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.bind(("0.0.0.0", 41641))
own.settimeout(0.5)
while not os.path.exists("end"):
    own.sendto(b"x", (sys.argv[1], 7000))
    try:
        own.recv(100)
        print("answered", flush=True)
    except OSError:
        pass
"#;

#[test]
fn port_that_sends_all_the_time_is_answered_after_the_hosts_address_was_replaced() {
    let Some(world) = World::new(Families::V4) else { return };
    std::fs::write(world.file("asks.py"), ASKS).unwrap();
    let server = world.server("udp_server", FAR_V4, 7000);
    let script = format!("exec python3 asks.py {FAR_V4}");
    let guest = world.lone_guest("--uplink-address private", &script);
    guest.wait_for_output("answered");
    let change = "ip addr del 192.0.2.2/24 dev wan0; ip addr add 192.0.2.9/24 dev wan0; \
                  ip route replace default via 192.0.2.1 dev wan0";
    world.host(&["sh", "-ec", change]).succeed(MOMENT);
    let heard = eventually(LONG, || server.stdout.text().contains("client 192.0.2.9"));
    assert!(heard, "the server hears nothing from the new address");
    let count = || guest.stdout.text().matches("answered").count();
    let before = count();
    assert!(eventually(LONG, || count() > before), "the guest has no answer");
    std::fs::write(world.file("end"), "").unwrap();
    guest.succeed(MOMENT);
    drop(server.end());
}

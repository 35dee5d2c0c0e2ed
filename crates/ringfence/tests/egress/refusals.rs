//! Refusals that users and programs can read, and names whose answers are too long for a datagram.

use crate::support::egress::{CURL, DNSMASQ, LONG, MANY, OPENSSL};
use crate::support::eventually;
use crate::support::needs::Need;
use crate::{net, require};

const DIG: Need = Need::Program("dig", "bind9-dnsutils");

#[test]
fn name_with_a_long_answer_resolves_over_datagrams_and_tcp() {
    require!(DIG, OPENSSL, DNSMASQ);
    let net = net!();
    let script = "python3 -c 'import socket; \
         print(\"libc\", len({found[4] for found in socket.getaddrinfo(\"many.test\", 80, type=socket.SOCK_STREAM)}))'; \
         echo edns $(dig +short many.test | wc -l); echo tcp $(dig +tcp +short many.test | wc -l); \
         echo denied $(dig +tcp other.test | grep -o 'status: [A-Z]*')";
    let expected = format!("libc {MANY}\nedns {MANY}\ntcp {MANY}\ndenied status: REFUSED\n");
    let options = "--allow many.test:80 --allow a.test:80";
    assert_eq!(net.guest(options, script), expected);
    // On a switch, the programs ask the guest's own stub.
    assert_eq!(net.world.guest(options, script).succeed(LONG), expected);
    assert!(!net.was_asked_for("other.test"));
    net.end();
}

#[test]
fn denial_is_announced_listed_and_explained_to_the_guest() {
    require!(CURL, DIG, OPENSSL, DNSMASQ);
    let net = net!();
    let script = "curl -sS --max-time 20 -H 'Host: b.test' http://a.test/; \
         dig +short TXT why.other.test; dig +short TXT why.a.test; \
         for i in 1 2 3; do curl -s --max-time 20 http://other.test/ || true; done; \
         curl -s --max-time 20 http://a.test:8080/ || true; echo ready; exec sleep 60";
    let guest = net.world.lone_guest("--name told --allow a.test:80", script);
    guest.wait_for_output("ready");
    let output = guest.stdout.text();
    for line in [
        "denied b.test, no rule; the host allows it by --allow b.test:80\n",
        "\"denied other.test, no rule; the host allows it by --allow other.test:443\"\n",
        "\"allowed a.test, allow a.test:80\"\n",
    ] {
        assert!(output.contains(line), "{line}: {output}");
    }
    let announced = [
        "guest told: denied other.test, no rule; `--allow other.test:443`\n",
        "guest told: denied a.test:8080 (198.51.100.1), no rule; `--allow a.test:8080`\n",
    ];
    for line in announced {
        assert!(eventually(LONG, || guest.stderr.text().contains(line)), "{line}");
    }
    assert_eq!(guest.stderr.text().matches("other.test").count(), 2, "one line");

    let listed = net.policy("why told");
    for line in ["other.test: ", "    no rule\n", "    to allow it: --allow other.test:443\n"] {
        assert!(listed.contains(line), "{line}: {listed}");
    }
    assert!(net.policy("why told --last 1").starts_with("a.test:8080 (198.51.100.1): once, "));
    let json: serde_json::Value = serde_json::from_str(&net.policy("why told --json")).unwrap();
    let other = json.as_array().unwrap().iter().find(|denial| denial["name"] == "other.test");
    assert_eq!(other.unwrap()["allow"], "other.test:443", "{json}");
    let program = net.world.lab.program().to_owned();
    let table = net.world.host(&[&program, "ps"]).succeed(LONG);
    assert!(table.contains("POLICY") && table.contains("1 rule  "), "{table}");
    let json = net.world.host(&[&program, "ps", "--json"]).succeed(LONG);
    assert!(json.contains("\"policy\": \"1 rule (--allow)\""), "{json}");
    drop(guest.end());
    net.end();
}

/// Connects to addresses, and says of each socket if the kernel lists it, by which alone its process can be found.
const LISTED: &str = "
import os, socket, sys
for host, port in (('a.test', 80), ('198.51.100.2', 80)):
    connection = socket.socket()
    error = connection.connect_ex((host, port))
    inode = str(os.fstat(connection.fileno()).st_ino)
    lines = open('/proc/self/net/tcp').readlines()
    print(host, error, 'listed' if any(line.split()[9] == inode for line in lines) else 'gone')";

/// The reason for which `policy why` names no process.
#[test]
fn refused_connection_leaves_no_entry_that_leads_to_its_process() {
    require!(OPENSSL, DNSMASQ);
    let net = net!();
    std::fs::write(net.world.file("listed.py"), LISTED).unwrap();
    let output = net.guest("--allow a.test:80", "python3 listed.py");
    assert_eq!(output, "a.test 0 listed\n198.51.100.2 111 gone\n");
    net.end();
}

#[test]
fn flood_of_denied_names_prints_a_bounded_number_of_lines_and_none_when_quiet() {
    require!(OPENSSL, DNSMASQ);
    let net = net!();
    let script = "for i in $(seq 60); do getent hosts n$i.test || true; done";
    let loud = net.world.lone_guest("--name loud --allow a.test", script).finish(LONG);
    assert_eq!(loud.stderr.matches(": denied n").count(), 20, "{}", loud.stderr);
    assert!(loud.stderr.contains("guest loud: 40 other denials\n"), "{}", loud.stderr);
    let quiet = net.world.lone_guest("--name quiet -q --allow a.test", script).finish(LONG);
    assert!(!quiet.stderr.contains("denied"), "{}", quiet.stderr);
    net.end();
}

#[test]
fn verdicts_of_a_running_guest_are_watched_until_it_ends() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    let script = "echo ready; while ! [ -e go ]; do sleep 0.05; done; \
         curl -sS --max-time 20 http://a.test/; curl -s --max-time 20 http://other.test/ || true; \
         while ! [ -e end ]; do sleep 0.05; done";
    let touch = |name: &str| std::fs::write(net.world.file(name), "").unwrap();
    // The second guest has its policy from `policy set`.
    std::fs::write(net.world.file("a.toml"), "allow = ['a.test:80']\n").unwrap();
    for options in ["--allow a.test:80", ""] {
        for name in ["go", "end"] {
            let _ = std::fs::remove_file(net.world.file(name));
        }
        let guest = net.world.lone_guest(&format!("-v --name watched {options}"), script);
        guest.wait_for_output("ready");
        if options.is_empty() {
            net.policy("set watched a.toml");
        }
        let program = net.world.lab.program().to_owned();
        let watch = net.world.host(&[&program, "policy", "watch", "watched"]);
        // The guest begins once the verdicts are watched.
        assert!(eventually(LONG, || guest.stderr.text().contains("verdicts are watched")));
        touch("go");
        watch.wait_for_output("other.test");
        touch("end");
        guest.succeed(LONG);
        let lines = watch.succeed(LONG);
        let lines: Vec<serde_json::Value> =
            lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let has = |verdict: &str, name: &str| {
            lines.iter().any(|line| line["verdict"] == verdict && line["name"] == name)
        };
        assert!(has("allow", "a.test") && has("deny", "other.test"), "{lines:?}");
    }
    net.end();
}

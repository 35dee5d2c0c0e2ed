//! Names in a guest and on its host, end to end. The host's files of `/etc` are mounted in the test's own mount
//! namespace. The host's network and its name server are network namespaces.

use std::time::Duration;

use crate::require;
use crate::support::needs::Need;
use crate::support::world::{FAR_V4, Families, OUTSIDE_V4, World, dnsmasq};
use crate::support::{MOMENT, Running};

const DNSMASQ: Need = Need::Program("dnsmasq", "dnsmasq-base");

/// Time limit for a complete guest.
const LONG: Duration = Duration::from_secs(120);

/// Contents of the host's `/etc/hosts`.
const HOSTS: &str = "127.0.0.1 localhost\n127.0.0.1 here.example\n\
                     198.51.100.7 db.example db # the base\n198.51.100.8 web\n";
/// Lookups whose results are compared.
const LOOK_UP: &str = "for name in db db.example here.example 198.51.100.7 nobody.example.; do \
                       getent hosts $name || echo no $name; done; getent ahostsv4 db";

/// Creates a world with the files [`HOSTS`] and `resolv.conf`, or returns from the test.
macro_rules! world {
    ($resolv_conf:expr) => {
        match World::new(Families::V4) {
            Some(world) => {
                world.etc("hosts", HOSTS);
                world.etc("resolv.conf", $resolv_conf);
                world
            }
            None => return,
        }
    };
}

/// Starts a name server outside that knows these names.
fn name_server(world: &World, records: &[&str]) -> Running {
    let server = world.outside(&dnsmasq(&[OUTSIDE_V4], records));
    let wait = "for i in $(seq 400); do ss -Hlun 'sport = :53' | grep -q . && exit 0; sleep 0.05; done; exit 1";
    world.outside(&["sh", "-c", wait]).succeed(LONG);
    server
}

#[test]
fn entry_of_the_hosts_file_gives_the_same_in_guest_and_host() {
    let world = world!("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n");
    let expected = world.host(&["sh", "-c", LOOK_UP]).succeed(LONG);
    assert!(expected.contains("198.51.100.7    db.example db\n"), "{expected}");
    assert!(expected.contains("no nobody.example."), "{expected}");
    for options in ["--switch none", "--switch names-hosts"] {
        let output = world.guest(&format!("--uplink host {options}"), LOOK_UP).succeed(LONG);
        assert_eq!(output, expected, "{options}");
    }
}

#[test]
fn hidden_hosts_file_gives_no_names() {
    let world = world!("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n");
    let output = world.lone_guest("--hide /etc/hosts", "cat /etc/hosts").succeed(LONG);
    assert!(output.contains("localhost") && !output.contains("db.example"), "{output}");
}

#[test]
#[ignore = "long: several guests of each front"]
fn name_of_a_guest_comes_before_an_entry_of_the_host() {
    let world = world!("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n");
    let options = "--uplink host --switch names-first";
    let web =
        world.guest(&format!("{options} --name web"), "until [ -e stop ]; do sleep 0.05; done");
    web.wait_for_error("is on the host's network");
    let script = "while grep -q '[[:space:]]web' /etc/hosts; do sleep 0.05; done; \
                  getent hosts web; getent hosts db; touch stop";
    let output = world.guest(options, script).succeed(LONG);
    assert!(output.contains("web") && !output.contains("198.51.100.8"), "{output}");
    assert!(output.contains("198.51.100.7"), "{output}");
    web.succeed(MOMENT);
}

#[test]
fn changes_of_the_host_are_followed_while_a_guest_runs() {
    require!(DNSMASQ);
    for options in ["--switch none", "--switch names-follow"] {
        // No server answers at first.
        let world =
            world!("nameserver 192.0.2.9\nsearch old.example\noptions timeout:1 attempts:1\n");
        let server = name_server(&world, &["--host-record=moved.example,198.51.100.9"]);
        let own_etc = "mkdir etc; cp /etc/passwd /etc/group /etc/nsswitch.conf /etc/hosts /etc/resolv.conf etc; \
                       mount --bind etc /etc";
        world.host(&["sh", "-ec", own_etc]).succeed(MOMENT);
        let script = "cat /etc/resolv.conf; touch ready; \
                      until getent hosts later.example; do sleep 0.05; done; \
                      while grep -q db.example /etc/hosts; do sleep 0.05; done; \
                      until grep -q '^search new.example' /etc/resolv.conf; do sleep 0.05; done; \
                      until getent hosts moved.example; do sleep 0.05; done";
        let guest = world.guest(&format!("--uplink host {options}"), script);
        let ready = world.file("ready");
        assert!(crate::support::eventually(LONG, || ready.exists()), "{}", guest.stderr.text());
        // One file is replaced, as network managers do. The other one is written in place.
        std::fs::write(world.file("hosts"), "198.51.100.20 later.example\n").unwrap();
        std::fs::rename(world.file("hosts"), world.file("etc/hosts")).unwrap();
        let text = format!("nameserver {OUTSIDE_V4}\nsearch new.example\n");
        std::fs::write(world.file("etc/resolv.conf"), text).unwrap();
        let output = guest.succeed(LONG);
        assert!(output.contains("search old.example"), "{options}: {output}");
        assert!(output.contains("198.51.100.20") && output.contains("198.51.100.9"), "{output}");
        server.end();
    }
}

#[test]
fn search_list_and_options_of_the_host_are_in_force_in_a_guest() {
    require!(DNSMASQ);
    let text = format!(
        "nameserver {OUTSIDE_V4}\nsearch a.example b.example\noptions ndots:2 edns0 rotate timeout:3\n"
    );
    let world = world!(&text);
    let records = ["--host-record=one.b.example,198.51.100.30", "--host-record=nas,198.51.100.31"];
    let local = ["--local=/a.example/", "--local=/b.example/", "--local=/nas/"];
    let server = name_server(&world, &[&records[..], &local].concat());
    let look_up = "getent hosts one; getent hosts nas";
    let expected = world.host(&["sh", "-c", look_up]).succeed(LONG);
    assert!(expected.contains("198.51.100.30") && expected.contains("198.51.100.31"), "{expected}");
    for options in ["--switch none", "--switch names-search"] {
        let script = format!("cat /etc/resolv.conf >&2; {look_up}");
        let finished = world.guest(&format!("--uplink host {options}"), &script).finish(LONG);
        assert_eq!(
            (finished.status, &finished.stdout),
            (Some(0), &expected),
            "{}",
            finished.stderr
        );
        assert!(finished.stderr.contains("search a.example b.example"), "{}", finished.stderr);
        assert!(finished.stderr.contains("ndots:2 edns0"), "{}", finished.stderr);
    }
    server.end();
}

#[test]
fn address_of_a_host_entry_needs_a_rule_under_a_policy() {
    let world = world!("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n");
    std::fs::write(world.file("hosts"), format!("{FAR_V4} inner.example\n")).unwrap();
    let server = world.outside(&["python3", "-m", "http.server", "--bind", FAR_V4, "7000"]);
    let fetch = "import urllib.request as u; print(u.urlopen(\"http://inner.example:7000/\", timeout=20).status)";
    let listening = format!(
        "until python3 -c 'import socket; socket.create_connection((\"{FAR_V4}\", 7000))'; do sleep 0.1; done"
    );
    world.host(&["sh", "-c", &listening]).succeed(LONG);
    let script = format!("getent hosts inner.example; python3 -c '{fetch}' || echo denied");
    for (rule, result) in [("inner.example", "denied"), (FAR_V4, "200")] {
        let output = world.lone_guest(&format!("--allow {rule}"), &script).succeed(LONG);
        assert!(output.contains(FAR_V4) && output.contains(result), "{rule}: {output}");
    }
    server.end();
}

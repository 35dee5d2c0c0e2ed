//! End-to-end tests of `--multicast`: services in the guest and outside find each other by mDNS and SSDP, over both
//! address families. The host is a network namespace, and the outside is the other end of its link.

use std::time::Duration;

use crate::support::needs::{Need, skip_what_is_not_installed};
use crate::support::world::{Families, HOST_V4, HOST_V6, OUTSIDE_V4, OUTSIDE_V6, World};
use crate::support::{MOMENT, Running, eventually};

/// Time limit for a complete scenario.
const LONG: Duration = Duration::from_secs(90);
/// Program with a server and a client of each service.
const PROGRAM: &str = include_str!("../support/multicast.py");
/// Questions of a client: to each of the five groups, and from port 5353 to those of mDNS.
const QUESTIONS: usize = 7;

/// Creates a world with both families, or returns from the test.
macro_rules! world {
    () => {
        match World::new(Families::Both) {
            Some(world) => {
                std::fs::write(world.file("multicast.py"), PROGRAM).unwrap();
                world
            }
            None => return,
        }
    };
}

/// Guest with a service `guest`, and a client that asks for the services `outside` and `host`.
fn script(interface: &str, seconds: u32) -> String {
    format!(
        "python3 multicast.py serve {interface} guest & until [ -e ask ]; do sleep 0.05; done; \
         python3 multicast.py ask {interface} outside {seconds}; echo; \
         python3 multicast.py ask {interface} host {seconds}; echo asked; \
         until [ -e stop ]; do sleep 0.05; done; kill $!"
    )
}

/// Starts a guest of `run` or `pasta`.
fn start(world: &World, front: &str, options: &str, seconds: u32) -> Running {
    let interface = if front == "run" { "up0" } else { "wan0" };
    let script = script(interface, seconds);
    let guest = match front {
        "run" => world.lone_guest(options, &script),
        _ => {
            let words = [world.lab.program(), front, "--config-net"].into_iter();
            let words = words.chain(options.split_whitespace()).chain(["--", "sh", "-ec", &script]);
            world.host(&words.collect::<Vec<_>>())
        }
    };
    guest.wait_for_output("serves");
    guest
}

/// Runs a scenario: the guest asks for the services outside and on the host, and both ask for the guest's. Returns what
/// the guest, the outside and the host have printed.
fn scenario(world: &World, front: &str, options: &str, seconds: u32) -> [String; 3] {
    for file in ["ask", "stop"] {
        let _ = std::fs::remove_file(world.file(file));
    }
    let servers = [
        world.outside(&["python3", "multicast.py", "serve", "out0", "outside"]),
        world.host(&["python3", "multicast.py", "serve", "wan0", "host"]),
    ];
    for server in &servers {
        server.wait_for_output("serves");
    }
    let guest = start(world, front, options, seconds);
    std::fs::write(world.file("ask"), "").unwrap();
    let wait = seconds.to_string();
    let ask = |interface| ["python3", "multicast.py", "ask", interface, "guest", &wait];
    let outside = world.outside(&ask("out0")).succeed(LONG);
    let host = world.host(&ask("wan0")).succeed(LONG);
    guest.wait_for_output("asked\n");
    std::fs::write(world.file("stop"), "").unwrap();
    let guest = guest.succeed(LONG);
    let outside_served = servers.map(|server| server.end().stdout);
    [guest, outside + &outside_served[0], host + &outside_served[1]]
}

#[test]
#[ignore = "long: half a minute with each front"]
fn services_are_found_in_both_directions_only_with_the_option() {
    let world = world!();
    // With several queues, datagrams reach threads of the uplink that have no socket of a group.
    for (front, options) in [
        ("run", "--multicast mdns,ssdp --queues 2"),
        ("pasta", "--multicast mdns --multicast ssdp"),
    ] {
        let [guest, outside, host] = scenario(&world, front, options, 15);
        let (of_outside, of_host) = guest.split_once("\n\n").unwrap();
        // The guest sees the outside's real addresses: by IPv6 one of the link, or the other one while that is not usable.
        let from_outside = [
            (".", vec![OUTSIDE_V4]),
            ("ff02", vec!["fe80::", OUTSIDE_V6]),
            ("ff05", vec![OUTSIDE_V6]),
        ];
        for line in of_outside.lines().filter(|line| line.starts_with("answer ")) {
            let words: Vec<_> = line.split(' ').collect();
            let of_group = from_outside.iter().find(|(part, _)| words[2].contains(part)).unwrap();
            assert!(of_group.1.iter().any(|from| words[4].starts_with(from)), "{front}: {guest}");
        }
        for said in [of_outside, of_host] {
            assert_eq!(said.matches("answer ").count(), QUESTIONS, "{front}: {guest}");
        }
        // Outside and host find the service in the guest, at the host's address.
        assert_eq!(outside.matches("answer ").count(), QUESTIONS, "{front}: {outside}\n{guest}");
        assert!(outside.contains(&format!("answer mdns 224.0.0.251 group {HOST_V4}")), "{outside}");
        assert_eq!(host.matches("answer ").count(), QUESTIONS, "{front}: {host}\n{guest}");
        assert!(guest.contains(&format!("asked by mdns 224.0.0.251 {OUTSIDE_V4}")), "{guest}");

        let [guest, outside, host] = scenario(&world, front, "", 2);
        for said in [&guest, &outside, &host] {
            assert!(!said.contains("answer") && !said.contains("asked by"), "{front}: {said}");
        }
        assert_eq!(guest.matches("silence ").count(), 2 * QUESTIONS, "{front}: {guest}");
    }
}

/// Adds addresses and a default route of each family to a link of the host, and takes it up.
fn network(link: &str, v4: (&str, &str), v6: (&str, &str)) -> String {
    let ((own4, router4), (own6, router6)) = (v4, v6);
    format!(
        "ip addr add {own4}/24 dev {link}; ip addr add {own6}/64 dev {link} nodad; ip link set {link} up; \
         ip route replace default via {router4}; ip -6 route replace default via {router6}"
    )
}

#[test]
#[ignore = "long: half a minute of changing links"]
fn groups_are_joined_on_the_link_that_gets_the_default_route() {
    let (second4, second6) = (("203.0.113.2", "203.0.113.1"), ("2001:db8:2::2", "2001:db8:2::1"));
    for front in ["run", "pasta"] {
        let world = world!();
        let on_host = |commands: &str| world.host(&["sh", "-ec", commands]).succeed(LONG);
        world.cable("wan1", "out1").succeed(LONG);
        let outside = format!(
            "echo 0 > /proc/sys/net/ipv6/conf/out1/accept_dad; ip link set out1 up; \
             ip addr add {}/24 dev out1; ip addr add {}/64 dev out1 nodad",
            second4.1, second6.1
        );
        world.outside(&["sh", "-ec", &outside]).succeed(LONG);
        let servers = [("out0", "outside"), ("out1", "second")].map(|(link, name)| {
            let server = world.outside(&["python3", "multicast.py", "serve", link, name]);
            server.wait_for_output("serves");
            server
        });
        on_host("echo 0 > /proc/sys/net/ipv6/conf/wan1/accept_dad");
        let mut first = "true".to_owned();
        if front == "run" {
            // Without a network at the start, there is no group to join. (pasta's guest would have no IPv6 then.)
            on_host("ip addr flush dev wan0; ip link set wan0 down");
            first = network("wan0", (HOST_V4, OUTSIDE_V4), (HOST_V6, OUTSIDE_V6));
        }
        let interface = if front == "run" { "up0" } else { "wan0" };
        let asks = ["outside", "second", "outside"].iter().enumerate().map(|(number, name)| {
            format!(
                "until [ -e ask{number} ]; do sleep 0.05; done; \
                 python3 multicast.py ask {interface} {name} 15; echo done{number}; "
            )
        });
        let asks: String = asks.collect();
        let script = format!(
            "python3 multicast.py serve {interface} guest & {asks} until [ -e stop ]; do sleep 0.05; done; kill $!"
        );
        let options = "--multicast mdns,ssdp";
        let guest = match front {
            "run" => world.lone_guest(options, &script),
            _ => {
                let words = [world.lab.program(), "pasta", "--config-net", "-I", interface];
                world.host(
                    &[&words[..], &["--multicast", "mdns,ssdp", "--", "sh", "-ec", &script]]
                        .concat(),
                )
            }
        };
        guest.wait_for_output("serves");
        let back = format!(
            "ip link del wan1; ip route replace default via {OUTSIDE_V4}; \
             ip -6 route replace default via {OUTSIDE_V6}"
        );
        for (number, (change, link)) in
            [(first, "out0"), (network("wan1", second4, second6), "out1"), (back, "out0")]
                .into_iter()
                .enumerate()
        {
            on_host(&change);
            let told = world.outside(&["python3", "multicast.py", "ask", link, "guest", "15"]);
            let told = told.succeed(LONG);
            assert_eq!(told.matches("answer ").count(), QUESTIONS, "{front} {number}: {told}");
            std::fs::write(world.file(&format!("ask{number}")), "").unwrap();
            guest.wait_for_output(&format!("done{number}"));
        }
        std::fs::write(world.file("stop"), "").unwrap();
        let said = guest.succeed(LONG);
        assert_eq!(said.matches("answer ").count(), 3 * QUESTIONS, "{front}: {said}");
        servers.into_iter().for_each(|server| drop(server.end()));
    }
}

#[test]
fn avahi_finds_services_and_hosts_in_both_directions() {
    for (program, package) in [
        ("avahi-daemon", "avahi-daemon"),
        ("avahi-browse", "avahi-utils"),
        ("dbus-daemon", "dbus-daemon"),
    ] {
        if let Some(reason) = Need::Program(program, package).missing() {
            return skip_what_is_not_installed(&reason);
        }
    }
    let Some(world) = World::new(Families::Both) else { return };
    std::fs::write(world.file("avahi.sh"), include_str!("../support/avahi.sh")).unwrap();
    let script = |other: &str| {
        format!(
            "until [ -e {other} ]; do sleep 0.05; done; \
             until avahi-browse --resolve --parsable --terminate _ringfence._tcp >found && grep -q '^=.*{other}.local' found; \
             do sleep 0.2; done; cat found; avahi-resolve -4 --name {other}.local; echo asked; \
             until [ -e stop ]; do sleep 0.05; done"
        )
    };
    // Each host has a folder of its own for the files of its script.
    let host = |name: &str, interface: &str, other: &str| {
        let folder = world.file(&format!("of-{name}"));
        std::fs::create_dir_all(&folder).unwrap();
        let script = script(other).replace("found", &format!("{}/found", folder.display()));
        let folder = folder.display().to_string();
        [&folder, name, interface, &script].map(str::to_owned)
    };
    let words = |host: &[String; 4]| [&["sh".to_owned(), "avahi.sh".to_owned()][..], host].concat();
    let outside = world.outside(&words(&host("outside", "out0", "guest")));
    let quoted =
        host("guest", "up0", "outside").map(|word| format!("'{}'", word.replace('\'', "'\\''")));
    let guest = world.lone_guest("--multicast mdns", &format!("sh avahi.sh {}", quoted.join(" ")));
    let wait_for = |running: &Running, text: &str| {
        let said = eventually(LONG, || running.stdout.text().contains(text));
        assert!(said, "never said {text:?}: {}", running.stderr.text());
    };
    for (running, name) in [(&outside, "outside"), (&guest, "guest")] {
        wait_for(running, "serves");
        std::fs::write(world.file(name), "").unwrap();
    }
    for running in [&outside, &guest] {
        wait_for(running, "asked\n");
    }
    std::fs::write(world.file("stop"), "").unwrap();
    let (outside, guest) = (outside.succeed(LONG), guest.succeed(LONG));
    // The guest has the host's address.
    for (said, other, address) in [(&guest, "outside", OUTSIDE_V4), (&outside, "guest", HOST_V4)] {
        assert!(said.contains(&format!("\n{other}.local\t{address}\n")), "{said}");
        let service = format!(
            "service\\032of\\032{other};_ringfence._tcp;local;{other}.local;{address};4711;"
        );
        assert!(said.contains(&service), "{said}");
    }
}

#[test]
fn policy_decides_on_addresses_that_multicast_has_found() {
    let world = world!();
    let service = world.outside(&["python3", "multicast.py", "serve", "out0", "outside"]);
    service.wait_for_output("serves");
    let server = world.server("tcp_server", OUTSIDE_V4, 7000);
    let script = format!(
        "python3 multicast.py ask wan0 outside 6; python3 peer.py refused {OUTSIDE_V4} 7000"
    );
    let mut words = vec![world.lab.program(), "pasta", "--config-net", "--allow", "example.org"];
    for (options, found) in [(&["--multicast", "mdns"][..], 4), (&[], 0)] {
        words.truncate(5);
        words.extend(options);
        let output =
            world.host(&[&words[..], &["--", "sh", "-ec", &script]].concat()).succeed(LONG);
        assert_eq!(output.matches("answer mdns").count(), found, "{output}");
        // A service that the option does not name stays silent.
        assert_eq!(output.matches("silence ssdp").count(), 3, "{output}");
        assert!(output.contains("refused ["), "{output}");
    }
    service.end();
    server.end();
}

#[test]
fn published_port_of_a_carried_service_is_refused_with_a_way_out() {
    let world = world!();
    let refused = world.lone_guest("--multicast mdns -p 5353/udp", "true").finish(MOMENT);
    assert_eq!(refused.status, Some(125), "{}", refused.stderr);
    let said = refused.stderr.replace("\nringfence:   ", " ");
    assert!(said.contains("`-p IP:5353/udp`") && said.contains("--multicast"), "{said}");
    world.lone_guest(&format!("--multicast mdns -p {HOST_V4}:5353/udp"), "true").succeed(LONG);
}

#[test]
fn unknown_service_is_refused_with_the_known_ones() {
    for command in [&["run"][..], &["pasta"], &["passt"]] {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_ringfence"))
            .args(command)
            .args(["--multicast", "mdns,llmnr"])
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{command:?}");
        assert!(said.contains("`llmnr`") && said.contains("mdns and ssdp"), "{command:?}: {said}");
    }
}

//! A guest that impersonates its neighbours on a switch: addresses, routers, DHCP servers.
//!
//! The attacker is a guest's command with raw sockets (`support/neighbours.py`). A guest with `--forwarding` and
//! `--advertise` sends the same frames, which proves that the attacks succeed without the filter.

use std::collections::BTreeSet;

use crate::require;
use crate::support::needs::Need;
use crate::support::{Lab, MOMENT, Running};

const PYTHON: Need = Need::Program("python3", "python3");
const IP: Need = Need::Program("ip", "iproute2");

/// Options of a victim, which opens raw sockets and changes its network settings.
const VICTIM: &str =
    "--as-root --switch s --name victim --address 10.66.0.2/24 --address fd66::2/64";
const ATTACKER: &str =
    "--as-root --switch s --name mallory --address 10.66.0.66/24 --address fd66::66/64";
const WEB: &str = "--switch s --name web --address 10.66.0.3/24 --address fd66::3/64";
const ATTACK: &str = "python3 neighbours.py attack 10.66.0.66 fd66::66 10.66.0.3 fd66::3";

/// Frames that the address filter drops from every guest, by the drop reason that counts them.
const ALWAYS: [(&str, &[&str]); 4] = [
    ("drop_spoofed_source", &["mac"]),
    (
        "drop_spoofed_address",
        &[
            "arp-reply",
            "arp-gratuitous",
            "arp-hardware",
            "arp-probe",
            "arp-vlan",
            "na-override",
            "na-lladdr",
            "ns-source",
            "ns-lladdr",
            "ns-dad",
        ],
    ),
    ("drop_bad_headers", &["ra-atomic", "ra-part", "ra-chain"]),
    ("drop_unknown_protocol", &["llc", "ra-stacked"]),
];

/// Frames that the filter passes with the options `--forwarding` and `--advertise`.
const LIFTED: [(&str, &[&str]); 4] = [
    (
        "drop_spoofed_address",
        &[
            "udp4",
            "udp4-none",
            "udp4-vlan",
            "udp4-part",
            "udp4-later-part",
            "tcp4",
            "icmp4",
            "udp6",
            "udp6-none",
            "udp6-local",
            "super-packet",
        ],
    ),
    ("drop_router_message", &["ra", "ra-vlan", "ra-qinq", "ra-options", "redirect6", "redirect4"]),
    ("drop_dhcp_server", &["dhcp4", "dhcp4-port", "dhcp4-part", "dhcp6"]),
    ("drop_unknown_protocol", &["pppoe"]),
];

fn lab() -> Lab {
    let lab = Lab::new();
    std::fs::write(lab.file("neighbours.py"), include_str!("../support/neighbours.py")).unwrap();
    lab
}

fn names<'a>(table: impl IntoIterator<Item = &'a (&'a str, &'a [&'a str])>) -> BTreeSet<String> {
    table.into_iter().flat_map(|(_, names)| names.iter()).map(|name| (*name).to_owned()).collect()
}

/// Returns the words of the line that begins with `title`.
fn listed(output: &str, title: &str) -> BTreeSet<String> {
    let line = output.lines().find_map(|line| line.strip_prefix(title));
    line.unwrap_or_else(|| panic!("no {title:?} in {output:?}"))
        .split_whitespace()
        .map(str::to_owned)
        .collect()
}

/// Sends every attack frame from a guest with these options. Returns the frames that arrived at a neighbour, and
/// a function for the number of drops by reason.
fn attacked(options: &str) -> (BTreeSet<String>, impl Fn(&str) -> u64 + use<>) {
    let lab = lab();
    let listen = "python3 neighbours.py listen done; until [ -e leave ]; do sleep 0.05; done";
    let victim = lab.script(VICTIM, listen);
    victim.wait_for_output("listening");
    let attacker = lab.script(&format!("{ATTACKER} {options}"), &format!("{ATTACK} done"));
    let sent = listed(&attacker.succeed(MOMENT * 3), "sent:");
    let all = names(ALWAYS.iter().chain(&LIFTED));
    assert_eq!(sent, all, "the tables have every frame");
    victim.wait_for_output("arrived:");
    let drops = lab.stats("s").ports;
    std::fs::write(lab.file("leave"), "").unwrap();
    let mut arrived = listed(&victim.succeed(MOMENT), "arrived:");
    assert!(arrived.remove("own-super-packet"), "a super-packet from its own address arrives");
    let dropped = move |reason: &str| drops.values().filter_map(|port| port.get(reason)).sum();
    (arrived, dropped)
}

fn no_frame_arrives(mode: &str) {
    require!(Need::Guests, PYTHON);
    let (arrived, dropped) = attacked(&format!("--mode {mode}"));
    assert_eq!(arrived, BTreeSet::new());
    for (reason, _) in ALWAYS.iter().chain(&LIFTED) {
        assert!(dropped(reason) > 0, "{reason}");
    }
}

#[test]
fn attack_frames_in_copy_mode_are_dropped_and_counted() {
    no_frame_arrives("copy");
}

#[test]
#[ignore = "long: copy mode is in the default set"]
fn attack_frames_in_map_mode_are_dropped_and_counted() {
    no_frame_arrives("map");
}

#[test]
#[ignore = "long: copy mode is in the default set"]
fn attack_frames_in_staging_mode_are_dropped_and_counted() {
    no_frame_arrives("staging");
}

#[test]
#[ignore = "long: copy mode is in the default set"]
fn attack_frames_in_window_mode_are_dropped_and_counted() {
    no_frame_arrives("window");
}

#[test]
fn attack_frames_of_multiqueue_guest_are_dropped_and_counted() {
    no_frame_arrives("staging --queues 2");
}

#[test]
fn routing_and_advertising_guest_keeps_its_own_addresses() {
    require!(Need::Guests, PYTHON);
    let (arrived, dropped) = attacked("--forwarding --advertise");
    assert_eq!(arrived, names(&LIFTED));
    for (reason, _) in &ALWAYS {
        assert!(dropped(reason) > 0, "{reason}");
    }
    assert_eq!((dropped("drop_router_message"), dropped("drop_dhcp_server")), (0, 0));
}

#[test]
fn forwarding_guest_is_no_router_to_others() {
    require!(Need::Guests, PYTHON);
    let (arrived, dropped) = attacked("--forwarding");
    let kept =
        LIFTED.iter().filter(|(reason, _)| !reason.contains("router") && !reason.contains("dhcp"));
    assert_eq!(arrived, names(kept));
    assert!(dropped("drop_router_message") > 0 && dropped("drop_dhcp_server") > 0);
}

/// Victim and web server on one switch. The victim runs `before`, and lists its routes and neighbours before and
/// after the attack. The test fails if the victim then gets no answer from the server.
struct Scene {
    lab: Lab,
    web: Running,
    victim: Running,
}

const NOTE: &str = "{ ip -4 route; ip -6 route | sed 's/ expires [^ ]*//'; ip -6 -o addr show dev eth0 |
    grep -c 'scope global'; ip neigh show 10.66.0.3 | grep -o 'lladdr [^ ]*'; ip neigh show fd66::3 |
    grep -o 'lladdr [^ ]*'; }";

impl Scene {
    fn set(before: &str) -> Scene {
        let lab = lab();
        let web = lab.run(WEB, &["sleep", "300"]);
        web.wait_up();
        let victim = lab.script(
            VICTIM,
            &format!(
                "{before}
                 python3 neighbours.py reach 10.66.0.3 fd66::3
                 {NOTE} > before
                 python3 neighbours.py listen done
                 {NOTE} > after
                 python3 neighbours.py reach 10.66.0.3 fd66::3"
            ),
        );
        victim.wait_for_output("listening");
        Scene { lab, web, victim }
    }

    /// Runs the attack. Returns the victim's lists of before and after.
    fn play(self, options: &str) -> (String, String) {
        let attack = format!("{ATTACK} done");
        self.lab.script(&format!("{ATTACKER} {options}"), &attack).succeed(MOMENT * 3);
        self.victim.succeed(MOMENT * 4);
        self.web.end();
        (self.lab.read("before"), self.lab.read("after"))
    }
}

/// Kernel settings that make a guest accept all announcements.
const CREDULOUS: &str = "cd /proc/sys/net
    for i in all eth0; do
        echo 2 > ipv6/conf/$i/accept_ra; echo 1 > ipv6/conf/$i/autoconf
        echo 1 > ipv6/conf/$i/accept_redirects; echo 1 > ipv4/conf/$i/accept_redirects
        echo 1 > ipv4/conf/$i/arp_accept
    done
    cd - >/dev/null";

#[test]
fn credulous_guest_keeps_routes_neighbours_and_traffic() {
    require!(Need::Guests, PYTHON, IP);
    let (before, after) = Scene::set(CREDULOUS).play("");
    assert_eq!(before.matches("lladdr").count(), 2, "{before}");
    assert_eq!(before, after);
}

#[test]
#[ignore = "long: the control of another test"]
fn credulous_guest_takes_route_from_advertising_guest() {
    require!(Need::Guests, PYTHON, IP);
    let (before, after) = Scene::set(CREDULOUS).play("--advertise");
    assert!(!before.contains("default") && after.contains("default"), "{before}\n{after}");
}

#[test]
fn guest_takes_no_route_from_advertising_guest() {
    require!(Need::Guests, PYTHON, IP);
    let (before, after) = Scene::set("").play("--advertise");
    assert_eq!(before, after);
}

#[test]
fn interfaces_of_guest_distrust_their_neighbours() {
    require!(Need::Guests, IP);
    let lab = lab();
    let script = "ip link add later type dummy 2>/dev/null || ip link add later type veth peer more
        cd /proc/sys/net
        for i in all default eth0 up0 later; do
            for k in accept_ra autoconf accept_redirects; do
                echo $i $k $(cat ipv6/conf/$i/$k)
            done
            for k in accept_redirects secure_redirects send_redirects accept_source_route arp_accept; do
                echo $i $k $(cat ipv4/conf/$i/$k)
            done
        done";
    let options = "--as-root --switch s --uplink host --uplink-address 192.0.2.2/24 --uplink-gateway 192.0.2.1";
    let said = lab.script(options, script).succeed(MOMENT);
    assert_eq!(said.lines().count(), 5 * 8, "{said}");
    let trusting: Vec<&str> = said.lines().filter(|line| !line.ends_with(" 0")).collect();
    assert_eq!(trusting, Vec::<&str>::new());
}

#[test]
fn address_that_no_guest_can_have_is_refused_with_advice() {
    let lab = lab();
    for (address, advice) in [
        ("10.66.0.0/24", "network itself; give an address of one host"),
        ("10.66.0.255/24", "broadcast address of its network; give"),
        ("169.254.7.7/16", "link-local; give an address of a network"),
        ("fe80::7/64", "link-local; give an address of a network"),
        ("::ffff:10.66.0.2/120", "write 10.66.0.2/24"),
        ("224.0.0.9/24", "cannot be the address of one host; give"),
        ("0.0.0.0/24", "cannot be the address of one host; give"),
        ("::1/64", "cannot be the address of one host; give"),
        ("fd66::2", "write for example `fd66::2/64`"),
    ] {
        let ended = lab.run(&format!("--switch s --address {address}"), &["true"]).finish(MOMENT);
        assert_eq!(ended.status, Some(125), "{address}");
        assert!(ended.stderr.contains(advice), "{address}: {}", ended.stderr);
    }
}

#[test]
fn address_asked_for_twice_is_refused_with_advice() {
    require!(Need::Guests);
    let lab = lab();
    let twice = "--switch s --address 10.66.0.2/24 --address 10.66.0.2/16";
    let ended = lab.run(twice, &["true"]).finish(MOMENT);
    assert_eq!(ended.status, Some(125));
    assert!(ended.stderr.contains("--address 10.66.0.2 is given twice; give it once"));
    let first = lab.run(VICTIM, &["sleep", "300"]);
    first.wait_up();
    let second = "--switch s --address 10.66.0.2/24";
    let ended = lab.run(second, &["true"]).finish(MOMENT);
    assert_eq!(ended.status, Some(125));
    let advice = "10.66.0.2 is taken on this switch; choose another --address, or none";
    assert!(ended.stderr.contains(advice), "{}", ended.stderr);
    first.end();
}

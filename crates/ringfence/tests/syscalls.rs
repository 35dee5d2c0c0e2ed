//! Completeness of the sandboxes' list of system calls. Domains do their work under a filter that ends them with a
//! message at a call that is neither on the list nor refused on purpose. In the product such a call returns an
//! error, which a library may ignore.
//!
//! The program has no usual test harness, because it plays all roles. Started by `cargo test` it starts itself as
//! `run`, and so as launcher, supervisors and domains, exactly as `ringfence` does.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod support;

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use clap::Parser;
use ringfence::cli::Cli;
use ringfence_block::storage::testing::workload::Workload;
use ringfence_block::vhost_user::testing::{FrontDisk, shape};
use ringfence_memory::DeviceAccess;
use ringfence_sandbox::DomainKind;
use ringfence_sandbox::isolation::syscalls::{Confined, enforce, trap_denied_calls};
use ringfence_testkit::denied;
use ringfence_vhost_user::testing::{FrontShape, Frontend, memfd};
use ringfence_wire::virtio::feature;
use rustix::pipe::PipeFlags;

use support::disks::{URI, image_file, listens};
use support::needs::Need;
use support::world::{FAR_V4, FAR_V6, Families, HOST_V4, OUTSIDE_V4, OUTSIDE_V6, World};
use support::{Finished, Lab, eventually, sha256, write_noise};

/// Time limit for a complete guest.
const LONG: Duration = Duration::from_secs(90);
/// Begin of the message of a domain that made a denied call.
const DENIED: &str = "[denied call ";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[1..] {
        ["internal" | "serve" | "attach", ..] => {
            denied::end_with_a_word().unwrap();
            trap_denied_calls();
            ringfence::main_with(Cli::parse()).into()
        }
        ["run" | "hub" | "status" | "demo" | "vhost-user" | "pool-proxy" | "shield", ..] => {
            ringfence::main_with(Cli::parse()).into()
        }
        ["deny", call] => deny(call),
        _ => support::harness::main(&[
            (
                "call_missing_from_list_ends_domain_with_message",
                call_missing_from_list_ends_domain_with_message,
            ),
            (
                "disk_in_file_is_served_without_denied_call",
                disk_in_file_is_served_without_denied_call,
            ),
            (
                "disk_on_image_is_served_without_denied_call",
                disk_on_image_is_served_without_denied_call,
            ),
            (
                "disk_of_server_is_served_without_denied_call",
                disk_of_server_is_served_without_denied_call,
            ),
            (
                "disk_of_machine_is_served_without_denied_call",
                disk_of_machine_is_served_without_denied_call,
            ),
            (
                "card_of_machine_is_served_without_denied_call",
                card_of_machine_is_served_without_denied_call,
            ),
            (
                "disk_behind_a_proxy_is_served_without_denied_call",
                disk_behind_a_proxy_is_served_without_denied_call,
            ),
            (
                "disk_behind_a_shield_is_served_without_denied_call",
                disk_behind_a_shield_is_served_without_denied_call,
            ),
            ("switch_traffic_makes_no_denied_call", switch_traffic_makes_no_denied_call),
            ("outgoing_traffic_makes_no_denied_call", outgoing_traffic_makes_no_denied_call),
            ("incoming_traffic_makes_no_denied_call", incoming_traffic_makes_no_denied_call),
        ]),
    }
}

/// Returns the path of this program, which takes the place of the command.
fn program() -> PathBuf {
    std::env::current_exe().unwrap()
}

/// Checks that a guest and all its domains succeeded. Returns the guest's output.
fn succeeded(finished: Finished) -> String {
    assert!(!finished.stderr.contains(DENIED), "{}", finished.stderr);
    assert_eq!(finished.status, Some(0), "{}", finished.stderr);
    finished.stdout
}

/// Makes a denied call, to check the assumption of this test program.
fn deny(call: &str) -> ExitCode {
    denied::end_with_a_word().unwrap();
    trap_denied_calls();
    enforce(Confined::Domain(DomainKind::Frontend)).unwrap();
    match call {
        "pipe" => drop(rustix::pipe::pipe_with(PipeFlags::CLOEXEC)),
        // The allocator would use `mremap`.
        "grow" => {
            let mut buffer = vec![1_u8; 1 << 20];
            buffer.resize(1 << 22, 1);
            assert_eq!(buffer.last(), Some(&1));
        }
        other => panic!("{other}"),
    }
    ExitCode::SUCCESS
}

fn call_missing_from_list_ends_domain_with_message() {
    let run = |call| Command::new(program()).args(["deny", call]).output().unwrap();
    let denied = run("pipe");
    let said = String::from_utf8_lossy(&denied.stderr).into_owned();
    assert!(said.contains(&format!("{DENIED}{:04}]", libc::SYS_pipe2)), "{said}");
    assert_eq!(denied.status.code(), Some(128 + libc::SIGSYS));
    // A call that is refused on purpose causes no message.
    let refused = run("grow");
    assert!(refused.status.success(), "{refused:?}");
}

/// Copies a file to the disk and back, and compares both.
fn copy_both_ways(lab: &Lab, options: &str) {
    let (content, back) = (lab.file("in"), lab.file("out"));
    write_noise(&content, 16);
    let script = format!(
        "nbdcopy --flush {} {URI}0 && nbdcopy {URI}0 {} && nbdinfo --size {URI}0",
        content.display(),
        back.display()
    );
    succeeded(lab.script(&format!("-v {options}"), &script).finish(LONG));
    assert_eq!(sha256(&back), sha256(&content), "{options}");
    lab.assert_no_switch();
}

fn disk_of_machine_is_served_without_denied_call() {
    require!(Need::Guests);
    let lab = Lab::of(program());
    let file = image_file(&lab, 4).display().to_string();
    let disk = format!("{file},discard,cache=writethrough");
    let running = lab.serve(&["vhost-user", "blk", "--socket", "s", "--disk", &disk], "-v");
    let mut front = Frontend::new(shape(2)).unwrap();
    front.connect(&lab.file("s")).unwrap();
    let disk = FrontDisk::new(front).unwrap();
    Workload::new(1).exercise(&disk, 200);
    succeeded(running.end());
}

/// A card on a switch, and on a TAP in a network namespace of its own.
fn card_of_machine_is_served_without_denied_call() {
    require!(Need::Guests, Need::Root);
    for end in [&["--switch", "lab"], &["--tap", "vm0"]] {
        let lab = Lab::of(program());
        let words = ["unshare", "--net", lab.program(), "vhost-user", "net", "-v", "-s", "s"];
        let running = lab.spawn(&[&words[..], end, &["--status-socket", "status"]].concat());
        running.wait_for_error("s leads to ");
        for round in 0..2 {
            let shape = FrontShape { vrings: 2, features: feature::VERSION_1, ..shape(2) };
            let mut front = Frontend::new(FrontShape { protocol: 0, ..shape }).unwrap();
            front.connect(&lab.file("s")).unwrap();
            front.set_up().unwrap();
            let (at, len) = (front.buffers_at(), 60);
            let sent = front.range(at, len, DeviceAccess::Read);
            let received = front.range(at + 4096, 4096, DeviceAccess::Write);
            front.vrings[0].driver.push(&[received], 0).unwrap();
            front.kick(0);
            front.vrings[1].driver.push(&[sent], 0).unwrap();
            front.kick(1);
            let mut returned = || front.vrings[1].driver.pop().unwrap().is_some();
            assert!(eventually(LONG, &mut returned), "round {round}");
            // One that breaks a rule.
            front.send(99, &[], &[]).unwrap();
            running.wait_for_error("request 99 was not offered");
        }
        lab.spawn(&[lab.program(), "status", "--socket", "status"]).succeed(LONG);
        succeeded(running.end());
    }
}

fn disk_behind_a_proxy_is_served_without_denied_call() {
    require!(Need::Guests);
    let lab = Lab::of(program());
    let file = image_file(&lab, 4).display().to_string();
    let blk = ["vhost-user", "blk", "--socket", "backend", "--disk", &file];
    let backend = lab.serve(&blk, "");
    let running = lab.serve(&[], "pool-proxy --listen s --backend backend -v");
    // One that breaks a rule, one that reaches the other's place, and one that is served.
    let mut refused = Frontend::new(shape(1)).unwrap();
    refused.connect(&lab.file("s")).unwrap();
    refused.ask(99, &[]).unwrap_err();
    running.wait_for_error("request 99 is refused");
    let mut front = Frontend::new(shape(2)).unwrap();
    front.other_files.push(memfd(8192).unwrap());
    front.connect(&lab.file("s")).unwrap();
    let disk = FrontDisk::new(front).unwrap();
    let mut second = Frontend::new(shape(1)).unwrap();
    second.connect(&lab.file("s")).unwrap();
    second.ask(1, &[]).unwrap_err();
    Workload::new(1).exercise(&disk, 50);
    drop(disk);
    running.wait_for_error("has closed its connection");
    succeeded(running.end());
    succeeded(backend.end());
}

fn disk_behind_a_shield_is_served_without_denied_call() {
    require!(Need::Guests);
    let lab = Lab::of(program());
    let file = image_file(&lab, 4).display().to_string();
    let blk = ["vhost-user", "blk", "--socket", "backend", "--disk", &file];
    let backend = lab.serve(&blk, "");
    let running = lab.serve(&[], "shield --listen s --backend backend --reconnect -v");
    let mut refused = Frontend::new(shape(1)).unwrap();
    refused.connect(&lab.file("s")).unwrap();
    refused.ask(99, &[]).unwrap_err();
    running.wait_for_error("request 99 is refused");
    let mut front = Frontend::new(shape(2)).unwrap();
    front.connect(&lab.file("s")).unwrap();
    let disk = FrontDisk::new(front).unwrap();
    Workload::new(1).exercise(&disk, 50);
    succeeded(backend.end());
    let backend = lab.serve(&blk, "");
    Workload::new(2).exercise(&disk, 50);
    drop(disk);
    running.wait_for_error("the hypervisor has closed its connection");
    succeeded(running.end());
    succeeded(backend.end());
}

fn disk_in_file_is_served_without_denied_call() {
    require!(Need::Guests, Need::Program("nbdcopy", "libnbd-bin"));
    for mode in ["persistent", "map", "copy", "window"] {
        let lab = Lab::of(program());
        let disk = image_file(&lab, 16);
        copy_both_ways(&lab, &format!("--disk {},mode={mode}", disk.display()));
    }
    let lab = Lab::of(program());
    let disk = image_file(&lab, 16);
    copy_both_ways(&lab, &format!("--disk {},engine=threads", disk.display()));
    // Discarded ranges, and random requests with flushes between them.
    require!(Need::Program("fio", "fio"));
    let lab = Lab::of(program());
    let disk = image_file(&lab, 16);
    write_noise(&disk, 16);
    let script = format!(
        "truncate -s 16M empty && nbdcopy --flush empty {URI}0 \
         && fio --name=r --ioengine=nbd --uri={URI}0 --rw=randrw --bs=4k --iodepth=32 --fsync=64 \
            --size=16m --io_size=16m --verify=crc32c --do_verify=1"
    );
    succeeded(lab.script(&format!("-v --disk {}", disk.display()), &script).finish(LONG));
}

fn disk_on_image_is_served_without_denied_call() {
    require!(
        Need::Guests,
        Need::Program("nbdcopy", "libnbd-bin"),
        Need::Program("qemu-img", "qemu-utils"),
        Need::Program("fio", "fio"),
    );
    let lab = Lab::of(program());
    let (base, image) = (lab.file("base"), lab.file("image"));
    write_noise(&base, 16);
    let (base, image) = (base.display().to_string(), image.display().to_string());
    let words = ["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &image];
    assert!(Command::new("qemu-img").args(words).status().unwrap().success());
    copy_both_ways(&lab, &format!("--disk {image},format=qcow2"));
    let script = format!(
        "nbdinfo --map {URI}0 && truncate -s 16M empty && nbdcopy --flush empty {URI}0 \
         && fio --name=r --ioengine=nbd --uri={URI}0 --rw=randrw --bs=4k --iodepth=32 --fsync=64 \
            --size=16m --io_size=16m --verify=crc32c --do_verify=1"
    );
    succeeded(lab.script(&format!("-v --disk {image},format=qcow2,discard"), &script).finish(LONG));
}

fn disk_of_server_is_served_without_denied_call() {
    require!(
        Need::Guests,
        Need::Program("nbdcopy", "libnbd-bin"),
        Need::Program("nbdkit", "nbdkit")
    );
    let lab = Lab::of(program());
    let socket = lab.file("server");
    let words = ["nbdkit", "--foreground", "-U", socket.to_str().unwrap(), "memory", "16M"];
    let server = lab.spawn(&words);
    assert!(support::eventually(LONG, || listens(&socket)));
    copy_both_ways(&lab, &format!("--disk nbd+unix:///?socket={}", socket.display()));
    server.end();
}

fn switch_traffic_makes_no_denied_call() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    let lab = Lab::of(program());
    std::fs::write(lab.file("peer.py"), include_str!("support/peer.py")).unwrap();
    write_noise(&lab.file("noise"), 8);
    for mode in ["copy", "map", "staging", "window"] {
        let options = format!("-v --mode {mode} --queues 2");
        let server = "python3 peer.py tcp_server 0.0.0.0 7000 & \
                      python3 peer.py udp_server 0.0.0.0 7001 & \
                      until [ -e stop ]; do sleep 0.05; done";
        let server = lab.script(&format!("{options} --name far"), server);
        server.wait_for_output("listening\nlistening");
        let client = "far=$(getent ahostsv4 far | head -1 | cut -d' ' -f1); \
                      python3 peer.py tcp_client $far 7000; python3 peer.py udp_client $far 7001; \
                      touch stop";
        let output = succeeded(lab.script(&options, client).finish(LONG));
        assert_eq!(output.matches("equal").count(), 2, "{mode}: {output}");
        succeeded(server.finish(LONG));
        std::fs::remove_file(lab.file("stop")).unwrap();
        lab.assert_no_switch();
    }
}

fn outgoing_traffic_makes_no_denied_call() {
    require!(Need::Program("ping", "iputils-ping"));
    let Some(world) = World::of(Families::Both, program()) else { return };
    write_noise(&world.file("noise"), 4);
    let addresses = [OUTSIDE_V4, OUTSIDE_V6, FAR_V4, FAR_V6];
    let mut servers = Vec::new();
    for address in addresses {
        servers.push(world.server("tcp_server", address, 7000));
        servers.push(world.server("udp_server", address, 7001));
    }
    let script: String = addresses
        .iter()
        .map(|ip| {
            format!(
                "python3 peer.py tcp_client {ip} 7000; python3 peer.py udp_client {ip} 7001; \
                 python3 peer.py refused {ip} 9; ping -c 1 -W 20 -s 4000 {ip}; "
            )
        })
        .collect();
    for options in ["-v", "-v --mtu 1500", "-v --queues 2"] {
        let output = succeeded(world.lone_guest(options, &script).finish(LONG));
        assert_eq!(output.matches("equal").count(), 8, "{options}: {output}");
        assert_eq!(output.matches(" 0% packet loss").count(), 4, "{options}: {output}");
    }
    servers.into_iter().for_each(|server| drop(server.end()));
}

fn incoming_traffic_makes_no_denied_call() {
    let Some(world) = World::of(Families::Both, program()) else { return };
    write_noise(&world.file("noise"), 2);
    let script = format!(
        "python3 peer.py tcp_server {HOST_V4} 7000 & python3 peer.py udp_server 0.0.0.0 7001 & \
         until [ -e stop ]; do sleep 0.05; done"
    );
    let guest = world.lone_guest("-v -p 8080:7000 -p 8053:7001/udp", &script);
    guest.wait_for_output("listening\nlistening");
    for (mode, port) in
        [("tcp_client", "8080"), ("tcp_clients_late", "8080"), ("udp_client", "8053")]
    {
        let client = world.outside(&["python3", "peer.py", mode, HOST_V4, port]);
        assert!(client.succeed(LONG).contains("equal"), "{mode}");
    }
    std::fs::write(world.file("stop"), "").unwrap();
    succeeded(guest.finish(LONG));
}

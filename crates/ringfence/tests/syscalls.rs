//! That the sandboxes' list of system calls is whole: domains do their work, and a call that the list
//! lacks, and that is not refused on purpose either, ends them with a word instead of an error that some
//! library may pass over.
//!
//! A program without the usual test harness, since it plays all parts: started by `cargo test` it starts
//! itself as `run`, and so as launcher, keepers and domains, exactly as `ringfence` does.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod support;

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use clap::Parser;
use ringfence::cli::Cli;
use ringfence_sandbox::DomainKind;
use ringfence_sandbox::isolation::syscalls::{Confined, enforce, trap_denied_calls};
use ringfence_testkit::denied;
use rustix::pipe::PipeFlags;

use support::disks::{URI, image_file};
use support::needs::Need;
use support::world::{FAR_V4, FAR_V6, Families, HOST_V4, OUTSIDE_V4, OUTSIDE_V6, World};
use support::{Finished, Lab, sha256, write_noise};

/// How long a whole guest may take.
const LONG: Duration = Duration::from_secs(90);
/// What a domain says as it ends.
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
        ["run" | "hub" | "status" | "demo", ..] => ringfence::main_with(Cli::parse()).into(),
        ["deny", call] => deny(call),
        _ => support::harness::main(&[
            ("a_call_that_the_list_lacks_is_noticed", a_call_that_the_list_lacks_is_noticed),
            ("disks_in_files_are_served", disks_in_files_are_served),
            ("disks_of_servers_are_served", disks_of_servers_are_served),
            ("guests_talk_over_the_switch", guests_talk_over_the_switch),
            ("a_guest_reaches_the_outside", a_guest_reaches_the_outside),
            ("the_outside_reaches_a_guest", the_outside_reaches_a_guest),
        ]),
    }
}

/// This program plays the command.
fn program() -> PathBuf {
    std::env::current_exe().unwrap()
}

/// What a guest put out, which ended well, with every domain that was there for it.
fn succeeded(finished: Finished) -> String {
    assert!(!finished.stderr.contains(DENIED), "{}", finished.stderr);
    assert_eq!(finished.status, Some(0), "{}", finished.stderr);
    finished.stdout
}

/// What this test relies on.
fn deny(call: &str) -> ExitCode {
    denied::end_with_a_word().unwrap();
    trap_denied_calls();
    enforce(Confined::Domain(DomainKind::Frontend)).unwrap();
    match call {
        "pipe" => drop(rustix::pipe::pipe_with(PipeFlags::CLOEXEC)),
        // The allocator, which would like `mremap`.
        "grow" => {
            let mut buffer = vec![1_u8; 1 << 20];
            buffer.resize(1 << 22, 1);
            assert_eq!(buffer.last(), Some(&1));
        }
        other => panic!("{other}"),
    }
    ExitCode::SUCCESS
}

fn a_call_that_the_list_lacks_is_noticed() {
    let run = |call| Command::new(program()).args(["deny", call]).output().unwrap();
    let denied = run("pipe");
    let said = String::from_utf8_lossy(&denied.stderr).into_owned();
    assert!(said.contains(&format!("{DENIED}{:04}]", libc::SYS_pipe2)), "{said}");
    assert_eq!(denied.status.code(), Some(128 + libc::SIGSYS));
    // What is refused on purpose is nothing to notice.
    let refused = run("grow");
    assert!(refused.status.success(), "{refused:?}");
}

/// Copies a file to the disk and back, and compares.
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

fn disks_in_files_are_served() {
    require!(Need::Guests, Need::Program("nbdcopy", "libnbd-bin"));
    for mode in ["persistent", "map", "copy", "window"] {
        let lab = Lab::of(program());
        let disk = image_file(&lab, 16);
        copy_both_ways(&lab, &format!("--disk {},mode={mode}", disk.display()));
    }
    // Ranges of nothing, and requests in every order with flushes between them.
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

fn disks_of_servers_are_served() {
    require!(
        Need::Guests,
        Need::Program("nbdcopy", "libnbd-bin"),
        Need::Program("nbdkit", "nbdkit")
    );
    let lab = Lab::of(program());
    let socket = lab.file("server");
    let words = ["nbdkit", "--foreground", "-U", socket.to_str().unwrap(), "memory", "16M"];
    let server = lab.spawn(&words);
    assert!(support::eventually(LONG, || socket.exists()));
    copy_both_ways(&lab, &format!("--disk nbd+unix:///?socket={}", socket.display()));
    server.end();
}

fn guests_talk_over_the_switch() {
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

fn a_guest_reaches_the_outside() {
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
                 python3 peer.py refused {ip} 9; ping -c 1 -W 5 -s 4000 {ip}; "
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

fn the_outside_reaches_a_guest() {
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

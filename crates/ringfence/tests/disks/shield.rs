//! `ringfence shield`: a frontend of tests in place of QEMU, and behind the shield a disk of Ringfence or of
//! qemu-storage-daemon.

use ringfence_block::storage::Disk;
use ringfence_block::storage::testing::checker::Checker;
use ringfence_block::storage::testing::workload::Workload;
use ringfence_block::storage::testing::{Driver, Random};
use ringfence_block::vhost_user::testing::shape;
use ringfence_driver::xen::metrics::testing as openmetrics;
use ringfence_vhost_user::testing::{FrontShape, Frontend};
use ringfence_wire::vhost_user::{number, protocol_feature};
use rustix::process::Signal;

use super::machines::{expect_size, requests_of, resize};
use super::pool_proxy::{
    PYTHON, QEMU, SECRET_BYTES, connect, foreign_disk, hits, secret_memory, status, wait_for_status,
};
use crate::require;
use crate::support::disks::{image_file, rounds};
use crate::support::needs::Need;
use crate::support::{Lab, MOMENT, Running, eventually};

/// Starts a shield to the socket `backend`, and waits until it serves.
fn shield(lab: &Lab, options: &str) -> Running {
    lab.serve(&["shield", "--listen", "s", "--backend", "backend"], options)
}

/// Starts a disk of Ringfence that accepts no more memory than a pool of 64 MiB.
fn own_disk(lab: &Lab, file: &str) -> Running {
    let words = ["vhost-user", "blk", "--socket", "backend", "--disk", file];
    lab.serve(&words, "--require-pool 64M --control control")
}

/// Returns the shape of a machine without a pool.
fn machine(vrings: u16) -> FrontShape {
    let shape = shape(vrings);
    let protocol = shape.protocol | protocol_feature::BACKEND_REQ;
    FrontShape { has_mark: false, protocol, ..shape }
}

/// Creates a machine that has a secret in its memory, beside the buffers and vrings of its disk.
fn machine_with(secret: &str) -> Frontend {
    let mut front = Frontend::new(machine(2)).unwrap();
    front.memory.copy_from(512, secret.as_bytes()).unwrap();
    front.other_files.push(secret_memory(secret));
    front
}

#[test]
fn foreign_backend_behind_the_shield_stores_data_and_sees_no_memory_of_the_machine() {
    // Only root reads the memory of a sandbox.
    require!(Need::Root, Need::Guests, QEMU, PYTHON);
    let secret = "a-secret-of-32-bytes-in-a-machine";
    let lab = Lab::new();
    let daemon = foreign_disk(&lab, "backend");
    let shield = shield(&lab, "--status-socket status -v");
    let disk = connect(&lab, "s", machine_with(secret)).unwrap();
    Workload::new(41).exercise(&disk, 300);
    assert_eq!(hits(&lab, daemon.pid(), secret), 0, "the backend sees the secret");
    let sees = hits(&lab, shield.pid(), secret);
    assert!(sees >= SECRET_BYTES / 4096, "the search does not find the secret: {sees}");
    wait_for_status(&lab, "vhost-user: lent 64 MiB, ");
    wait_for_status(&lab, " copied to the backend, ");
    check_metrics(&lab);
    // Data that the machine has written is in the pool: the search finds what the backend gets.
    let text = "text-that-the-machine-has-written";
    let mut sector = vec![b'.'; 4096];
    sector[100..100 + text.len()].copy_from_slice(text.as_bytes());
    Driver::new(disk.queue(1).unwrap()).write(0, &sector).unwrap();
    assert!(hits(&lab, daemon.pid(), text) > 0, "it sees the pool");
    assert_eq!(shield.end().status, Some(0));
}

/// Checks the metrics of a shield whose only backend has served requests in its pool of 64 MiB.
fn check_metrics(lab: &Lab) {
    let words = [lab.program(), "status", "--socket", "status", "--metrics"];
    let text = lab.spawn(&words).succeed(MOMENT);
    let samples = openmetrics::read(&text).unwrap();
    let labels = "socket=\"status\",program=\"shield\"";
    let value = |name: &str, label: &str| {
        let series = format!("ringfence_session_{name}{{{labels}{label}}}");
        *samples.get(&series).unwrap_or_else(|| panic!("{series}: {text}"))
    };
    let traffic = |counter| value("traffic_total", &format!(",counter=\"{counter}\""));
    // Of 300 steps, some of which are pauses.
    assert!(traffic("requests") >= 200.0, "{text}");
    assert!(traffic("bytes_to_backend") > 1e5 && traffic("bytes_from_backend") > 1e5, "{text}");
    assert_eq!(traffic("backends"), 1.0);
    assert_eq!(value("memory_bytes", ",kind=\"lent\""), f64::from(64 << 20));
    assert!(value("memory_bytes", ",kind=\"withheld\"") >= f64::from(32 << 20), "{text}");
    assert_eq!(value("clients_refused_total", ""), 0.0);
}

#[test]
fn machine_behind_the_shield_has_the_size_of_its_disk_as_soon_as_that_grows() {
    require!(Need::Guests);
    let lab = Lab::new();
    let file = image_file(&lab, 4).display().to_string();
    let backend = own_disk(&lab, &file);
    let shield = shield(&lab, "--reconnect");
    let disk = connect(&lab, "s", Frontend::new(machine(2)).unwrap()).unwrap();
    let mut requests = requests_of(&disk);
    for (size, bytes) in [("8M", 8_u64 << 20), ("12M", 12 << 20)] {
        let done = resize(&lab, size);
        assert_eq!(done.status, Some(0), "{}", done.stderr);
        expect_size(&mut requests, &disk, bytes);
    }
    // A disk that grows between two backends.
    backend.end();
    std::fs::File::options().write(true).open(&file).unwrap().set_len(16 << 20).unwrap();
    let backend = own_disk(&lab, &file);
    expect_size(&mut requests, &disk, 16 << 20);
    Workload::new(46).exercise(&disk, 50);
    assert_eq!(shield.end().status, Some(0));
    backend.end();
}

#[test]
fn foreign_backend_without_the_shield_sees_memory_of_the_machine() {
    require!(Need::Root, QEMU, PYTHON);
    let secret = "a-secret-of-32-bytes-in-a-machine";
    let lab = Lab::new();
    let daemon = foreign_disk(&lab, "backend");
    let shape = FrontShape { has_mark: false, ..super::pool_proxy::foreign_shape() };
    let protocol = shape.protocol & !protocol_feature::BACKEND_REQ;
    let mut front = Frontend::new(FrontShape { protocol, ..shape }).unwrap();
    front.other_files.push(secret_memory(secret));
    let disk = connect(&lab, "backend", front).unwrap();
    Workload::new(42).exercise(&disk, 50);
    let found = hits(&lab, daemon.pid(), secret);
    assert!(found >= SECRET_BYTES / 4096, "{found}");
}

#[test]
fn disk_behind_the_shield_continues_after_each_process_was_killed() {
    require!(Need::Guests);
    for reconnect in [true, false] {
        let lab = Lab::new();
        let file = image_file(&lab, 4).display().to_string();
        let options = if reconnect { "--reconnect" } else { "" };
        let mut backend = own_disk(&lab, &file);
        let mut shield = self::shield(&lab, options);
        let disk = connect(&lab, "s", Frontend::new(machine(2)).unwrap()).unwrap();
        let mut checker = Checker::new();
        let mut driver = Driver::new(disk.queue(16).unwrap());
        let mut load = Workload::new(43).start(&disk);
        let mut random = Random::new(44);
        for round in 0..rounds(6) {
            load.steps(&mut driver, &mut checker, 20 + random.index(100)).unwrap();
            let kills_backend = round % 2 == 0;
            if kills_backend {
                backend.inner("disk").signal(Signal::KILL);
                backend.finish(MOMENT);
                backend = own_disk(&lab, &file);
            } else {
                shield.inner("shield").signal(Signal::KILL);
                let finished = shield.finish(MOMENT);
                assert!(finished.stderr.contains("was killed"), "{}", finished.stderr);
                shield = self::shield(&lab, options);
            }
            if !(kills_backend && reconnect) {
                // The shield may still be closing the connections of before.
                let reconnected = eventually(MOMENT, || disk.reconnect(&lab.file("s")).is_ok());
                assert!(reconnected, "round {round}");
            }
        }
        load.finish(&mut driver, &mut checker).unwrap();
        let finished = shield.end();
        assert_eq!(finished.status, Some(0), "{}", finished.stderr);
        backend.end();
    }
}

#[test]
fn machine_that_breaks_a_rule_is_refused_and_counted_and_the_next_is_served() {
    require!(Need::Guests);
    let lab = Lab::new();
    let file = image_file(&lab, 4).display().to_string();
    let backend = own_disk(&lab, &file);
    let shield = shield(&lab, "--reconnect --status-socket status");
    let mut postcopy = Frontend::new(machine(1)).unwrap();
    postcopy.connect(&lab.file("s")).unwrap();
    postcopy.ask(28, &[]).unwrap_err();
    shield.wait_for_error("POSTCOPY_ADVISE is refused");
    wait_for_status(&lab, "vhost-user: 1 clients were disconnected");
    let disk = connect(&lab, "s", Frontend::new(machine(1)).unwrap()).unwrap();
    // A second hypervisor while one is served.
    let mut second = Frontend::new(machine(1)).unwrap();
    second.connect(&lab.file("s")).unwrap();
    second.ask(number::GET_FEATURES, &[]).unwrap_err();
    Workload::new(45).exercise(&disk, 50);
    assert!(status(&lab).contains("vhost-user: lent 64 MiB, "), "{}", status(&lab));
    // Memory that is truncated costs the machine its own connection.
    rustix::fs::ftruncate(&disk.front().file, 0).unwrap();
    rustix::io::write(&disk.front().vrings[0].kick, &1_u64.to_ne_bytes()).unwrap();
    shield.wait_for_error("truncated the file of its memory");
    wait_for_status(&lab, "vhost-user: 2 clients were disconnected");
    let served = eventually(MOMENT, || {
        connect(&lab, "s", Frontend::new(machine(1)).unwrap())
            .is_ok_and(|disk| disk.geometry().bytes == 4 << 20)
    });
    assert!(served, "the next one is not served");
    assert_eq!(shield.end().status, Some(0));
    assert!(!lab.file("s").exists(), "the socket is removed");
    backend.end();
}

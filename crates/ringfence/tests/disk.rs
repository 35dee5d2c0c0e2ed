//! Disks of a command: ordinary programs use them, and nothing that was flushed is lost when
//! whatever serves them is killed.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ringfence_block::storage::Disk;
use ringfence_block::storage::nbd::{NbdAddress, NbdDisk, NbdOptions};
use ringfence_block::storage::testing::checker::Checker;
use ringfence_block::storage::testing::workload::{Failure, Workload};
use ringfence_block::storage::testing::{Driver, Random, image};
use rustix::process::Signal;

use support::needs::Need;
use support::{Lab, MOMENT, Running, eventually, sha256, write_noise};

const URI: &str = "nbd+unix:///?socket=$RINGFENCE_DISK";

fn image_file(lab: &Lab, mebibytes: u64) -> PathBuf {
    let path = lab.file("disk.img");
    fs::File::create(&path).unwrap().set_len(mebibytes << 20).unwrap();
    path
}

#[test]
fn what_nbdcopy_writes_is_in_the_file_and_comes_back_in_each_mode() {
    require!(Need::Guests, Need::Program("nbdcopy", "libnbd-bin"));
    for mode in ["persistent", "map", "copy"] {
        let lab = Lab::new();
        let disk = image_file(&lab, 32);
        let (content, back) = (lab.file("in"), lab.file("out"));
        write_noise(&content, 32);
        let script = format!(
            "nbdcopy --flush {} {URI}0 && nbdcopy {URI}0 {}",
            content.display(),
            back.display()
        );
        let options = format!("--disk {},mode={mode}", disk.display());
        lab.script(&options, &script).succeed(MOMENT);
        assert_eq!(sha256(&disk), sha256(&content), "{mode}");
        assert_eq!(sha256(&back), sha256(&content), "{mode}");
        lab.assert_no_switch();
        assert_eq!(sockets(&lab), [] as [PathBuf; 0], "a socket was left behind");
    }
}

#[test]
fn several_disks_are_told_apart_and_one_that_is_read_only_stays_as_it_is() {
    require!(Need::Guests, Need::Program("nbdinfo", "libnbd-bin"));
    let lab = Lab::new();
    let (first, second) = (image_file(&lab, 8), lab.file("second"));
    write_noise(&second, 4);
    let before = sha256(&second);
    let script = format!(
        "nbdinfo --size {URI}0; nbdinfo --size {URI}1; nbdinfo --is read-only {URI}0 || echo rw; \
         nbdinfo --is read-only {URI}1 && echo ro"
    );
    let options = format!("--disk {} --disk {},ro", first.display(), second.display());
    let said = lab.script(&options, &script).succeed(MOMENT);
    assert_eq!(said.split_whitespace().collect::<Vec<_>>(), ["8388608", "4194304", "rw", "ro"]);
    assert_eq!(sha256(&second), before);
}

#[test]
fn a_file_system_made_through_it_is_sound() {
    require!(
        Need::Guests,
        Need::Root,
        Need::Program("nbdfuse", "nbdfuse"),
        Need::Program("mkfs.ext4", "e2fsprogs"),
        Need::Program("fusermount3", "fuse3"),
    );
    let lab = Lab::new();
    let disk = image_file(&lab, 64);
    let (content, mount, back) = (lab.file("content"), lab.file("mount"), lab.file("back"));
    write_noise(&content, 4);
    fs::create_dir(&mount).unwrap();
    let mount = mount.display();
    let script = format!(
        "nbdfuse {mount} {URI}0 & \
         for i in $(seq 100); do test -e {mount}/nbd && break; sleep 0.1; done; \
         mkfs.ext4 -q -F {mount}/nbd && debugfs -w -R 'write {} file' {mount}/nbd && \
         fusermount3 -u {mount} && wait",
        content.display()
    );
    lab.script(&format!("--disk {}", disk.display()), &script).succeed(MOMENT);
    let disk = disk.display().to_string();
    let run = |program: &str, args: &[&str]| {
        let output = std::process::Command::new(program).args(args).output().unwrap();
        assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stdout));
    };
    run("/sbin/e2fsck", &["-f", "-n", &disk]);
    run("/sbin/debugfs", &["-R", &format!("dump file {}", back.display()), &disk]);
    assert_eq!(sha256(&back), sha256(&content));
}

#[test]
fn what_cannot_be_a_disk_is_refused_before_anything_starts() {
    require!(Need::Guests);
    let lab = Lab::new();
    for (disk, why) in [("/nowhere/x", "No such file"), ("/dev/null", "neither a file nor")] {
        let finished = lab.run(&format!("--disk {disk}"), &["true"]).finish(MOMENT);
        assert_eq!(finished.status, Some(125));
        assert!(finished.stderr.contains(why), "{}", finished.stderr);
    }
    lab.assert_no_switch();
}

fn sockets(lab: &Lab) -> Vec<PathBuf> {
    let entries = fs::read_dir(lab.runtime_dir()).into_iter().flatten().flatten();
    let disks = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("disk-"));
    disks.map(|entry| entry.path()).collect()
}

/// A guest that does nothing, and its disk, which we use from outside, as the user may.
fn served(lab: &Lab, disk: &Path) -> (Running, NbdDisk) {
    let guest = lab.run(&format!("--disk {}", disk.display()), &["sleep", "300"]);
    guest.wait_up();
    let socket = lab.runtime_dir().join(format!("disk-{}-0", guest.pid().as_raw_nonzero()));
    let address = NbdAddress::Unix { path: socket, name: String::new() };
    let options =
        NbdOptions { give_up: Duration::from_secs(3), journal: 0, ..NbdOptions::default() };
    let mut opened = None;
    eventually(MOMENT, || {
        opened = NbdDisk::open(&address, &options).ok();
        opened.is_some()
    });
    (guest, opened.expect("the disk can be opened"))
}

/// `RINGFENCE_SOAK_ROUNDS=200` for as many kills as are wanted before a release.
#[test]
fn no_flushed_write_is_lost_and_no_sector_torn_when_what_serves_it_is_killed() {
    require!(Need::Guests, Need::Root);
    let rounds = std::env::var("RINGFENCE_SOAK_ROUNDS").ok().and_then(|n| n.parse().ok());
    let lab = Lab::new();
    let file = image_file(&lab, 4);
    let mut checker = Checker::new();
    let mut random = Random::new(97);
    for round in 0..rounds.unwrap_or(6u64) {
        let (guest, disk) = served(&lab, &file);
        let found = checker.check_after_crash(0, &image(&disk));
        found.unwrap_or_else(|violation| panic!("round {round}: {violation}"));
        let mut driver = Driver::new(disk.queue(16).unwrap());
        let mut running = Workload::new(round).start(&disk);
        running.steps(&mut driver, &mut checker, 50 + random.index(400)).unwrap();
        let victims: &[&str] = match round % 3 {
            0 => &["frontend"],
            1 => &["driver"],
            _ => &["frontend", "driver"],
        };
        for victim in victims {
            guest.inner(victim).signal(Signal::KILL);
        }
        // It goes on until it is noticed: those requests fail, or were done just before.
        match running.steps(&mut driver, &mut checker, 10_000) {
            Ok(()) | Err(Failure::Failed(_)) => {}
            Err(failure) => panic!("round {round}: {failure:?}"),
        }
        drop(driver);
        running.crashed(&mut checker);
        guest.finish(MOMENT);
    }
    let found = checker.check_after_crash(0, &fs::read(&file).unwrap());
    found.unwrap_or_else(|violation| panic!("at the end: {violation}"));
}

//! No flushed data is lost when a process that serves a disk is killed, at any moment.
//!
//! `cargo xtask soak disk` runs more rounds.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

use ringfence_block::storage::Disk;
use ringfence_block::storage::testing::checker::Checker;
use ringfence_block::storage::testing::workload::{Failure, Workload};
use ringfence_block::storage::testing::{Driver, Random, image};
use rustix::process::{Signal, kill_process};

use crate::require;
use crate::support::disks::{
    Background, image_file, loop_missing, output_of, rounds, served, served_within, socket_of,
    succeed,
};
use crate::support::needs::Need;
use crate::support::{Lab, MOMENT, Running, eventually, sha256};

/// Limit for requests, longer than any takes on a busy machine.
const NEVER: Duration = Duration::from_secs(120);
/// Time within which the requests to a killed process must stay unanswered or fail.
const NOTICED: Duration = Duration::from_secs(1);

/// Kills the victim of a round.
fn kill(round: u64, guest: &Running) {
    let victims: &[&str] = match round % 3 {
        0 => &["frontend"],
        1 => &["driver"],
        _ => &["frontend", "driver"],
    };
    // All victims are found first, because the end of one ends the other too.
    let victims: Vec<_> = victims.iter().map(|victim| guest.inner(victim)).collect();
    for victim in victims {
        // The process may have ended by itself after the one before it.
        let _ = kill_process(victim.pid, Signal::KILL);
    }
}

#[test]
fn kill_of_any_process_loses_no_flushed_write_and_tears_no_sector() {
    require!(Need::Guests, Need::Root);
    let lab = Lab::new();
    let file = image_file(&lab, 4);
    let mut checker = Checker::new();
    let mut random = Random::new(97);
    for round in 0..rounds(6) {
        // Each victim in each mode.
        let mode = ["persistent", "map", "copy"][usize::try_from(round / 3 % 3).unwrap()];
        let disk = format!("{},mode={mode}", file.display());
        let (guest, disk) = served_within(&lab, &disk, NEVER);
        let found = checker.check_after_crash(0, &image(&disk));
        found.unwrap_or_else(|violation| panic!("round {round}: {violation}"));
        let mut driver = Driver::new(disk.queue(16).unwrap());
        let mut running = Workload::new(round).start(&disk);
        running.steps(&mut driver, &mut checker, 50 + random.index(400)).unwrap();
        kill(round, &guest);
        // Writes continue until the kill is noticed. Those requests fail, get no answer, or were done just before.
        let mut driver = driver.with_timeout(NOTICED);
        match running.steps(&mut driver, &mut checker, 10_000) {
            Ok(()) | Err(Failure::Failed(_) | Failure::Stuck) => {}
            Err(failure) => panic!("round {round}: {failure:?}"),
        }
        drop(driver);
        running.crashed(&mut checker);
        guest.finish(MOMENT);
    }
    let found = checker.check_after_crash(0, &fs::read(&file).unwrap());
    found.unwrap_or_else(|violation| panic!("at the end: {violation}"));
}

#[test]
fn killed_frontend_closes_its_nbd_connections() {
    require!(Need::Guests, Need::Root);
    let lab = Lab::new();
    let file = image_file(&lab, 4);
    let (guest, disk) = served(&lab, &file.display().to_string());
    Driver::new(disk.queue(1).unwrap()).write(0, &[7; 4096]).unwrap();
    let mut idle = std::os::unix::net::UnixStream::connect(socket_of(&lab, &guest)).unwrap();
    idle.set_read_timeout(Some(MOMENT)).unwrap();
    idle.read_exact(&mut [0; 18]).unwrap();
    guest.inner("frontend").signal(Signal::KILL);
    let end = idle.read(&mut [0]);
    let ended = match &end {
        Ok(read) => *read == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    };
    assert!(ended, "{end:?}");
    guest.finish(MOMENT);
}

/// File system of the kernel on a disk: nbdfuse, a loop device on its file, and a mount.
struct Mounted<'a> {
    fuse: &'a Path,
    mount: &'a Path,
    _nbdfuse: Background,
}

impl<'a> Mounted<'a> {
    fn new(socket: &Path, fuse: &'a Path, mount: &'a Path) -> Mounted<'a> {
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        let file = fuse.join("nbd");
        let nbdfuse =
            Background::start(&["nbdfuse", fuse.to_str().unwrap(), &uri], || file.exists());
        let mounted = Mounted { fuse, mount, _nbdfuse: nbdfuse };
        succeed(&["mount", "-o", "loop", file.to_str().unwrap(), mount.to_str().unwrap()]);
        mounted
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        // Without the disk all these commands fail, and the mount must be removed nevertheless.
        for (program, path) in [("umount", self.mount), ("fusermount3", self.fuse)] {
            let words: &[&str] = match program {
                "umount" => &["umount"],
                _ => &["fusermount3", "-u"],
            };
            let path = path.to_str().unwrap();
            eventually(Duration::from_secs(5), || {
                output_of(&[words, &[path]].concat()).0 == Some(0)
            });
        }
    }
}

#[test]
#[ignore = "long: ten kills"]
fn file_system_keeps_synchronised_files_after_ten_kills() {
    require!(
        Need::Guests,
        Need::Root,
        Need::Program("nbdfuse", "nbdfuse"),
        Need::Program("mkfs.ext4", "e2fsprogs"),
        Need::Program("fusermount3", "fuse3"),
        Need::Program("losetup", "mount"),
    );
    if let Some(reason) = loop_missing() {
        return crate::support::needs::skip_for_the_kernel(&reason);
    }
    let lab = Lab::new();
    let disk = image_file(&lab, 128);
    let (disk, fuse, mount) = (disk.display().to_string(), lab.file("fuse"), lab.file("mount"));
    succeed(&["/sbin/mkfs.ext4", "-q", "-F", &disk]);
    fs::create_dir(&fuse).unwrap();
    fs::create_dir(&mount).unwrap();
    // Files that were synchronised, and their checksums.
    let mut kept: Vec<(String, String)> = vec![];
    let mut random = Random::new(4242);
    let last = rounds(10).min(20);
    for round in 0..=last {
        let guest = lab.run(&format!("--disk {disk}"), &["sleep", "300"]);
        guest.wait_up();
        let mounted = Mounted::new(&socket_of(&lab, &guest), &fuse, &mount);
        for (name, sum) in &kept {
            assert_eq!(sha256(&mount.join(name)), *sum, "round {round}: {name}");
        }
        let (name, bytes) = (format!("kept{round}"), 1 << 20 | random.index(1 << 20));
        let content: Vec<u8> =
            (0..bytes / 8).flat_map(|_| random.next_u64().to_le_bytes()).collect();
        let mut file = fs::File::create(mount.join(&name)).unwrap();
        file.write_all(&content).unwrap();
        file.sync_all().unwrap();
        fs::File::open(&mount).unwrap().sync_all().unwrap();
        let outside = lab.file("outside");
        fs::write(&outside, &content).unwrap();
        kept.push((name, sha256(&outside)));
        drop(file);
        if round < last {
            // More data is written meanwhile, which may or may not be stored.
            let target = mount.join("lost");
            let writer = std::thread::spawn(move || {
                let _ =
                    fs::write(&target, &content).and_then(|()| fs::File::open(&target)?.sync_all());
            });
            std::thread::sleep(Duration::from_millis(random.below(60)));
            kill(round, &guest);
            writer.join().unwrap();
        }
        drop(mounted);
        drop(guest);
        // Writes in flight end with the driver domain.
        lab.assert_no_switch();
        // The check replays the journal, as a mount does. Nothing must be left to repair.
        let (status, text) = output_of(&["/sbin/e2fsck", "-f", "-p", &disk]);
        assert!(matches!(status, Some(0 | 1)), "round {round}: {text}");
        succeed(&["/sbin/e2fsck", "-f", "-n", &disk]);
    }
}

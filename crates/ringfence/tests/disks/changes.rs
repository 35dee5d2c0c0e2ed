//! Changes of a disk of `run` while its guest uses it: `ringfence disk snapshot` and `resize`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringfence_block::storage::testing::{Driver, image, lent_with};
use ringfence_block::storage::{Disk, Op};
use ringfence_nbd::client::{NbdAddress, NbdDisk, NbdOptions};
use rustix::process::{Signal, kill_process};

use crate::require;
use crate::support::disks::{URI, image_file, output_of, served, socket_of, succeed};
use crate::support::needs::Need;
use crate::support::{Lab, MOMENT, Running, eventually, write_noise};

const QEMU_IMG: Need = Need::Program("qemu-img", "qemu-utils");
const MIB: u64 = 1 << 20;

/// Runs `ringfence disk` with these words, as the user of the lab's guests.
fn disk_command(lab: &Lab, words: &[&str]) -> Output {
    let mut command = Command::new(lab.program());
    command.args(words).env("XDG_RUNTIME_DIR", lab.runtime_dir().parent().unwrap());
    command.stdin(Stdio::null()).output().unwrap()
}

/// Runs a change that must succeed. Returns its output.
fn change(lab: &Lab, words: &[&str]) -> String {
    let output = disk_command(lab, words);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Runs a change that must be refused with this reason.
fn refused(lab: &Lab, words: &[&str], why: &str) {
    let output = disk_command(lab, words);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(125), "{words:?}: {text}");
    assert!(text.contains(why), "{words:?}: {text}");
}

/// Returns the word that names a guest.
fn name_of(guest: &Running) -> String {
    guest.pid().as_raw_nonzero().to_string()
}

fn flush(driver: &mut Driver) {
    driver.run(Op::Flush, 0, 0, vec![]).result.unwrap();
}

/// Opens the disk of a guest by another connection.
fn connect_again(lab: &Lab, guest: &Running) -> NbdDisk {
    let address = NbdAddress::Unix { path: socket_of(lab, guest), name: String::new(), tls: None };
    NbdDisk::open(&address, &NbdOptions::default()).unwrap()
}

/// Checks an image with its chain, once the driver domain has closed it.
fn is_valid(path: &Path) {
    let path = path.to_str().unwrap();
    let checked = || output_of(&["qemu-img", "check", "-q", "-f", "qcow2", path]);
    assert!(eventually(MOMENT, || checked().0 == Some(0)), "{:?}", checked());
}

#[test]
fn snapshot_under_load_keeps_the_content_of_one_moment_and_all_later_writes() {
    require!(Need::Guests, QEMU_IMG);
    for (format, options) in [
        ("raw", ""),
        ("raw", ",engine=threads,cache=writeback"),
        ("qcow2", ",format=qcow2"),
        ("qcow2", ",format=qcow2,cache=writeback,mode=copy"),
    ] {
        let lab = Lab::new();
        let (base, new) = (lab.file("base.img"), lab.file("new.qcow2"));
        succeed(&["qemu-img", "create", "-q", "-f", format, base.to_str().unwrap(), "8M"]);
        let (guest, disk) = served(&lab, &format!("{}{options}", base.display()));
        // Blocks have numbers that rise, and a flush follows each: what is below the overlay is a prefix of the writes.
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, queue) = (Arc::clone(&stop), disk.queue(32).unwrap());
        let writer = std::thread::spawn(move || {
            let mut driver = Driver::new(queue);
            let mut round = 1u64;
            loop {
                for slot in 0..8u64 {
                    let mut block = vec![0; 4096];
                    block[..8].copy_from_slice(&round.to_le_bytes());
                    let at = (slot * 32 + round % 32) * 32768;
                    driver.submit(
                        Op::Write { fua: false },
                        at,
                        4096,
                        vec![lent_with(&block).into()],
                    );
                }
                while driver.in_flight() > 0 {
                    assert!(driver.wait().unwrap().iter().all(|done| done.result.is_ok()));
                }
                flush(&mut driver);
                if stopped.load(Ordering::Relaxed) {
                    return round;
                }
                round += 1;
            }
        });
        let words = ["disk", "snapshot", &name_of(&guest), new.to_str().unwrap()];
        let text = change(&lab, &words);
        assert!(text.contains("next start: --disk"), "{text}");
        // The base is a backing file from now on: nobody may write it, and others may read it.
        let below = fs::read(&base).unwrap();
        let base_path = base.to_str().unwrap();
        let (status, why) = output_of(&["qemu-io", "-f", format, "-c", "write 0 512", base_path]);
        assert!(status != Some(0) && why.contains("lock"), "{why}");
        std::thread::sleep(std::time::Duration::from_millis(200));
        stop.store(true, Ordering::Relaxed);
        let last = writer.join().unwrap();
        assert!(fs::read(&base).unwrap() == below, "{options}: the base is written no more");
        let content = image(&disk);
        drop(disk);
        let raw = lab.file("base.raw");
        let words = [
            "qemu-img",
            "convert",
            "-U",
            "-f",
            format,
            "-O",
            "raw",
            base_path,
            raw.to_str().unwrap(),
        ];
        succeed(&words);
        let below = fs::read(&raw).unwrap();
        let round_at = |content: &[u8], slot: u64, residue: u64| {
            let at = usize::try_from((slot * 32 + residue) * 32768).unwrap();
            u64::from_le_bytes(content[at..at + 8].try_into().unwrap())
        };
        // Of the rounds of one moment, each slot has the newest or the one before it.
        let newest = (0..32).map(|residue| round_at(&below, 0, residue)).max().unwrap();
        for slot in 0..8 {
            let of_slot = (0..32).map(|residue| round_at(&below, slot, residue)).max().unwrap();
            assert!(newest.abs_diff(of_slot) <= 1, "{options}: {newest}, {of_slot}");
            for residue in 0..32 {
                let found = round_at(&content, slot, residue);
                let wanted = (0..=last).rev().find(|round| round % 32 == residue).unwrap_or(0);
                assert_eq!(found, wanted, "{options}: slot {slot}");
            }
        }
        kill_process(guest.pid(), Signal::TERM).unwrap();
        guest.finish(MOMENT);
        is_valid(&new);
        let (full, new_path) = (lab.file("full"), new.to_str().unwrap());
        fs::write(&full, &content).unwrap();
        let full = full.to_str().unwrap();
        succeed(&["qemu-img", "compare", "-q", "-f", "raw", "-F", "qcow2", full, new_path]);
        // The image is served as the message says.
        let (_guest, disk) = served(&lab, &format!("{new_path},format=qcow2"));
        assert!(image(&disk) == content);
    }
}

#[test]
fn file_below_a_snapshot_is_no_disk_of_the_next_guest() {
    require!(Need::Guests, Need::Attributes);
    let lab = Lab::new();
    let (base, new) = (image_file(&lab, 1), lab.file("new.qcow2"));
    let (guest, disk) = served(&lab, base.to_str().unwrap());
    let text = change(&lab, &["disk", "snapshot", &name_of(&guest), new.to_str().unwrap()]);
    assert!(!text.contains("attribute"), "{text}");
    drop(disk);
    kill_process(guest.pid(), Signal::TERM).unwrap();
    guest.finish(MOMENT);
    let refused = lab.run(&format!("--disk {}", base.display()), &["true"]).finish(MOMENT);
    assert_eq!(refused.status, Some(125), "{}", refused.stderr);
    let why = format!("is below {}", new.display());
    assert!(refused.stderr.contains(&why), "{}", refused.stderr);
    let info = disk_command(&lab, &["disk", "info", base.to_str().unwrap()]);
    assert_eq!(info.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&info.stdout).contains(&why));
    lab.run(&format!("--disk {},ro", base.display()), &["true"]).succeed(MOMENT);
    lab.run(&format!("--disk {},format=qcow2", new.display()), &["true"]).succeed(MOMENT);
    // Without the overlay, the disk is what it was at the snapshot.
    fs::remove_file(new).unwrap();
    lab.run(&format!("--disk {}", base.display()), &["true"]).succeed(MOMENT);
}

#[test]
fn fio_verifies_each_write_across_snapshots_and_growth() {
    require!(Need::Guests, QEMU_IMG, Need::Program("fio", "fio"));
    let lab = Lab::new();
    let base = image_file(&lab, 16);
    let fio = format!(
        "fio --name=v --ioengine=nbd --uri={URI}0 --rw=randwrite --bs=4k --size=16M --iodepth=16 --fsync=64 --verify=crc32c \
         --verify_fatal=1 --output=fio.log"
    );
    let script = format!("touch begun; until test -e done; do {fio}; done; touch verified");
    let guest = lab.script(&format!("--disk {}", base.display()), &script);
    assert!(eventually(MOMENT, || lab.file("begun").exists()));
    let name = name_of(&guest);
    change(&lab, &["disk", "resize", &name, "24M"]);
    let images: Vec<_> = (0..4).map(|number| lab.file(&format!("{number}.qcow2"))).collect();
    for image in &images {
        std::thread::sleep(std::time::Duration::from_millis(300));
        change(&lab, &["disk", "snapshot", &name, image.to_str().unwrap()]);
    }
    fs::write(lab.file("done"), "").unwrap();
    guest.succeed(MOMENT);
    assert!(lab.file("verified").exists());
    images.iter().for_each(|image| is_valid(image));
}

#[test]
fn snapshots_of_snapshots_are_a_chain_and_the_size_grows_on_the_way() {
    require!(Need::Guests, QEMU_IMG);
    let lab = Lab::new();
    let folder = lab.file("folder");
    fs::create_dir(&folder).unwrap();
    let base = image_file(&lab, 4);
    let (guest, disk) = served(&lab, base.to_str().unwrap());
    let name = name_of(&guest);
    let mut driver = Driver::new(disk.queue(8).unwrap());
    driver.write(0, &[1; 4096]).unwrap();
    // A file grows while its disk is used.
    refused(&lab, &["disk", "resize", &name], "enlarge that first");
    refused(&lab, &["disk", "resize", &name, "2M"], "only grows");
    refused(&lab, &["disk", "resize", &name, "7"], "no disk `7`");
    assert!(change(&lab, &["disk", "resize", &name, "6M"]).contains(&(6 * MIB).to_string()));
    assert_eq!(fs::metadata(&base).unwrap().len(), 6 * MIB);
    fs::File::options().write(true).open(&base).unwrap().set_len(8 * MIB + 100).unwrap();
    change(&lab, &["disk", "resize", &name, "0"]);
    assert_eq!(disk.geometry().bytes, 4 * MIB, "a connection keeps its size");
    let again = connect_again(&lab, &guest);
    assert_eq!(again.geometry().bytes, 8 * MIB, "the next one has the new size, in sectors");
    let mut later = Driver::new(again.queue(8).unwrap());
    later.write(7 * MIB, &[2; 4096]).unwrap();
    let images = [lab.file("one.qcow2"), lab.file("two.qcow2"), folder.join("three.qcow2")];
    for (image, byte) in images.iter().zip(3..) {
        let text = change(&lab, &["disk", "snapshot", &name, "0", image.to_str().unwrap()]);
        let is_elsewhere = image.starts_with(&folder);
        assert_eq!(text.contains("backing=any"), is_elsewhere, "{text}");
        later.write(u64::from(byte) * MIB, &[byte; 4096]).unwrap();
        assert_eq!(later.read(7 * MIB, 4096).unwrap(), [2; 4096]);
    }
    refused(&lab, &["disk", "resize", &name, "1G"], "qemu-img resize");
    let listed = Command::new(lab.program())
        .args(["ps", "--json"])
        .env("XDG_RUNTIME_DIR", lab.runtime_dir().parent().unwrap())
        .output()
        .unwrap();
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.contains("three.qcow2"), "{listed}");
    flush(&mut later);
    drop((driver, later, disk, again));
    kill_process(guest.pid(), Signal::TERM).unwrap();
    guest.finish(MOMENT);
    images.iter().for_each(|image| is_valid(image));
    let last = format!("{},format=qcow2,backing=any", images[2].display());
    let (_guest, disk) = served(&lab, &last);
    let mut driver = Driver::new(disk.queue(8).unwrap());
    for (at, byte) in [(0, 1), (7, 2), (3, 3), (4, 4), (5, 5)] {
        assert_eq!(driver.read(at * MIB, 4096).unwrap(), vec![byte; 4096], "{at}");
    }
}

#[test]
fn snapshot_that_is_refused_leaves_the_disk_and_every_file_as_they_were() {
    require!(Need::Guests, Need::Root, QEMU_IMG);
    let lab = Lab::new();
    let base = image_file(&lab, 4);
    let (guest, disk) = served(&lab, &format!("{},cache=writeback", base.display()));
    let name = name_of(&guest);
    let mut driver = Driver::new(disk.queue(8).unwrap());
    driver.write(0, &[1; 4096]).unwrap();
    let (other, link) = (lab.file("other"), lab.file("link"));
    fs::write(&other, b"precious").unwrap();
    symlink(&other, &link).unwrap();
    let small = lab.file("small");
    fs::create_dir(&small).unwrap();
    succeed(&["mount", "-t", "tmpfs", "-o", "size=16k", "none", small.to_str().unwrap()]);
    let new = small.join("new.qcow2");
    for (path, why) in [
        (&other, "exists already"),
        (&link, "exists already"),
        (&base, "exists already"),
        (&lab.file("missing/new"), "No such file"),
        (&new, "No space left"),
    ] {
        refused(&lab, &["disk", "snapshot", &name, path.to_str().unwrap()], why);
        driver.write(4096, &[2; 4096]).unwrap();
    }
    refused(
        &lab,
        &["disk", "snapshot", &name, "1", lab.file("n").to_str().unwrap()],
        "no disk `1`",
    );
    refused(&lab, &["disk", "snapshot", "nobody", lab.file("n").to_str().unwrap()], "`nobody`");
    assert!(!new.exists() && !lab.file("n").exists());
    succeed(&["umount", small.to_str().unwrap()]);
    assert_eq!(fs::read(&other).unwrap(), b"precious");
    flush(&mut driver);
    assert_eq!(fs::read(&base).unwrap()[4096..8192], [2; 4096], "the disk is where it was");
    // A disk that is only read has nothing to write.
    let (reader, _disk) = served(&lab, &format!("{},ro", other_image(&lab)));
    let unmade = lab.file("n");
    refused(&lab, &["disk", "snapshot", &name_of(&reader), unmade.to_str().unwrap()], "read-only");
    assert!(!unmade.exists());
}

/// Creates a second disk. Returns its path.
fn other_image(lab: &Lab) -> String {
    let path = lab.file("second.img");
    write_noise(&path, 1);
    path.display().to_string()
}

#[test]
fn driver_domain_killed_after_a_snapshot_leaves_valid_images() {
    require!(Need::Guests, QEMU_IMG);
    let lab = Lab::new();
    let base = image_file(&lab, 8);
    let new = lab.file("new.qcow2");
    let (guest, disk) = served(&lab, &format!("{},cache=writeback", base.display()));
    let mut driver = Driver::new(disk.queue(16).unwrap());
    driver.write(0, &[1; 65536]).unwrap();
    change(&lab, &["disk", "snapshot", &name_of(&guest), new.to_str().unwrap()]);
    for number in 0..100u64 {
        let block = vec![lent_with(&[7; 4096]).into()];
        driver.submit(Op::Write { fua: false }, (number * 37 % 128) << 16, 4096, block);
        if number % 16 == 15 {
            driver.wait().unwrap();
        }
    }
    kill_process(guest.inner("driver").pid, Signal::KILL).unwrap();
    drop((driver, disk));
    guest.finish(MOMENT);
    let checked = || output_of(&["qemu-img", "check", "-f", "qcow2", new.to_str().unwrap()]);
    assert!(eventually(MOMENT, || matches!(checked().0, Some(0 | 3))), "{:?}", checked());
    assert_eq!(fs::read(&base).unwrap()[..65536], vec![1; 65536], "the base has no later write");
}

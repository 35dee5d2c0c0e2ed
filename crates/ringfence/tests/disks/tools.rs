//! Disks of a command that ordinary programs use.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use ringfence_block::storage::file::check_uring;

use crate::require;
use crate::support::disks::{Background, URI, greets, image_file, output_of, succeed};
use crate::support::needs::{FUSE, Need};
use crate::support::{Lab, MOMENT, eventually, sha256, write_noise};

#[test]
fn nbdcopy_data_is_stored_and_read_back_in_each_mode() {
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
fn status_of_guest_names_engine_of_each_disk() {
    require!(Need::Guests);
    let lab = Lab::new();
    let image = |name: &str| {
        let path = lab.file(name);
        fs::write(&path, [0; 1 << 16]).unwrap();
        path.display().to_string()
    };
    let (first, second) = (image("a"), image("b"));
    let options = format!("--name g --disk {first} --disk {second},engine=threads");
    let guest = lab.run(&options, &["sleep", "300"]);
    guest.wait_up();
    let status = || lab.spawn(&[lab.program(), "status", "g"]).succeed(MOMENT);
    let engine = if check_uring().is_ok() { "by io_uring" } else { "by threads" };
    let of_disk = |text: &str, number: u32| {
        let name = format!(".{number}:");
        let line = text.lines().find(|line| line.starts_with("vbd") && line.contains(&name));
        line.map(str::to_owned).unwrap_or_default()
    };
    let is_named = || {
        let text = status();
        of_disk(&text, 0).ends_with(engine) && of_disk(&text, 1).ends_with("by threads")
    };
    assert!(eventually(MOMENT, is_named), "{}", status());
    assert_eq!(guest.end().status, Some(143));
}

#[test]
fn holes_of_image_are_found_in_each_mode() {
    require!(
        Need::Guests,
        Need::Program("nbdcopy", "libnbd-bin"),
        Need::Program("qemu-img", "qemu-utils"),
    );
    for mode in ["persistent", "map", "copy", "window"] {
        let lab = Lab::new();
        let disk = image_file(&lab, 32);
        let file = fs::OpenOptions::new().write(true).open(&disk).unwrap();
        file.write_all_at(&[7; 65536], 1 << 20).unwrap();
        drop(file);
        let back = lab.file("out");
        let script = format!(
            "nbdinfo --map \"$RINGFENCE_DISK0_URI\" && qemu-img map -f raw {URI}0 && nbdcopy {URI}0 {}",
            back.display()
        );
        let options = format!("--disk {},mode={mode}", disk.display());
        let said = lab.script(&options, &script).succeed(MOMENT);
        let lines: Vec<Vec<&str>> =
            said.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["0", "1048576", "3", "hole,zero"], "{mode}: {said}");
        assert_eq!(lines[1], ["1048576", "65536", "0", "data"], "{mode}: {said}");
        assert_eq!(lines[2], ["1114112", "32440320", "3", "hole,zero"], "{mode}: {said}");
        assert_eq!(lines[4][..2], ["0x100000", "0x10000"], "{mode}: {said}");
        assert_eq!(sha256(&back), sha256(&disk), "{mode}");
        let allocated = fs::metadata(&back).unwrap().blocks() * 512;
        assert!(allocated < 1 << 20, "{mode}: {allocated} bytes of a copy of 64 KiB of data");
    }
}

#[test]
fn sparse_copy_larger_than_file_system_fits_in_each_mode() {
    require!(
        Need::Guests,
        Need::Root,
        Need::Program("nbdcopy", "libnbd-bin"),
        Need::Program("qemu-img", "qemu-utils"),
    );
    let lab = Lab::new();
    let (source, small) = (lab.file("source"), lab.file("small"));
    let file = fs::File::create(&source).unwrap();
    file.set_len(1 << 30).unwrap();
    for piece in 0..8 {
        file.write_all_at(&vec![7; 1 << 20], piece * (100 << 20)).unwrap();
    }
    drop(file);
    fs::create_dir(&small).unwrap();
    succeed(&["mount", "-t", "tmpfs", "-o", "size=100m", "none", small.to_str().unwrap()]);
    let _mounted = Unmounted(small.clone());
    let disk = small.join("disk.img");
    let convert = "qemu-img convert -n -f raw -O raw";
    let copies = [
        ("persistent", "nbdcopy --flush", ""),
        ("map", convert, ""),
        ("copy", "nbdcopy --flush", ",discard"),
        ("window", convert, ",discard"),
    ];
    for (mode, copy, more) in copies {
        fs::File::create(&disk).unwrap().set_len(1 << 30).unwrap();
        let options = format!("--disk {},cache=writeback,mode={mode}{more}", disk.display());
        let script = format!("{copy} {} {URI}0", source.display());
        lab.script(&options, &script).succeed(MOMENT);
        let allocated = fs::metadata(&disk).unwrap().blocks() * 512;
        assert!(allocated < 12 << 20, "{mode}: {allocated} bytes for 8 MiB of data");
        let (source, disk) = (source.to_str().unwrap(), disk.to_str().unwrap());
        succeed(&["qemu-img", "compare", "-f", "raw", "-F", "raw", source, disk]);
    }
}

/// Mounted file system, unmounted on drop.
struct Unmounted(PathBuf);

impl Drop for Unmounted {
    fn drop(&mut self) {
        output_of(&["umount", "-l", self.0.to_str().unwrap()]);
    }
}

#[test]
fn several_disks_are_distinct_and_read_only_disk_is_unchanged() {
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
fn file_system_created_through_disk_passes_check() {
    require!(
        Need::Guests,
        Need::Root,
        Need::Program("nbdfuse", "nbdfuse"),
        Need::Program("mkfs.ext4", "e2fsprogs"),
        Need::Program("fusermount3", "fuse3"),
        FUSE,
    );
    let lab = Lab::new();
    let disk = image_file(&lab, 64);
    let (content, mount, back) = (lab.file("content"), lab.file("mount"), lab.file("back"));
    // Each block takes a way over five processes.
    write_noise(&content, 1);
    fs::create_dir(&mount).unwrap();
    let mount = mount.display();
    let script = format!(
        "nbdfuse {mount} {URI}0 & \
         for i in $(seq 600); do test -e {mount}/nbd && break; sleep 0.1; done; \
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
fn image_of_guest_is_locked_for_qemu_img_until_guest_ends() {
    require!(Need::Guests, Need::Program("qemu-img", "qemu-utils"));
    let lab = Lab::new();
    let disk = image_file(&lab, 8);
    let path = disk.display().to_string();
    let write = ["qemu-io", "-f", "raw", "-c", "write 0 512", &path];
    for option in ["", ",ro"] {
        let guest = lab.run(&format!("--disk {path}{option}"), &["sleep", "300"]);
        guest.wait_up();
        let (status, text) = output_of(&write);
        let is_refused = status == Some(1) && text.contains("Failed to get \"write\" lock");
        assert!(is_refused, "{option}: {status:?} {text}");
        let (status, text) = output_of(&["qemu-img", "resize", "-f", "raw", &path, "16M"]);
        assert!(status == Some(1) && text.contains("lock"), "{option}: {status:?} {text}");
        guest.end();
        // The driver domain detaches the guest after its launcher has ended.
        let written = || output_of(&write);
        assert!(eventually(MOMENT, || written().0 == Some(0)), "{option}: {:?}", written());
    }
    assert_eq!(fs::metadata(&disk).unwrap().len(), 8 << 20);
}

#[test]
fn image_of_qemu_nbd_is_waited_for_with_message_and_refused_in_the_end() {
    require!(Need::Guests, Need::Program("qemu-nbd", "qemu-utils"));
    let lab = Lab::new();
    let (disk, socket) = (image_file(&lab, 8), lab.file("socket"));
    let (disk, path) = (disk.display().to_string(), socket.display().to_string());
    let words = ["qemu-nbd", "-t", "-f", "raw", "-k", &path, &disk];
    let server = Background::start(&words, || greets(&socket));
    let refused = lab.run(&format!("--disk {disk},ro"), &["true"]).finish(MOMENT);
    assert_eq!(refused.status, Some(125));
    assert!(refused.stderr.contains("by QEMU or one of its tools"), "{}", refused.stderr);
    let guest = lab.run(&format!("--disk {disk}"), &["true"]);
    guest.wait_for_error("waiting for");
    drop(server);
    guest.succeed(MOMENT);
}

#[test]
fn invalid_disk_is_refused_before_guest_starts() {
    require!(Need::Guests);
    let lab = Lab::new();
    for (disk, why) in [
        ("/nowhere/x", "No such file"),
        ("/dev/null", "neither a file nor"),
        ("nbd:unix:/run/s", "nbd+unix:///?socket=/run/s"),
        ("NBD://localhost", "nbd://"),
        ("nbd+vsock://2:10809", "vsock"),
        ("nbd://localhost/?export=x", "the parameter export is not known"),
        ("nbds://localhost/?tls-psk-file=x", "pre-shared keys"),
    ] {
        let finished = lab.run(&format!("--disk {disk}"), &["true"]).finish(MOMENT);
        assert_eq!(finished.status, Some(125));
        assert!(finished.stderr.contains(why), "{}", finished.stderr);
    }
    lab.assert_no_switch();
}

#[test]
fn disk_below_long_runtime_directory_is_refused_with_advice() {
    require!(Need::Guests);
    let lab = Lab::new();
    let disk = image_file(&lab, 1).display().to_string();
    let long = lab.file(&"long".repeat(30));
    fs::create_dir(&long).unwrap();
    let variable = format!("XDG_RUNTIME_DIR={}", long.display());
    let wrapper = ["env", &variable];
    let options = format!("--disk {disk}");
    let refused = lab.start(&options, &["true"], &wrapper).finish(MOMENT);
    assert_eq!(refused.status, Some(125));
    assert!(refused.stderr.contains("set XDG_RUNTIME_DIR"), "{}", refused.stderr);
    lab.start("", &["true"], &wrapper).succeed(MOMENT);
}

#[test]
fn image_whose_name_begins_with_dash_is_a_disk() {
    require!(Need::Guests, Need::Program("nbdinfo", "libnbd-bin"));
    let lab = Lab::new();
    fs::File::create(lab.file("-dash")).unwrap().set_len(1 << 20).unwrap();
    let size = lab.script("--disk -dash", &format!("nbdinfo --size {URI}0")).succeed(MOMENT);
    assert_eq!(size.trim(), "1048576");
}

#[test]
fn image_that_cannot_be_written_is_refused_with_advice() {
    require!(Need::Guests, Need::Root);
    let lab = Lab::new();
    let readonly = lab.file("readonly");
    fs::create_dir(&readonly).unwrap();
    succeed(&["mount", "-t", "tmpfs", "none", readonly.to_str().unwrap()]);
    let _mounted = Unmounted(readonly.clone());
    let disk = readonly.join("disk.img");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    succeed(&["mount", "-o", "remount,ro", readonly.to_str().unwrap()]);
    let refused = lab.run(&format!("--disk {}", disk.display()), &["true"]).finish(MOMENT);
    assert_eq!(refused.status, Some(125));
    assert!(refused.stderr.contains("--disk FILE,ro"), "{}", refused.stderr);
    lab.run(&format!("--disk {},ro", disk.display()), &["true"]).succeed(MOMENT);
}

fn sockets(lab: &Lab) -> Vec<PathBuf> {
    let entries = fs::read_dir(lab.runtime_dir()).into_iter().flatten().flatten();
    let disks = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("disk"));
    disks.map(|entry| entry.path()).collect()
}

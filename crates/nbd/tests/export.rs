//! Exports used by ordinary programs: nbdinfo, nbdcopy, qemu-img, fio, nbdfuse.
#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod support;

use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringfence_block::storage::Disk;
use ringfence_block::storage::file::{FileDisk, FileOptions};
use ringfence_block::storage::memory::MemoryDisk;
use ringfence_nbd::export::{Export, ExportOptions};

use support::needs::FUSE;
use support::{Background, output, run, wait_until};

/// Export of a disk in a temporary directory.
struct Served {
    export: Option<Export>,
    directory: tempfile::TempDir,
}

impl Served {
    fn new(disk: &Arc<dyn Disk>) -> Served {
        Served::with(disk, ExportOptions { name: "disk0".to_owned(), ..ExportOptions::default() })
    }

    fn with(disk: &Arc<dyn Disk>, options: ExportOptions) -> Served {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("nbd.sock")).unwrap();
        let export = Some(Export::start(listener, disk, options).unwrap());
        Served { export, directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///disk0?socket={}", self.path("nbd.sock").display())
    }
}

fn memory(bytes: u64) -> Arc<dyn Disk> {
    Arc::new(MemoryDisk::new(bytes, 512).unwrap())
}

/// Creates a file of random bytes and returns them.
fn noise(path: &Path, bytes: usize) -> Vec<u8> {
    let mut random = ringfence_block::storage::testing::Random::new(4711);
    let content: Vec<u8> = (0..bytes / 8).flat_map(|_| random.next_u64().to_le_bytes()).collect();
    std::fs::write(path, &content).unwrap();
    content
}

#[test]
fn nbdinfo_reports_the_offered_properties() {
    require_programs!("nbdinfo" of "libnbd-bin");
    let served = Served::new(&memory(3 << 20));
    let info = run("nbdinfo", &["--json", &served.uri()]);
    for expected in [
        "\"protocol\": \"newstyle-fixed\"",
        "\"structured\": true",
        "\"export-name\": \"disk0\"",
        "\"export-size\": 3145728",
        "\"is_read_only\": false",
        "\"can_flush\": true",
        "\"can_fua\": true",
        "\"can_multi_conn\": true",
        "\"can_trim\": true",
        "\"can_zero\": true",
        "\"can_df\": true",
        "\"block_size_minimum\": 1,",
        "base:allocation",
    ] {
        assert!(info.contains(expected), "no {expected} in {info}");
    }
    let map = run("nbdinfo", &["--map", &served.uri()]);
    // A read allocates the memory that it reads.
    assert!(map.trim_end().ends_with("hole,zero"), "{map}");
    let list = run("nbdinfo", &["--list", &served.uri()]);
    assert!(list.contains("disk0"), "{list}");
    let other = served.uri().replace("disk0", "another");
    assert!(!output("nbdinfo", &[&other]).status.success(), "there is no such export");
}

#[test]
fn programs_find_holes_of_sparse_file() {
    require_programs!(
        "nbdinfo" of "libnbd-bin",
        "nbdcopy" of "libnbd-bin",
        "qemu-img" of "qemu-utils",
    );
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.img");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(64 << 20).unwrap();
    file.write_all_at(&[7; 65536], 1 << 20).unwrap();
    file.write_all_at(&[8; 4096], 40 << 20).unwrap();
    drop(file);
    let disk: Arc<dyn Disk> = Arc::new(FileDisk::open(&path, &FileOptions::default()).unwrap());
    let served = Served::new(&disk);
    let map = run("nbdinfo", &["--map", &served.uri()]);
    let words: Vec<&str> = map.split_whitespace().collect();
    let (hole, data) = (["3", "hole,zero"], ["0", "data"]);
    let expected = [
        (["0", "1048576"], hole),
        (["1048576", "65536"], data),
        (["1114112", "40828928"], hole),
        (["41943040", "4096"], data),
        (["41947136", "25161728"], hole),
    ];
    let expected: Vec<&str> =
        expected.iter().flat_map(|(at, state)| [at, state]).flatten().copied().collect();
    assert_eq!(words, expected);
    let map = run("qemu-img", &["map", "--output=json", "-f", "raw", &served.uri()]);
    assert_eq!(map.matches("\"data\": true").count(), 2, "{map}");
    let back = served.path("out");
    run("nbdcopy", &[&served.uri(), &back.display().to_string()]);
    assert!(std::fs::read(&back).unwrap() == std::fs::read(&path).unwrap());
    let allocated = std::fs::metadata(&back).unwrap().blocks() * 512;
    assert!(allocated < 1 << 20, "{allocated} bytes of a copy that has 68 KiB of data");
}

#[test]
fn sparse_copies_into_image_allocate_their_data_alone() {
    require_programs!("nbdcopy" of "libnbd-bin", "qemu-img" of "qemu-utils");
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source");
    let file = std::fs::File::create(&source).unwrap();
    file.set_len(512 << 20).unwrap();
    for piece in 0..8 {
        file.write_all_at(&vec![7; 1 << 20], piece * (60 << 20)).unwrap();
    }
    drop(file);
    let from = source.display().to_string();
    let convert = ["convert", "-n", "-f", "raw", "-O", "raw"];
    for discard in [false, true] {
        for program in ["nbdcopy", "qemu-img"] {
            let path = directory.path().join("target");
            std::fs::File::create(&path).unwrap().set_len(512 << 20).unwrap();
            let options = FileOptions { discard, ..FileOptions::default() };
            let disk = FileDisk::open(&path, &options).unwrap();
            if !disk.facts().can_discard {
                return support::needs::skip("the file system has no holes");
            }
            let served = Served::new(&(Arc::new(disk) as Arc<dyn Disk>));
            let uri = served.uri();
            let before: &[&str] = if program == "nbdcopy" { &["--flush"] } else { &convert };
            run(program, &[before, &[&from, &uri]].concat());
            let allocated = std::fs::metadata(&path).unwrap().blocks() * 512;
            assert!(allocated < 12 << 20, "{program}, discard {discard}: {allocated} bytes");
            run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &from, &uri]);
        }
    }
}

#[test]
fn nbdcopy_over_several_connections_copies_in_and_out() {
    require_programs!("nbdcopy" of "libnbd-bin");
    let served = Served::new(&memory(64 << 20));
    let (here, back) = (served.path("in"), served.path("out"));
    let content = noise(&here, 64 << 20);
    let (here, back) = (here.display().to_string(), back.display().to_string());
    run("nbdcopy", &["--connections=4", "--requests=64", "--flush", &here, &served.uri()]);
    run("nbdcopy", &["--connections=4", &served.uri(), &back]);
    assert!(std::fs::read(&back).unwrap() == content, "another content came back");
}

#[test]
fn qemu_img_convert_and_compare_succeed() {
    require_programs!("qemu-img" of "qemu-utils");
    let served = Served::new(&memory(16 << 20));
    let here = served.path("in");
    noise(&here, 16 << 20);
    let here = here.display().to_string();
    run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", &here, &served.uri()]);
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &here, &served.uri()]);
    let info = run("qemu-img", &["info", "--output=json", &served.uri()]);
    assert!(info.contains("16777216"), "{info}");
}

#[test]
fn fio_verifies_every_written_block() {
    require_programs!("fio" of "fio");
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
    let disk: Arc<dyn Disk> = Arc::new(FileDisk::open(&image, &FileOptions::default()).unwrap());
    let served = Served::new(&disk);
    let uri = format!("--uri={}", served.uri());
    let common = [
        "--name=job",
        "--ioengine=nbd",
        "--iodepth=32",
        "--size=64M",
        "--verify_state_save=0",
        &uri,
    ];
    let fio = |more: &[&str]| run("fio", &[&common, more].concat());
    fio(&[
        "--rw=randwrite",
        "--bsrange=512-128k",
        "--verify=crc32c",
        "--fsync=64",
        "--io_size=48M",
    ]);
    fio(&["--rw=randrw", "--bs=4k", "--verify=md5", "--trim_percentage=0", "--io_size=16M"]);
}

/// Mounts the export at `uri` with nbdfuse. Returns `None`, as a skipped test, where that is not possible.
fn mounted(served: &Served, uri: &str) -> Option<(Background, PathBuf)> {
    if let Some(reason) = FUSE.missing() {
        support::needs::skip_for(FUSE, &reason);
        return None;
    }
    let mount = served.path("mount");
    std::fs::create_dir_all(&mount).unwrap();
    let file = mount.join("nbd");
    let mut fuse = Background::start("nbdfuse", &[&mount.display().to_string(), uri]);
    wait_until("nbdfuse has mounted", || file.exists() || fuse.0.try_wait().unwrap().is_some());
    if !file.exists() {
        support::needs::skip("nbdfuse may not mount here");
        return None;
    }
    Some((fuse, mount))
}

#[test]
fn dd_of_single_bytes_changes_them_alone_directly_and_through_nbdkit() {
    require_programs!(
        "nbdfuse" of "nbdfuse", "nbdkit" of "nbdkit", "dd" of "coreutils",
        "fusermount3" of "fuse3",
    );
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    let mut expected = noise(&image, 1 << 20);
    let disk: Arc<dyn Disk> = Arc::new(FileDisk::open(&image, &FileOptions::default()).unwrap());
    let served = Served::new(&disk);
    let (socket, input) = (served.path("nbdkit.sock"), served.path("input"));
    let nbdkit_uri = format!("nbd+unix:///?socket={}", socket.display());
    let (socket_text, uri) = (socket.display().to_string(), format!("uri={}", served.uri()));
    let _nbdkit = Background::start("nbdkit", &["-f", "-U", &socket_text, "nbd", &uri]);
    support::wait_for_socket(&socket);
    for (uri, at) in [(served.uri(), 1000), (nbdkit_uri, 70_001)] {
        let Some((mut fuse, mount)) = mounted(&served, &uri) else { return };
        let new: Vec<u8> = (1..=100).collect();
        std::fs::write(&input, &new).unwrap();
        let text = |key: &str, path: &Path| format!("{key}={}", path.display());
        let (from, to) = (text("if", &input), text("of", &mount.join("nbd")));
        let seek = format!("seek={at}");
        run("dd", &[&from, &to, "bs=1", &seek, "conv=notrunc,fsync", "status=none"]);
        expected[at..at + 100].copy_from_slice(&new);
        run("fusermount3", &["-u", &mount.display().to_string()]);
        wait_until("nbdfuse has ended", || fuse.0.try_wait().unwrap().is_some());
        assert!(std::fs::read(&image).unwrap() == expected, "{uri}");
    }
}

#[test]
fn mkfs_through_nbdfuse_creates_file_system() {
    require_programs!(
        "nbdfuse" of "nbdfuse", "mkfs.ext4" of "e2fsprogs", "e2fsck" of "e2fsprogs",
        "debugfs" of "e2fsprogs", "fusermount3" of "fuse3",
    );
    let served = Served::new(&memory(64 << 20));
    let Some((mut fuse, mount)) = mounted(&served, &served.uri()) else { return };
    let file_text = mount.join("nbd").display().to_string();
    let mount_text = mount.display().to_string();
    let content = served.path("content");
    noise(&content, 1 << 20);
    run("mkfs.ext4", &["-q", "-F", &file_text]);
    let write = format!("write {} file", content.display());
    run("debugfs", &["-w", "-R", &write, &file_text]);
    let checked = output("e2fsck", &["-f", "-n", &file_text]);
    run("fusermount3", &["-u", &mount_text]);
    wait_until("nbdfuse has ended", || fuse.0.try_wait().unwrap().is_some());
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
    // The data is on the disk itself, not only in caches of the client.
    let image = served.path("image");
    let image = image.display().to_string();
    run("nbdcopy", &[&served.uri(), &image]);
    run("e2fsck", &["-f", "-n", &image]);
    let back = served.path("back").display().to_string();
    run("debugfs", &["-R", &format!("dump file {back}"), &image]);
    assert!(std::fs::read(back).unwrap() == std::fs::read(content).unwrap());
}

#[test]
fn read_only_export_is_announced_and_not_written() {
    require_programs!("nbdinfo" of "libnbd-bin", "nbdcopy" of "libnbd-bin");
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let read_only = FileOptions { read_only: true, ..FileOptions::default() };
    let disk: Arc<dyn Disk> = Arc::new(FileDisk::open(&image, &read_only).unwrap());
    let served = Served::new(&disk);
    let info = run("nbdinfo", &["--json", &served.uri()]);
    assert!(info.contains("\"is_read_only\": true"), "{info}");
    let here = served.path("in");
    noise(&here, 1 << 20);
    assert!(!output("nbdcopy", &[&here.display().to_string(), &served.uri()]).status.success());
    assert!(std::fs::read(&image).unwrap().iter().all(|byte| *byte == 0));
}

#[test]
fn dropped_export_ends_its_thread_and_connections() {
    require_programs!("nbdinfo" of "libnbd-bin");
    let mut served = Served::new(&memory(1 << 20));
    let uri = served.uri();
    run("nbdinfo", &[&uri]);
    served.export = None;
    assert!(!output("nbdinfo", &[&uri]).status.success());
}

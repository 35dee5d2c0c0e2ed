//! Disks on qcow2 images, compared with QEMU's programs.
//!
//! The programs are another implementation of the format: they make the images, check them, and read them back.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

#[path = "../../../ringfence/tests/support/needs.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test uses a part of it")]
mod needs;

mod hostile;
mod killed;
mod model;
mod overlay;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use ringfence_block::storage::file::{CacheMode, FileOptions};
use ringfence_block::storage::qcow2::{ChainError, ImageOptions, OpenChain, QcowDisk};
use ringfence_block::storage::testing::{Driver, conformance, image};
use ringfence_block::storage::{Disk, Op};
use ringfence_sys::testing::starts;
pub(crate) use ringfence_sys::testing::starts::prevent as no_process_starts;

/// Returns from the test unless QEMU's programs are installed.
macro_rules! require_qemu {
    () => {
        for program in ["qemu-img", "qemu-io"] {
            let need = crate::needs::Need::Program(program, "qemu-utils");
            if let Some(reason) = need.missing() {
                crate::needs::skip_for(need, &reason);
                return;
            }
        }
    };
}
pub(crate) use require_qemu;

/// Starts a process. An image that another thread closes meanwhile is not locked any more once the process runs.
pub(crate) fn spawn(command: &mut Command) -> Child {
    starts::spawn(command).unwrap()
}

/// Clusters that `qemu-img check` counts.
pub(crate) struct Found {
    pub(crate) leaks: u64,
    pub(crate) compressed: u64,
}

/// Directory with the images of one test.
pub(crate) struct Place(tempfile::TempDir);

impl Place {
    pub(crate) fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn run(&self, program: &str, args: &[&str]) -> Output {
        let mut command = Command::new(program);
        command.args(args).current_dir(self.0.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        spawn(&mut command).wait_with_output().unwrap()
    }

    /// Runs a program that must succeed. Returns its output.
    pub(crate) fn succeed(&self, program: &str, args: &[&str]) -> String {
        let output = self.run(program, args);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.success(),
            "{program} {args:?}: {}{}",
            text(&output.stdout),
            text(&output.stderr)
        );
        text(&output.stdout)
    }

    /// Creates an image. `arguments` are separated by blanks.
    pub(crate) fn create(&self, name: &str, arguments: &str) {
        let mut args = vec!["create", "-q", "-f", "qcow2"];
        args.extend(arguments.split_whitespace());
        // The size comes last, behind the name.
        let size = args.pop_if(|last| last.ends_with(['M', 'G', 'K']));
        args.push(name);
        args.extend(size);
        self.succeed("qemu-img", &args);
    }

    /// Checks an image: leaked clusters are lost space, and everything else is corruption.
    pub(crate) fn check(&self, name: &str) -> Found {
        let output = self.run("qemu-img", &["check", "-f", "qcow2", "--output=json", name]);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (said, errors) = (text(&output.stdout), text(&output.stderr));
        let code = output.status.code();
        assert!(matches!(code, Some(0 | 3)), "{name}: {code:?}: {said}{errors}");
        // A line of JSON: `"leaks": 3,`.
        let number = |key: &str| {
            let line = said.lines().find_map(|line| line.trim().strip_prefix(key))?;
            line.trim_end_matches(',').parse().ok()
        };
        let [leaks, compressed] =
            [r#""leaks": "#, r#""compressed-clusters": "#].map(|key| number(key).unwrap_or(0));
        assert_eq!(leaks > 0, code == Some(3), "{name}: {said}");
        Found { leaks, compressed }
    }

    pub(crate) fn open(&self, name: &str) -> QcowDisk {
        self.open_with(name, &options())
    }

    pub(crate) fn open_with(&self, name: &str, options: &ImageOptions) -> QcowDisk {
        let chain = OpenChain::open(&self.path(name), options, &|_| {}).unwrap();
        QcowDisk::new(chain, &options.file).unwrap()
    }

    /// Returns the reason for which an image is not served.
    pub(crate) fn refusal(&self, name: &str) -> ChainError {
        OpenChain::open(&self.path(name), &options(), &|_| {}).unwrap_err()
    }
}

/// Options that use the page cache, as the images of tests are on any file system.
pub(crate) fn options() -> ImageOptions {
    let file = FileOptions { cache: CacheMode::WriteBack, discard: true, ..FileOptions::default() };
    ImageOptions { file, any_folder: false }
}

/// Writes random words, each eight times: clusters of them can be compressed.
pub(crate) fn write_noise(path: &Path, bytes: usize, seed: u64) {
    let mut random = ringfence_block::storage::testing::Random::new(seed);
    let words = (0..bytes.div_ceil(64)).flat_map(|_| [random.next_u64(); 8]);
    let noise: Vec<u8> = words.flat_map(u64::to_le_bytes).take(bytes).collect();
    std::fs::write(path, noise).unwrap();
}

#[test]
fn images_of_each_kind_conform_and_stay_valid() {
    require_qemu!();
    let place = Place::new();
    std::fs::File::create(place.path("raw")).unwrap().set_len(8 << 20).unwrap();
    place.create("base", "8M");
    for (number, arguments) in [
        "8M",
        "-o cluster_size=512 8M",
        "-o cluster_size=2M 8M",
        "-o compat=0.10 8M",
        "-o refcount_bits=1 8M",
        "-o lazy_refcounts=on 8M",
        "-o data_file=data 8M",
        "-b raw -F raw 8M",
        "-b base -F qcow2 8M",
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("image{number}");
        place.create(&name, arguments);
        let disk = place.open(&name);
        let v2 = arguments.contains("0.10");
        assert_eq!(disk.geometry().discard.is_none(), v2, "{arguments}");
        conformance::check(&disk, 7);
        let content = image(&disk);
        drop(disk);
        place.check(&name);
        place.succeed("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", &name, "out"]);
        assert!(std::fs::read(place.path("out")).unwrap() == content, "{arguments}");
    }
}

#[test]
fn direct_cache_modes_conform() {
    require_qemu!();
    let place = Place::new();
    for (name, cache) in [("none", CacheMode::None), ("sync", CacheMode::DirectSync)] {
        place.create(name, "-o cluster_size=4K 8M");
        let mut options = options();
        options.file.cache = cache;
        conformance::check(&place.open_with(name, &options), 8);
        place.check(name);
    }
}

#[test]
fn compressed_base_is_read_and_copied_on_write() {
    require_qemu!();
    let place = Place::new();
    let mut bytes = vec![0; 4 << 20];
    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at >> 10).to_le_bytes()[0]);
    std::fs::write(place.path("raw"), &bytes).unwrap();
    place.succeed("qemu-img", &["convert", "-c", "-f", "raw", "-O", "qcow2", "raw", "base"]);
    place.create("image", "-b base -F qcow2");
    let disk = place.open("image");
    assert!(image(&disk) == bytes, "the compressed base");
    let mut driver = Driver::new(disk.queue(4).unwrap());
    driver.write(70_144, &[7; 1024]).unwrap();
    bytes[70_144..71_168].fill(7);
    assert!(image(&disk) == bytes, "a write to a part of a compressed cluster");
    drop((driver, disk));
    place.check("image");
}

#[test]
fn block_status_tells_data_of_image_and_backing_files_and_zeros() {
    require_qemu!();
    let place = Place::new();
    place.create("base", "1M");
    place.succeed("qemu-io", &["-f", "qcow2", "-c", "write -P 1 128K 64K", "base"]);
    place.create("image", "-b base -F qcow2");
    let disk = place.open("image");
    let mut driver = Driver::new(disk.queue(1).unwrap());
    driver.write(256 << 10, &[2; 65536]).unwrap();
    let zeros = Op::WriteZeroes { allocate: false };
    driver.run(zeros, 192 << 10, 64 << 10, vec![]).result.unwrap();
    let page = ringfence_memory::LentSlice::anonymous(4096);
    let list = usize::try_from(ringfence_block::storage::extents::LIST_BYTES).unwrap();
    let memory = page.slice(0, list).unwrap();
    driver.run(Op::Extents, 0, 1 << 20, vec![memory.clone().into()]).result.unwrap();
    let list = ringfence_block::storage::extents::load(&memory).unwrap();
    let list: Vec<_> = list.into_iter().map(|(len, state)| (len >> 10, state.hole)).collect();
    assert_eq!(list, [(128, true), (64, false), (64, true), (64, false), (704, true)]);
}

#[test]
fn discard_frees_storage_of_file() {
    use std::os::unix::fs::MetadataExt;
    require_qemu!();
    let place = Place::new();
    place.create("image", "8M");
    let disk = place.open("image");
    let mut driver = Driver::new(disk.queue(1).unwrap());
    driver.write(0, &vec![5; 4 << 20]).unwrap();
    let blocks = || std::fs::metadata(place.path("image")).unwrap().blocks() * 512;
    let before = blocks();
    driver.run(Op::Discard { secure: false }, 0, 4 << 20, vec![]).result.unwrap();
    assert!(blocks() + (3 << 20) < before, "{} of {before} bytes are left", blocks());
    driver.write(1 << 20, &[6; 65536]).unwrap();
    assert!(driver.read(0, 1 << 20).unwrap().iter().all(|byte| *byte == 0));
    drop((driver, disk));
    place.check("image");
}

#[test]
fn flushed_data_is_in_the_file_of_an_open_image() {
    require_qemu!();
    let place = Place::new();
    place.create("image", "-o cluster_size=4K 4M");
    let disk = place.open("image");
    let mut driver = Driver::new(disk.queue(1).unwrap());
    // The first writes make the tables, which the flush then has no need to write.
    driver.write(0, &[1; 4096]).unwrap();
    driver.run(Op::Flush, 0, 0, vec![]).result.unwrap();
    driver.write(65536, &[2; 8192]).unwrap();
    driver.run(Op::WriteZeroes { allocate: false }, 0, 4096, vec![]).result.unwrap();
    driver.run(Op::Flush, 0, 0, vec![]).result.unwrap();
    let content = image(&disk);
    assert!(content[0] == 0 && content[65536] == 2);
    std::fs::copy(place.path("image"), place.path("copy")).unwrap();
    place.check("copy");
    assert!(image(&place.open("copy")) == content);
}

#[test]
fn zeros_that_begin_and_end_within_clusters_keep_the_rest() {
    require_qemu!();
    let place = Place::new();
    write_noise(&place.path("raw"), 1 << 20, 3);
    place.create("image", "-b raw -F raw");
    let disk = place.open("image");
    let mut driver = Driver::new(disk.queue(1).unwrap());
    // Clusters 1 to 3 are allocated. Clusters 0 and 4, of the backing file, are copied when parts of them become zeros.
    driver.write(65536, &[5; 3 * 65536]).unwrap();
    let mut bytes = std::fs::read(place.path("raw")).unwrap();
    let zeros = 61440..4 * 65536 + 4096;
    bytes[zeros.clone()].fill(0);
    let (at, len) = (zeros.start as u64, zeros.len() as u64);
    driver.run(Op::WriteZeroes { allocate: false }, at, len, vec![]).result.unwrap();
    assert!(image(&disk) == bytes);
    drop((driver, disk));
    assert!(image(&place.open("image")) == bytes, "opened again");
    place.check("image");
}

#[test]
fn base_is_shared_by_two_images_and_locked_against_writers() {
    require_qemu!();
    let place = Place::new();
    place.create("base", "4M");
    place.create("one", "-b base -F qcow2");
    place.create("two", "-b base -F qcow2");
    let disks = [place.open("one"), place.open("two")];
    let output = place.run("qemu-io", &["-f", "qcow2", "-c", "write 0 64K", "base"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("lock"), "{said}");
    drop(disks);
    place.succeed("qemu-io", &["-f", "qcow2", "-c", "write 0 64K", "base"]);
}

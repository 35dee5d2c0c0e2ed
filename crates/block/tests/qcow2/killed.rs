//! A process that serves an image is killed at random moments: the image stays valid, and what was flushed is there.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use ringfence_block::storage::Disk;
use ringfence_block::storage::testing::checker::Checker;
use ringfence_block::storage::testing::workload::Workload;
use ringfence_block::storage::testing::{Driver, Random, image};

use crate::{Place, options, require_qemu, write_noise};

/// Variable that makes this program the process that is killed, with its directory.
const DIRECTORY: &str = "RINGFENCE_TEST_IMAGE";
/// Variable with the seed of its load.
const SEED: &str = "RINGFENCE_TEST_SEED";
/// Bytes of the disk that are written. The rest keeps the content of the base.
const SPAN: u64 = 4 << 20;

/// Other process of the test.
#[test]
fn server_of_image() {
    let Some(directory) = std::env::var_os(DIRECTORY).map(PathBuf::from) else { return };
    let seed: u64 = std::env::var(SEED).unwrap().parse().unwrap();
    let chain = ringfence_block::storage::qcow2::OpenChain::open(
        &directory.join("image"),
        &options(),
        &|_| {},
    );
    let disk =
        ringfence_block::storage::qcow2::QcowDisk::new(chain.unwrap(), &options().file).unwrap();
    let journal =
        File::options().append(true).create(true).open(directory.join("journal")).unwrap();
    let mut checker = Checker::new().with_journal(journal);
    let mut driver = Driver::new(disk.queue(16).unwrap());
    println!("\nserving");
    let workload = Workload { span: SPAN, longest: 40, ..Workload::new(seed) };
    let mut running = workload.start(&disk);
    loop {
        running.steps(&mut driver, &mut checker, 20).unwrap();
    }
}

#[test]
fn killed_process_leaves_valid_image_with_flushed_data() {
    require_qemu!();
    (0..6).for_each(kill_once);
}

#[test]
#[ignore = "long: 200 processes are killed"]
fn two_hundred_killed_processes_leave_valid_images() {
    require_qemu!();
    (6..206).for_each(kill_once);
}

fn kill_once(seed: u64) {
    let place = Place::new();
    let mut random = Random::new(seed);
    // Zeros where the load writes, and noise behind.
    write_noise(&place.path("noise"), 4 << 20, seed);
    let mut base = vec![0; usize::try_from(SPAN).unwrap()];
    base.extend(std::fs::read(place.path("noise")).unwrap());
    std::fs::write(place.path("raw"), &base).unwrap();
    let backing = match random.below(3) {
        0 => "-b raw -F raw",
        compressed => {
            let how = ["-W", "-c"][usize::from(compressed == 1)];
            let args = ["convert", how, "-f", "raw", "-O", "qcow2", "raw", "base"];
            place.succeed("qemu-img", &args);
            "-b base -F qcow2"
        }
    };
    let cluster = [512, 4096, 65536][random.index(3)];
    place.create("image", &format!("{backing} -o cluster_size={cluster}"));
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "killed::server_of_image", "--nocapture", "--test-threads=1"])
        .env(DIRECTORY, place.path(""))
        .env(SEED, seed.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line == "serving"), "it did not start");
    std::thread::sleep(Duration::from_micros(random.below(400_000)));
    assert_eq!(child.try_wait().unwrap(), None, "seed {seed}: the server ended");
    child.kill().unwrap();
    child.wait().unwrap();
    place.check("image");
    let mut checker = Checker::replay(File::open(place.path("journal")).unwrap()).unwrap();
    checker.crashed();
    let content = image(&place.open("image"));
    let (written, kept) = content.split_at(usize::try_from(SPAN).unwrap());
    checker.check_after_crash(0, written).unwrap_or_else(|found| panic!("seed {seed}: {found}"));
    assert!(
        kept == &base[written.len()..],
        "seed {seed}: the base shows through where nothing was written"
    );
    place.check("image");
}

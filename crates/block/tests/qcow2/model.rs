//! Random operations, executed here and by `qemu-io` on two equal images: both hold the same disk afterwards.

use ringfence_block::storage::Op;
use ringfence_block::storage::testing::{Driver, Random, image};
use ringfence_block::storage::{Disk, qcow2::QcowDisk};

use crate::{Place, require_qemu, write_noise};

const SIZE: u64 = 2 << 20;

#[test]
fn random_operations_have_the_results_of_qemu() {
    require_qemu!();
    (0..12).for_each(sequence);
}

#[test]
#[ignore = "long: 10,000 sequences of random operations"]
fn ten_thousand_random_sequences_have_the_results_of_qemu() {
    require_qemu!();
    let seeds: Vec<u64> = (100..10_100).collect();
    std::thread::scope(|scope| {
        for part in seeds.chunks(2500) {
            scope.spawn(|| part.iter().copied().for_each(sequence));
        }
    });
}

/// Creates the chain of one sequence. Returns the cluster size of the image and its version.
fn create(place: &Place, random: &mut Random) -> (u64, u32) {
    let cluster = [512, 1024, 4096, 65536][random.index(4)];
    let v2 = random.one_in(4);
    write_noise(&place.path("raw"), 1 << 20, random.next_u64());
    let backing = match random.below(4) {
        0 => "",
        1 => "-b raw -F raw",
        below => {
            let compressed = ["-c", "-W"][usize::from(below == 3)];
            let options = format!("cluster_size={}", [4096, 65536][random.index(2)]);
            let args =
                ["convert", compressed, "-f", "raw", "-O", "qcow2", "-o", &options, "raw", "base"];
            place.succeed("qemu-img", &args);
            "-b base -F qcow2"
        }
    };
    let version = if v2 { "compat=0.10" } else { "compat=1.1" };
    let width = match v2 {
        true => String::new(),
        false => format!(",refcount_bits={}", 1 << random.below(7)),
    };
    let arguments = format!("{backing} -o cluster_size={cluster},{version}{width} {}K", SIZE >> 10);
    place.create("ours", &arguments);
    std::fs::copy(place.path("ours"), place.path("theirs")).unwrap();
    (cluster, if v2 { 2 } else { 3 })
}

/// One operation: here, as command of `qemu-io`, and on the bytes of the disk.
fn operate(
    driver: &mut Driver,
    random: &mut Random,
    (cluster, version): (u64, u32),
    bytes: &mut [u8],
) -> String {
    let sectors = SIZE / 512;
    let first = random.below(sectors);
    let longest = [1, 8, 200, 800][random.index(4)];
    let count = (1 + random.below(longest)).min(sectors - first);
    let (mut at, mut len) = (first * 512, count * 512);
    let kind = random.below(6);
    // A discard of parts of clusters may differ.
    if kind == 5 {
        at -= at % cluster;
        len = len.next_multiple_of(cluster).min(SIZE - at);
    }
    let range = usize::try_from(at).unwrap()..usize::try_from(at + len).unwrap();
    let range = &mut bytes[range];
    match kind {
        0..=2 => {
            let pattern = 1 + u8::try_from(random.below(255)).unwrap();
            range.fill(pattern);
            driver.write(at, range).unwrap();
            format!("write -P {pattern} {at} {len}")
        }
        3 | 4 => {
            range.fill(0);
            let allocate = kind == 3;
            driver.run(Op::WriteZeroes { allocate }, at, len, vec![]).result.unwrap();
            format!("write -z {} {at} {len}", if allocate { "" } else { "-u" })
        }
        _ if version == 3 => {
            range.fill(0);
            driver.run(Op::Discard { secure: false }, at, len, vec![]).result.unwrap();
            format!("discard {at} {len}")
        }
        _ => {
            driver.run(Op::Flush, 0, 0, vec![]).result.unwrap();
            "flush".to_owned()
        }
    }
}

fn sequence(seed: u64) {
    let place = Place::new();
    let mut random = Random::new(seed);
    let kind = create(&place, &mut random);
    let open = || -> (QcowDisk, Driver) {
        let disk = place.open("ours");
        let driver = Driver::new(disk.queue(4).unwrap());
        (disk, driver)
    };
    let (mut disk, mut driver) = open();
    let mut bytes = image(&disk);
    let mut commands = vec![];
    for _ in 0..10 + random.below(40) {
        if random.one_in(10) {
            drop((driver, disk));
            (disk, driver) = open();
        }
        commands.push(operate(&mut driver, &mut random, kind, &mut bytes));
    }
    assert!(image(&disk) == bytes, "seed {seed}: read back: {commands:?}");
    drop((driver, disk));
    let mut args = vec!["-f", "qcow2", "-d", "unmap"];
    commands.iter().for_each(|command| args.extend(["-c", command]));
    args.push("theirs");
    let said = place.succeed("qemu-io", &args);
    assert!(!said.contains("failed"), "seed {seed}: {said}");
    place.check("ours");
    let compared =
        place.run("qemu-img", &["compare", "-f", "qcow2", "-F", "qcow2", "ours", "theirs"]);
    let said = String::from_utf8_lossy(&compared.stdout).into_owned();
    assert!(compared.status.success(), "seed {seed}: {said}: {commands:?}");
}

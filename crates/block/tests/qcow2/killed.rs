//! A process that serves an image is killed under load: the image stays valid, and what was flushed is there.
//!
//! ```text
//! test ── starts, kills ──> server of an image (this program): random I/O, acknowledgements to a journal
//!   └── qemu-img check, content against the journal, qemu-img compare with a copy; then the next life of the image
//! ```
//!
//! Each image has several lives, and leaks of one are there in the next. The chains are those of [`Chain`]; a base that is shared
//! has two images, whose servers live and die together. The disk begins with a span that reads as zeros, where the load
//! writes, and ends with noise of the base, which must stay.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ringfence_block::storage::Disk;
use ringfence_block::storage::file::CacheMode;
use ringfence_block::storage::qcow2::{ImageOptions, OpenChain, QcowDisk};
use ringfence_block::storage::testing::checker::{
    Checker, Content, Event, RECORD, SECTOR, identify,
};
use ringfence_block::storage::testing::workload::Workload;
use ringfence_block::storage::testing::{Driver, Random, image};

use crate::{Place, options, require_qemu, spawn, write_noise};

/// Variable that makes this program the process that is killed: the path of its image.
const IMAGE: &str = "RINGFENCE_TEST_IMAGE";
/// Variable with the seed of its load.
const SEED: &str = "RINGFENCE_TEST_SEED";
/// Bytes of the disk that are written. The rest keeps the content of the base.
const SPAN: u64 = 4 << 20;
/// Bytes of the rest.
const REST: usize = 1 << 20;
/// Maximum number of lives of an image.
const LIVES: u64 = 4;

/// Returns options, for one seed of four with flushes that are ignored.
fn options_of(seed: u64) -> ImageOptions {
    let mut options = options();
    if seed % 4 == 3 {
        options.file.cache = CacheMode::Unsafe;
    }
    options
}

/// Process that is killed.
#[test]
fn server_of_image() {
    let Some(path) = std::env::var_os(IMAGE).map(PathBuf::from) else { return };
    let seed: u64 = std::env::var(SEED).unwrap().parse().unwrap();
    let options = options_of(seed / LIVES);
    let chain = OpenChain::open(&path, &options, &|_| {}).unwrap();
    let cluster = chain.members[0].header.as_ref().unwrap().cluster();
    let disk = QcowDisk::new(chain, &options.file).unwrap();
    let path = path.with_extension("journal");
    let checker = Checker::replay(File::open(&path).unwrap()).unwrap();
    let mut checker = checker.with_journal(File::options().append(true).open(&path).unwrap());
    let mut driver = Driver::new(disk.queue(16).unwrap());
    println!("\nserving");
    // Zeros over whole clusters free them.
    let longest = 40.max(3 * cluster / SECTOR as u64);
    let mut running = Workload { span: SPAN, longest, ..Workload::new(seed) }.start(&disk);
    loop {
        running.steps(&mut driver, &mut checker, 20).unwrap();
    }
}

#[test]
fn killed_process_leaves_valid_image_with_flushed_data() {
    require_qemu!();
    kill(10, 2);
}

#[test]
#[ignore = "long: 200 processes are killed"]
fn two_hundred_killed_processes_leave_valid_images() {
    require_qemu!();
    kill(200, LIVES);
}

/// Kills at least `kills` processes. Each image has so many lives.
fn kill(kills: u64, lives: u64) {
    let mut totals = Totals::default();
    let mut seed = 0;
    while totals.kills < kills {
        for chain in Chain::ALL {
            kill_images(seed, chain, lives, &mut totals);
            seed += 1;
        }
    }
    println!("{totals:?}");
    assert!(totals.sectors > 10 * totals.kills, "the load did not write");
    assert!(totals.compressed > 0, "no base was compressed");
}

/// Sums of all kills.
#[derive(Default, Debug)]
struct Totals {
    kills: u64,
    /// Kills after which clusters were leaked that had not been before, and the number of these clusters.
    with_leaks: u64,
    leaks: u64,
    /// Sectors found with data after a kill.
    sectors: u64,
    /// Compressed clusters of the bases.
    compressed: u64,
}

/// Chain of an image that is killed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Chain {
    Raw,
    Qcow2,
    Compressed,
    /// One compressed base of two images.
    Shared,
    /// No base, and an external data file.
    DataFile,
}

impl Chain {
    const ALL: [Chain; 5] =
        [Chain::Raw, Chain::Qcow2, Chain::Compressed, Chain::Shared, Chain::DataFile];
}

/// Image that is killed.
struct Victim {
    name: String,
    /// Content of the disk behind the span.
    rest: Vec<u8>,
    leaks: u64,
}

/// Creates a chain, and kills each image in each of its lives.
fn kill_images(seed: u64, chain: Chain, lives: u64, totals: &mut Totals) {
    let place = Place::new();
    let mut random = Random::new(seed);
    let mut victims = create(&place, chain, &mut random);
    if matches!(chain, Chain::Compressed | Chain::Shared) {
        totals.compressed += place.check("base").compressed;
    }
    for victim in &victims {
        File::create(place.path(&format!("{}.journal", victim.name))).unwrap();
    }
    for life in 0..lives {
        let number = seed * LIVES + life;
        let start = |victim: &Victim| start(&place, &victim.name, number);
        let mut servers: Vec<Child> = victims.iter().map(start).collect();
        // Tables change most while the image is young.
        let longest = 8 << random.below(8);
        let events = random.below(longest);
        await_journal(&place.path(&format!("{}.journal", victims[0].name)), events, &mut servers);
        for server in &mut servers {
            let ended = server.try_wait().unwrap();
            assert_eq!(ended, None, "{chain:?}, seed {seed}, life {life}: the server ended");
            server.kill().unwrap();
        }
        for (server, victim) in servers.iter_mut().zip(&mut victims) {
            server.wait().unwrap();
            let what = format!("{chain:?}, seed {seed}, life {life}, {}", victim.name);
            judge(&place, victim, options_of(seed), &what, totals);
        }
    }
}

/// Waits until a journal has grown by a number of events, or its server ended.
fn await_journal(journal: &Path, events: u64, servers: &mut [Child]) {
    let len = || std::fs::metadata(journal).unwrap().len();
    let wanted = len() + events * RECORD as u64;
    while len() < wanted && servers[0].try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Starts the server of an image, and returns once it serves.
fn start(place: &Place, name: &str, seed: u64) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "killed::server_of_image", "--nocapture", "--test-threads=1"])
        .env(IMAGE, place.path(name))
        .env(SEED, seed.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = spawn(&mut command);
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let serves = lines.map_while(Result::ok).any(|line| line == "serving");
    assert!(serves, "{name}, seed {seed}: the server did not start");
    child
}

/// Judges an image whose server was killed, and writes the journal of its next life.
fn judge(
    place: &Place,
    victim: &mut Victim,
    options: ImageOptions,
    what: &str,
    totals: &mut Totals,
) {
    let Victim { name, rest, leaks } = victim;
    let found = place.check(name);
    let journal = place.path(&format!("{name}.journal"));
    let mut checker = Checker::replay(File::open(&journal).unwrap()).unwrap();
    checker.crashed();
    let content = image(&place.open_with(name, &options));
    let (written, kept) = content.split_at(usize::try_from(SPAN).unwrap());
    if options.file.cache == CacheMode::Unsafe {
        // What was flushed may be lost, but each sector is whole and in its place.
        let damaged = sectors(written).position(|content| content == Content::Damaged);
        assert_eq!(damaged, None, "{what}: a damaged sector");
    } else {
        let checked = checker.check_after_crash(0, written);
        checked.unwrap_or_else(|violation| panic!("{what}: {violation}"));
    }
    assert!(kept == rest, "{what}: the base does not show through where nothing was written");
    // QEMU reads the same.
    std::fs::write(place.path("shadow"), &content).unwrap();
    place.succeed("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", name, "shadow"]);
    assert!(place.check(name).leaks <= found.leaks, "{what}: reading leaks");
    let next = checker.new_id();
    begin_journal(File::create(journal).unwrap(), written, next);
    totals.kills += 1;
    totals.with_leaks += u64::from(found.leaks > *leaks);
    totals.leaks += found.leaks.saturating_sub(*leaks);
    totals.sectors += sectors(written).filter(|content| *content != Content::Zeros).count() as u64;
    *leaks = found.leaks;
}

/// Returns the content of each sector of a disk.
fn sectors(bytes: &[u8]) -> impl Iterator<Item = Content> {
    bytes.as_chunks::<SECTOR>().0.iter().zip(0..).map(|(bytes, sector)| identify(sector, bytes))
}

/// Writes a journal of a disk with this content. No id from `next` on was used.
fn begin_journal(journal: File, content: &[u8], next: u64) {
    let mut checker = Checker::new().with_journal(journal);
    for (content, first) in sectors(content).zip(0..) {
        if let Content::Of(id) = content {
            checker.record(Event::Submitted { id, first, count: 1, zeros: false, fua: true });
            checker.record(Event::Acknowledged { id });
        }
    }
    checker.record(Event::FlushSubmitted { id: next });
    checker.record(Event::FlushAcknowledged { id: next });
}

/// Creates the images of a chain.
fn create(place: &Place, chain: Chain, random: &mut Random) -> Vec<Victim> {
    let seed = random.next_u64();
    write_noise(&place.path("noise"), REST, seed);
    let noise = std::fs::read(place.path("noise")).unwrap();
    let cluster = |random: &mut Random| [512, 4096, 65536][random.index(3)];
    let (base_cluster, cluster) = (cluster(random), cluster(random));
    let backing = match chain {
        Chain::DataFile => "",
        Chain::Raw => {
            let zeros = vec![0; usize::try_from(SPAN).unwrap()];
            std::fs::write(place.path("base"), [&zeros[..], &noise].concat()).unwrap();
            "-b base -F raw"
        }
        Chain::Qcow2 | Chain::Compressed | Chain::Shared => {
            let size = SPAN + REST as u64;
            place.create("base", &format!("-o cluster_size={base_cluster} {}M", size >> 20));
            // Zeros are data in the base, where the load writes.
            let how = if chain == Chain::Qcow2 { "" } else { "-c" };
            let zeros = format!("write {how} -P 0 0 {SPAN}");
            let noise = format!("write {how} -s noise {SPAN} {REST}");
            place.succeed("qemu-io", &["-f", "qcow2", "-c", &zeros, "-c", &noise, "base"]);
            "-b base -F qcow2"
        }
    };
    let names = match chain {
        Chain::Shared => vec!["one", "two"],
        _ => vec!["image"],
    };
    let lazy = ["on", "off"][random.index(2)];
    let options = format!("cluster_size={cluster},lazy_refcounts={lazy}");
    let create = |name: &str| {
        let (more, rest) = match chain {
            Chain::DataFile => (format!(",data_file={name}.data"), vec![0; REST]),
            _ => (String::new(), noise.clone()),
        };
        let size = (SPAN + REST as u64) >> 20;
        place.create(name, &format!("{backing} -o {options}{more} {size}M"));
        Victim { name: name.to_owned(), rest, leaks: 0 }
    };
    names.into_iter().map(create).collect()
}

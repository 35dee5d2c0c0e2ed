//! Random operations, executed here and by `qemu-io` on two equal images, and on bytes in memory. After each sequence:
//!
//! | image | read by | equals |
//! |---|---|---|
//! | ours | this program | the bytes; extents that are holes are zeros |
//! | ours | `qemu-img compare`, after `qemu-img check` found no corruption | a raw file of the bytes |
//! | that of `qemu-io` | this program | the bytes |
//!
//! The images have clusters of 512 B to 2 MiB, compressed clusters, backing files of each kind, external data files, lazy
//! refcounts, and sizes that end within a cluster. Some requests are in flight together, also in one cluster. Now and then
//! `qemu-io` writes our image while it is closed here.
//!
//! Seeds are random and part of each failure. `RINGFENCE_TEST_SEQUENCE=SEED` repeats one. `RINGFENCE_SOAK_ROUNDS` is the number
//! of sequences of the long set.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use ringfence_block::storage::extents::{LIST_BYTES, load};
use ringfence_block::storage::file::CacheMode;
use ringfence_block::storage::qcow2::{ImageOptions, QcowDisk};
use ringfence_block::storage::testing::{Driver, Random, image, lent_with};
use ringfence_block::storage::{Disk, Op};
use ringfence_memory::LentSlice;

use crate::{Place, no_process_starts, options, require_qemu, spawn, write_noise};

/// Variable with the seed of the only sequence to run.
const SEQUENCE: &str = "RINGFENCE_TEST_SEQUENCE";

const SECTOR: u64 = 512;

/// Sequences between two lines of progress.
const PROGRESS: u64 = 500;

#[test]
fn random_operations_have_the_results_of_qemu() {
    require_qemu!();
    run(24);
}

#[test]
#[ignore = "long: 10,000 sequences of random operations"]
fn ten_thousand_random_sequences_have_the_results_of_qemu() {
    require_qemu!();
    let rounds = std::env::var("RINGFENCE_SOAK_ROUNDS").map(|rounds| rounds.parse().unwrap());
    run(rounds.unwrap_or(10_000));
}

/// Runs random sequences, two at a time.
fn run(count: u64) {
    let clock = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_micros();
    let first = u64::try_from(clock).unwrap();
    let seeds = match std::env::var(SEQUENCE) {
        Ok(seed) => seed.parse().map(|seed| seed..seed + 1).unwrap(),
        Err(_) => first..first + count,
    };
    println!("seeds {seeds:?}");
    let (next, totals) = (AtomicU64::new(seeds.start), Totals::default());
    let work = || {
        let mut qemu = QemuIo::start();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return;
            }
            Sequence::new(seed, &mut qemu).run(&totals);
            if (seed - seeds.start + 1).is_multiple_of(PROGRESS) {
                // libtest holds back what the macros print.
                let _ = writeln!(std::io::stderr(), "{totals:?}");
            }
        }
    };
    std::thread::scope(|scope| {
        let threads = [scope.spawn(work), scope.spawn(work)];
        for thread in threads {
            if let Err(panic) = thread.join() {
                // The other thread ends with its sequence.
                next.store(seeds.end, Ordering::Relaxed);
                std::panic::resume_unwind(panic);
            }
        }
    });
    println!("{totals:?}");
}

/// Sums of all sequences.
#[derive(Default, Debug)]
struct Totals {
    sequences: AtomicU64,
    operations: AtomicU64,
    /// Images that QEMU wrote between two operations.
    handovers: AtomicU64,
    /// Images with compressed clusters at the end.
    compressed: AtomicU64,
    /// Images with leaked clusters, and their number.
    with_leaks: AtomicU64,
    leaks: AtomicU64,
}

fn add(total: &AtomicU64, number: u64) {
    total.fetch_add(number, Ordering::Relaxed);
}

/// Properties of the two images of a sequence.
struct Shape {
    bytes: u64,
    cluster: u64,
    version: u32,
    /// Set if the image can have compressed clusters.
    compresses: bool,
}

/// One sequence of operations.
struct Sequence<'a> {
    seed: u64,
    qemu: &'a mut QemuIo,
    place: Place,
    random: Random,
    shape: Shape,
    options: ImageOptions,
    /// Content of the disk.
    bytes: Vec<u8>,
    /// Commands of `qemu-io` so far.
    commands: Vec<String>,
}

impl Sequence<'_> {
    fn new(seed: u64, qemu: &mut QemuIo) -> Sequence<'_> {
        let (place, mut random) = (Place::new(), Random::new(seed));
        let shape = create(&place, &mut random);
        let mut options = options();
        options.file.cache = match random.below(8) {
            0 => CacheMode::None,
            1 => CacheMode::Unsafe,
            _ => CacheMode::WriteBack,
        };
        let (bytes, commands) = (vec![], vec![]);
        let mut sequence = Sequence { seed, qemu, place, random, shape, options, bytes, commands };
        if sequence.shape.compresses && sequence.random.one_in(2) {
            let commands = sequence.compressed_write();
            sequence.write_by_qemu(&commands[1..]);
        }
        sequence.bytes = image(&sequence.open().0);
        assert_eq!(sequence.bytes.len() as u64, sequence.shape.bytes, "seed {seed}");
        sequence
    }

    fn open(&self) -> (QcowDisk, Driver) {
        let disk = self.place.open_with("ours", &self.options);
        let driver = Driver::new(disk.queue(4).unwrap());
        (disk, driver)
    }

    fn run(mut self, totals: &Totals) {
        let (mut disk, mut driver) = self.open();
        let steps = 10 + self.random.below(40);
        for _ in 0..steps {
            match self.random.below(24) {
                0 | 1 => {
                    drop((driver, disk));
                    (disk, driver) = self.open();
                }
                2 => {
                    drop((driver, disk));
                    self.hand_over();
                    add(&totals.handovers, 1);
                    (disk, driver) = self.open();
                }
                3 => driver.run(Op::Flush, 0, 0, vec![]).result.unwrap(),
                4..=6 => self.read(&mut driver),
                7..=10 => self.write_together(&mut driver),
                _ => self.operate(&mut driver),
            }
        }
        self.compare(&disk);
        drop((driver, disk));
        self.judge(totals);
        add(&totals.operations, steps);
        add(&totals.sequences, 1);
    }

    /// Returns a random range, often at the edge of a cluster.
    fn range(&mut self) -> (u64, u64) {
        let Shape { bytes, cluster, .. } = self.shape;
        let sectors = bytes / SECTOR;
        let mut first = self.random.below(sectors);
        if self.random.one_in(3) {
            first -= first % (cluster / SECTOR);
        }
        let longest = [1, 8, 200, 800, 1 + cluster / SECTOR][self.random.index(5)];
        let count = (1 + self.random.below(longest)).min(sectors - first);
        (first * SECTOR, count * SECTOR)
    }

    fn part(&mut self, at: u64, len: u64) -> &mut [u8] {
        &mut self.bytes[usize::try_from(at).unwrap()..usize::try_from(at + len).unwrap()]
    }

    fn pattern(&mut self) -> u8 {
        1 + u8::try_from(self.random.below(255)).unwrap()
    }

    fn failed(&self, what: &str) -> ! {
        panic!("seed {}: {what}: {:?}", self.seed, self.commands)
    }

    fn read(&mut self, driver: &mut Driver) {
        let (at, len) = self.range();
        let read = driver.read(at, usize::try_from(len).unwrap()).unwrap();
        if read != self.part(at, len) {
            self.failed(&format!("{len} bytes at {at} are wrong"));
        }
    }

    /// Changes a range here and in memory, and notes the same for `qemu-io`.
    fn operate(&mut self, driver: &mut Driver) {
        let (mut at, mut len) = self.range();
        let kind = self.random.below(6);
        let (op, command) = match kind {
            0..=2 => {
                let (pattern, fua) = (self.pattern(), self.random.one_in(8));
                self.part(at, len).fill(pattern);
                (Op::Write { fua }, format!("write -P {pattern} {at} {len}"))
            }
            3 => (Op::WriteZeroes { allocate: true }, format!("write -z {at} {len}")),
            5 if self.shape.version == 3 => {
                // A discard gives zeros here. In QEMU one of whole clusters does.
                let whole = self.random.one_in(2);
                if whole {
                    at -= at % self.shape.cluster;
                    len = len.next_multiple_of(self.shape.cluster).min(self.shape.bytes - at);
                }
                let command = if whole { "discard" } else { "write -z -u" };
                (Op::Discard { secure: false }, format!("{command} {at} {len}"))
            }
            _ => (Op::WriteZeroes { allocate: false }, format!("write -z -u {at} {len}")),
        };
        let memory = match op {
            Op::Write { .. } => vec![lent_with(self.part(at, len)).into()],
            _ => {
                self.part(at, len).fill(0);
                vec![]
            }
        };
        self.commands.push(command);
        if let Err(errno) = driver.run(op, at, len, memory).result {
            self.failed(&format!("the last one failed with errno {errno}"));
        }
    }

    /// Starts several writes at once. They touch other sectors, but perhaps the same clusters.
    fn write_together(&mut self, driver: &mut Driver) {
        let (start, _) = self.range();
        let mut at = start;
        for _ in 0..2 + self.random.below(6) {
            let len = SECTOR * (1 + self.random.below(16));
            if at + len > self.shape.bytes {
                break;
            }
            let (op, memory, command) = match self.random.below(4) {
                0 => {
                    let allocate = self.random.one_in(2);
                    self.part(at, len).fill(0);
                    (Op::WriteZeroes { allocate }, vec![], format!("write -z {at} {len}"))
                }
                _ => {
                    let pattern = self.pattern();
                    self.part(at, len).fill(pattern);
                    let memory = lent_with(self.part(at, len));
                    let command = format!("write -P {pattern} {at} {len}");
                    (Op::Write { fua: false }, vec![memory.into()], command)
                }
            };
            driver.submit(op, at, len, memory);
            self.commands.push(command);
            at += len + SECTOR * self.random.below(8);
        }
        while driver.in_flight() > 0 {
            for done in driver.wait().unwrap() {
                if let Err(errno) = done.result {
                    self.failed(&format!("one of the last failed with errno {errno}"));
                }
            }
        }
    }

    /// Lets `qemu-io` write our image, which is closed here.
    fn hand_over(&mut self) {
        let mut commands = vec![];
        for _ in 0..1 + self.random.below(6) {
            let (at, len) = self.range();
            let pattern = self.pattern();
            commands.push(match self.random.below(4) {
                0 if self.shape.compresses && self.shape.version == 3 => {
                    commands.extend(self.compressed_write());
                    continue;
                }
                1 => format!("write -z -u {at} {len}"),
                _ => format!("write -P {pattern} {at} {len}"),
            });
        }
        self.write_by_qemu(&commands);
        let (seed, content) = (self.seed, image(&self.open().0));
        for command in &commands {
            apply(command, &mut self.bytes);
        }
        assert!(content == self.bytes, "seed {seed}: QEMU's writes: {commands:?}");
    }

    /// Returns commands that compress clusters: a discard, because QEMU does not compress what is allocated, and a write.
    fn compressed_write(&mut self) -> [String; 2] {
        let Shape { bytes, cluster, .. } = self.shape;
        let clusters = bytes / cluster;
        let first = self.random.below(clusters);
        let count = 1 + self.random.below((clusters - first).min(20));
        let (at, len, pattern) = (first * cluster, count * cluster, self.pattern());
        [format!("discard {at} {len}"), format!("write -c -P {pattern} {at} {len}")]
    }

    /// Executes commands on our image, and notes them for the other one.
    fn write_by_qemu(&mut self, commands: &[String]) {
        self.qemu.execute(&self.place.path("ours"), commands);
        self.commands.extend_from_slice(commands);
    }

    /// Compares the disk, and its holes, with the bytes.
    fn compare(&mut self, disk: &QcowDisk) {
        if image(disk) != self.bytes {
            self.failed("read back");
        }
        let memory = LentSlice::anonymous(usize::try_from(LIST_BYTES).unwrap());
        let mut driver = Driver::new(disk.queue(1).unwrap());
        let mut at = 0;
        while at < self.shape.bytes {
            let segments = vec![memory.clone().into()];
            driver.run(Op::Extents, at, self.shape.bytes - at, segments).result.unwrap();
            for (len, state) in load(&memory).unwrap() {
                let len = len.min(self.shape.bytes - at);
                if state.hole && self.part(at, len).iter().any(|byte| *byte != 0) {
                    self.failed(&format!("a hole of {len} bytes at {at} has data"));
                }
                at += len;
            }
        }
    }

    /// Judges our image by QEMU, and QEMU's image by us.
    fn judge(&mut self, totals: &Totals) {
        let found = self.place.check("ours");
        add(&totals.leaks, found.leaks);
        add(&totals.with_leaks, found.leaks.min(1));
        add(&totals.compressed, found.compressed.min(1));
        std::fs::write(self.place.path("shadow"), &self.bytes).unwrap();
        if let Err(said) = self.compare_by_qemu("ours") {
            self.failed(&format!("read by QEMU: {said}"));
        }
        self.qemu.execute(&self.place.path("theirs"), &self.commands);
        if image(&self.place.open_with("theirs", &self.options)) != self.bytes {
            let by_qemu = self.compare_by_qemu("theirs");
            self.failed(&format!("image of qemu-io, read here, and by QEMU: {by_qemu:?}"));
        }
    }

    /// Compares an image with the bytes by QEMU. Returns its report of a difference.
    fn compare_by_qemu(&self, name: &str) -> Result<(), String> {
        let args = ["compare", "-f", "qcow2", "-F", "raw", name, "shadow"];
        let compared = self.place.run("qemu-img", &args);
        match compared.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&compared.stdout).trim().to_owned()),
        }
    }
}

/// Executes a command of `qemu-io` in memory.
fn apply(command: &str, bytes: &mut [u8]) {
    let words: Vec<&str> = command.split(' ').collect();
    let numbers: Vec<usize> = words.iter().filter_map(|word| word.parse().ok()).collect();
    let (pattern, at, len) = match numbers[..] {
        [pattern, at, len] => (u8::try_from(pattern).unwrap(), at, len),
        [at, len] => (0, at, len),
        _ => unreachable!("{command}"),
    };
    bytes[at..at + len].fill(pattern);
}

/// Process of `qemu-io`, which executes the commands of many sequences: to start one takes longer than a sequence.
struct QemuIo {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl QemuIo {
    fn start() -> QemuIo {
        let mut command = Command::new("qemu-io");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = spawn(&mut command);
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut qemu = QemuIo { child, output };
        qemu.await_prompt();
        qemu
    }

    /// Executes commands on an image, which is opened again behind each one that compresses: QEMU 7.2 appends compressed
    /// clusters to the last ones, also when these were freed and the place has a new use.
    fn execute(&mut self, image: &Path, commands: &[String]) {
        drop(no_process_starts());
        for part in commands.split_inclusive(|command| command.contains("-c")) {
            self.open(image);
            for command in part {
                let said = self.tell(command);
                let done = said.contains(" bytes at offset ") && !said.contains("failed");
                assert!(done, "{said}: {commands:?}");
            }
            self.tell("close");
        }
    }

    /// Opens an image, which can be locked for another moment: a process that has started closes its copies of our
    /// descriptors only after its start was reported.
    fn open(&mut self, image: &Path) {
        let begun = Instant::now();
        loop {
            self.tell(&format!("open -o driver=qcow2,discard=unmap {}", image.display()));
            // Only an image that is open has a length.
            if self.tell("length").starts_with(|first: char| first.is_ascii_digit()) {
                return;
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "{} stays locked", image.display());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Executes one command, and returns its answer. The process reads the next one only after its prompt.
    fn tell(&mut self, command: &str) -> String {
        let input = self.child.stdin.as_mut().unwrap();
        input.write_all(format!("{command}\n").as_bytes()).unwrap();
        self.await_prompt()
    }

    fn await_prompt(&mut self) -> String {
        let mut said = vec![];
        while !said.ends_with(b"qemu-io> ") {
            let len = self.output.read_until(b' ', &mut said).unwrap();
            assert!(len > 0, "it ended: {}", String::from_utf8_lossy(&said));
        }
        String::from_utf8(said).unwrap()
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        // The end of its input ends it.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Creates the two images of a sequence, with their common backing file.
fn create(place: &Place, random: &mut Random) -> Shape {
    let cluster = 512 << random.below(13);
    let version = if random.one_in(5) { 2 } else { 3 };
    let bytes = (2048 << 10) + (random.below(2048) << 10) + random.below(3) * cluster.max(1024);
    let backing = create_base(place, random, bytes);
    let mut options = format!("cluster_size={cluster}");
    let data_file = version == 3 && random.one_in(5);
    if version == 2 {
        options += ",compat=0.10";
    } else {
        let lazy = ["on", "off"][random.index(2)];
        options += &format!(",refcount_bits={},lazy_refcounts={lazy}", 1 << random.below(7));
    }
    let preallocated = backing.is_empty() && random.one_in(3);
    if preallocated {
        options += [",preallocation=metadata", ",preallocation=falloc"][random.index(2)];
    }
    let raw = data_file && backing.is_empty() && random.one_in(2);
    for name in ["ours", "theirs"] {
        let mut options = options.clone();
        if data_file {
            // QEMU looks for a relative name in its working directory.
            let data = place.path(&format!("{name}.data"));
            options += &format!(",data_file={}", data.display());
        } else if name == "theirs" {
            std::fs::copy(place.path("ours"), place.path(name)).unwrap();
            break;
        }
        if raw {
            options += ",data_file_raw=on";
        }
        place.create(name, &format!("{backing} -o {options} {}K", bytes >> 10));
    }
    Shape { bytes, cluster, version, compresses: !data_file && !preallocated }
}

/// Creates the backing file of a disk, shorter or longer than the disk. Returns the arguments that name it.
fn create_base(place: &Place, random: &mut Random, bytes: u64) -> &'static str {
    let kind = random.below(5);
    if kind == 0 {
        return "";
    }
    let len = SECTOR * (1 + random.below(bytes * 5 / 4 / SECTOR));
    let len = usize::try_from(len).unwrap();
    write_noise(&place.path("raw"), len, random.next_u64());
    let mut raw = std::fs::read(place.path("raw")).unwrap();
    for _ in 0..3 {
        let (one, other) = (random.index(len), random.index(len));
        raw[one.min(other)..one.max(other)].fill(0);
    }
    std::fs::write(place.path("raw"), &raw).unwrap();
    if kind == 1 {
        return "-b raw -F raw";
    }
    let compressed = if kind == 2 { "-W" } else { "-c" };
    let options = format!("cluster_size={}", 512 << random.below(13));
    let args = ["convert", compressed, "-f", "raw", "-O", "qcow2", "-o", &options, "raw", "base"];
    place.succeed("qemu-img", &args);
    "-b base -F qcow2"
}

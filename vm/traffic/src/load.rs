//! Disk load that checks every sector.
//!
//! Each thread owns a part of the disk. It writes runs of sectors there at random positions and reads
//! others. It remembers the content of each sector: the sector number and the count of its writes, in
//! every word. So a lost, old, torn or misplaced sector is detected. At the end each thread reads its
//! whole part.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;

const SECTOR: usize = 512;
/// Bypasses the page cache; the value on x86.
const O_DIRECT: i32 = 0o40000;
const ALIGNMENT: usize = 4096;

#[derive(Args)]
pub(crate) struct LoadArgs {
    /// Path of the disk or file
    path: PathBuf,
    /// Size of the tested part, from the start, in MiB
    #[arg(long, default_value_t = 16)]
    mebibytes: u64,
    /// Duration of the load in seconds; afterwards the disk is read and compared once more
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Number of threads; each has one request in flight
    #[arg(long, default_value_t = 8)]
    threads: u64,
    /// Size limit of a request in KiB
    #[arg(long, default_value_t = 128)]
    largest: usize,
    /// Unit of positions and sizes in KiB
    #[arg(long, default_value_t = 4)]
    unit: usize,
    /// Flush after this number of writes of a thread; 0 for never
    #[arg(long, default_value_t = 32)]
    flush: u64,
    /// Only read, without a comparison
    #[arg(long)]
    read_only: bool,
}

/// Result of one thread.
#[derive(Default)]
struct Done {
    reads: u64,
    writes: u64,
    longest: Duration,
}

/// Memory aligned for O_DIRECT.
struct Buffer {
    bytes: Vec<u8>,
    start: usize,
}

impl Buffer {
    fn new(length: usize) -> Buffer {
        let bytes = vec![0; length + ALIGNMENT];
        let start = bytes.as_ptr().align_offset(ALIGNMENT);
        Buffer { bytes, start }
    }

    fn part(&mut self, length: usize) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + length]
    }
}

/// Part of the disk that belongs to one thread.
struct Part {
    file: File,
    /// First sector of the part.
    first: u64,
    /// Number of writes of each sector.
    written: Vec<u32>,
    /// Random value of each run, so that data of an earlier load is not accepted.
    salt: u64,
    state: u64,
    buffer: Buffer,
    unit: usize,
    largest: usize,
}

impl Part {
    /// Returns a pseudorandom number less than `below` (xorshift64, Marsaglia).
    fn random(&mut self, below: usize) -> usize {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        usize::try_from(self.state >> 16).unwrap_or(0) % below.max(1)
    }

    /// Returns a random position and a random number of sectors.
    fn random_range(&mut self) -> (usize, usize) {
        let units = self.written.len() / self.unit;
        let most = (self.largest / self.unit).min(units).max(1);
        let count = self.random(most) + 1;
        let place = self.random(units - count + 1);
        (place * self.unit, count * self.unit)
    }

    /// Returns the word of a sector after `times` writes.
    fn word((salt, first): (u64, u64), index: usize, times: u32) -> u64 {
        let sector = first + index as u64;
        salt ^ (sector << 24 | u64::from(times) & 0xFF_FFFF)
    }

    fn write(&mut self) -> anyhow::Result<()> {
        let (place, count) = self.random_range();
        let bytes = self.buffer.part(count * SECTOR);
        let sectors = self.written[place..place + count].iter_mut().enumerate();
        for ((offset, times), sector) in sectors.zip(bytes.chunks_mut(SECTOR)) {
            *times += 1;
            let word = Part::word((self.salt, self.first), place + offset, *times).to_le_bytes();
            sector.chunks_mut(8).for_each(|part| part.copy_from_slice(&word));
        }
        let at = (self.first + place as u64) * SECTOR as u64;
        self.file.write_all_at(bytes, at).with_context(|| format!("writing at {at}"))
    }

    fn read(&mut self, place: usize, count: usize) -> anyhow::Result<()> {
        let bytes = self.buffer.part(count * SECTOR);
        let at = (self.first + place as u64) * SECTOR as u64;
        self.file.read_exact_at(bytes, at).with_context(|| format!("reading at {at}"))?;
        for (offset, sector) in bytes.chunks(SECTOR).enumerate() {
            let times = self.written[place + offset];
            if times == 0 {
                // This run did not write the sector, so its content is unknown.
                continue;
            }
            let word = Part::word((self.salt, self.first), place + offset, times).to_le_bytes();
            let wrong = sector.chunks(8).position(|part| part != word);
            if let Some(wrong) = wrong {
                let found = &sector[wrong * 8..wrong * 8 + 8];
                anyhow::bail!(
                    "sector {} holds {found:02x?} in word {wrong}, and not {word:02x?}",
                    self.first + (place + offset) as u64
                );
            }
        }
        Ok(())
    }

    fn run(&mut self, args: &LoadArgs) -> anyhow::Result<Done> {
        let end = Instant::now() + Duration::from_secs(args.seconds);
        let mut done = Done::default();
        while Instant::now() < end {
            let began = Instant::now();
            if args.read_only || self.random(3) == 0 {
                let (place, count) = self.random_range();
                self.read(place, count)?;
                done.reads += 1;
            } else {
                self.write()?;
                done.writes += 1;
                if args.flush > 0 && done.writes % args.flush == 0 {
                    self.file.sync_data().context("flushing")?;
                }
            }
            done.longest = done.longest.max(began.elapsed());
        }
        for place in (0..self.written.len()).step_by(self.largest) {
            let count = self.largest.min(self.written.len() - place);
            self.read(place, count)?;
        }
        Ok(done)
    }
}

fn open(path: &Path, read_only: bool) -> anyhow::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(!read_only).custom_flags(O_DIRECT);
    options.open(path).with_context(|| path.display().to_string())
}

/// Runs the load. Returns `READS WRITES LONGEST_MS`.
pub(crate) fn load(args: &LoadArgs) -> anyhow::Result<String> {
    let sectors = (args.mebibytes << 11) / args.threads.max(1);
    let (unit, largest) = (args.unit * 2, args.largest * 2);
    let sectors = sectors - sectors % unit as u64;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let salt = now.unwrap_or_default().as_secs().wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let run = |number: u64| -> anyhow::Result<Done> {
        let mut part = Part {
            file: open(&args.path, args.read_only)?,
            first: number * sectors,
            written: vec![0; usize::try_from(sectors)?],
            salt,
            state: 0x9e37_79b9_7f4a_7c15 ^ (number + 1) << 32,
            buffer: Buffer::new(largest * SECTOR),
            unit,
            largest,
        };
        part.run(args)
    };
    let all = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..args.threads).map(|number| scope.spawn(move || run(number))).collect();
        let ended = threads.into_iter().map(|thread| {
            thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a thread panicked")))
        });
        ended.collect::<anyhow::Result<Vec<Done>>>()
    })?;
    let sum = |of: fn(&Done) -> u64| all.iter().map(of).sum::<u64>();
    let longest = all.iter().map(|done| done.longest).max().unwrap_or_default();
    Ok(format!("{} {} {}", sum(|done| done.reads), sum(|done| done.writes), longest.as_millis()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(file: File) -> Part {
        Part {
            file,
            first: 0,
            written: vec![0; 64],
            salt: 5,
            state: 7,
            buffer: Buffer::new(64 * SECTOR),
            unit: 1,
            largest: 64,
        }
    }

    #[test]
    fn old_torn_or_misplaced_sector_is_detected() {
        let path = std::env::temp_dir().join(format!("traffic-load-{}", std::process::id()));
        std::fs::write(&path, vec![0; 64 * SECTOR]).unwrap();
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let mut part = part(file.try_clone().unwrap());
        for _ in 0..50 {
            part.write().unwrap();
        }
        part.read(0, 64).unwrap();
        let mut whole = vec![0; 64 * SECTOR];
        file.read_exact_at(&mut whole, 0).unwrap();
        let place = part.written.iter().position(|times| *times > 1).unwrap();
        let next = (place + 1) % 64;
        let at = (place * SECTOR) as u64;
        let mut misplaced = whole[next * SECTOR..(next + 1) * SECTOR].to_vec();
        file.write_all_at(&misplaced, at).unwrap();
        assert!(part.read(0, 64).is_err());
        misplaced.copy_from_slice(&whole[place * SECTOR..(place + 1) * SECTOR]);
        misplaced[SECTOR - 1] ^= 1;
        file.write_all_at(&misplaced, at).unwrap();
        assert!(part.read(0, 64).is_err());
        file.write_all_at(&whole, 0).unwrap();
        part.read(0, 64).unwrap();
        std::fs::remove_file(&path).unwrap();
    }
}

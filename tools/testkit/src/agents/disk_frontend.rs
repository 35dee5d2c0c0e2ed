//! `ringfence-bench internal disk-frontend`: drives a disk of this Xen guest from user space, for tests.
//!
//! The guest's own driver has released the disk. The agent connects, takes its steps in their order, prints a
//! line after each, and closes the device. The main thread follows the backend's states, so the disk survives a
//! backend that is replaced; another thread takes the steps.
//!
//! | step | does |
//! |---|---|
//! | `read:FILE` | reads the disk from its beginning, as many bytes as `--mebibytes` says, into a file |
//! | `write:FILE` | writes a file to the beginning of the disk, and flushes |
//! | `load:SECONDS` | has one thread for each queue stamp its part of the disk, then read it at random and compare |
//! | `hold:FILE` | waits until the file exists |

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Args;
use ringfence_block::blkfront::BlkfrontOptions;
use ringfence_block::storage::{Disk, DiskQueue, Op, Request, Segment};
use ringfence_block::vbd::frontend::VbdFrontend;
use ringfence_memory::{LentSlice, Mapping};
use ringfence_platform::Platform;
use ringfence_sys::numbers::bounded;
use ringfence_sys::poll::wait_any;
use ringfence_wire::xenbus::DeviceId;
use rustix::event::{PollFd, PollFlags};

/// Time limit of the handshake and of a pause, long enough for emulation.
const WITHIN: Duration = Duration::from_secs(240);
/// Interval between two reads of the backend's state.
const INTERVAL: Duration = Duration::from_millis(20);
/// Bytes of each request of `read` and `write`.
const CHUNK: usize = 64 * 1024;
/// Requests in flight of each queue.
const DEPTH: u16 = 8;
/// Pages of the grant window of each queue.
const WINDOW: u32 = 1024;

/// Drives a disk of this guest from user space
#[derive(Debug, Args)]
pub struct DiskFrontendArgs {
    /// Number of the disk
    #[arg(long, value_name = "N", default_value_t = 51712)]
    pub handle: u32,

    /// Put the pages of requests into grant windows
    #[arg(long)]
    pub windows: bool,

    /// Number of queues
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub queues: u16,

    /// Length of `read` in MiB
    #[arg(long, value_name = "MIB", default_value_t = 8)]
    pub mebibytes: u64,

    /// `read:FILE`, `write:FILE`, `load:SECONDS` or `hold:FILE`, in their order
    #[arg(value_name = "STEP", required = true)]
    pub steps: Vec<Step>,
}

/// Step of the agent.
#[derive(Clone, Debug)]
pub enum Step {
    /// Copy the disk to a file.
    Read(PathBuf),
    /// Copy a file to the disk.
    Write(PathBuf),
    /// Read at random, and compare.
    Load(Duration),
    /// Wait for a file.
    Hold(PathBuf),
}

impl FromStr for Step {
    type Err = String;

    fn from_str(text: &str) -> Result<Step, String> {
        match text.split_once(':') {
            Some(("read", file)) => Ok(Step::Read(file.into())),
            Some(("write", file)) => Ok(Step::Write(file.into())),
            Some(("hold", file)) => Ok(Step::Hold(file.into())),
            Some(("load", seconds)) => {
                let seconds = seconds.parse().map_err(|e| format!("{seconds}: {e}"))?;
                Ok(Step::Load(Duration::from_secs(seconds)))
            }
            _ => Err("a step is read:FILE, write:FILE, load:SECONDS or hold:FILE".to_owned()),
        }
    }
}

/// Disk that a frontend takes over: its device, and the path of its backend.
#[derive(Debug)]
pub struct DiskFrontendTarget {
    pub device: DeviceId,
    pub backend: String,
}

/// Load of a disk: works for the given time, verifies every read, and returns the number of requests.
pub type DiskLoad<'a> = &'a (dyn Fn(&dyn Disk, Duration) -> anyhow::Result<u64> + Sync);

/// Connects, takes the steps and closes the device. `load` is the work of the step `load`.
///
/// # Errors
///
/// Returns the first step that fails, and errors of the connection.
pub fn run<P: Platform>(
    platform: &P,
    target: DiskFrontendTarget,
    args: &DiskFrontendArgs,
    load: DiskLoad<'_>,
) -> anyhow::Result<()> {
    let mut store = platform.store()?;
    let DiskFrontendTarget { device, backend } = target;
    let options = BlkfrontOptions {
        queues: args.queues.into(),
        window: if args.windows { WINDOW } else { 0 },
        ..BlkfrontOptions::default()
    };
    let mut front =
        VbdFrontend::new(platform, device, options, Arc::new(|| {}))?.with_backend(backend);
    let deadline = Instant::now() + WITHIN;
    while !front.is_up() {
        ensure!(Instant::now() < deadline, "no connection within {WITHIN:?}");
        front.look(platform, &mut store)?;
        std::thread::sleep(INTERVAL);
    }
    let disk = Arc::clone(front.disk().context("the disk is gone")?);
    tell(&format!("connected, {} queues", disk.lanes()))?;
    let worked = std::thread::scope(|scope| {
        let taken = || args.steps.iter().try_for_each(|step| take(step, &*disk, args, load));
        let steps = scope.spawn(taken);
        while !steps.is_finished() {
            front.look(platform, &mut store)?;
            std::thread::sleep(INTERVAL);
        }
        steps.join().unwrap_or_else(|_| bail!("the thread of the steps panicked"))
    });
    drop(disk);
    front.close(&mut store)?;
    tell("closed")?;
    worked
}

/// Prints a line that a scenario waits for.
fn tell(line: &str) -> anyhow::Result<()> {
    println!("{line}");
    Ok(std::io::stdout().flush()?)
}

fn take(
    step: &Step,
    disk: &dyn Disk,
    args: &DiskFrontendArgs,
    load: DiskLoad<'_>,
) -> anyhow::Result<()> {
    let done = match step {
        Step::Read(path) => {
            let bytes = Stream::new(disk)?.read(path, args.mebibytes << 20)?;
            format!("read {bytes} bytes")
        }
        Step::Write(path) => format!("wrote {} bytes", Stream::new(disk)?.write(path)?),
        Step::Load(length) => format!("loaded {} requests", load(disk, *length)?),
        Step::Hold(path) => {
            let until = Instant::now() + WITHIN;
            while !path.exists() {
                ensure!(Instant::now() < until, "nobody made {}", path.display());
                std::thread::sleep(INTERVAL);
            }
            format!("held until {}", path.display())
        }
    };
    tell(&done)
}

/// Sequential transfer between the disk and a file, a group of requests at a time.
struct Stream {
    queue: Box<dyn DiskQueue>,
    memory: Vec<LentSlice>,
    size: u64,
}

impl Stream {
    fn new(disk: &dyn Disk) -> anyhow::Result<Stream> {
        let memory = (0..DEPTH).map(|_| Ok(Mapping::private(CHUNK)?.lent()));
        Ok(Stream {
            queue: disk.queue(DEPTH.into())?,
            memory: memory.collect::<std::io::Result<_>>()?,
            size: disk.geometry().bytes,
        })
    }

    fn read(mut self, path: &PathBuf, bytes: u64) -> anyhow::Result<u64> {
        let mut file = File::create(path).with_context(|| path.display().to_string())?;
        let mut buffer = vec![0; CHUNK];
        let mut at = 0;
        while at < bytes {
            let chunks = self.group(Op::Read, at, bytes)?;
            for (memory, len) in &chunks {
                memory.copy_to(0, &mut buffer[..*len])?;
                file.write_all(&buffer[..*len])?;
                at += *len as u64;
            }
        }
        Ok(at)
    }

    fn write(mut self, path: &PathBuf) -> anyhow::Result<u64> {
        let mut file = File::open(path).with_context(|| path.display().to_string())?;
        let bytes = file.metadata()?.len();
        let mut buffer = vec![0; CHUNK];
        let mut at = 0;
        while at < bytes {
            let mut filled = at;
            for memory in &self.memory {
                let len = length(filled, bytes);
                file.read_exact(&mut buffer[..len])?;
                memory.copy_from(0, &buffer[..len])?;
                filled += len as u64;
            }
            self.group(Op::Write { fua: false }, at, bytes)?;
            at = filled;
        }
        let flush = Request { token: 0, op: Op::Flush, offset: 0, len: 0, segments: Vec::new() };
        self.submit_all(vec![flush])?;
        Ok(at)
    }

    /// Runs a request for each piece of memory, from `at` on, up to `end`. Returns the pieces with their lengths.
    fn group(&mut self, op: Op, at: u64, end: u64) -> anyhow::Result<Vec<(LentSlice, usize)>> {
        ensure!(end <= self.size, "the disk has {} bytes, not {end}", self.size);
        let (mut offset, mut requests, mut chunks) = (at, Vec::new(), Vec::new());
        for memory in &self.memory {
            let len = length(offset, end);
            if len == 0 {
                break;
            }
            let segments = vec![Segment::from(memory.slice(0, len)?)];
            requests.push(Request { token: offset, op, offset, len: len as u64, segments });
            chunks.push((memory.clone(), len));
            offset += len as u64;
        }
        self.submit_all(requests)?;
        Ok(chunks)
    }

    fn submit_all(&mut self, requests: Vec<Request>) -> anyhow::Result<()> {
        let mut left = requests.len();
        for request in requests {
            self.queue.submit(request);
        }
        self.queue.kick();
        let until = Instant::now() + WITHIN;
        let mut done = Vec::new();
        while left > 0 {
            self.queue.reap(&mut done);
            for done in done.drain(..) {
                if let Err(errno) = done.result {
                    bail!("offset {}: {}", done.token, std::io::Error::from_raw_os_error(errno));
                }
                left -= 1;
            }
            if left > 0 {
                ensure!(Instant::now() < until, "no answer within {WITHIN:?}");
                let mut completed = [PollFd::from_borrowed_fd(self.queue.wait_fd(), PollFlags::IN)];
                wait_any(&mut completed, Some(Instant::now() + Duration::from_secs(1)))?;
            }
        }
        Ok(())
    }
}

/// Returns the length of the chunk at `at` of a transfer that ends at `end`.
fn length(at: u64, end: u64) -> usize {
    bounded((end - at).min(CHUNK as u64), CHUNK)
}

#[cfg(test)]
mod tests {
    use ringfence_block::storage::memory::MemoryDisk;

    use super::*;

    #[test]
    fn file_written_to_disk_and_read_back_is_equal() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        let disk = MemoryDisk::new(4 << 20, 512).unwrap();
        // One group and a part of the next, which ends in the middle of a chunk.
        let bytes: Vec<u8> = (0..(1 << 20) - 4096u32).map(|n| (n % 251) as u8).collect();
        std::fs::write(&from, &bytes).unwrap();
        let len = bytes.len() as u64;
        assert_eq!(Stream::new(&disk).unwrap().write(&from).unwrap(), len);
        assert_eq!(Stream::new(&disk).unwrap().read(&to, len).unwrap(), len);
        assert_eq!(std::fs::read(&to).unwrap(), bytes);
        assert!(Stream::new(&disk).unwrap().read(&to, 5 << 20).is_err());
    }

    #[test]
    fn steps_are_parsed_and_others_refused() {
        assert!(matches!("read:/a".parse(), Ok(Step::Read(path)) if path.ends_with("a")));
        assert!(matches!("load:3".parse(), Ok(Step::Load(time)) if time.as_secs() == 3));
        assert!("load:soon".parse::<Step>().is_err());
        assert!("erase:/a".parse::<Step>().is_err());
    }
}

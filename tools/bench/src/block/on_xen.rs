//! `ringfence-bench internal disk-frontend`: drives a disk of this Xen guest from user space, for tests.
//!
//! The guest's own driver has released the disk. The program connects, takes its steps in their order, prints a
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
use ringfence_platform::xen::{Side, XenPlatform};
use ringfence_platform::{DomId, Platform};
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::args::Rw;
use super::domain::{Worker, wait};
use super::orders::GuestSetup;
use crate::harness::STATUS_BENCH_FAILED;
use ringfence_driver::switchboard::DiskFrontend;
use ringfence_frontend::attach::claim;
use ringfence_hostnet::causes::causes;

/// Time limit of the handshake and of a pause, long enough for emulation.
const WITHIN: Duration = Duration::from_secs(240);
/// Interval between two reads of the backend's state.
const INTERVAL: Duration = Duration::from_millis(20);
/// Bytes of each request of `read` and `write`.
const CHUNK: usize = 64 * 1024;
/// Requests in flight of each queue.
const DEPTH: u16 = 8;
/// Bytes of each request of `load`.
const BLOCK: u32 = 4096;
/// Bytes of the disk that each queue uses in `load`.
const SPAN: u64 = 2 << 20;

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

/// Step of the program.
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

/// Runs the frontend. Returns the exit status.
pub(crate) fn main(args: &DiskFrontendArgs) -> u8 {
    match run(args) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("ringfence: disk frontend: {}", causes(&error));
            STATUS_BENCH_FAILED
        }
    }
}

fn run(args: &DiskFrontendArgs) -> anyhow::Result<()> {
    let platform = XenPlatform::open(Side::Frontend)?;
    let mut store = platform.store()?;
    let device = device(&platform, &mut store, args.handle)?;
    let backend = claim::backend_path(&mut store, &device)?;
    claim::reset(&mut store, &device, &backend)?;
    let options = BlkfrontOptions {
        queues: args.queues.into(),
        window: if args.windows { super::domain::WINDOW } else { 0 },
        ..BlkfrontOptions::default()
    };
    let mut front =
        VbdFrontend::new(&platform, device, options, Arc::new(|| {}))?.with_backend(backend);
    let deadline = Instant::now() + WITHIN;
    while !front.is_up() {
        ensure!(Instant::now() < deadline, "no connection within {WITHIN:?}");
        front.look(&platform, &mut store)?;
        std::thread::sleep(INTERVAL);
    }
    let disk = Arc::clone(front.disk().context("the disk is gone")?);
    tell(&format!("connected, {} queues", disk.lanes()))?;
    let worked = std::thread::scope(|scope| {
        let steps = scope.spawn(|| args.steps.iter().try_for_each(|step| take(step, &*disk, args)));
        while !steps.is_finished() {
            front.look(&platform, &mut store)?;
            std::thread::sleep(INTERVAL);
        }
        steps.join().unwrap_or_else(|_| bail!("the thread of the steps panicked"))
    });
    drop(disk);
    front.close(&mut store)?;
    tell("closed")?;
    worked
}

fn device(
    platform: &XenPlatform,
    store: &mut StoreClient,
    handle: u32,
) -> anyhow::Result<DeviceId> {
    let frontend = platform.domid();
    let mut device = DeviceId { kind: DeviceKind::Vbd, frontend, backend: DomId(0), handle };
    let backend = store.read_u16(&format!("{}/backend-id", device.frontend_path()));
    device.backend = DomId(backend.with_context(|| format!("the disk {handle}"))?);
    Ok(device)
}

/// Prints a line that a scenario waits for.
fn tell(line: &str) -> anyhow::Result<()> {
    println!("{line}");
    Ok(std::io::stdout().flush()?)
}

fn take(step: &Step, disk: &dyn Disk, args: &DiskFrontendArgs) -> anyhow::Result<()> {
    let done = match step {
        Step::Read(path) => {
            let bytes = Stream::new(disk)?.read(path, args.mebibytes << 20)?;
            format!("read {bytes} bytes")
        }
        Step::Write(path) => format!("wrote {} bytes", Stream::new(disk)?.write(path)?),
        Step::Load(length) => format!("loaded {} requests", load(disk, *length, args)?),
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

/// Runs one worker for each queue on its own part of the disk. Returns the number of verified reads.
fn load(disk: &dyn Disk, length: Duration, args: &DiskFrontendArgs) -> anyhow::Result<u64> {
    let worker = |number: u16| -> anyhow::Result<u64> {
        let setup = GuestSetup {
            domain: number,
            handle: args.handle,
            core: None,
            frontend: DiskFrontend { persistent: true, windows: args.windows },
            block: BLOCK,
            rw: Rw::RandRead,
            depth: DEPTH,
            queues: args.queues,
            base: u64::from(number) * SPAN,
            span: SPAN,
        };
        let mut worker = Worker::new(disk.queue(DEPTH.into())?, setup)?;
        worker.fill()?;
        worker.work(length)?;
        Ok(worker.requests())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> =
            (0..args.queues).map(|number| scope.spawn(move || worker(number))).collect();
        workers.into_iter().try_fold(0, |sum, worker| {
            let requests = worker.join().unwrap_or_else(|_| bail!("a worker panicked"))?;
            Ok(sum + requests)
        })
    })
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

    /// Runs a request for each piece of memory, from `at` on, up to `end`. Returns what was transferred.
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
                wait(self.queue.wait_fd())?;
            }
        }
        Ok(())
    }
}

/// Returns the length of the chunk at `at` of a transfer that ends at `end`.
fn length(at: u64, end: u64) -> usize {
    usize::try_from(end - at).unwrap_or(usize::MAX).min(CHUNK)
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

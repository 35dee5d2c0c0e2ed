//! `ringfence-bench vhost-user`: rate and cost of a device, by the way in which a machine hands its memory over.
//!
//! ```text
//!  ringfence-bench (front-end: vring, requests) ── socket ──> ringfence vhost-user blk | another program
//!                                      └── socket ──> ringfence shield ── socket ──> ...
//! ```
//!
//! Each run has new processes. The front-end warms up, then works for the measured time.

pub mod args;
mod disk;
mod report;
mod servers;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use ringfence_wire::virtio_blk::SECTOR;

use self::args::{BlkArgs, DeviceArgs, VhostUserArgs, Way};
use self::disk::{DISK, DiskFront, Work, Worked, stamp};
use self::servers::{Program, Servers};
use crate::harness::{Attempt, Case, Format, Report, Runs, progress};

/// Warm-up of a run.
const WARM_UP: Duration = Duration::from_millis(300);

/// Runs the benchmark of a device.
pub(super) fn run(args: &VhostUserArgs) -> anyhow::Result<()> {
    match &args.device {
        DeviceArgs::Blk(args) => run_disks(args),
    }
}

fn run_disks(args: &BlkArgs) -> anyhow::Result<()> {
    let file = DiskFile::new(args.file.as_deref())?;
    let mut cases = Vec::new();
    for &rw in &args.rw {
        for &block in &args.block {
            let work = Work { block, depth: args.depth, rw };
            let case = |program, way| DiskCase { args, file: &file.path, program, way, work };
            cases.extend(args.ways.iter().map(|way| case(Program::Ringfence, *way)));
            cases.extend(args.vs.iter().map(|peer| case(Program::Other(*peer), Way::Trust)));
        }
    }
    let progress = progress(cases.len() * args.rounds as usize);
    let report = Report::begin(report::layout(), Format::of(args.json))?.beside(&progress);
    Runs::measure(&cases, args.rounds, &progress, |case, runs| {
        report.row(&runs.summary(case, |other| other.is_baseline_of(case)))
    })?;
    report.end()
}

/// Combination of a program, a way and a work.
#[derive(Clone)]
struct DiskCase<'a> {
    args: &'a BlkArgs,
    file: &'a Path,
    program: Program,
    way: Way,
    work: Work,
}

/// Result of a run.
#[derive(Clone, Copy, Debug)]
struct DiskRun {
    worked: Worked,
    /// CPU time of the backend and of the shield in nanoseconds, with the resolution of one tick.
    served_ns: u64,
}

impl DiskRun {
    /// Returns the requests each second.
    fn iops(&self) -> f64 {
        self.worked.requests as f64 / self.worked.seconds
    }

    fn per_request(&self, count: u64) -> f64 {
        count as f64 / self.worked.requests.max(1) as f64
    }
}

impl DiskCase<'_> {
    /// Returns `true` for the case of Ringfence that has all memory, for the same work.
    fn is_baseline_of(&self, other: &DiskCase<'_>) -> bool {
        (self.program, self.way) == (Program::Ringfence, Way::Trust) && self.work == other.work
    }
}

impl Case for DiskCase<'_> {
    type Measured = DiskRun;

    fn name(&self) -> String {
        let (program, way, Work { block, rw, .. }) =
            (self.program.name(), self.way.name(), self.work);
        format!("{program}, {way}, {} of {block} bytes", rw.name())
    }

    fn run(&self, _: &Attempt<'_>) -> anyhow::Result<DiskRun> {
        let mut servers = Servers::start(self.program, self.way, self.file, self.args.cache)?;
        let measure = || {
            let mut front = DiskFront::connect(&servers.socket, self.program, self.way, self.work)?;
            front.work(WARM_UP)?;
            let before = servers.cpu_ns()?;
            let worked = front.work(self.args.seconds)?;
            let served_ns = servers.cpu_ns()?.saturating_sub(before);
            Ok(DiskRun { worked, served_ns })
        };
        let measured: anyhow::Result<DiskRun> = measure();
        // The messages of a server that has ended say more than the error of the front-end.
        if measured.is_err() {
            servers.check()?;
        }
        measured
    }
}

/// File of the disk, every sector of which begins with its number.
struct DiskFile {
    path: PathBuf,
    is_temporary: bool,
}

impl DiskFile {
    fn new(path: Option<&Path>) -> anyhow::Result<DiskFile> {
        let name = format!("ringfence-bench-disk-{}", std::process::id());
        let is_temporary = path.is_none();
        let path = path.map_or_else(|| std::env::temp_dir().join(name), Path::to_path_buf);
        let made = DiskFile { path, is_temporary };
        made.fill().with_context(|| format!("writing {}", made.path.display()))?;
        Ok(made)
    }

    fn fill(&self) -> anyhow::Result<()> {
        let mut options = fs::File::options();
        options.write(true).create_new(self.is_temporary);
        let mut file = options.open(&self.path)?;
        let mut chunk = vec![0; 1 << 20];
        let sectors = chunk.len() as u64 / SECTOR;
        for first in (0..DISK / SECTOR).step_by(chunk.len() / 512) {
            stamp(&mut chunk, first, sectors);
            file.write_all(&chunk)?;
        }
        Ok(file.sync_all()?)
    }
}

impl Drop for DiskFile {
    fn drop(&mut self) {
        if self.is_temporary {
            // The system removes leftovers among temporary files.
            let _ = fs::remove_file(&self.path);
        }
    }
}

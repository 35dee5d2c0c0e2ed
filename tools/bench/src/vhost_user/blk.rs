//! `ringfence-bench vhost-user blk`: the same file, served by `ringfence vhost-user blk` and by other programs.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use ringfence_block::storage::file::CacheMode;
use ringfence_wire::virtio_blk::SECTOR;

use super::args::{BlkArgs, DiskPeer, Way};
use super::disk::{DISK, DiskFront, Requests, stamp};
use super::measure::{DeviceRun, Program, Workload, measure};
use super::report::{CostNames, Row, counted_figure, figure, names, with_costs};
use super::servers::Servers;
use crate::block::args::ImageFormat;
use crate::harness::{Layout, left, right};
use crate::storage_daemon::{DaemonImage, quoted};

/// Runs the benchmark of a disk.
pub(super) fn run(args: &BlkArgs) -> anyhow::Result<()> {
    let file = DiskFile::new(args.file.as_deref())?;
    let mut works = Vec::new();
    for &rw in &args.rw {
        for &block in &args.block {
            let requests = Requests { block, depth: args.depth, rw };
            works.push(DiskWork { requests, file: file.path.clone(), cache: args.cache });
        }
    }
    measure(&args.run, &works, &args.vs, layout())
}

/// Requests to a file.
#[derive(Clone, PartialEq, Eq, Debug)]
struct DiskWork {
    requests: Requests,
    file: PathBuf,
    cache: CacheMode,
}

impl Workload for DiskWork {
    type Peer = DiskPeer;
    type Sockets = PathBuf;
    type Front = DiskFront;

    fn program(peer: DiskPeer) -> &'static str {
        match peer {
            DiskPeer::QemuStorageDaemon => "qemu-storage-daemon",
            DiskPeer::QemuStorageDaemonUring => "qemu-storage-daemon-uring",
        }
    }

    fn name(&self) -> String {
        let Requests { block, rw, .. } = self.requests;
        format!("{} of {block} bytes", rw.name())
    }

    fn start(
        &self,
        program: Program<DiskPeer>,
        way: Way,
        servers: &mut Servers,
    ) -> anyhow::Result<PathBuf> {
        let socket = servers.socket("backend");
        let (file, cache) = (&self.file, self.cache);
        let (name, command) = match program {
            Program::Ringfence => {
                let mut command = servers.ringfence(&["vhost-user", "blk", "--socket"]);
                command.arg(&socket);
                if way == Way::Pool {
                    command.args(["--require-pool", "auto"]);
                }
                command.arg("--disk").arg(format!("{},cache={cache}", file.display()));
                ("ringfence", command)
            }
            Program::Other(peer) => {
                let aio = match peer {
                    DiskPeer::QemuStorageDaemon => "threads",
                    DiskPeer::QemuStorageDaemonUring => "io_uring",
                };
                let image = DaemonImage { file, format: ImageFormat::Raw, cache, aio };
                let mut command = image.command();
                command.arg("--export").arg(format!(
                    "type=vhost-user-blk,id=e,node-name=disk,addr.type=unix,addr.path={},writable=on",
                    quoted(&socket)
                ));
                (DiskWork::program(peer), command)
            }
        };
        servers.start(name, command, &[&socket])?;
        if way == Way::Shield { servers.start_shield(&socket) } else { Ok(socket) }
    }

    fn copied(
        &self,
        program: Program<DiskPeer>,
        way: Way,
        servers: &Servers,
    ) -> anyhow::Result<Option<u64>> {
        match (program, way) {
            // The kernel moves the data between the file and the memory of the machine.
            (Program::Ringfence, Way::Trust | Way::Pool) => Ok(Some(0)),
            (Program::Ringfence, Way::Shield) => servers.copied_by_shield().map(Some),
            (Program::Other(_), _) => Ok(None),
        }
    }

    fn connect(
        &self,
        program: Program<DiskPeer>,
        way: Way,
        socket: &PathBuf,
    ) -> anyhow::Result<DiskFront> {
        // Other programs keep no log of the requests in flight.
        DiskFront::connect(socket, program == Program::Ringfence, way, self.requests)
    }
}

const COSTS: CostNames = CostNames {
    front_ns: "front_cpu_ns_per_request",
    backend_ns: "backend_cpu_ns_per_request",
    syscalls: "syscalls_per_request",
    allocations: "allocations_per_request",
    kicks: "kicks_per_request",
    calls: "calls_per_request",
};

fn mib_per_s(row: &Row<DiskWork>) -> Option<f64> {
    let block = f64::from(row.case.work.requests.block);
    figure(row, |run| run.rate() * block / f64::from(1 << 20))
}

/// Returns the number of copies of each byte of data.
fn copies(row: &Row<DiskWork>) -> Option<f64> {
    let block = f64::from(row.case.work.requests.block);
    counted_figure(row, |run| run.copied.map(|bytes| run.each(bytes) / block))
}

fn layout() -> Layout<Row<DiskWork>> {
    let layout = names()
        .column("rw", |row: &Row<DiskWork>| row.case.work.requests.rw.name(), left("rw", 9))
        .column("block", |row| row.case.work.requests.block, right("block", 7))
        .field("depth", |row| row.case.work.requests.depth)
        .field("cache", |row| row.case.work.cache.to_string())
        .column("iops", |row| figure(row, DeviceRun::rate), right("IOPS", 8))
        .column("mib_per_s", mib_per_s, right("MiB/s", 8))
        .column("copies_per_byte", copies, right("copies", 6).digits(2));
    with_costs(layout, &COSTS)
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

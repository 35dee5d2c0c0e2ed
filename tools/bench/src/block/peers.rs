//! `bench block --vs`: one file served over NBD by `ringfence run --disk` and by other programs, and
//! measured with the same fio job.
//!
//! Each run starts a new server, waits until the server offers the disk, and runs fio with its engine
//! `nbd`. Servers alternate, so that interference affects all of them. CPU time is that of the server's
//! processes without fio.

use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use ringfence_nbd::client::{NbdAddress, NbdDisk, NbdOptions};

use anyhow::{Context, bail, ensure};
use ringfence_sandbox::spawn::THIS_PROGRAM;
use serde_json::Value;

use super::args::{BlockArgs, ImageFormat, NbdPeer, Rw, Storage};
use super::case::middle;
use super::orders::span;
use super::report::DiskRow;
use crate::processes::{Server, SocketDirectory, cpu_ns, processes, tree_of};
use crate::storage_daemon::{DaemonImage, quoted};

/// Warm-up of fio before it measures.
const RAMP: Duration = Duration::from_millis(500);

/// Program that serves the file.
#[derive(Clone, Copy)]
enum DiskServer {
    /// `ringfence run --disk` in this access mode.
    Ringfence(&'static str),
    Other(NbdPeer),
}

impl DiskServer {
    fn name(self) -> &'static str {
        match self {
            DiskServer::Ringfence(_) => "ringfence-nbd",
            DiskServer::Other(NbdPeer::QemuNbd) => "qemu-nbd",
            DiskServer::Other(NbdPeer::QemuNbdUring) => "qemu-nbd-uring",
            DiskServer::Other(NbdPeer::Nbdkit) => "nbdkit",
            DiskServer::Other(NbdPeer::QemuStorageDaemon) => "qemu-storage-daemon",
        }
    }
}

impl DiskServer {
    /// Returns the name of the access mode; other programs have none.
    fn mode(self) -> &'static str {
        match self {
            DiskServer::Ringfence(mode) => mode,
            DiskServer::Other(_) => "-",
        }
    }

    /// Returns the name of the server's export.
    fn export(self) -> &'static str {
        match self {
            DiskServer::Ringfence(_) => "",
            DiskServer::Other(_) => "disk",
        }
    }
}

/// Measures every server. Returns the comparison as text.
pub(super) fn run(
    args: &BlockArgs,
    mut each: impl FnMut(&DiskRow) -> anyhow::Result<()>,
) -> anyhow::Result<String> {
    let Storage::File(file) = &args.storage else {
        bail!("--vs needs --storage FILE: other programs cannot serve this one's memory")
    };
    match args.format {
        ImageFormat::Raw => fill(file)?,
        ImageFormat::Qcow2 => {
            ensure!(
                !args.vs.contains(&NbdPeer::Nbdkit),
                "nbdkit serves raw files only: leave it out of --vs"
            );
            fill_image(file)?;
        }
    }
    let mut servers: Vec<_> =
        args.modes.iter().map(|mode| DiskServer::Ringfence(mode.name())).collect();
    servers.extend(args.vs.iter().map(|peer| DiskServer::Other(*peer)));
    let mut compared = String::new();
    for &rw in &args.rw {
        for &block in &args.block {
            let mut runs: Vec<Vec<DiskRow>> = servers.iter().map(|_| vec![]).collect();
            for _ in 0..args.repeat {
                for (server, runs) in servers.iter().zip(&mut runs) {
                    let row = Job { args, file, block, rw }.run(*server);
                    runs.push(row.with_context(|| server.name())?);
                }
            }
            let rows: Vec<DiskRow> = runs.into_iter().filter_map(middle).collect();
            rows.iter().try_for_each(&mut each)?;
            compared += &compare(&rows, rw, block);
        }
    }
    Ok(compared)
}

/// Formats the ratios of the first row's rate to those of the others.
fn compare(rows: &[DiskRow], rw: Rw, block: u32) -> String {
    let Some((ours, others)) = rows.split_first() else { return String::new() };
    let others = others.iter().filter(|row| row.peer != ours.peer);
    let line = |row: &DiskRow| {
        let times = ours.iops / row.iops.max(1.0);
        format!("{} of {block} bytes: {} does {times:.2} x {}\n", rw.name(), ours.peer, row.peer)
    };
    others.map(line).collect()
}

/// Writes the data to be read, so that its blocks are allocated.
fn fill(path: &Path) -> anyhow::Result<()> {
    let file = fs::File::options().write(true).open(path);
    let mut file = file.with_context(|| format!("opening {}", path.display()))?;
    let block: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
    for _ in 0..span(1) >> 20 {
        file.write_all(&block)?;
    }
    Ok(file.sync_all()?)
}

/// Writes the data to be read into a qcow2 image, so that its clusters are allocated.
fn fill_image(path: &Path) -> anyhow::Result<()> {
    let output = Command::new("qemu-io")
        .args(["-f", "qcow2", "-c", &format!("write -P 0xa5 0 {}", span(1)), "-c", "flush"])
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .context("qemu-io could not be started: install it (Debian: qemu-utils)")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: qemu-io: {}", path.display(), said.trim());
    Ok(())
}

/// Job of fio on one file.
struct Job<'a> {
    args: &'a BlockArgs,
    file: &'a Path,
    block: u32,
    rw: Rw,
}

impl Job<'_> {
    fn run(&self, server: DiskServer) -> anyhow::Result<DiskRow> {
        let place = SocketDirectory::new()?;
        let mut running = self.start(server, &place)?;
        let socket = running.wait_up(&place)?;
        let before = cpu_ns(running.process.pid())?;
        let said = self.fio(&socket, server.export())?;
        let cpu_ns = cpu_ns(running.process.pid())?.saturating_sub(before);
        self.read(&said, server, cpu_ns).context("what fio says")
    }

    fn start(&self, server: DiskServer, place: &SocketDirectory) -> anyhow::Result<Running> {
        let (file, socket) = (self.file.display(), place.file("nbd"));
        let (cache, format) = (self.args.cache, self.args.format);
        let command = match server {
            DiskServer::Ringfence(mode) => {
                let mut command = Command::new(THIS_PROGRAM);
                command.arg0("ringfence").args(["run", "--quiet", "--uplink", "none", "--disk"]);
                command.arg(format!("{file},mode={mode},cache={cache},format={}", format.name()));
                command.args(["--", "sleep", "86400"]).env("XDG_RUNTIME_DIR", place.path());
                command
            }
            DiskServer::Other(NbdPeer::QemuNbd | NbdPeer::QemuNbdUring) => {
                let mut command = Command::new("qemu-nbd");
                command
                    .args(["--persistent", "--export-name=disk"])
                    .arg(format!("--format={}", format.name()));
                if matches!(server, DiskServer::Other(NbdPeer::QemuNbdUring)) {
                    command.arg("--aio=io_uring");
                }
                command.arg(format!("--cache={cache}")).arg("-k").arg(&socket).arg(self.file);
                command
            }
            DiskServer::Other(NbdPeer::Nbdkit) => {
                let mut command = Command::new("nbdkit");
                command.args(["-f", "-e", "disk", "-U"]).arg(&socket).arg("file").arg(self.file);
                command
            }
            DiskServer::Other(NbdPeer::QemuStorageDaemon) => {
                let mut command =
                    DaemonImage { file: self.file, format, cache, aio: "threads" }.command();
                let path = quoted(&socket);
                command.args([
                    "--nbd-server",
                    &format!("addr.type=unix,addr.path={path},max-connections=0"),
                ]);
                // The export runs in the main loop, as in qemu-nbd: with an I/O thread the version of Debian 12 (7.2)
                // fails an assertion when its first client disconnects.
                command.args(["--export", "type=nbd,id=e,node-name=disk,writable=on"]);
                command
            }
        };
        let process = Server::start(server.name(), command, place)?;
        Ok(Running { process, server })
    }

    fn fio(&self, socket: &Path, export: &str) -> anyhow::Result<Value> {
        let rw = match self.rw {
            Rw::RandRead => "randread",
            Rw::RandWrite => "randwrite",
            Rw::SeqRead => "read",
        };
        let output = Command::new("fio")
            .args(["--name=row", "--ioengine=nbd", "--time_based", "--output-format=json"])
            .arg(format!("--uri=nbd+unix:///{export}?socket={}", socket.display()))
            .args([format!("--rw={rw}"), format!("--bs={}", self.block)])
            .args([format!("--iodepth={}", self.args.depth), format!("--size={}", span(1))])
            .arg(format!("--runtime={}ms", self.args.seconds.as_millis()))
            .arg(format!("--ramp_time={}ms", RAMP.as_millis()))
            .stdin(Stdio::null())
            .output()
            .context("fio could not be started: install it (Debian: fio), or leave out --vs")?;
        let text = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success(), "fio: {}", String::from_utf8_lossy(&output.stderr));
        // fio may print messages before the JSON.
        let from = text.find('{').context("fio says nothing in JSON")?;
        Ok(serde_json::from_str(&text[from..])?)
    }

    fn read(&self, said: &Value, server: DiskServer, cpu_ns: u64) -> anyhow::Result<DiskRow> {
        let job = &said["jobs"][0];
        ensure!(job["error"].as_u64() == Some(0), "an error: {}", job["error"]);
        let done = &job[if self.rw == Rw::RandWrite { "write" } else { "read" }];
        let number = |value: &Value| value.as_f64().context("a number is missing");
        let percentile = |which: &str| number(&done["clat_ns"]["percentile"][which]);
        let iops = number(&done["iops"])?;
        // The server also works during fio's warm-up.
        let length = number(&done["runtime"])? / 1e3 + RAMP.as_secs_f64();
        Ok(DiskRow {
            peer: server.name(),
            mode: server.mode(),
            guests: 1,
            block: self.block,
            rw: self.rw,
            depth: self.args.depth,
            storage: self.args.storage.name(),
            requests: whole(iops * length).context("a rate of requests is no number")?,
            iops,
            p50_us: percentile("50.000000")? / 1e3,
            p99_us: percentile("99.000000")? / 1e3,
            cpu_ns,
            backend_cpu_ns: cpu_ns,
            domains: None,
        })
    }
}

/// Returns the integer part of a number; `None` if the number is negative or undefined.
fn whole(number: f64) -> Option<u64> {
    Some(Duration::try_from_secs_f64(number).ok()?.as_secs())
}

/// Returns the socket of the only disk of the guest of a launcher. It has a path in the guest's view alone, so it is
/// reached through the root directory of the guest's command.
fn guests_socket(place: &SocketDirectory, launcher: u32) -> Option<PathBuf> {
    let below = place.file("ringfence").join("disk0");
    let below = below.strip_prefix("/").ok()?;
    let tree = tree_of(launcher, &processes().ok()?);
    let mut paths = tree.iter().map(|pid| PathBuf::from(format!("/proc/{pid}/root")).join(below));
    paths.find(|path| path.exists())
}

/// Process that serves the disk of a job.
struct Running {
    process: Server,
    server: DiskServer,
}

impl Running {
    /// Waits until the server offers the disk. Returns its socket.
    fn wait_up(&mut self, place: &SocketDirectory) -> anyhow::Result<PathBuf> {
        let options = NbdOptions { connect: Duration::from_secs(5), ..NbdOptions::default() };
        let (server, pid) = (self.server, self.process.pid());
        self.process.wait_up(|| {
            let path = match server {
                DiskServer::Ringfence(_) => guests_socket(place, pid)?,
                DiskServer::Other(_) => place.file("nbd"),
            };
            let name = server.export().to_owned();
            let address = NbdAddress::Unix { path: path.clone(), name, tls: None };
            NbdDisk::open(&address, &options).is_ok().then_some(path)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_counts_round_down_and_invalid_ones_are_refused() {
        assert_eq!([0.0, 2.9, -1.0, f64::NAN].map(whole), [Some(0), Some(2), None, None]);
    }
}

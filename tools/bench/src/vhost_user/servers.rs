//! Programs that serve the disk of a case.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::ensure;
use ringfence_block::storage::file::CacheMode;
use ringfence_sandbox::spawn::THIS_PROGRAM;

use super::args::{DiskPeer, Way};
use crate::processes::{Server, SocketDirectory, cpu_ns};

/// Time limit for a server to offer its socket.
const UP_WITHIN: Duration = Duration::from_secs(20);

/// Program that serves the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Program {
    Ringfence,
    Other(DiskPeer),
}

impl Program {
    pub(super) fn name(self) -> &'static str {
        match self {
            Program::Ringfence => "ringfence",
            Program::Other(DiskPeer::QemuStorageDaemon) => "qemu-storage-daemon",
            Program::Other(DiskPeer::QemuStorageDaemonUring) => "qemu-storage-daemon-uring",
        }
    }

    /// Returns the command that serves a file at a socket.
    fn command(self, way: Way, socket: &Path, file: &Path, cache: CacheMode) -> Command {
        let Program::Other(peer) = self else {
            let mut command = Command::new(THIS_PROGRAM);
            command.arg0("ringfence").args(["vhost-user", "blk", "--socket"]).arg(socket);
            if way == Way::Pool {
                command.args(["--require-pool", "auto"]);
            }
            command.arg("--disk").arg(format!("{},cache={cache}", file.display()));
            return command;
        };
        let quoted = |path: &Path| path.display().to_string().replace(',', ",,");
        let direct = if cache.is_direct() { "on" } else { "off" };
        let aio = match peer {
            DiskPeer::QemuStorageDaemon => "threads",
            DiskPeer::QemuStorageDaemonUring => "io_uring",
        };
        let mut command = Command::new("qemu-storage-daemon");
        command.arg("--blockdev").arg(format!(
            "driver=file,node-name=disk,filename={},cache.direct={direct},aio={aio}",
            quoted(file)
        ));
        command.arg("--export").arg(format!(
            "type=vhost-user-blk,id=e,node-name=disk,addr.type=unix,addr.path={},writable=on",
            quoted(socket)
        ));
        command
    }
}

/// Processes of a case, ended on drop: the shield first.
pub(super) struct Servers {
    processes: Vec<Server>,
    /// Socket of the front-end.
    pub(super) socket: PathBuf,
    // Removed after the processes have ended.
    _place: SocketDirectory,
}

impl Servers {
    /// Starts the processes. Returns once the socket exists.
    ///
    /// # Errors
    ///
    /// Returns an error if a program could not be started, or ended.
    pub(super) fn start(
        program: Program,
        way: Way,
        file: &Path,
        cache: CacheMode,
    ) -> anyhow::Result<Servers> {
        let place = SocketDirectory::new()?;
        let mut socket = place.file("backend");
        let command = program.command(way, &socket, file, cache);
        let mut processes = vec![start(program.name(), command, &socket, &place)?];
        if way == Way::Shield {
            let listen = place.file("shield");
            let mut command = Command::new(THIS_PROGRAM);
            command.arg0("ringfence").args(["shield", "--listen"]).arg(&listen);
            command.arg("--backend").arg(&socket);
            processes.insert(0, start("shield", command, &listen, &place)?);
            socket = listen;
        }
        Ok(Servers { processes, socket, _place: place })
    }

    /// Returns an error with the messages of a process that has ended.
    pub(super) fn check(&mut self) -> anyhow::Result<()> {
        self.processes.iter_mut().try_for_each(Server::check)
    }

    /// Returns the CPU time of all processes so far in nanoseconds.
    pub(super) fn cpu_ns(&self) -> anyhow::Result<u64> {
        self.processes.iter().map(|process| cpu_ns(process.pid())).sum()
    }
}

fn start(
    name: &'static str,
    command: Command,
    socket: &Path,
    place: &SocketDirectory,
) -> anyhow::Result<Server> {
    let mut process = Server::start(name, command, place)?;
    let until = Instant::now() + UP_WITHIN;
    while !socket.exists() {
        process.check()?;
        ensure!(Instant::now() < until, "{name} has no socket within {UP_WITHIN:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(process)
}

//! Processes that serve the device of a case.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use ringfence_pasta::session_status;
use ringfence_sandbox::spawn::THIS_PROGRAM;

use crate::processes::{Server, SocketDirectory, cpu_ns, processes, tree_of};

/// Name of the socket for the shield's status.
const SHIELD_STATUS: &str = "shield-status";

/// Processes of a case, ended on drop: the last one first.
pub(super) struct Servers {
    processes: Vec<Server>,
    // Removed after the processes have ended.
    place: SocketDirectory,
}

impl Servers {
    /// Makes the directory of the sockets.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub(super) fn new() -> anyhow::Result<Servers> {
        Ok(Servers { processes: Vec::new(), place: SocketDirectory::new()? })
    }

    /// Returns the path of a socket with this name.
    pub(super) fn socket(&self, name: &str) -> PathBuf {
        self.place.file(name)
    }

    /// Returns a command of this build of `ringfence`, with a runtime directory of its own.
    pub(super) fn ringfence(&self, words: &[&str]) -> Command {
        let mut command = Command::new(THIS_PROGRAM);
        command.arg0("ringfence").args(words).env("XDG_RUNTIME_DIR", self.place.path());
        command
    }

    /// Starts a process. Returns once its sockets exist.
    ///
    /// # Errors
    ///
    /// Returns an error if the program could not be started, or ended.
    pub(super) fn start(
        &mut self,
        name: &'static str,
        command: Command,
        sockets: &[&Path],
    ) -> anyhow::Result<()> {
        let mut process = Server::start(name, command, &self.place)?;
        process.wait_up(|| sockets.iter().all(|socket| socket.exists()).then_some(()))?;
        self.processes.insert(0, process);
        Ok(())
    }

    /// Starts a shield before a backend. Returns its socket.
    ///
    /// # Errors
    ///
    /// As [`Servers::start`].
    pub(super) fn start_shield(&mut self, backend: &Path) -> anyhow::Result<PathBuf> {
        let listen = self.socket("shield");
        let mut command = self.ringfence(&["shield", "--listen"]);
        command.arg(&listen).arg("--backend").arg(backend);
        command.arg("--status-socket").arg(self.socket(SHIELD_STATUS));
        self.start("shield", command, &[&listen])?;
        Ok(listen)
    }

    /// Asks the shield for the number of bytes that it has copied in both directions.
    ///
    /// # Errors
    ///
    /// Returns an error if the shield does not answer.
    pub(super) fn copied_by_shield(&self) -> anyhow::Result<u64> {
        let answer = session_status::ask(&self.socket(SHIELD_STATUS)).context("a shield")?;
        let traffic = answer.context("a shield without a status")?.traffic;
        let counts = ["bytes_to_backend", "bytes_from_backend"];
        Ok(counts.iter().filter_map(|name| traffic.get(*name)).sum())
    }

    /// Returns an error with the messages of a process that has ended.
    pub(super) fn check(&mut self) -> anyhow::Result<()> {
        self.processes.iter_mut().try_for_each(Server::check)
    }

    /// Returns the CPU time of all processes so far in nanoseconds.
    pub(super) fn cpu_ns(&self) -> anyhow::Result<u64> {
        self.processes.iter().map(|process| cpu_ns(process.pid())).sum()
    }

    /// Returns the ids of all processes with their descendants.
    pub(super) fn pids(&self) -> anyhow::Result<Vec<u32>> {
        let all = processes()?;
        Ok(self.processes.iter().flat_map(|process| tree_of(process.pid(), &all)).collect())
    }
}

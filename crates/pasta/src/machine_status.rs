//! State of a virtual machine's network card: messages about the memory that it shares, and `--status-socket`.
//!
//! A client of that socket sends nothing. It receives one JSON object ([`MachineStatus`]) and the end of the stream.
//! `ringfence status --socket` is such a client ([`ask`]). Only the user that started the session can connect. No call
//! of the session blocks: a new socket has room for the object.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use ringfence_uplink_process::messages::MachineState;
use serde::{Deserialize, Serialize};

use super::client::listen;

/// Number of changes that are reported in messages. A client can connect again at once.
const LOGGED_MAX: u32 = 8;
/// Maximum number of clients that are answered in a row.
const CLIENTS_IN_A_ROW: usize = 16;
/// Time limit for an answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Maximum length of an answer in bytes.
const ANSWER_MAX: u64 = 64 << 10;

/// Status of a program for a virtual machine. The field names are those of `ringfence status --json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineStatus {
    pub version: String,
    pub pid: u32,
    pub uptime_seconds: u64,
    /// Name of the program: `passt`, or a command of Ringfence.
    pub program: String,
    /// Name of the link.
    pub link: String,
    #[serde(flatten)]
    pub state: MachineState,
}

impl fmt::Display for MachineStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MachineStatus { version, pid, uptime_seconds, program, link, state } = self;
        writeln!(f, "ringfence {version} {program}, process {pid}, up {uptime_seconds} s")?;
        match &state.memory {
            Some(memory) => writeln!(f, "{link}: {memory}")?,
            None => writeln!(f, "{link}: no memory of a machine")?,
        }
        match state.clients_refused {
            0 => Ok(()),
            count => writeln!(f, "{link}: {count} clients were disconnected: see the log"),
        }
    }
}

/// State of the machine's client as the session knows it.
#[derive(Debug)]
pub struct MachineCard {
    listener: Option<UnixListener>,
    /// Name of the program, and of the process that sees the memory.
    names: [&'static str; 2],
    link: String,
    state: MachineState,
    /// Clients that earlier processes refused.
    earlier: u64,
    since: Instant,
    logged: u32,
}

impl MachineCard {
    /// Creates the state, and the socket at `path` if there is one. A socket that an earlier process left there is
    /// replaced. `names` are those of the program and of the process that sees the memory.
    ///
    /// # Errors
    ///
    /// Returns an error that names the path.
    pub fn new(
        path: Option<&Path>,
        names: [&'static str; 2],
        link: &str,
    ) -> anyhow::Result<MachineCard> {
        let listener = path.map(|path| listen("--status-socket", path)).transpose()?;
        let (link, state, since) = (link.to_owned(), MachineState::default(), Instant::now());
        Ok(MachineCard { listener, names, link, state, earlier: 0, since, logged: 0 })
    }

    /// Takes a report of the process. Returns a message about other memory than before.
    pub fn take(&mut self, mut state: MachineState) -> Option<String> {
        state.clients_refused += self.earlier;
        let other = state.memory.filter(|memory| Some(*memory) != self.state.memory);
        self.state = state;
        let memory = other.filter(|_| self.logged < LOGGED_MAX)?;
        self.logged += 1;
        let [_, process] = self.names;
        Some(match memory.is_pool {
            true => format!("{process} is {memory}"),
            false => format!(
                "warning: {process} {memory}; --require-pool refuses that (docs/vhost-user.md)"
            ),
        })
    }

    /// Counts a client that ended the process. The next process counts from 0 again.
    pub fn restart(&mut self) {
        self.earlier = self.state.clients_refused + 1;
        self.state = MachineState { memory: None, clients_refused: self.earlier };
    }

    /// Returns the descriptors to wait for.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.listener.iter().map(AsFd::as_fd)
    }

    /// Answers clients that have connected.
    pub fn serve(&self) {
        let Some(listener) = &self.listener else { return };
        for _ in 0..CLIENTS_IN_A_ROW {
            let Ok((mut client, _)) = listener.accept() else { return };
            if client.set_nonblocking(true).is_ok()
                && let Ok(text) = serde_json::to_vec(&self.status())
            {
                // A client that has gone needs no answer.
                let _ = client.write_all(&text);
            }
        }
    }

    fn status(&self) -> MachineStatus {
        MachineStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_seconds: self.since.elapsed().as_secs(),
            program: self.names[0].to_owned(),
            link: self.link.clone(),
            state: self.state.clone(),
        }
    }
}

/// Asks the program whose status socket is at `path`. Returns `None` if no such program listens there.
///
/// # Errors
///
/// Returns the system's error, or [`io::ErrorKind::InvalidData`] for an answer of another program.
pub fn ask(path: &Path) -> io::Result<Option<MachineStatus>> {
    // A socket of another kind, and one without a listener, refuse the connection.
    let Ok(client) = UnixStream::connect(path) else { return Ok(None) };
    client.set_read_timeout(Some(ANSWER))?;
    let mut text = Vec::new();
    client.take(ANSWER_MAX).read_to_end(&mut text)?;
    Ok(Some(serde_json::from_slice(&text)?))
}

#[cfg(test)]
mod tests {
    use ringfence_uplink_process::messages::MachineMemory;

    use super::*;

    fn state(memory: Option<(u64, bool)>, clients_refused: u64) -> MachineState {
        let memory = memory.map(|(bytes, is_pool)| MachineMemory { bytes, is_pool });
        MachineState { memory, clients_refused }
    }

    #[test]
    fn status_says_whether_memory_is_lent_and_counts_refused_clients() {
        let status = |state| MachineStatus {
            version: "1.2.3".to_owned(),
            pid: 7,
            uptime_seconds: 9,
            program: "passt".to_owned(),
            link: "vhost-user".to_owned(),
            state,
        };
        let text = |memory, refused| status(state(memory, refused)).to_string();
        let lent = text(Some((64 << 20, true)), 0);
        assert_eq!(lent, "ringfence 1.2.3 passt, process 7, up 9 s\nvhost-user: lent 64 MiB\n");
        let all = text(Some((4 << 30, false)), 3);
        assert!(all.contains("vhost-user: sees all of the machine's memory (4 GiB)\n"), "{all}");
        assert!(all.ends_with("vhost-user: 3 clients were disconnected: see the log\n"), "{all}");
        assert!(text(None, 0).ends_with("vhost-user: no memory of a machine\n"));
    }

    #[test]
    fn client_of_the_socket_gets_the_state_of_now() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("status");
        let mut card =
            MachineCard::new(Some(&path), ["passt", "the uplink's process"], "vhost-user").unwrap();
        card.state = state(Some((4096, true)), 1);
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| ask(&path).unwrap().unwrap());
            while !asked.is_finished() {
                card.serve();
                std::thread::yield_now();
            }
            assert_eq!(asked.join().unwrap().state, card.state);
        });
    }

    #[test]
    fn socket_of_another_kind_or_without_listener_is_not_asked() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::SEQPACKET);
        let other = rustix::net::socket(family, kind, None).unwrap();
        rustix::net::bind(&other, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&other, 1).unwrap();
        assert_eq!(ask(&path).unwrap(), None);
        drop(other);
        assert_eq!(ask(&path).unwrap(), None);
    }
}

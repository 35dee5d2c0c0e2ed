//! Status of a session of `pasta`, `passt`, `vhost-user`, `pool-proxy` or `shield`: messages about the memory that a virtual
//! machine shares, and `--status-socket`.
//!
//! A client of that socket sends nothing. It receives one JSON object ([`SessionStatus`]) and the end of the stream.
//! `ringfence status --socket` and `ringfence top --socket` are such clients ([`ask`]). Only the user that started the
//! session can connect. No call of the session blocks: it asks the uplink for its totals and answers when they come, and a
//! new socket has room for the object. Clients wait three seconds at most for an uplink, which is not trusted; then they get the
//! totals of before, and are told so.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use ringfence_hostnet::text::byte_count;
use ringfence_sandbox::channel::Channel;
use ringfence_uplink_process::messages::MachineState;
use ringfence_uplink_process::orders::UplinkOrder;
use ringfence_uplink_process::totals::{EgressTotals, QueueSentence, UplinkTotals};
use serde::{Deserialize, Serialize};

use super::client::listen;

/// Number of changes that are reported in messages. A client can connect again at once.
const LOGGED_MAX: u32 = 8;
/// Maximum number of clients that wait for an answer. More clients wait in the socket's queue.
const CLIENTS_MAX: usize = 16;
/// Time limit for the uplink's totals.
const TOTALS: Duration = Duration::from_secs(3);
/// Time limit for an answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Maximum length of an answer in bytes.
const ANSWER_MAX: u64 = 64 << 10;

/// Status of a session. The field names are those of `ringfence status --json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionStatus {
    pub version: String,
    /// `pasta`, `passt`, `vhost-user net`, `vhost-user blk`, `pool-proxy` or `shield`.
    pub program: String,
    /// Name of the guest, as in records of egress. Empty if it has none.
    pub guest: String,
    pub pid: u32,
    pub uptime_seconds: u64,
    /// Name of the link.
    pub link: String,
    #[serde(flatten)]
    pub machine: MachineState,
    /// Set if the counters are of now. Otherwise their process has not answered in time, and they are those of its last answer.
    #[serde(default)]
    pub current: bool,
    /// Counters of the uplink, of the card on a switch or TAP, or of the shield, that are not zero.
    pub traffic: BTreeMap<String, u64>,
    /// The same for each queue of the link. Empty if it has one.
    #[serde(default)]
    pub queues: Vec<BTreeMap<String, u64>>,
    /// Totals of the egress policy, if there is one.
    pub egress: Option<EgressTotals>,
}

impl SessionStatus {
    /// Returns the sum of counters of the uplink.
    fn sum(&self, names: &[&str]) -> u64 {
        names.iter().filter_map(|name| self.traffic.get(*name)).sum()
    }
}

impl fmt::Display for SessionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SessionStatus { version, program, guest, pid, uptime_seconds, link, .. } = self;
        write!(f, "ringfence {version} {program}")?;
        if !guest.is_empty() {
            write!(f, " for {guest}")?;
        }
        writeln!(f, ", process {pid}, up {uptime_seconds} s")?;
        match &self.machine.memory {
            Some(memory) => match self.machine.withheld() {
                Some(withheld) => writeln!(f, "{link}: {memory}, {withheld}")?,
                None => writeln!(f, "{link}: {memory}")?,
            },
            None if program != crate::program::PASTA => {
                writeln!(f, "{link}: no memory of a machine")?;
            }
            None => {}
        }
        let carries = [crate::program::PASTA, crate::program::PASST, crate::program::NET];
        if carries.contains(&program.as_str()) {
            let sent = byte_count(self.sum(&["tcp_bytes_in", "udp_bytes_in", "rx_bytes"]));
            let received = byte_count(self.sum(&["tcp_bytes_out", "udp_bytes_out", "tx_bytes"]));
            writeln!(f, "{link}: {sent} sent by the guest, {received} received")?;
            for (number, queue) in self.queues.iter().enumerate() {
                writeln!(f, "{link}: queue {number}: {}", QueueSentence(queue))?;
            }
        }
        if program == crate::program::SHIELD {
            let [requests, waits] = ["requests", "waits_for_pool"].map(|name| self.sum(&[name]));
            let [to, from] = ["bytes_to_backend", "bytes_from_backend"]
                .map(|name| byte_count(self.sum(&[name])));
            writeln!(
                f,
                "{link}: {requests} requests, {waits} waited for the pool; {to} copied to the backend, {from} back"
            )?;
        }
        if let Some(egress) = &self.egress {
            writeln!(f, "egress: {egress}")?;
        }
        if !self.current {
            writeln!(
                f,
                "{link}: its process has not answered in time: these counts are of before, or missing"
            )?;
        }
        match self.machine.clients_refused {
            0 => Ok(()),
            count => writeln!(f, "{link}: {count} clients were disconnected: see the log"),
        }
    }
}

/// Names of a session in its status.
#[derive(Debug)]
pub struct SessionNames {
    pub program: &'static str,
    /// Name of the guest, or empty.
    pub guest: String,
    /// Process that sees the memory of a virtual machine, as in messages.
    pub process: &'static str,
    pub link: &'static str,
}

/// Status of a session as the session knows it, and the clients that ask for it.
#[derive(Debug)]
pub struct StatusServer {
    listener: Option<UnixListener>,
    names: SessionNames,
    machine: MachineState,
    /// Clients that earlier processes refused.
    earlier: u64,
    /// Totals of the uplink that came last.
    totals: UplinkTotals,
    since: Instant,
    logged: u32,
    /// Clients that wait for totals.
    waiting: Vec<UnixStream>,
    /// End of their wait. `None` if the uplink was not asked.
    until: Option<Instant>,
}

impl StatusServer {
    /// Creates the state, and the socket at `path` if there is one. A socket that an earlier process left there is
    /// replaced.
    ///
    /// # Errors
    ///
    /// Returns an error that names the path.
    pub fn new(path: Option<&Path>, names: SessionNames) -> anyhow::Result<StatusServer> {
        Ok(StatusServer {
            listener: path.map(|path| listen("--status-socket", path)).transpose()?,
            names,
            machine: MachineState::default(),
            earlier: 0,
            totals: UplinkTotals::default(),
            since: Instant::now(),
            logged: 0,
            waiting: Vec::new(),
            until: None,
        })
    }

    /// Takes a report of the process that sees the memory. Returns a message about other memory than before.
    pub fn take(&mut self, mut state: MachineState) -> Option<String> {
        state.clients_refused += self.earlier;
        let other = state.memory.filter(|memory| Some(*memory) != self.machine.memory);
        self.machine = state;
        let memory = other.filter(|_| self.logged < LOGGED_MAX)?;
        self.logged += 1;
        let process = self.names.process;
        Some(if memory.is_pool {
            format!("{process} is {memory}")
        } else {
            format!("warning: {process} {memory}; --require-pool refuses that (docs/vhost-user.md)")
        })
    }

    /// Counts a client that ended the process. The next process counts from 0 again.
    pub fn restart(&mut self) {
        self.earlier = self.machine.clients_refused + 1;
        self.machine = MachineState { clients_refused: self.earlier, ..MachineState::default() };
    }

    /// Returns the descriptors to wait for.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let has_room = self.waiting.len() < CLIENTS_MAX;
        self.listener.iter().filter(move |_| has_room).map(AsFd::as_fd)
    }

    /// Returns the time at which the clients are answered without new totals.
    pub fn deadline(&self) -> Option<Instant> {
        self.until
    }

    /// Accepts clients and asks the uplink, if there is one, for its totals. Answers clients that have waited long enough.
    pub fn serve(&mut self, uplink: Option<&Channel>) {
        let ask = |uplink: &Channel| uplink.send_now(&UplinkOrder::Totals, &[]).is_ok();
        self.serve_by(uplink.map(|uplink| move || ask(uplink)));
    }

    /// Serves clients as [`StatusServer::serve`] does. `ask` asks a process for its totals, and returns `false` if it could
    /// not.
    pub fn serve_by(&mut self, ask: Option<impl FnOnce() -> bool>) {
        let now = Instant::now();
        if self.until.is_some_and(|until| until <= now) {
            self.answer(false);
        }
        let Some(listener) = &self.listener else { return };
        while self.waiting.len() < CLIENTS_MAX {
            let Ok((client, _)) = listener.accept() else { break };
            if client.set_nonblocking(true).is_ok() {
                self.waiting.push(client);
            }
        }
        if self.waiting.is_empty() || self.until.is_some() {
            return;
        }
        match ask.map(|ask| ask()) {
            Some(true) => self.until = Some(now + TOTALS),
            Some(false) => self.answer(false),
            // No process counts anything.
            None => self.answer(true),
        }
    }

    /// Takes the totals of the uplink, and answers the clients that wait for them.
    pub fn take_totals(&mut self, totals: UplinkTotals) {
        self.totals = totals;
        self.answer(true);
    }

    /// Answers the clients that wait. `current` is set if the totals are of now.
    fn answer(&mut self, current: bool) {
        self.until = None;
        let waiting = std::mem::take(&mut self.waiting);
        let Ok(text) = serde_json::to_vec(&self.status(current)) else { return };
        for mut client in waiting {
            // A client that has gone needs no answer.
            let _ = client.write_all(&text);
        }
    }

    fn status(&self, current: bool) -> SessionStatus {
        SessionStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            program: self.names.program.to_owned(),
            guest: self.names.guest.clone(),
            pid: std::process::id(),
            uptime_seconds: self.since.elapsed().as_secs(),
            link: self.names.link.to_owned(),
            machine: self.machine.clone(),
            current,
            traffic: self.totals.traffic.clone(),
            queues: self.totals.queues.clone(),
            egress: self.totals.egress,
        }
    }
}

/// Asks the program whose status socket is at `path`. Returns `None` if no such program listens there.
///
/// # Errors
///
/// Returns the system's error, or [`io::ErrorKind::InvalidData`] for an answer of another program.
pub fn ask(path: &Path) -> io::Result<Option<SessionStatus>> {
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
        MachineState { memory, clients_refused, ..MachineState::default() }
    }

    fn names() -> SessionNames {
        let process = "the uplink's process";
        SessionNames { program: "passt", guest: "vm".to_owned(), process, link: "vhost-user" }
    }

    fn totals(bytes: u64) -> UplinkTotals {
        let traffic = BTreeMap::from([("tcp_bytes_in".to_owned(), bytes)]);
        UplinkTotals { traffic, ..UplinkTotals::default() }
    }

    #[test]
    fn status_says_whether_memory_is_lent_and_counts_refused_clients() {
        let text = |memory, refused| {
            let mut server = StatusServer::new(None, names()).unwrap();
            server.machine = state(memory, refused);
            server.take_totals(totals(7));
            server.status(true).to_string()
        };
        let lent = text(Some((64 << 20, true)), 0);
        assert!(lent.contains(" passt for vm, process "), "{lent}");
        let end = "vhost-user: lent 64 MiB\nvhost-user: 7 B sent by the guest, 0 B received\n";
        assert!(lent.ends_with(end), "{lent}");
        let all = text(Some((4 << 30, false)), 3);
        assert!(all.contains("vhost-user: sees all of the machine's memory (4 GiB)\n"), "{all}");
        assert!(all.ends_with("vhost-user: 3 clients were disconnected: see the log\n"), "{all}");
        assert!(text(None, 0).contains("vhost-user: no memory of a machine\n"));
        let mut server = StatusServer::new(None, names()).unwrap();
        server.machine =
            MachineState { withheld_bytes: 4 << 30, ..state(Some((64 << 20, true)), 0) };
        let withheld = server.status(true).to_string();
        assert!(withheld.contains("vhost-user: lent 64 MiB, 4 GiB withheld\n"), "{withheld}");
    }

    #[test]
    fn status_of_a_shield_has_its_copies_and_waits() {
        let mut server =
            StatusServer::new(None, SessionNames { program: "shield", ..names() }).unwrap();
        let counts = [
            ("requests", 5),
            ("bytes_to_backend", 4096),
            ("bytes_from_backend", 7),
            ("waits_for_pool", 2),
        ];
        let traffic = counts.map(|(name, count)| (name.to_owned(), count)).into();
        server.take_totals(UplinkTotals { traffic, ..UplinkTotals::default() });
        let text = server.status(true).to_string();
        let line = "vhost-user: 5 requests, 2 waited for the pool; 4096 B copied to the backend, 7 B back\n";
        assert!(text.ends_with(line), "{text}");
    }

    /// Asks a server at its socket, while `serve` runs its part of the session's loop.
    fn asked(
        server: &mut StatusServer,
        path: &Path,
        mut serve: impl FnMut(&mut StatusServer),
    ) -> SessionStatus {
        std::thread::scope(|scope| {
            let client = scope.spawn(|| ask(path).unwrap().unwrap());
            while !client.is_finished() {
                serve(server);
                std::thread::yield_now();
            }
            client.join().unwrap()
        })
    }

    #[test]
    fn client_of_the_socket_gets_the_state_and_the_totals_of_now() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("status");
        let mut server = StatusServer::new(Some(&path), names()).unwrap();
        server.machine = state(Some((4096, true)), 1);
        let (near, far) = Channel::pair().unwrap();
        let found = asked(&mut server, &path, |server| {
            server.serve(Some(&near));
            if let Some((UplinkOrder::Totals, _)) = far.try_receive().unwrap() {
                server.take_totals(totals(9));
            }
        });
        assert!(found.current);
        assert_eq!((&found.machine, found.traffic), (&server.machine, totals(9).traffic));
    }

    #[test]
    fn client_of_the_socket_gets_the_last_totals_and_is_told_so_if_the_uplink_does_not_answer() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("status");
        let mut server = StatusServer::new(Some(&path), names()).unwrap();
        server.take_totals(totals(5));
        let (near, far) = Channel::pair().unwrap();
        let found = asked(&mut server, &path, |server| server.serve(Some(&near)));
        assert_eq!((found.current, &found.traffic), (false, &totals(5).traffic));
        assert!(found.to_string().contains("has not answered in time"), "{found}");
        assert!(matches!(far.try_receive(), Ok(Some((UplinkOrder::Totals, _)))), "asked once");
        assert!(matches!(far.try_receive::<UplinkOrder>(), Ok(None)));
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

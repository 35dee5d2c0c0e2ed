//! Driver of two `dpdk-testpmd` processes through their prompts.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use super::ForwardingPeer;
use crate::params::{self, Direction};
use ringfence_sandbox::owned_child::OwnedChild;

pub(crate) const PROGRAM: &str = "dpdk-testpmd";
pub(crate) const MISSING: &str = "`dpdk-testpmd` is not installed (Debian: dpdk-dev)";
/// Time limit for the start, an answer, and the exit.
const PATIENCE: Duration = Duration::from_secs(20);
const GONE_WITHIN: Duration = Duration::from_secs(3);
/// Time between the start of the stream and the measurement.
const WARM_UP: Duration = Duration::from_millis(700);
/// Memory of each process in MiB, with its packets; more makes no difference.
const MEMORY: u64 = 128;
const BUFFERS: &str = "--total-num-mbufs=16384";
/// Number of final output lines that an error message quotes.
const TAIL_LINES: usize = 3;

/// Measures the packet rate of the receiver. Returns it with the kind of memory.
pub(super) fn run(
    peer: ForwardingPeer,
    direction: Direction,
    size: u32,
    pages: params::Pages,
    cores: [usize; 2],
    length: Duration,
) -> anyhow::Result<(f64, &'static str)> {
    let directory = Directory::new()?;
    let socket = directory.0.join("socket");
    let pages = match pages {
        params::Pages::Auto => Pages::find(),
        params::Pages::Small => Pages::Ordinary,
    };
    let [back, front] = devices(peer, &socket);
    let (back_mode, front_mode) = match direction {
        Direction::Tx => ("rxonly", "txonly"),
        Direction::Rx => ("txonly", "rxonly"),
    };
    let [ours, theirs] = cores;
    let mut back =
        Testpmd::start(&pages, &back, Cores { forwarding: ours, other: theirs }, back_mode, size)?;
    back.wait_for(&socket)?;
    let front = Testpmd::start(
        &pages,
        &front,
        Cores { forwarding: theirs, other: ours },
        front_mode,
        size,
    )?;
    let (mut receiver, mut sender) = match direction {
        Direction::Tx => (back, front),
        Direction::Rx => (front, back),
    };
    receiver.say("start")?;
    sender.say("start")?;
    // Both answer once they are up. The first rate covers an undefined interval.
    sender.rate()?;
    receiver.rate()?;
    std::thread::sleep(WARM_UP);
    receiver.rate()?;
    std::thread::sleep(length);
    let pps = receiver.rate()?;
    if pps == 0.0 {
        bail!("no packet arrived between two testpmd: {}", sender.output_tail());
    }
    // The owner of the memory stops first; otherwise the other process reports an error.
    let (first, second) = match direction {
        Direction::Tx => (sender, receiver),
        Direction::Rx => (receiver, sender),
    };
    first.end();
    second.end();
    Ok((pps, pages.name()))
}

/// Returns the virtual devices of both sides; the first one listens.
fn devices(peer: ForwardingPeer, socket: &Path) -> [String; 2] {
    let socket = socket.display();
    match peer {
        ForwardingPeer::Memif => ["server", "client"]
            .map(|role| format!("net_memif0,role={role},id=0,socket={socket},socket-abstract=no")),
        ForwardingPeer::VhostUser => [
            format!("net_vhost0,iface={socket},queues=1"),
            format!("net_virtio_user0,path={socket},queues=1"),
        ],
    }
}

/// Kind of memory in use.
enum Pages {
    Huge,
    Ordinary,
}

impl Pages {
    /// Chooses huge pages if enough of them are free for two processes.
    fn find() -> Pages {
        // An unreadable file counts as no huge pages.
        let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0)
        };
        let free_kib = field("HugePages_Free:").saturating_mul(field("Hugepagesize:"));
        if free_kib >= 2 * (MEMORY << 10) { Pages::Huge } else { Pages::Ordinary }
    }

    fn name(&self) -> &'static str {
        match self {
            Pages::Huge => params::HUGE_PAGES,
            Pages::Ordinary => params::ORDINARY_PAGES,
        }
    }

    fn arguments(&self) -> &'static [&'static str] {
        match self {
            // A vhost-user guest shares few regions, so its pages must be in one file.
            Pages::Huge => &["--in-memory", "--single-file-segments"],
            Pages::Ordinary => &["--no-huge", "--no-shconf"],
        }
    }
}

/// Process of testpmd, ended on drop.
struct Testpmd {
    child: OwnedChild,
    prompt: ChildStdin,
    said: Receiver<String>,
    last: Vec<String>,
}

/// CPU cores of a testpmd process.
#[derive(Clone, Copy)]
struct Cores {
    /// Core of the thread that forwards.
    forwarding: usize,
    /// Core of its main thread.
    other: usize,
}

impl Testpmd {
    /// Starts a process whose polling thread is pinned to the first core. The mostly sleeping thread of
    /// the prompt is pinned to the other one.
    fn start(
        pages: &Pages,
        device: &str,
        cores: Cores,
        mode: &str,
        size: u32,
    ) -> anyhow::Result<Testpmd> {
        ensure!(is_installed(), MISSING);
        // Without line buffering the answers would stay in the process's buffer.
        let mut command = Command::new("stdbuf");
        command.args(["--output=L", PROGRAM]);
        command.args([
            "--lcores",
            &format!("0@{},1@{}", cores.other, cores.forwarding),
            "-m",
            &MEMORY.to_string(),
        ]);
        command.args(pages.arguments()).args(["--no-pci", "--no-telemetry", "--iova-mode=va"]);
        command.args(["--vdev", device, "--", "--interactive", "--nb-cores=1", BUFFERS]);
        command.args([format!("--forward-mode={mode}"), format!("--txpkts={size}")]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().context("starting stdbuf, and dpdk-testpmd by it")?;
        let prompt = child.stdin.take().context("testpmd without a prompt")?;
        let output = child.stdout.take().context("testpmd without output")?;
        let (tell, said) = channel();
        std::thread::Builder::new().name("testpmd".to_owned()).spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    return;
                }
            }
        })?;
        Ok(Testpmd { child: OwnedChild(child), prompt, said, last: Vec::new() })
    }

    fn say(&mut self, command: &str) -> anyhow::Result<()> {
        if writeln!(self.prompt, "{command}").and_then(|()| self.prompt.flush()).is_err() {
            bail!("testpmd ended: {}", self.output_tail());
        }
        Ok(())
    }

    /// Returns the packets a second received since the last query.
    fn rate(&mut self) -> anyhow::Result<f64> {
        self.say("show port stats 0")?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.said.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    if let Some(rate) = parse_rate(&line) {
                        return Ok(rate);
                    }
                    self.remember(line);
                }
                Err(RecvTimeoutError::Timeout) => bail!("testpmd did not answer in {PATIENCE:?}"),
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("testpmd ended: {}", self.output_tail())
                }
            }
        }
    }

    /// Waits until the process listens.
    fn wait_for(&mut self, socket: &Path) -> anyhow::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !socket.exists() {
            if Instant::now() >= deadline || !matches!(self.child.try_wait(), Ok(None)) {
                bail!("testpmd does not listen: {}", self.output_tail());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn remember(&mut self, line: String) {
        if !line.trim().is_empty() {
            self.last.push(line.trim().to_owned());
            let excess = self.last.len().saturating_sub(TAIL_LINES);
            self.last.drain(..excess);
        }
    }

    fn output_tail(&mut self) -> String {
        while let Ok(line) = self.said.recv_timeout(Duration::from_millis(200)) {
            self.remember(line);
        }
        self.last.join(" / ")
    }

    /// Lets the process exit by itself, so that it removes its files.
    fn end(mut self) {
        // A process that ignores the command is killed on drop.
        let _ = self.say("stop").and_then(|()| self.say("quit"));
        let deadline = Instant::now() + GONE_WITHIN;
        while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Returns `true` if the program is in the PATH.
pub(crate) fn is_installed() -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths).any(|directory| directory.join(PROGRAM).is_file())
}

/// Parses the rate in a line of statistics: `  Rx-pps:     51627785          Rx-bps:  26433426360`.
fn parse_rate(line: &str) -> Option<f64> {
    line.trim().strip_prefix("Rx-pps:")?.split_whitespace().next()?.parse().ok()
}

/// Directory of the socket, removed on drop.
struct Directory(PathBuf);

impl Directory {
    fn new() -> anyhow::Result<Directory> {
        // The name suffices, since one pair runs at a time.
        let path = std::env::temp_dir().join(format!("ringfence-peer-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Directory(path))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // The directory lies among temporary files; the system removes leftovers.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_parses_from_statistics_line() {
        let line = "  Rx-pps:     51627785          Rx-bps:  26433426360";
        assert_eq!(parse_rate(line), Some(51_627_785.0));
        for line in ["  Tx-pps: 5", "Rx-pps:", "  RX-packets: 7  RX-missed: 0", ""] {
            assert_eq!(parse_rate(line), None, "{line}");
        }
    }

    #[test]
    fn device_arguments_name_one_socket() {
        for peer in [ForwardingPeer::Memif, ForwardingPeer::VhostUser] {
            let [back, front] = devices(peer, Path::new("/x/socket"));
            assert!(back.contains("=/x/socket") && front.contains("=/x/socket"), "{back} {front}");
        }
    }
}

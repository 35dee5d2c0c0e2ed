//! Two `dpdk-testpmd`, driven by their prompts.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ringfence_sandbox::owned_child::OwnedChild;

use super::Peer;
use crate::args::Direction;

const PROGRAM: &str = "dpdk-testpmd";
const MISSING: &str = "`dpdk-testpmd` is not installed (Debian: dpdk-dev)";
/// How long either may take to start, to answer, to end.
const PATIENCE: Duration = Duration::from_secs(20);
const GONE_WITHIN: Duration = Duration::from_secs(3);
/// From when packets flow until they are counted.
const WARM_UP: Duration = Duration::from_millis(700);
/// Mebibytes of each process, and packets that they hold: more of either makes no difference.
const MEMORY: u64 = 128;
const BUFFERS: &str = "--total-num-mbufs=16384";
/// The last lines of its output, which say why it ended.
const LAST_WORDS: usize = 3;

/// Packets a second that arrived, and the kind of memory.
pub(super) fn run(
    peer: Peer,
    direction: Direction,
    size: u32,
    cores: [usize; 2],
    length: Duration,
) -> anyhow::Result<(f64, &'static str)> {
    let directory = Directory::new()?;
    let socket = directory.0.join("socket");
    let pages = Pages::find();
    let [back, front] = devices(peer, &socket);
    let (back_mode, front_mode) = match direction {
        Direction::Tx => ("rxonly", "txonly"),
        Direction::Rx => ("txonly", "rxonly"),
    };
    let [ours, theirs] = cores;
    let mut back = Testpmd::start(&pages, &back, (ours, theirs), (back_mode, size))?;
    back.wait_for(&socket)?;
    let front = Testpmd::start(&pages, &front, (theirs, ours), (front_mode, size))?;
    let (mut receiver, mut sender) = match direction {
        Direction::Tx => (back, front),
        Direction::Rx => (front, back),
    };
    receiver.say("start")?;
    sender.say("start")?;
    // Either answers once it is up. A first rate is over no particular time.
    sender.rate()?;
    receiver.rate()?;
    std::thread::sleep(WARM_UP);
    receiver.rate()?;
    std::thread::sleep(length);
    let pps = receiver.rate()?;
    if pps == 0.0 {
        bail!("no packet arrived between two testpmd: {}", sender.last_words());
    }
    // The one that owns the memory goes first; the other would complain.
    let (first, second) = match direction {
        Direction::Tx => (sender, receiver),
        Direction::Rx => (receiver, sender),
    };
    first.end();
    second.end();
    Ok((pps, pages.name()))
}

/// The virtual devices of both sides; the first one listens.
fn devices(peer: Peer, socket: &Path) -> [String; 2] {
    let socket = socket.display();
    match peer {
        Peer::Memif => ["server", "client"]
            .map(|role| format!("net_memif0,role={role},id=0,socket={socket},socket-abstract=no")),
        Peer::VhostUser => [
            format!("net_vhost0,iface={socket},queues=1"),
            format!("net_virtio_user0,path={socket},queues=1"),
        ],
    }
}

/// The memory they use.
enum Pages {
    Huge,
    Ordinary,
}

impl Pages {
    /// Huge pages, if enough of them are free for two processes.
    fn find() -> Pages {
        // Where it cannot be read, there are none.
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
            Pages::Huge => "huge pages",
            Pages::Ordinary => "ordinary pages",
        }
    }

    fn arguments(&self) -> &'static [&'static str] {
        match self {
            // A guest of vhost-user shares few regions: so its pages must be in one file.
            Pages::Huge => &["--in-memory", "--single-file-segments"],
            Pages::Ordinary => &["--no-huge", "--no-shconf"],
        }
    }
}

/// One process; ended when this is dropped.
struct Testpmd {
    child: OwnedChild,
    prompt: ChildStdin,
    said: Receiver<String>,
    last: Vec<String>,
}

impl Testpmd {
    /// Its polling thread stays on the first core. The thread that reads the prompt sleeps; it
    /// stays on the other one.
    fn start(
        pages: &Pages,
        device: &str,
        (core, other): (usize, usize),
        (mode, size): (&str, u32),
    ) -> anyhow::Result<Testpmd> {
        ensure!(installed(), MISSING);
        // Its answers would stay in its buffer until it ends.
        let mut command = Command::new("stdbuf");
        command.args(["--output=L", PROGRAM]);
        command.args(["--lcores", &format!("0@{other},1@{core}"), "-m", &MEMORY.to_string()]);
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
            bail!("testpmd ended: {}", self.last_words());
        }
        Ok(())
    }

    /// Packets a second that it received since it was asked last.
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
                    bail!("testpmd ended: {}", self.last_words())
                }
            }
        }
    }

    /// Waits until it listens.
    fn wait_for(&mut self, socket: &Path) -> anyhow::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !socket.exists() {
            if Instant::now() >= deadline || !matches!(self.child.try_wait(), Ok(None)) {
                bail!("testpmd does not listen: {}", self.last_words());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn remember(&mut self, line: String) {
        if !line.trim().is_empty() {
            self.last.push(line.trim().to_owned());
            let excess = self.last.len().saturating_sub(LAST_WORDS);
            self.last.drain(..excess);
        }
    }

    fn last_words(&mut self) -> String {
        while let Ok(line) = self.said.recv_timeout(Duration::from_millis(200)) {
            self.remember(line);
        }
        self.last.join(" / ")
    }

    /// Lets it end by itself, so that it leaves nothing behind.
    fn end(mut self) {
        // If it does not listen any more, it is ended when this is dropped.
        let _ = self.say("stop").and_then(|()| self.say("quit"));
        let deadline = Instant::now() + GONE_WITHIN;
        while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn installed() -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths).any(|directory| directory.join(PROGRAM).is_file())
}

/// The rate in a line of its statistics: `  Rx-pps:     51627785          Rx-bps:  26433426360`.
fn parse_rate(line: &str) -> Option<f64> {
    line.trim().strip_prefix("Rx-pps:")?.split_whitespace().next()?.parse().ok()
}

/// Where the socket is.
struct Directory(PathBuf);

impl Directory {
    fn new() -> anyhow::Result<Directory> {
        // One pair at a time.
        let path = std::env::temp_dir().join(format!("ringfence-peer-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Directory(path))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // It lies where temporary files do; what stays is swept away with them.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_from_its_statistics() {
        let line = "  Rx-pps:     51627785          Rx-bps:  26433426360";
        assert_eq!(parse_rate(line), Some(51_627_785.0));
        for line in ["  Tx-pps: 5", "Rx-pps:", "  RX-packets: 7  RX-missed: 0", ""] {
            assert_eq!(parse_rate(line), None, "{line}");
        }
    }

    #[test]
    fn both_sides_meet_at_one_socket() {
        for peer in [Peer::Memif, Peer::VhostUser] {
            let [back, front] = devices(peer, Path::new("/x/socket"));
            assert!(back.contains("=/x/socket") && front.contains("=/x/socket"), "{back} {front}");
        }
    }
}

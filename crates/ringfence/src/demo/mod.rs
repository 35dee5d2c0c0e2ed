//! `ringfence demo`: a switch, two guests and a TCP transfer in each access mode.

pub mod peer;

use std::io::{self, BufRead, BufReader, IsTerminal, Write};
use std::process::{ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ringfence_access::Mode;
use ringfence_sandbox::STATUS_FAILED;
use ringfence_sandbox::channel::Channel;
use ringfence_sandbox::owned_child::OwnedChild;

use crate::launch::guest_on;
use peer::{LISTENING, Transfer};
use ringfence_driver::proof;
use ringfence_driver::switchboard::{DriverStats, FromDriver, ToDriver};
use ringfence_hostnet::causes::causes;
use ringfence_hostnet::out::{Out, is_closed};
use ringfence_hostnet::runtime_dir::RuntimeDir;

/// Duration of each transfer in seconds.
const SECONDS: u64 = 2;
/// Time limit for the driver domain: its start, and each answer.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Measurements of one access mode.
struct Row {
    mode: Mode,
    transfer: Transfer,
    frames: u64,
    grant_operations: u64,
    syscalls: u64,
}

/// Runs the demonstration. Returns the exit status.
pub fn main() -> u8 {
    match show() {
        Ok(()) => 0,
        Err(error) if is_closed(&error) => 0,
        Err(error) => {
            eprintln!("ringfence: demo: {}", causes(&error));
            STATUS_FAILED
        }
    }
}

fn show() -> anyhow::Result<()> {
    writeln!(
        Out,
        "A driver domain, two guests on its switch, one TCP stream between their kernels"
    )?;
    writeln!(Out, "(MTU 1500, {SECONDS} s in each mode; every byte is checked).\n")?;
    let mut rows = Vec::new();
    for mode in Mode::NETWORK {
        progress(&format!("{mode}: transferring ..."));
        rows.push(measure(mode).with_context(|| format!("mode {mode}"))?);
        progress("");
    }
    Ok(print_table(&rows)?)
}

/// Shows a line on a terminal that the next one replaces.
fn progress(text: &str) {
    if io::stderr().is_terminal() {
        eprint!("\r\x1b[K{text}");
    }
}

/// Starts a guest. It lives until its standard input is closed, if `role` reads that.
fn guest(switch: &str, mode: Mode, name: &str, role: &[&str]) -> anyhow::Result<OwnedChild> {
    let program = std::env::current_exe().context("finding this program's file")?;
    let child = Command::new(&program)
        .args(guest_on(switch, mode.name()))
        .args(["--name", name, "--"])
        .arg(&program)
        .args(["internal", "demo-peer"])
        .args(role)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting a guest")?;
    Ok(OwnedChild(child))
}

fn measure(mode: Mode) -> anyhow::Result<Row> {
    let switch = format!("demo-{}-{mode}", std::process::id());
    let mut receiver = Receiver::start(&switch, mode)?;
    let control = control_connection(&switch)?;
    let before = stats(&control)?;
    let sender = guest(&switch, mode, "sender", &["send", "receiver", &SECONDS.to_string()])?;
    let transfer = receiver.transfer()?;
    // The driver domain ends with its last guest, so the receiver stays until the counters are read.
    let after = stats(&control)?;
    receiver.end()?;
    drop(sender);
    let path = |s: &DriverStats, name: &str| s.path.get(name).copied().unwrap_or(0);
    let delta = |name: &str| path(&after, name).saturating_sub(path(&before, name));
    let frames = |s: &DriverStats| s.ports.values().filter_map(|p| p.get("rx_frames")).sum::<u64>();
    let grant_operations =
        ["grant_maps", "grant_unmaps", "grant_copies"].into_iter().map(delta).sum();
    Ok(Row {
        mode,
        transfer,
        frames: frames(&after).saturating_sub(frames(&before)).max(1),
        grant_operations,
        syscalls: delta("syscalls"),
    })
}

/// Connects to the driver domain of a switch. Waits until there is one.
pub fn control_connection(switch: &str) -> anyhow::Result<Channel> {
    let directory = RuntimeDir::open()?;
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        if let Some(socket) = directory.connect(switch)? {
            let channel = Channel::from_fd(socket);
            proof::introduce(&channel)?;
            return Ok(channel);
        }
        if Instant::now() >= deadline {
            bail!(
                "the driver domain did not come up within {START_TIMEOUT:?}; try `ringfence run -v -- true`"
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Requests the driver domain's counters.
pub fn stats(control: &Channel) -> anyhow::Result<DriverStats> {
    control.send(&ToDriver::Stats, &[])?;
    match control.receive_within::<FromDriver>(START_TIMEOUT)?.0 {
        FromDriver::Stats(stats) => Ok(*stats),
        other => bail!("the driver domain answered {other:?}"),
    }
}

/// Guest that receives the stream. It runs until [`Receiver::end`].
struct Receiver {
    guest: OwnedChild,
    reports: BufReader<ChildStdout>,
}

impl Receiver {
    /// Starts the receiver and waits until it listens.
    fn start(switch: &str, mode: Mode) -> anyhow::Result<Receiver> {
        let mut guest = guest(switch, mode, "receiver", &["receive"])?;
        let reports = BufReader::new(guest.stdout.take().context("a guest without output")?);
        let mut receiver = Receiver { guest, reports };
        match receiver.line()?.as_str() {
            LISTENING => Ok(receiver),
            other => bail!("the receiver reported {other:?}"),
        }
    }

    /// Waits for the end of the transfer.
    fn transfer(&mut self) -> anyhow::Result<Transfer> {
        let report = self.line()?;
        serde_json::from_str(&report).with_context(|| format!("the receiver reported {report:?}"))
    }

    /// Ends the guest by closing its standard input, and checks its status.
    fn end(mut self) -> anyhow::Result<()> {
        drop(self.guest.stdin.take());
        let status = self.guest.wait()?;
        if !status.success() {
            bail!("the receiver ended with {status}");
        }
        Ok(())
    }

    /// Returns the next line that the guest prints.
    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        if self.reports.read_line(&mut line)? == 0 {
            bail!("the receiver ended with {}", self.guest.wait()?);
        }
        Ok(line.trim_end().to_owned())
    }
}

fn print_table(rows: &[Row]) -> io::Result<()> {
    writeln!(
        Out,
        "{:<8} {:>10} {:>12} {:>14} {:>16}   meaning",
        "mode", "Gbit/s", "packets/s", "grant ops/pkt", "syscalls/pkt"
    )?;
    for row in rows {
        #[expect(clippy::cast_precision_loss, reason = "ratios for people")]
        let per_packet = |n: u64| n as f64 / row.frames as f64;
        #[expect(clippy::cast_precision_loss, reason = "ratios for people")]
        let packets = row.frames as f64 / row.transfer.seconds;
        writeln!(
            Out,
            "{:<8} {:>10.2} {:>12.0} {:>14.2} {:>16.2}   {}",
            row.mode.name(),
            row.transfer.gigabits_per_second(),
            packets,
            per_packet(row.grant_operations),
            per_packet(row.syscalls),
            row.mode.meaning(),
        )?;
    }
    writeln!(
        Out,
        "\nPackets count both directions; grant operations and system calls are the driver domain's \
         data path.\nNext: `ringfence run` for a shell with a network, `ringfence run --help` for more."
    )
}

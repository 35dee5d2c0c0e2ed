//! Processor modes: samples how much of a machine's time its hypervisor, its kernels and its programs have.
//!
//! A guest cannot tell how long the hypervisor worked for it. The emulator can: a thread asks QEMU's monitor for the
//! registers of all processors while a file `sampling` is in the directory that the machine mounts. Once the scenario has
//! removed the file, the thread writes the result to `sampled`, in ms by mode as `NAME=COUNT`. The helper `modes_of` of
//! `vm/xen/perf.sh` does both. Only machines of a scenario with `# sampled: modes` have a monitor.
//!
//! A sample is one of some hundred a second, so a share has an error of about one in a hundred. The monitor stops no
//! processor: an instruction pointer may be a little old, but only within one mode, because QEMU stores it at each change.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time between two samples.
const INTERVAL: Duration = Duration::from_millis(5);
/// Time between two looks for the file that starts a series.
const REST: Duration = Duration::from_millis(50);
/// Addresses of Xen's code on x86-64.
const HYPERVISOR: std::ops::Range<u64> = 0xffff_82d0_0000_0000..0xffff_8300_0000_0000;

/// Numbers of samples in each mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Modes {
    hypervisor: u64,
    /// Kernels of all domains. That of a PV domain has no more privilege than its programs, but other addresses.
    kernel: u64,
    user: u64,
    idle: u64,
}

impl Modes {
    /// Adds the state of each processor in the monitor's answer to `info registers -a`.
    fn add(&mut self, registers: &str) {
        let number = |line: &str, name: &str| {
            let text = line.split_once(name)?.1;
            u64::from_str_radix(text.split_whitespace().next()?, 16).ok()
        };
        for line in registers.lines() {
            let (Some(at), Some(halted)) = (number(line, "RIP="), number(line, "HLT=")) else {
                continue;
            };
            match at {
                _ if halted != 0 => self.idle += 1,
                at if HYPERVISOR.contains(&at) => self.hypervisor += 1,
                at if at >> 63 != 0 => self.kernel += 1,
                _ => self.user += 1,
            }
        }
    }

    /// Formats the samples as parts of `time` on each of the processors.
    fn text(self, rounds: u64, time: Duration) -> String {
        let rounds = u128::from(rounds.max(1));
        let ms = |samples: u64| u128::from(samples) * time.as_millis() / rounds;
        let Modes { hypervisor, kernel, user, idle } = self;
        format!(
            "machine_hypervisor_ms={} machine_kernel_ms={} machine_user_ms={} machine_idle_ms={}\n",
            ms(hypervisor),
            ms(kernel),
            ms(user),
            ms(idle)
        )
    }
}

/// Connection to a machine's monitor, which speaks QMP.
struct Monitor {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl Monitor {
    /// Connects as soon as the machine has made the socket, and removes its name.
    fn connect(socket: &Path) -> Option<Monitor> {
        let connected = (0..200).find_map(|_| {
            std::thread::sleep(REST);
            UnixStream::connect(socket).ok()
        })?;
        // The connection stays.
        let _ = std::fs::remove_file(socket);
        let reader = BufReader::new(connected.try_clone().ok()?);
        let mut monitor = Monitor { reader, writer: connected };
        monitor.ask(r#"{"execute":"qmp_capabilities"}"#)?;
        Some(monitor)
    }

    /// Sends a command and returns the result. Skips the greeting and events.
    fn ask(&mut self, command: &str) -> Option<serde_json::Value> {
        writeln!(self.writer, "{command}").ok()?;
        let mut line = String::new();
        loop {
            line.clear();
            if self.reader.read_line(&mut line).ok()? == 0 {
                return None;
            }
            let mut answer: serde_json::Value = serde_json::from_str(&line).ok()?;
            if let Some(result) = answer.get_mut("return") {
                return Some(result.take());
            }
        }
    }

    fn registers(&mut self) -> Option<String> {
        let command = r#"{"execute":"human-monitor-command","arguments":{"command-line":"info registers -a"}}"#;
        self.ask(command)?.as_str().map(str::to_owned)
    }
}

/// Returns a path for the socket of the monitor of the machine with this directory. Paths of sockets must be short, so it is
/// not in the directory.
pub(crate) fn socket(share: &Path) -> PathBuf {
    let name = share.file_name().unwrap_or_default().to_string_lossy();
    std::env::temp_dir().join(format!("ringfence-vm-{}-{name}", std::process::id()))
}

/// Starts the thread that samples a machine whose monitor is at `socket`. It ends with the machine.
pub(crate) fn watch(socket: PathBuf, share: PathBuf) {
    std::thread::spawn(move || {
        let Some(mut monitor) = Monitor::connect(&socket) else { return };
        while sample_if_wanted(&mut monitor, &share).is_some() {
            std::thread::sleep(REST);
        }
    });
}

/// Measures a series if the scenario wants one. Returns `None` if the machine ended.
fn sample_if_wanted(monitor: &mut Monitor, share: &Path) -> Option<()> {
    let file = share.join("sampling");
    if !file.exists() {
        // The answer is of no interest; none means that the machine ended.
        return monitor.ask(r#"{"execute":"query-status"}"#).map(drop);
    }
    let text = series(monitor, &file)?;
    // Renamed, so that the scenario sees all of it or nothing.
    std::fs::write(share.join("sampled.new"), text).ok()?;
    std::fs::rename(share.join("sampled.new"), share.join("sampled")).ok()
}

/// Samples until the file is gone. Returns `None` if the machine ended.
fn series(monitor: &mut Monitor, file: &Path) -> Option<String> {
    let (start, mut modes, mut rounds) = (Instant::now(), Modes::default(), 0);
    while file.exists() {
        modes.add(&monitor.registers()?);
        rounds += 1;
        std::thread::sleep(INTERVAL);
    }
    Some(modes.text(rounds, start.elapsed()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_is_counted_by_address_and_state() {
        let processor = |rip: &str, cpl: u8, halted: u8| {
            format!(
                "CPU#0\nRAX=0000000000000000 RBX=ffffffff81000000\nRIP={rip} RFL=00000246 [---Z-P-] CPL={cpl} II=0 A20=1 SMM=0 HLT={halted}\n"
            )
        };
        let mut modes = Modes::default();
        for text in [
            processor("ffff82d040201234", 0, 0),
            processor("ffff82d040201234", 0, 1),
            processor("ffffffff81001234", 0, 0),
            processor("ffffffffc0001234", 3, 0),
            processor("00007f0000001234", 3, 0),
        ] {
            modes.add(&text);
        }
        assert_eq!(modes, Modes { hypervisor: 1, kernel: 2, user: 1, idle: 1 });
        let text = modes.text(5, Duration::from_millis(500));
        assert!(text.starts_with("machine_hypervisor_ms=100 machine_kernel_ms=200 "), "{text}");
    }
}

//! Rows of slow peers: receivers with small windows, with pauses, and behind links that are shaped.
//!
//! The shape applies to the loopback of the host's namespace, by which every peer but veth reaches the server: netem
//! (rate, delay, loss) where the kernel has it, else tbf (rate alone).

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};

/// Link to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Name in the column of the case.
    pub(super) name: &'static str,
    rate: &'static str,
    delay: &'static str,
    loss: &'static str,
}

/// Links of the rows.
pub(super) const SHAPES: [Shape; 3] = [
    Shape { name: "slow-1mbit", rate: "1mbit", delay: "20ms", loss: "0%" },
    Shape { name: "slow-20mbit", rate: "20mbit", delay: "10ms", loss: "0.1%" },
    Shape { name: "slow-1gbit", rate: "1gbit", delay: "1ms", loss: "0.01%" },
];

/// Sizes of the receive buffer: windows of about half of it.
pub(super) const BUFFERS: [usize; 4] = [4 << 10, 8 << 10, 32 << 10, 128 << 10];

/// Name of the rows whose receiver pauses.
pub(super) const PAUSED: &str = "slow-pause";
/// Share of the measured time for which a receiver pauses.
const PAUSE: u32 = 2;

/// Returns the time for which the receiver of a row pauses after its first bytes.
pub(super) fn pause(case: &str, length: Duration) -> Duration {
    if case == PAUSED { length / PAUSE } else { Duration::ZERO }
}

/// Shape of the loopback while a row is measured.
pub(super) struct Shaped(());

impl Shaped {
    /// Shapes the loopback of this network namespace.
    pub(super) fn begin(shape: Shape) -> anyhow::Result<Shaped> {
        let Shape { rate, delay, loss, .. } = shape;
        let add = ["qdisc", "replace", "dev", "lo", "root"];
        let netem = ["netem", "rate", rate, "delay", delay, "loss", loss, "limit", "1000"];
        let tbf = ["tbf", "rate", rate, "burst", "128k", "latency", "50ms"];
        let shaped = tc(&[&add[..], &netem].concat());
        shaped.or_else(|_| tc(&[&add[..], &tbf].concat())).context("shaping the loopback")?;
        Ok(Shaped(()))
    }
}

impl Drop for Shaped {
    fn drop(&mut self) {
        // The namespace ends with the benchmark in any case.
        let _ = tc(&["qdisc", "del", "dev", "lo", "root"]);
    }
}

fn tc(words: &[&str]) -> anyhow::Result<()> {
    let output = Command::new("tc").args(words).output().context("tc")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "tc {}: {}", words.join(" "), said.trim());
    Ok(())
}

/// Returns the retransmission timeouts of the kernel in this network namespace.
pub(super) fn timeouts() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/net/netstat").ok()?;
    let lines: Vec<&str> = text.lines().collect();
    lines.chunks(2).find_map(|pair| {
        let [names, values] = pair else { return None };
        let at = names.split_whitespace().position(|name| name == "TCPTimeouts")?;
        values.split_whitespace().nth(at)?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_from_the_kernels_table() {
        assert!(timeouts().is_some());
    }

    #[test]
    fn only_rows_with_a_pause_have_one() {
        let length = Duration::from_secs(2);
        assert_eq!(pause(PAUSED, length), Duration::from_secs(1));
        assert_eq!(pause(SHAPES[0].name, length), Duration::ZERO);
    }
}

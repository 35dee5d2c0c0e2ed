//! Parameter types and value parsers that several benchmarks' command lines share.

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use ringfence_access::Mode;
use serde::{Deserialize, Serialize};

/// Direction of packets through the vif.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From the frontend to the backend.
    Tx,
    /// From the backend to the frontend.
    Rx,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Direction::Tx => "tx",
            Direction::Rx => "rx",
        })
    }
}

/// Extent of a packet's verification.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verify {
    /// Every byte, by a checksum; its length and its sequence number
    #[default]
    Full,
    /// Its length and its sequence number
    Sequence,
}

/// Size of the pages of shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum Pages {
    /// Huge ones where the machine has them: mode `staging`, and DPDK
    #[default]
    Auto,
    /// 4 KiB
    Small,
}

/// Name of huge pages in reports.
pub(super) const HUGE_PAGES: &str = "huge pages";
/// Name of small pages in reports.
pub(super) const ORDINARY_PAGES: &str = "ordinary pages";

/// Fault injected into one packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
pub enum Spoil {
    /// One bit is flipped.
    Damage,
    /// The packet is left out.
    Lose,
    /// The preceding packet is sent in its place.
    Repeat,
}

pub(super) fn parse_mode(word: &str) -> Result<Mode, String> {
    Mode::for_network(word).map_err(|unknown| unknown.to_string())
}

/// Maximum measured time of a row in seconds: one day.
const SECONDS_MAX: f64 = 86_400.0;

pub(super) fn parse_seconds(word: &str) -> Result<Duration, String> {
    match word.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= SECONDS_MAX => {
            Ok(Duration::from_secs_f64(seconds))
        }
        _ => Err(format!("a number of seconds above 0, at most {SECONDS_MAX}")),
    }
}

//! Limits of a guest, their values on the command line and in files of cgroups, and what a guest uses.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Period of processor time in microseconds, the kernel's default.
const PERIOD: u64 = 100_000;
/// Least quota in microseconds that the kernel accepts.
const QUOTA_MIN: u64 = 1000;
/// Least memory in bytes: that of the guest's init, with a small command.
const MEMORY_MIN: u64 = 6 << 20;
/// Least number of processes: init with its thread, and the command.
const PIDS_MIN: u64 = 3;

/// Errors of a limit on the command line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    #[error("`{0}` is no size: a number with the unit b, k, m, g or t, such as 512m or 1.5g")]
    Size(String),
    #[error("{0} bytes are too few: a guest needs 6m or more")]
    TooLittleMemory(u64),
    #[error("`{0}` is no number of processors: 0.01 or more, such as 1.5")]
    Cpus(String),
    #[error("`{0}` is no number of processes: 3 or more, or -1 for no limit")]
    Pids(String),
}

/// Processor time in microseconds of each period of 100 ms. As JSON it is the number of processors that it keeps busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "f64", into = "f64")]
pub struct CpuQuota(u64);

impl From<CpuQuota> for f64 {
    #[allow(clippy::cast_precision_loss, reason = "a quota is far below 2^53 µs")]
    fn from(quota: CpuQuota) -> f64 {
        quota.0 as f64 / PERIOD as f64
    }
}

impl From<f64> for CpuQuota {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "the conversion saturates"
    )]
    fn from(processors: f64) -> CpuQuota {
        CpuQuota((processors * PERIOD as f64).round() as u64)
    }
}

/// Limits of a guest's processes. `None`: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Memory in bytes, and the same of swap besides.
    pub memory: Option<u64>,
    pub cpus: Option<CpuQuota>,
    /// Number of processes and threads.
    pub pids: Option<u64>,
}

/// Value of one controller.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    pub(super) controller: &'static str,
    value: u64,
}

impl Limits {
    /// Returns `true` if there is no limit.
    pub fn is_empty(&self) -> bool {
        *self == Limits::default()
    }

    pub(super) fn settings(&self) -> Vec<Setting> {
        let setting =
            |controller, value: Option<u64>| value.map(|value| Setting { controller, value });
        let all = [
            setting("memory", self.memory),
            setting("cpu", self.cpus.map(|quota| quota.0)),
            setting("pids", self.pids),
        ];
        all.into_iter().flatten().collect()
    }

    /// Returns the options that set these limits, for a message.
    pub(super) fn options(&self) -> String {
        let options = [
            self.memory.map(|_| "--memory"),
            self.cpus.map(|_| "--cpus"),
            self.pids.map(|_| "--pids"),
        ];
        options.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = self.memory.map(|bytes| match bytes {
            bytes if bytes.is_multiple_of(1 << 30) => format!("memory {} GiB", bytes >> 30),
            bytes if bytes.is_multiple_of(1 << 20) => format!("memory {} MiB", bytes >> 20),
            bytes => format!("memory {bytes} bytes"),
        });
        let cpus = self.cpus.map(|quota| format!("{} processors", f64::from(quota)));
        let pids = self.pids.map(|pids| format!("{pids} processes"));
        let all: Vec<String> = [memory, cpus, pids].into_iter().flatten().collect();
        f.write_str(&if all.is_empty() { "none".to_owned() } else { all.join(", ") })
    }
}

impl Setting {
    /// Writes the limit in the directory of a cgroup.
    pub(super) fn write(&self, directory: &Path, is_unified: bool) -> io::Result<()> {
        let Setting { value, .. } = self;
        let write = |name: &str, text: String| fs::write(directory.join(name), text);
        match (self.controller, is_unified) {
            ("memory", true) => {
                write("memory.max", value.to_string())?;
                // As with Podman. A kernel without swap has no such file.
                optional(write("memory.swap.max", value.to_string()))
            }
            ("memory", false) => {
                write("memory.limit_in_bytes", value.to_string())?;
                let both = value.saturating_mul(2);
                optional(write("memory.memsw.limit_in_bytes", both.to_string()))
            }
            ("cpu", true) => write("cpu.max", format!("{value} {PERIOD}")),
            ("cpu", false) => {
                write("cpu.cfs_period_us", PERIOD.to_string())?;
                write("cpu.cfs_quota_us", value.to_string())
            }
            _ => write("pids.max", value.to_string()),
        }
    }
}

/// Ignores the lack of a file.
fn optional(written: io::Result<()>) -> io::Result<()> {
    match written {
        // The kernel lets nobody create a file there.
        Err(error)
            if [io::ErrorKind::NotFound, io::ErrorKind::PermissionDenied]
                .contains(&error.kind()) =>
        {
            Ok(())
        }
        other => other,
    }
}

/// Resources that a guest uses, as far as its cgroup counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Memory in bytes, with the page cache of its files.
    pub memory: Option<u64>,
    /// Number of processes and threads.
    pub pids: Option<u64>,
    /// Number of processes that the kernel has killed for lack of memory.
    pub killed_for_memory: Option<u64>,
}

impl Usage {
    /// Reads the counts in the directories of a guest's cgroups.
    pub(super) fn read<'a>(directories: impl Iterator<Item = &'a Path>) -> Usage {
        let mut usage = Usage::default();
        for directory in directories {
            let text = |name: &str| fs::read_to_string(directory.join(name)).ok();
            let number = |name: &str| text(name)?.trim().parse().ok();
            let memory = number("memory.current").or_else(|| number("memory.usage_in_bytes"));
            usage.memory = usage.memory.or(memory);
            usage.pids = usage.pids.or_else(|| number("pids.current"));
            usage.killed_for_memory = usage.killed_for_memory.or_else(|| killed_for_memory(text));
        }
        usage
    }
}

/// Returns the number of processes of a cgroup that the kernel has killed for lack of memory. `text` reads a file of its
/// directory.
pub(super) fn killed_for_memory(text: impl Fn(&str) -> Option<String>) -> Option<u64> {
    let count = |name: &str| {
        text(name)?.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok())
    };
    // In version 1 each level counts its own.
    count("memory.events").or_else(|| count("guest/memory.oom_control"))
}

/// Limit of memory in bytes as an option, in the form of Podman and Docker: a number, perhaps with a fraction, and a unit
/// of powers of 1024 (`b`, `k`, `m`, `g`, `t`, also as `mb` and `MiB`). 0 is no limit: `None`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimit(pub Option<u64>);

/// Limit of processor time as an option: a number of processors, perhaps with a fraction. 0 is no limit: `None`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuLimit(pub Option<CpuQuota>);

/// Limit of processes and threads as an option. 0 and -1 are no limit: `None`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PidsLimit(pub Option<u64>);

impl FromStr for MemoryLimit {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<MemoryLimit, LimitError> {
        match bytes_of(text).ok_or_else(|| LimitError::Size(text.to_owned()))? {
            0 => Ok(MemoryLimit(None)),
            few @ 1..MEMORY_MIN => Err(LimitError::TooLittleMemory(few)),
            bytes => Ok(MemoryLimit(Some(bytes))),
        }
    }
}

impl FromStr for CpuLimit {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<CpuLimit, LimitError> {
        let fail = || LimitError::Cpus(text.to_owned());
        let number: f64 = text.parse().map_err(|_| fail())?;
        if !(0.0..=1_000_000.0).contains(&number) {
            return Err(fail());
        }
        match CpuQuota::from(number) {
            _ if number == 0.0 => Ok(CpuLimit(None)),
            quota @ CpuQuota(QUOTA_MIN..) => Ok(CpuLimit(Some(quota))),
            CpuQuota(_) => Err(fail()),
        }
    }
}

impl FromStr for PidsLimit {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<PidsLimit, LimitError> {
        match text.parse() {
            _ if ["0", "-1"].contains(&text) => Ok(PidsLimit(None)),
            Ok(pids @ PIDS_MIN..) => Ok(PidsLimit(Some(pids))),
            _ => Err(LimitError::Pids(text.to_owned())),
        }
    }
}

/// Parses a size with its unit, such as `512m` or `1.5g`. Returns the bytes, or `None` for another text.
pub fn bytes_of(text: &str) -> Option<u64> {
    /// Maximum number of digits behind the point.
    const FRACTION_MAX: usize = 9;
    let lower = text.to_ascii_lowercase();
    let number = lower.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &lower[number.len()..] {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) || fraction.len() > FRACTION_MAX {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let part: u64 = fraction.parse().ok()?;
    let scale = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    let bytes = (u128::from(whole) << shift) + (u128::from(part) << shift) / scale;
    u64::try_from(bytes).ok().filter(|bytes| *bytes <= i64::MAX.unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_the_units_of_podman() {
        for (text, bytes) in [
            ("8388608", 8_u64 << 20),
            ("8388608b", 8 << 20),
            ("8192k", 8 << 20),
            ("512m", 512 << 20),
            ("512M", 512 << 20),
            ("512mb", 512 << 20),
            ("512MiB", 512 << 20),
            ("1.5g", 3 << 29),
            ("2t", 2 << 40),
            ("0", 0),
        ] {
            let limit = Some(bytes).filter(|bytes| *bytes > 0);
            assert_eq!(text.parse(), Ok(MemoryLimit(limit)), "{text}");
        }
        for text in ["", "m", "-1", "1.g", "1e3", "1..5g", "5x", "1 000m", "99999999999g", "ib"] {
            let refused = text.parse::<MemoryLimit>();
            assert!(matches!(refused, Err(LimitError::Size(_))), "{text}: {refused:?}");
        }
        assert_eq!("5m".parse::<MemoryLimit>(), Err(LimitError::TooLittleMemory(5 << 20)));
    }

    #[test]
    fn processors_may_have_a_fraction() {
        assert_eq!("1.5".parse(), Ok(CpuLimit(Some(CpuQuota(150_000)))));
        assert_eq!("0.01".parse(), Ok(CpuLimit(Some(CpuQuota(1000)))));
        assert_eq!("0".parse(), Ok(CpuLimit(None)));
        for text in ["", "-1", "0.001", "two", "nan", "inf", "1,5"] {
            assert!(text.parse::<CpuLimit>().is_err(), "{text}");
        }
    }

    #[test]
    fn processes_are_three_or_more_or_unlimited() {
        assert_eq!("100".parse(), Ok(PidsLimit(Some(100))));
        assert_eq!("-1".parse(), Ok(PidsLimit(None)));
        assert_eq!("0".parse(), Ok(PidsLimit(None)));
        for text in ["", "2", "-2", "1.5", "many"] {
            assert!(text.parse::<PidsLimit>().is_err(), "{text}");
        }
    }

    #[test]
    fn limits_are_named_with_their_units() {
        let limits =
            Limits { memory: Some(512 << 20), cpus: Some(CpuQuota(150_000)), pids: Some(100) };
        assert_eq!(limits.to_string(), "memory 512 MiB, 1.5 processors, 100 processes");
        assert_eq!(limits.options(), "--memory, --cpus, --pids");
        assert_eq!(Limits::default().to_string(), "none");
    }
}

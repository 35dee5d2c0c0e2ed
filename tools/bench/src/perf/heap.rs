//! Probes at the functions of the C library that allocate memory. They make an event of perf of the allocations of other
//! processes.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::SystemTime;

/// Functions of the C library that allocate. Their calls within the library pass no probe, so each allocation counts once.
const FUNCTIONS: [&str; 5] = ["malloc", "calloc", "realloc", "posix_memalign", "aligned_alloc"];

/// Probes of the whole system, removed on drop. They cost only the processes to which perf is attached.
pub(crate) struct HeapProbes {
    /// Group of the events, a name that no other process has.
    group: String,
}

impl HeapProbes {
    /// Places the probes in the shared C library of this process.
    ///
    /// # Errors
    ///
    /// Returns the reason for which this machine counts no allocations.
    pub(crate) fn place() -> Result<HeapProbes, String> {
        let library = c_library().ok_or("this program has no shared C library")?;
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
        let unique = format!("{}_{now:x}", std::process::id());
        let probes = HeapProbes { group: format!("ringfence_{unique}") };
        let mut perf = Command::new("perf");
        perf.args(["probe", "-x"]).arg(library).stdin(Stdio::null());
        for function in FUNCTIONS {
            // perf refuses the name of an event of any other group.
            perf.arg("--add");
            perf.arg(format!("{}:{function}_{unique}={function}", probes.group));
        }
        let Ok(done) = perf.output() else { return Err("perf is not installed".to_owned()) };
        if done.status.success() {
            return Ok(probes);
        }
        let said = String::from_utf8_lossy(&done.stderr);
        let why = said.lines().map(str::trim).find(|line| !line.is_empty());
        Err(format!("perf places no probe: {}", why.unwrap_or("it may not")))
    }

    /// Returns the event of all probes.
    pub(crate) fn event(&self) -> String {
        format!("{}:*", self.group)
    }
}

impl Drop for HeapProbes {
    fn drop(&mut self) {
        let mut perf = Command::new("perf");
        perf.args(["probe", "-q", "-d", &self.event()]);
        // Best effort: a probe without perf costs nothing.
        let _ = perf.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}

/// Returns the file of this process's C library.
fn c_library() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let path = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    path.map(PathBuf::from).find(|path| path.file_name().is_some_and(|name| name == "libc.so.6"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_of_two_users_are_placed_side_by_side_or_refused_with_a_reason() {
        // Only root may place probes, and only where perf is.
        match HeapProbes::place() {
            Ok(_first) => assert_eq!(HeapProbes::place().map(drop), Ok(())),
            Err(why) => assert!(why.contains("perf") || why.contains("library"), "{why}"),
        }
    }
}

//! Processes as `/proc` shows them.

use std::fs;

use rustix::process::{Pid, Signal};

/// A process at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: Pid,
    /// Its parent's.
    pub parent: i32,
    /// When it was started, in the kernel's ticks: tells it from another of the same number.
    pub started: u64,
    /// Its arguments.
    pub arguments: Vec<String>,
}

impl Process {
    /// Reads what there is on a process.
    pub fn read(pid: i32) -> Option<Process> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in parentheses may hold anything, also parentheses.
        let rest = stat.rsplit_once(") ")?.1;
        let fields: Vec<&str> = rest.split(' ').collect();
        if fields.first() == Some(&"Z") {
            return None;
        }
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let arguments = command
            .split(|byte| *byte == 0)
            .map(|word| String::from_utf8_lossy(word).into_owned())
            .collect();
        Some(Process {
            pid: Pid::from_raw(pid)?,
            parent: fields.get(1)?.parse().ok()?,
            started: fields.get(19)?.parse().ok()?,
            arguments,
        })
    }

    /// Whether it is `ringfence internal ROLE`.
    pub fn is_role(&self, role: &str) -> bool {
        self.arguments.get(1).is_some_and(|word| word == "internal")
            && self.arguments.get(2).is_some_and(|word| word == role)
    }

    /// Whether it still is there.
    pub fn is_alive(&self) -> bool {
        Process::read(self.pid.as_raw_nonzero().get())
            .is_some_and(|now| now.started == self.started)
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid, signal).unwrap();
    }

    /// How many descriptors it has open. Only root may look into a process that is not dumpable.
    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid)).map_or(0, Iterator::count)
    }

    /// Its own memory that is in RAM, in KiB: without arenas, which are bounded, and of which it
    /// has ever more pages in RAM as they are used for the first time.
    pub fn own_memory_kib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    }

    /// The namespaces it is in: kind and number. Only root may look into a process that is not
    /// dumpable.
    pub fn namespaces(&self) -> Vec<String> {
        ["user", "pid", "net", "mnt", "ipc", "uts"]
            .iter()
            .filter_map(|kind| fs::read_link(format!("/proc/{}/ns/{kind}", self.pid)).ok())
            .map(|link| link.to_string_lossy().into_owned())
            .collect()
    }
}

/// Every process.
pub fn all() -> Vec<Process> {
    let entries = fs::read_dir("/proc").unwrap();
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(Process::read)
        .collect()
}

/// A process and all below it.
pub fn descendants(root: Pid) -> Vec<Process> {
    let all = all();
    let mut found: Vec<Process> =
        all.iter().filter(|process| process.pid == root).cloned().collect();
    let mut at = 0;
    while at < found.len() {
        let parent = found[at].pid.as_raw_nonzero().get();
        found.extend(all.iter().filter(|process| process.parent == parent).cloned());
        at += 1;
    }
    found
}

//! Processes as `/proc` shows them.

use std::fs;

use rustix::process::{Pid, Signal};

/// Properties of a process when they were read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    pub pid: Pid,
    /// Process id of the parent.
    pub parent: i32,
    /// Start time in kernel ticks. It distinguishes processes with the same id.
    pub started: u64,
    pub arguments: Vec<String>,
}

impl Process {
    /// Reads the properties of a process.
    pub fn read(pid: i32) -> Option<Process> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in parentheses may contain anything, also parentheses.
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

    /// Returns `true` if the process is `ringfence internal ROLE`.
    pub fn is_role(&self, role: &str) -> bool {
        self.arguments.get(1).is_some_and(|word| word == "internal")
            && self.arguments.get(2).is_some_and(|word| word == role)
    }

    /// Returns `true` if the process still exists.
    pub fn is_alive(&self) -> bool {
        Process::read(self.pid.as_raw_nonzero().get())
            .is_some_and(|now| now.started == self.started)
    }

    /// Returns the process group, the session and the controlling terminal, 0 for none.
    pub fn job(&self) -> [i32; 3] {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        [2, 3, 4].map(|at| fields[at].parse().unwrap())
    }

    /// Sends a signal to the process.
    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid, signal).unwrap();
    }

    /// Returns the number of open descriptors. Only root can read it for a process that is not dumpable.
    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid)).map_or(0, Iterator::count)
    }

    /// Returns the process's own resident memory in KiB, without arenas. Arenas are bounded, and their resident
    /// part grows until every page was used once.
    pub fn own_memory_kib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    }

    /// Returns kind and number of each namespace. Only root can read them for a process that is not dumpable.
    pub fn namespaces(&self) -> Vec<String> {
        ["user", "pid", "net", "mnt", "ipc", "uts"]
            .iter()
            .filter_map(|kind| fs::read_link(format!("/proc/{}/ns/{kind}", self.pid)).ok())
            .map(|link| link.to_string_lossy().into_owned())
            .collect()
    }
}

/// Returns all processes of the machine.
pub fn all() -> Vec<Process> {
    let entries = fs::read_dir("/proc").unwrap();
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(Process::read)
        .collect()
}

/// Returns a process and all processes below it.
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

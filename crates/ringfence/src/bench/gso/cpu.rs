//! Processor time of everything that takes part: all processes below this one.
//!
//! Guests, frontends and driver domain are started by launchers that this process started, so the tree
//! of processes tells them from whatever else the machine does. A process that ends takes its time
//! with it, so both readings are taken while all of them run.

use std::collections::HashMap;
use std::fs;

use anyhow::Context;

/// Nanoseconds, user and kernel.
pub(super) fn of_descendants() -> anyhow::Result<u64> {
    Ok(spent_by_descendants()?.nanos)
}

/// What the processes below this one have used.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(in crate::bench) struct Spent {
    pub(in crate::bench) processes: usize,
    /// Processor time, user and kernel.
    pub(in crate::bench) nanos: u64,
    /// How often threads gave their core away because they had nothing to do.
    pub(in crate::bench) sleeps: u64,
}

/// What all processes below this one have used so far.
pub(in crate::bench) fn spent_by_descendants() -> anyhow::Result<Spent> {
    let own = std::process::id();
    let parents = parents()?;
    let below = |mut pid: u32| {
        // A chain of parents is no longer than there are processes.
        for _ in 0..=parents.len() {
            match parents.get(&pid) {
                Some(&parent) if parent == own => return true,
                Some(&parent) => pid = parent,
                None => return false,
            }
        }
        false
    };
    let mut spent = Spent::default();
    for &pid in parents.keys().filter(|&&pid| below(pid)) {
        spent.processes += 1;
        spent.nanos += of_process(pid);
        spent.sleeps += sleeps_of(pid);
    }
    Ok(spent)
}

/// The parent of each process.
fn parents() -> anyhow::Result<HashMap<u32, u32>> {
    let mut parents = HashMap::new();
    for entry in fs::read_dir("/proc").context("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // It may have ended meanwhile.
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        parents.extend(parent_in(&stat).map(|parent| (pid, parent)));
    }
    Ok(parents)
}

/// The fourth field; the second is a name in parentheses that may have any in it.
fn parent_in(stat: &str) -> Option<u32> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

/// Time of all threads of a process; one that is gone used none.
fn of_process(pid: u32) -> u64 {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return 0 };
    let time = |schedstat: String| schedstat.split_whitespace().next()?.parse::<u64>().ok();
    tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("schedstat")).ok().and_then(time))
        .sum()
}

/// Voluntary context switches of all threads; one that is gone made none.
fn sleeps_of(pid: u32) -> u64 {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return 0 };
    let count = |status: String| {
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.and_then(|count| count.trim().parse::<u64>().ok())
    };
    tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("status")).ok().and_then(count))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn names_do_not_confuse() {
        assert_eq!(parent_in("12 (a) b) (c) S 7 12 12 0"), Some(7));
        assert_eq!(parent_in("12"), None);
    }

    #[test]
    fn the_time_of_a_child_of_a_child_counts() {
        let busy = "sh -c 'while :; do :; done' & wait";
        let mut child = Command::new("sh").args(["-c", busy]).stdin(Stdio::null()).spawn().unwrap();
        let before = of_descendants().unwrap();
        let mut used = 0;
        // However slow the machine is, it gets some time at last.
        for _ in 0..400 {
            std::thread::sleep(std::time::Duration::from_millis(25));
            used = of_descendants().unwrap().saturating_sub(before);
            if used > 20_000_000 {
                break;
            }
        }
        let grandchild = parents().unwrap().into_iter().find(|(_, p)| *p == child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        if let Some((pid, _)) = grandchild {
            let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        }
        assert!(used > 20_000_000, "{used} ns");
    }
}

//! CPU time of all descendants of this process: guests, frontends and driver domain.
//!
//! The launchers are children of this process, so the process tree separates them from unrelated
//! processes. The time of an exited process is lost, so both readings must be taken while all run.

use std::collections::HashMap;
use std::fs;

use anyhow::Context;

/// Returns the CPU time of all descendants in nanoseconds, user and kernel.
pub(super) fn of_descendants() -> anyhow::Result<u64> {
    Ok(spent_by_descendants()?.nanos)
}

/// Resource usage of the descendants.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Spent {
    pub(crate) processes: usize,
    /// CPU time in nanoseconds, user and kernel.
    pub(crate) nanos: u64,
    /// Voluntary context switches of all threads.
    pub(crate) sleeps: u64,
}

/// Returns the resource usage of all descendants so far.
pub(crate) fn spent_by_descendants() -> anyhow::Result<Spent> {
    let own = std::process::id();
    let parents = parents()?;
    let mut spent = Spent::default();
    for &pid in parents.keys().filter(|&&pid| is_below(&parents, pid, own)) {
        spent.processes += 1;
        spent.nanos += of_process(pid);
        spent.sleeps += sleeps_of(pid);
    }
    Ok(spent)
}

/// Returns the descendants that are `ringfence internal ROLE`.
pub(crate) fn descendants_that_are(role: &str) -> anyhow::Result<Vec<u32>> {
    let own = std::process::id();
    let parents = parents()?;
    let is_one = |pid: u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        role_word(&words) == Some(role.as_bytes())
    };
    Ok(parents.keys().copied().filter(|&pid| is_below(&parents, pid, own) && is_one(pid)).collect())
}

/// CPU time in nanoseconds.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Times {
    pub(crate) user_ns: u64,
    pub(crate) sys_ns: u64,
}

impl Times {
    fn add(&mut self, other: Times) {
        self.user_ns += other.user_ns;
        self.sys_ns += other.sys_ns;
    }

    fn since(self, earlier: Times) -> Times {
        Times {
            user_ns: self.user_ns.saturating_sub(earlier.user_ns),
            sys_ns: self.sys_ns.saturating_sub(earlier.sys_ns),
        }
    }
}

/// CPU time of frontends and driver domains; guests account for the difference to the total.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Split {
    pub(crate) frontend: Times,
    pub(crate) backend: Times,
}

impl Split {
    pub(super) fn since(self, earlier: Split) -> Split {
        Split {
            frontend: self.frontend.since(earlier.frontend),
            backend: self.backend.since(earlier.backend),
        }
    }
}

/// Returns the CPU time of the frontends and driver domains among the descendants so far.
pub(super) fn split_of_descendants() -> anyhow::Result<Split> {
    let own = std::process::id();
    let parents = parents()?;
    let mut split = Split::default();
    for &pid in parents.keys().filter(|&&pid| is_below(&parents, pid, own)) {
        // A process that has exited counts as idle.
        let Ok(words) = fs::read(format!("/proc/{pid}/cmdline")) else { continue };
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        let (Some(role), Some(times)) = (role_in(&words), times_in(&stat)) else { continue };
        match role {
            ProcessRole::Frontend => split.frontend.add(times),
            ProcessRole::Backend => split.backend.add(times),
        }
    }
    Ok(split)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ProcessRole {
    Frontend,
    Backend,
}

/// Returns the role of a process from its command line, `ringfence internal ROLE`.
fn role_in(words: &[u8]) -> Option<ProcessRole> {
    match role_word(words)? {
        b"frontend" => Some(ProcessRole::Frontend),
        b"driver" => Some(ProcessRole::Backend),
        _ => None,
    }
}

fn role_word(words: &[u8]) -> Option<&[u8]> {
    words.split(|byte| *byte == 0).skip_while(|word| *word != b"internal").nth(1)
}

/// Parses user and system time, fields 14 and 15 of `stat`, in hundredths of a second.
fn times_in(stat: &str) -> Option<Times> {
    const TICK: u64 = 10_000_000;
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let mut next = || Some(fields.next()?.parse::<u64>().ok()? * TICK);
    Some(Times { user_ns: next()?, sys_ns: next()? })
}

/// Returns `true` if a process is a descendant of `own`.
fn is_below(parents: &HashMap<u32, u32>, mut pid: u32, own: u32) -> bool {
    // The bound holds even if process ids are reused and form a cycle.
    for _ in 0..=parents.len() {
        match parents.get(&pid) {
            Some(&parent) if parent == own => return true,
            Some(&parent) => pid = parent,
            None => return false,
        }
    }
    false
}

/// Returns the parent of each process.
fn parents() -> anyhow::Result<HashMap<u32, u32>> {
    let mut parents = HashMap::new();
    for entry in fs::read_dir("/proc").context("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // The process may have exited meanwhile.
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        parents.extend(parent_in(&stat).map(|parent| (pid, parent)));
    }
    Ok(parents)
}

/// Parses field 4 of `stat`; field 2 is a name in parentheses, which may contain parentheses.
fn parent_in(stat: &str) -> Option<u32> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

/// Returns the CPU time of all threads of a process, or 0 after its exit.
fn of_process(pid: u32) -> u64 {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return 0 };
    let time = |schedstat: String| schedstat.split_whitespace().next()?.parse::<u64>().ok();
    tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("schedstat")).ok().and_then(time))
        .sum()
}

/// Returns the voluntary context switches of all threads, or 0 after the process's exit.
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
    fn parent_is_read_after_name_with_parentheses() {
        assert_eq!(parent_in("12 (a) b) (c) S 7 12 12 0"), Some(7));
        assert_eq!(parent_in("12"), None);
    }

    #[test]
    fn roles_and_times_parse_from_proc_files() {
        assert_eq!(role_in(b"ringfence\0internal\0driver\0"), Some(ProcessRole::Backend));
        assert_eq!(role_in(b"ringfence\0internal\0frontend"), Some(ProcessRole::Frontend));
        assert_eq!(role_in(b"ringfence\0internal\0supervisor\0driver\0"), None);
        assert_eq!(role_in(b"driver\0frontend\0"), None);
        let stat = "12 (a) b) (c) S 7 12 12 0 -1 4194560 1 2 3 4 250 37 0 0 20 0 1 0 9";
        let times = times_in(stat).unwrap();
        assert_eq!((times.user_ns, times.sys_ns), (2_500_000_000, 370_000_000));
        let split = split_of_descendants().unwrap();
        assert_eq!(split.since(split), Split::default());
    }

    #[test]
    fn descendant_time_includes_grandchildren() {
        let busy = "sh -c 'while :; do :; done' & wait";
        let mut child = Command::new("sh").args(["-c", busy]).stdin(Stdio::null()).spawn().unwrap();
        let before = of_descendants().unwrap();
        let mut used = 0;
        // Even on a slow machine the child gets CPU time within the loop's ten seconds.
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

//! Limits of a guest's processes: `--memory`, `--cpus` and `--pids`.

use std::path::{Path, PathBuf};

use crate::require;
use crate::support::needs::{Need, skip_for_the_kernel};
use crate::support::users::{Site, USER};
use crate::support::{Finished, Lab, MOMENT, eventually};

/// Directory with all hierarchies.
const CGROUPS: &str = "/sys/fs/cgroup";

/// Returns the cgroups of a launcher's guest in all hierarchies.
fn cgroups_of(pid: &str) -> Vec<PathBuf> {
    fn search(directory: &Path, name: &str, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if entry.file_name().to_str() == Some(name) {
                    found.push(entry.path());
                }
                search(&entry.path(), name, found);
            }
        }
    }
    let mut found = Vec::new();
    search(Path::new(CGROUPS), &format!("ringfence-{pid}"), &mut found);
    found
}

/// Returns the reason if root cannot set limits on this machine.
fn limits_missing(lab: &Lab) -> Option<String> {
    let limits = "-q --switch none --memory 1g --cpus 1 --pids 100";
    let Finished { status, stderr, .. } = lab.run(limits, &["true"]).finish(MOMENT);
    (status != Some(0)).then_some(stderr)
}

#[test]
fn limits_hold_for_the_processes_of_a_guest_and_are_shown() {
    require!(Need::Guests, Need::Root, Need::Program("python3", "python3"));
    let lab = Lab::new();
    if let Some(reason) = limits_missing(&lab) {
        return skip_for_the_kernel(&reason);
    }
    let options = "--name web --switch none --memory 64m --cpus 0.5 --pids 20";
    let guest = lab.run(&format!("-q {options}"), &["sleep", "1000"]);
    let command = |words: &[&str]| {
        let words: Vec<&str> = [lab.program()].into_iter().chain(words.iter().copied()).collect();
        lab.spawn(&words).finish(MOMENT)
    };
    assert!(eventually(MOMENT, || command(&["ps"]).stdout.contains("/64 MiB")));
    let rows = || -> serde_json::Value {
        serde_json::from_str(&command(&["ps", "--json"]).stdout).unwrap()
    };
    // Init starts the command after the guest is listed.
    let has_command = || rows()[0]["usage"]["pids"].as_u64().is_some_and(|pids| pids >= 2);
    assert!(eventually(MOMENT, has_command), "{}", rows());
    let rows = rows();
    let limits = serde_json::json!({ "memory": 64 << 20, "cpus": 0.5, "pids": 20 });
    assert_eq!(rows[0]["limits"], limits, "{rows}");
    assert!(rows[0]["usage"]["memory"].as_u64().is_some_and(|bytes| bytes > 0), "{rows}");
    let status = command(&["status", "web"]).stdout;
    let line = "limits:         memory 64 MiB, 0.5 processors, 20 processes\n";
    assert!(status.contains(line) && status.contains("cgroup:"), "{status}");
    let pid = guest.pid().as_raw_nonzero().to_string();
    assert!(!cgroups_of(&pid).is_empty());
    // Processes.
    let fork = "
import os, time
count = 0
try:
    while count < 100:
        if os.fork() == 0:
            os.closerange(0, 3)
            time.sleep(600)
        count += 1
except BlockingIOError:
    pass
print('forked', count, flush=True)";
    let forked = command(&["exec", "web", "--", "python3", "-c", fork]).stdout;
    let count: u32 = forked.trim().rsplit(' ').next().unwrap().parse().unwrap();
    assert!((1..20).contains(&count), "{forked}");
    guest.end();
    assert!(eventually(MOMENT, || cgroups_of(&pid).is_empty()), "{:?}", cgroups_of(&pid));
    // Memory.
    let fill = "x = bytearray(256 << 20); print(len(x))";
    let finished = lab.run(options, &["python3", "-c", fill]).finish(MOMENT);
    assert_eq!((finished.status, finished.stdout.as_str()), (Some(137), ""));
    assert!(finished.stderr.contains("limit of memory (--memory)"), "{}", finished.stderr);
}

#[test]
fn limits_without_delegation_are_refused_with_advice() {
    require!(Need::Guests, Need::Root, Need::Program("setpriv", "util-linux"));
    if let Some(reason) = limits_missing(&Lab::new()) {
        return skip_for_the_kernel(&reason);
    }
    // The test's own cgroup is root's.
    let site = Site::of(Some(USER));
    for options in ["--memory 64m", "--cpus 0.5", "--pids 20"] {
        let finished = site.run(options, &["true"]).finish(MOMENT);
        assert_eq!(finished.status, Some(125), "{options}");
        let option = options.split(' ').next().unwrap();
        for text in [option, "systemd-run --user --scope -p Delegate=yes ringfence run"] {
            assert!(finished.stderr.contains(text), "{options}: {}", finished.stderr);
        }
    }
    site.run("--memory 0 --cpus 0 --pids -1", &["true"]).succeed(MOMENT);
}

/// Cgroup of version 2 that belongs to [`USER`], as a service manager delegates one. Dropping it removes it. It takes one
/// launcher: after that it gives its children controllers, and has no processes of its own.
struct DelegatedCgroup(PathBuf);

impl DelegatedCgroup {
    /// Creates the cgroup. Returns `None` if no controller of memory is in the hierarchy of version 2.
    fn create() -> Option<DelegatedCgroup> {
        let root = Path::new(CGROUPS);
        let controllers = std::fs::read_to_string(root.join("cgroup.controllers")).ok()?;
        if !controllers.split_ascii_whitespace().any(|name| name == "memory") {
            return None;
        }
        std::fs::write(root.join("cgroup.subtree_control"), "+memory +cpu +pids").unwrap();
        let own = root.join(format!("delegated-{}", std::process::id()));
        std::fs::create_dir(&own).unwrap();
        for file in [".", "cgroup.procs", "cgroup.threads", "cgroup.subtree_control"] {
            std::os::unix::fs::chown(own.join(file), Some(USER), Some(USER)).unwrap();
        }
        Some(DelegatedCgroup(own))
    }

    /// Returns the names of the cgroups below it.
    fn children(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).into_iter().flatten().flatten();
        let is_directory = |entry: &std::fs::DirEntry| entry.file_type().unwrap().is_dir();
        entries.filter(is_directory).map(|entry| entry.file_name().into_string().unwrap()).collect()
    }
}

impl Drop for DelegatedCgroup {
    fn drop(&mut self) {
        for child in self.children() {
            let _ = std::fs::remove_dir(self.0.join(child));
        }
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn limits_of_an_ordinary_user_hold_in_a_delegated_cgroup() {
    require!(
        Need::Guests,
        Need::Root,
        Need::Program("python3", "python3"),
        Need::Program("setpriv", "util-linux")
    );
    let run = |command: &[&str]| {
        let cgroup = DelegatedCgroup::create()?;
        let mut site = Site::of(Some(USER));
        let enter = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", cgroup.0.display());
        site.wrapper.splice(0..0, ["sh", "-c", &enter, "sh"].map(str::to_owned));
        let options = "-q --switch none --memory 64m --cpus 0.5 --pids 20";
        let finished = site.run(options, command).finish(MOMENT);
        let is_guest = |name: &String| name != "ringfence-launcher";
        let has_no_guest = || !cgroup.children().iter().any(is_guest);
        assert!(eventually(MOMENT, has_no_guest), "{:?}", cgroup.children());
        Some(finished)
    };
    let read = "cd /sys/fs/cgroup && cat memory.max cpu.max pids.max";
    let Some(limits) = run(&["sh", "-c", read]) else {
        return skip_for_the_kernel("no hierarchy of version 2 has the controller memory");
    };
    assert_eq!(limits.stdout, "67108864\n50000 100000\n20\n", "{}", limits.stderr);
    let fill = "x = bytearray(256 << 20); print(len(x))";
    let filled = run(&["python3", "-c", fill]).unwrap();
    assert_eq!((filled.status, filled.stdout.as_str()), (Some(137), ""), "{}", filled.stderr);
    let fork = "i=0; while [ $i -lt 100 ]; do sleep 600 & i=$((i + 1)); done; echo all";
    let forked = run(&["sh", "-c", fork]).unwrap();
    assert!(forked.status != Some(0) && forked.stdout.is_empty(), "{}", forked.stdout);
    assert!(forked.stderr.contains("fork"), "{}", forked.stderr);
}

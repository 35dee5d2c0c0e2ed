//! Control group of version 2 for the processes of the experiment.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

/// Time limit for the group to become empty.
const EMPTY_WITHIN: Duration = Duration::from_secs(10);

/// Control group, removed on drop; it must be empty by then.
pub(super) struct Group {
    path: PathBuf,
}

/// Returns the mount point of version 2.
fn root(mounts: &str) -> Option<&str> {
    let mut fields = mounts.lines().map(|line| line.split(' '));
    fields.find_map(|mut fields| {
        let at = fields.nth(1)?;
        (fields.next() == Some("cgroup2")).then_some(at)
    })
}

impl Group {
    /// Creates a group below this process's own.
    pub(super) fn create() -> anyhow::Result<Group> {
        let mounts = std::fs::read_to_string("/proc/self/mounts")?;
        let root = root(&mounts).context("control groups of version 2 are not mounted")?;
        let groups = std::fs::read_to_string("/proc/self/cgroup")?;
        let own = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or("");
        let parent = Path::new(root).join(own);
        let controllers = std::fs::read_to_string(parent.join("cgroup.controllers"))?;
        ensure!(
            controllers.split_whitespace().any(|name| name == "memory"),
            "the control group {} has no controller memory",
            parent.display()
        );
        ensure!(
            std::fs::read_to_string("/proc/pressure/memory").is_ok(),
            "this kernel has no pressure stall information (psi=1 on its command line may help)"
        );
        std::fs::write(parent.join("cgroup.subtree_control"), "+memory")
            .context("enabling the controller memory below this process's control group")?;
        let path = parent.join(format!("ringfence-pressure-{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Group { path })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn read(&self, file: &str) -> anyhow::Result<String> {
        let path = self.path.join(file);
        std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
    }

    /// Returns the memory charged to the group in bytes.
    pub(super) fn current(&self) -> anyhow::Result<u64> {
        Ok(self.read("memory.current")?.trim().parse()?)
    }

    /// Sets a limit; `None` lifts it.
    pub(super) fn limit(&self, file: &str, bytes: Option<u64>) -> anyhow::Result<()> {
        let path = self.path.join(file);
        let text = bytes.map_or_else(|| "max".to_owned(), |bytes| bytes.to_string());
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
    }

    /// Returns the number of processes killed for lack of memory.
    pub(super) fn killed(&self) -> anyhow::Result<u64> {
        let events = self.read("memory.events")?;
        let count = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
        Ok(count.unwrap_or("0").trim().parse()?)
    }

    /// Returns the time in microseconds for which any task was stalled for lack of memory.
    pub(super) fn stalled(&self) -> anyhow::Result<u64> {
        let pressure = self.read("memory.pressure")?;
        let some = pressure.lines().find(|line| line.starts_with("some"));
        let total = some.and_then(|line| line.rsplit_once("total="));
        Ok(total.map_or("0", |(_, total)| total).trim().parse()?)
    }

    /// Returns the shared memory of the group in bytes, which includes grant windows.
    pub(super) fn shared(&self) -> anyhow::Result<u64> {
        let statistics = self.read("memory.stat")?;
        let shared = statistics.lines().find_map(|line| line.strip_prefix("shmem "));
        Ok(shared.unwrap_or("0").trim().parse()?)
    }

    /// Moves a process to the parent group.
    pub(super) fn release(&self, process: u32) -> anyhow::Result<()> {
        let parent = self.path.parent().unwrap_or(&self.path).join("cgroup.procs");
        std::fs::write(&parent, process.to_string())
            .with_context(|| format!("moving process {process} to {}", parent.display()))
    }

    /// Returns the ids of its processes.
    pub(super) fn processes(&self) -> anyhow::Result<Vec<u32>> {
        Ok(self.read("cgroup.procs")?.lines().filter_map(|line| line.parse().ok()).collect())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let deadline = Instant::now() + EMPTY_WITHIN;
        while std::fs::remove_dir(&self.path).is_err() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_2_mount_point_is_found() {
        let mounts = "proc /proc proc rw 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(root(mounts), Some("/sys/fs/cgroup/unified"));
        assert_eq!(root("proc /proc proc rw 0 0\n"), None);
    }
}

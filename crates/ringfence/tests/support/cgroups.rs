//! Cgroups of tests, as a user session has them: the launcher's and another one, which belong to one user.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};

use super::{GONE_WITHIN, MOMENT, eventually};

/// Number of the next tree.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Tree of cgroups of version 2 with two children: `own`, which a launcher enters, and a victim with a process.
pub struct CgroupTree {
    top: PathBuf,
    victim: String,
    process: Child,
}

impl CgroupTree {
    /// Creates the tree for a user. Returns the reason if that is not possible here.
    pub fn new(user: u32) -> Result<CgroupTree, String> {
        let point = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].map(Path::new);
        let point = point.into_iter().find(|path| path.join("cgroup.procs").exists());
        let point = point.ok_or("there is no hierarchy of cgroups of version 2")?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("ringfence-test-{}-{number}", std::process::id());
        let (top, victim) = (point.join(&name), format!("{name}-victim"));
        fs::create_dir(&top).map_err(|error| format!("{}: {error}", top.display()))?;
        for path in [top.join("own"), top.join(&victim)] {
            fs::create_dir(path).unwrap();
        }
        for path in [top.clone(), top.join("own"), top.join(&victim)] {
            for file in ["", "cgroup.procs", "cgroup.threads", "cgroup.subtree_control"] {
                chown(path.join(file), Some(user), Some(user)).unwrap();
            }
        }
        let process = Command::new("sleep").arg("600").spawn().unwrap();
        let tree = CgroupTree { top, victim, process };
        let procs = tree.top.join(&tree.victim).join("cgroup.procs");
        fs::write(procs, tree.process.id().to_string()).unwrap();
        Ok(tree)
    }

    /// Returns the name of the victim's cgroup.
    pub fn victim(&self) -> &str {
        &self.victim
    }

    /// Returns `true` if the victim runs in its cgroup.
    pub fn is_victim_unharmed(&mut self) -> bool {
        let procs = fs::read_to_string(self.top.join(&self.victim).join("cgroup.procs"));
        let is_there = procs.is_ok_and(|text| text.trim() == self.process.id().to_string());
        is_there && self.process.try_wait().unwrap().is_none()
    }

    /// Returns a script that enters the launcher's cgroup and executes its arguments.
    pub fn enter(&self) -> String {
        format!("echo $$ > {}/own/cgroup.procs && exec \"$@\"", self.top.display())
    }

    /// Returns the names of the cgroups in that of the launcher.
    pub fn of_guests(&self) -> Vec<String> {
        let entries = fs::read_dir(self.top.join("own")).unwrap().map(Result::unwrap);
        let directories = entries.filter(|entry| entry.file_type().unwrap().is_dir());
        directories.map(|entry| entry.file_name().into_string().unwrap()).collect()
    }

    /// Checks that no cgroup of a guest is left.
    pub fn assert_no_guest(&self) {
        let gone = eventually(GONE_WITHIN, || self.of_guests().is_empty());
        assert!(gone, "left: {:?}", self.of_guests());
    }
}

impl Drop for CgroupTree {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        for name in self.of_guests() {
            let _ = fs::remove_dir(self.top.join("own").join(name));
        }
        for path in [self.top.join("own"), self.top.join(&self.victim), self.top.clone()] {
            // A process that was reaped leaves its cgroup a moment later.
            eventually(MOMENT / 20, || fs::remove_dir(&path).is_ok());
        }
    }
}

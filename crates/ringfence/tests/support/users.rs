//! Guests of an ordinary user, also in tests that run as root.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

use super::{Lab, MOMENT, Running};

/// User id that no program has.
pub const USER: u32 = 12345;

/// Copies this program to where every user can run it.
pub fn copy_program(to: &Path) {
    copy(Path::new(env!("CARGO_BIN_EXE_ringfence")), to);
}

/// Copies a program. Another process writes the file: a child that another thread starts would inherit a descriptor for
/// writing, and the file would be busy.
pub fn copy(program: &Path, to: &Path) {
    let mut copy = std::process::Command::new("cp");
    assert!(copy.arg(program).arg(to).status().unwrap().success());
}

/// Gives the directories of a lab to a user, who may then start guests in it.
pub fn give(lab: &Lab, user: u32) {
    let session = lab.runtime_dir().parent().unwrap().to_owned();
    std::fs::set_permissions(session.parent().unwrap(), PermissionsExt::from_mode(0o755)).unwrap();
    for path in [&session, lab.file("x").parent().unwrap()] {
        chown(path, Some(user), Some(user)).unwrap();
    }
    let tun = Path::new("/dev/net/tun");
    if tun.metadata().unwrap().permissions().mode() & 0o006 != 0o006 {
        // udev sets the same mode.
        std::fs::set_permissions(tun, PermissionsExt::from_mode(0o666)).unwrap();
    }
}

/// Lab whose guests are started by one user.
pub struct Site {
    pub lab: Lab,
    /// Program, with arguments, that takes the user's ids. Empty for this process's own user.
    pub wrapper: Vec<String>,
    user: Option<u32>,
    _program: tempfile::TempDir,
}

impl Site {
    /// Returns one site for each user that this process can be: itself and, for root, an ordinary user.
    pub fn all() -> Vec<Site> {
        let is_root = rustix::process::geteuid().is_root();
        let users = [Some(None), is_root.then_some(Some(USER))];
        users.into_iter().flatten().map(Site::of).collect()
    }

    /// Returns the site of a user, or of this process's own.
    pub fn of(user: Option<u32>) -> Site {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("ringfence");
        copy_program(&program);
        let lab = Lab::of(program);
        let mut wrapper = vec![];
        if let Some(user) = user {
            std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
            give(&lab, user);
            wrapper = ["setpriv", "--clear-groups"].map(str::to_owned).to_vec();
            wrapper.extend([format!("--reuid={user}"), format!("--regid={user}")]);
        }
        Site { lab, wrapper, user, _program: directory }
    }

    /// Returns user and group id of the user.
    pub fn ids(&self) -> (u32, u32) {
        let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        self.user.map_or(own, |user| (user, user))
    }

    /// Starts `ringfence run OPTIONS -- COMMAND` as the user.
    pub fn run(&self, options: &str, command: &[&str]) -> Running {
        self.run_with(&[], options, command)
    }

    /// Starts `ringfence run` through the program that the wrapper starts.
    pub fn run_with(&self, more: &[&str], options: &str, command: &[&str]) -> Running {
        let wrapper: Vec<&str> =
            self.wrapper.iter().map(String::as_str).chain(more.iter().copied()).collect();
        self.lab.start(options, command, &wrapper)
    }

    /// Runs a script in a guest of the user. Returns its output.
    pub fn script(&self, options: &str, script: &str) -> String {
        self.run(options, &["sh", "-c", script]).succeed(MOMENT)
    }

    /// Starts a guest that stays, so that the switch exists.
    pub fn bystander(&self, options: &str) -> Running {
        let guest = self.run(options, &["sleep", "600"]);
        guest.wait_up();
        guest
    }

    /// Returns the directory of the user's session.
    pub fn session(&self) -> PathBuf {
        self.lab.runtime_dir().parent().unwrap().to_owned()
    }

    /// Creates the image of a disk that the user may write to.
    pub fn image(&self, name: &str) -> String {
        let path = self.lab.file(name);
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

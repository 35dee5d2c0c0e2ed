//! Reasons for which a user may not make namespaces, and the commands that help.
//!
//! The settings and the remedies are in the table of prerequisites ([`ringfence_sys::prerequisite`]). [`attempt`] makes
//! the namespaces of a domain in a child process.

use std::io::{self, PipeWriter, Read, Write};
use std::os::fd::OwnedFd;

use ringfence_sys::fork::fork;
use ringfence_sys::namespaces::{self, Fresh};
use ringfence_sys::prerequisite::{
    APPARMOR, NAMESPACE_SETTINGS, ROOT_WITHOUT_SETFCAP, USER_NAMESPACES, with_doctor,
};
use rustix::process::{WaitOptions, waitpid};

use crate::ids::{OwnIds, may_map_any};

/// Reason for which a user may not make namespaces, with its remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// Reason: a setting and its value, or a seccomp list.
    pub problem: String,
    /// Command that helps.
    pub remedy: String,
}

impl Obstacle {
    /// Returns the reason and the remedy as the end of an error.
    pub fn sentence(&self) -> String {
        with_doctor(&format!("{}; {}", self.problem, self.remedy))
    }

    /// Returns the reason for which the kernel refused namespaces with `error`.
    pub fn of(error: &io::Error) -> Obstacle {
        let is_root = rustix::process::geteuid().is_root();
        if is_root
            && error.kind() == io::ErrorKind::PermissionDenied
            && !may_map_any().unwrap_or(true)
        {
            return Obstacle::root_without_setfcap();
        }
        setting(&value).unwrap_or_else(|| without_setting(error, has_seccomp_list()))
    }

    /// Returns the reason for which root of a user namespace maps no id.
    pub fn root_without_setfcap() -> Obstacle {
        let [problem, remedy] = ROOT_WITHOUT_SETFCAP.map(str::to_owned);
        Obstacle { problem, remedy }
    }
}

/// Returns the reason of a refusal that no setting explains.
fn without_setting(error: &io::Error, has_seccomp_list: bool) -> Obstacle {
    let is_limit = matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EUSERS));
    let (problem, remedy) = match (is_limit, has_seccomp_list) {
        (true, _) => ("a limit on namespaces is reached", USER_NAMESPACES.enable),
        (false, true) => ("a seccomp list applies to this process", USER_NAMESPACES.permit),
        (false, false) => ("no setting of sysctl(8) forbids it", USER_NAMESPACES.permit),
    };
    Obstacle { problem: problem.to_owned(), remedy: remedy.to_owned() }
}

/// Returns the first setting that keeps this process from making namespaces.
fn setting(read: &impl Fn(&str) -> Option<String>) -> Option<Obstacle> {
    NAMESPACE_SETTINGS.iter().chain([&APPARMOR]).find_map(|setting| {
        let (problem, remedy) = setting.obstacle(&read(setting.name)?)?;
        Some(Obstacle { problem, remedy })
    })
}

/// Returns the first setting that keeps ordinary users from making namespaces.
pub fn obstacle() -> Option<Obstacle> {
    setting(&value)
}

/// Returns the setting by which AppArmor takes the capabilities of an ordinary user's namespaces away, if it is in force.
/// Processes then fail when they use a capability.
pub fn obstacle_to_capabilities() -> Option<Obstacle> {
    let (problem, remedy) = APPARMOR.obstacle(&value(APPARMOR.name)?)?;
    (!rustix::process::geteuid().is_root()).then_some(Obstacle { problem, remedy })
}

/// Returns the settings on namespaces that this kernel has, with their values.
pub fn settings() -> Vec<(&'static str, String)> {
    let all = NAMESPACE_SETTINGS.iter().chain([&APPARMOR]);
    all.filter_map(|setting| Some((setting.name, value(setting.name)?.trim().to_owned()))).collect()
}

/// Reads a kernel setting below `/proc/sys`; `None` if this kernel lacks it.
pub fn value(name: &str) -> Option<String> {
    std::fs::read_to_string(format!("/proc/sys/{}", name.replace('.', "/"))).ok()
}

/// Returns `true` if a seccomp list applies to this process, as in a container.
fn has_seccomp_list() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.split_whitespace().eq(["Seccomp:", "2"]))
}

/// Makes the namespaces of a domain in a child process, which ends at once.
///
/// # Errors
///
/// Returns the error of the first step that failed: its name and the kernel's reason. Fails also if this process has several
/// threads or cannot start another one.
pub fn attempt() -> io::Result<()> {
    let (mut report, into) = io::pipe()?;
    let child = fork(into.into(), &[], make_namespaces)?;
    let mut errno = Vec::new();
    report.read_to_end(&mut errno)?;
    let ended = waitpid(Some(child), WaitOptions::empty())?;
    if ended.is_some_and(|(_, status)| status.exit_status() == Some(0)) {
        return Ok(());
    }
    match <[u8; 4]>::try_from(errno) {
        Ok(bytes) => Err(io::Error::from_raw_os_error(i32::from_ne_bytes(bytes))),
        Err(_) => Err(io::Error::other("the process that tried it ended without a report")),
    }
}

/// Makes the namespaces of a domain, one group after the other as a supervisor and its inner process do. Returns the exit
/// status.
fn make_namespaces(report: OwnedFd, _: &[std::ffi::OsString]) -> u8 {
    let own = OwnIds::current();
    let done = namespaces::unshare(Fresh::UserAndPid)
        .and_then(|()| own.map_to_root())
        .and_then(|()| namespaces::unshare(Fresh::MountNetIpcUts));
    let Err(error) = done else { return 0 };
    let number = error.raw_os_error().unwrap_or(libc::EIO);
    // Without a report, the exit status alone says that it failed.
    let _ = PipeWriter::from(report).write_all(&number.to_ne_bytes());
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_that_forbids_namespaces_is_the_obstacle() {
        let only = |name: &'static str, value: &'static str| {
            setting(&move |asked: &str| (asked == name).then(|| value.to_owned()))
        };
        let found = only("user.max_user_namespaces", "0\n").unwrap();
        assert!(found.sentence().contains("`sysctl -w user.max_user_namespaces=10000`"));
        assert_eq!(only("user.max_user_namespaces", "127000\n"), None);
        assert_eq!(setting(&|_: &str| None), None, "a kernel without the settings");
        let ubuntu = only("kernel.apparmor_restrict_unprivileged_userns", "1\n").unwrap();
        assert!(ubuntu.sentence().contains("apparmor_parser -r /etc/apparmor.d/ringfence"));
    }

    #[test]
    fn refusal_that_no_setting_explains_is_a_limit_or_a_container() {
        let limit = without_setting(&io::Error::from_raw_os_error(libc::ENOSPC), true);
        assert!(limit.remedy.contains("sysctl -a | grep namespaces"), "{limit:?}");
        let refusal = without_setting(&io::Error::from_raw_os_error(libc::EPERM), true);
        assert!(refusal.problem.contains("seccomp"), "{refusal:?}");
        assert!(refusal.remedy.contains("seccomp=unconfined"), "{refusal:?}");
    }
}

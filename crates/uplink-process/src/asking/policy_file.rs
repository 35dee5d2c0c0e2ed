//! Policy file that grows by approvals: the last one of `--policy`.
//!
//! The folder is opened when the guest starts, so that nobody can move the file elsewhere. A new file replaces the old one at once,
//! with its mode; a symbolic link in its place is not followed. A lock keeps launchers of several guests apart.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use ringfence_policy::file::FILE_MAX;
use ringfence_policy::{Rule, Subject, edit};
use ringfence_sys::numbers::u64_from;
use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::process::{Gid, Uid};

/// Number of attempts to get the lock of another launcher, which holds it for some milliseconds.
const LOCK_ATTEMPTS: u32 = 20;
const LOCK_PAUSE: std::time::Duration = std::time::Duration::from_millis(5);

/// Policy file in its folder.
#[derive(Debug)]
pub(super) struct PolicyFile {
    path: PathBuf,
    folder: OwnedFd,
    name: String,
}

impl PolicyFile {
    /// Finds the file, behind symbolic links.
    ///
    /// # Errors
    ///
    /// Returns the reason for which its folder cannot be opened.
    pub(super) fn find(file: &Path) -> anyhow::Result<PolicyFile> {
        let path = file.canonicalize().with_context(|| format!("--policy {}", file.display()))?;
        let parent = path.parent().context("--policy: it has no folder")?;
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.context("--policy: its name is not UTF-8")?.to_owned();
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(parent, flags | OFlags::RDONLY, Mode::empty())
            .with_context(|| format!("--policy {}", parent.display()))?;
        Ok(PolicyFile { path, folder, name })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Adds the rule that allows a subject. A file that has it stays as it is.
    ///
    /// # Errors
    ///
    /// Returns the reason for which the file stays as it was.
    pub(super) fn add(&self, subject: &Subject) -> anyhow::Result<()> {
        let rule: Rule = subject.to_string().parse()?;
        let _lock = self.lock()?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let old = rustix::fs::openat(&self.folder, &self.name, flags, Mode::empty())?;
        let facts = rustix::fs::fstat(&old)?;
        if FileType::from_raw_mode(facts.st_mode) != FileType::RegularFile {
            bail!("it is no regular file any more");
        }
        let mut text = String::new();
        File::from(old).take(u64_from(FILE_MAX + 1)).read_to_string(&mut text)?;
        let Some(text) = edit::with_rule(&self.name, &text, &rule)? else { return Ok(()) };
        let new = format!(".{}.{}", self.name, std::process::id());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(
            &self.folder,
            &new,
            flags | OFlags::CLOEXEC,
            Mode::RUSR | Mode::WUSR,
        )?;
        let written = self.replace(file, &new, &text, &facts);
        if written.is_err() {
            let _ = rustix::fs::unlinkat(&self.folder, &new, AtFlags::empty());
        }
        written
    }

    fn replace(&self, file: OwnedFd, new: &str, text: &str, old: &Stat) -> anyhow::Result<()> {
        let mut file = File::from(file);
        file.write_all(text.as_bytes())?;
        // Root can leave the file to its owner. Others own it.
        let (user, group) = (Uid::from_raw(old.st_uid), Gid::from_raw(old.st_gid));
        let _ = rustix::fs::fchown(&file, Some(user), Some(group));
        rustix::fs::fchmod(&file, Mode::from_raw_mode(old.st_mode))?;
        file.sync_all()?;
        Ok(rustix::fs::renameat(&self.folder, new, &self.folder, &self.name)?)
    }

    /// Locks the folder against other launchers. A guest that holds the lock keeps the file as it is, no more.
    fn lock(&self) -> anyhow::Result<Lock<'_>> {
        for _ in 0..LOCK_ATTEMPTS {
            if rustix::fs::flock(&self.folder, FlockOperation::NonBlockingLockExclusive).is_ok() {
                return Ok(Lock(&self.folder));
            }
            std::thread::sleep(LOCK_PAUSE);
        }
        bail!("another process holds its lock")
    }
}

struct Lock<'a>(&'a OwnedFd);

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(self.0, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use ringfence_policy::approvals::Host;
    use ringfence_policy::{HostName, Protocol};

    use super::*;

    fn subject(name: &str) -> Subject {
        let host = Host::Name(HostName::parse(name).unwrap());
        Subject { host, port: 443, protocol: Protocol::Tcp }
    }

    #[test]
    fn rule_is_added_once_and_comments_and_mode_stay() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("p.toml");
        std::fs::write(&path, "# mine\nallow = [\n  'a.org',  # a\n]\n").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        let file = PolicyFile::find(&path).unwrap();
        for name in ["new.org", "new.org"] {
            file.add(&subject(name)).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "# mine\nallow = [\n    \"new.org:443\",\n  'a.org',  # a\n]\n");
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn file_that_was_replaced_by_a_link_or_has_an_error_is_not_changed() {
        let directory = tempfile::tempdir().unwrap();
        let (path, other) = (directory.path().join("p.toml"), directory.path().join("other"));
        std::fs::write(&path, "").unwrap();
        std::fs::write(&other, "").unwrap();
        let file = PolicyFile::find(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        symlink(&other, &path).unwrap();
        assert!(file.add(&subject("new.org")).is_err());
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "allow = [").unwrap();
        assert!(file.add(&subject("new.org")).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "allow = [");
        // A lock that is never released delays nothing for long.
        std::fs::write(&path, "").unwrap();
        let held = File::open(directory.path()).unwrap();
        rustix::fs::flock(&held, FlockOperation::LockExclusive).unwrap();
        let error = file.add(&subject("new.org")).unwrap_err();
        assert!(error.to_string().contains("lock"), "{error}");
    }
}

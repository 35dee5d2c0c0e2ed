//! The directory where the switches of one user meet.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use ringfence_sandbox::spawn::SocketFile;

/// How long the lock of the directory is waited for. Whoever holds it only starts a process.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// How many launchers may wait to be heard by a hub.
const BACKLOG: i32 = 64;

/// The directory, which nobody but this user can enter.
#[derive(Debug)]
pub struct RuntimeDir {
    fd: OwnedFd,
    path: PathBuf,
}

/// The lock of the directory, held until this is dropped.
#[derive(Debug)]
pub struct Lock {
    // A file of its own: the lock belongs to the open file, and the directory's descriptor is
    // shared with keepers.
    _fd: OwnedFd,
}

/// What is wrong with the directory, or a switch's socket in it.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeDirError {
    /// Something cannot be done.
    #[error("{}: {what}: {source}", path.display())]
    System {
        /// The directory, or a file in it.
        path: PathBuf,
        /// What was attempted.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// Others could interfere.
    #[error(
        "{} is not safe to use: {why}. Remove it, or set XDG_RUNTIME_DIR to a directory of your own",
        path.display()
    )]
    Unsafe {
        /// The directory.
        path: PathBuf,
        /// What is wrong.
        why: &'static str,
    },
    /// Another launcher does not let go of the lock.
    #[error(
        "{} has been locked for {LOCK_TIMEOUT:?} by another `ringfence`: is one stopped?",
        path.display()
    )]
    Locked {
        /// The directory.
        path: PathBuf,
    },
}

impl RuntimeDir {
    /// Opens this user's directory, making it if need be.
    ///
    /// # Errors
    ///
    /// [`RuntimeDirError`].
    pub fn open() -> Result<RuntimeDir, RuntimeDirError> {
        let uid = rustix::process::geteuid();
        RuntimeDir::open_at(choose(session(), uid.as_raw()))
    }

    /// Opens the directory of that name.
    ///
    /// # Errors
    ///
    /// [`RuntimeDirError`].
    pub fn open_at(path: PathBuf) -> Result<RuntimeDir, RuntimeDirError> {
        let fail = |what| {
            let path = path.clone();
            move |errno: Errno| RuntimeDirError::System { path, what, source: errno.into() }
        };
        match rustix::fs::mkdir(&path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(fail("cannot be made")(errno)),
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::open(&path, flags, Mode::empty()).map_err(fail("cannot be opened"))?;
        let stat = rustix::fs::fstat(&fd).map_err(fail("cannot be examined"))?;
        if stat.st_uid != rustix::process::geteuid().as_raw() {
            return Err(RuntimeDirError::Unsafe { path, why: "it belongs to somebody else" });
        }
        if Mode::from_raw_mode(stat.st_mode).intersects(Mode::RWXG | Mode::RWXO) {
            return Err(RuntimeDirError::Unsafe { path, why: "others may enter it" });
        }
        Ok(RuntimeDir { fd, path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Locks it, against other launchers and keepers.
    ///
    /// # Errors
    ///
    /// [`RuntimeDirError::Locked`] when somebody holds the lock for too long.
    pub fn lock(&self) -> Result<Lock, RuntimeDirError> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.fd, c".", flags, Mode::empty())
            .map_err(|errno| self.error("lock", errno))?;
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Lock { _fd: fd }),
                Err(Errno::AGAIN | Errno::INTR) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(Errno::AGAIN | Errno::INTR) => {
                    return Err(RuntimeDirError::Locked { path: self.path.clone() });
                }
                Err(errno) => return Err(self.error("lock", errno)),
            }
        }
    }

    /// Connects to the hub of a switch; `None` where nobody listens.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn connect(&self, switch: &str) -> Result<Option<OwnedFd>, RuntimeDirError> {
        let socket = self.socket()?;
        match rustix::net::connect(&socket, &self.address(switch)?) {
            Ok(()) => Ok(Some(socket)),
            Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(None),
            Err(errno) => Err(self.error("connecting to the driver domain", errno)),
        }
    }

    /// Makes the socket that a switch's hub listens at, in place of one that nobody listens at.
    /// The directory must be locked.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn listen(
        &self,
        switch: &str,
        _lock: &Lock,
    ) -> Result<(OwnedFd, SocketFile), RuntimeDirError> {
        let fail = |errno| self.error("making the socket", errno);
        let name = socket_name(switch);
        match rustix::fs::unlinkat(&self.fd, &name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(fail(errno)),
        }
        let socket = self.socket()?;
        rustix::net::bind(&socket, &self.address(switch)?).map_err(fail)?;
        rustix::net::listen(&socket, BACKLOG).map_err(fail)?;
        let stat = rustix::fs::statat(&self.fd, &name, AtFlags::SYMLINK_NOFOLLOW).map_err(fail)?;
        Ok((socket, SocketFile { name, device: stat.st_dev, inode: stat.st_ino }))
    }

    /// Removes the socket of a switch if nobody listens at it: its keeper was killed as well.
    ///
    /// # Errors
    ///
    /// The kernel's, or that the lock cannot be had.
    pub fn remove_if_stale(&self, switch: &str) -> Result<(), RuntimeDirError> {
        let _lock = self.lock()?;
        if self.connect(switch)?.is_some() {
            return Ok(());
        }
        match rustix::fs::unlinkat(&self.fd, socket_name(switch), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(self.error("removing the socket", errno)),
        }
    }

    /// Removes a socket file that was just made.
    pub(crate) fn withdraw(&self, socket: &SocketFile, _lock: &Lock) {
        // If it stays, the next launcher finds that nobody listens there.
        let _ = rustix::fs::unlinkat(&self.fd, &socket.name, AtFlags::empty());
    }

    fn socket(&self) -> Result<OwnedFd, RuntimeDirError> {
        rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|errno| self.error("socket", errno))
    }

    /// By way of the open directory: the path may be longer than an address has room for.
    fn address(&self, switch: &str) -> Result<SocketAddrUnix, RuntimeDirError> {
        let path = format!("/proc/self/fd/{}/{}", self.fd.as_raw_fd(), socket_name(switch));
        SocketAddrUnix::new(path).map_err(|errno| self.error("socket", errno))
    }

    fn error(&self, what: &'static str, errno: Errno) -> RuntimeDirError {
        RuntimeDirError::System { path: self.path.clone(), what, source: errno.into() }
    }
}

impl AsFd for RuntimeDir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn socket_name(switch: &str) -> String {
    format!("{switch}.sock")
}

/// The session's directory where there is one; after `su` it is another user's, and no use.
fn choose(session: Option<PathBuf>, uid: u32) -> PathBuf {
    match (session, uid) {
        (Some(directory), _) => directory.join("ringfence"),
        (None, 0) => PathBuf::from("/run/ringfence"),
        (None, uid) => PathBuf::from(format!("/tmp/ringfence-{uid}")),
    }
}

/// The directory of this user's session, if there is one.
pub(super) fn session() -> Option<PathBuf> {
    std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|directory| is_own(directory))
}

/// Every directory that a launcher of this user may choose: the one in use, and the one without a session. The
/// latter is made: a guest's command, which has the user's rights, must not be the one that makes it.
pub(super) fn all_of_user(in_use: &Path) -> Vec<PathBuf> {
    let without_session = choose(None, rustix::process::geteuid().as_raw());
    if in_use == without_session {
        return vec![without_session];
    }
    // Where it cannot be made, the command cannot make it either; if it is another user's, launchers refuse it.
    let _ = rustix::fs::mkdir(&without_session, Mode::RWXU);
    vec![in_use.to_owned(), without_session]
}

fn is_own(directory: &Path) -> bool {
    let uid = rustix::process::geteuid().as_raw();
    directory.is_absolute() && rustix::fs::stat(directory).is_ok_and(|stat| stat.st_uid == uid)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn directory() -> (tempfile::TempDir, RuntimeDir) {
        let outer = tempfile::tempdir().unwrap();
        let directory = RuntimeDir::open_at(outer.path().join("r")).unwrap();
        (outer, directory)
    }

    #[test]
    fn the_place_depends_on_the_session_and_the_user() {
        assert_eq!(choose(Some("/run/user/7".into()), 7), Path::new("/run/user/7/ringfence"));
        assert_eq!(choose(None, 0), Path::new("/run/ringfence"));
        assert_eq!(choose(None, 7), Path::new("/tmp/ringfence-7"));
    }

    #[test]
    fn a_directory_that_others_may_enter_is_refused() {
        let (outer, directory) = directory();
        let path = directory.path().to_owned();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o750)).unwrap();
        assert!(matches!(RuntimeDir::open_at(path), Err(RuntimeDirError::Unsafe { .. })));
        let link = outer.path().join("link");
        std::os::unix::fs::symlink("r", &link).unwrap();
        assert!(RuntimeDir::open_at(link).is_err(), "a link could lead anywhere");
    }

    #[test]
    fn a_socket_lives_while_somebody_listens() {
        let (_outer, directory) = directory();
        assert!(directory.connect("s").unwrap().is_none());
        let (listener, _) = directory.listen("s", &directory.lock().unwrap()).unwrap();
        assert!(directory.connect("s").unwrap().is_some());
        directory.remove_if_stale("s").unwrap();
        assert!(directory.connect("s").unwrap().is_some(), "it was not stale");
        drop(listener);
        assert!(directory.connect("s").unwrap().is_none());
        assert!(directory.path().join("s.sock").exists());
        let again = directory.listen("s", &directory.lock().unwrap()).unwrap();
        drop(again);
        directory.remove_if_stale("s").unwrap();
        assert!(!directory.path().join("s.sock").exists());
    }

    #[test]
    fn a_path_longer_than_a_socket_address_does() {
        let outer = tempfile::tempdir().unwrap();
        let long = outer.path().join("d".repeat(120));
        let directory = RuntimeDir::open_at(long).unwrap();
        let kept = directory.listen("s", &directory.lock().unwrap()).unwrap();
        assert!(directory.connect("s").unwrap().is_some());
        drop(kept);
    }

    #[test]
    fn one_at_a_time_holds_the_lock() {
        let (_outer, directory) = directory();
        let lock = directory.lock().unwrap();
        let other = RuntimeDir::open_at(directory.path().to_owned()).unwrap();
        let waiter = std::thread::spawn(move || other.lock().map(drop));
        std::thread::sleep(Duration::from_millis(30));
        assert!(!waiter.is_finished());
        drop(lock);
        waiter.join().unwrap().unwrap();
    }
}

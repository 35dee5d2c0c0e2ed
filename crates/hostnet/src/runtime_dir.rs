//! Runtime directory: the directory with the sockets of one user's switches.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::guest_watch::{GuestWatch, RemovalWatch};
use ringfence_sandbox::ids;
use ringfence_sandbox::spawn::SocketFile;

/// Time limit for the directory's lock. Its holder only starts a process.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of launchers that wait for a driver domain to accept them, and of clients that wait for a launcher.
pub(crate) const BACKLOG: i32 = 64;

/// The runtime directory. Only its user can enter it.
#[derive(Debug)]
pub struct RuntimeDir {
    fd: OwnedFd,
    path: PathBuf,
}

/// Lock of the directory, held until it is dropped.
#[derive(Debug)]
pub struct Lock {
    // Separate open file: a lock belongs to the open file description, and supervisors share that
    // of the directory's descriptor.
    _fd: OwnedFd,
}

/// Errors of the directory or of a switch's socket in it.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeDirError {
    /// An operation failed.
    #[error("{}: {what}: {source}", path.display())]
    System {
        /// Directory, or file in it.
        path: PathBuf,
        /// Operation that failed.
        what: &'static str,
        source: io::Error,
    },
    /// Other users could interfere.
    #[error(
        "{} is not safe to use: {why}. Remove it, or set XDG_RUNTIME_DIR to a directory of your own",
        path.display()
    )]
    Unsafe {
        path: PathBuf,
        /// Problem that was found.
        why: &'static str,
    },
    /// Another launcher holds the lock for too long.
    #[error(
        "{} has been locked for {LOCK_TIMEOUT:?} by another `ringfence`: is one stopped?",
        path.display()
    )]
    Locked { path: PathBuf },
}

impl RuntimeDir {
    /// Opens this user's directory and creates it if it does not exist.
    ///
    /// # Errors
    ///
    /// Returns [`RuntimeDirError`] if it cannot be created or is not safe.
    pub fn open() -> Result<RuntimeDir, RuntimeDirError> {
        let uid = rustix::process::geteuid();
        RuntimeDir::open_at(choose(session(), uid.as_raw()))
    }

    /// Opens the directory at a path and creates it if it does not exist.
    ///
    /// # Errors
    ///
    /// Returns [`RuntimeDirError`] if it cannot be created or is not safe.
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

    /// Returns the directory's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Locks the directory against other launchers and supervisors.
    ///
    /// # Errors
    ///
    /// Returns [`RuntimeDirError::Locked`] if the lock is held for too long.
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

    /// Connects to the driver domain of a switch. Returns `None` if no process listens.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn connect(&self, switch: &str) -> Result<Option<OwnedFd>, RuntimeDirError> {
        let socket = self.socket()?;
        match rustix::net::connect(&socket, &self.address(switch)?) {
            Ok(()) => Ok(Some(socket)),
            Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(None),
            Err(errno) => Err(self.error("connecting to the driver domain", errno)),
        }
    }

    /// Creates the listening socket of a switch. Replaces a socket at which no process listens. The
    /// directory must be locked.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
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

    /// Watches for launchers that begin to listen for clients. To be called before [`RuntimeDir::listeners`], so that no
    /// launcher is missed.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error if the system permits no watch.
    pub fn watch_guests(&self) -> Result<GuestWatch, RuntimeDirError> {
        GuestWatch::new(self.fd.as_fd()).map_err(|errno| self.error("watching", errno))
    }

    /// Watches for the removal of names in the directory, which precedes that of the directory.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error if the system permits no watch.
    pub fn watch_removals(&self) -> Result<RemovalWatch, RuntimeDirError> {
        RemovalWatch::new(self.fd.as_fd()).map_err(|errno| self.error("watching", errno))
    }

    /// Returns `true` if the directory's path still leads to it.
    pub fn is_at_its_path(&self) -> bool {
        let identity = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
        let own = rustix::fs::fstat(&self.fd).map(identity);
        own.is_ok() && own == rustix::fs::lstat(&self.path).map(identity)
    }

    /// Returns `true` if the directory has a socket of this switch.
    pub fn has_switch(&self, switch: &str) -> bool {
        rustix::fs::statat(&self.fd, socket_name(switch), AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// Removes the socket of a switch if no process listens at it: its supervisor was killed.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error, or [`RuntimeDirError::Locked`].
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

    /// Removes a socket file that was just created.
    pub fn withdraw(&self, socket: &SocketFile, _lock: &Lock) {
        // If it stays, the next launcher finds that no process listens there.
        let _ = rustix::fs::unlinkat(&self.fd, &socket.name, AtFlags::empty());
    }

    pub(crate) fn socket(&self) -> Result<OwnedFd, RuntimeDirError> {
        rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|errno| self.error("socket", errno))
    }

    fn address(&self, switch: &str) -> Result<SocketAddrUnix, RuntimeDirError> {
        self.address_of(&socket_name(switch))
    }

    /// Returns the address of a socket in the directory. It goes through the open directory, because the path may
    /// exceed the length of a socket address.
    pub(crate) fn address_of(&self, name: &str) -> Result<SocketAddrUnix, RuntimeDirError> {
        let path = format!("/proc/self/fd/{}/{name}", self.fd.as_raw_fd());
        SocketAddrUnix::new(path).map_err(|errno| self.error("socket", errno))
    }

    pub(crate) fn error(&self, what: &'static str, errno: Errno) -> RuntimeDirError {
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

/// Returns the session's directory if it is this user's. After `su` it belongs to another user.
fn choose(session: Option<PathBuf>, uid: u32) -> PathBuf {
    match (session, uid) {
        (Some(directory), _) => directory.join("ringfence"),
        (None, 0) if may_use_run() => PathBuf::from("/run/ringfence"),
        // Root of a user namespace, to whom /run does not belong.
        (None, 0) => in_tmp(ids::outer_uid(0)),
        (None, uid) => in_tmp(uid),
    }
}

/// Returns `true` if root of this user namespace may make a directory in /run.
fn may_use_run() -> bool {
    let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    rustix::fs::access("/run", access).is_ok()
}

fn in_tmp(uid: u32) -> PathBuf {
    PathBuf::from(format!("/tmp/ringfence-{uid}"))
}

/// Returns the directory of this user's session, if there is one.
pub fn session() -> Option<PathBuf> {
    std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|directory| is_own(directory))
}

/// Returns all directories that a launcher of this user may choose: the one in use and those without a session. They
/// are created here, so that a guest's command with the user's rights cannot create them. With `as_root` the command
/// may be a launcher for which id 0 is 0 outside, too.
pub fn all_of_user(in_use: &Path, as_root: bool) -> Vec<PathBuf> {
    let uid = rustix::process::geteuid();
    let inside = (as_root && !uid.is_root()).then(|| in_tmp(0));
    let without_session = [choose(None, uid.as_raw())].into_iter().chain(inside);
    let others: Vec<_> = without_session.filter(|directory| directory != in_use).collect();
    for directory in &others {
        // If it cannot be created, the command cannot create it either. Launchers refuse another user's
        // directory.
        let _ = rustix::fs::mkdir(directory, Mode::RWXU);
    }
    [in_use.to_owned()].into_iter().chain(others).collect()
}

fn is_own(directory: &Path) -> bool {
    let uid = rustix::process::geteuid().as_raw();
    directory.is_absolute() && rustix::fs::stat(directory).is_ok_and(|stat| stat.st_uid == uid)
}

/// Runtime directories for the tests of this crate.
#[cfg(test)]
pub(crate) mod testing {
    use super::RuntimeDir;

    /// Makes a runtime directory within a temporary one.
    pub(crate) fn directory() -> (tempfile::TempDir, RuntimeDir) {
        let outer = tempfile::tempdir().unwrap();
        let directory = RuntimeDir::open_at(outer.path().join("r")).unwrap();
        (outer, directory)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::testing::directory;
    use super::*;

    #[test]
    fn directory_depends_on_session_and_user() {
        assert_eq!(choose(Some("/run/user/7".into()), 7), Path::new("/run/user/7/ringfence"));
        if may_use_run() {
            assert_eq!(choose(None, 0), Path::new("/run/ringfence"));
        }
        assert_eq!(choose(None, 7), Path::new("/tmp/ringfence-7"));
    }

    #[test]
    fn directory_open_to_others_is_refused() {
        let (outer, directory) = directory();
        let path = directory.path().to_owned();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o750)).unwrap();
        assert!(matches!(RuntimeDir::open_at(path), Err(RuntimeDirError::Unsafe { .. })));
        let link = outer.path().join("link");
        std::os::unix::fs::symlink("r", &link).unwrap();
        assert!(RuntimeDir::open_at(link).is_err(), "a link could lead anywhere");
    }

    #[test]
    fn socket_without_listener_is_stale() {
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
    fn removal_of_a_name_and_of_the_directory_is_noticed() {
        let (_outer, directory) = directory();
        let watch = directory.watch_removals().unwrap();
        let kept = directory.listen("s", &directory.lock().unwrap()).unwrap();
        assert!(!watch.has_fired() && directory.has_switch("s"));
        std::fs::remove_file(directory.path().join("s.sock")).unwrap();
        assert!(watch.has_fired() && !directory.has_switch("s"));
        assert!(directory.is_at_its_path());
        std::fs::remove_dir(directory.path()).unwrap();
        assert!(!directory.is_at_its_path());
        let again = RuntimeDir::open_at(directory.path().to_owned()).unwrap();
        assert!(again.is_at_its_path() && !directory.is_at_its_path());
        drop(kept);
    }

    #[test]
    fn path_longer_than_a_socket_address_works() {
        let outer = tempfile::tempdir().unwrap();
        let long = outer.path().join("d".repeat(120));
        let directory = RuntimeDir::open_at(long).unwrap();
        let kept = directory.listen("s", &directory.lock().unwrap()).unwrap();
        assert!(directory.connect("s").unwrap().is_some());
        drop(kept);
    }

    #[test]
    fn second_lock_waits_for_the_first() {
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

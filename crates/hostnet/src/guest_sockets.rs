//! Sockets in the runtime directory: one for each running guest of `run`, for `ringfence ps`, `exec` and others, and one for each
//! session of `pasta` and the like, for `ringfence policy`.
//!
//! ```text
//! launcher   bind .PID-TIME.guest, listen, rename to PID-TIME.guest; a session: PID-TIME.session
//! client     list *.guest, connect to each; a socket that refuses has no launcher any more: remove it
//! ```
//!
//! Only the user enters the directory, so no other user takes a name, fills a queue or makes the list long. A socket
//! gets its name by a rename after it listens. A connection to a name is therefore refused only if the launcher is gone.
//! A name holds the time in nanoseconds and is never used again, so a client cannot remove the socket of another
//! launcher. Clients that wait for a guest are woken by the rename ([`GuestWatch`](crate::guest_watch::GuestWatch)).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ringfence_sys::socket::peer;
use rustix::fs::{AtFlags, Dir};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::runtime_dir::{BACKLOG, RuntimeDir, RuntimeDirError};

/// Kinds of processes that listen in the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerKind {
    /// Launcher of a guest.
    Launcher,
    /// Session of `pasta`, `passt` or `slirp4netns`.
    Session,
}

impl ListenerKind {
    /// Returns the last part of the names of its sockets.
    fn suffix(self) -> &'static str {
        match self {
            ListenerKind::Launcher => ".guest",
            ListenerKind::Session => ".session",
        }
    }
}

/// First part of the name of a socket that does not listen yet.
const UNFINISHED: &str = ".";
/// Age from which a socket that does not listen yet counts as left behind.
const UNFINISHED_FOR: Duration = Duration::from_secs(60);
/// Maximum number of guests that one list has.
pub const GUESTS_MAX: usize = 4096;

/// Listening socket of a launcher or a session. Dropping it removes the name.
#[derive(Debug)]
pub struct GuestSocket {
    listener: OwnedFd,
    directory: OwnedFd,
    name: String,
}

impl GuestSocket {
    /// Returns `true` if the directory still has the name.
    pub fn is_named(&self) -> bool {
        rustix::fs::statat(&self.directory, &self.name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }
}

impl AsFd for GuestSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for GuestSocket {
    fn drop(&mut self) {
        // If the name stays, the next client finds that nobody listens there.
        let _ = rustix::fs::unlinkat(&self.directory, &self.name, AtFlags::empty());
    }
}

/// A guest's launcher, or a session, as its socket shows it.
#[derive(Debug)]
pub struct GuestEntry {
    /// Process number, as the process has it if this PID namespace has none.
    pub pid: i32,
    /// Connection, or the reason why there is none. A process that serves nobody has a full queue: `WouldBlock`.
    pub connection: io::Result<OwnedFd>,
}

impl RuntimeDir {
    /// Creates the listening socket of a guest's launcher, or of a session. It does not block.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn listen_for_clients(&self, kind: ListenerKind) -> Result<GuestSocket, RuntimeDirError> {
        let fail = |errno| self.error("making the socket for clients", errno);
        let listener = self.socket()?;
        rustix::io::ioctl_fionbio(&listener, true).map_err(fail)?;
        let directory = rustix::io::fcntl_dupfd_cloexec(self, 3).map_err(fail)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = format!("{}-{:x}{}", std::process::id(), now.as_nanos(), kind.suffix());
        let unfinished = format!("{UNFINISHED}{name}");
        rustix::net::bind(&listener, &self.address_of(&unfinished)?).map_err(fail)?;
        let listens = rustix::net::listen(&listener, BACKLOG)
            .and_then(|()| rustix::fs::renameat(&directory, &unfinished, &directory, &name));
        if let Err(errno) = listens {
            let _ = rustix::fs::unlinkat(&directory, &unfinished, AtFlags::empty());
            return Err(fail(errno));
        }
        Ok(GuestSocket { listener, directory, name })
    }

    /// Connects to all launchers or sessions of the directory, or to those with one process number, and removes sockets
    /// that such processes left behind. Does not block. Lists at most [`GUESTS_MAX`].
    ///
    /// # Errors
    ///
    /// Returns the kernel's error on reading the directory.
    pub fn listeners(
        &self,
        kind: ListenerKind,
        wanted: Option<i32>,
    ) -> Result<Vec<GuestEntry>, RuntimeDirError> {
        let fail = |errno| self.error("reading", errno);
        let mut found = Vec::new();
        for entry in Dir::read_from(self).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let Some(name) = entry.file_name().to_str().ok() else { continue };
            let Some(pid) = number_of(name, kind) else { continue };
            if wanted.is_some_and(|wanted| wanted != pid) {
                continue;
            }
            let connection = self.connect_to_guest(name);
            let is_left = matches!(connection, Err(Errno::CONNREFUSED))
                && (!name.starts_with(UNFINISHED) || self.is_old(name));
            if is_left {
                // Another client may have removed it.
                let _ = rustix::fs::unlinkat(self, name, AtFlags::empty());
            }
            let is_gone = matches!(connection, Err(Errno::CONNREFUSED | Errno::NOENT));
            if !is_gone && !name.starts_with(UNFINISHED) {
                let peer = connection.as_ref().ok().and_then(|socket| peer(socket).ok()?.pid);
                let connection = connection.map_err(io::Error::from);
                found.push(GuestEntry { pid: peer.unwrap_or(pid), connection });
            }
            if found.len() >= GUESTS_MAX {
                break;
            }
        }
        Ok(found)
    }

    /// Removes sockets that processes of this PID namespace left behind: those that were killed, and sessions that had given up
    /// root's rights. Looks at [`GUESTS_MAX`] names, and connects to no process that runs.
    pub fn remove_left_behind(&self, kind: ListenerKind) {
        let Ok(names) = Dir::read_from(self) else { return };
        for entry in names.take(GUESTS_MAX).flatten() {
            let Some(name) = entry.file_name().to_str().ok() else { continue };
            let pid = number_of(name, kind).and_then(Pid::from_raw);
            let has_ended = |pid| test_kill_process(pid) == Err(Errno::SRCH);
            if !name.starts_with(UNFINISHED)
                && pid.is_some_and(has_ended)
                && matches!(self.connect_to_guest(name), Err(Errno::CONNREFUSED))
            {
                let _ = rustix::fs::unlinkat(self, name, AtFlags::empty());
            }
        }
    }

    fn connect_to_guest(&self, name: &str) -> Result<OwnedFd, Errno> {
        let socket = self.socket().map_err(|_| Errno::MFILE)?;
        let address = self.address_of(name).map_err(|_| Errno::NAMETOOLONG)?;
        // The connection to a launcher that is stopped, and has many clients, would block.
        rustix::io::ioctl_fionbio(&socket, true)?;
        rustix::net::connect(&socket, &address)?;
        rustix::io::ioctl_fionbio(&socket, false)?;
        Ok(socket)
    }

    /// Returns `true` if a file of the directory was made [`UNFINISHED_FOR`] ago.
    fn is_old(&self, name: &str) -> bool {
        let made = rustix::fs::statat(self, name, AtFlags::SYMLINK_NOFOLLOW);
        let made = made.ok().and_then(|stat| u64::try_from(stat.st_mtime).ok());
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        made.is_some_and(|made| now.saturating_sub(made) > UNFINISHED_FOR.as_secs())
    }
}

/// Returns the process number in the name of a socket.
fn number_of(name: &str, kind: ListenerKind) -> Option<i32> {
    let name = name.strip_prefix(UNFINISHED).unwrap_or(name).strip_suffix(kind.suffix())?;
    name.split_once('-')?.0.parse().ok().filter(|pid| *pid > 0)
}

#[cfg(test)]
mod tests {
    use super::ListenerKind::{Launcher, Session};
    use super::*;
    use crate::runtime_dir::testing::directory;

    fn names(directory: &RuntimeDir) -> Vec<String> {
        let entries = std::fs::read_dir(directory.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn watch_is_woken_once_a_launcher_listens() {
        let (_outer, directory) = directory();
        let watch = directory.watch_guests().unwrap();
        let is_woken = || ringfence_sys::poll::wait_readable(&watch, Some(Duration::ZERO)).unwrap();
        let switch = directory.listen("s", &directory.lock().unwrap()).unwrap();
        assert!(!is_woken(), "a switch is no guest");
        let guest = directory.listen_for_clients(Launcher).unwrap();
        assert!(is_woken());
        let found = directory.listeners(Launcher, None).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].pid.unsigned_abs(), std::process::id());
        watch.clear();
        assert!(!is_woken());
        drop((switch, guest));
    }

    #[test]
    fn socket_of_a_launcher_that_was_killed_is_removed_by_a_client() {
        let (_outer, directory) = directory();
        let kept = directory.listen_for_clients(Launcher).unwrap();
        // A process that is killed removes no name.
        let left = std::mem::ManuallyDrop::new(directory.listen_for_clients(Launcher).unwrap());
        rustix::net::shutdown(&left.listener, rustix::net::Shutdown::Both).unwrap();
        let name = left.name.clone();
        assert!(names(&directory).contains(&name));
        assert_eq!(directory.listeners(Launcher, None).unwrap().len(), 1);
        assert_eq!(names(&directory), std::slice::from_ref(&kept.name));
        assert!(kept.is_named());
        drop(kept);
        assert!(names(&directory).is_empty());
    }

    #[test]
    fn socket_that_does_not_listen_yet_is_no_guest_and_stays() {
        let (_outer, directory) = directory();
        let socket = directory.socket().unwrap();
        let name = format!("{UNFINISHED}7-1.guest");
        rustix::net::bind(&socket, &directory.address_of(&name).unwrap()).unwrap();
        assert!(directory.listeners(Launcher, None).unwrap().is_empty());
        assert_eq!(names(&directory), [name]);
    }

    #[test]
    fn socket_of_an_ended_process_is_removed_and_that_of_another_pid_namespace_stays() {
        let (_outer, directory) = directory();
        // A number that no process has: the maximum is lower.
        let bind = |name: &str| {
            let socket = directory.socket().unwrap();
            rustix::net::bind(&socket, &directory.address_of(name).unwrap()).unwrap();
            socket
        };
        let serving = bind("1999999998-1.session");
        rustix::net::listen(&serving, BACKLOG).unwrap();
        let own = format!("{}-1.session", std::process::id());
        drop((bind("1999999999-1.session"), bind("1999999999-1.guest"), bind(&own)));
        directory.remove_left_behind(Session);
        let mut left = names(&directory);
        left.sort();
        let mut expected = ["1999999998-1.session", "1999999999-1.guest", &own];
        expected.sort_unstable();
        assert_eq!(left, expected);
    }

    #[test]
    fn session_is_listed_among_sessions_alone() {
        let (_outer, directory) = directory();
        let session = directory.listen_for_clients(Session).unwrap();
        assert_eq!(directory.listeners(Session, None).unwrap().len(), 1);
        assert!(directory.listeners(Launcher, None).unwrap().is_empty());
        drop(session);
        assert!(names(&directory).is_empty());
    }

    #[test]
    fn launcher_with_a_full_queue_is_listed_without_a_connection() {
        let (_outer, directory) = directory();
        let _guest = directory.listen_for_clients(Launcher).unwrap();
        let mut clients = Vec::new();
        let full = (0..1000).find_map(|_| {
            let found = directory.listeners(Launcher, None).unwrap().remove(0);
            clients.push(found.connection.map_err(|error| error.kind()));
            clients.last().unwrap().as_ref().err().copied()
        });
        assert_eq!(full, Some(io::ErrorKind::WouldBlock));
    }

    #[test]
    fn only_names_of_guests_have_a_process_number() {
        assert_eq!(number_of("7-ff.guest", Launcher), Some(7));
        assert_eq!(number_of(".7-ff.guest", Launcher), Some(7));
        assert_eq!(number_of("7-ff.session", Session), Some(7));
        for name in
            ["7.sock", "guest", "x-1.guest", "-7-1.guest", "0-1.guest", "7.guest", "7-1.session"]
        {
            assert_eq!(number_of(name, Launcher), None, "{name}");
        }
    }
}

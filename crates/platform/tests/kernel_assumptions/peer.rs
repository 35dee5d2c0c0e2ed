//! Another process: a fork of this one that runs a closure and talks over a socket.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};

/// How long either side waits for the other.
const WITHIN: Duration = Duration::from_secs(20);

/// One end of the talk: numbers, one a message.
pub(crate) struct Line(OwnedFd);

impl Line {
    /// Sends a number.
    pub(crate) fn tell(&self, number: u64) {
        // The other end may be gone, which the next `hear` shows.
        let _ = rustix::net::send(&self.0, &number.to_le_bytes(), SendFlags::NOSIGNAL);
    }

    /// Waits for a number; `None` when the other end is gone or silent.
    pub(crate) fn hear(&self) -> Option<u64> {
        let timeout = Timespec::try_from(WITHIN).ok()?;
        if poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&timeout)) != Ok(1) {
            return None;
        }
        let mut bytes = [0u8; 8];
        match rustix::net::recv(&self.0, &mut bytes[..], RecvFlags::empty()) {
            Ok((_, 8)) => Some(u64::from_le_bytes(bytes)),
            _ => None,
        }
    }
}

/// A child. It is killed, and waited for, when this is dropped.
pub(crate) struct Peer {
    pub(crate) pid: libc::pid_t,
    line: Line,
}

impl Peer {
    /// Forks. The child runs `body` and exits; what it has to say it tells over the line, since a
    /// panic there could wait for a lock that another thread of this process holds.
    pub(crate) fn fork(body: impl FnOnce(&Line)) -> Peer {
        let kind = SocketType::SEQPACKET;
        let (near, far) =
            socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        // SAFETY: the child has one thread, and runs nothing but `body`, which makes system calls and
        // touches memory of its own or shared with this process.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork: {}", std::io::Error::last_os_error());
        if pid > 0 {
            return Peer { pid, line: Line(near) };
        }
        drop(near);
        // SAFETY: only asks that this process be killed when its parent is gone.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        let line = Line(far);
        body(&line);
        // SAFETY: ends the child at once, running nothing of the parent's that it inherited.
        unsafe { libc::_exit(0) }
    }

    pub(crate) fn tell(&self, number: u64) {
        self.line.tell(number);
    }

    /// Waits for a number.
    pub(crate) fn hear(&self) -> u64 {
        self.line.hear().expect("the child says something")
    }

    /// Waits for its end; the status as `waitpid` gives it.
    pub(crate) fn wait(mut self) -> i32 {
        let mut status = 0;
        // SAFETY: waits for a child of this process and writes one integer.
        let waited = unsafe { libc::waitpid(self.pid, &raw mut status, 0) };
        assert_eq!(waited, self.pid);
        self.pid = 0;
        status
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if self.pid > 0 {
            // SAFETY: a child of this process that was not waited for yet, so the number is its.
            unsafe {
                libc::kill(self.pid, libc::SIGKILL);
                libc::waitpid(self.pid, core::ptr::null_mut(), 0);
            }
        }
    }
}

/// The error of the last system call, for a child to tell; 0 when `failed` is not.
pub(crate) fn errno_if(failed: bool) -> u64 {
    let errno = std::io::Error::last_os_error().raw_os_error();
    if failed { errno.and_then(|n| u64::try_from(n).ok()).unwrap_or(u64::MAX) } else { 0 }
}

//! Peer process: a fork of this process that runs a closure and exchanges numbers over a socket.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};

/// Time limit of each wait for the other side.
const WITHIN: Duration = Duration::from_secs(20);

/// One end of the socket pair; each message carries one number.
pub(crate) struct Line(OwnedFd);

impl Line {
    /// Sends `number`. Ignores the error of a closed socket.
    pub(crate) fn send(&self, number: u64) {
        // The next `receive` reports that the other end is closed.
        let _ = rustix::net::send(&self.0, &number.to_le_bytes(), SendFlags::NOSIGNAL);
    }

    /// Waits for a number. Returns `None` when the other end is closed or the time limit is over.
    pub(crate) fn receive(&self) -> Option<u64> {
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

/// Child process. Dropping the value kills the process and waits for it.
pub(crate) struct Peer {
    pub(crate) pid: libc::pid_t,
    line: Line,
}

impl Peer {
    /// Forks. The child runs `body` and exits. It reports through the line and never panics: a panic could
    /// wait for a lock that another thread of this process holds.
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

    pub(crate) fn send(&self, number: u64) {
        self.line.send(number);
    }

    /// Waits for a number of the child and returns it.
    pub(crate) fn receive(&self) -> u64 {
        self.line.receive().expect("a number from the child")
    }

    /// Waits for the exit of the child and returns the status of `waitpid`.
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

/// Returns the error number of the last system call if `failed` is set, and 0 otherwise.
pub(crate) fn errno_if(failed: bool) -> u64 {
    let errno = std::io::Error::last_os_error().raw_os_error();
    if failed { errno.and_then(|n| u64::try_from(n).ok()).unwrap_or(u64::MAX) } else { 0 }
}

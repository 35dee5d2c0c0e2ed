//! Waiting for files: `poll` with a deadline, and the conversion of durations for it.
//!
//! [`wait_any`] restarts after a signal and keeps its deadline. [`timespec`] is for callers that need
//! another system call with a time limit (`epoll_wait`, `ppoll` with a relative limit).

// #syscall all poll@x86_64,ppoll: a thread sleeps until a file is ready

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Converts a duration for a system call. Durations beyond `i64` seconds become the longest one.
pub fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

/// Blocks until a file is ready or the deadline is reached. Returns the number of files that are
/// ready, 0 after the deadline. Without a deadline it blocks until a file is ready.
///
/// # Errors
///
/// Those of `poll`, except `EINTR`; none are expected.
pub fn wait_any(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<usize> {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        match poll(fds, left.map(timespec).as_ref()) {
            Ok(ready) => return Ok(ready),
            Err(Errno::INTR) => {}
            Err(other) => return Err(other.into()),
        }
    }
}

/// Blocks until a file is readable, or its other end is closed. Returns `false` if `timeout` elapsed
/// first. Without a timeout it blocks until then.
///
/// # Errors
///
/// Those of [`wait_any`].
pub fn wait_readable(fd: impl AsFd, timeout: Option<Duration>) -> io::Result<bool> {
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    wait_any(&mut fds, deadline).map(|ready| ready > 0)
}

/// Blocks until the other end of a socket is closed. Returns `false` if `timeout` elapsed first.
/// Data that can be read does not end the wait.
///
/// # Errors
///
/// Those of [`wait_any`].
pub fn wait_hung_up(fd: impl AsFd, timeout: Duration) -> io::Result<bool> {
    let mut fds = [PollFd::new(&fd, PollFlags::empty())];
    wait_any(&mut fds, Some(Instant::now() + timeout)).map(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_without_data_returns_after_the_deadline() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert!(!wait_readable(&reader, Some(Duration::from_millis(1))).unwrap());
    }

    #[test]
    fn wait_returns_for_data_and_for_a_closed_end() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        rustix::io::write(&writer, b"x").unwrap();
        assert!(wait_readable(&reader, None).unwrap());
        drop(writer);
        assert!(wait_hung_up(&reader, Duration::from_secs(60)).unwrap());
    }

    #[test]
    fn timespec_of_the_longest_duration_is_bounded() {
        assert_eq!(timespec(Duration::MAX).tv_sec, i64::MAX);
        let converted = timespec(Duration::new(2, 5));
        assert_eq!((converted.tv_sec, converted.tv_nsec), (2, 5));
    }
}

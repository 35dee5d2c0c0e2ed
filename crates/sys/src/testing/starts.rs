//! Starts of processes beside threads that close descriptors.
//!
//! A child has a copy of each descriptor until it executes its program. Meanwhile a channel that another thread closes stays
//! open for its peer, a lock stays held, and a port stays taken.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

// #syscall none: for tests

use std::io;
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::pipe::PipeFlags;
use rustix::process::Resource;

/// Number above the descriptors of a test.
const ABOVE_ALL: u64 = 4000;

/// Waits until no process of [`spawn`] starts, and prevents it from then on.
pub fn prevent() -> MutexGuard<'static, ()> {
    static STARTS: Mutex<()> = Mutex::new(());
    STARTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a process while no other thread does. Returns once it has closed its copies of this process's descriptors.
///
/// # Errors
///
/// Returns the error of [`Command::spawn`].
///
/// # Panics
///
/// Panics if there is no descriptor for a pipe.
pub fn spawn(command: &mut Command) -> io::Result<Child> {
    let _one = prevent();
    // The standard library returns once the child has new memory. It closes the copies after that, in ascending order: this one
    // is the last.
    let most = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(ABOVE_ALL);
    let number = i32::try_from(ABOVE_ALL.min(most - 1)).unwrap();
    let (end, copied) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
    let last = rustix::io::fcntl_dupfd_cloexec(&copied, number).unwrap();
    drop(copied);
    let child = command.spawn()?;
    drop(last);
    // Nobody writes, so this is the end.
    rustix::io::read(&end, &mut [0]).unwrap();
    Ok(child)
}

/// Closes descriptors while no process of [`spawn`] starts, so that their peers observe it at once.
pub fn close<T>(ends: T) {
    let _none = prevent();
    drop(ends);
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn socket_that_is_closed_beside_starts_is_closed_for_its_peer_at_once() {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    spawn(&mut Command::new("true")).unwrap().wait().unwrap();
                }
            });
            for _ in 0..200 {
                let (near, far) = UnixStream::pair().unwrap();
                far.set_nonblocking(true).unwrap();
                close(near);
                let read = rustix::io::read(&far, &mut [0]);
                is_over.store(read.is_err(), Ordering::Relaxed);
                assert_eq!(read, Ok(0));
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn program_that_does_not_exist_is_an_error() {
        assert!(spawn(&mut Command::new("/nonexistent")).is_err());
    }
}

//! Signals as a readable descriptor (signalfd(2)), and signal masks for child processes.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// Descriptor from which blocked signals are read.
#[derive(Debug)]
pub struct Signals {
    fd: SignalFd,
}

/// A signal that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedSignal {
    pub number: i32,
    /// Set if a process sent the signal. Signals of the terminal's keys (Ctrl-C) come from the
    /// kernel, which signals the whole foreground process group; the other members have received
    /// them too.
    pub by_process: bool,
}

impl Signals {
    /// Blocks the signals `wanted` and opens a descriptor for them. Signals that this process was
    /// started with ignored (`nohup`) stay ignored. Child processes inherit the signal mask.
    ///
    /// Call this while the process has one thread.
    ///
    /// # Errors
    ///
    /// Fails if no descriptor is free or `/proc` cannot be read.
    pub fn new(wanted: &[Signal]) -> io::Result<Signals> {
        let ignored = ignored_mask()?;
        let set: SigSet =
            wanted.iter().copied().filter(|&signal| !is_in(ignored, signal as i32)).collect();
        set.thread_block()?;
        let fd = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        Ok(Signals { fd })
    }

    /// Returns the next pending signal, if there is one.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error; none is expected.
    pub fn next(&self) -> io::Result<Option<ReceivedSignal>> {
        /// `SI_KERNEL`; what processes send has codes of 0 or less (sigaction(2)).
        const FROM_PROCESS_MAX: i32 = 0;
        let info = self.fd.read_signal()?;
        Ok(info.and_then(|info| {
            let number = i32::try_from(info.ssi_signo).ok()?;
            Some(ReceivedSignal { number, by_process: info.ssi_code <= FROM_PROCESS_MAX })
        }))
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Returns the numbers of the signals that are blocked. Read it before [`Signals::new`] to start a
/// command with the mask that this process was started with.
///
/// # Errors
///
/// Returns the kernel's error; none is expected.
pub fn blocked() -> io::Result<Vec<i32>> {
    Ok(SigSet::thread_get_mask()?.iter().map(|signal| signal as i32).collect())
}

/// Calls `act`, typically to start a program, while exactly the given signals are blocked. All
/// other signals may arrive meanwhile. Use it only where they do no harm: the kernel does not
/// deliver them to process 1 of a PID namespace.
///
/// # Errors
///
/// Returns the kernel's error; none is expected.
pub fn with_blocked<T>(numbers: &[i32], act: impl FnOnce() -> T) -> io::Result<T> {
    let wanted: SigSet =
        numbers.iter().filter_map(|&number| Signal::try_from(number).ok()).collect();
    let before = SigSet::thread_get_mask()?;
    wanted.thread_set_mask()?;
    let result = act();
    before.thread_set_mask()?;
    Ok(result)
}

/// Blocks every signal that can be blocked, for a process that only waits for others.
///
/// # Errors
///
/// Returns the kernel's error; none is expected.
pub fn block_all() -> io::Result<()> {
    Ok(SigSet::all().thread_block()?)
}

/// Returns the name of a signal, if it has one.
pub fn name(number: i32) -> Option<&'static str> {
    Signal::try_from(number).ok().map(Signal::as_str)
}

/// Sends a signal to a child process that was not waited for yet.
///
/// # Errors
///
/// Returns `InvalidInput` if `pid` does not denote one process, and otherwise the kernel's error.
pub fn send(pid: u32, number: i32) -> io::Result<()> {
    let pid = i32::try_from(pid).map_err(|_| io::ErrorKind::InvalidInput)?;
    // 0 and negative numbers denote process groups.
    if pid <= 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let signal = Signal::try_from(number)?;
    Ok(nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal)?)
}

/// Returns the mask of ignored signals: bit n-1 for signal n (`SigIgn` of proc_pid_status(5)).
fn ignored_mask() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    parse_ignored(&status)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "/proc/self/status: no SigIgn"))
}

fn parse_ignored(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

fn is_in(mask: u64, number: i32) -> bool {
    u32::try_from(number - 1).ok().and_then(|bit| mask.checked_shr(bit)).is_some_and(|m| m & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_parsed_from_status_file() {
        let mask = parse_ignored("Name:\tx\nSigIgn:\t0000000000001001\nSigCgt:\t0\n").unwrap();
        assert!(is_in(mask, Signal::SIGHUP as i32));
        assert!(is_in(mask, Signal::SIGPIPE as i32));
        assert!(!is_in(mask, Signal::SIGTERM as i32));
        assert!(!is_in(mask, 0) && !is_in(mask, 65) && !is_in(mask, -3));
        assert_eq!(parse_ignored("SigCgt: 0\n"), None);
    }

    #[test]
    fn send_to_process_group_number_is_refused() {
        assert!(send(0, 15).is_err());
        assert!(send(u32::MAX, 15).is_err());
    }
}

//! Signals as a readable descriptor (signalfd(2)), and signal masks for child processes.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ringfence_sys::signals::{self, SignalSet};
use rustix::process::{Pid, Signal};

/// Descriptor from which blocked signals are read.
#[derive(Debug)]
pub struct Signals {
    fd: OwnedFd,
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
        let ignored = ignored_signals()?;
        let set: SignalSet =
            wanted.iter().copied().filter(|signal| !ignored.contains(signal.as_raw())).collect();
        signals::block(set)?;
        Ok(Signals { fd: signals::open(set)? })
    }

    /// Returns the next pending signal, if there is one.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error; none is expected.
    pub fn next(&self) -> io::Result<Option<ReceivedSignal>> {
        /// `SI_KERNEL`; what processes send has codes of 0 or less (sigaction(2)).
        const FROM_PROCESS_MAX: i32 = 0;
        let pending = signals::read(&self.fd)?;
        Ok(pending.map(|signal| ReceivedSignal {
            number: signal.number,
            by_process: signal.code <= FROM_PROCESS_MAX,
        }))
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Returns the signals that a command is to ignore because this program was started so, although this program does
/// not ignore them itself: it needs `SIGCHLD` to learn of the end of its children, and Rust programs change `SIGPIPE`.
/// Call it before the first child is started.
///
/// # Errors
///
/// Fails if `/proc` cannot be read.
pub fn take_ignored() -> io::Result<Vec<i32>> {
    let (child, pipe) = (Signal::CHILD.as_raw(), Signal::PIPE.as_raw());
    let mut taken = Vec::new();
    if ignored_signals()?.contains(child) {
        signals::restore_default(child)?;
        taken.push(child);
    }
    if signals::pipe_was_ignored() {
        taken.push(pipe);
    }
    Ok(taken)
}

/// Returns the numbers of the signals that are blocked. Read it before [`Signals::new`] to start a
/// command with the mask that this process was started with.
///
/// # Errors
///
/// Returns the kernel's error; none is expected.
pub fn blocked() -> io::Result<Vec<i32>> {
    Ok(signals::mask()?.numbers().collect())
}

/// Calls `act`, typically to start a program, while exactly the given signals are blocked. All
/// other signals may arrive meanwhile. Use it only where they do no harm: the kernel does not
/// deliver them to process 1 of a PID namespace.
///
/// # Errors
///
/// Returns the kernel's error; none is expected.
pub fn with_blocked<T>(numbers: &[i32], act: impl FnOnce() -> T) -> io::Result<T> {
    let before = signals::replace_mask(numbers.iter().copied().collect())?;
    let result = act();
    signals::replace_mask(before)?;
    Ok(result)
}

/// Blocks every signal that can be blocked, for a process that only waits for others.
///
/// # Errors
///
/// Returns the kernel's error; none is expected.
pub fn block_all() -> io::Result<()> {
    signals::block(SignalSet::ALL)
}

/// Names of the signals from 1 on (signal(7), all architectures that Ringfence runs on).
const NAMES: [&str; 31] = [
    "SIGHUP",
    "SIGINT",
    "SIGQUIT",
    "SIGILL",
    "SIGTRAP",
    "SIGABRT",
    "SIGBUS",
    "SIGFPE",
    "SIGKILL",
    "SIGUSR1",
    "SIGSEGV",
    "SIGUSR2",
    "SIGPIPE",
    "SIGALRM",
    "SIGTERM",
    "SIGSTKFLT",
    "SIGCHLD",
    "SIGCONT",
    "SIGSTOP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGXCPU",
    "SIGXFSZ",
    "SIGVTALRM",
    "SIGPROF",
    "SIGWINCH",
    "SIGIO",
    "SIGPWR",
    "SIGSYS",
];

/// Returns the name of a signal, if it has one.
pub fn name(number: i32) -> Option<&'static str> {
    NAMES.get(usize::try_from(number.checked_sub(1)?).ok()?).copied()
}

/// Sends a signal to a child process that was not waited for yet.
///
/// # Errors
///
/// Returns `InvalidInput` if `pid` does not denote one process, and otherwise the kernel's error.
pub fn send(pid: u32, number: i32) -> io::Result<()> {
    let pid = i32::try_from(pid).map_err(|_| io::ErrorKind::InvalidInput)?;
    // 0 and negative numbers denote process groups.
    let pid = Pid::from_raw(pid).filter(|pid| pid.as_raw_nonzero().is_positive());
    let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
    let signal = Signal::from_named_raw(number).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::kill_process(pid, signal)?)
}

/// Sends a signal to the process group of a child that was not waited for yet, and that leads the group.
///
/// # Errors
///
/// As [`send`].
pub fn send_to_group(leader: Pid, number: i32) -> io::Result<()> {
    let signal = Signal::from_named_raw(number).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::kill_process_group(leader, signal)?)
}

/// Stops this process, or its whole process group, as the terminal would: by a signal of job control. Returns when
/// it is continued. Returns at once if the kernel does not stop it: no process could continue an orphaned group.
/// Returns `true` if the process was stopped.
///
/// # Errors
///
/// Returns the kernel's error; none is expected.
pub fn stop(signal: Signal, whole_group: bool) -> io::Result<bool> {
    let (number, resumed) = (signal.as_raw(), Signal::CONT.as_raw());
    let others: Vec<i32> = blocked()?.into_iter().filter(|other| *other != number).collect();
    with_blocked(&others, || {
        let group = if whole_group {
            rustix::process::kill_current_process_group(signal)
        } else {
            rustix::process::kill_process(rustix::process::getpid(), signal)
        };
        group.map_err(io::Error::from)
    })??;
    signals::is_pending(resumed)
}

/// Returns the signals that this process ignores (`SigIgn` of proc_pid_status(5)).
fn ignored_signals() -> io::Result<SignalSet> {
    let status = fs::read_to_string("/proc/self/status")?;
    parse_ignored(&status)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "/proc/self/status: no SigIgn"))
}

fn parse_ignored(status: &str) -> Option<SignalSet> {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(line.trim(), 16).ok().map(SignalSet::from_bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_parsed_from_status_file() {
        let ignored = parse_ignored("Name:\tx\nSigIgn:\t0000000000001001\nSigCgt:\t0\n").unwrap();
        let expected = [Signal::HUP, Signal::PIPE].map(Signal::as_raw);
        assert_eq!(ignored.numbers().collect::<Vec<_>>(), expected);
        assert_eq!(parse_ignored("SigCgt: 0\n"), None);
    }

    #[test]
    fn every_named_signal_has_the_name_of_its_number() {
        for (signal, expected) in [
            (Signal::HUP, "SIGHUP"),
            (Signal::KILL, "SIGKILL"),
            (Signal::SEGV, "SIGSEGV"),
            (Signal::STKFLT, "SIGSTKFLT"),
            (Signal::CHILD, "SIGCHLD"),
            (Signal::TTOU, "SIGTTOU"),
            (Signal::WINCH, "SIGWINCH"),
            (Signal::SYS, "SIGSYS"),
        ] {
            assert_eq!(name(signal.as_raw()), Some(expected));
        }
        for number in 1..32 {
            assert!(Signal::from_named_raw(number).is_some() && name(number).is_some(), "{number}");
        }
        assert_eq!([name(0), name(-1), name(32), name(i32::MIN)], [None; 4]);
    }

    #[test]
    fn send_to_process_group_number_is_refused() {
        assert!(send(0, 15).is_err());
        assert!(send(u32::MAX, 15).is_err());
    }
}

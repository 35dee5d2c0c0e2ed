//! Terminal of the user who started this program, and its connection to the terminal of a command in a guest.
//!
//! A command has no handle of the user's terminal: it has one of the guest's own, and [`Relay`] copies between the two.
//! Keys reach the command only while this program's job is in the foreground of the user's terminal.

mod relay;

pub(crate) use relay::Relay;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Instant;

use ringfence_sys::poll::wait_any;
use ringfence_sys::{namespaces, terminal};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::termios::{OptionalActions, Termios, Winsize};

/// Standard input, output and error.
const STREAMS: [RawFd; 3] = [0, 1, 2];

/// Terminal of the user.
#[derive(Debug)]
pub(crate) struct UserTerminal {
    file: File,
    /// Set if it is the controlling terminal of this process.
    is_controlling: bool,
    /// Set if reads and writes return an error in place of blocking. A terminal of another user cannot be opened again, and the
    /// streams that lead to it are shared with other programs.
    is_nonblocking: bool,
}

impl UserTerminal {
    /// Opens the controlling terminal, or the terminal of the first standard stream that is one.
    pub(crate) fn open() -> Option<UserTerminal> {
        if let Some(file) = terminal::open_controlling() {
            return Some(UserTerminal { file, is_controlling: true, is_nonblocking: true });
        }
        let number = STREAMS.into_iter().find(|number| terminal::is_terminal(*number, false))?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = rustix::fs::open(format!("/proc/self/fd/{number}"), flags, Mode::empty());
        let (file, is_nonblocking) = match opened {
            Ok(file) => (File::from(file), true),
            Err(_) => (File::from(duplicate(number).ok()?), false),
        };
        Some(UserTerminal { file, is_controlling: false, is_nonblocking })
    }

    /// Returns `true` if it is the controlling terminal of this process.
    pub(crate) fn is_controlling(&self) -> bool {
        self.is_controlling
    }

    /// Returns `true` if a standard stream is this terminal.
    pub(crate) fn is_stream(&self, number: RawFd) -> bool {
        terminal::is_terminal(number, self.is_controlling)
    }

    /// Returns `true` if this process is in the foreground of the terminal, or the terminal has no jobs.
    pub(crate) fn is_foreground(&self) -> bool {
        if !self.is_controlling {
            return true;
        }
        let foreground = match rustix::termios::tcgetpgrp(&self.file) {
            Ok(foreground) => Some(foreground),
            // A group without a number in this PID namespace.
            Err(Errno::OPNOTSUPP) => None,
            Err(_) => return false,
        };
        foreground == namespaces::process_group()
    }

    /// Makes the process group of this process the foreground. SIGTTOU must be blocked.
    pub(crate) fn take_back(&self) {
        // A group without a number cannot be named. The launcher outside takes its terminal back itself.
        if let Some(group) = namespaces::process_group() {
            // Fails harmlessly if the terminal was hung up.
            let _ = rustix::termios::tcsetpgrp(&self.file, group);
        }
    }

    /// Returns the modes of the terminal. `None` if it was hung up.
    pub(crate) fn modes(&self) -> Option<Termios> {
        rustix::termios::tcgetattr(&self.file).ok()
    }

    /// Sets the modes of the terminal at once. SIGTTOU must be blocked.
    pub(crate) fn set_modes(&self, modes: &Termios) {
        let _ = rustix::termios::tcsetattr(&self.file, OptionalActions::Now, modes);
    }

    fn is_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.file, PollFlags::empty())];
        matches!(wait_any(&mut fds, Some(Instant::now())), Ok(1..))
    }

    fn size(&self) -> Option<Winsize> {
        rustix::termios::tcgetwinsize(&self.file).ok()
    }

    /// Reads what has been typed. `WouldBlock` if there is nothing.
    fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        self.check_ready(PollFlags::IN)?;
        Ok(rustix::io::read(&self.file, bytes)?)
    }

    /// Writes a part of the bytes. `WouldBlock` if there is no room.
    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        /// Bytes that a terminal takes soon after it had room.
        const PART: usize = 512;
        self.check_ready(PollFlags::OUT)?;
        let length = if self.is_nonblocking { bytes.len() } else { bytes.len().min(PART) };
        Ok(rustix::io::write(&self.file, &bytes[..length])?)
    }

    fn check_ready(&self, wanted: PollFlags) -> io::Result<()> {
        if self.is_nonblocking {
            return Ok(());
        }
        let mut fds = [PollFd::new(&self.file, wanted)];
        match wait_any(&mut fds, Some(Instant::now()))? {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            _ => Ok(()),
        }
    }
}

impl AsFd for UserTerminal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn duplicate(number: RawFd) -> io::Result<OwnedFd> {
    let streams = [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()];
    let stream = streams.into_iter().find(|stream| stream.as_raw_fd() == number);
    stream.ok_or(io::ErrorKind::InvalidInput)?.try_clone_to_owned()
}

//! Terminal of the guest's command, and its job control.
//!
//! The command is a process group of its own in every guest. Its terminal is one of these ([`TerminalKind`]):
//!
//! ```text
//! None     the caller has no terminal, and neither has the command
//! Own      init leads a session on a new terminal. The launcher copies between that and the caller's terminal
//! Shared   the caller's session and terminal. A seccomp filter refuses to write to its input
//! ```
//!
//! With `Own` every descriptor of the command that is the caller's terminal is replaced by the new one, so the command
//! has no handle of the caller's. Init is the parent of the command in one session with it. Therefore the kernel stops the
//! command at Ctrl-Z, and when it reads the terminal from the background, as it does with the jobs of a shell.

use std::io;
use std::os::fd::{OwnedFd, RawFd};

use ringfence_sandbox::{isolation, signals};
use ringfence_sys::{namespaces, terminal};
use rustix::process::{Pid, Signal};
use rustix::pty::OpenptFlags;

use crate::config::TerminalKind;

/// Number of standard input.
const STDIN: RawFd = 0;
/// Numbers of standard output and error.
pub(crate) const OUTPUTS: [RawFd; 2] = [1, 2];

/// Descriptors of the caller's terminal that the command would inherit. They are known only as long as init is in the
/// caller's session.
pub(crate) struct CallersTerminal {
    kind: TerminalKind,
    /// The caller's terminal, if the command shares it.
    shared: Option<OwnedFd>,
    numbers: Vec<RawFd>,
}

/// Terminal of the command, if it has one.
pub(crate) struct CommandTerminal {
    /// The terminal itself, on the side of programs.
    terminal: Option<OwnedFd>,
    /// Set if init leads the terminal's session.
    is_own: bool,
    /// Numbers of the command's descriptors that the terminal replaces.
    numbers: Vec<RawFd>,
}

impl CallersTerminal {
    /// Finds the descriptors. `stdin` is the number of the command's standard input in this process.
    pub(crate) fn find(kind: TerminalKind, stdin: RawFd) -> io::Result<CallersTerminal> {
        let (mut shared, mut numbers) = (None, Vec::new());
        match kind {
            TerminalKind::None => {}
            TerminalKind::Shared => shared = terminal::open_controlling().map(OwnedFd::from),
            TerminalKind::Own { controlling } => {
                let is_callers = |number: &RawFd| terminal::is_terminal(*number, controlling);
                numbers.extend(is_callers(&stdin).then_some(STDIN));
                let others = OUTPUTS.into_iter().chain(namespaces::inheritable_fds()?);
                numbers.extend(others.filter(is_callers));
            }
        }
        Ok(CallersTerminal { kind, shared, numbers })
    }

    /// Makes the command's terminal. For a new one, begins a session and returns the other end.
    pub(crate) fn replace(self) -> io::Result<(CommandTerminal, Option<OwnedFd>)> {
        let TerminalKind::Own { .. } = self.kind else {
            let terminal =
                CommandTerminal { terminal: self.shared, is_own: false, numbers: vec![] };
            return Ok((terminal, None));
        };
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = rustix::pty::openpt(flags)?;
        rustix::pty::unlockpt(&master)?;
        // By the other end: the guest need not see the directory of terminals.
        let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
        rustix::process::setsid()?;
        rustix::process::ioctl_tiocsctty(&slave)?;
        let terminal =
            CommandTerminal { terminal: Some(slave), is_own: true, numbers: self.numbers };
        Ok((terminal, Some(master)))
    }
}

impl CommandTerminal {
    /// Returns the descriptors that replace those of the caller's terminal, with their numbers.
    pub(crate) fn descriptors(&self) -> io::Result<Vec<(OwnedFd, RawFd)>> {
        let Some(terminal) = &self.terminal else { return Ok(vec![]) };
        self.numbers.iter().map(|number| Ok((terminal.try_clone()?, *number))).collect()
    }

    /// Returns the terminal for a command that starts in its foreground.
    pub(crate) fn for_foreground(&self) -> io::Result<Option<OwnedFd>> {
        self.terminal.as_ref().map(OwnedFd::try_clone).transpose()
    }

    /// Denies this process and its children to write to the input of a terminal that is the caller's, too.
    pub(crate) fn restrict(&self) -> io::Result<()> {
        match &self.terminal {
            Some(_) if !self.is_own => isolation::deny_terminal_input(),
            _ => Ok(()),
        }
    }

    /// Moves the command to the foreground or the background of the terminal, and continues it. `was_stopped` is set if it
    /// was stopped: otherwise a job of the command may be in the foreground, and stays there.
    pub(crate) fn resume(&self, command: Pid, foreground: bool, was_stopped: bool) {
        let is_in_front = self.foreground();
        match &self.terminal {
            Some(terminal) if foreground => {
                let is_own = is_in_front == Some(rustix::process::getpid());
                if was_stopped || is_own || !self.is_own {
                    // Fails if the terminal was hung up.
                    let _ = rustix::termios::tcsetpgrp(terminal, command);
                }
            }
            Some(_) if is_in_front == Some(command) => self.to_background(),
            _ => {}
        }
        let _ = signals::send_to_group(command, Signal::CONT.as_raw());
    }

    /// Moves the terminal's foreground to init, so that the kernel stops a command that reads the terminal. The
    /// launcher does that itself with a terminal that is its own, too.
    pub(crate) fn to_background(&self) {
        if let Some(terminal) = self.terminal.as_ref().filter(|_| self.is_own) {
            let _ = rustix::termios::tcsetpgrp(terminal, rustix::process::getpid());
        }
    }

    fn foreground(&self) -> Option<Pid> {
        self.terminal.as_ref().and_then(|terminal| rustix::termios::tcgetpgrp(terminal).ok())
    }
}

//! The terminal that the launcher was started from.

use std::fs::File;

use rustix::process::Pid;
use rustix::termios::{OptionalActions, Termios};

/// What to put back when the command has ended.
#[derive(Debug)]
pub(crate) struct Terminal {
    file: File,
    group: Pid,
    modes: Option<Termios>,
}

impl Terminal {
    /// The controlling terminal, if there is one and this process is in its foreground.
    pub(crate) fn if_foreground() -> Option<Terminal> {
        let file = File::options().read(true).write(true).open("/dev/tty").ok()?;
        let group = rustix::process::getpgrp();
        (rustix::termios::tcgetpgrp(&file) == Ok(group)).then(|| {
            let modes = rustix::termios::tcgetattr(&file).ok();
            Terminal { file, group, modes }
        })
    }

    /// Takes the terminal back from a shell that was the command: it had made a process group of
    /// its own the foreground, and could not name ours when it ended. SIGTTOU must be blocked.
    pub(crate) fn take_back(&self) {
        // Without a terminal (it was hung up) there is nothing to take back.
        let _ = rustix::termios::tcsetpgrp(&self.file, self.group);
    }

    /// Puts the modes back, after a command that had no chance to do so itself.
    pub(crate) fn restore_modes(&self) {
        if let Some(modes) = &self.modes {
            let _ = rustix::termios::tcsetattr(&self.file, OptionalActions::Drain, modes);
        }
    }
}

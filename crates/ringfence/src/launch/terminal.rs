//! Controlling terminal of the launcher.

use std::fs::File;

use rustix::process::Pid;
use rustix::termios::{OptionalActions, Termios};

/// Terminal state to restore after the command has ended.
#[derive(Debug)]
pub(crate) struct Terminal {
    file: File,
    group: Pid,
    modes: Option<Termios>,
}

impl Terminal {
    /// Opens the controlling terminal if this process is in its foreground.
    pub(crate) fn if_foreground() -> Option<Terminal> {
        let file = File::options().read(true).write(true).open("/dev/tty").ok()?;
        let group = rustix::process::getpgrp();
        (rustix::termios::tcgetpgrp(&file) == Ok(group)).then(|| {
            let modes = rustix::termios::tcgetattr(&file).ok();
            Terminal { file, group, modes }
        })
    }

    /// Makes the launcher's process group the foreground group again. A shell as the command makes
    /// its own group the foreground, and cannot restore ours when it ends. SIGTTOU must be blocked.
    pub(crate) fn take_back(&self) {
        // Fails harmlessly if the terminal was hung up.
        let _ = rustix::termios::tcsetpgrp(&self.file, self.group);
    }

    /// Restores the terminal's modes after a command that could not do so itself.
    pub(crate) fn restore_modes(&self) {
        if let Some(modes) = &self.modes {
            let _ = rustix::termios::tcsetattr(&self.file, OptionalActions::Drain, modes);
        }
    }
}

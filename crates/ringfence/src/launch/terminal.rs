//! Controlling terminal of the launcher.

use std::fs::File;

use ringfence_sandbox::signals::ReceivedSignal;
use ringfence_sys::namespaces;
use rustix::io::Errno;
use rustix::process::{Pid, Signal};
use rustix::termios::{OptionalActions, Termios};

/// Returns `true` if the command has the signal already, from the terminal, or if it is the launcher's alone.
pub(super) fn has_sent(arrived: &ReceivedSignal) -> bool {
    let keys = [Signal::INT, Signal::QUIT, Signal::HUP].map(Signal::as_raw);
    let by_key = !arrived.by_process && keys.contains(&arrived.number);
    by_key || arrived.number == Signal::TTOU.as_raw()
}

/// Terminal state to restore after the command has ended.
#[derive(Debug)]
pub(crate) struct Terminal {
    file: File,
    /// Process group of the launcher. `None` in a guest, for the group of the guest's own launcher.
    group: Option<Pid>,
    modes: Option<Termios>,
}

impl Terminal {
    /// Opens the controlling terminal if this process is in its foreground.
    pub(crate) fn if_foreground() -> Option<Terminal> {
        let file = File::options().read(true).write(true).open("/dev/tty").ok()?;
        let group = namespaces::process_group();
        let foreground = match rustix::termios::tcgetpgrp(&file) {
            Ok(foreground) => Some(foreground),
            // A group without a number in this PID namespace.
            Err(Errno::OPNOTSUPP) => None,
            Err(_) => return None,
        };
        (foreground == group).then(|| {
            let modes = rustix::termios::tcgetattr(&file).ok();
            Terminal { file, group, modes }
        })
    }

    /// Makes the launcher's process group the foreground group again. A shell as the command makes
    /// its own group the foreground, and cannot restore ours when it ends. SIGTTOU must be blocked.
    pub(crate) fn take_back(&self) {
        // A group without a number cannot be named. The launcher outside takes its terminal back itself.
        if let Some(group) = self.group {
            // Fails harmlessly if the terminal was hung up.
            let _ = rustix::termios::tcsetpgrp(&self.file, group);
        }
    }

    /// Restores the terminal's modes after a command that could not do so itself.
    pub(crate) fn restore_modes(&self) {
        if let Some(modes) = &self.modes {
            let _ = rustix::termios::tcsetattr(&self.file, OptionalActions::Drain, modes);
        }
    }
}

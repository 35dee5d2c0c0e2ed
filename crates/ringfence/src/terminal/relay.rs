//! Connection between the user's terminal and that of a command.
//!
//! ```text
//!  user's terminal ──keys, while attached──> master ═══ terminal of the command
//!                  <──────────output────────
//! ```
//!
//! *Attached* means that the user's terminal is in raw mode, and its keys are the command's. All else that a key or an
//! output means is up to the command's terminal. Detached, the user's terminal has its own modes, and others may read it.
//!
//! One thread drives the relay with its other descriptors ([`Relay::polled`], [`Relay::advance`]). Nothing here blocks: the
//! descriptions of both terminals are this process's own.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ringfence_sandbox::signals::Signals;
use ringfence_sys::poll::wait_any;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::OFlags;
use rustix::process::Signal;
use rustix::termios::{LocalModes, OptionalActions, OutputModes, SpecialCodeIndex, Termios};

use super::UserTerminal;
use dialog::Dialog;

mod dialog;

/// Bytes that wait for a terminal at most.
const PENDING_MAX: usize = 64 * 1024;
/// Bytes read at a time. The kernel returns less than 4 KiB from a terminal.
const READ: usize = 4096;
/// Rounds of copying before the caller looks at its other descriptors.
const ROUNDS: usize = 4;

/// Keys that send a signal to the foreground of a terminal.
const SIGNAL_KEYS: [(SpecialCodeIndex, Signal); 3] = [
    (SpecialCodeIndex::VINTR, Signal::INT),
    (SpecialCodeIndex::VQUIT, Signal::QUIT),
    (SpecialCodeIndex::VSUSP, Signal::TSTP),
];

/// Key that ends a command.
const INTERRUPT: &[u8] = &[3];

/// Bytes on their way to a terminal.
#[derive(Debug, Default)]
struct Pending {
    bytes: Vec<u8>,
    sent: usize,
}

impl Pending {
    fn is_empty(&self) -> bool {
        self.sent == self.bytes.len()
    }

    fn has_room(&self) -> bool {
        self.bytes.len() + READ <= PENDING_MAX
    }

    /// Passes the bytes to `write` until it takes no more. Returns `true` if it has taken some.
    fn send(&mut self, mut write: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<bool> {
        while !self.is_empty() {
            match write(&self.bytes[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        let has_sent = self.sent > 0;
        self.bytes.drain(..self.sent);
        self.sent = 0;
        Ok(has_sent)
    }
}

/// State of the user's terminal while its keys are the command's.
#[derive(Debug)]
struct Attachment {
    /// Modes to restore.
    modes: Termios,
    /// Set if the command has asked for the keys: other programs of the same job may write to the user's terminal.
    on_demand: bool,
    /// Set if another program reads keys of the user's terminal, and waits for the end of the attachment.
    yields: bool,
    /// Set once the command has changed the modes of its terminal.
    has_changed_modes: bool,
    /// Set if the user's terminal processes output, as the command's does.
    processes_output: bool,
}

/// Connection of a command's terminal to the user's.
#[derive(Debug)]
pub(crate) struct Relay {
    /// The user's terminal, until it is hung up.
    user: Option<UserTerminal>,
    /// End of the command's terminal that this process serves, until the user's is hung up.
    master: Option<File>,
    /// Set once every process has closed the command's terminal.
    is_over: bool,
    to_user: Pending,
    to_command: Pending,
    attachment: Option<Attachment>,
    /// Modes of the command's terminal that no program has changed yet.
    first: Option<Termios>,
    /// Signal of the last key for which the command's terminal sends one.
    key: Option<Signal>,
    /// Question of the launcher on the user's terminal.
    dialog: Option<Dialog>,
}

impl Relay {
    /// Connects the terminals. The command's gets size and modes of the user's.
    pub(crate) fn new(user: UserTerminal, master: OwnedFd) -> io::Result<Relay> {
        let flags = rustix::fs::fcntl_getfl(&master)?;
        rustix::fs::fcntl_setfl(&master, flags | OFlags::NONBLOCK)?;
        let mut relay = Relay {
            user: Some(user),
            master: Some(File::from(master)),
            is_over: false,
            to_user: Pending::default(),
            to_command: Pending::default(),
            attachment: None,
            first: None,
            key: None,
            dialog: None,
        };
        relay.first = relay.modes();
        if relay.is_foreground() {
            relay.copy_modes();
        }
        relay.resize();
        Ok(relay)
    }

    /// Returns the other end of the command's terminal, for a program.
    pub(crate) fn open_programs_end(&self) -> io::Result<OwnedFd> {
        let master = self.master.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let flags = rustix::pty::OpenptFlags::RDWR
            | rustix::pty::OpenptFlags::NOCTTY
            | rustix::pty::OpenptFlags::CLOEXEC;
        Ok(rustix::pty::ioctl_tiocgptpeer(master, flags)?)
    }

    /// Returns `true` if this process is in the foreground of the user's terminal.
    pub(crate) fn is_foreground(&self) -> bool {
        self.user.as_ref().is_some_and(UserTerminal::is_foreground)
    }

    pub(crate) fn is_attached(&self) -> bool {
        self.attachment.is_some()
    }

    /// Makes the keys of the user's terminal the command's. Sets raw mode again if they are already.
    /// `on_demand` is set if the command has asked for them: then it gives way to another program of the same job that
    /// reads keys, once it has restored the modes of its terminal.
    pub(crate) fn attach(&mut self, on_demand: bool) {
        let Some(current) = self.user.as_ref().and_then(UserTerminal::modes) else { return };
        if !self.has_changed_modes() {
            self.copy_modes();
        }
        let attachment = self.attachment.get_or_insert_with(|| Attachment {
            on_demand,
            yields: on_demand && !current.local_modes.contains(LocalModes::ICANON),
            has_changed_modes: false,
            processes_output: false,
            modes: current,
        });
        attachment.processes_output = attachment.on_demand;
        self.set_raw();
        self.resize();
    }

    /// Sets the modes of the user's terminal while it is attached.
    fn set_raw(&self) {
        let (Some(attachment), Some(user)) = (&self.attachment, &self.user) else { return };
        let mut raw = attachment.modes.clone();
        raw.make_raw();
        if attachment.processes_output {
            raw.output_modes = attachment.modes.output_modes;
        }
        user.set_modes(&raw);
    }

    /// Lets the user's terminal process output only as long as the command's does, if other programs may write there.
    fn follow_output_modes(&mut self) {
        let processes = |modes: Termios| modes.output_modes.contains(OutputModes::OPOST);
        let processes = self.modes().is_some_and(processes);
        let Some(attachment) = &mut self.attachment else { return };
        if attachment.on_demand && attachment.processes_output != processes {
            attachment.processes_output = processes;
            self.set_raw();
        }
    }

    /// Restores the modes of the user's terminal.
    pub(crate) fn detach(&mut self) {
        if let (Some(attachment), Some(user)) = (self.attachment.take(), &self.user) {
            user.set_modes(&attachment.modes);
        }
    }

    /// Returns `true` if the command no longer needs the keys for which another program waits: it has changed the modes of
    /// its terminal, and restored them.
    pub(crate) fn may_yield(&mut self) -> bool {
        let changed = self.yields() && self.has_changed_modes();
        let Some(attachment) = &mut self.attachment else { return false };
        attachment.has_changed_modes |= changed;
        attachment.yields && attachment.has_changed_modes && !changed
    }

    /// Returns `true` if another program waits for the user's terminal.
    pub(crate) fn yields(&self) -> bool {
        self.attachment.as_ref().is_some_and(|attachment| attachment.yields)
    }

    /// Returns `true` if a program has changed the modes of the command's terminal: it reads keys, or a password.
    pub(crate) fn has_changed_modes(&self) -> bool {
        match (&self.first, self.modes()) {
            (Some(first), Some(now)) => {
                (first.local_modes, first.input_modes) != (now.local_modes, now.input_modes)
            }
            _ => false,
        }
    }

    /// Gives the command's terminal the size of the user's. The kernel signals a change to its foreground.
    pub(crate) fn resize(&self) {
        let size = self.user.as_ref().and_then(UserTerminal::size);
        if let (Some(size), Some(master)) = (size, &self.master) {
            let _ = rustix::termios::tcsetwinsize(master, size);
        }
    }

    /// Takes the signal that the last key sent to the foreground of the command's terminal.
    pub(crate) fn take_key(&mut self) -> Option<Signal> {
        self.key.take()
    }

    /// Returns the descriptors to poll, and for what.
    pub(crate) fn polled(&self) -> impl Iterator<Item = (BorrowedFd<'_>, PollFlags)> {
        let mut of_master = PollFlags::empty();
        of_master.set(PollFlags::IN, self.to_user.has_room());
        of_master.set(PollFlags::OUT, !self.to_command.is_empty());
        let mut of_user = PollFlags::empty();
        of_user.set(PollFlags::IN, self.takes_keys());
        let to_user = self.dialog.as_ref().map_or(&self.to_user, |dialog| &dialog.text);
        of_user.set(PollFlags::OUT, !to_user.is_empty());
        let master = self.master.as_ref().filter(|_| !self.is_over);
        let master = master.map(|master| (master.as_fd(), of_master));
        master.into_iter().chain(self.user.as_ref().map(|user| (user.as_fd(), of_user)))
    }

    fn takes_keys(&self) -> bool {
        let has_room = self.dialog.is_some() || self.to_command.is_empty();
        self.is_attached() && has_room && self.is_foreground()
    }

    /// Copies what can be copied now.
    pub(crate) fn advance(&mut self) {
        if self.user.as_ref().is_some_and(UserTerminal::is_hung_up) {
            self.hang_up();
        }
        if self.attachment.as_ref().is_some_and(|attachment| attachment.on_demand) {
            self.follow_output_modes();
        }
        for _ in 0..ROUNDS {
            let mut moved = self.read_output() > 0;
            moved |= self.write_output();
            moved |= self.read_keys();
            moved |= self.write_keys();
            if !moved {
                return;
            }
        }
    }

    /// Writes the rest of the output after the command has ended. A signal of `stop` ends that.
    pub(crate) fn drain(&mut self, stop: &Signals) {
        /// Bytes that the kernel holds for a terminal at most, and more. Other programs of the guest may go on writing.
        const REST_MAX: usize = 1024 * 1024;
        let mut rest = 0;
        loop {
            if rest < REST_MAX {
                rest += self.read_output();
            }
            self.write_output();
            if self.to_user.is_empty() {
                return;
            }
            let Some(user) = &self.user else { return };
            let mut fds = [PollFd::new(user, PollFlags::OUT), PollFd::new(stop, PollFlags::IN)];
            if wait_any(&mut fds, None).is_err() {
                return;
            }
            let ends = [Signal::INT, Signal::QUIT, Signal::TERM, Signal::HUP].map(Signal::as_raw);
            if stop.next().is_ok_and(|one| one.is_some_and(|one| ends.contains(&one.number))) {
                return;
            }
        }
    }

    fn modes(&self) -> Option<Termios> {
        self.master.as_ref().and_then(|master| rustix::termios::tcgetattr(master).ok())
    }

    /// Gives the command's terminal the modes of the user's, unless another program has them changed for itself.
    fn copy_modes(&mut self) {
        let Some(modes) = self.user.as_ref().and_then(UserTerminal::modes) else { return };
        if modes.local_modes.contains(LocalModes::ICANON)
            && let Some(master) = &self.master
        {
            let _ = rustix::termios::tcsetattr(master, OptionalActions::Now, &modes);
            self.first = self.modes();
        }
    }

    /// Reads what the command has written. Returns the number of bytes.
    fn read_output(&mut self) -> usize {
        let before = self.to_user.bytes.len();
        while let Some(master) = self.master.as_ref().filter(|_| self.to_user.has_room()) {
            let mut bytes = [0; READ];
            match rustix::io::read(master, &mut bytes) {
                Ok(count @ 1..) => self.to_user.bytes.extend_from_slice(&bytes[..count]),
                Err(rustix::io::Errno::AGAIN) => break,
                Err(rustix::io::Errno::INTR) => {}
                Ok(_) | Err(_) => {
                    self.is_over = true;
                    break;
                }
            }
        }
        self.to_user.bytes.len() - before
    }

    fn write_output(&mut self) -> bool {
        let Some(user) = &self.user else {
            self.to_user = Pending::default();
            return false;
        };
        let to_user = match &mut self.dialog {
            Some(dialog) => &mut dialog.text,
            None => &mut self.to_user,
        };
        match to_user.send(|bytes| user.write(bytes)) {
            Ok(moved) => moved,
            Err(_) => {
                self.hang_up();
                false
            }
        }
    }

    fn read_keys(&mut self) -> bool {
        if !self.takes_keys() {
            return false;
        }
        let mut bytes = [0; READ];
        match self.user.as_ref().map(|user| user.read(&mut bytes)) {
            Some(Ok(count @ 1..)) => {
                let mut keys = &bytes[..count];
                if let Some(dialog) = &mut self.dialog {
                    keys = if dialog.take_keys(keys) { INTERRUPT } else { &[] };
                }
                self.note_signal_key(keys);
                self.to_command.bytes.extend_from_slice(keys);
                true
            }
            Some(Err(error))
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                false
            }
            Some(_) => {
                self.hang_up();
                false
            }
            None => false,
        }
    }

    fn write_keys(&mut self) -> bool {
        let Some(master) = &self.master else { return false };
        // The command's terminal takes no keys once nobody has it open.
        let sent = self.to_command.send(|bytes| Ok(rustix::io::write(master, bytes)?));
        sent.unwrap_or_else(|_| {
            self.to_command = Pending::default();
            false
        })
    }

    fn note_signal_key(&mut self, typed: &[u8]) {
        let Some(modes) = self.modes() else { return };
        if modes.local_modes.contains(LocalModes::ISIG) {
            let signals = SIGNAL_KEYS.into_iter();
            let typed = |code| typed.contains(&modes.special_codes[code]);
            let mut of_keys = signals.filter(|(code, _)| typed(*code)).map(|(_, signal)| signal);
            self.key = of_keys.next_back().or(self.key);
        }
    }

    /// Hangs up the command's terminal, as the user's was.
    fn hang_up(&mut self) {
        self.attachment = None;
        self.dialog = None;
        self.user = None;
        self.master = None;
        self.to_user = Pending::default();
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.detach();
    }
}

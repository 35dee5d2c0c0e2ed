//! Terminal of the command, and job control between the user's shell and the command.
//!
//! The launcher is a member of the job that the user's shell knows; the command is not. The launcher therefore does for the
//! command what the terminal and the shell do for their jobs:
//!
//! ```text
//! the command is stopped by a key   the launcher stops its own job, and continues the command with it
//! the command reads the terminal    it gets the keys if the launcher is in the foreground; otherwise the launcher stops, too
//! Ctrl-Z, Ctrl-C, hang-up           a signal to the launcher's job goes on to the command's process group
//! the window changes its size       so does the command's terminal
//! ```
//!
//! The keys are the command's from its start on if standard input and output are the terminal. Otherwise the launcher may be
//! part of a pipeline, in which another program reads keys. The command then starts in the background of its terminal,
//! and the kernel stops it once it needs the keys.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use ringfence_guest::{TerminalKind, ToGuest};
use ringfence_sandbox::Ending;
use ringfence_sandbox::signals::{self, ReceivedSignal, Signals};
use rustix::event::PollFlags;
use rustix::process::Signal;
use rustix::termios::Termios;

use super::options::TerminalChoice;
use crate::terminal::{Relay, UserTerminal};

/// Interval of looks at the command's terminal while another program waits for the keys.
const YIELD_LOOK: Duration = Duration::from_millis(100);

/// Numbers of standard input and output.
const STDIN: RawFd = 0;
const STDOUT: RawFd = 1;

/// Connection between the command and the user's terminal.
#[derive(Debug)]
enum Connection {
    /// The command's own terminal is not made yet.
    Planned(UserTerminal),
    Relay(Relay),
    /// The command shares the user's terminal.
    Shared(SharedTerminal),
}

/// Terminal of the user that the command shares.
#[derive(Debug)]
struct SharedTerminal {
    user: UserTerminal,
    /// Modes at the launcher's start.
    modes: Option<Termios>,
    /// Set if the launcher has moved the command to the foreground. Otherwise it is another job's, such as the shell's.
    has_foreground: bool,
}

impl SharedTerminal {
    /// Moves the foreground from the command to the launcher. A terminal that is another job's stays as it is: a shell whose
    /// terminal is taken reads the end of its input.
    fn take_back(&mut self, restores_modes: bool) {
        if !std::mem::take(&mut self.has_foreground) {
            return;
        }
        self.user.take_back();
        if restores_modes {
            self.modes.iter().for_each(|modes| self.user.set_modes(modes));
        }
    }
}

/// Terminal of a guest's command.
#[derive(Debug)]
pub(super) struct CommandTerminal {
    connection: Connection,
    /// Set if the keys are the command's from its start on.
    is_eager: bool,
    /// Number of the last order to continue the command.
    resumed: u64,
}

/// Passes orders to the guest's init.
type SendOrder<'a> = &'a mut dyn FnMut(ToGuest);

impl CommandTerminal {
    /// Plans the terminal of a command. `None` if the user has none.
    pub(super) fn plan(choice: TerminalChoice) -> Option<CommandTerminal> {
        let user = UserTerminal::open()?;
        let streams = [STDIN, STDOUT].map(|number| user.is_stream(number));
        let is_eager = user.is_controlling() && streams == [true, true];
        let connection = match choice {
            TerminalChoice::Own => Connection::Planned(user),
            // Without a controlling terminal there is no job control, and nothing to share.
            TerminalChoice::Shared if !user.is_controlling() => return None,
            TerminalChoice::Shared => {
                let modes = user.modes();
                Connection::Shared(SharedTerminal { user, modes, has_foreground: false })
            }
        };
        Some(CommandTerminal { connection, is_eager, resumed: 0 })
    }

    /// Returns the kind of terminal that init makes.
    pub(super) fn kind(&self) -> TerminalKind {
        match &self.connection {
            Connection::Planned(user) => TerminalKind::Own { controlling: user.is_controlling() },
            Connection::Relay(_) | Connection::Shared(..) => TerminalKind::Shared,
        }
    }

    /// Connects the command's own terminal, which init has made.
    pub(super) fn connect(self, master: OwnedFd) -> io::Result<CommandTerminal> {
        let connection = match self.connection {
            Connection::Planned(user) => Connection::Relay(Relay::new(user, master)?),
            other => other,
        };
        Ok(CommandTerminal { connection, ..self })
    }

    /// Prepares the terminal for the command's start. Returns `true` if the command starts in its foreground.
    pub(super) fn start(&mut self) -> bool {
        let in_front = self.is_eager && self.is_foreground();
        if in_front {
            self.attach(false);
        }
        in_front
    }

    /// Handles a signal to the launcher: passes it on, or does the launcher's part of job control.
    pub(super) fn signal(&mut self, arrived: &ReceivedSignal, send: SendOrder<'_>) {
        match Signal::from_named_raw(arrived.number) {
            Some(Signal::TTOU) => {}
            Some(Signal::WINCH) => {
                if let Connection::Relay(relay) = &self.connection {
                    relay.resize();
                }
            }
            Some(Signal::TSTP) => {
                send(ToGuest::GroupSignal(arrived.number));
                // The terminal has stopped the rest of the job.
                self.stop(Signal::TSTP, false, send);
            }
            Some(Signal::CONT) => self.resume(false, send),
            // The terminal would have sent it to the command's process group, too.
            _ if !arrived.by_process => send(ToGuest::GroupSignal(arrived.number)),
            _ => send(ToGuest::Signal(arrived.number)),
        }
    }

    /// Handles a stop of the command by a signal, after the order to continue of that number.
    pub(super) fn command_stopped(&mut self, number: i32, after: u64, send: SendOrder<'_>) {
        if after != self.resumed {
            return;
        }
        match Signal::from_named_raw(number) {
            Some(Signal::TTIN | Signal::TTOU) if self.is_foreground() => self.resume(true, send),
            Some(wanted @ (Signal::TTIN | Signal::TTOU)) => {
                if !self.stop(wanted, false, send) && !self.is_foreground() {
                    // Nobody can give this job the keys. The command waits for them.
                    self.note_foreground();
                    self.resumed += 1;
                    send(ToGuest::Continue { foreground: true, number: self.resumed });
                }
            }
            _ => {
                let by_key = match &mut self.connection {
                    Connection::Relay(relay) => relay.take_key() == Some(Signal::TSTP),
                    _ => false,
                };
                self.stop(Signal::TSTP, by_key, send);
            }
        }
    }

    /// Stops the launcher, or its whole job, until the user's shell continues it. Returns `false` if nobody can.
    fn stop(&mut self, signal: Signal, whole_job: bool, send: SendOrder<'_>) -> bool {
        match &mut self.connection {
            Connection::Planned(_) => {}
            Connection::Relay(relay) => relay.detach(),
            Connection::Shared(shared) => shared.take_back(true),
        }
        let was_stopped = signals::stop(signal, whole_job).unwrap_or(false);
        let is_wanted = matches!(signal, Signal::TTIN | Signal::TTOU);
        if was_stopped || !is_wanted {
            self.resume(is_wanted, send);
        }
        was_stopped
    }

    /// Continues the command, in the foreground if the launcher's job is there. `is_wanted` is set if the command needs
    /// the keys.
    fn resume(&mut self, is_wanted: bool, send: SendOrder<'_>) {
        let was_attached =
            matches!(&self.connection, Connection::Relay(relay) if relay.is_attached());
        let foreground = self.is_foreground() && (is_wanted || was_attached || self.is_eager);
        if foreground {
            self.attach(is_wanted && !self.is_eager);
        }
        self.resumed += 1;
        send(ToGuest::Continue { foreground, number: self.resumed });
    }

    /// Gives the command the keys, once it is in the foreground of its terminal.
    fn attach(&mut self, on_demand: bool) {
        if let Connection::Relay(relay) = &mut self.connection {
            relay.attach(on_demand);
        }
        self.note_foreground();
    }

    /// Notes that the command is moved to the foreground of a shared terminal.
    fn note_foreground(&mut self) {
        if let Connection::Shared(shared) = &mut self.connection {
            shared.has_foreground = true;
        }
    }

    /// Returns the connection of the command's own terminal.
    pub(super) fn relay(&self) -> Option<&Relay> {
        match &self.connection {
            Connection::Relay(relay) => Some(relay),
            Connection::Planned(_) | Connection::Shared(..) => None,
        }
    }

    /// Returns the connection of the command's own terminal, to change it.
    pub(super) fn relay_mut(&mut self) -> Option<&mut Relay> {
        match &mut self.connection {
            Connection::Relay(relay) => Some(relay),
            Connection::Planned(_) | Connection::Shared(..) => None,
        }
    }

    fn is_foreground(&self) -> bool {
        match &self.connection {
            Connection::Planned(user) => user.is_foreground(),
            Connection::Shared(shared) => shared.user.is_foreground(),
            Connection::Relay(relay) => relay.is_foreground(),
        }
    }

    /// Returns the descriptors to poll, and for what.
    pub(super) fn polled(&self) -> impl Iterator<Item = (BorrowedFd<'_>, PollFlags)> {
        self.relay().into_iter().flat_map(Relay::polled)
    }

    /// Returns the time of the next look at the terminals, if none of their events leads to it.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let yields = matches!(&self.connection, Connection::Relay(relay) if relay.yields());
        yields.then(|| Instant::now() + YIELD_LOOK)
    }

    /// Copies between the terminals what can be copied now.
    pub(super) fn advance(&mut self, send: SendOrder<'_>) {
        if let Connection::Relay(relay) = &mut self.connection {
            relay.advance();
            if !relay.is_in_dialog() && relay.may_yield() {
                send(ToGuest::Background);
                relay.detach();
            }
        }
    }

    /// Copies the command's last output, and has the user's keys make signals again. The command and init have ended.
    pub(super) fn release_keys(&mut self, signals: &Signals) {
        if let Connection::Relay(relay) = &mut self.connection {
            relay.end_dialog();
            relay.drain(signals);
            relay.detach();
        }
    }

    /// Returns the terminal to the user's shell, after all processes of the guest have ended. `ending` is the command's,
    /// if it ended first.
    pub(super) fn finish(mut self, ending: Option<Ending>, signals: &Signals) {
        self.release_keys(signals);
        match &mut self.connection {
            Connection::Planned(_) => {}
            Connection::Relay(relay) => {
                let key = relay.take_key();
                if let Some(signal) = key
                    && ending == Some(Ending::Killed(signal.as_raw()))
                {
                    // The key was for the whole job, of which the command is no member.
                    let _ = rustix::process::kill_current_process_group(signal);
                }
            }
            Connection::Shared(shared) => {
                shared.take_back(!matches!(ending, Some(Ending::Exited(_))));
            }
        }
    }
}

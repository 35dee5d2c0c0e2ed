//! Processes of a guest: starts them in order and waits for the first that ends.
//!
//! [`GuestProcesses`] owns guest, frontend and uplink ([`GuestProcess`]), and the connection to the driver domain.
//! Signals and messages of all of them arrive through one `poll` as [`ProcessEvent`]s, whose meanings
//! [`GuestProcesses::handle`] lists.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Seek as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;

use super::cgroup::OwnCgroup;
use super::clients::Clients;
use super::disks::GuestDisks;
use super::events::{GuestPhase, ProcessEvent};
use super::host_names::HostNames;
use super::options::Options;
use super::presence::Presence;
use super::process::{GuestProcess, RunningProcess};
use super::rendezvous::Attachment;
use super::report::{self, Reporter};
use super::terminal::CommandTerminal;
use super::uplink::Uplink;
use crate::commands::Source;
use ringfence_driver::switchboard::{Attached, FromDriver};
use ringfence_guest::{GuestConfig, ToGuest};
use ringfence_hostnet::runtime_dir::RuntimeDir;
use ringfence_sandbox::channel::Channel;
use ringfence_sandbox::command_filter::CommandFilter;
use ringfence_sandbox::signals::Signals;
use ringfence_sandbox::spawn::{DomainProcess, Event};
use ringfence_sandbox::{ChannelError, Ending, STATUS_FAILED};
use ringfence_sys::poll::wait_any;
use ringfence_uplink_process::asking::Asker;
use ringfence_uplink_process::multicast::Memberships;

/// Time limit for processes that should end together: to tell cause from effect, and to leave
/// nothing behind.
pub(super) const GRACE: Duration = Duration::from_secs(1);

/// Signals that the launcher passes on.
const PASSED_ON: [Signal; 6] =
    [Signal::INT, Signal::QUIT, Signal::TERM, Signal::HUP, Signal::USR1, Signal::USR2];
/// Signals of a terminal's job control that the launcher handles. It blocks `SIGTTOU`, because it must be able to take the
/// terminal back.
const OF_TERMINALS: [Signal; 4] = [Signal::TSTP, Signal::CONT, Signal::WINCH, Signal::TTOU];

/// Opens the signals that the launcher handles.
pub(super) fn signals(has_terminal: bool) -> io::Result<Signals> {
    let of_terminals = if has_terminal { &OF_TERMINALS[..] } else { &[Signal::TTOU] };
    Signals::new(&[&PASSED_ON[..], of_terminals].concat())
}

/// End of a guest.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) status: u8,
    /// Message for the user.
    pub(super) problem: Option<String>,
    /// End of the command, if it was the first.
    pub(super) ending: Option<Ending>,
}

impl Outcome {
    pub(super) fn failed(problem: impl Into<String>) -> Outcome {
        Outcome { status: STATUS_FAILED, problem: Some(problem.into()), ending: None }
    }
}

/// Driver domain that serves a guest.
struct DriverDomain {
    attached: Attached,
    name: String,
    /// Channel to the driver domain, which detaches the guest when it closes.
    channel: Channel,
    /// Process, if this launcher started it.
    process: Option<DomainProcess>,
}

/// State of a guest's own process: its init, and the command.
#[derive(Default)]
pub(super) struct GuestState {
    /// Connection to the store for the names of guests, until init gets it.
    pub(super) names: Option<OwnedFd>,
    /// Command and arguments.
    pub(super) command: Vec<OsString>,
    /// Filter of the system calls of all commands.
    pub(super) filter: CommandFilter,
    /// Files of the host about names, which the guest follows.
    pub(super) host_names: Option<HostNames>,
    /// Standard input of the command, if init has opened its file again.
    pub(super) stdin: Option<File>,
    /// Time of [`GuestProcesses::settle`]. `None` before the command starts, and afterwards.
    pub(super) settles: Option<Instant>,
}

pub(super) struct FrontendState {
    /// Connection to the hub, until the frontend gets it.
    pub(super) hub: Option<OwnedFd>,
    /// Set if the memory that the guest lends is in huge pages.
    pub(super) huge_pages: bool,
}

/// Parts of a guest that are made before its processes start.
pub(super) struct GuestParts {
    /// Attachment to a driver domain, if the guest needs one.
    pub(super) attachment: Option<Attachment>,
    pub(super) disks: GuestDisks,
    pub(super) uplink: Option<Uplink>,
    pub(super) cgroup: OwnCgroup,
}

/// Processes of one guest, with the connection to its driver domain. Dropping it ends the
/// processes.
pub(super) struct GuestProcesses<'a> {
    pub(super) reporter: Reporter,
    pub(super) signals: &'a Signals,
    pub(super) presence: Presence<'a>,
    pub(super) options: &'a Options,
    driver: Option<DriverDomain>,
    pub(super) disks: GuestDisks,
    pub(super) guest: GuestProcess<GuestState>,
    pub(super) frontend: GuestProcess<FrontendState>,
    pub(super) uplink: GuestProcess<Uplink>,
    /// Clients, while the command runs.
    pub(super) clients: Option<Clients>,
    /// Terminal of the command, if the user has one.
    pub(super) terminal: Option<CommandTerminal>,
    /// Set if a signal came when the guest's init had ended, and the launcher did not know that yet.
    pub(super) has_late_signal: bool,
    /// Cgroup of the guest. It is dropped last, when the guest's processes have ended.
    pub(super) cgroup: OwnCgroup,
}

impl<'a> GuestProcesses<'a> {
    pub(super) fn new(
        reporter: Reporter,
        signals: &'a Signals,
        directory: &'a RuntimeDir,
        options: &'a Options,
        parts: GuestParts,
    ) -> GuestProcesses<'a> {
        let GuestParts { attachment, disks, uplink, cgroup } = parts;
        let (mut driver, mut guest, mut frontend) = (None, GuestState::default(), None);
        if let Some(attachment) = attachment {
            let Attachment {
                switch,
                attached,
                driver_channel,
                frontend_hub,
                names,
                driver: process,
            } = attachment;
            driver =
                Some(DriverDomain { attached, name: switch, channel: driver_channel, process });
            // Without a switch there are no names.
            guest.names = Some(names).filter(|_| options.has_switch());
            frontend = Some(FrontendState { hub: Some(frontend_hub), huge_pages: false });
        }
        GuestProcesses {
            reporter,
            signals,
            presence: Presence::new(directory),
            options,
            driver,
            disks,
            guest: GuestProcess::Planned(guest),
            frontend: GuestProcess::plan(frontend),
            uplink: GuestProcess::plan(uplink),
            clients: None,
            terminal: None,
            has_late_signal: false,
            cgroup,
        }
    }

    /// Returns the properties of the guest's attachment to a driver domain.
    pub(super) fn attached(&self) -> Option<&Attached> {
        self.driver.as_ref().map(|driver| &driver.attached)
    }

    /// Returns the name of the driver domain. Empty without one.
    pub(super) fn driver_name(&self) -> &str {
        self.driver.as_ref().map_or("", |driver| &driver.name)
    }

    /// Returns the channel to the driver domain.
    pub(super) fn driver_channel(&self) -> Option<&Channel> {
        self.driver.as_ref().map(|driver| &driver.channel)
    }

    /// Returns the guest's uplink.
    pub(super) fn uplink(&self) -> Option<&Uplink> {
        self.uplink.state()
    }

    /// Starts all processes and waits for the end. `guest` is the guest's domain, whose start has begun.
    pub(super) fn run(
        &mut self,
        command: &[OsString],
        guest: DomainProcess,
        config: &GuestConfig,
    ) -> Outcome {
        if let Some(state) = self.guest.state_mut() {
            state.command = command.to_vec();
            state.host_names = HostNames::of(config);
        }
        let outcome = match self.start(guest, config) {
            Ok(()) => self.wait_for_end(),
            Err(outcome) => {
                Outcome { problem: outcome.problem.map(report::with_remedy), ..outcome }
            }
        };
        // Data that the kernel still has to write needs the processes that serve the disks.
        self.disks.end_devices(self.reporter);
        // Printed when the terminal belongs to the launcher again.
        outcome.problem.iter().for_each(|problem| report::keep(problem));
        self.return_position();
        self.clients.iter_mut().for_each(Clients::send_last_messages);
        outcome
    }

    /// Moves this process's standard input to where the command has read its file, for the next program of the caller.
    fn return_position(&mut self) {
        let stdin = self.guest.state_mut().and_then(|guest| guest.stdin.as_mut());
        if let Some(Ok(position)) = stdin.map(File::stream_position) {
            let start = rustix::fs::SeekFrom::Start(position);
            // A failure leaves the position as it is.
            let _ = rustix::fs::seek(rustix::stdio::stdin(), start);
        }
    }

    pub(super) fn send_to_guest(
        &self,
        order: &ToGuest,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Outcome> {
        // The guest's end is reported soon, with the reason.
        self.try_send_to_guest(order, fds).map(drop)
    }

    /// Sends an order to the guest's init. Returns `false` if init has ended.
    pub(super) fn try_send_to_guest(
        &self,
        order: &ToGuest,
        fds: &[BorrowedFd<'_>],
    ) -> Result<bool, Outcome> {
        let Some(guest) = self.guest.channel() else {
            return Err(Outcome::failed("there is no guest"));
        };
        match guest.send(order, fds) {
            Ok(()) => Ok(true),
            Err(ChannelError::Closed) => Ok(false),
            Err(error) => Err(Outcome::failed(format!("the guest: {error}"))),
        }
    }

    fn wait_for_end(&mut self) -> Outcome {
        loop {
            let event = self.next(None);
            if let Err(outcome) = self.handle(GuestPhase::Running, event) {
                if outcome.ending.is_some() {
                    self.carry_last_data();
                }
                self.finish_records();
                return outcome;
            }
        }
    }

    /// Returns the multicast memberships, once the uplink runs.
    fn memberships(&self) -> Option<&Memberships> {
        self.uplink.running().and_then(|uplink| uplink.state.memberships())
    }

    /// Returns the party that answers questions of the egress policy, once the uplink runs.
    fn asker(&self) -> Option<&Asker> {
        self.uplink.running().and_then(|uplink| uplink.state.asker.as_ref())
    }

    /// Blocks until the next event.
    pub(super) fn next(&mut self, deadline: Option<Instant>) -> ProcessEvent {
        loop {
            if let Some(event) = self.look() {
                return event;
            }
            self.clients.iter_mut().for_each(Clients::send_messages);
            let mut fds = vec![PollFd::new(self.signals, PollFlags::IN)];
            fds.extend(self.driver_channel().map(|channel| PollFd::new(channel, PollFlags::IN)));
            let driver = self.driver.as_ref().and_then(|driver| driver.process.as_ref());
            let channels: Vec<_> = self
                .guest
                .fds()
                .chain(self.frontend.fds())
                .chain(self.uplink.fds())
                .chain(self.clients.iter().flat_map(Clients::fds))
                .chain(self.host_names().and_then(HostNames::fd))
                .chain(self.memberships().map(AsFd::as_fd))
                .chain(self.asker().into_iter().flat_map(Asker::fds))
                .chain(self.presence.fd())
                .chain(driver.map(DomainProcess::events))
                .collect();
            fds.extend(channels.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
            let terminals: Vec<_> =
                self.terminal.iter().flat_map(CommandTerminal::polled).collect();
            fds.extend(terminals.iter().map(|(fd, flags)| PollFd::new(fd, *flags)));
            let yields = self.terminal.as_ref().and_then(CommandTerminal::deadline);
            let rejoins = self.memberships().and_then(Memberships::deadline);
            let settles = self.guest.state().and_then(|guest| guest.settles);
            let look = self.presence.deadline();
            let asked = self.asker().and_then(Asker::deadline);
            let until =
                [deadline, settles, rejoins, yields, look, asked].into_iter().flatten().min();
            match wait_any(&mut fds, until) {
                Ok(0) if until == deadline => return ProcessEvent::Late,
                Ok(_) => {}
                Err(_) => return ProcessEvent::DriverGone,
            }
        }
    }

    /// Returns an event that has happened already. The report of the command's end comes before its
    /// consequences.
    fn look(&mut self) -> Option<ProcessEvent> {
        if let Ok(Some(arrived)) = self.signals.next() {
            return Some(ProcessEvent::Signal(arrived));
        }
        self.with_terminal(|terminal, send| terminal.advance(send));
        self.serve_questions();
        if let Some(event) = self.look_at_guest() {
            return Some(event);
        }
        match self.driver_channel().map(Channel::try_receive) {
            Some(Ok(Some((FromDriver::Dial { handle }, _)))) => {
                if let Some(channel) = self.driver_channel() {
                    self.disks.dial(handle, channel);
                }
            }
            Some(Ok(Some((message, _)))) => return Some(ProcessEvent::Driver(message)),
            Some(Ok(None)) | None => {}
            Some(Err(_)) => return Some(ProcessEvent::DriverGone),
        }
        if let Some(event) = self.look_at_frontend().or_else(|| self.look_at_uplink()) {
            return Some(event);
        }
        self.look_at_driver_process();
        let settles = self.guest.state_mut().map(|guest| &mut guest.settles);
        if settles.and_then(|at| at.take_if(|at| *at <= Instant::now())).is_some() {
            self.settle();
        }
        if self.host_names().is_some_and(HostNames::may_have_changed) {
            self.follow_host_names();
        }
        self.follow_presence();
        if let Some((uplink, channel)) = self.uplink.with_channel() {
            uplink.follow_links(channel, self.reporter);
        }
        self.clients.as_mut().and_then(Clients::look).map(ProcessEvent::Client)
    }

    /// Calls `act` with the command's terminal, if there is one, and a function that sends orders to the guest's init.
    /// Returns `false` without a terminal.
    pub(super) fn with_terminal(
        &mut self,
        act: impl FnOnce(&mut CommandTerminal, &mut dyn FnMut(ToGuest)),
    ) -> bool {
        let Some(mut terminal) = self.terminal.take() else { return false };
        // A guest whose channel fails has ended, and its supervisor reports the reason.
        act(&mut terminal, &mut |order| drop(self.send_to_guest(&order, &[])));
        self.terminal = Some(terminal);
        true
    }

    fn look_at_guest(&mut self) -> Option<ProcessEvent> {
        let guest = self.guest.running_mut()?;
        if let Some((message, fds)) = guest.domain.report() {
            return Some(ProcessEvent::Guest(message, fds));
        }
        match guest.domain.next_event()? {
            Event::Ended(ended) => Some(ProcessEvent::GuestGone(ended)),
            Event::Stderr(_) => None,
        }
    }

    pub(super) fn look_at_frontend(&mut self) -> Option<ProcessEvent> {
        let frontend = self.frontend.running_mut()?;
        if let Some((message, _)) = frontend.domain.report() {
            return Some(ProcessEvent::Frontend(message));
        }
        match frontend.domain.next_event()? {
            Event::Stderr(text) => self.reporter.forward_stderr(Source::Frontend, &text),
            Event::Ended(ended) => return Some(ProcessEvent::FrontendGone(ended)),
        }
        None
    }

    pub(super) fn look_at_uplink(&mut self) -> Option<ProcessEvent> {
        let RunningProcess { domain, state } = self.uplink.running_mut()?;
        let next = || domain.report().map(|(message, _)| message);
        let message = state.egress.take(next);
        if state.egress.has_reports() {
            self.report_denials();
        }
        if let Some(message) = message {
            return Some(ProcessEvent::Uplink(message));
        }
        let RunningProcess { domain, .. } = self.uplink.running_mut()?;
        match domain.next_event()? {
            Event::Stderr(text) => self.reporter.forward_stderr(Source::Uplink, &text),
            Event::Ended(ended) => return Some(ProcessEvent::UplinkGone(ended)),
        }
        None
    }

    fn look_at_driver_process(&mut self) {
        let Some(driver) = &mut self.driver else { return };
        match driver.process.as_ref().and_then(DomainProcess::next_event) {
            Some(Event::Stderr(text)) => self.reporter.forward_stderr(Source::Driver, &text),
            // The driver channel reports the end, and the exit report the reason.
            Some(Event::Ended(_)) => driver.process = None,
            None => {}
        }
    }

    fn host_names(&self) -> Option<&HostNames> {
        self.guest.state().and_then(|guest| guest.host_names.as_ref())
    }
}

impl Drop for GuestProcesses<'_> {
    fn drop(&mut self) {
        // The driver domain detaches the guest before it loses the frontend.
        let _process = self.driver.take().and_then(|driver| {
            drop(driver.channel);
            driver.process
        });
        self.guest.begin_end();
        self.frontend.begin_end();
        self.uplink.begin_end();
    }
}

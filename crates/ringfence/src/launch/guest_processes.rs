//! Processes of a guest: starts them in order and waits for the first that ends.
//!
//! [`GuestProcesses`] owns guest, frontend and uplink ([`GuestProcess`]), and the connection to the driver domain.
//! Signals and messages of all of them arrive through one `poll` as [`ProcessEvent`]s, whose meanings
//! [`GuestProcesses::handle`] lists.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;

use super::clients::Clients;
use super::disks::GuestDisks;
use super::events::{GuestPhase, ProcessEvent};
use super::host_names::HostNames;
use super::options::Options;
use super::process::{GuestProcess, RunningProcess};
use super::rendezvous::Attachment;
use super::report::{self, Reporter};
use super::uplink::Uplink;
use crate::commands::Source;
use ringfence_driver::switchboard::{Attached, FromDriver};
use ringfence_guest::{GuestConfig, ToGuest};
use ringfence_hostnet::runtime_dir::RuntimeDir;
use ringfence_sandbox::channel::Channel;
use ringfence_sandbox::command_filter::CommandFilter;
use ringfence_sandbox::signals::Signals;
use ringfence_sandbox::spawn::{DomainProcess, Event};
use ringfence_sandbox::{ChannelError, STATUS_FAILED};
use ringfence_sys::poll::wait_any;
use ringfence_uplink_process::multicast::Memberships;

/// Time limit for processes that should end together: to tell cause from effect, and to leave
/// nothing behind.
pub(super) const GRACE: Duration = Duration::from_secs(1);

/// Signals that the launcher handles. Those of the terminal's keys it leaves to the command. It
/// blocks `SIGTTOU`, because it must be able to take the terminal back.
pub(super) fn signals() -> io::Result<Signals> {
    Signals::new(&[
        Signal::INT,
        Signal::QUIT,
        Signal::TERM,
        Signal::HUP,
        Signal::USR1,
        Signal::USR2,
        Signal::TTOU,
    ])
}

/// End of a guest.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) status: u8,
    /// Message for the user.
    pub(super) problem: Option<String>,
    /// Set if the command exited by itself, so that it has restored the terminal.
    pub(super) by_itself: bool,
}

impl Outcome {
    pub(super) fn failed(problem: impl Into<String>) -> Outcome {
        Outcome { status: STATUS_FAILED, problem: Some(problem.into()), by_itself: false }
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
    /// Time of [`GuestProcesses::settle`]. `None` before the command starts, and afterwards.
    pub(super) settles: Option<Instant>,
}

/// State of a guest's frontend.
pub(super) struct FrontendState {
    /// Connection to the hub, until the frontend gets it.
    pub(super) hub: Option<OwnedFd>,
    /// Set if the memory that the guest lends is in huge pages.
    pub(super) huge_pages: bool,
}

/// Processes of one guest, with the connection to its driver domain. Dropping it ends the
/// processes.
pub(super) struct GuestProcesses<'a> {
    pub(super) reporter: Reporter,
    signals: &'a Signals,
    pub(super) directory: &'a RuntimeDir,
    pub(super) options: &'a Options,
    driver: Option<DriverDomain>,
    pub(super) disks: GuestDisks,
    pub(super) guest: GuestProcess<GuestState>,
    pub(super) frontend: GuestProcess<FrontendState>,
    pub(super) uplink: GuestProcess<Uplink>,
    /// Clients, while the command runs.
    pub(super) clients: Option<Clients>,
}

impl<'a> GuestProcesses<'a> {
    pub(super) fn new(
        reporter: Reporter,
        signals: &'a Signals,
        directory: &'a RuntimeDir,
        options: &'a Options,
        attachment: Option<Attachment>,
        disks: GuestDisks,
        uplink: Option<Uplink>,
    ) -> GuestProcesses<'a> {
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
            directory,
            options,
            driver,
            disks,
            guest: GuestProcess::Planned(guest),
            frontend: GuestProcess::plan(frontend),
            uplink: GuestProcess::plan(uplink),
            clients: None,
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
        self.clients.iter_mut().for_each(Clients::send_last_messages);
        outcome
    }

    pub(super) fn send_to_guest(
        &self,
        order: &ToGuest,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Outcome> {
        let Some(guest) = self.guest.channel() else {
            return Err(Outcome::failed("there is no guest"));
        };
        match guest.send(order, fds) {
            // The guest's end is reported soon, with the reason.
            Ok(()) | Err(ChannelError::Closed) => Ok(()),
            Err(error) => Err(Outcome::failed(format!("the guest: {error}"))),
        }
    }

    fn wait_for_end(&mut self) -> Outcome {
        loop {
            let event = self.next(None);
            if let Err(outcome) = self.handle(GuestPhase::Running, event) {
                self.finish_records();
                return outcome;
            }
        }
    }

    /// Returns the multicast memberships, once the uplink runs.
    fn memberships(&self) -> Option<&Memberships> {
        self.uplink.running().and_then(|uplink| uplink.state.memberships())
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
                .chain(driver.map(DomainProcess::events))
                .collect();
            fds.extend(channels.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
            let rejoins = self.memberships().and_then(Memberships::deadline);
            let settles = self.guest.state().and_then(|guest| guest.settles);
            let until = [deadline, settles, rejoins].into_iter().flatten().min();
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
        if let Some((uplink, channel)) = self.uplink.with_channel() {
            uplink.follow_links(channel, self.reporter);
        }
        self.clients.as_mut().and_then(Clients::look).map(ProcessEvent::Client)
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

    fn look_at_frontend(&mut self) -> Option<ProcessEvent> {
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

    fn look_at_uplink(&mut self) -> Option<ProcessEvent> {
        let RunningProcess { domain, state } = self.uplink.running_mut()?;
        let next = || domain.report().map(|(message, _)| message);
        if let Some(message) = state.egress.take(next) {
            return Some(ProcessEvent::Uplink(message));
        }
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

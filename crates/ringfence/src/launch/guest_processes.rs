//! Processes of a guest: starts them in order and waits for the first that ends.
//!
//! [`GuestProcesses`] owns guest, frontend and uplink, and the connection to the driver domain.
//! Signals and messages of all of them arrive through one `poll` as [`ProcessEvent`]s.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;

use super::clients::{ClientEvent, Clients};
use super::disks::Disks;
use super::host_names::HostNames;
use super::options::Options;
use super::rendezvous::Attachment;
use super::report::{self, Reporter};
use super::terminal;
use super::uplink::Uplink;
use super::with_remedy;
use crate::commands::{Reply, Source};
use ringfence_driver::switchboard::{Attached, FromDriver, FromFrontend};
use ringfence_guest::{FromGuest, GuestConfig, ToGuest};
use ringfence_hostnet::runtime_dir::RuntimeDir;
use ringfence_hostnet::text::printable;
use ringfence_sandbox::channel::Channel;
use ringfence_sandbox::signals::{ReceivedSignal, Signals};
use ringfence_sandbox::spawn::{DomainProcess, Ended, Event};
use ringfence_sandbox::{ChannelError, Ending, STATUS_FAILED};
use ringfence_sys::descriptors::Descriptors;
use ringfence_sys::poll::wait_any;
use ringfence_uplink_process::FromUplink;
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

/// Events of a guest's processes.
pub(super) enum ProcessEvent {
    Signal(ReceivedSignal),
    Guest(FromGuest, Descriptors),
    GuestGone(Ended),
    Frontend(FromFrontend),
    FrontendGone(Ended),
    Uplink(FromUplink),
    UplinkGone(Ended),
    Driver(FromDriver),
    DriverGone,
    Client(ClientEvent),
    Late,
}

/// Processes of one guest, with the connection to its driver domain. Dropping it ends the
/// processes.
pub(super) struct GuestProcesses<'a> {
    pub(super) reporter: Reporter,
    signals: &'a Signals,
    pub(super) directory: &'a RuntimeDir,
    pub(super) options: &'a Options,
    pub(super) attached: Option<Attached>,
    /// Name of the driver domain. Empty without one.
    pub(super) driver_name: String,
    pub(super) driver_channel: Option<Channel>,
    /// Connections of the guest and of its frontend, until these get them.
    pub(super) names: Option<OwnedFd>,
    pub(super) frontend_hub: Option<OwnedFd>,
    pub(super) disks: Disks,
    /// Set if the memory that the guest lends is in huge pages.
    pub(super) huge_pages: bool,
    pub(super) uplink: Option<Uplink>,
    /// Driver domain, if this launcher started it.
    driver: Option<DomainProcess>,
    pub(super) guest: Option<Watched>,
    pub(super) frontend: Option<Watched>,
    pub(super) uplink_domain: Option<Watched>,
    /// Files of the host about names, which the guest follows.
    pub(super) host_names: Option<HostNames>,
    /// Time of [`GuestProcesses::settle`]. `None` before the command starts, and afterwards.
    pub(super) settles: Option<Instant>,
    /// Clients, while the command runs.
    pub(super) clients: Option<Clients>,
    /// Command and arguments.
    pub(super) command: Vec<OsString>,
}

/// A domain, with the channel to its inner process.
pub(super) struct Watched {
    pub(super) domain: DomainProcess,
    /// Set once the channel is closed. The supervisor's report follows.
    is_silent: bool,
}

impl Watched {
    pub(super) fn new(domain: DomainProcess) -> Watched {
        Watched { domain, is_silent: false }
    }

    /// Returns the inner process's next report, if there is one.
    fn report<T: serde::de::DeserializeOwned>(&mut self) -> Option<(T, Descriptors)> {
        if self.is_silent {
            return None;
        }
        let report = self.domain.channel().try_receive();
        self.is_silent = report.is_err();
        report.ok().flatten()
    }

    /// Iterates over the descriptors to poll.
    fn channels(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let inner = (!self.is_silent).then(|| self.domain.channel().as_fd());
        inner.into_iter().chain([self.domain.events()])
    }
}

impl<'a> GuestProcesses<'a> {
    pub(super) fn new(
        reporter: Reporter,
        signals: &'a Signals,
        directory: &'a RuntimeDir,
        options: &'a Options,
        attachment: Option<Attachment>,
        disks: Disks,
        uplink: Option<Uplink>,
    ) -> GuestProcesses<'a> {
        let mut supervisor = GuestProcesses {
            reporter,
            signals,
            directory,
            options,
            attached: None,
            driver_name: String::new(),
            driver_channel: None,
            names: None,
            frontend_hub: None,
            disks,
            huge_pages: false,
            uplink,
            driver: None,
            guest: None,
            frontend: None,
            uplink_domain: None,
            host_names: None,
            settles: None,
            clients: None,
            command: Vec::new(),
        };
        if let Some(attachment) = attachment {
            supervisor.attached = Some(attachment.attached);
            supervisor.driver_name = attachment.switch;
            supervisor.driver_channel = Some(attachment.driver_channel);
            // Without a switch there are no names.
            supervisor.names = Some(attachment.names).filter(|_| options.has_switch());
            supervisor.frontend_hub = Some(attachment.frontend_hub);
            supervisor.driver = attachment.driver;
        }
        supervisor
    }

    /// Returns the properties of the guest's attachment to a driver domain.
    pub(super) fn attached(&self) -> Option<&Attached> {
        self.attached.as_ref()
    }

    /// Returns the guest's uplink and the channel to its process, once it runs.
    pub(super) fn running_uplink(&self) -> Option<(&Uplink, &Channel)> {
        let channel = self.uplink_domain.as_ref().map(|own| own.domain.channel());
        self.uplink.as_ref().zip(channel)
    }

    /// Returns the guest's uplink.
    pub(super) fn uplink(&self) -> Option<&Uplink> {
        self.uplink.as_ref()
    }

    /// Starts all processes and waits for the end. `guest` is the guest's domain, whose start has begun.
    pub(super) fn run(
        &mut self,
        command: &[OsString],
        guest: DomainProcess,
        config: &GuestConfig,
    ) -> Outcome {
        self.command = command.to_vec();
        self.host_names = HostNames::of(config);
        let outcome = match self.start(guest, config) {
            Ok(()) => self.wait_for_end(),
            Err(outcome) => Outcome { problem: outcome.problem.map(with_remedy), ..outcome },
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
        let Some(guest) = &self.guest else { return Err(Outcome::failed("there is no guest")) };
        match guest.domain.channel().send(order, fds) {
            // The guest's end is reported soon, with the reason.
            Ok(()) | Err(ChannelError::Closed) => Ok(()),
            Err(error) => Err(Outcome::failed(format!("the guest: {error}"))),
        }
    }

    /// Handles an event that is not the expected one while processes start. Fails if it is an end.
    pub(super) fn interrupt(&self, event: ProcessEvent) -> Result<(), Outcome> {
        match event {
            ProcessEvent::Signal(arrived) if arrived.number == Signal::TTOU.as_raw() => Ok(()),
            ProcessEvent::Signal(arrived) => Err(Outcome {
                status: Ending::Killed(arrived.number).exit_status(),
                problem: None,
                by_itself: false,
            }),
            other => self.end_of(other).map_or(Ok(()), Err),
        }
    }

    fn wait_for_end(&mut self) -> Outcome {
        loop {
            match self.next(None) {
                ProcessEvent::Signal(arrived) => {
                    if !terminal::has_sent(&arrived)
                        && let Err(outcome) =
                            self.send_to_guest(&ToGuest::Signal(arrived.number), &[])
                    {
                        return outcome;
                    }
                }
                ProcessEvent::Guest(FromGuest::Running, _) => {
                    self.reporter.step("the command runs")
                }
                ProcessEvent::Guest(FromGuest::ExecEnded { id, ending }, _) => {
                    self.reply(id, &Reply::Ended(ending));
                }
                ProcessEvent::Guest(FromGuest::ExecFailed { id, why }, _) => {
                    self.reply(id, &Reply::Failed { status: STATUS_FAILED, why });
                }
                ProcessEvent::Guest(FromGuest::Listening { id, ports }, _) => {
                    self.reply(id, &Reply::Listening(ports));
                }
                ProcessEvent::Guest(FromGuest::Sockets, fds) => self.pass_sockets(&fds),
                ProcessEvent::Uplink(FromUplink::Sockets) => {
                    if let Err(outcome) = self.ask_for_sockets() {
                        return outcome;
                    }
                }
                ProcessEvent::Uplink(FromUplink::Port { id, error: e }) => {
                    self.port_is_changed(id, e)
                }
                ProcessEvent::Uplink(FromUplink::Policy { error }) => self.policy_is_set(error),
                ProcessEvent::Driver(FromDriver::Stats(stats)) => self.counters_are_there(&stats),
                ProcessEvent::Uplink(FromUplink::Totals(totals)) => self.totals_came(totals),
                ProcessEvent::Frontend(FromFrontend::WindowLevels(levels)) => {
                    self.window_levels_came(levels);
                }
                ProcessEvent::Client(event) => {
                    if let Err(outcome) = self.serve(event) {
                        return outcome;
                    }
                }
                event => {
                    if let Some(outcome) = self.end_of(event) {
                        self.finish_records();
                        return outcome;
                    }
                }
            }
        }
    }

    /// Handles an event. Returns the outcome if it means the end.
    fn end_of(&self, event: ProcessEvent) -> Option<Outcome> {
        match event {
            ProcessEvent::Guest(FromGuest::Ended(ending), _) => Some(self.command_ended(ending)),
            ProcessEvent::Guest(FromGuest::Failed { status, why }, _) => {
                Some(Outcome { status, problem: Some(why), by_itself: false })
            }
            ProcessEvent::GuestGone(ended) => Some(self.gone("the guest's init", &ended)),
            ProcessEvent::Frontend(FromFrontend::Down(why)) => {
                self.reporter
                    .problem(format_args!("the guest's network is down: {}", printable(&why)));
                None
            }
            ProcessEvent::Frontend(FromFrontend::Up { .. }) => {
                self.reporter.step("the guest's network is up");
                None
            }
            ProcessEvent::Driver(FromDriver::DeviceClosed(why)) => {
                self.reporter.problem(format_args!(
                    "the driver domain closed this guest's network interface: {}",
                    printable(&why)
                ));
                None
            }
            ProcessEvent::Driver(FromDriver::DiskClosed { handle, why }) => {
                self.reporter.problem(format_args!(
                    "the driver domain closed this guest's disk {handle}: {}",
                    printable(&why)
                ));
                None
            }
            ProcessEvent::Uplink(FromUplink::Failed(why)) => {
                Some(Outcome::failed(format!("the uplink failed: {}", printable(&why))))
            }
            ProcessEvent::UplinkGone(ended) => Some(self.gone("the uplink", &ended)),
            ProcessEvent::Frontend(FromFrontend::Failed(why)) => Some(self.unless_driver_gone(
                Outcome::failed(format!("the frontend failed: {}", printable(&why))),
            )),
            ProcessEvent::FrontendGone(ended) => {
                Some(self.unless_driver_gone(self.gone("the frontend", &ended)))
            }
            ProcessEvent::DriverGone => Some(self.driver_gone()),
            ProcessEvent::Signal(_)
            | ProcessEvent::Guest(..)
            | ProcessEvent::Frontend(FromFrontend::WindowLevels(_))
            | ProcessEvent::Driver(_)
            | ProcessEvent::Client(_)
            | ProcessEvent::Uplink(_)
            | ProcessEvent::Late => None,
        }
    }

    /// Returns the multicast memberships, once the uplink runs.
    fn memberships(&self) -> Option<&Memberships> {
        let uplink = self.uplink.as_ref().filter(|_| self.uplink_domain.is_some());
        uplink.and_then(Uplink::memberships)
    }

    /// Blocks until the next event.
    pub(super) fn next(&mut self, deadline: Option<Instant>) -> ProcessEvent {
        loop {
            if let Some(event) = self.look() {
                return event;
            }
            self.clients.iter_mut().for_each(Clients::send_messages);
            let mut fds = vec![PollFd::new(self.signals, PollFlags::IN)];
            fds.extend(
                self.driver_channel
                    .iter()
                    .map(|driver_channel| PollFd::new(driver_channel, PollFlags::IN)),
            );
            let channels: Vec<_> = [&self.guest, &self.frontend, &self.uplink_domain]
                .into_iter()
                .flatten()
                .flat_map(Watched::channels)
                .chain(self.clients.iter().flat_map(Clients::fds))
                .chain(self.host_names.iter().flat_map(HostNames::fd))
                .chain(self.memberships().map(AsFd::as_fd))
                .chain(self.driver.iter().map(DomainProcess::events))
                .collect();
            fds.extend(channels.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
            let rejoins = self.memberships().and_then(Memberships::deadline);
            let until = [deadline, self.settles, rejoins].into_iter().flatten().min();
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
        if let Some(guest) = &mut self.guest {
            if let Some((message, fds)) = guest.report() {
                return Some(ProcessEvent::Guest(message, fds));
            }
            if let Some(Event::Ended(ended)) = guest.domain.next_event() {
                return Some(ProcessEvent::GuestGone(ended));
            }
        }
        match self.driver_channel.as_ref().map(Channel::try_receive) {
            Some(Ok(Some((FromDriver::Dial { handle }, _)))) => {
                if let Some(driver_channel) = &self.driver_channel {
                    self.disks.dial(handle, driver_channel);
                }
            }
            Some(Ok(Some((message, _)))) => return Some(ProcessEvent::Driver(message)),
            Some(Ok(None)) | None => {}
            Some(Err(_)) => return Some(ProcessEvent::DriverGone),
        }
        if let Some(frontend) = &mut self.frontend {
            if let Some((message, _)) = frontend.report() {
                return Some(ProcessEvent::Frontend(message));
            }
            match frontend.domain.next_event() {
                Some(Event::Stderr(text)) => self.reporter.relay(Source::Frontend, &text),
                Some(Event::Ended(ended)) => return Some(ProcessEvent::FrontendGone(ended)),
                None => {}
            }
        }
        if let Some(uplink) = &mut self.uplink_domain {
            let next = || uplink.report().map(|(message, _)| message);
            if let Some(message) = self.uplink.as_mut().and_then(|own| own.egress.take(next)) {
                return Some(ProcessEvent::Uplink(message));
            }
            match uplink.domain.next_event() {
                Some(Event::Stderr(text)) => self.reporter.relay(Source::Uplink, &text),
                Some(Event::Ended(ended)) => return Some(ProcessEvent::UplinkGone(ended)),
                None => {}
            }
        }
        if let Some(driver) = &self.driver {
            match driver.next_event() {
                Some(Event::Stderr(text)) => self.reporter.relay(Source::Driver, &text),
                // The driver channel reports the end, and the exit report the reason.
                Some(Event::Ended(_)) => self.driver = None,
                None => {}
            }
        }
        if self.settles.take_if(|at| *at <= Instant::now()).is_some() {
            self.settle();
        }
        if self.host_names.as_ref().is_some_and(HostNames::may_have_changed) {
            self.follow_host_names();
        }
        if let Some((own, domain)) = self.uplink.as_mut().zip(self.uplink_domain.as_ref()) {
            own.follow_links(domain.domain.channel(), self.reporter);
        }
        self.clients.as_mut().and_then(Clients::look).map(ProcessEvent::Client)
    }
}

impl Drop for GuestProcesses<'_> {
    fn drop(&mut self) {
        // The driver domain detaches the guest before it loses the frontend.
        self.driver_channel = None;
        for watched in [&self.guest, &self.frontend, &self.uplink_domain].into_iter().flatten() {
            watched.domain.begin_end();
        }
    }
}

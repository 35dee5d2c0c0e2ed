//! Starting a guest's processes, and waiting for whichever ends first.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rustix::event::{PollFd, PollFlags};

use super::disks::Disks;
use super::rendezvous::{self, Seat, because};
use super::report::{Reporter, last_line, printable};
use super::runtime_dir::RuntimeDir;
use super::uplink::Uplink;
use super::{Options, list, standard_input};
use crate::guest::{FromGuest, GuestConfig, ToGuest};
use crate::switchboard::{Attached, FromDriver, FromFrontend, FrontendConfig};
use crate::uplink::{FromUplink, UplinkConfig};
use ringfence_access::Mode;
use ringfence_frame::commands::TxStaging;
use ringfence_sandbox::channel::{Channel, poll_until, wait_hung_up};
use ringfence_sandbox::signals::{Arrived, Signals};
use ringfence_sandbox::spawn::{DomainKind, DomainProcess, Ended, Event, Process, Spawn};
use ringfence_sandbox::{ChannelError, Ending, STATUS_FAILED};
use ringfence_sys::descriptors::Descriptors;

/// How long a guest or a frontend may take to be ready.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long others are waited for that should end at the same moment: to tell cause from effect,
/// and to leave nothing behind.
const GRACE: Duration = Duration::from_secs(1);

/// The signals that the launcher takes note of. Those of the terminal's keys it leaves to the
/// command, and `SIGTTOU` to nobody: it must be able to take the terminal back.
pub(super) fn signals() -> io::Result<Signals> {
    Signals::new(&[
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGUSR1,
        Signal::SIGUSR2,
        Signal::SIGTTOU,
    ])
}

/// How a guest ended.
#[derive(Debug)]
pub(super) struct Outcome {
    /// The launcher's exit status.
    pub(super) status: u8,
    /// What the user should know.
    pub(super) problem: Option<String>,
    /// Whether the command ended by itself, so that it has left the terminal in order.
    pub(super) by_itself: bool,
}

impl Outcome {
    fn failed(problem: impl Into<String>) -> Outcome {
        Outcome { status: STATUS_FAILED, problem: Some(problem.into()), by_itself: false }
    }
}

/// What happened.
enum News {
    Signal(Arrived),
    Guest(FromGuest, Descriptors),
    GuestGone(Ended),
    Frontend(FromFrontend),
    FrontendGone(Ended),
    Uplink(FromUplink),
    UplinkGone(Ended),
    Driver(FromDriver),
    DriverGone,
    Late,
}

/// The processes of one guest, and what is known of their driver domain. They end when this is
/// dropped.
pub(super) struct Supervisor<'a> {
    reporter: Reporter,
    signals: &'a Signals,
    directory: &'a RuntimeDir,
    options: &'a Options,
    attached: Option<Attached>,
    lease: Option<Channel>,
    /// The connections that the guest and its frontend are to have, until they have them.
    names: Option<OwnedFd>,
    frontend_hub: Option<OwnedFd>,
    disks: Disks,
    uplink: Option<Uplink>,
    /// The driver domain, if this launcher started it.
    driver: Option<DomainProcess>,
    guest: Option<Watched>,
    frontend: Option<Watched>,
    uplink_domain: Option<Watched>,
}

/// The descriptors of TAPs that a guest's init made.
struct Taps {
    /// To the switch: the queues, and what the kernel leaves to their readers.
    switch: Option<(Vec<OwnedFd>, u32)>,
    /// To the host: the queues, and the same.
    uplink: (Vec<OwnedFd>, u32),
}

/// A domain whose inner process may report by a channel of its own.
struct Watched {
    domain: DomainProcess,
    /// Whether that is closed. The keeper tells why, a moment later.
    is_silent: bool,
}

impl Watched {
    fn new(domain: DomainProcess) -> Watched {
        Watched { domain, is_silent: false }
    }

    /// What the inner process reports, if it does.
    fn report<T: serde::de::DeserializeOwned>(&mut self) -> Option<(T, Descriptors)> {
        if self.is_silent {
            return None;
        }
        let report = self.domain.channel().try_receive();
        self.is_silent = report.is_err();
        report.ok().flatten()
    }

    /// What to poll.
    fn channels(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let inner = (!self.is_silent).then(|| self.domain.channel().as_fd());
        inner.into_iter().chain([self.domain.events()])
    }
}

impl<'a> Supervisor<'a> {
    pub(super) fn new(
        reporter: Reporter,
        signals: &'a Signals,
        directory: &'a RuntimeDir,
        options: &'a Options,
        seat: Option<Seat>,
        disks: Disks,
        uplink: Option<Uplink>,
    ) -> Supervisor<'a> {
        let mut supervisor = Supervisor {
            reporter,
            signals,
            directory,
            options,
            attached: None,
            lease: None,
            names: None,
            frontend_hub: None,
            disks,
            uplink,
            driver: None,
            guest: None,
            frontend: None,
            uplink_domain: None,
        };
        if let Some(seat) = seat {
            supervisor.attached = Some(seat.attached);
            supervisor.lease = Some(seat.lease);
            supervisor.names = Some(seat.names);
            supervisor.frontend_hub = Some(seat.frontend_hub);
            supervisor.driver = seat.driver;
        }
        supervisor
    }

    /// What the driver domain gave to this guest.
    pub(super) fn attached(&self) -> Option<&Attached> {
        self.attached.as_ref()
    }

    /// The guest's way to the host.
    pub(super) fn uplink(&self) -> Option<&Uplink> {
        self.uplink.as_ref()
    }

    /// Starts everything and waits for the end.
    pub(super) fn run(
        &mut self,
        command: &[OsString],
        inherit: &[RawFd],
        config: &GuestConfig,
    ) -> Outcome {
        let started = self
            .start_guest(command, inherit, config)
            .and_then(|taps| {
                self.start_uplink(taps.uplink)?;
                taps.switch.map_or(Ok(()), |tap| self.start_frontend(tap))
            })
            .and_then(|()| self.start_command());
        let outcome = match started {
            Ok(()) => self.wait_for_end(),
            Err(outcome) => outcome,
        };
        // What the kernel has yet to write needs all who serve the disks.
        self.disks.end_devices(self.reporter);
        outcome
    }

    fn start_guest(
        &mut self,
        command: &[OsString],
        inherit: &[RawFd],
        config: &GuestConfig,
    ) -> Result<Taps, Outcome> {
        let spawn = Spawn { kind: DomainKind::Guest, command, inherit, aftermath: None };
        let mut guest =
            DomainProcess::start(&spawn).map_err(|error| Outcome::failed(error.to_string()))?;
        let stdin = standard_input().map_err(|error| Outcome::failed(error.to_string()))?;
        let Some(nested) = guest.take_nested_maps() else {
            return Err(Outcome::failed("the guest has no keeper"));
        };
        let mut fds = vec![stdin.as_fd(), nested.keeper.as_fd()];
        // It alone uses it from here on.
        let names = self.names.take();
        fds.extend(names.iter().map(AsFd::as_fd));
        let order = ToGuest::SetUp { config: Box::new(config.clone()), map_writer: nested.writer };
        let told = guest.channel().send(&order, &fds);
        self.guest = Some(Watched::new(guest));
        drop((names, nested));
        told.map_err(|error| Outcome::failed(format!("the guest: {error}")))?;
        self.reporter.step("started the guest's init in namespaces of its own");
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.next(Some(deadline)) {
                News::Guest(FromGuest::Ready { offloads, uplink_offloads, remarks }, fds) => {
                    let mut fds = fds.into_vec();
                    for remark in remarks {
                        self.reporter.step(remark);
                    }
                    let wanted = config.interface.as_ref().map_or(0, |interface| interface.queues);
                    let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
                    let rest = fds.split_off(fds.len().min(wanted));
                    if fds.len() < wanted {
                        return Err(Outcome::failed("the guest: its interface lacks queues"));
                    }
                    let switch = config.interface.is_some().then_some((fds, offloads));
                    return Ok(Taps { switch, uplink: (rest, uplink_offloads) });
                }
                News::Late => return Err(Outcome::failed(late("the guest"))),
                other => self.interrupt(other)?,
            }
        }
    }

    fn start_frontend(&mut self, (taps, offloads): (Vec<OwnedFd>, u32)) -> Result<(), Outcome> {
        let spawn =
            Spawn { kind: DomainKind::Frontend, command: &[], inherit: &[], aftermath: None };
        let frontend =
            DomainProcess::start(&spawn).map_err(|error| Outcome::failed(error.to_string()))?;
        let config = FrontendConfig {
            mtu: self.options.switch_mtu(),
            offloads,
            staging: match self.options.mode {
                Mode::Staging => self.options.staging,
                _ => TxStaging::Off,
            }
            .to_string(),
            windows: self.options.mode == Mode::Window,
            queues: self.options.queues,
            tap_queues: u32::try_from(taps.len()).unwrap_or(u32::MAX),
            takes: self.options.offload.to_string(),
            disks: self.disks.orders(),
        };
        let sockets = self.disks.take_sockets();
        // All are the frontend's alone from here on, so that they close when it ends.
        let Some(hub) = self.frontend_hub.take() else {
            return Err(Outcome::failed("there is no connection for the frontend"));
        };
        let mut fds = vec![hub.as_fd()];
        fds.extend(taps.iter().map(AsFd::as_fd));
        fds.extend(sockets.iter().map(AsFd::as_fd));
        let told = frontend.channel().send(&config, &fds);
        drop(fds);
        drop((hub, taps, sockets));
        self.frontend = Some(Watched::new(frontend));
        if told.is_ok() {
            self.reporter.step("started the guest's frontend in a sandbox of its own");
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.next(Some(deadline)) {
                News::Frontend(FromFrontend::Up) => return Ok(()),
                News::Late => return Err(Outcome::failed(late("the frontend"))),
                other => self.interrupt(other)?,
            }
        }
    }

    /// Starts the uplink's process, where there is to be one, with the queues of its TAP.
    fn start_uplink(&mut self, (queues, offloads): (Vec<OwnedFd>, u32)) -> Result<(), Outcome> {
        let Some(uplink) = &mut self.uplink else { return Ok(()) };
        let spawn = Spawn { kind: DomainKind::Uplink, command: &[], inherit: &[], aftermath: None };
        let domain =
            DomainProcess::start(&spawn).map_err(|error| Outcome::failed(error.to_string()))?;
        let config: UplinkConfig = uplink.config(offloads, self.reporter.is_verbose());
        let told = uplink.hand_over(domain.channel(), &config, queues);
        self.uplink_domain = Some(Watched::new(domain));
        if told.is_ok() {
            self.reporter.step("started the guest's uplink in a sandbox of its own");
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.next(Some(deadline)) {
                News::Uplink(FromUplink::Up { link, remarks }) => {
                    for remark in remarks {
                        self.reporter.step(format_args!("uplink: {}", printable(&remark)));
                    }
                    if let Some(uplink) = &mut self.uplink {
                        uplink.is_up_over(printable(&link));
                    }
                    return Ok(());
                }
                News::Late => return Err(Outcome::failed(late("the uplink"))),
                other => self.interrupt(other)?,
            }
        }
    }

    fn start_command(&mut self) -> Result<(), Outcome> {
        let options = self.options;
        let name = self.host_name();
        if let (Some(attached), Some(switch)) = (&self.attached, &options.switch) {
            self.reporter.step("frontend and backend are connected");
            self.reporter.summary(format_args!(
                "{name} ({}) is on switch `{switch}`: {} in {} mode, MTU {}",
                list(&attached.addresses),
                options.link.on_switch(),
                options.mode,
                options.switch_mtu(),
            ));
        }
        if let Some(uplink) = &self.uplink {
            self.reporter.summary(format_args!("{name} is on the host's network: {uplink}"));
        }
        let environment = self.disks.make_devices(self.reporter);
        self.tell_guest(&ToGuest::Start { environment })
    }

    /// What the guest is called.
    pub(super) fn host_name(&self) -> String {
        let number = self.attached.as_ref().map_or(String::new(), |a| a.domain.to_string());
        self.options.name.clone().unwrap_or_else(|| format!("guest{number}"))
    }

    fn tell_guest(&self, order: &ToGuest) -> Result<(), Outcome> {
        let Some(guest) = &self.guest else { return Err(Outcome::failed("there is no guest")) };
        match guest.domain.channel().send(order, &[]) {
            // That it has gone is heard of in a moment, with the reason.
            Ok(()) | Err(ChannelError::Closed) => Ok(()),
            Err(error) => Err(Outcome::failed(format!("the guest: {error}"))),
        }
    }

    /// Something else than what is waited for, before the command runs: nothing, or the end.
    fn interrupt(&self, news: News) -> Result<(), Outcome> {
        match news {
            News::Signal(arrived) if arrived.number == Signal::SIGTTOU as i32 => Ok(()),
            News::Signal(arrived) => Err(Outcome {
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
                News::Signal(arrived) => {
                    if let Err(outcome) = self.forward(arrived) {
                        return outcome;
                    }
                }
                News::Guest(FromGuest::Running, _) => self.reporter.step("the command runs"),
                news => {
                    if let Some(outcome) = self.end_of(news) {
                        return outcome;
                    }
                }
            }
        }
    }

    /// Passes a signal on, unless the terminal has sent it to the command already.
    fn forward(&self, arrived: Arrived) -> Result<(), Outcome> {
        let keys = [Signal::SIGINT, Signal::SIGQUIT, Signal::SIGHUP].map(|signal| signal as i32);
        let from_terminal = !arrived.by_process && keys.contains(&arrived.number);
        if from_terminal || arrived.number == Signal::SIGTTOU as i32 {
            return Ok(());
        }
        self.tell_guest(&ToGuest::Signal(arrived.number))
    }

    /// The outcome, where news mean the end.
    fn end_of(&self, news: News) -> Option<Outcome> {
        match news {
            News::Guest(FromGuest::Ended(ending), _) => Some(self.command_ended(ending)),
            News::Guest(FromGuest::Failed { status, why }, _) => {
                Some(Outcome { status, problem: Some(why), by_itself: false })
            }
            News::GuestGone(ended) => Some(self.gone("the guest's init", &ended)),
            News::Frontend(FromFrontend::Down(why)) => {
                self.reporter
                    .problem(format_args!("the guest's network is down: {}", printable(&why)));
                None
            }
            News::Frontend(FromFrontend::Up) => {
                self.reporter.step("the guest's network is up");
                None
            }
            News::Driver(FromDriver::DeviceClosed(why)) => {
                self.reporter.problem(format_args!(
                    "the driver domain closed this guest's network interface: {}",
                    printable(&why)
                ));
                None
            }
            News::Driver(FromDriver::DiskClosed { handle, why }) => {
                self.reporter.problem(format_args!(
                    "the driver domain closed this guest's disk {handle}: {}",
                    printable(&why)
                ));
                None
            }
            News::Uplink(FromUplink::Failed(why)) => {
                Some(Outcome::failed(format!("the uplink failed: {}", printable(&why))))
            }
            News::UplinkGone(ended) => Some(self.gone("the uplink", &ended)),
            News::Frontend(FromFrontend::Failed(why)) => Some(self.unless_driver_gone(
                Outcome::failed(format!("the frontend failed: {}", printable(&why))),
            )),
            News::FrontendGone(ended) => {
                Some(self.unless_driver_gone(self.gone("the frontend", &ended)))
            }
            News::DriverGone => Some(self.driver_gone()),
            News::Signal(_)
            | News::Guest(..)
            | News::Driver(_)
            | News::Uplink(FromUplink::Up { .. })
            | News::Late => None,
        }
    }

    fn command_ended(&self, ending: Ending) -> Outcome {
        // Once init is gone, so is everything that the command left behind.
        if let Some(guest) = &self.guest {
            guest.domain.wait_ended(GRACE);
        }
        let loud = match ending {
            Ending::Killed(number) => {
                ![Signal::SIGINT as i32, Signal::SIGPIPE as i32].contains(&number)
            }
            Ending::Exited(_) | Ending::Unknown => false,
        };
        if loud {
            self.reporter.summary(format_args!("the command {ending}"));
        }
        let by_itself = matches!(ending, Ending::Exited(_));
        Outcome { status: ending.exit_status(), problem: None, by_itself }
    }

    fn gone(&self, who: &str, ended: &Ended) -> Outcome {
        let why = because(last_line(&ended.last_words).as_deref());
        let keeper = match ended.first {
            Process::Inner => "",
            Process::Keeper => "the keeper of ",
        };
        Outcome::failed(format!("{keeper}{who} {}{why}; this guest ends with it", ended.ending))
    }

    /// A frontend without its driver domain ends as well: then that is the reason to tell.
    fn unless_driver_gone(&self, outcome: Outcome) -> Outcome {
        let gone = self.lease.as_ref().is_some_and(|lease| {
            matches!(wait_hung_up(lease, Duration::from_millis(100)), Ok(true))
        });
        if gone { self.driver_gone() } else { outcome }
    }

    fn driver_gone(&self) -> Outcome {
        let switch = self.options.switch.as_deref().unwrap_or_default();
        let obituary = rendezvous::ask_obituary(self.directory, switch);
        let (ending, words) = match obituary {
            Some(obituary) => (obituary.ending, obituary.last_words),
            None => {
                // Its keeper was killed as well, and could not clean up.
                if let Err(error) = self.directory.remove_if_stale(switch) {
                    self.reporter.step(error);
                }
                (Ending::Unknown, String::new())
            }
        };
        let why = because(last_line(&words).as_deref());
        Outcome::failed(format!(
            "the driver domain of switch `{switch}` {ending}{why}; this guest ends with it"
        ))
    }

    /// Waits for the next thing that happens.
    fn next(&mut self, deadline: Option<Instant>) -> News {
        loop {
            if let Some(news) = self.look() {
                return news;
            }
            let mut fds = vec![PollFd::new(self.signals, PollFlags::IN)];
            fds.extend(self.lease.iter().map(|lease| PollFd::new(lease, PollFlags::IN)));
            let channels: Vec<_> = [&self.guest, &self.frontend, &self.uplink_domain]
                .into_iter()
                .flatten()
                .flat_map(Watched::channels)
                .chain(self.driver.iter().map(DomainProcess::events))
                .collect();
            fds.extend(channels.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
            match poll_until(&mut fds, deadline) {
                Ok(0) => return News::Late,
                Ok(_) => {}
                Err(_) => return News::DriverGone,
            }
        }
    }

    /// What has happened already. What the command's end is told by comes before what follows
    /// from it.
    fn look(&mut self) -> Option<News> {
        if let Ok(Some(arrived)) = self.signals.next() {
            return Some(News::Signal(arrived));
        }
        if let Some(guest) = &mut self.guest {
            if let Some((message, fds)) = guest.report() {
                return Some(News::Guest(message, fds));
            }
            if let Some(Event::Ended(ended)) = guest.domain.next_event() {
                return Some(News::GuestGone(ended));
            }
        }
        match self.lease.as_ref().map(Channel::try_receive) {
            Some(Ok(Some((FromDriver::Dial { handle }, _)))) => {
                if let Some(lease) = &self.lease {
                    self.disks.dial(handle, lease);
                }
            }
            Some(Ok(Some((message, _)))) => return Some(News::Driver(message)),
            Some(Ok(None)) | None => {}
            Some(Err(_)) => return Some(News::DriverGone),
        }
        if let Some(frontend) = &mut self.frontend {
            if let Some((message, _)) = frontend.report() {
                return Some(News::Frontend(message));
            }
            match frontend.domain.next_event() {
                Some(Event::Said(text)) => self.reporter.relay("frontend", &text),
                Some(Event::Ended(ended)) => return Some(News::FrontendGone(ended)),
                None => {}
            }
        }
        if let Some(uplink) = &mut self.uplink_domain {
            if let Some((message, _)) = uplink.report() {
                return Some(News::Uplink(message));
            }
            match uplink.domain.next_event() {
                Some(Event::Said(text)) => self.reporter.relay("uplink", &text),
                Some(Event::Ended(ended)) => return Some(News::UplinkGone(ended)),
                None => {}
            }
        }
        if let Some(driver) = &self.driver {
            match driver.next_event() {
                Some(Event::Said(text)) => self.reporter.relay("driver domain", &text),
                // The lease tells, and the obituary why.
                Some(Event::Ended(_)) => self.driver = None,
                None => {}
            }
        }
        None
    }
}

fn late(who: &str) -> String {
    format!("{who} was not ready within {PATIENCE:?}")
}

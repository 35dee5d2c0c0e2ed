//! Session of a device: starts the device's process, and serves it until one of both ends.
//!
//! `vhost-user blk`, `vhost-user net` and `pool-proxy` have the same session around different processes:
//!
//! ```text
//! signals, --status-socket ──> DeviceSession ── configuration, descriptors ──> process in its sandbox
//!                                            <── Report: Ready, Machine, Failed, and its own ──
//!                                            <── standard error, end ── supervisor
//! ```
//!
//! A command implements [`DeviceReport`] for the messages of its process. [`DeviceSession::start`] returns once the process
//! serves. [`DeviceSession::wait`] serves until the end, with the [`SessionPart`] that only this command has: messages that
//! are not common to all devices, and other parties.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ringfence_hostnet::log;
use ringfence_hostnet::text::{because, last_line, printable};
use ringfence_pasta::session_status::{SessionNames, StatusServer};
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_sandbox::signals::Signals;
use ringfence_sandbox::spawn::{Event, Spawn};
use ringfence_sandbox::{DomainKind, DomainProcess, Ending};
use ringfence_sys::namespaces;
use ringfence_sys::poll::wait_any;
use ringfence_uplink_process::totals::UplinkTotals;
use ringfence_vhost_user::MachineState;
use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::common::say;

/// Time limit for the start of a process. A disk's file stays locked until the last I/O of an earlier process has ended.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum time between two starts of a process.
const START_INTERVAL: Duration = Duration::from_millis(500);

/// Message of a device's process.
pub(super) enum Report<M> {
    /// Hypervisors are served.
    Ready,
    /// State of the hypervisor of now.
    Machine(MachineState),
    /// The process cannot continue, for this reason.
    Failed(String),
    /// Counters of the traffic, which the session asked for.
    Traffic(BTreeMap<String, u64>),
    /// Message of this kind of device.
    Own(M),
}

/// Messages of the process of one kind of device.
pub(super) trait DeviceReport: DeserializeOwned + Sized {
    /// Function that asks the process for [`Report::Traffic`], if it counts any. It returns `false` if the process does not
    /// listen.
    const ASK: Option<fn(&Channel) -> bool> = None;

    /// Sorts the message out.
    fn sort(self) -> Report<Self>;
}

/// Outcome of a device's process.
pub(super) enum Outcome {
    /// This signal ends the session.
    Signal(i32),
    /// A client ended the process: it truncated the file of its memory under it.
    Truncated,
}

/// Session of a device. See the [module](self).
pub(super) struct DeviceSession {
    kind: DomainKind,
    pub(super) status: StatusServer,
    signals: Signals,
    is_verbose: bool,
    /// Start of the process of now.
    started: Instant,
}

impl DeviceSession {
    /// Prepares this process: its log, its signals, and the socket of `--status-socket`.
    ///
    /// # Errors
    ///
    /// Returns an error if the socket cannot be created, or descriptors are exhausted.
    pub(super) fn new(
        kind: DomainKind,
        status: Option<&Path>,
        names: SessionNames,
        is_verbose: bool,
    ) -> anyhow::Result<DeviceSession> {
        log::to_lines_at(tracing::Level::WARN, |line| say(line));
        // Inherited descriptors are not for Ringfence's own processes.
        namespaces::set_inheritable(&namespaces::inheritable_fds()?, false)?;
        let status = StatusServer::new(status, names)?;
        let signals = Signals::new(&[Signal::TERM, Signal::INT, Signal::QUIT, Signal::HUP])?;
        Ok(DeviceSession { kind, status, signals, is_verbose, started: Instant::now() })
    }

    /// Reports a step, if steps are reported.
    pub(super) fn step(&self, text: impl std::fmt::Display) {
        if self.is_verbose {
            say(text);
        }
    }

    fn name(&self) -> &'static str {
        self.kind.label()
    }

    /// Starts the process with its configuration and descriptors. Returns once it serves.
    ///
    /// # Errors
    ///
    /// Returns the reason for which the process did not start.
    pub(super) fn start<M: DeviceReport>(
        &mut self,
        config: &impl Serialize,
        fds: &[BorrowedFd<'_>],
    ) -> anyhow::Result<DomainProcess> {
        self.started = Instant::now();
        let (kind, name) = (self.kind, self.name());
        let spawn = Spawn { kind, command: &[], inherit: &[], cleanup: None, cgroup: None };
        let domain = DomainProcess::start(&spawn)?;
        domain.channel().send(config, fds)?;
        loop {
            match domain.channel().receive_within::<M>(START_TIMEOUT) {
                Ok((message, _)) => match message.sort() {
                    Report::Ready => return Ok(domain),
                    Report::Failed(why) => bail!("the {name} failed: {}", printable(&why)),
                    Report::Machine(state) => self.status.take(state).into_iter().for_each(say),
                    Report::Traffic(_) | Report::Own(_) => {
                        bail!("the {name} process reported something before its start")
                    }
                },
                Err(ChannelError::Closed) => {
                    let ended = domain.wait_ended(Duration::from_secs(1));
                    let why = ended.and_then(|ended| last_line(&ended.stderr_tail));
                    bail!("the {name} process ended{}", because(why.as_deref()))
                }
                Err(error) => return Err(error).with_context(|| format!("the {name} process")),
            }
        }
    }

    /// Serves the process until it or the session ends. The session also ends when its `part` fails.
    ///
    /// # Errors
    ///
    /// Returns the reason for which the process ended.
    pub(super) fn wait<M: DeviceReport>(
        &mut self,
        domain: &DomainProcess,
        part: &mut dyn SessionPart<M>,
    ) -> anyhow::Result<Outcome> {
        let name = self.name();
        loop {
            if let Some(arrived) = self.signals.next()? {
                self.step(format_args!("ends by signal {}", arrived.number));
                return Ok(Outcome::Signal(arrived.number));
            }
            while let Some((message, _)) = domain.channel().try_receive::<M>().ok().flatten() {
                match message.sort() {
                    Report::Ready => {}
                    Report::Machine(state) => self.status.take(state).into_iter().for_each(say),
                    Report::Failed(why) => bail!("the {name} failed: {}", printable(&why)),
                    Report::Traffic(traffic) => {
                        self.status
                            .take_totals(UplinkTotals { traffic, ..UplinkTotals::default() });
                    }
                    Report::Own(message) => part.take(message, domain.channel())?,
                }
            }
            self.status.serve_by(M::ASK.map(|ask| move || ask(domain.channel())));
            if let Some(outcome) = self.hear_supervisor(domain)? {
                return Ok(outcome);
            }
            part.serve(domain.channel())?;
            let mut fds = vec![
                PollFd::new(&self.signals, PollFlags::IN),
                PollFd::from_borrowed_fd(domain.events(), PollFlags::IN),
                PollFd::new(domain.channel(), PollFlags::IN),
            ];
            let own = self.status.fds().chain(part.fds());
            fds.extend(own.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            wait_any(&mut fds, self.status.deadline())?;
        }
    }

    /// Prints the standard error of the process, and returns how it ended, if it has.
    fn hear_supervisor(&self, domain: &DomainProcess) -> anyhow::Result<Option<Outcome>> {
        let name = self.name();
        while let Some(event) = domain.next_event() {
            match event {
                Event::Stderr(text) => {
                    text.lines().for_each(|line| say(format_args!("{name}: {}", printable(line))));
                }
                Event::Ended(ended) if ended.ending == Ending::Killed(Signal::BUS.as_raw()) => {
                    return Ok(Some(Outcome::Truncated));
                }
                Event::Ended(ended) => {
                    let why = because(last_line(&ended.stderr_tail).as_deref());
                    bail!("the {name} process {}{why}", ended.ending);
                }
            }
        }
        Ok(None)
    }

    /// Counts the client that ended the process, and waits until the next process may start.
    pub(super) fn prepare_restart(&mut self) {
        self.status.restart();
        let name = self.name();
        say(format_args!(
            "a client has truncated the file of its memory: the {name} process starts again"
        ));
        std::thread::sleep(START_INTERVAL.saturating_sub(self.started.elapsed()));
    }
}

/// Part of a session that only one kind of device has.
pub(super) trait SessionPart<M> {
    /// Returns the descriptors to wait for.
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    /// Serves what has come from other parties. `device` leads to the device's process.
    ///
    /// # Errors
    ///
    /// Ends the session.
    fn serve(&mut self, device: &Channel) -> anyhow::Result<()> {
        let _ = device;
        Ok(())
    }

    /// Handles a message of the device's process.
    ///
    /// # Errors
    ///
    /// Ends the session.
    fn take(&mut self, message: M, device: &Channel) -> anyhow::Result<()> {
        let _ = (message, device);
        Ok(())
    }
}

/// Session of a device without such a part.
impl<M> SessionPart<M> for () {}

/// Returns the exit status of a session that this signal ended.
pub(super) fn exit_status(signal: i32) -> u8 {
    if signal == Signal::TERM.as_raw() { 0 } else { Ending::Killed(signal).exit_status() }
}

//! Start of a guest's processes.
//!
//! The processes start at the same time where they do not depend on each other:
//!
//! ```text
//! guest's domain begins (before the driver domain attaches the guest)
//! guest: set-up ──────────────> Ready with the TAPs ─┬─> uplink: Up ───┬─> guest: Start
//! uplink, frontend: begin ────> wait for orders ─────┴─> frontend: Up ─┘
//! ```

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use ringfence_access::Mode;
use ringfence_access::window::Revocation;
use ringfence_sandbox::spawn::{DomainKind, DomainProcess, Spawn, SpawnError};

use super::clients::Clients;
use super::events::{GuestPhase, ProcessEvent};
use super::guest_processes::{GuestProcesses, Outcome};
use super::process::GuestProcess;
use super::standard_input;
use super::terminal::CommandTerminal;
use ringfence_driver::switchboard::{FromFrontend, FrontendConfig};
use ringfence_guest::{FromGuest, GuestConfig, ToGuest};
use ringfence_hostnet::causes::causes;
use ringfence_hostnet::text::printable;
use ringfence_sys::numbers::{bounded, usize_from};
use ringfence_uplink_process::{FromUplink, UplinkConfig};

/// Time limit for guest, frontend and uplink to be ready.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Time from the start of the command to [`GuestProcesses::settle`].
const SETTLES_WITHIN: Duration = Duration::from_millis(300);

/// Queues of a TAP and its offloads.
struct TapQueues {
    fds: Vec<OwnedFd>,
    /// Offloads ([`ringfence_sys::tap::TapOffloads`]).
    offloads: u32,
}

/// Descriptors of the TAPs that a guest's init created.
struct Taps {
    /// TAP to the switch. No queues without a switch.
    switch: TapQueues,
    /// TAP to the host's network.
    uplink: TapQueues,
}

impl GuestProcesses<'_> {
    /// Starts all processes. `guest` is the guest's domain, whose start has begun.
    pub(super) fn start(
        &mut self,
        guest: DomainProcess,
        config: &GuestConfig,
    ) -> Result<(), Outcome> {
        self.set_up_guest(guest, config)?;
        self.start_others()?;
        let taps = self.wait_for_taps(config)?;
        self.configure_uplink(taps.uplink)?;
        self.configure_frontend(taps.switch)?;
        self.wait_until_up()?;
        self.start_command()
    }

    fn set_up_guest(
        &mut self,
        mut guest: DomainProcess,
        config: &GuestConfig,
    ) -> Result<(), Outcome> {
        guest.complete().map_err(not_started)?;
        let stdin = standard_input().map_err(|error| Outcome::failed(error.to_string()))?;
        let Some(nested) = guest.take_nested_maps() else {
            return Err(Outcome::failed("the guest has no supervisor"));
        };
        let mut fds = vec![stdin.as_fd(), nested.supervisor.as_fd()];
        // Only the guest uses the connection from here on.
        let names = self.guest.state_mut().and_then(|state| state.names.take());
        fds.extend(names.iter().map(AsFd::as_fd));
        let order = ToGuest::SetUp {
            config: Box::new(config.clone()),
            map_writer: nested.writer,
            ids: self.options.ids(),
        };
        let told = guest.channel().send(&order, &fds);
        self.guest.start(guest);
        drop((names, nested));
        told.map_err(|error| Outcome::failed(format!("the guest: {error}")))?;
        self.reporter.step("started the guest's init in namespaces of its own");
        Ok(())
    }

    /// Starts the processes of uplink and frontend, as far as the guest has them. They wait for their orders.
    fn start_others(&mut self) -> Result<(), Outcome> {
        let begin = |kind| {
            DomainProcess::begin(&Spawn {
                kind,
                command: &[],
                inherit: &[],
                cleanup: None,
                cgroup: None,
            })
        };
        let uplink = self.uplink.state().map(|_| begin(DomainKind::Uplink));
        let frontend = self.frontend.state().map(|_| begin(DomainKind::Frontend));
        complete(&mut self.uplink, uplink)?;
        complete(&mut self.frontend, frontend)
    }

    /// Waits until the guest's init has created its interfaces.
    fn wait_for_taps(&mut self, config: &GuestConfig) -> Result<Taps, Outcome> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            match self.next(Some(deadline)) {
                ProcessEvent::Guest(
                    FromGuest::Ready {
                        offloads,
                        uplink_offloads,
                        remarks,
                        notices,
                        terminal,
                        stdin,
                    },
                    fds,
                ) => {
                    let Some(mut fds) = self.disks.take_from_guest(fds.into_vec()) else {
                        return Err(Outcome::failed(
                            "the guest: the sockets of its disks are missing",
                        ));
                    };
                    self.take_stdin(if stdin { fds.pop() } else { None });
                    self.connect_terminal(if terminal { fds.pop() } else { None })?;
                    for notice in notices {
                        self.reporter.summary(printable(&notice));
                    }
                    for remark in remarks {
                        self.reporter.step(remark);
                    }
                    let wanted = config.interface.as_ref().map_or(0, |interface| interface.queues);
                    let wanted = usize_from(wanted);
                    let rest = fds.split_off(fds.len().min(wanted));
                    if fds.len() < wanted {
                        return Err(Outcome::failed("the guest: its interface lacks queues"));
                    }
                    let uplink = TapQueues { fds: rest, offloads: uplink_offloads };
                    return Ok(Taps { switch: TapQueues { fds, offloads }, uplink });
                }
                ProcessEvent::Late => return Err(not_ready("the guest")),
                other => self.handle(GuestPhase::Starting, other)?,
            }
        }
    }

    /// Keeps the file that the guest's init has opened again for the command's standard input.
    fn take_stdin(&mut self, file: Option<OwnedFd>) {
        if let Some(guest) = self.guest.state_mut() {
            guest.stdin = file.map(File::from);
        }
    }

    /// Connects the command's own terminal, which init has made, to the user's.
    fn connect_terminal(&mut self, master: Option<OwnedFd>) -> Result<(), Outcome> {
        let Some(master) = master else { return Ok(()) };
        let Some(terminal) = self.terminal.take() else { return Ok(()) };
        let connected = terminal.connect(master);
        let fail = |error| Outcome::failed(format!("the command's terminal: {error}"));
        self.terminal = Some(connected.map_err(fail)?);
        Ok(())
    }

    /// Sends the frontend its configuration, with the queues of the TAP to the switch.
    fn configure_frontend(
        &mut self,
        TapQueues { fds: taps, offloads }: TapQueues,
    ) -> Result<(), Outcome> {
        let Some((frontend, channel)) = self.frontend.with_channel() else { return Ok(()) };
        let config = FrontendConfig {
            mtu: self.options.switch_mtu(),
            offloads,
            staging: self.options.staged_pages().to_string(),
            windows: self.options.mode == Mode::Window,
            strict_revocation: self.options.revocation == Revocation::Strict,
            queues: self.options.queues,
            tap_queues: bounded(taps.len(), u32::MAX),
            takes: self.options.offload.to_string(),
            disks: self.disks.frontend_configs(),
        };
        let sockets = self.disks.take_sockets();
        // From here on only the frontend holds these, so that they close when it ends.
        let Some(hub) = frontend.hub.take() else {
            return Err(Outcome::failed("there is no connection for the frontend"));
        };
        let mut fds = vec![hub.as_fd()];
        fds.extend(taps.iter().map(AsFd::as_fd));
        fds.extend(sockets.iter().map(AsFd::as_fd));
        // If the frontend has ended, its supervisor reports the reason.
        if channel.send(&config, &fds).is_ok() {
            self.reporter.step("started the guest's frontend in a sandbox of its own");
        }
        Ok(())
    }

    /// Sends the uplink its configuration, with the queues of its TAP.
    fn configure_uplink(
        &mut self,
        TapQueues { fds: queues, offloads }: TapQueues,
    ) -> Result<(), Outcome> {
        let Some((uplink, channel)) = self.uplink.with_channel() else { return Ok(()) };
        let config: UplinkConfig = uplink.config(offloads, self.reporter.is_verbose());
        // If the uplink has ended, its supervisor reports the reason.
        if uplink.hand_over(channel, &config, queues).is_ok() {
            self.reporter.step("started the guest's uplink in a sandbox of its own");
        }
        Ok(())
    }

    /// Waits until uplink and frontend carry frames.
    fn wait_until_up(&mut self) -> Result<(), Outcome> {
        let deadline = Instant::now() + START_TIMEOUT;
        let mut uplink_is_up = self.uplink.running().is_none();
        let mut frontend_is_up = self.frontend.running().is_none();
        while !(uplink_is_up && frontend_is_up) {
            match self.next(Some(deadline)) {
                ProcessEvent::Frontend(FromFrontend::Up { huge_pages }) => {
                    if let Some(frontend) = self.frontend.state_mut() {
                        frontend.huge_pages = huge_pages;
                    }
                    frontend_is_up = true;
                }
                ProcessEvent::Uplink(FromUplink::Up { link, remarks }) => {
                    for remark in remarks {
                        self.reporter.step(format_args!("uplink: {}", printable(&remark)));
                    }
                    if let Some(uplink) = self.uplink.state_mut() {
                        uplink.is_up_over(printable(&link));
                    }
                    uplink_is_up = true;
                }
                ProcessEvent::Late if uplink_is_up => return Err(not_ready("the frontend")),
                ProcessEvent::Late => return Err(not_ready("the uplink")),
                other => self.handle(GuestPhase::Starting, other)?,
            }
        }
        Ok(())
    }

    fn start_command(&mut self) -> Result<(), Outcome> {
        // A reader of the announcement may call `exec` at once. Clients are answered after the start.
        match Clients::listen(self.presence.directory()) {
            Ok(clients) => self.clients = Some(clients),
            Err(error) => self.reporter.problem(format_args!(
                "`ringfence ps` and `exec` do not find this guest: {}",
                causes(&error.into())
            )),
        }
        self.announce();
        let environment = self.disks.make_devices(self.reporter);
        self.follow_host_names();
        let filter = self.guest.state().map(|guest| guest.filter.to_file());
        let filter = filter.transpose().map_err(|error| Outcome::failed(error.to_string()))?;
        let filter: Vec<_> = filter.iter().map(AsFd::as_fd).collect();
        let foreground = self.terminal.as_mut().is_some_and(CommandTerminal::start);
        let devices = self.disks.device_paths();
        self.send_to_guest(&ToGuest::Start { environment, foreground, devices }, &filter)?;
        if let Some(guest) = self.guest.state_mut() {
            guest.settles = Some(Instant::now() + SETTLES_WITHIN);
        }
        if self.uplink().is_some_and(|uplink| uplink.ports.has_tcp()) {
            self.ask_for_sockets()?;
        }
        Ok(())
    }
}

/// Completes the start of a process, if it has begun.
fn complete<S>(
    process: &mut GuestProcess<S>,
    begun: Option<Result<DomainProcess, SpawnError>>,
) -> Result<(), Outcome> {
    let Some(begun) = begun else { return Ok(()) };
    let completed = begun.and_then(|mut domain| domain.complete().map(|()| domain));
    process.start(completed.map_err(not_started)?);
    Ok(())
}

fn not_started(error: SpawnError) -> Outcome {
    Outcome::failed(error.to_string())
}

fn not_ready(who: &str) -> Outcome {
    Outcome::failed(format!("{who} was not ready within {START_TIMEOUT:?}"))
}

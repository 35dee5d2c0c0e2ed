//! Shield process: configuration, sandbox, and the loop that serves hypervisors.

// #syscall shield ppoll: waiting for hypervisors, a driver, the backend and the session

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use ringfence_sandbox::DomainKind;
use ringfence_sandbox::channel::{Channel, ChannelError, expect_fds};
use ringfence_sys::descriptors::{Descriptors, dispose_socket};
use ringfence_sys::event_signal::EventSignal;
use ringfence_sys::pace::Spin;
use ringfence_sys::poll::wait_any;
use ringfence_vhost_user::MachineState;
use ringfence_vhost_user::clients::LOGGED_MAX;
use ringfence_vhost_user::shield::{BackendFiles, Broken, Outcome, Shield, ShieldOptions};
use rustix::event::{PollFd, PollFlags};

use super::{FromShield, LOG_FILES, ShieldConfig, ToShield};
use crate::device_process::{ProcessError, accept, enter_sandbox, serve_session};

/// Maximum time to poll after the last work, where other processors can produce work meanwhile.
const SPIN_MAX: Duration = Duration::from_micros(50);

/// Maximum time between two looks at the session's messages.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Main function of a shield process. Returns the exit status.
pub fn main() -> u8 {
    serve_session("shield", run, FromShield::Failed)
}

fn run(channel: &Channel) -> Result<(), ProcessError> {
    let (config, fds) = channel.receive::<ShieldConfig>()?;
    let mut fds = fds.into_vec();
    let isolation = enter_sandbox(DomainKind::Shield, channel, &fds, config.verbose)?;
    // The closed sandbox denies the file that this needs.
    let signal = EventSignal::new().map_err(io::Error::from)?;
    isolation.lock()?;
    let options = ShieldOptions { reconnect: config.reconnect };
    let mut shield = Shield::new(options, signal)?;
    fds.drain(1..).for_each(|log| shield.add_log_file(log));
    let listener = fds.pop().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    channel.send(&FromShield::Ready, &[])?;
    let mut server = ShieldServer {
        shield,
        listener,
        channel,
        requested: 0,
        reported: MachineState::default(),
        refused: 0,
        was_reached: true,
    };
    server.serve()
}

/// Shield, and the session's channel.
struct ShieldServer<'a> {
    shield: Shield,
    listener: OwnedFd,
    channel: &'a Channel,
    /// Files for in-flight logs that were requested.
    requested: usize,
    reported: MachineState,
    /// Number of connections that ended because a rule was broken.
    refused: u64,
    /// The backend was there when it was last needed.
    was_reached: bool,
}

impl ShieldServer<'_> {
    /// Serves until the session ends.
    fn serve(&mut self) -> Result<(), ProcessError> {
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        let mut spin = Spin::new(if processors == 1 { Duration::ZERO } else { SPIN_MAX });
        let (mut last_work, mut slept) = (Instant::now(), None);
        let mut last_look = last_work;
        loop {
            let now = Instant::now();
            if now.duration_since(last_look) >= LOOK_INTERVAL {
                last_look = now;
                if !self.hear_session()? {
                    return Ok(());
                }
            }
            match self.shield.round(now) {
                Ok(Outcome::Idle) => {}
                Ok(Outcome::Worked) => {
                    if let Some(length) = slept.take() {
                        spin.slept(length);
                    }
                    last_work = now;
                    continue;
                }
                Err(broken) => self.lose(&broken),
            }
            if now.duration_since(last_work) < spin.limit() {
                std::thread::yield_now();
                continue;
            }
            self.report()?;
            if !self.shield.arm() && !self.sleep()? {
                return Ok(());
            }
            let woken = Instant::now();
            self.shield.clear_events(woken);
            slept = Some(woken.duration_since(now));
        }
    }

    /// Blocks until there is work. Returns `false` if the session has ended.
    fn sleep(&mut self) -> Result<bool, ProcessError> {
        let mut files = [
            PollFd::from_borrowed_fd(self.shield.wait_fd(), PollFlags::IN),
            PollFd::new(&self.listener, PollFlags::IN),
            PollFd::new(self.channel, PollFlags::IN),
        ];
        wait_any(&mut files, self.shield.deadline())?;
        let [_, has_clients, has_session] = files.map(|file| !file.revents().is_empty());
        if has_clients {
            self.accept()?;
        }
        if has_session { self.hear_session() } else { Ok(true) }
    }

    /// Takes a message of the session. Returns `false` if it has ended.
    fn hear_session(&mut self) -> Result<bool, ProcessError> {
        match self.channel.try_receive::<ToShield>() {
            Ok(None) => Ok(true),
            Ok(Some((ToShield::LogFile, fds))) => {
                let [file] = expect_fds(fds)?;
                self.requested = self.requested.saturating_sub(1);
                self.shield.add_log_file(file);
                Ok(true)
            }
            Ok(Some((ToShield::Traffic, _))) => {
                let counts = self.shield.totals().named().into_iter();
                let counts = counts.filter(|(_, count)| *count > 0);
                let counts = counts.map(|(name, count)| (name.to_owned(), count)).collect();
                self.channel.send_or_drop(&FromShield::Traffic(counts));
                Ok(true)
            }
            Ok(Some((ToShield::Connected { problem: Some(problem) }, _))) => {
                if std::mem::take(&mut self.was_reached) {
                    tracing::warn!("the backend cannot be reached: {problem}");
                }
                self.shield.unreachable(Instant::now());
                Ok(true)
            }
            Ok(Some((ToShield::Connected { problem: None }, fds))) => self.attach(fds),
            Err(ChannelError::Closed) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Uses a connection to the backend, unless the hypervisor has gone.
    fn attach(&mut self, fds: Descriptors) -> Result<bool, ProcessError> {
        let [socket, pool, own, theirs] = expect_fds(fds)?;
        if !self.shield.has_client() {
            self.shield.forget_wish();
            dispose_socket(socket);
            return Ok(true);
        }
        self.was_reached = true;
        match self.shield.attach(BackendFiles { socket, pool, channel: [own, theirs] }) {
            Ok(()) => tracing::info!("a hypervisor and the backend are connected"),
            Err(broken) => self.lose(&broken),
        }
        Ok(true)
    }

    /// Disconnects the party that has gone or broken a rule.
    fn lose(&mut self, broken: &Broken) {
        if broken.is_end() {
            tracing::info!("{} has closed its connection", broken.party);
        } else {
            self.refused += 1;
            if self.refused <= LOGGED_MAX.into() {
                tracing::warn!("the connection ends: {broken}");
            }
        }
        self.shield.lose(broken.party, Instant::now());
    }

    /// Accepts hypervisors. Those beside the one of now are closed.
    fn accept(&mut self) -> Result<(), ProcessError> {
        match accept(&self.listener)? {
            Some(client) if self.shield.has_client() => dispose_socket(client),
            Some(client) => self.shield.connect(client, Instant::now())?,
            None => {}
        }
        Ok(())
    }

    /// Reports the state if it has changed, and requests what is needed.
    fn report(&mut self) -> Result<(), ProcessError> {
        let (pool, machine) = self.shield.memory();
        let state = MachineState {
            memory: pool.map(Into::into),
            withheld_bytes: machine.map_or(0, |machine| machine.bytes),
            clients_refused: self.refused,
        };
        if state != self.reported {
            self.channel.send_or_drop(&FromShield::Machine(state.clone()));
            self.reported = state;
        }
        if self.shield.wants_backend(Instant::now()) {
            self.channel.send(&FromShield::Connect, &[])?;
        }
        while self.shield.log_files() + self.requested < LOG_FILES {
            if self.channel.send_now(&FromShield::LogFile, &[]).is_err() {
                return Ok(());
            }
            self.requested += 1;
        }
        Ok(())
    }
}

//! Proxy process: configuration, sandbox, and the loop that serves hypervisors.

// #syscall proxy ppoll: waiting for hypervisors, the backend and the session

use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use ringfence_sandbox::DomainKind;
use ringfence_sandbox::channel::{Channel, ChannelError, expect_fds};
use ringfence_sys::descriptors::{Descriptors, dispose_socket};
use ringfence_sys::poll::wait_any;
use ringfence_vhost_user::MachineState;
use ringfence_vhost_user::clients::LOGGED_MAX;
use ringfence_vhost_user::proxy::{Outcome, Peers, Relay};
use rustix::event::{PollFd, PollFlags};

use super::{FromProxy, ProxyConfig, ToProxy};
use crate::device_process::{ProcessError, accept, enter_sandbox, serve_session};

/// Main function of a proxy process. Returns the exit status.
pub fn main() -> u8 {
    serve_session("proxy", run, FromProxy::Failed)
}

fn run(channel: &Channel) -> Result<(), ProcessError> {
    let (config, fds) = channel.receive::<ProxyConfig>()?;
    let files: [OwnedFd; 1] = expect_fds(fds)?;
    enter_sandbox(DomainKind::Proxy, channel, &files, config.verbose)?.lock()?;
    let [listener] = files;
    channel.send(&FromProxy::Ready, &[])?;
    let mut proxy = Proxy {
        config,
        listener,
        channel,
        serving: Serving::Nobody,
        reported: MachineState::default(),
        refused: 0,
        was_reached: true,
    };
    proxy.serve()
}

/// Hypervisor that is served now.
enum Serving {
    Nobody,
    /// The session connects to the backend.
    Waiting(OwnedFd),
    Relay(Box<Relay>),
}

/// Proxy, and the session's channel.
struct Proxy<'a> {
    config: ProxyConfig,
    listener: OwnedFd,
    channel: &'a Channel,
    serving: Serving,
    reported: MachineState,
    /// Number of hypervisors that were disconnected because a rule was broken.
    refused: u64,
    /// The backend was there when it was last needed.
    was_reached: bool,
}

impl Proxy<'_> {
    /// Serves until the session ends.
    fn serve(&mut self) -> Result<(), ProcessError> {
        loop {
            let events = self.wait()?;
            if let (Serving::Relay(relay), Some(events)) = (&mut self.serving, events.get(2..)) {
                match relay.serve(events, Instant::now()) {
                    Ok(Outcome::Connected) => {}
                    Ok(Outcome::Gone(party)) => {
                        tracing::info!("{party} has closed its connection");
                        self.end();
                    }
                    Err(broken) => {
                        self.refused += 1;
                        if self.refused <= LOGGED_MAX.into() {
                            tracing::warn!("both are disconnected: {broken}");
                        }
                        self.end();
                    }
                }
            }
            self.report();
            if !self.hear_session()? {
                return Ok(());
            }
            self.accept()?;
        }
    }

    /// Blocks until something happens. Returns the events of the session, the listener and the relay.
    fn wait(&self) -> io::Result<Vec<PollFlags>> {
        let mut files = vec![
            PollFd::new(self.channel, PollFlags::IN),
            PollFd::new(&self.listener, PollFlags::IN),
        ];
        let mut deadline = None;
        if let Serving::Relay(relay) = &self.serving {
            files.extend(relay.waits());
            deadline = relay.deadline();
        }
        wait_any(&mut files, deadline)?;
        Ok(files.iter().map(PollFd::revents).collect())
    }

    /// Takes the backend that the session has connected to. Returns `false` if the session has ended.
    fn hear_session(&mut self) -> Result<bool, ProcessError> {
        match self.channel.try_receive::<ToProxy>() {
            Ok(None) => Ok(true),
            Ok(Some((ToProxy::Connected { problem }, fds))) => {
                let serving = std::mem::replace(&mut self.serving, Serving::Nobody);
                let Serving::Waiting(frontend) = serving else {
                    return Err(ProcessError::NotAsked);
                };
                self.start(frontend, problem, fds)?;
                Ok(true)
            }
            Err(ChannelError::Closed) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Begins to serve a hypervisor, unless the backend cannot be reached.
    fn start(
        &mut self,
        frontend: OwnedFd,
        problem: Option<String>,
        fds: Descriptors,
    ) -> Result<(), ProcessError> {
        if let Some(problem) = problem {
            if std::mem::take(&mut self.was_reached) {
                tracing::warn!("the hypervisor is disconnected: {problem}");
            }
            dispose_socket(frontend);
            return Ok(());
        }
        let [backend, own, spare] = expect_fds(fds)?;
        let peers = Peers { frontend, backend, channel: [own, spare] };
        self.serving = Serving::Relay(Box::new(Relay::new(self.config.pool.clone(), peers)?));
        self.was_reached = true;
        tracing::info!("a hypervisor and the backend are connected");
        Ok(())
    }

    /// Accepts hypervisors. Those beside the one of now are closed.
    fn accept(&mut self) -> Result<(), ProcessError> {
        match accept(&self.listener)? {
            Some(client) if matches!(self.serving, Serving::Nobody) => {
                self.channel.send(&FromProxy::Connect, &[])?;
                self.serving = Serving::Waiting(client);
            }
            Some(client) => dispose_socket(client),
            None => {}
        }
        Ok(())
    }

    /// Closes the connections of now.
    fn end(&mut self) {
        if let Serving::Relay(relay) = std::mem::replace(&mut self.serving, Serving::Nobody) {
            relay.close();
        }
    }

    /// Reports the state if it has changed.
    fn report(&mut self) {
        let (memory, withheld) = match &self.serving {
            Serving::Relay(relay) => relay.memory(),
            Serving::Nobody | Serving::Waiting(_) => Default::default(),
        };
        let state = MachineState {
            memory: memory.map(Into::into),
            withheld_bytes: withheld.bytes,
            clients_refused: self.refused,
        };
        if state != self.reported {
            self.channel.send_or_drop(&FromProxy::Machine(state.clone()));
            self.reported = state;
        }
    }
}

//! Relay of messages between a frontend and its backend, and between their channels.

// #syscall proxy ppoll: readiness of the sockets of a relay

use std::fmt;
use std::os::fd::OwnedFd;
use std::time::Instant;

use ringfence_sys::descriptors::{Descriptors, dispose_socket};
use ringfence_wire::vhost_user::config_changed;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::end::{End, Incoming, Kind, Outgoing};
use super::fault::ProxyFault;
use super::filter::{Filter, NewChannel};
use super::notices::Notices;
use super::pool::{PoolChoice, Withheld};
use crate::HandedOver;

/// Maximum messages of each connection in one round.
const MESSAGES_MAX: usize = 64;

/// Connected sockets of a frontend and its backend, and a pair of sockets for a channel between proxy and backend.
#[derive(Debug)]
pub struct Peers {
    pub frontend: OwnedFd,
    pub backend: OwnedFd,
    pub channel: [OwnedFd; 2],
}

/// Peers of a relay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Party {
    Frontend,
    Backend,
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Party::Frontend => "the hypervisor",
            Party::Backend => "the backend",
        })
    }
}

/// Broken rule of a peer.
#[derive(Debug, thiserror::Error)]
#[error("vhost-user: {party}: {fault}")]
pub struct Broken {
    pub party: Party,
    pub fault: ProxyFault,
}

/// Outcome of a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Both are connected.
    Connected,
    /// A peer has closed its connection.
    Gone(Party),
}

/// Channel of the backend's requests, and the socket for notices to the frontend.
#[derive(Debug)]
struct Channel {
    frontend: End,
    notices: Notices,
}

/// Relay of one frontend and one backend. See the [module](super).
#[derive(Debug)]
pub struct Relay {
    filter: Filter,
    frontend: End,
    backend: End,
    channel: Option<Channel>,
    /// End of the channel here, until the frontend has sent its socket.
    own: Option<OwnedFd>,
    /// Socket of the frontend for a backend that knows no channels. A hypervisor complains when it is closed.
    kept: Option<OwnedFd>,
}

impl Relay {
    /// Creates a relay for the pool of the device.
    ///
    /// # Errors
    ///
    /// Returns the system's error if descriptors are exhausted.
    pub fn new(choice: PoolChoice, peers: Peers) -> Result<Relay, Errno> {
        let Peers { frontend, backend, channel: [own, spare] } = peers;
        Ok(Relay {
            filter: Filter::new(choice, spare)?,
            frontend: End::new(frontend),
            backend: End::new(backend),
            channel: None,
            own: Some(own),
            kept: None,
        })
    }

    /// Closes both connections, without waiting.
    pub fn close(self) {
        let Relay { frontend, backend, channel, own, kept, .. } = self;
        frontend.close();
        backend.close();
        close_channel(channel);
        [own, kept].into_iter().flatten().for_each(dispose_socket);
    }

    /// Returns the pool that the backend has, and the memory that it does not get.
    pub fn memory(&self) -> (Option<HandedOver>, Withheld) {
        self.filter.memory()
    }

    /// Returns the sockets to wait for, with the events that a round needs.
    pub fn waits(&self) -> Vec<PollFd<'_>> {
        let interest = |end, reads: bool| {
            let read = if reads { PollFlags::IN } else { PollFlags::empty() };
            let write = if End::is_full(end) { PollFlags::OUT } else { PollFlags::empty() };
            PollFd::new(end, read | write)
        };
        let mut waits = vec![
            interest(&self.frontend, self.reads_frontend()),
            interest(&self.backend, self.reads_backend()),
        ];
        if let Some(channel) = &self.channel {
            waits.push(interest(&channel.frontend, true));
            waits.extend(channel.notices.wait());
        }
        waits
    }

    /// Returns the time at which a round is due although nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        let notices = self.channel.iter().filter_map(|channel| channel.notices.deadline());
        self.ends().filter_map(|(_, end)| end.deadline()).chain(notices).min()
    }

    fn ends(&self) -> impl Iterator<Item = (Party, &End)> {
        let channel = self.channel.iter().map(|channel| (Party::Frontend, &channel.frontend));
        [(Party::Frontend, &self.frontend), (Party::Backend, &self.backend)]
            .into_iter()
            .chain(channel)
    }

    /// Passes on what is there. `events` are those of [`Relay::waits`], in the same order.
    ///
    /// # Errors
    ///
    /// Returns [`Broken`]; the relay is to be closed.
    pub fn serve(&mut self, events: &[PollFlags], now: Instant) -> Result<Outcome, Broken> {
        let has_ended = |event: &PollFlags| {
            event.intersects(PollFlags::HUP | PollFlags::ERR) && !event.intersects(PollFlags::IN)
        };
        // An end with messages is read until their end.
        for (party, event) in [Party::Frontend, Party::Backend].into_iter().zip(events) {
            if has_ended(event) {
                return Ok(Outcome::Gone(party));
            }
        }
        if events.iter().skip(2).any(has_ended) {
            close_channel(self.channel.take());
        }
        for _ in 0..MESSAGES_MAX {
            let mut passed = false;
            for pass in [Relay::pass_request, Relay::pass_answer] {
                match pass(self)? {
                    Passed::Message => passed = true,
                    Passed::Nothing => {}
                    Passed::Gone(party) => return Ok(Outcome::Gone(party)),
                }
            }
            if !passed {
                break;
            }
        }
        self.serve_channel(now)?;
        for (party, end) in self.ends() {
            end.check_time(now).map_err(by(party))?;
        }
        Ok(Outcome::Connected)
    }

    fn reads_frontend(&self) -> bool {
        !self.filter.awaits_answer() && !self.frontend.is_full() && !self.backend.is_full()
    }

    fn reads_backend(&self) -> bool {
        !self.frontend.is_full()
    }

    /// Sends what waits for the frontend and the backend. Returns the peer that is gone.
    fn flush(&mut self) -> Result<Option<Party>, Broken> {
        if !self.frontend.flush().map_err(by(Party::Frontend))? {
            return Ok(Some(Party::Frontend));
        }
        let is_there = self.backend.flush().map_err(by(Party::Backend))?;
        Ok((!is_there).then_some(Party::Backend))
    }

    /// Passes a request of the frontend.
    fn pass_request(&mut self) -> Result<Passed, Broken> {
        if !self.reads_frontend() {
            return Ok(Passed::Nothing);
        }
        let failed = by(Party::Frontend);
        let message = match self.frontend.receive(Kind::Request).map_err(&failed)? {
            Incoming::Message(message) => message,
            Incoming::Nothing => return Ok(Passed::Nothing),
            Incoming::Gone => return Ok(Passed::Gone(Party::Frontend)),
        };
        let actions = self.filter.take_request(message).map_err(failed)?;
        if let Some(channel) = actions.channel {
            self.set_channel(channel);
        }
        actions.to_backend.into_iter().for_each(|message| self.backend.send(message));
        actions.to_frontend.into_iter().for_each(|message| self.frontend.send(message));
        self.flush().map(|gone| gone.map_or(Passed::Message, Passed::Gone))
    }

    /// Passes an answer of the backend.
    fn pass_answer(&mut self) -> Result<Passed, Broken> {
        if let Some(gone) = self.flush()? {
            return Ok(Passed::Gone(gone));
        }
        if !self.reads_backend() {
            return Ok(Passed::Nothing);
        }
        let failed = by(Party::Backend);
        let message = match self.backend.receive(Kind::Answer).map_err(&failed)? {
            Incoming::Message(message) => message,
            Incoming::Nothing => return Ok(Passed::Nothing),
            Incoming::Gone => return Ok(Passed::Gone(Party::Backend)),
        };
        self.frontend.send(self.filter.take_answer(message).map_err(failed)?);
        self.flush().map(|gone| gone.map_or(Passed::Message, Passed::Gone))
    }

    fn set_channel(&mut self, new: NewChannel) {
        let NewChannel { socket, protocol } = new;
        match self.own.take().zip(protocol) {
            Some((own, protocol)) => {
                let (frontend, notices) = (End::new(socket), Notices::new(own, protocol));
                self.channel = Some(Channel { frontend, notices });
            }
            None => self.kept = Some(socket),
        }
    }

    /// Serves the channel. One that a peer has closed is closed to the other one.
    fn serve_channel(&mut self, now: Instant) -> Result<(), Broken> {
        let is_open = self.channel.as_mut().map(|channel| channel.serve(now)).transpose()?;
        if is_open == Some(false) {
            close_channel(self.channel.take());
        }
        Ok(())
    }
}

impl Channel {
    /// Reads requests of the backend, and sends the notice that is due. Returns `false` once no more can come.
    fn serve(&mut self, now: Instant) -> Result<bool, Broken> {
        let Channel { frontend, notices } = self;
        notices.serve(now).map_err(by(Party::Backend))?;
        let failed = by(Party::Frontend);
        if notices.is_due() {
            let has_room = !frontend.is_full();
            if has_room {
                frontend.send(Outgoing::new(config_changed(), Descriptors::default()));
            }
            notices.told(has_room, now);
        }
        if !frontend.flush().map_err(&failed)? {
            return Ok(false);
        }
        match frontend.receive(Kind::Answer).map_err(&failed)? {
            // No notice asks for an answer.
            Incoming::Message(_) => Err(failed(ProxyFault::Unsolicited)),
            Incoming::Gone => Ok(false),
            Incoming::Nothing => Ok(notices.is_open() || frontend.is_full()),
        }
    }
}

/// Result of an attempt to pass a message on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Passed {
    Message,
    Nothing,
    Gone(Party),
}

fn by(party: Party) -> impl Fn(ProxyFault) -> Broken {
    move |fault| Broken { party, fault }
}

fn close_channel(channel: Option<Channel>) {
    if let Some(Channel { frontend, mut notices }) = channel {
        frontend.close();
        notices.close();
    }
}

//! Domain's connection to its hub: requests with replies, and port closures without.

// #syscall driver,frontend,card,daemon ppoll: waiting for the hub

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ringfence_sys::descriptors::Descriptors;
use ringfence_sys::poll::wait_any;
use rustix::event::{PollFd, PollFlags};

use super::protocol::{self, HubMessage, HubReceived, Kind, REPLY, Refusal, UNANSWERED};
use crate::error::PlatformError;
use crate::events::EventPort;

/// Maximum time for a reply of the hub.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Connection to the hub. Requests of several threads are serialised.
pub(crate) struct HubClient {
    socket: OwnedFd,
    next_seq: Mutex<u32>,
    /// Closed ports that the hub has not been notified of. At most as many as the hub's port quota of
    /// this domain.
    closed: Mutex<Vec<EventPort>>,
}

impl HubClient {
    pub(crate) fn new(socket: OwnedFd) -> HubClient {
        HubClient { socket, next_seq: Mutex::new(1), closed: Mutex::default() }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Notifies the hub that a port was closed. Never blocks: a notification that cannot be sent now
    /// precedes the next request.
    pub(crate) fn close_port(&self, port: EventPort) {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner).push(port);
        self.send_closed();
    }

    fn send_closed(&self) {
        let mut closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(port) = closed.last() {
            let args = [port.0, 0, 0, 0, 0, 0];
            let message = HubMessage { kind: Kind::Close.to_raw(), seq: UNANSWERED, args };
            if protocol::send(&self.socket, message, &[]).is_err() {
                return;
            }
            closed.pop();
        }
    }

    /// Sends one request and waits for its reply.
    pub(crate) fn call(
        &self,
        what: &'static str,
        kind: Kind,
        args: &[u32],
        fds: &[BorrowedFd<'_>],
    ) -> Result<([u32; 5], Descriptors), PlatformError> {
        let mut next_seq = self.next_seq.lock().unwrap_or_else(PoisonError::into_inner);
        let seq = *next_seq;
        *next_seq = seq.wrapping_add(1).max(1);
        let mut request = HubMessage { kind: kind.to_raw(), seq, args: [0; 6] };
        for (slot, arg) in request.args.iter_mut().zip(args) {
            *slot = *arg;
        }
        let deadline = Instant::now() + ANSWER_WITHIN;
        self.send_closed();
        while let Err(errno) = protocol::send(&self.socket, request, fds) {
            // The hub has not read the earlier notifications of closed ports yet.
            if errno.kind() != ErrorKind::WouldBlock {
                return Err(PlatformError::Disconnected("hub"));
            }
            self.wait(PollFlags::OUT, deadline)?;
            self.send_closed();
        }
        loop {
            match protocol::receive(&self.socket) {
                HubReceived::Message(reply, fds)
                    if reply.kind == kind.to_raw() | REPLY && reply.seq == seq =>
                {
                    let [status, rest @ ..] = reply.args;
                    if status == 0 {
                        return Ok((rest, fds));
                    }
                    return Err(Refusal::from_raw(status).to(what));
                }
                // Reply to an earlier request that timed out.
                HubReceived::Message(..) => {}
                HubReceived::Malformed(_) | HubReceived::Closed => {
                    return Err(PlatformError::Disconnected("hub"));
                }
                HubReceived::Nothing => self.wait(PollFlags::IN, deadline)?,
            }
        }
    }

    fn wait(&self, wanted: PollFlags, deadline: Instant) -> Result<(), PlatformError> {
        let mut fds = [PollFd::new(&self.socket, wanted)];
        match wait_any(&mut fds, Some(deadline)) {
            Ok(0) => Err(PlatformError::Disconnected("hub (no answer within 5 s)")),
            Ok(_) => Ok(()),
            Err(e) => Err(PlatformError::system("waiting for the hub", e)),
        }
    }
}

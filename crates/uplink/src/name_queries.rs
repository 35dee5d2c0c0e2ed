//! Queries to name servers over TCP, under an egress policy.
//!
//! The policy reads every query and every answer, so no connection of the guest reaches a name server. A query goes out over
//! TCP if the server's datagram was incomplete, or if the guest asks over TCP. Each has a connection of its own:
//!
//! ```text
//! guest ──datagram──> udp ──┐                                       ┌──> udp ──datagram──> guest
//!                           ├──> Context::queries ──> NameQueries ──┤
//! guest ──stream───> tcp ───┘        (one socket for each)          └──> tcp ──stream───> guest
//! ```
//!
//! At most [`QUERIES_MAX`] wait for an answer, each for [`ANSWER_WITHIN`]. A query that fails is answered by SERVFAIL at once.

use core::time::Duration;
use std::io::IoSliceMut;

use rustix::io::Errno;

use crate::context::Context;
use crate::forward::{ForwardId, Reused};
use crate::host::{Close, OwnerKind, Ready, Socket};
use crate::name_query::{NameQuery, framed};

/// Maximum number of queries of an engine that wait for an answer.
pub const QUERIES_MAX: usize = 32;
/// Time limit for an answer.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Maximum number of bytes that are read at once.
const READ: usize = 16 << 10;

/// Query that is over, with its answer if there is one.
pub(crate) struct AnsweredQuery {
    pub(crate) query: NameQuery,
    pub(crate) answer: Option<Vec<u8>>,
}

struct Entry {
    query: NameQuery,
    socket: Option<Socket>,
    is_sent: bool,
    received: Vec<u8>,
    until: Duration,
}

/// Queries of one engine that wait for an answer.
#[derive(Default)]
pub(crate) struct NameQueries {
    entries: Reused<Entry>,
    answered: Vec<AnsweredQuery>,
}

impl NameQueries {
    /// Sends a query. It is over at once if the server cannot be reached, or too many wait.
    pub(crate) fn start(&mut self, query: NameQuery, context: &mut Context<'_>) {
        let server = query.server;
        let until = context.now + ANSWER_WITHIN;
        let is_full = self.entries.values().count() >= QUERIES_MAX;
        let mut query = Some(query);
        let started = self.entries.insert(OwnerKind::Dns, |owner| {
            let socket = if is_full { None } else { context.host.connect(owner, server).ok() };
            let socket = Some(socket.ok_or(Errno::MFILE)?);
            let query = query.take().ok_or(Errno::INVAL)?;
            Ok(Entry { query, socket, is_sent: false, received: Vec::new(), until })
        });
        if let (Err(_), Some(query)) = (started, query) {
            self.answered.push(AnsweredQuery { query, answer: None });
        }
    }

    /// Handles an event of a socket.
    pub(crate) fn ready(&mut self, ready: Ready, context: &mut Context<'_>) {
        let Some(index) = self.entries.index_of(ready.owner) else { return };
        let Some(entry) = self.entries.get_mut(index) else { return };
        let answer = match entry.advance(ready, context) {
            Ok(None) => return,
            Ok(Some(answer)) => Some(answer),
            Err(_) => None,
        };
        self.finish(ForwardId(ready.owner), answer, context);
    }

    fn finish(&mut self, id: ForwardId, answer: Option<Vec<u8>>, context: &mut Context<'_>) {
        let Some((_, mut entry)) = self.entries.remove(id) else { return };
        if let Some(socket) = entry.socket.take() {
            context.host.close(socket, Close::Orderly);
        }
        self.answered.push(AnsweredQuery { query: entry.query, answer });
    }

    /// Takes the queries that are over.
    pub(crate) fn take_answered(&mut self) -> Vec<AnsweredQuery> {
        core::mem::take(&mut self.answered)
    }

    /// Ends the queries whose time is over.
    pub(crate) fn run_timers(&mut self, context: &mut Context<'_>) {
        for index in self.entries.indices() {
            let is_late = self.entries.get(index).is_some_and(|entry| entry.until <= context.now);
            if let Some(id) = self.entries.id_of(OwnerKind::Dns, index).filter(|_| is_late) {
                self.finish(id, None, context);
            }
        }
    }

    /// Returns the time at which [`run_timers`](Self::run_timers) must be called next.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.entries.values().map(|entry| entry.until).min()
    }
}

impl Entry {
    /// Sends the query once the connection is established, and reads the answer. Returns it once it is complete.
    fn advance(
        &mut self,
        ready: Ready,
        context: &mut Context<'_>,
    ) -> Result<Option<Vec<u8>>, Errno> {
        let Some(socket) = &self.socket else { return Err(Errno::NOTCONN) };
        if ready.what.failed {
            return Err(context.host.error(socket).unwrap_or(Errno::IO));
        }
        if ready.what.writable && !self.is_sent {
            self.is_sent = true;
            let message = framed(&self.query.query);
            // An empty send queue has room for all of it.
            if context.host.send_bytes(socket, &message)? < message.len() {
                return Err(Errno::NOBUFS);
            }
        }
        loop {
            let mut buffer = vec![0; READ];
            let read = context.host.peek(socket, 0, &mut [IoSliceMut::new(&mut buffer)]);
            let count = match read {
                Ok(0) => return Err(Errno::CONNRESET),
                Ok(count) => count,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
                Err(errno) => return Err(errno),
            };
            context.host.discard(socket, count)?;
            self.received.extend_from_slice(buffer.get(..count).unwrap_or_default());
            if let [high, low, message @ ..] = &self.received[..] {
                let length = usize::from(u16::from_be_bytes([*high, *low]));
                if let Some(message) = message.get(..length) {
                    return Ok(Some(message.to_vec()));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;

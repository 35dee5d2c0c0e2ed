//! Stream of a connection that has no socket: the uplink reads and writes it itself.
//!
//! The bytes for the guest are kept until the guest has acknowledged them. All of them, with those of incomplete queries,
//! count as first bytes that wait for a verdict ([`FIRST_BYTES_HELD_MAX`](crate::egress::FIRST_BYTES_HELD_MAX)); a connection
//! beyond the limit is reset.

use core::net::SocketAddr;
use core::time::Duration;
use std::io::IoSliceMut;
use std::sync::Arc;

use ringfence_policy::dns::QUERY_MAX;
use ringfence_policy::gate::{QueryEnds, QueryFate};
use ringfence_sys::numbers::{bounded, usize_from};
use rustix::io::Errno;

use super::pieces::gather;
use crate::context::Context;
use crate::egress::{Asked, Egress};
use crate::flow::FlowId;
use crate::host::Piece;
use crate::name_query::{NameQuery, QueryClient, framed};

/// Time after which an idle connection is reset.
pub(super) const IDLE: Duration = Duration::from_secs(30);
/// Maximum number of bytes of queries that were not read yet: two, with their lengths.
const ROOM: usize = 2 * (2 + QUERY_MAX);
/// Window for bytes that nobody reads.
const IGNORED: usize = 64 << 10;
/// Maximum number of queries of a connection that wait for an answer. Later ones are read when there is one.
const ASKED_MAX: usize = 8;

/// Stream of a connection that has no socket.
#[derive(Debug)]
pub(super) struct LocalStream {
    egress: Arc<Egress>,
    /// Queries that it carries. `None`: the bytes of the guest are ignored.
    names: Option<Names>,
    from_guest: Vec<u8>,
    to_guest: Vec<u8>,
    /// Nothing follows `to_guest`.
    is_complete: bool,
    guest_has_ended: bool,
    has_failed: bool,
}

/// Queries of one connection.
#[derive(Clone, Copy, Debug)]
struct Names {
    id: FlowId,
    ends: QueryEnds,
    /// The host's address of the server.
    server: SocketAddr,
    /// Number of queries that wait for an answer.
    asked: usize,
}

impl LocalStream {
    fn new(egress: &Arc<Egress>, names: Option<Names>) -> LocalStream {
        LocalStream {
            egress: Arc::clone(egress),
            names,
            from_guest: Vec::new(),
            to_guest: Vec::new(),
            is_complete: false,
            guest_has_ended: false,
            has_failed: false,
        }
    }

    /// Creates the stream of a connection to a name server.
    pub(super) fn of_names(
        egress: &Arc<Egress>,
        id: FlowId,
        ends: QueryEnds,
        server: SocketAddr,
    ) -> LocalStream {
        LocalStream::new(egress, Some(Names { id, ends, server, asked: 0 }))
    }

    /// Creates a stream that consists of these bytes.
    pub(super) fn of_page(egress: &Arc<Egress>, page: &[u8]) -> LocalStream {
        let mut stream = LocalStream::new(egress, None);
        stream.push(page);
        stream.is_complete = true;
        stream
    }

    /// Returns the number of bytes that the guest may send.
    pub(super) fn room(&self) -> u32 {
        let room = if self.names.is_some() { ROOM - self.from_guest.len() } else { IGNORED };
        bounded(room, u32::MAX)
    }

    fn push(&mut self, bytes: &[u8]) {
        if self.egress.hold(bytes.len()) {
            self.to_guest.extend_from_slice(bytes);
        } else {
            self.has_failed = true;
        }
    }

    /// Takes payload of the guest. Returns the number of bytes.
    pub(super) fn take(
        &mut self,
        pieces: &[Piece<'_>],
        offered: usize,
        context: &mut Context<'_>,
    ) -> usize {
        if self.names.is_none() {
            return offered;
        }
        let taken = offered.min(ROOM - self.from_guest.len());
        if self.egress.hold(taken) {
            gather(pieces, 0..taken, &mut self.from_guest);
        } else {
            self.has_failed = true;
        }
        self.read(context);
        taken
    }

    /// Reads the queries that are complete.
    fn read(&mut self, context: &mut Context<'_>) {
        while let Some(names) = self.names.as_mut().filter(|names| names.asked < ASKED_MAX)
            && let [high, low, rest @ ..] = &self.from_guest[..]
        {
            let length = usize::from(u16::from_be_bytes([*high, *low]));
            if length > QUERY_MAX {
                self.has_failed = true;
                return;
            }
            let Some(query) = rest.get(..length) else { return };
            // Programs ask over datagrams first. Those can wait for an answer, a stream cannot.
            let asked = self.egress.query(
                names.ends,
                query,
                false,
                context.upstream(),
                context.now,
                context.counters,
            );
            let fate = match asked {
                Asked::Decided(fate) => fate,
                Asked::Held(_) => QueryFate::Drop,
            };
            self.egress.release(2 + length);
            self.from_guest.drain(..2 + length);
            match fate {
                QueryFate::Reply(reply) => self.push(&framed(&reply)),
                QueryFate::Drop => self.has_failed = true,
                QueryFate::Forward(query) => {
                    names.asked += 1;
                    let (ends, server, client) =
                        (names.ends, names.server, QueryClient::Stream(names.id));
                    context.queries.push(NameQuery { ends, server, query, client });
                }
            }
            if self.has_failed {
                return;
            }
        }
    }

    /// Completes the stream if the guest has ended its own, and no answer is missing.
    fn complete_if_idle(&mut self) {
        let is_idle = self.names.is_none_or(|names| names.asked == 0);
        self.is_complete |= self.guest_has_ended && is_idle;
    }

    /// Adds the answer to a query. `None`: there is none, not even a failure.
    pub(super) fn answer(&mut self, answer: Option<&[u8]>, context: &mut Context<'_>) {
        if let Some(names) = &mut self.names {
            names.asked = names.asked.saturating_sub(1);
        }
        match answer {
            Some(answer) => self.push(&framed(answer)),
            None => self.has_failed = true,
        }
        self.read(context);
        self.complete_if_idle();
    }

    /// Ends the guest's direction.
    pub(super) fn end_guest(&mut self) {
        self.guest_has_ended = true;
        self.complete_if_idle();
    }

    /// Returns `true` if the connection is to be reset.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Copies bytes for the guest from `offset` on. Returns zero at the end of the stream.
    pub(super) fn peek(&self, offset: usize, into: &mut [IoSliceMut<'_>]) -> Result<usize, Errno> {
        let mut rest = self.to_guest.get(offset..).unwrap_or_default();
        let before = rest.len();
        for slice in into {
            let (now, later) = rest.split_at(slice.len().min(rest.len()));
            slice[..now.len()].copy_from_slice(now);
            rest = later;
        }
        let copied = before - rest.len();
        if copied == 0 && !self.is_complete { Err(Errno::AGAIN) } else { Ok(copied) }
    }

    /// Removes bytes that the guest has acknowledged.
    pub(super) fn discard(&mut self, count: u32) {
        let count = usize_from(count).min(self.to_guest.len());
        self.to_guest.drain(..count);
        self.egress.release(count);
    }
}

impl Drop for LocalStream {
    fn drop(&mut self) {
        self.egress.release(self.from_guest.len() + self.to_guest.len());
    }
}

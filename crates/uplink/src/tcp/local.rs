//! Connections of the guest that the uplink answers itself, without a socket of the host: queries to name servers over TCP
//! ([`name_queries`](crate::name_queries)), and requests of HTTP that the egress policy denies.

use core::net::SocketAddr;
use std::sync::Arc;

use ringfence_policy::Protocol;
use ringfence_policy::gate::QueryEnds;
use ringfence_sys::numbers::bounded;

use super::Tcp;
use super::connection::{GuestSyn, Phase, TcpConnection};
use super::local_stream::{IDLE, LocalStream};
use crate::context::Context;
use crate::egress::Egress;
use crate::flow::{FlowId, FlowKey, Origin};
use crate::host::{Close, Piece};

impl Tcp {
    /// Accepts a connection to a name server: the egress policy reads its queries.
    pub(super) fn open_for_names(
        &mut self,
        key: FlowKey,
        server: SocketAddr,
        egress: &Arc<Egress>,
        syn: GuestSyn<'_>,
        context: &mut Context<'_>,
    ) {
        let iss = self.initial_seq(&key, context.now);
        let mut flow = TcpConnection::for_syn(Phase::SynReceived, &key, iss, syn, context);
        flow.flags.syn_due = true;
        // Its queries are in the egress record.
        flow.flags.recorded = true;
        let Some(id) = self.enter(key, flow, Origin::Guest, context) else { return };
        let ends = QueryEnds { guest: key.guest, server: key.remote, over: Protocol::Tcp };
        if let Some(flow) = self.flows.get_mut(id) {
            flow.local = Some(Box::new(LocalStream::of_names(egress, id, ends, server)));
        }
        context.counters.tcp_opened.add(1);
        self.enqueue(id);
        self.update_deadline(id, context);
    }

    /// Hands the answer to a query over TCP to its connection. `None`: the query is no longer known.
    pub(crate) fn answer_locally(
        &mut self,
        id: FlowId,
        answer: Option<&[u8]>,
        context: &mut Context<'_>,
    ) {
        let Some(flow) = self.flows.get_mut(id) else { return };
        flow.answer_locally(answer, context);
        self.enqueue(id);
        self.update_deadline(id, context);
    }
}

impl TcpConnection {
    /// Hands payload of the guest to the local stream. Returns `true` if all of it was taken.
    pub(super) fn take_locally(
        &mut self,
        pieces: &[Piece<'_>],
        offered: usize,
        context: &mut Context<'_>,
    ) -> bool {
        let Some(local) = &mut self.local else { return false };
        let taken = local.take(pieces, offered, context);
        self.flags.denied |= local.has_failed();
        self.rcv_nxt += bounded(taken, u32::MAX);
        self.bytes.from_guest += taken as u64;
        context.counters.tcp_bytes_in.add(taken as u64);
        self.flags.ack_due |= taken < offered;
        self.flags.readable = true;
        self.ends_at = Some(context.now + IDLE);
        taken == offered
    }

    /// Adds the answer to a query of the local stream. `None`: there is none, not even a failure.
    pub(super) fn answer_locally(&mut self, answer: Option<&[u8]>, context: &mut Context<'_>) {
        let Some(local) = &mut self.local else { return };
        local.answer(answer, context);
        self.flags.denied |= local.has_failed();
        self.flags.readable = true;
        // The window may have been closed.
        self.flags.ack_due = true;
        self.ends_at = Some(context.now + IDLE);
    }

    /// Ends the guest's direction of the local stream.
    pub(super) fn end_locally(&mut self) {
        if let Some(local) = &mut self.local {
            local.end_guest();
            self.flags.readable = true;
        }
    }

    /// Answers the guest by these bytes instead of the other end, whose connection is reset. Returns `false` if the other
    /// end has sent something already.
    pub(super) fn replace_by_page(
        &mut self,
        egress: &Arc<Egress>,
        page: &[u8],
        context: &mut Context<'_>,
    ) -> bool {
        if self.bytes.to_guest > 0 || self.snd_max != self.snd_una || self.undiscarded > 0 {
            return false;
        }
        if let Some(socket) = self.socket.take() {
            context.host.close(socket, Close::Reset);
        }
        self.local = Some(Box::new(LocalStream::of_page(egress, page)));
        self.flags.readable = true;
        self.flags.ack_due = true;
        self.ends_at = Some(context.now + IDLE);
        true
    }
}

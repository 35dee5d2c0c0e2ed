//! UDP datagrams from the guest to host sockets.

use ringfence_offload::GsoKind;
use rustix::io::Errno;

use super::{Route, Udp, payload_len};
use crate::context::Context;
use crate::flow::FlowId;
use crate::host::datagrams::{DATAGRAM_MAX, SEGMENTS_MAX};
use crate::packet::Packet;

/// Maximum length of a datagram that joins a block: the payload of an Ethernet frame. The host would not
/// segment longer ones, and they need fewer calls for their bytes anyway.
const CUT_MAX: usize = 1452;

/// Consecutive datagrams of one association, to be sent by one call.
#[derive(Default)]
pub(super) struct SendBlock {
    flow: Option<FlowId>,
    bytes: Vec<u8>,
    segment: usize,
    count: usize,
    /// Set once a shorter datagram was added: it must be the last one.
    closed: bool,
}

impl SendBlock {
    fn takes(&self, flow: FlowId, len: usize) -> bool {
        self.flow == Some(flow)
            && !self.closed
            && len <= self.segment
            && self.count < SEGMENTS_MAX
            && self.bytes.len() + len <= DATAGRAM_MAX
    }

    /// Adds a datagram of this length, which `append` writes behind the bytes.
    fn add(&mut self, flow: FlowId, len: usize, append: impl FnOnce(&mut Vec<u8>)) {
        if self.flow.is_none() {
            self.flow = Some(flow);
            self.segment = len;
        }
        append(&mut self.bytes);
        self.count += 1;
        self.closed |= len < self.segment;
    }

    fn clear(&mut self) {
        self.flow = None;
        self.bytes.clear();
        (self.count, self.closed) = (0, false);
    }
}

/// Appends a packet's payload to a buffer.
pub(super) fn append(packet: &Packet<'_>, len: usize, into: &mut Vec<u8>) {
    let start = packet.payload_start();
    let (mut at, end) = (0, start + len);
    for piece in packet.frame.pieces() {
        let from = start.saturating_sub(at).min(piece.len());
        let to = end.saturating_sub(at).min(piece.len());
        if from < to {
            piece.for_each_piece_of(from..to, |bytes| into.extend_from_slice(bytes));
        }
        at += piece.len();
    }
}

impl Udp {
    pub(super) fn send(&mut self, id: FlowId, packet: &Packet<'_>, context: &mut Context<'_>) {
        let len = payload_len(packet);
        if let Some(gso) = packet.frame.meta().gso {
            self.flush(context);
            if gso.kind != GsoKind::Udp || len > DATAGRAM_MAX {
                return context.counters.drop_malformed.add(1);
            }
            let segments = len.div_ceil(usize::from(gso.size).max(1));
            context.counters.udp_datagrams_in.add(segments as u64);
            return self.send_one(id, packet, len, Some(gso.size), context);
        }
        context.counters.udp_datagrams_in.add(1);
        if len == 0 || len > CUT_MAX {
            self.flush(context);
            return self.send_one(id, packet, len, None, context);
        }
        if !self.block.takes(id, len) {
            self.flush(context);
        }
        self.block.add(id, len, |bytes| append(packet, len, bytes));
    }

    /// Sends a datagram whose bytes were copied from the guest.
    pub(super) fn send_copy(&mut self, id: FlowId, bytes: &[u8], context: &mut Context<'_>) {
        context.counters.udp_datagrams_in.add(1);
        let len = bytes.len();
        if len == 0 || len > CUT_MAX {
            self.flush(context);
            return self.send_bytes(id, bytes, None, context);
        }
        if !self.block.takes(id, len) {
            self.flush(context);
        }
        self.block.add(id, len, |block| block.extend_from_slice(bytes));
    }

    fn send_one(
        &mut self,
        id: FlowId,
        packet: &Packet<'_>,
        len: usize,
        segment: Option<u16>,
        context: &mut Context<'_>,
    ) {
        let start = packet.payload_start();
        if let Some(bytes) =
            packet.frame.contiguous().and_then(|frame| frame.get(start..start + len))
        {
            return self.send_bytes(id, bytes, segment, context);
        }
        let mut bytes = core::mem::take(&mut self.block.bytes);
        append(packet, len, &mut bytes);
        self.send_bytes(id, &bytes, segment, context);
        bytes.clear();
        self.block.bytes = bytes;
    }

    /// Sends the current block. Must be called after the last packet of a batch.
    pub fn finish_input(&mut self, context: &mut Context<'_>) {
        self.flush(context);
    }

    /// Sends the current block if it belongs to this association.
    pub(super) fn flush_if(&mut self, id: FlowId, context: &mut Context<'_>) {
        if self.block.flow == Some(id) {
            self.flush(context);
        }
    }

    pub(super) fn flush(&mut self, context: &mut Context<'_>) {
        let Some(id) = self.block.flow else { return };
        let bytes = core::mem::take(&mut self.block.bytes);
        let segment = u16::try_from(self.block.segment).ok().filter(|_| self.block.count > 1);
        self.send_bytes(id, &bytes, segment, context);
        self.block.bytes = bytes;
        self.block.clear();
    }

    pub(super) fn send_bytes(
        &mut self,
        id: FlowId,
        bytes: &[u8],
        segment: Option<u16>,
        context: &mut Context<'_>,
    ) {
        // An error may concern an earlier datagram; the call after the report then succeeds.
        for attempt in 0..3 {
            match self.try_send(id, bytes, segment) {
                Ok(()) => return,
                Err(Errno::AGAIN | Errno::NOBUFS) => return context.counters.udp_full.add(1),
                Err(Errno::INTR) => {}
                Err(errno) => {
                    tracing::debug!(%errno, attempt, "a datagram was refused");
                    if self.report(id, context) {
                        // The guest is told the MTU.
                        break;
                    }
                }
            }
        }
        context.counters.udp_refused.add(1);
    }

    fn try_send(&mut self, id: FlowId, bytes: &[u8], segment: Option<u16>) -> Result<(), Errno> {
        let flow = self.flows.get_mut(id).ok_or(Errno::BADF)?;
        match &mut flow.route {
            Route::Socket(socket) => socket.send(bytes, segment, None),
            Route::Listener(index, via) => {
                let (index, via) = (*index, *via);
                let listener = self.listeners.get_mut(index).ok_or(Errno::BADF)?;
                listener.socket.send(bytes, segment, Some(via))
            }
            Route::Closed => Err(Errno::BADF),
        }
    }
}

//! Segments of one conversation that follow each other in a batch: their payload goes to the socket by one
//! call.
//!
//! The octets count as received when they are entered, so that the segment behind them is in its place;
//! what the socket does not take after all is taken back before anything is said to the guest about it,
//! since nothing is sent while a batch is looked at.

use arrayvec::ArrayVec;
use ringfence_offload::packet::tcp_flags::{ACK, PSH};

use super::connection::{Phase, TcpConnection};
use super::segment::Segment;
use crate::context::Context;
use crate::flow::FlowId;
use crate::host::Piece;
use crate::packet::Packet;

/// Segments of a run, at most.
const RUN_MAX: usize = 32;
/// Parts that they lie in, at most: what one call takes.
const PARTS_MAX: usize = 120;

/// Payload that waits for the end of its run.
#[derive(Debug, Default)]
pub struct Run<'a> {
    id: Option<FlowId>,
    pieces: ArrayVec<Piece<'a>, RUN_MAX>,
    parts: usize,
    octets: usize,
}

impl<'a> Run<'a> {
    /// Whose payload waits.
    pub(super) fn owner(&self) -> Option<FlowId> {
        self.id.filter(|_| !self.pieces.is_empty())
    }

    /// Whether a frame's payload has room behind what there is.
    pub(super) fn has_room_for(&self, packet: &Packet<'_>) -> bool {
        !self.pieces.is_full() && self.parts + packet.frame.segments().len() < PARTS_MAX
    }

    /// Payload of `id`'s; it has room.
    pub(super) fn add(&mut self, id: FlowId, piece: Piece<'a>) {
        self.id = Some(id);
        self.parts += 1 + piece.frame.segments().len();
        self.octets += piece.len;
        self.pieces.push(piece);
    }
}

impl TcpConnection {
    /// Whether a segment is nothing but payload that is next: such ones make a run.
    pub(super) fn is_next(&self, segment: &Segment) -> bool {
        self.phase == Phase::Open
            && segment.flags & !PSH == ACK
            && segment.len > 0
            && segment.seq == self.rcv_nxt
            && !self.flags.guest_fin
    }

    /// Sends a run on.
    pub(super) fn send_run(&mut self, run: &mut Run<'_>, context: &mut Context<'_>) {
        let offered = core::mem::take(&mut run.octets);
        self.rcv_nxt = self.rcv_nxt - u32::try_from(offered).unwrap_or(0);
        // The socket tells what is wrong, once it has told what came before.
        let sent = self.send_pieces(&run.pieces, offered, false, context);
        self.flags.failed |= sent.is_err();
        run.pieces.clear();
        run.parts = 0;
    }
}

//! Segment runs: consecutive segments of one connection in a batch, sent to the socket by one call.
//!
//! The bytes count as received when they are added, so that the next segment is in order. Bytes that
//! the socket does not accept are subtracted again before the next segment goes to the guest: no segment is
//! sent while a batch is processed.

use arrayvec::ArrayVec;
use ringfence_offload::packet::tcp_flags::{ACK, PSH};
use ringfence_sys::numbers::bounded;

use super::connection::{Phase, TcpConnection};
use super::segment::Segment;
use crate::context::Context;
use crate::flow::FlowId;
use crate::host::Piece;
use crate::packet::Packet;

/// Maximum of segments in a run.
const RUN_MAX: usize = 32;
/// Maximum of memory parts in a run: the limit of one system call.
const PARTS_MAX: usize = 120;

/// Payload of consecutive segments that is not yet sent to the socket.
#[derive(Debug, Default)]
pub struct SegmentRun<'a> {
    id: Option<FlowId>,
    pieces: ArrayVec<Piece<'a>, RUN_MAX>,
    parts: usize,
    bytes: usize,
}

impl<'a> SegmentRun<'a> {
    /// Returns the connection whose payload waits.
    pub(super) fn owner(&self) -> Option<FlowId> {
        self.id.filter(|_| !self.pieces.is_empty())
    }

    /// Returns `true` if the run can take the packet's payload.
    pub(super) fn has_room_for(&self, packet: &Packet<'_>) -> bool {
        !self.pieces.is_full() && self.parts + packet.frame.segments().len() < PARTS_MAX
    }

    /// Adds payload of the connection `id`. The caller has checked that there is room.
    pub(super) fn add(&mut self, id: FlowId, piece: Piece<'a>) {
        self.id = Some(id);
        self.parts += 1 + piece.frame.segments().len();
        self.bytes += piece.len;
        self.pieces.push(piece);
    }
}

impl TcpConnection {
    /// Returns `true` if a segment is in order and holds nothing but payload. Such segments form a run.
    pub(super) fn is_next(&self, segment: &Segment) -> bool {
        self.phase == Phase::Open
            && segment.flags & !PSH == ACK
            && segment.len > 0
            && segment.seq == self.rcv_nxt
            && !self.flags.guest_fin
    }

    /// Sends the payload of a run to the socket and empties the run.
    pub(super) fn send_run(&mut self, run: &mut SegmentRun<'_>, context: &mut Context<'_>) {
        let offered = core::mem::take(&mut run.bytes);
        self.rcv_nxt = self.rcv_nxt - bounded(offered, u32::MAX);
        // The socket reports the error after the data that came before it.
        let sent = self.send_pieces(&run.pieces, offered, false, context);
        self.flags.failed |= sent.is_err();
        run.pieces.clear();
        run.parts = 0;
    }
}

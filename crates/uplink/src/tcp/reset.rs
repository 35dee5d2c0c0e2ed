//! TCP resets (RFC 9293, 3.5.2): answers to segments that belong to no connection.

use ringfence_offload::checksum::Accumulator;
use ringfence_offload::checksum::partial::never_zero;
use ringfence_offload::packet::{protocol, tcp_flags};

use super::segment::{HEADER_LEN, Header, Segment};
use super::seq::Seq;
use crate::context::Context;
use crate::emit::Ends;
use crate::packet::Packet;

/// Answers a segment that belongs to no connection by a reset, unless it is a reset itself.
pub(super) fn refuse(packet: &Packet<'_>, segment: &Segment, context: &mut Context<'_>) {
    if segment.has(tcp_flags::RST) {
        return;
    }
    let ends = Ends {
        from_mac: context.config.mac,
        to_mac: packet.mac,
        from: packet.destination,
        to: packet.source,
    };
    let header = if segment.ack() {
        Header { seq: segment.acknowledged, flags: tcp_flags::RST, ..Header::default() }
    } else {
        let flags = tcp_flags::RST | tcp_flags::ACK;
        Header { seq: Seq(0), acknowledged: segment.end(), flags, ..Header::default() }
    };
    let ports = (segment.ports.1, segment.ports.0);
    send(&ends, Header { ports, ..header }, context);
}

/// Queues a segment without payload, with a complete checksum.
pub(super) fn send(ends: &Ends, header: Header, context: &mut Context<'_>) {
    context.replies.push(|frame| {
        let len = ends.header_len() + HEADER_LEN;
        frame.resize(len, 0);
        let start = ends.write(frame, protocol::TCP, HEADER_LEN, 0)?;
        let tcp = frame.get_mut(start..)?;
        header.write(&[], 0, tcp)?;
        let mut sum = Accumulator::with_sum(ends.pseudo_header(protocol::TCP, HEADER_LEN));
        sum.add(tcp);
        tcp.get_mut(16..18)?.copy_from_slice(&never_zero(sum.checksum()).to_be_bytes());
        Some(())
    });
}

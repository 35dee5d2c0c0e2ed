//! Refusals: resets (RFC 9293, 3.5.2) for segments that belong to no connection, and answers to SYNs that the host cannot
//! pass on.

use ringfence_offload::checksum::Accumulator;
use ringfence_offload::checksum::partial::never_zero;
use ringfence_offload::packet::{protocol, tcp_flags};

use rustix::io::Errno;

use super::connection::TcpConnection;
use super::segment::{HEADER_LEN, Header, Segment};
use super::seq::Seq;
use crate::context::Context;
use crate::emit::Ends;
use crate::icmp::error::{self as icmp_error, Reason};
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
    send(&ends, Header { ports: segment.ports.reversed(), ..header }, context);
}

/// Answers the SYN of a connection that the host could not open: by a reset if the other end has refused it, by an ICMP error
/// if it cannot be reached.
pub(super) fn refuse_syn(flow: &TcpConnection, errno: Errno, context: &mut Context<'_>) {
    let is_refused = matches!(errno, Errno::CONNREFUSED | Errno::CONNRESET);
    let reason = Reason::of(errno);
    if is_refused || reason == Reason::PortUnreachable {
        // A guest in SYN-SENT ignores the sequence number.
        let flags = tcp_flags::RST | tcp_flags::ACK;
        let (ports, acknowledged) = (flow.ports, flow.rcv_nxt);
        let header = Header { ports, acknowledged, flags, ..Header::default() };
        return send(&flow.ends, header, context);
    }
    let (ports, flags) = (flow.ports.reversed(), tcp_flags::SYN);
    let syn = Header { ports, seq: flow.rcv_nxt - 1, flags, ..Header::default() };
    let mut body = [0; HEADER_LEN];
    if syn.write(&[], 0, &mut body).is_some() {
        icmp_error::refuse_earlier(&flow.ends, reason, protocol::TCP, &body, context);
    }
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

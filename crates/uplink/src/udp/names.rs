//! DNS under an egress policy: queries to the guest's name servers, and their answers.

use ringfence_offload::checksum::Accumulator;
use ringfence_offload::checksum::partial::never_zero;
use ringfence_offload::packet::protocol;
use ringfence_policy::Protocol;
use ringfence_policy::gate::{QueryEnds, QueryFate};

use super::{Udp, payload_len, to_host};
use crate::context::Context;
use crate::egress::{Asked, Egress};
use crate::emit::Ends;
use crate::flow::FlowKey;
use crate::packet::{Mac, Packet};

/// Length of a UDP header in bytes.
const UDP_LEN: usize = 8;

impl Udp {
    /// Queues an answer that came over TCP. The next [`Udp::output`] sends it.
    pub(crate) fn queue_answer(&mut self, ends: QueryEnds, mac: Mac, answer: Vec<u8>) {
        let key = FlowKey { guest: ends.guest, remote: ends.server };
        self.answers.push((key, mac, answer));
    }

    /// Handles a query of the guest: forwards it in the form of the policy, or replies.
    pub(super) fn query(
        &mut self,
        key: FlowKey,
        packet: &Packet<'_>,
        egress: &Egress,
        context: &mut Context<'_>,
    ) {
        if packet.frame.meta().gso.is_some() {
            return context.counters.drop_malformed.add(1);
        }
        let mut bytes = Vec::new();
        to_host::append(packet, payload_len(packet), &mut bytes);
        let ends = QueryEnds { guest: key.guest, server: key.remote, over: Protocol::Udp };
        let fate = match egress.query(
            ends,
            &bytes,
            true,
            context.upstream(),
            context.now,
            context.counters,
        ) {
            Asked::Decided(fate) => fate,
            Asked::Held(waiting) => return context.hold(packet, waiting),
        };
        match fate {
            QueryFate::Drop => context.counters.drop_malformed.add(1),
            QueryFate::Reply(reply) => send_reply(&key, packet, &reply, context),
            QueryFate::Forward(query) => {
                let Some(id) = self.flows.find(&key).or_else(|| self.open(key, packet, context))
                else {
                    return;
                };
                self.flows.touch(id);
                self.extend_deadline(id, context.now);
                context.counters.udp_datagrams_in.add(1);
                context.counters.udp_bytes_in.add(query.len() as u64);
                self.send_bytes(id, &query, None, context);
            }
        }
    }
}

/// Queues a datagram from a name server to the guest.
fn send_reply(key: &FlowKey, packet: &Packet<'_>, bytes: &[u8], context: &mut Context<'_>) {
    let ends = Ends {
        from_mac: context.config.mac,
        to_mac: packet.mac,
        from: key.remote.ip(),
        to: key.guest.ip(),
    };
    context.replies.push(|frame| {
        let header = ends.header_len();
        let length = UDP_LEN + bytes.len();
        frame.resize(header + length, 0);
        ends.write(frame, protocol::UDP, length, 0)?;
        let udp = frame.get_mut(header..)?;
        udp[..2].copy_from_slice(&key.remote.port().to_be_bytes());
        udp[2..4].copy_from_slice(&key.guest.port().to_be_bytes());
        udp[4..6].copy_from_slice(&u16::try_from(length).ok()?.to_be_bytes());
        udp[6..8].fill(0);
        udp[8..].copy_from_slice(bytes);
        let mut sum = Accumulator::with_sum(ends.pseudo_header(protocol::UDP, length));
        sum.add(udp);
        udp[6..8].copy_from_slice(&never_zero(sum.checksum()).to_be_bytes());
        Some(())
    });
}

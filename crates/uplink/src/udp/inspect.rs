//! Datagrams under an egress policy that reads server names: QUIC.
//!
//! The payload is copied before it is inspected, because the guest can change memory that it shares.

use ringfence_offload::GsoKind;

use super::{Udp, payload_len, to_host};
use crate::context::Context;
use crate::egress::DatagramVerdict;
use crate::flow::FlowId;
use crate::host::datagrams::DATAGRAM_MAX;
use crate::icmp::error::{self as icmp_error, Reason};
use crate::packet::Packet;

impl Udp {
    /// Sends those datagrams of a packet that the policy allows.
    pub(super) fn send_inspected(
        &mut self,
        id: FlowId,
        packet: &Packet<'_>,
        context: &mut Context<'_>,
    ) {
        let len = payload_len(packet);
        let gso = packet.frame.meta().gso;
        if gso.is_some_and(|gso| gso.kind != GsoKind::Udp) || len > DATAGRAM_MAX {
            return context.counters.drop_malformed.add(1);
        }
        let Some(mut inspector) = self.flows.get_mut(id).and_then(|flow| flow.inspector.take())
        else {
            return;
        };
        let mut bytes = core::mem::take(&mut self.scratch);
        bytes.clear();
        to_host::append(packet, len, &mut bytes);
        let each = gso.map_or(len, |gso| usize::from(gso.size)).max(1);
        let mut is_denied = false;
        // An empty payload is a datagram, too.
        let mut rest = Some(&bytes[..]);
        while let Some(left) = rest {
            let (datagram, behind) = left.split_at(each.min(left.len()));
            rest = Some(behind).filter(|behind| !behind.is_empty());
            match inspector.judge(datagram, context.now) {
                DatagramVerdict::Pass => {
                    for held in inspector.take_held() {
                        self.send_copy(id, &held, context);
                    }
                    self.send_copy(id, datagram, context);
                }
                DatagramVerdict::Wait => {}
                DatagramVerdict::Drop => context.counters.egress_datagrams_lost.add(1),
                DatagramVerdict::Deny => is_denied = true,
            }
        }
        self.scratch = bytes;
        let is_open = inspector.is_open() || inspector.deadline().is_some();
        if let Some(flow) = self.flows.get_mut(id) {
            flow.inspector = Some(inspector);
        }
        self.extend_deadline(id, context.now);
        if is_denied {
            context.counters.egress_hellos_denied.add(1);
            icmp_error::refuse(packet, Reason::Prohibited, context);
            if !is_open {
                self.flush_if(id, context);
                self.remove(id);
            }
        }
    }

    /// Refuses hellos that are not complete in time. Returns `true` if the association stays nevertheless.
    pub(super) fn expire_inspection(&mut self, id: FlowId, context: &mut Context<'_>) -> bool {
        let inspector = self.flows.get_mut(id).and_then(|flow| flow.inspector.as_mut());
        let Some(inspector) = inspector else { return false };
        if !inspector.expire(context.now) {
            return false;
        }
        context.counters.egress_hellos_denied.add(1);
        let is_open = inspector.is_open();
        if is_open {
            self.extend_deadline(id, context.now);
        }
        is_open
    }
}

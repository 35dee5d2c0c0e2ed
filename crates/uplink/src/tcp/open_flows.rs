//! Open connections when the egress policy was replaced, the host's addresses have changed, or the guest has ended.

use core::net::SocketAddr;

use ringfence_policy::Protocol;
use ringfence_policy::gate::FirstRead;
use rustix::io::Errno;

use super::Tcp;
use super::connection::{Phase, TcpConnection};
use crate::context::Context;
use crate::egress::FirstBytes;
use crate::flow::Origin;

impl Tcp {
    /// Closes connections of the guest that may not stay: to addresses that became the host's own, or that a new
    /// egress policy denies.
    pub fn close_forbidden(&mut self, context: &mut Context<'_>) {
        let outward: Vec<_> = self.flows.ids_of(Origin::Guest).collect();
        for id in outward {
            let Some(key) = self.flows.key(id) else { continue };
            let Some(flow) = self.flows.get_mut(id) else { continue };
            // The policy in force reads each query.
            if flow.local.is_some() && context.outward_to(key.remote).is_some() {
                continue;
            }
            if !flow.may_stay(key.remote, context) {
                self.refuse(id, Errno::HOSTUNREACH, context);
            }
        }
    }

    /// Returns `true` if an open connection may still have data of the guest: its FIN, or payload before it, has not
    /// reached the socket.
    pub(crate) fn has_data_of_guest(&self) -> bool {
        let awaits = |flow: &TcpConnection| flow.phase == Phase::Open && !flow.flags.guest_fin;
        self.flows.ids().filter_map(|id| self.flows.get(id)).any(awaits)
    }
}

impl TcpConnection {
    /// Has first bytes of the guest inspected.
    pub(super) fn set_first(&mut self, first: Option<Box<FirstBytes>>) {
        self.names.read = if first.is_some() { FirstRead::Pending } else { FirstRead::Unread };
        self.first = first;
    }

    /// Keeps the name that first bytes have shown so far.
    pub(super) fn note_shown(&mut self, first: &mut FirstBytes) {
        if let Some((read, shown)) = first.take_shown() {
            self.names.note(read, shown);
        }
    }

    /// Returns `true` if the connection may stay. First bytes that still come are read by the policy in force.
    fn may_stay(&mut self, to: SocketAddr, context: &Context<'_>) -> bool {
        let flow = self.names.flow();
        let Some(egress) = context.egress else {
            return context.may_stay(to, Protocol::Tcp, &flow);
        };
        let decision = context.decide_again(egress, to, Protocol::Tcp, &flow);
        if let (Some(decision), Some(first)) = (&decision, &mut self.first) {
            first.follow(decision);
        }
        decision.is_some()
    }
}

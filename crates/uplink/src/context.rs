//! Context: the parts of an engine that protocols use beside their own state.

use core::net::SocketAddr;
use core::time::Duration;
use std::sync::Arc;

use ringfence_policy::Protocol;

use crate::access::Refusal;
use crate::config::Config;
use crate::counters::UplinkCounters;
use crate::egress::{Admitted, Asked, Egress, Waiting};
use crate::held::HeldPackets;
use crate::host::Host;
use crate::name_query::NameQuery;
use crate::packet::Packet;
use crate::replies::Replies;

/// Parts of the engine outside a protocol's own state.
pub struct Context<'a> {
    pub config: &'a Config,
    /// Egress policy that the engine applies. `None`: the guest may reach all that `config.access` permits.
    pub egress: &'a Option<Arc<Egress>>,
    pub host: &'a mut dyn Host,
    /// Frames for the guest that need no socket, sent in the same round.
    pub replies: &'a mut Replies,
    /// Queries that are to be sent to name servers over TCP, after this call.
    pub queries: &'a mut Vec<NameQuery>,
    /// Packets that wait for the answer to a question of the egress policy.
    pub(crate) held: &'a mut HeldPackets,
    pub counters: &'a UplinkCounters,
    /// Time of the current round.
    pub now: Duration,
}

impl Context<'_> {
    /// Applies the egress policy to a new flow of the guest. Returns `false` if it is denied.
    pub fn admits(&self, to: SocketAddr, protocol: Protocol) -> bool {
        let decide = |egress: &Arc<Egress>| egress.connect(to, protocol, self.now, self.counters);
        self.egress.as_ref().is_none_or(|egress| decide(egress).is_some())
    }

    /// Holds a packet until a question of the egress policy is over.
    pub(crate) fn hold(&mut self, packet: &Packet<'_>, waiting: Waiting) {
        let is_held = |egress| self.held.hold(packet, waiting, egress);
        if !self.egress.as_ref().is_some_and(is_held) {
            self.counters.egress_packets_unheld.add(1);
        }
    }

    /// Returns `true` if an open flow of the guest may stay: its destination can still be reached, and the egress
    /// policy still allows it. `name` is the one for which it was allowed.
    pub fn may_stay(&self, to: SocketAddr, protocol: Protocol, name: Option<&str>) -> bool {
        let egress = self.egress.as_ref();
        self.outward_to(to).is_some()
            && egress.is_none_or(|egress| egress.still_allows(to, protocol, name, self.now))
    }

    /// Returns the policy's decision on a new flow of the guest: `None` if it is denied, or there is no policy. `outward` is the
    /// host's address for the destination. Addresses of the host itself, and those that stand for others, are never asked about.
    pub fn decide(
        &self,
        to: SocketAddr,
        outward: SocketAddr,
        protocol: Protocol,
    ) -> Asked<Option<Admitted>> {
        let Some(egress) = self.egress else { return Asked::Decided(None) };
        let is_other_host = || {
            outward == to && !self.config.guest.is_virtual(to.ip()) && !self.host.is_own(to.ip())
        };
        let can_be_approved = egress.asks() && is_other_host();
        egress.admit(to, protocol, can_be_approved, self.now, self.counters)
    }

    /// Returns the host's address for a destination of the guest. Counts and returns `None` if the guest must
    /// not reach it.
    pub fn outward_to(&self, destination: SocketAddr) -> Option<SocketAddr> {
        self.reach(destination).ok()
    }

    /// Returns the host's address for the destination of a new flow of the guest. A refusal is in the egress record.
    pub fn open_to(&self, destination: SocketAddr, protocol: Protocol) -> Option<SocketAddr> {
        let outward = self.reach(destination);
        if let (Err(refusal), Some(egress)) = (&outward, self.egress) {
            egress.refuse(destination, protocol, *refusal);
        }
        outward.ok()
    }

    fn reach(&self, destination: SocketAddr) -> Result<SocketAddr, Refusal> {
        // Addresses of the uplink itself belong to no host on the host's network.
        let is_own = |ip| self.config.guest.is_virtual(ip) || self.host.is_own(ip);
        let outward = self.config.access.outward_to(destination, is_own);
        match outward {
            Err(Refusal::Unreachable) => self.counters.drop_unreachable.add(1),
            Err(Refusal::Local) => self.counters.drop_local.add(1),
            Ok(_) => {}
        }
        outward
    }
}

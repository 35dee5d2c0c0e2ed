//! Context: the parts of an engine that protocols use beside their own state.

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use std::sync::Arc;

use ringfence_policy::Protocol;
use ringfence_policy::gate::Decision;
use ringfence_policy::substitutes::is_substitute;

use crate::access::{Refusal, is_link_local};
use crate::config::Config;
use crate::counters::UplinkCounters;
use crate::egress::{Admitted, Asked, Egress, OpenFlow, Waiting};
use crate::held::HeldPackets;
use crate::host::Host;
use crate::name_query::NameQuery;
use crate::packet::Packet;
use crate::replies::Replies;
use crate::upstream::{Destination, UpstreamProxy};

/// Way of a new flow of the guest to its destination.
#[derive(Debug)]
pub(crate) enum Way {
    /// By a socket to this address of the host's network.
    Direct(SocketAddr),
    /// By the upstream proxy.
    Proxied(Destination),
}

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
    /// policy still allows it.
    pub fn may_stay(&self, to: SocketAddr, protocol: Protocol, flow: &OpenFlow<'_>) -> bool {
        match self.egress {
            None => self.outward_to(to).is_some(),
            Some(egress) => self.decide_again(egress, to, protocol, flow).is_some(),
        }
    }

    /// Decides on an open flow of the guest by the egress policy in force. Returns `None` if it must end.
    pub(crate) fn decide_again(
        &self,
        egress: &Egress,
        to: SocketAddr,
        protocol: Protocol,
        flow: &OpenFlow<'_>,
    ) -> Option<Decision> {
        match flow.name.filter(|_| self.stands_for_name(to.ip())) {
            Some(name) => egress.decide_again_on_name(name, to.port(), flow),
            None => {
                self.outward_to(to)?;
                egress.decide_again(to, protocol, flow, self.now)
            }
        }
    }

    /// Returns the policy's decision on a new flow of the guest: `None` if it is denied, or there is no policy. `way` leads to the
    /// destination. Addresses of the host itself, and those that stand for others, are never asked about.
    pub(crate) fn decide(
        &self,
        to: SocketAddr,
        way: &Way,
        protocol: Protocol,
    ) -> Asked<Option<Admitted>> {
        let Some(egress) = self.egress else { return Asked::Decided(None) };
        let name = match way {
            Way::Proxied(destination) => destination.name(),
            Way::Direct(_) => None,
        };
        let is_other_host = || match way {
            Way::Proxied(_) => true,
            Way::Direct(outward) => {
                *outward == to
                    && !self.config.guest.is_virtual(to.ip())
                    && !self.host.is_own(to.ip())
            }
        };
        let can_be_approved = egress.asks() && is_other_host();
        egress.admit(to, name, protocol, can_be_approved, self.now, self.counters)
    }

    /// Returns the host's address for a destination of the guest. Counts and returns `None` if the guest must
    /// not reach it.
    pub fn outward_to(&self, destination: SocketAddr) -> Option<SocketAddr> {
        self.reach(destination).ok()
    }

    /// Returns the way of a new flow of the guest. A refusal is in the egress record.
    pub(crate) fn open_to(&self, destination: SocketAddr, protocol: Protocol) -> Option<Way> {
        let way = self.way(destination, protocol);
        if let (Err(refusal), Some(egress)) = (&way, self.egress) {
            let upstream = self.config.upstream.as_ref();
            let name =
                upstream.and_then(|proxy| proxy.substitutes().name(destination.ip()).cloned());
            egress.refuse(destination, name.as_ref(), protocol, *refusal);
        }
        way.ok()
    }

    /// Returns the host's address for the destination of a new flow of the guest that no proxy carries. A refusal is in the egress
    /// record.
    pub(crate) fn open_directly(
        &self,
        destination: SocketAddr,
        protocol: Protocol,
    ) -> Option<SocketAddr> {
        match self.open_to(destination, protocol)? {
            Way::Direct(outward) => Some(outward),
            Way::Proxied(_) => None,
        }
    }

    /// Returns `true` if an address stands for a name at the upstream proxy.
    fn stands_for_name(&self, ip: IpAddr) -> bool {
        self.config.upstream.is_some() && is_substitute(ip)
    }

    fn way(&self, to: SocketAddr, protocol: Protocol) -> Result<Way, Refusal> {
        let Some(proxy) = &self.config.upstream else { return self.reach(to).map(Way::Direct) };
        if self.config.access.is_name_server(to) {
            // The policy answers queries.
            return if self.egress.is_some() {
                Ok(Way::Direct(to))
            } else {
                Err(self.not_proxied())
            };
        }
        let by_name = is_substitute(to.ip());
        let outward = if by_name { to } else { self.reach(to)? };
        if !by_name && proxy.is_at(outward, |ip| ip.is_loopback() || self.host.is_own(ip)) {
            return Err(Refusal::Proxy);
        }
        let is_of_host = outward != to || is_link_local(to.ip()) || self.host.is_own(to.ip());
        match protocol {
            _ if is_of_host && !by_name => Ok(Way::Direct(outward)),
            Protocol::Tcp if by_name => proxy.named(to, self.now).map(Way::Proxied),
            Protocol::Tcp => Ok(Way::Proxied(proxy.literal(to))),
            _ => Err(self.not_proxied()),
        }
    }

    fn not_proxied(&self) -> Refusal {
        self.counters.drop_not_proxied.add(1);
        Refusal::NotProxied
    }

    /// Returns `true` if the host has no longer the address from which a socket sends.
    pub(crate) fn has_lost(&self, at: Option<SocketAddr>) -> bool {
        at.map(|at| at.ip())
            .is_some_and(|ip| !ip.is_unspecified() && !ip.is_loopback() && !self.host.is_own(ip))
    }

    /// Returns the upstream proxy, if there is one.
    pub(crate) fn upstream(&self) -> Option<&UpstreamProxy> {
        self.config.upstream.as_deref()
    }

    fn reach(&self, destination: SocketAddr) -> Result<SocketAddr, Refusal> {
        // Addresses of the uplink itself belong to no host on the host's network.
        let is_own = |ip| self.config.guest.is_virtual(ip) || self.host.is_own(ip);
        let outward = self.config.access.outward_to(destination, is_own);
        match outward {
            Err(Refusal::Unreachable) => self.counters.drop_unreachable.add(1),
            Err(Refusal::Local) => self.counters.drop_local.add(1),
            Err(Refusal::NotProxied | Refusal::Proxy | Refusal::NoName) | Ok(_) => {}
        }
        outward
    }
}

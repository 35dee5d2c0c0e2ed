//! Context: the parts of an engine that protocols use beside their own state.

use core::net::SocketAddr;
use core::time::Duration;
use std::sync::Arc;

use ringfence_policy::Protocol;
use ringfence_policy::gate::Decision;

use crate::access::Refusal;
use crate::config::Config;
use crate::counters::UplinkCounters;
use crate::egress::Egress;
use crate::host::Host;
use crate::name_query::NameQuery;
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
    pub counters: &'a UplinkCounters,
    /// Time of the current round.
    pub now: Duration,
}

impl Context<'_> {
    /// Applies the egress policy to a new flow of the guest. Returns `false` if it is denied.
    pub fn admits(&self, to: SocketAddr, protocol: Protocol) -> bool {
        self.egress.is_none() || self.decide(to, protocol).is_some()
    }

    /// Returns `true` if an open flow of the guest may stay: its destination can still be reached, and the egress
    /// policy still allows it. `name` is the one for which it was allowed.
    pub fn may_stay(&self, to: SocketAddr, protocol: Protocol, name: Option<&str>) -> bool {
        let egress = self.egress.as_ref();
        self.outward_to(to).is_some()
            && egress.is_none_or(|egress| egress.still_allows(to, protocol, name, self.now))
    }

    /// Returns the policy's decision on a new flow of the guest, if there is a policy and it allows the flow.
    pub fn decide(&self, to: SocketAddr, protocol: Protocol) -> Option<Decision> {
        self.egress.as_ref()?.connect(to, protocol, self.now, self.counters)
    }

    /// Returns the host's address for a destination of the guest. Counts and returns `None` if the guest must
    /// not reach it.
    pub fn outward_to(&self, destination: SocketAddr) -> Option<SocketAddr> {
        // Addresses of the uplink itself belong to no host on the host's network.
        let is_own = |ip| self.config.guest.is_virtual(ip) || self.host.is_own(ip);
        match self.config.access.outward_to(destination, is_own) {
            Ok(outward) => Some(outward),
            Err(Refusal::Unreachable) => {
                self.counters.drop_unreachable.add(1);
                None
            }
            Err(Refusal::Local) => {
                self.counters.drop_local.add(1);
                None
            }
        }
    }
}

//! Egress policy of a new association: DNS that the policy inspects, and its verdict on all others.

use core::net::SocketAddr;
use std::sync::Arc;

use ringfence_policy::Protocol;

use crate::context::{Context, Way};
use crate::egress::{Asked, DatagramInspector, Egress, Permit, Waiting};

/// Returns the policy if datagrams to this destination are queries that it inspects.
pub(super) fn policy_of<'a>(to: SocketAddr, context: &Context<'a>) -> Option<&'a Arc<Egress>> {
    let egress = context.egress.as_ref()?;
    context.config.access.is_name_server(to).then_some(egress)
}

/// Reasons for which an association is not opened.
pub(super) enum NotAdmitted {
    Denied,
    /// Its datagrams wait for the answer to a question.
    Held(Waiting),
}

/// Inspection that an association needs, and its permit if a rule has limits.
#[derive(Default)]
pub(super) struct Entry {
    pub(super) inspector: Option<Box<DatagramInspector>>,
    pub(super) permit: Option<Arc<Permit>>,
}

/// Applies the policy to a new association. `outward` is the host's address of the
/// destination.
pub(super) fn admit(
    to: SocketAddr,
    outward: SocketAddr,
    context: &Context<'_>,
) -> Result<Entry, NotAdmitted> {
    let Some(egress) = &context.egress else { return Ok(Entry::default()) };
    if policy_of(to, context).is_some() {
        return Ok(Entry::default());
    }
    match context.decide(to, &Way::Direct(outward), Protocol::Udp) {
        Asked::Decided(Some(admitted)) => {
            let permit = admitted.permit.clone();
            Ok(Entry { inspector: DatagramInspector::new(egress, to, admitted), permit })
        }
        Asked::Decided(None) => Err(NotAdmitted::Denied),
        Asked::Held(waiting) => Err(NotAdmitted::Held(waiting)),
    }
}

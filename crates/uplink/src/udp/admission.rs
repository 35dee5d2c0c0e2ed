//! Egress policy of a new association: DNS that the policy inspects, and its verdict on all others.

use core::net::SocketAddr;
use std::sync::Arc;

use ringfence_policy::Protocol;

use crate::context::Context;
use crate::egress::{DatagramInspector, Egress};

/// Returns the policy if datagrams to this destination are queries that it inspects.
pub(super) fn policy_of<'a>(to: SocketAddr, context: &Context<'a>) -> Option<&'a Arc<Egress>> {
    let egress = context.egress.as_ref()?;
    context.config.access.is_name_server(to).then_some(egress)
}

/// Applies the policy to a new association. Returns the inspection that it needs, or an error if it is denied.
pub(super) fn admit(
    to: SocketAddr,
    context: &Context<'_>,
) -> Result<Option<Box<DatagramInspector>>, ()> {
    let Some(egress) = &context.egress else { return Ok(None) };
    if policy_of(to, context).is_some() {
        return Ok(None);
    }
    let allowed = context.decide(to, Protocol::Udp).ok_or(())?;
    Ok(DatagramInspector::new(egress, to, allowed))
}

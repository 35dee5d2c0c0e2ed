//! Bytes of associations that count for rules of the egress policy with limits.

use super::Udp;
use crate::context::Context;
use crate::flow::FlowId;

impl Udp {
    /// Counts bytes of an association. Returns `false` if they exceed the limit of a rule: then the association ends.
    pub(super) fn is_within_limits(
        &mut self,
        id: FlowId,
        bytes: impl FnOnce() -> usize,
        context: &mut Context<'_>,
    ) -> bool {
        let permit = self.flows.get(id).and_then(|flow| flow.permit.as_ref());
        let Some(permit) = permit.filter(|permit| !permit.carry(bytes() as u64)) else {
            return true;
        };
        let (limit, key) = (permit.exceeded(), self.flows.key(id));
        if let (Some(egress), Some(limit), Some(key)) = (context.egress, limit, key) {
            egress.close_by_limit(key.remote, limit);
        }
        context.counters.egress_limits.add(1);
        self.flush_if(id, context);
        self.remove(id);
        false
    }
}

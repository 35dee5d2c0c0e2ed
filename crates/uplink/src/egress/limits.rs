//! Limits of rules on bytes and connections ([`Limits`]): each flow that such rules cover has a [`Permit`].
//!
//! ```text
//! new flow ──> Uses::admit ──> Permit of the flow ──> carry: its bytes; false: the flow ends
//! hello ─────> Uses::check ──────┘        └── its end: one connection fewer at once
//! ```
//!
//! Amounts are kept by the text of the rule, so another policy with the same rule goes on counting. Flows take permits while
//! the lock of the policy is held. Bytes need the lock of the rule alone, and flows without such a rule none.

use core::fmt;
use core::net::SocketAddr;
use core::time::Duration;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_policy::gate::{Decision, Gate, Inspection};
use ringfence_policy::rule::{LimitKind, Limits};
use ringfence_policy::{Action, Cause, Policy, Protocol, Verdict};

/// Flow that the policy allows.
#[derive(Debug)]
pub struct Admitted {
    pub decision: Decision,
    /// Permit, if a rule of the policy has limits.
    pub permit: Option<Arc<Permit>>,
}

impl From<Decision> for Admitted {
    fn from(decision: Decision) -> Admitted {
        Admitted { decision, permit: None }
    }
}

/// Amounts of a rule that a guest has used.
#[derive(Clone, Copy, Debug, Default)]
struct Used {
    bytes: u64,
    connections: u32,
    at_once: u32,
}

/// Use of one rule with limits.
struct RuleUse {
    limits: Limits,
    /// Rule and the place where it is written.
    rule: String,
    used: Mutex<Used>,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RuleUse {
    /// Returns the limit that allows no new flow.
    fn exhausted(&self) -> Option<LimitKind> {
        let (used, Limits { bytes, connections, at_once }) = (*lock(&self.used), self.limits);
        let is_over = |used: u64, limit: Option<u64>| limit.is_some_and(|limit| used >= limit);
        [
            (LimitKind::Bytes, is_over(used.bytes, bytes)),
            (LimitKind::Connections, is_over(used.connections.into(), connections.map(u64::from))),
            (LimitKind::AtOnce, is_over(used.at_once.into(), at_once.map(u64::from))),
        ]
        .into_iter()
        .find_map(|(kind, is_over)| is_over.then_some(kind))
    }

    /// Returns `true` if more bytes were carried than the limit.
    fn has_too_many_bytes(&self) -> bool {
        self.limits.bytes.is_some_and(|limit| lock(&self.used).bytes > limit)
    }

    fn open(&self) {
        let mut used = lock(&self.used);
        used.connections = used.connections.saturating_add(1);
        used.at_once = used.at_once.saturating_add(1);
    }

    /// Ends a flow. One that has `moved` to another rule was no connection of this one.
    fn close(&self, moved: bool) {
        let mut used = lock(&self.used);
        used.connections = used.connections.saturating_sub(u32::from(moved));
        used.at_once = used.at_once.saturating_sub(1);
    }
}

/// Rules with limits that a flow uses.
#[derive(Default)]
struct Held {
    uses: Vec<Arc<RuleUse>>,
    /// Set once the flow has shown its name. Before, it is that of an address, which several names may share.
    is_settled: bool,
}

/// Permit of one flow. Its end, by the last reference, makes room for another one.
#[derive(Default)]
pub struct Permit(Mutex<Held>);

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").finish_non_exhaustive()
    }
}

impl Permit {
    /// Counts bytes that the flow has carried. Returns `false` if they exceed a limit: the flow must end.
    pub(crate) fn carry(&self, bytes: u64) -> bool {
        let held = lock(&self.0);
        held.uses.iter().fold(true, |is_within, of| {
            let mut used = lock(&of.used);
            used.bytes = used.bytes.saturating_add(bytes);
            drop(used);
            is_within && !of.has_too_many_bytes()
        })
    }

    /// Returns the reason for which the flow must end, if its bytes exceed a limit.
    pub(crate) fn exceeded(&self) -> Option<String> {
        let held = lock(&self.0);
        let over = held.uses.iter().find(|of| of.has_too_many_bytes())?;
        Some(format!("limit on {} of {}", LimitKind::Bytes, over.rule))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        lock(&self.0).uses.iter().for_each(|of| of.close(false));
    }
}

/// Uses of all rules with limits of a guest, by the text of the rule.
#[derive(Default)]
pub(super) struct Uses(HashMap<String, Arc<RuleUse>>);

impl Uses {
    /// Forgets the rules that another policy lacks. Open flows keep theirs.
    pub(super) fn keep(&mut self, policy: &Policy) {
        let limited = (0..policy.len()).filter(|index| !policy.limits(*index).are_none());
        let texts: HashSet<&str> =
            limited.filter_map(|index| Some(policy.source(index)?.text.as_str())).collect();
        self.0.retain(|text, _| texts.contains(text.as_str()));
    }

    /// Returns the use of each rule with limits that covers a flow, or the limit that is reached.
    fn available(
        &mut self,
        policy: &Policy,
        decision: &Decision,
        to: SocketAddr,
        protocol: Protocol,
        is_held: impl Fn(&Arc<RuleUse>) -> bool,
    ) -> Result<Vec<Arc<RuleUse>>, Cause> {
        let mut uses = Vec::new();
        let cause = decision.verdict.cause;
        for index in policy.limited(cause, decision.name.as_ref(), to, protocol) {
            let Some(source) = policy.source(index) else { continue };
            let of = self.0.entry(source.text.clone()).or_insert_with(|| {
                let (limits, rule) = (policy.limits(index), policy.describe(Cause::Rule(index)));
                Arc::new(RuleUse { limits, rule, used: Mutex::default() })
            });
            if let Some(kind) = of.exhausted().filter(|_| !is_held(of)) {
                return Err(Cause::Limit(index, kind));
            }
            if !uses.iter().any(|known| Arc::ptr_eq(known, of)) {
                uses.push(Arc::clone(of));
            }
        }
        Ok(uses)
    }

    /// Returns the permit of a new flow, if a rule has limits. A limit that is reached denies the flow, unless its address has
    /// another name, which the first bytes may show.
    pub(super) fn admit(
        &mut self,
        gate: &Gate,
        decision: &mut Decision,
        to: SocketAddr,
        protocol: Protocol,
        now: Duration,
    ) -> Option<Arc<Permit>> {
        if !decision.verdict.is_allowed() {
            return None;
        }
        let permit = self.permit(gate.policy(), decision, to, protocol);
        permit.unwrap_or_else(|cause| {
            let is_named = decision.inspection == Inspection::AllowedNames;
            let mut others = gate.by_names(to, protocol, now).filter(|_| is_named);
            let other = others.find_map(|other| {
                let permit = self.permit(gate.policy(), &other, to, protocol).ok()?;
                Some((other, permit))
            });
            if let Some((other, permit)) = other {
                *decision = other;
                return permit;
            }
            decision.verdict = Verdict { action: Action::Deny, cause };
            None
        })
    }

    /// Applies the limits of the name that a flow has shown. One that is reached denies the flow.
    pub(super) fn check(
        &mut self,
        gate: &Gate,
        admitted: &Admitted,
        decision: &mut Decision,
        to: SocketAddr,
        protocol: Protocol,
    ) {
        let permit = admitted.permit.as_ref().filter(|_| decision.verdict.is_allowed());
        let Some(permit) = permit else { return };
        if let Err(cause) = self.settle(permit, gate.policy(), decision, to, protocol) {
            decision.verdict = Verdict { action: Action::Deny, cause };
        }
    }

    /// Returns a permit for a new flow that is allowed. `None`: no rule has limits.
    ///
    /// # Errors
    ///
    /// Returns the limit that is reached.
    fn permit(
        &mut self,
        policy: &Policy,
        decision: &Decision,
        to: SocketAddr,
        protocol: Protocol,
    ) -> Result<Option<Arc<Permit>>, Cause> {
        if !policy.has_limits() || protocol == Protocol::Icmp {
            return Ok(None);
        }
        let uses = self.available(policy, decision, to, protocol, |_| false)?;
        uses.iter().for_each(|of| of.open());
        Ok(Some(Arc::new(Permit(Mutex::new(Held { uses, is_settled: false })))))
    }

    /// Applies the name that an allowed flow has shown: the first one replaces that of the address, later ones are added.
    ///
    /// # Errors
    ///
    /// Returns the limit that is reached.
    fn settle(
        &mut self,
        permit: &Permit,
        policy: &Policy,
        decision: &Decision,
        to: SocketAddr,
        protocol: Protocol,
    ) -> Result<(), Cause> {
        let mut held = lock(&permit.0);
        let has = |uses: &[Arc<RuleUse>], of: &Arc<RuleUse>| {
            uses.iter().any(|known| Arc::ptr_eq(known, of))
        };
        let uses = self.available(policy, decision, to, protocol, |of| has(&held.uses, of))?;
        for of in uses.iter().filter(|of| !has(&held.uses, of)) {
            of.open();
        }
        let (kept, others): (Vec<_>, Vec<_>) =
            core::mem::take(&mut held.uses).into_iter().partition(|of| has(&uses, of));
        if held.is_settled {
            held.uses = others;
        } else {
            others.iter().for_each(|of| of.close(true));
        }
        drop(kept);
        held.uses.extend(uses);
        held.is_settled = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests;

//! Totals of an uplink: verdicts of its egress policy by kind, pins, and the counters of its engines. `ringfence ps --json`,
//! `ringfence top` and the summary of `run -v` show them.
//!
//! The engines count ([`UplinkCounters`]); totals are their sums, made when the launcher asks for them and when the
//! uplink ends.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use ringfence_hostnet::text::byte_count;
use ringfence_sys::clock::monotonic;
use ringfence_sys::numbers::u64_from;
use ringfence_uplink::UplinkCounters;
use ringfence_uplink::egress::PolicyInForce;
use serde::{Deserialize, Serialize};

/// Totals of an uplink since the start of its guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UplinkTotals {
    /// Totals of the egress policy, if there is one.
    pub egress: Option<EgressTotals>,
    /// Counters of the engines that are not zero ([`UplinkCounters`]).
    pub traffic: BTreeMap<String, u64>,
    /// The same for each engine, in the order of its queues. Empty for a single engine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queues: Vec<BTreeMap<String, u64>>,
}

/// Text about one queue of an uplink.
pub struct QueueSentence<'a>(pub &'a BTreeMap<String, u64>);

impl fmt::Display for QueueSentence<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sum = |names: &[&str]| names.iter().filter_map(|name| self.0.get(*name)).sum::<u64>();
        let sent = byte_count(sum(&["tcp_bytes_in", "udp_bytes_in"]));
        let received = byte_count(sum(&["tcp_bytes_out", "udp_bytes_out"]));
        let (handed, lost) = (sum(&["handed_over"]), sum(&["drop_handed"]));
        write!(f, "{sent} sent by the guest, {received} received, {handed} handed over")?;
        if lost > 0 {
            write!(f, ", {lost} lost by full queues")?;
        }
        Ok(())
    }
}

/// Totals of an egress policy since the start of the guest. The field names are those of `ringfence ps --json`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressTotals {
    /// Connections, associations and echo flows.
    pub connections_allowed: u64,
    pub connections_denied: u64,
    /// Allowed connections that ended because of their first bytes.
    pub hellos_denied: u64,
    /// Allowed connections that ended because their bytes reached the limit of a rule.
    #[serde(default)]
    pub limits_reached: u64,
    /// Datagrams dropped before a verdict: unreadable QUIC, or too many.
    pub datagrams_lost: u64,
    pub queries_allowed: u64,
    pub queries_refused: u64,
    /// DNS answers refused: a private address for a public name.
    pub answers_refused: u64,
    /// Addresses that are pinned to an allowed name now.
    pub pins: u64,
    /// Questions about destinations that no rule covers.
    #[serde(default)]
    pub questions: u64,
    /// Answers that were late, repeated, or to no question.
    #[serde(default)]
    pub answers_ignored: u64,
    /// Connections that the upstream proxy has refused, or that could not reach it.
    #[serde(default)]
    pub proxy_failures: u64,
    /// Packets dropped because an upstream proxy carries TCP alone.
    #[serde(default)]
    pub drop_not_proxied: u64,
}

impl fmt::Display for EgressTotals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} connections allowed, {} denied, {} ended by their first bytes; \
             {} queries allowed, {} refused, {} answers refused; {} addresses pinned",
            self.connections_allowed,
            self.connections_denied,
            self.hellos_denied,
            self.queries_allowed,
            self.queries_refused,
            self.answers_refused,
            self.pins
        )?;
        if self.limits_reached > 0 {
            write!(f, "; {} ended by limits", self.limits_reached)?;
        }
        if self.questions > 0 {
            write!(f, "; {} questions, {} answers ignored", self.questions, self.answers_ignored)?;
        }
        if self.proxy_failures + self.drop_not_proxied > 0 {
            let (failed, dropped) = (self.proxy_failures, self.drop_not_proxied);
            write!(f, "; upstream proxy: {failed} connections failed, {dropped} packets refused")?;
        }
        Ok(())
    }
}

/// Sources of the totals: the counters of all engines, and the policy that they share.
#[derive(Clone)]
pub(super) struct TotalsSource {
    pub(super) counters: Vec<Arc<UplinkCounters>>,
    pub(super) policy: Arc<PolicyInForce>,
}

impl TotalsSource {
    /// Returns the totals of this moment.
    pub(super) fn read(&self) -> UplinkTotals {
        let of_engine = |counters: &Arc<UplinkCounters>| {
            let counts = counters.each().filter(|(_, count)| *count > 0);
            counts.map(|(name, count)| (name.to_owned(), count)).collect()
        };
        let mut queues: Vec<BTreeMap<String, u64>> = self.counters.iter().map(of_engine).collect();
        let mut traffic = BTreeMap::<String, u64>::new();
        for (name, count) in queues.iter().flatten() {
            let sum = traffic.entry(name.clone()).or_default();
            *sum = sum.saturating_add(*count);
        }
        if queues.len() == 1 {
            queues.clear();
        }
        UplinkTotals { egress: self.egress(), traffic, queues }
    }

    /// Returns the totals of the policy. `None` without one.
    fn egress(&self) -> Option<EgressTotals> {
        let egress = self.policy.get()?;
        let pins = u64_from(egress.pins(monotonic()));
        let (questions, answers_ignored) = (egress.questions(), egress.answers_ignored());
        let mut totals =
            EgressTotals { pins, questions, answers_ignored, ..EgressTotals::default() };
        for counters in &self.counters {
            for (total, counter) in [
                (&mut totals.connections_allowed, &counters.egress_allowed),
                (&mut totals.connections_denied, &counters.egress_denied),
                (&mut totals.hellos_denied, &counters.egress_hellos_denied),
                (&mut totals.limits_reached, &counters.egress_limits),
                (&mut totals.datagrams_lost, &counters.egress_datagrams_lost),
                (&mut totals.queries_allowed, &counters.egress_queries),
                (&mut totals.queries_refused, &counters.egress_queries_refused),
                (&mut totals.answers_refused, &counters.egress_rebinding),
                (&mut totals.proxy_failures, &counters.tcp_proxy_failed),
                (&mut totals.drop_not_proxied, &counters.drop_not_proxied),
            ] {
                *total = total.saturating_add(counter.get());
            }
        }
        Some(totals)
    }
}

#[cfg(test)]
mod tests {
    use ringfence_policy::{Policy, PolicySource};
    use ringfence_uplink::Egress;

    use super::*;

    #[test]
    fn single_engine_has_no_counts_by_queue() {
        let counters = Arc::<UplinkCounters>::default();
        counters.tcp_bytes_in.add(3 << 10);
        counters.handed_over.add(5);
        let source = TotalsSource { counters: vec![counters], policy: PolicyInForce::new(None) };
        let totals = source.read();
        assert!(totals.queues.is_empty());
        let text = QueueSentence(&totals.traffic).to_string();
        assert_eq!(text, "3072 B sent by the guest, 0 B received, 5 handed over");
    }

    #[test]
    fn totals_are_sums_over_engines_and_exist_only_with_a_policy() {
        let counters: Vec<_> = (0..2).map(|_| Arc::<UplinkCounters>::default()).collect();
        counters[0].egress_denied.add(3);
        counters[1].egress_denied.add(4);
        counters[1].egress_queries.add(1);
        let source = |egress| TotalsSource {
            counters: counters.clone(),
            policy: PolicyInForce::new(egress),
        };
        let unrestricted = source(None).read();
        assert_eq!(unrestricted.egress, None);
        assert_eq!(unrestricted.traffic.get("egress_denied"), Some(&7));
        assert_eq!(unrestricted.traffic.len(), 2, "counters of zero are left out");
        let denied: Vec<_> =
            unrestricted.queues.iter().map(|queue| queue["egress_denied"]).collect();
        assert_eq!(denied, [3, 4]);
        let policy = Policy::new(PolicySource::default()).unwrap();
        let totals = source(Some(Egress::new(policy, None, false))).read().egress.unwrap();
        let expected =
            EgressTotals { connections_denied: 7, queries_allowed: 1, ..EgressTotals::default() };
        assert_eq!(totals, expected);
        assert!(totals.to_string().starts_with("0 connections allowed, 7 denied"), "{totals}");
        let behind_a_proxy = EgressTotals { drop_not_proxied: 3, ..totals };
        assert!(
            behind_a_proxy.to_string().ends_with("proxy: 0 connections failed, 3 packets refused")
        );
    }
}

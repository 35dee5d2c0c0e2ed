//! Counts of broken rules, by name: each way in which a peer can misbehave has its own.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Names are constants of this program, so the table is bounded by it and not by the peer.
#[derive(Debug, Default)]
pub struct RuleCounters {
    counts: Mutex<BTreeMap<&'static str, u64>>,
}

impl RuleCounters {
    /// Counts one violation. Returns how often this rule was broken before, so that a caller can
    /// log the first and keep the log bounded.
    #[cold]
    pub fn count(&self, rule: &'static str) -> u64 {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(rule).or_default();
        let before = *count;
        *count = before.saturating_add(1);
        before
    }

    /// How often a rule was broken.
    pub fn get(&self, rule: &str) -> u64 {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).get(rule).copied().unwrap_or(0)
    }

    /// All that were broken at all.
    pub fn all(&self) -> BTreeMap<&'static str, u64> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_kept_apart() {
        let rules = RuleCounters::default();
        assert_eq!((rules.count("a"), rules.count("a"), rules.count("b")), (0, 1, 0));
        assert_eq!((rules.get("a"), rules.get("b"), rules.get("c")), (2, 1, 0));
    }
}

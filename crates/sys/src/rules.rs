//! Counters of rule violations, by the name of the rule.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Violations of one peer by rule. Names are constants of the program, so a peer cannot make the table
/// grow.
#[derive(Debug, Default)]
pub struct RuleCounters {
    counts: Mutex<BTreeMap<&'static str, u64>>,
}

impl RuleCounters {
    /// Counts one violation. Returns the count before, so that a caller can log the first one only.
    #[cold]
    pub fn count(&self, rule: &'static str) -> u64 {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(rule).or_default();
        let before = *count;
        *count = before.saturating_add(1);
        before
    }

    /// Returns the number of violations of a rule.
    pub fn get(&self, rule: &str) -> u64 {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).get(rule).copied().unwrap_or(0)
    }

    /// Returns the counts of all rules with violations.
    pub fn all(&self) -> BTreeMap<&'static str, u64> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_counted_separately() {
        let rules = RuleCounters::default();
        assert_eq!((rules.count("a"), rules.count("a"), rules.count("b")), (0, 1, 0));
        assert_eq!((rules.get("a"), rules.get("b"), rules.get("c")), (2, 1, 0));
    }
}

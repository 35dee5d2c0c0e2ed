//! Burden that a neighbour puts on the driver domain: the columns common to packet rows and disk rows.

use std::collections::BTreeMap;

use crate::harness::{Case, Layout, Summary, Value, right};

/// Burden of one run. CPU times are in cores: CPU time divided by the measured time.
#[derive(Clone, Debug, Default)]
pub(super) struct Burden {
    /// Cores that the neighbour used.
    pub(super) neighbour_cpu: f64,
    /// Cores that the driver domain used.
    pub(super) driver_cpu: f64,
    pub(super) driver_rss_kib_growth: i64,
    pub(super) driver_fds_growth: i64,
    /// Charges of all guests but the victim, by rule.
    pub(super) rules: BTreeMap<String, u64>,
}

/// Adds the columns of the burden, which are a row's last.
pub(super) fn burden_columns<C: Case>(
    layout: Layout<Summary<C>>,
    of: fn(&C::Measured) -> &Burden,
) -> Layout<Summary<C>>
where
    C::Measured: 'static,
{
    layout
        .column(
            "neighbour_cpu",
            move |row| row.median(|run| of(run).neighbour_cpu),
            right("its cpu", 7).digits(2),
        )
        .column(
            "driver_cpu",
            move |row| row.median(|run| of(run).driver_cpu),
            right("driver", 7).digits(2),
        )
        .column(
            "driver_rss_kib_growth",
            move |row| row.greatest(|run| of(run).driver_rss_kib_growth),
            right("rss KiB", 8),
        )
        .column(
            "driver_fds_growth",
            move |row| row.greatest(|run| of(run).driver_fds_growth),
            right("fds", 4),
        )
        .field("rules", move |row| Value::json(&charges(row, of)))
        .tail("  what it was charged with", move |row| format!("  {}", told(&charges(row, of))))
}

/// Sums the charges of all runs of a row by rule.
fn charges<C: Case>(row: &Summary<C>, of: fn(&C::Measured) -> &Burden) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for (rule, count) in row.runs.iter().flat_map(|run| &of(run).rules) {
        *all.entry(rule.clone()).or_default() += count;
    }
    all
}

/// Formats the charges for a line of the table, the most frequent first.
fn told(charges: &BTreeMap<String, u64>) -> String {
    let mut rules: Vec<_> = charges.iter().collect();
    rules.sort_by_key(|(_, count)| core::cmp::Reverse(**count));
    let rules: Vec<_> = rules.iter().map(|(rule, count)| format!("{rule} {count}")).collect();
    rules.join(", ")
}

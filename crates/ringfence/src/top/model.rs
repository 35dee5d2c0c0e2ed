//! Model of the view: rates from two samples, and the sorted and filtered rows of one kind.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::columns::{Column, Order, columns_of};
use super::sample::{Item, Kind, Sample};

/// Item with its rates.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub(super) item: Item,
    /// Rises of the counters a second, without those of zero. `None` if an earlier sample does not have the item.
    pub(super) rates: Option<BTreeMap<String, f64>>,
}

impl Row {
    /// Returns the sum of the rates of these counters.
    pub(super) fn rate(&self, is_wanted: impl Fn(&str) -> bool) -> Option<f64> {
        let rates = self.rates.as_ref()?;
        Some(rates.iter().filter(|(name, _)| is_wanted(name)).map(|(_, rate)| rate).sum())
    }
}

/// Rows of all kinds at one moment.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct View {
    /// Time between the two samples in seconds, if there are two.
    pub(super) interval_seconds: Option<f64>,
    #[serde(rename = "items")]
    pub(super) rows: Vec<Row>,
    /// Sources that did not answer.
    pub(super) remarks: Vec<String>,
}

impl View {
    /// Computes the rates since an earlier sample.
    pub(super) fn new(before: Option<&Sample>, now: Sample) -> View {
        let seconds = before.map(|before| (now.at - before.at).as_secs_f64());
        let seconds = seconds.filter(|seconds| *seconds > 0.0);
        let earlier: HashMap<_, &Item> = before
            .into_iter()
            .flat_map(|before| before.items.iter().map(|item| (item.key(), item)))
            .collect();
        let row = |item: Item| {
            let rates = seconds.zip(earlier.get(&item.key()));
            let rates = rates.map(|(seconds, before)| rates_between(before, &item, seconds));
            Row { item, rates }
        };
        let rows = now.items.into_iter().map(row).collect();
        View { interval_seconds: seconds, rows, remarks: now.remarks }
    }

    /// Returns the number of items of a kind.
    pub(super) fn count(&self, kind: Kind) -> usize {
        self.rows.iter().filter(|row| row.item.kind == kind).count()
    }

    /// Returns the rows of a kind that match the filter, in this order.
    pub(super) fn rows_of(&self, kind: Kind, sort: Sort, filter: &str) -> Vec<&Row> {
        let columns = columns_of(kind);
        let column = columns.get(sort.column).unwrap_or(&columns[0]);
        let of_kind = self.rows.iter().filter(|row| row.item.kind == kind);
        let of_kind = of_kind.filter(|row| matches(row, filter));
        let mut rows: Vec<(Order, &Row)> =
            of_kind.map(|row| (column.cell(row).order, row)).collect();
        rows.sort_by(|(x, a), (y, b)| {
            sort.compare(x, y).then_with(|| a.item.key().cmp(&b.item.key()))
        });
        rows.into_iter().map(|(_, row)| row).collect()
    }

    /// Returns the guest or front with this key, and the rows that belong to it.
    pub(super) fn parts(&self, owner: &str) -> Vec<&Row> {
        self.rows.iter().filter(|row| row.item.owner == owner).collect()
    }
}

/// Returns the rises a second. A counter that fell belongs to a device that is connected anew: it rose from zero.
fn rates_between(before: &Item, now: &Item, seconds: f64) -> BTreeMap<String, f64> {
    let rise = |(name, count): (&String, &u64)| {
        let earlier = before.counters.get(name).copied().unwrap_or(0);
        let rise = count.checked_sub(earlier).unwrap_or(*count);
        // Counters of one interval are far below 2^52.
        #[allow(clippy::cast_precision_loss, reason = "a rate for people")]
        let rate = rise as f64 / seconds;
        (rise > 0).then(|| (name.clone(), rate))
    };
    now.counters.iter().filter_map(rise).collect()
}

/// Returns `true` if the item's name, its guest or its place contains the filter, in any case of letters.
fn matches(row: &Row, filter: &str) -> bool {
    let filter = filter.to_lowercase();
    let Item { name, guest, place, .. } = &row.item;
    filter.is_empty()
        || [name, guest, place].iter().any(|text| text.to_lowercase().contains(&filter))
}

/// Order of the rows of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sort {
    /// Number of the column.
    pub(super) column: usize,
    pub(super) descending: bool,
}

impl Sort {
    /// Returns the order by a column: the largest number or the first name at the top.
    pub(super) fn by(kind: Kind, column: usize) -> Sort {
        Sort { column, descending: columns_of(kind).get(column).is_some_and(Column::is_number) }
    }

    /// Compares the values of two rows. Rows without a value come last.
    fn compare(self, x: &Order, y: &Order) -> Ordering {
        let by_value = match (x, y) {
            (Order::Number(x), Order::Number(y)) => x.total_cmp(y),
            (Order::Text(x), Order::Text(y)) => x.cmp(y),
            (Order::None, Order::None) => Ordering::Equal,
            (Order::None, _) => return Ordering::Greater,
            (_, Order::None) => return Ordering::Less,
            (Order::Number(_), Order::Text(_)) => Ordering::Less,
            (Order::Text(_), Order::Number(_)) => Ordering::Greater,
        };
        if self.descending { by_value.reverse() } else { by_value }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::testing::{item, sample};
    use super::*;

    fn names(rows: &[&Row]) -> Vec<String> {
        rows.iter().map(|row| row.item.name.clone()).collect()
    }

    #[test]
    fn rate_is_the_rise_of_a_counter_a_second() {
        let start = Instant::now();
        let before =
            sample(start, vec![item(Kind::Vif, "a", &[("rx_bytes", 100), ("tx_bytes", 9)])]);
        let later = start + Duration::from_millis(500);
        let now = sample(
            later,
            vec![
                item(Kind::Vif, "a", &[("rx_bytes", 400), ("tx_bytes", 9), ("drop_runt", 1)]),
                item(Kind::Vif, "new", &[("rx_bytes", 5)]),
            ],
        );
        let view = View::new(Some(&before), now);
        assert_eq!(view.interval_seconds, Some(0.5));
        let rates = view.rows[0].rates.as_ref().unwrap();
        assert_eq!(rates.get("rx_bytes"), Some(&600.0));
        assert_eq!(rates.get("drop_runt"), Some(&2.0));
        assert_eq!(rates.get("tx_bytes"), None, "rates of zero are left out");
        assert_eq!(view.rows[1].rates, None, "a new item has no rates yet");
    }

    #[test]
    fn counter_that_fell_rose_from_zero() {
        let start = Instant::now();
        let before = sample(start, vec![item(Kind::Vif, "a", &[("rx_bytes", 1000)])]);
        let now =
            sample(start + Duration::from_secs(1), vec![item(Kind::Vif, "a", &[("rx_bytes", 40)])]);
        let view = View::new(Some(&before), now);
        assert_eq!(view.rows[0].rate(|name| name == "rx_bytes"), Some(40.0));
    }

    #[test]
    fn rows_are_sorted_by_a_number_or_a_name_and_filtered() {
        let start = Instant::now();
        let items = |counts: [u64; 3]| {
            let named = ["web", "db", "Webmail"].into_iter().zip(counts);
            named.map(|(name, n)| item(Kind::Vif, name, &[("rx_bytes", n)])).collect()
        };
        let before = sample(start, items([0, 0, 0]));
        let now = sample(start + Duration::from_secs(1), items([5, 20, 10]));
        let view = View::new(Some(&before), now);
        let sent = columns_of(Kind::Vif).iter().position(|column| column.head == "SENT/s").unwrap();
        let by_sent = Sort::by(Kind::Vif, sent);
        assert!(by_sent.descending, "the largest number is at the top");
        assert_eq!(names(&view.rows_of(Kind::Vif, by_sent, "")), ["db", "Webmail", "web"]);
        let reversed = Sort { descending: false, ..by_sent };
        assert_eq!(names(&view.rows_of(Kind::Vif, reversed, "")), ["web", "Webmail", "db"]);
        let by_name = Sort::by(Kind::Vif, 0);
        assert_eq!(names(&view.rows_of(Kind::Vif, by_name, "WEB")), ["web", "Webmail"]);
        assert!(view.rows_of(Kind::Vbd, by_name, "").is_empty());
    }

    #[test]
    fn row_without_a_value_is_last_in_both_orders() {
        let start = Instant::now();
        let before = sample(start, vec![item(Kind::Vif, "old", &[("rx_bytes", 1)])]);
        let now = sample(
            start + Duration::from_secs(1),
            vec![item(Kind::Vif, "new", &[]), item(Kind::Vif, "old", &[("rx_bytes", 2)])],
        );
        let view = View::new(Some(&before), now);
        let sent = columns_of(Kind::Vif).iter().position(|column| column.head == "SENT/s").unwrap();
        for descending in [true, false] {
            let sort = Sort { column: sent, descending };
            assert_eq!(names(&view.rows_of(Kind::Vif, sort, "")), ["old", "new"]);
        }
    }
}

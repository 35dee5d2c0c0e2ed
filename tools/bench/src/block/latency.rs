//! Latency histogram of requests with a resolution of 1/32.

use serde::{Deserialize, Serialize};

/// Buckets of the histogram within a power of two.
const STEPS: u64 = 32;

/// Counts of latencies in nanoseconds, each within 1/32 of its value.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Latencies(Vec<u64>);

fn place(nanos: u64) -> usize {
    let nanos = nanos.max(STEPS);
    let log = u64::from(nanos.ilog2());
    let step = (nanos >> (log - 5)) - STEPS;
    usize::try_from((log - 5) * STEPS + step).expect("at most 59 * 32, as `log` is at most 63")
}

/// Returns the middle of a bucket.
fn value(place: usize) -> f64 {
    let (power, step) = (place as u64 / STEPS, place as u64 % STEPS);
    (STEPS + step) as f64 * (power as f64).exp2() * (1.0 + 0.5 / (STEPS + step) as f64)
}

impl Latencies {
    pub(super) fn add(&mut self, nanos: u64) {
        let place = place(nanos);
        if self.0.len() <= place {
            self.0.resize(place + 1, 0);
        }
        self.0[place] += 1;
    }

    pub(super) fn merge(&mut self, other: &Latencies) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        self.0.iter_mut().zip(&other.0).for_each(|(sum, n)| *sum += n);
    }

    /// Returns the quantile `part` (0 to 1) in microseconds.
    pub(crate) fn quantile_us(&self, part: f64) -> f64 {
        let wanted = (self.0.iter().sum::<u64>() as f64 * part).ceil().max(1.0);
        let mut seen = 0.0;
        for (place, count) in self.0.iter().enumerate() {
            seen += *count as f64;
            if seen >= wanted {
                return value(place) / 1e3;
            }
        }
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_resolution_of_inputs() {
        let mut latencies = Latencies::default();
        (1..=100_000u64).for_each(|n| latencies.add(n * 10));
        for (part, expected) in [(0.5, 500.0), (0.99, 990.0), (1.0, 1000.0)] {
            let found = latencies.quantile_us(part);
            assert!((found / expected - 1.0).abs() < 0.04, "{part}: {found}");
        }
        let mut twice = latencies.clone();
        twice.merge(&latencies);
        assert_eq!(twice.quantile_us(0.5), latencies.quantile_us(0.5));
        latencies.add(0);
        latencies.add(u64::MAX);
    }
}

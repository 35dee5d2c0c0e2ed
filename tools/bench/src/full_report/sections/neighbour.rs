//! Charts of the rows of `cost` and `tail`.

use clap::ValueEnum;
use ringfence_testkit::hostile::behaviour::Behaviour;

use super::{Rounds, chart, other, ours};
use crate::cost::figures;
use crate::harness::{Bar, BarChart};

/// Charts of the cost table: one for each size of packets.
pub(super) fn cost(rounds: &Rounds) -> Vec<Option<BarChart>> {
    let of = |size: &str| {
        let bar = |(kind, name, published): (&str, &str, Option<u32>)| {
            let row = [("kind", kind), ("name", name), ("size", size)];
            let cycles = rounds.values(&row, "cycles").into_iter().map(|cycles| cycles.max(0.0));
            ours(name, cycles.collect(), published.map(f64::from))
        };
        let size_of: u32 = size.parse().unwrap_or_default();
        let bars: Vec<Bar> = figures(size_of).map(bar).collect();
        let (id, title) = (format!("cycles-{size}"), format!("One more component, {size} bytes"));
        chart([&id, &title, "cycles a packet"], true, vec![(String::new(), bars)])
    };
    vec![of("64"), of("1500")]
}

/// Names of the rows of a guest alone and of one beside an honest neighbour.
const ALONE: &str = "absent";
const HONEST: &str = "honest";

/// Charts of latency beside neighbours: p99.9 of each, and the quantiles beside the worst.
pub(super) fn neighbour(rounds: &Rounds) -> Vec<Option<BarChart>> {
    let names = Behaviour::value_variants().iter().map(|behaviour| behaviour.name());
    let bar = |name: String| {
        let values = rounds.values(&[("behaviour", &name)], "p999_ratio");
        if name == HONEST { other(&name, values) } else { ours(&name, values, None) }
    };
    let bars: Vec<Bar> = names.filter(|name| name != ALONE).map(bar).collect();
    let group = |(name, figure): (&str, &str)| {
        let of = |behaviour| rounds.values(&[("behaviour", behaviour)], figure);
        let worst = rounds.greatest_without("behaviour", &[ALONE, HONEST], figure);
        let bars = vec![
            other("alone", of(ALONE)),
            other("beside an honest one", of(HONEST)),
            ours("beside the worst hostile one", worst, None),
        ];
        (name.to_owned(), bars)
    };
    let quantiles = [("p50", "p50_us"), ("p99", "p99_us"), ("p99.9", "p999_us")];
    let title = "p99.9 beside a neighbour by p99.9 alone";
    vec![
        chart(["ratio", title, "ratio"], true, vec![(String::new(), bars)]),
        chart(["latency", "A packet and its answer", "µs"], true, quantiles.map(group).to_vec()),
    ]
}

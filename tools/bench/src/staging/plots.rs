//! Page of the staging experiment: plots and tables.

use ringfence_access::Mode;

use super::report::Results;
use super::{Forwarder, Point, VerifyExtent};
use crate::harness::{Axis, Bar, BarChart, BarGroup, Page, Plot, Scale, Series};
use crate::params::Direction;
use crate::report::PacketRow;

/// Builds the page with plots and tables.
pub(super) fn page(results: &Results<'_>) -> anyhow::Result<Page> {
    let mut page = Page::new("Staging grants: packets from domain to domain");
    page.heading("Rate against packet size");
    for &direction in &results.args.directions {
        page.plot(&rates(results, direction))?;
    }
    page.heading("Cost of a packet against queues");
    for &size in &results.args.sizes {
        page.plot(&costs(results, size))?;
    }
    page.chart(&ratios(results));
    for table in results.tables() {
        page.heading(&table.title);
        page.table(&table.title, &table.heading, &table.rows);
    }
    results.notes().iter().for_each(|note| page.text(note));
    Ok(page)
}

/// Returns the rates with one queue: a line for each mode and peer.
fn rates(results: &Results<'_>, direction: Direction) -> Plot {
    let modes = Mode::NETWORK.map(|mode| Forwarder::Ringfence(mode, VerifyExtent::Sequence));
    let peers = results.args.vs.iter().map(|peer| Forwarder::Peer(*peer));
    let series = modes.into_iter().chain(peers).map(|forwarder| {
        let of = |point: &Point| {
            point.direction == direction && point.queues == 1 && point.forwarder == forwarder
        };
        let points = results.points().filter(of);
        let rates =
            points.filter_map(|point| Some((f64::from(point.size), results.pps(point)? / 1e6)));
        Series::new(name(forwarder), rates.collect())
    });
    Plot {
        title: format!("{direction}, one queue"),
        x: Axis::new("bytes of a packet", Scale::Log),
        y: Axis::new("Mpps", Scale::Log),
        series: series.collect(),
    }
}

/// Returns the CPU time of both sides for a packet, by number of queues.
fn costs(results: &Results<'_>, size: u32) -> Plot {
    let mut series = Vec::new();
    for &direction in &results.args.directions {
        for mode in [Mode::Copy, Mode::Staging] {
            let forwarder = Forwarder::Ringfence(mode, VerifyExtent::Sequence);
            let costs = results.args.queues.iter().filter_map(|&queues| {
                let point = Point { direction, queues, size, forwarder };
                let cost = results.figure(point, PacketRow::cpu_ns_per_packet)?;
                Some((f64::from(queues), cost))
            });
            series.push(Series::new(format!("{mode} {direction}"), costs.collect()));
        }
    }
    Plot {
        title: format!("{size} bytes: processor time of a packet, both sides together"),
        x: Axis::linear("queues"),
        y: Axis::linear("nanoseconds"),
        series,
    }
}

/// Returns the ratio of staging to copy, measured and published.
fn ratios(results: &Results<'_>) -> BarChart {
    let sequence = |point: &Point| {
        point.forwarder == Forwarder::Ringfence(Mode::Staging, VerifyExtent::Sequence)
    };
    let group = |point: Point| {
        let published = results.beside_copy(point)?.wanted?;
        let Point { size, direction, queues, .. } = point;
        let values = results.ratios(point, point.with(copy()));
        let bar =
            Bar { name: "staging".to_owned(), values, published: Some(published), ours: true };
        let name = format!("{size} bytes, {direction}, {queues} queues");
        Some(BarGroup { name, bars: vec![bar] })
    };
    BarChart {
        id: "staging".to_owned(),
        title: "Staging to copy, measured and as published".to_owned(),
        unit: "times".to_owned(),
        less_is_better: false,
        groups: results.points().filter(sequence).filter_map(group).collect(),
    }
}

fn copy() -> Forwarder {
    Forwarder::Ringfence(Mode::Copy, VerifyExtent::Sequence)
}

fn name(forwarder: Forwarder) -> String {
    match forwarder {
        Forwarder::Ringfence(mode, _) => mode.name().to_owned(),
        Forwarder::Peer(peer) => peer.name().to_owned(),
    }
}

//! Page of the staging experiment: plots and tables.

use ringfence_access::Mode;

use super::report::Results;
use super::{Forwarder, Point, VerifyExtent};
use crate::harness::{Axis, Page, Plot, Scale, Series};
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
    page.plot(&ratios(results))?;
    for table in results.tables() {
        page.heading(&table.title);
        page.table(&table.heading, &table.rows);
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
        x: Axis::new("octets of a packet", Scale::Log),
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
        title: format!("{size} octets: processor time of a packet, both sides together"),
        x: Axis::linear("queues"),
        y: Axis::linear("nanoseconds"),
        series,
    }
}

/// Returns the ratio of staging to copy, measured and published.
fn ratios(results: &Results<'_>) -> Plot {
    let (mut names, mut measured, mut published) = (Vec::new(), Vec::new(), Vec::new());
    let sequence = |point: &Point| {
        point.forwarder == Forwarder::Ringfence(Mode::Staging, VerifyExtent::Sequence)
    };
    for point in results.points().filter(sequence) {
        let Some((beside, wanted)) =
            results.beside_copy(point).and_then(|beside| Some((beside.ratio, beside.wanted?)))
        else {
            continue;
        };
        let at = names.len() as f64;
        names.push(format!("{} {} x{}", point.size, point.direction, point.queues));
        measured.push((at, beside));
        published.push((at, wanted));
    }
    Plot {
        title: "Staging to copy: measured, and as published".to_owned(),
        x: Axis::new("octets, direction, queues", Scale::Names(names)),
        y: Axis::linear("ratio"),
        series: vec![Series::new("measured", measured), Series::new("published", published)],
    }
}

fn name(forwarder: Forwarder) -> String {
    match forwarder {
        Forwarder::Ringfence(mode, _) => mode.name().to_owned(),
        Forwarder::Peer(peer) => peer.name().to_owned(),
    }
}

//! Report of the staging experiment: samples by point, ratios, judgements, and lines of JSON.

use ringfence_access::Mode;

use super::args::StagingArgs;
use super::published;
use super::{Forwarder, Point, Sample, VerifyExtent};
use crate::harness::{Layout, Value, median};
use crate::report::PacketRow;

/// Minimum ratio of `copy` to the bare kernel copy for a judgement. Below it copies are not the
/// bottleneck, so avoiding them proves nothing.
pub(super) const COPY_SHARE_MIN: f64 = 0.7;

/// All samples of all points.
pub(super) struct Results<'a> {
    pub(super) args: &'a StagingArgs,
    /// Cores that this process may use.
    cores: usize,
    points: Vec<(Point, Vec<Sample>)>,
    hand_overs: Vec<(u32, Vec<f64>)>,
}

impl<'a> Results<'a> {
    pub(super) fn new(args: &'a StagingArgs, cores: usize) -> Results<'a> {
        Results { args, cores, points: Vec::new(), hand_overs: Vec::new() }
    }

    pub(super) fn add(&mut self, point: Point, sample: Sample) {
        match self.points.iter_mut().find(|(known, _)| *known == point) {
            Some((_, samples)) => samples.push(sample),
            None => self.points.push((point, vec![sample])),
        }
    }

    pub(super) fn add_hand_over(&mut self, size: u32, gbps: f64) {
        match self.hand_overs.iter_mut().find(|(known, _)| *known == size) {
            Some((_, rates)) => rates.push(gbps),
            None => self.hand_overs.push((size, vec![gbps])),
        }
    }

    /// Returns the median rate of the bare hand-over in Gbit/s.
    pub(super) fn hand_over(&self, size: u32) -> Option<f64> {
        let (_, rates) = self.hand_overs.iter().find(|(known, _)| *known == size)?;
        Some(median(rates.iter().copied()))
    }

    fn samples(&self, point: Point) -> &[Sample] {
        let found = self.points.iter().find(|(known, _)| *known == point);
        found.map_or(&[], |(_, samples)| samples)
    }

    /// Returns the median rate of a point.
    pub(super) fn pps(&self, point: Point) -> Option<f64> {
        let rates: Vec<f64> = self.samples(point).iter().filter_map(Sample::pps).collect();
        (!rates.is_empty()).then(|| median(rates.into_iter()))
    }

    /// Returns the median of a figure of Ringfence's rows.
    pub(super) fn figure(&self, point: Point, of: impl Fn(&PacketRow) -> f64) -> Option<f64> {
        let rows = self.samples(point).iter().filter_map(|sample| match sample {
            Sample::Ringfence(row) => Some(of(row)),
            _ => None,
        });
        let figures: Vec<f64> = rows.collect();
        (!figures.is_empty()).then(|| median(figures.into_iter()))
    }

    /// Returns the ratios within rounds.
    pub(super) fn ratios(&self, point: Point, to: Point) -> Vec<f64> {
        let pairs = self.samples(point).iter().zip(self.samples(to));
        pairs
            .filter_map(|(one, other)| Some(one.pps()? / other.pps()?.max(f64::MIN_POSITIVE)))
            .collect()
    }

    /// Returns the median of the ratios within rounds.
    pub(super) fn ratio(&self, point: Point, to: Point) -> Option<f64> {
        let ratios = self.ratios(point, to);
        (!ratios.is_empty()).then(|| median(ratios.into_iter()))
    }

    /// Returns the reason for which a point was skipped.
    pub(super) fn skipped(&self, point: Point) -> Option<&str> {
        self.samples(point).iter().find_map(|sample| match sample {
            Sample::Skipped(why) => Some(why.as_str()),
            _ => None,
        })
    }

    /// Returns the kind of memory that a peer used.
    pub(super) fn memory(&self, point: Point) -> Option<&'static str> {
        self.samples(point).iter().find_map(|sample| match sample {
            Sample::Peer { memory, .. } => Some(*memory),
            _ => None,
        })
    }

    /// Returns the points in the order of their measurement.
    pub(super) fn points(&self) -> impl Iterator<Item = Point> + '_ {
        self.points.iter().map(|(point, _)| *point)
    }

    /// Returns `true` if there are fewer cores than threads: one for each queue on both sides.
    pub(super) fn oversubscribed(&self, queues: u32) -> bool {
        2 * u64::from(queues) > self.cores as u64
    }

    /// Compares a point of mode `staging` with mode `copy`.
    pub(super) fn beside_copy(&self, point: Point) -> Option<Beside> {
        let Forwarder::Ringfence(Mode::Staging, verify) = point.forwarder else { return None };
        let copy = point.with(Forwarder::Ringfence(Mode::Copy, verify));
        let published = published::ratio(point.size, point.queues, point.direction);
        let ratio = self.ratio(point, copy)?;
        let share = self.figure(copy, PacketRow::bare_copy_share)?;
        let judgement = match published {
            None => Judgement::NotJudged("nothing was published for this size"),
            Some(_) if self.oversubscribed(point.queues) => Judgement::NotJudged("oversubscribed"),
            Some(_) if share < COPY_SHARE_MIN => {
                Judgement::NotJudged("copy is below its condition")
            }
            Some(wanted) if ratio >= wanted => Judgement::Met,
            Some(_) => Judgement::NotMet,
        };
        Some(Beside { ratio, wanted: published, copy_share: Some(share), judgement })
    }

    /// Compares a peer's point with staging at the same size and direction.
    pub(super) fn beside_peer(&self, point: Point) -> Option<Beside> {
        let Forwarder::Peer(peer) = point.forwarder else { return None };
        let ratio = self.ratio(
            point.with(Forwarder::Ringfence(Mode::Staging, VerifyExtent::Sequence)),
            point,
        )?;
        let wanted = published::wanted(peer, point.size);
        let judgement = match wanted {
            None => Judgement::NotJudged("nothing is asked for at this size"),
            Some(wanted) if ratio >= wanted => Judgement::Met,
            Some(_) => Judgement::NotMet,
        };
        Some(Beside { ratio, wanted, copy_share: None, judgement })
    }

    /// Returns one line of JSON for each point that was measured or skipped.
    pub(super) fn json(&self) -> serde_json::Result<Vec<String>> {
        let layout = layout();
        self.points().map(|point| layout.json(&PointResult { results: self, point })).collect()
    }
}

struct PointResult<'a> {
    results: &'a Results<'a>,
    point: Point,
}

impl PointResult<'_> {
    fn figure(&self, of: impl Fn(&PacketRow) -> f64) -> Option<f64> {
        self.results.figure(self.point, of)
    }

    fn pps(&self) -> Option<f64> {
        self.results.pps(self.point)
    }

    /// Returns the share of what a link of this rate carries of such packets.
    fn line_rate_share(&self, gigabits: f64) -> Option<f64> {
        self.pps().map(|pps| pps / published::line_rate(gigabits, self.point.size))
    }

    fn beside(&self) -> Option<Beside> {
        let copy = self.results.beside_copy(self.point);
        copy.or_else(|| self.results.beside_peer(self.point))
    }

    /// Returns the access mode, or the name of a peer.
    fn mode(&self) -> &'static str {
        match self.point.forwarder {
            Forwarder::Ringfence(mode, _) => mode.name(),
            Forwarder::Peer(peer) => peer.name(),
        }
    }

    /// Returns the program that forwarded the packets.
    fn peer(&self) -> &'static str {
        match self.point.forwarder {
            Forwarder::Ringfence(..) => "ringfence",
            Forwarder::Peer(peer) => peer.name(),
        }
    }

    fn verify(&self) -> Option<&'static str> {
        match self.point.forwarder {
            Forwarder::Ringfence(_, verify) => Some(verify.name()),
            Forwarder::Peer(_) => None,
        }
    }
}

/// Returns the fields of a point. The tables are of another form: they compare points ([`super::text`]).
fn layout<'a>() -> Layout<PointResult<'a>> {
    Layout::new()
        .field("experiment", |_: &PointResult<'_>| "staging-grants")
        .field("direction", |of| Value::json(&of.point.direction))
        .field("queues", |of| of.point.queues)
        .field("size", |of| of.point.size)
        .field("mode", PointResult::mode)
        .field("pps", PointResult::pps)
        .field("gbps", |of| of.pps().map(|pps| gbps(pps, of.point.size)))
        .field("grant_ops_per_packet", |of| of.figure(PacketRow::grant_ops_per_packet))
        .field("syscalls_per_packet", |of| of.figure(PacketRow::syscalls_per_packet))
        .field("peer", PointResult::peer)
        .field("verify", PointResult::verify)
        .field("rounds", |of| of.results.samples(of.point).len())
        .field("cpu_ns_per_packet", |of| of.figure(PacketRow::cpu_ns_per_packet))
        .field("copies_per_packet", |of| of.figure(PacketRow::copies_per_packet))
        .field("wakeups_per_packet", |of| of.figure(PacketRow::wakeups_per_packet))
        .field("bare_copy_share", |of| of.figure(PacketRow::bare_copy_share))
        .field("line_rate_10g_share", |of| of.line_rate_share(10.0))
        .field("line_rate_40g_share", |of| of.line_rate_share(40.0))
        .field("line_rate_100g_share", |of| of.line_rate_share(100.0))
        .field("oversubscribed", |of| of.results.oversubscribed(of.point.queues))
        .field("bare_hand_over_gbps", |of| Value::if_some(of.results.hand_over(of.point.size)))
        .field("memory", |of| Value::if_some(of.results.memory(of.point)))
        .field("skipped", |of| Value::if_some(of.results.skipped(of.point)))
        .field("staging_ratio", |of| Value::if_some(of.beside().map(|beside| beside.ratio)))
        .field("wanted_ratio", |of| Value::if_some(of.beside().and_then(|beside| beside.wanted)))
        .field("judgement", |of| {
            Value::if_some(of.beside().map(|beside| beside.judgement.to_string()))
        })
}

/// Comparison of two rates.
#[derive(Clone, Debug)]
pub(super) struct Beside {
    /// Ratio of staging to the other rate.
    pub(super) ratio: f64,
    pub(super) wanted: Option<f64>,
    /// Ratio of mode `copy` to the bare kernel copy.
    pub(super) copy_share: Option<f64>,
    pub(super) judgement: Judgement,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Judgement {
    Met,
    NotMet,
    NotJudged(&'static str),
}

impl std::fmt::Display for Judgement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Judgement::Met => f.write_str("met"),
            Judgement::NotMet => f.write_str("not met"),
            Judgement::NotJudged(why) => write!(f, "not judged: {why}"),
        }
    }
}

/// Converts a packet rate to Gbit/s, Ethernet header included.
pub(super) fn gbps(pps: f64, size: u32) -> f64 {
    pps * f64::from(size) * 8.0 / 1e9
}

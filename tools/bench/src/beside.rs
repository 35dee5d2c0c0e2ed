//! Rows of `bench net --vs`: other programs on the same cores.

use ringfence_access::Mode;

use super::args::NetArgs;
use super::params::Direction;
use super::peers::{self, ForwardingPeer, PeerOutcome};
use super::report::PacketRow;
use crate::harness::{Layout, Value};

/// Row of another program to be measured.
pub(super) struct Beside {
    peer: ForwardingPeer,
    direction: Direction,
    size: u32,
}

/// Rate of another program.
#[derive(Debug)]
pub(super) struct PeerRate {
    peer: ForwardingPeer,
    direction: Direction,
    size: u32,
    queues: u32,
    pps: Option<f64>,
    /// Kind of pages of the program's memory.
    memory: Option<&'static str>,
    /// Ratio of mode `staging` to this rate, if the run has measured staging.
    staging_ratio: Option<f64>,
    /// Reason for which there is no rate.
    skipped: Option<String>,
}

impl Beside {
    /// Returns the rows that were requested.
    pub(super) fn rows(args: &NetArgs) -> Vec<Beside> {
        let mut rows = Vec::new();
        for &peer in &args.vs {
            for &direction in &args.directions {
                let sizes = args.sizes.iter().filter(|size| **size <= peers::SIZE_MAX);
                rows.extend(sizes.map(|&size| Beside { peer, direction, size }));
            }
        }
        rows
    }

    pub(super) fn name(&self) -> String {
        format!("{} {} {}", self.peer, self.direction, self.size)
    }

    /// Measures the row; `ours` are Ringfence's rows of this run.
    pub(super) fn run(
        &self,
        args: &NetArgs,
        cores: Option<[usize; 2]>,
        ours: &[PacketRow],
    ) -> PeerRate {
        let Beside { peer, direction, size } = *self;
        let outcome = peers::measure(peer, direction, size, args.pages, cores, args.seconds);
        let (pps, memory, skipped) = match outcome {
            PeerOutcome::Rate { pps, memory } => (Some(pps), Some(memory), None),
            PeerOutcome::Skipped(why) => (None, None, Some(why)),
        };
        let same = |row: &&PacketRow| {
            row.mode == Mode::Staging
                && (row.direction, row.size, row.queues) == (self.direction, self.size, 1)
        };
        let staging = ours.iter().find(same).map(PacketRow::pps);
        PeerRate {
            peer: self.peer,
            direction: self.direction,
            size: self.size,
            queues: 1,
            pps,
            memory,
            staging_ratio: staging.zip(pps).map(|(ours, pps)| ours / pps.max(1.0)),
            skipped,
        }
    }
}

/// Returns the columns of a rate; the table has it as a sentence.
pub(super) fn layout() -> Layout<PeerRate> {
    Layout::new()
        .field("peer", |row: &PeerRate| Value::json(&row.peer))
        .field("direction", |row| Value::json(&row.direction))
        .field("size", |row| row.size)
        .field("queues", |row| row.queues)
        .field("pps", |row| row.pps)
        .field("gbps", PeerRate::gbps)
        .field("memory", |row| row.memory)
        .field("staging_ratio", |row| row.staging_ratio)
        .field("skipped", |row| Value::if_some(row.skipped.clone()))
        .tail("", PeerRate::sentence)
}

impl PeerRate {
    fn gbps(&self) -> Option<f64> {
        self.pps.map(|pps| pps * f64::from(self.size) * 8.0 / 1e9)
    }

    fn sentence(&self) -> String {
        let name = format!("{} {} {:>6}", self.peer, self.direction, self.size);
        let rate = match (self.pps, self.gbps(), self.memory) {
            (Some(pps), Some(gbps), Some(memory)) => {
                format!("{:>9.1} kpps {gbps:>7.2} Gbit/s, {memory}", pps / 1e3)
            }
            _ => format!("skipped: {}", self.skipped.as_deref().unwrap_or_default()),
        };
        let ratio = self.staging_ratio.map(|ratio| format!("; staging / {} {ratio:.2}", self.peer));
        format!("{name:<22} {rate}{}", ratio.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_row_has_comparison_or_reason() {
        let row = PeerRate {
            peer: ForwardingPeer::Memif,
            direction: Direction::Tx,
            size: 64,
            queues: 1,
            pps: Some(4e7),
            memory: Some("huge pages"),
            staging_ratio: Some(1.25),
            skipped: None,
        };
        let line = layout().line(&row);
        assert!(line.starts_with("memif tx     64") && line.ends_with("memif 1.25"), "{line}");
        let json: serde_json::Value = serde_json::from_str(&layout().json(&row).unwrap()).unwrap();
        assert_eq!((&json["peer"], &json["pps"]), (&"memif".into(), &4e7.into()));
        assert_eq!(json["gbps"], 20.48);
        assert_eq!(json.get("skipped"), None);
        let row = PeerRate { pps: None, skipped: Some("no cores".to_owned()), ..row };
        assert!(layout().line(&row).contains("skipped: no cores"));
    }
}

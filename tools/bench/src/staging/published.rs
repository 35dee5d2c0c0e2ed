//! Published figures of staging grants, and the ratios to be reached.
//!
//! The figures are those of section 6 of the design document *Staging grants for network I/O
//! requests*, revision 4: a guest of Linux 4.11 on Xen, an E5-2630 v4 with 2.2 GHz, another host
//! behind a network of 100 Gbit/s.

use crate::params::Direction;
use crate::peers::ForwardingPeer;

/// Packets of at most this size in bytes are compared with the table of small packets, packets of at
/// least [`BULK`] bytes with the table of bulk transfers.
pub(super) const SMALL: u32 = 64;
/// Minimum size of super-packets: a bulk transfer consists of packets of 32 to 64 KiB.
pub(super) const BULK: u32 = 32_768;

/// Figures before and after, transmitted and received by the guest.
struct PublishedLine {
    queues: u32,
    tx: (f64, f64),
    rx: (f64, f64),
}

/// Bulk transfers in Gbit/s.
const BULK_TRANSFER: [PublishedLine; 4] = [
    PublishedLine { queues: 1, tx: (17.244, 38.189), rx: (6.000, 28.108) },
    PublishedLine { queues: 2, tx: (24.023, 54.783), rx: (9.416, 40.624) },
    PublishedLine { queues: 3, tx: (29.148, 85.777), rx: (17.196, 54.118) },
    PublishedLine { queues: 4, tx: (39.782, 99.530), rx: (18.502, 46.859) },
];

/// Small packets in Mpps.
const SMALL_PACKETS: [PublishedLine; 3] = [
    PublishedLine { queues: 1, tx: (0.684, 2.49), rx: (0.439, 2.96) },
    PublishedLine { queues: 2, tx: (0.953, 4.74), rx: (0.755, 5.07) },
    PublishedLine { queues: 4, tx: (1.890, 8.80), rx: (1.390, 9.92) },
];

/// Returns the published figures before and after, if the document has them.
pub(super) fn figures(size: u32, queues: u32, direction: Direction) -> Option<(f64, f64)> {
    let table: &[PublishedLine] = match size {
        ..=SMALL => &SMALL_PACKETS,
        BULK.. => &BULK_TRANSFER,
        _ => return None,
    };
    let line = table.iter().find(|line| line.queues == queues)?;
    Some(match direction {
        Direction::Tx => line.tx,
        Direction::Rx => line.rx,
    })
}

/// Returns the published ratio of after to before.
pub(super) fn ratio(size: u32, queues: u32, direction: Direction) -> Option<f64> {
    figures(size, queues, direction).map(|(before, after)| after / before)
}

/// Returns the published ratios for a row that was measured on Xen: those of staging to copies, with one queue.
pub(crate) fn text(experiment: &str, setup: &str) -> Option<String> {
    let size = match experiment {
        "bulk" => BULK,
        "one-slot" => SMALL,
        _ => return None,
    };
    if !setup.starts_with("staging") {
        return None;
    }
    let [tx, rx] = [Direction::Tx, Direction::Rx].map(|direction| ratio(size, 1, direction));
    Some(format!("throughput {:.2} sent, {:.2} received", tx?, rx?))
}

/// Returns the ratio to a peer that must be reached.
pub(super) fn wanted(peer: ForwardingPeer, size: u32) -> Option<f64> {
    match (peer, size) {
        (_, 64) => Some(1.2),
        (ForwardingPeer::Memif, 1500) => Some(1.0),
        _ => None,
    }
}

/// Bytes of a packet on the wire that are not counted here: preamble, start of frame, check sequence,
/// and inter-frame gap (section 5 of the design document).
const ON_THE_WIRE: u32 = 7 + 1 + 4 + 12;

/// Returns the packet rate of a saturated link.
pub(super) fn line_rate(gigabits: f64, size: u32) -> f64 {
    gigabits * 1e9 / (f64::from(size + ON_THE_WIRE) * 8.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_equal_published_tables() {
        for (size, direction, expected) in [
            (64, Direction::Tx, 3.64),
            (64, Direction::Rx, 6.74),
            (65_000, Direction::Tx, 2.21),
            (65_000, Direction::Rx, 4.68),
        ] {
            let found = ratio(size, 1, direction).unwrap();
            assert!((found - expected).abs() < 0.01, "{size} {direction}: {found}");
        }
        assert_eq!(ratio(1500, 1, Direction::Tx), None);
        assert_eq!(ratio(64, 3, Direction::Tx), None);
    }

    #[test]
    fn line_rates_equal_published_glossary() {
        // The published rates count the check sequence: 64 bytes with it are 60 without.
        for (gigabits, size, expected) in
            [(10.0, 60, 14.88e6), (40.0, 124, 33.78e6), (100.0, 1496, 8.22e6)]
        {
            let found = line_rate(gigabits, size);
            assert!((found / expected - 1.0).abs() < 0.002, "{size}: {found}");
        }
    }
}

//! What was published, and what is asked for.
//!
//! The figures are those of section 6 of the design document *Staging grants for network I/O
//! requests*, revision 4: a guest of Linux 4.11 on Xen, an E5-2630 v4 with 2.2 GHz, another host
//! behind a network of 100 Gbit/s.

use crate::args::Direction;
use crate::peers::Peer;

/// Packets of this size or less are compared with the table of small packets, others of at least
/// [`BULK`] octets with the table of bulk transfers.
pub(super) const SMALL: u32 = 64;
/// Super-packets: a bulk transfer is made of packets of 32 to 64 KiB.
pub(super) const BULK: u32 = 32_768;

/// Before and after, transmitted and received by the guest.
struct Line {
    queues: u32,
    tx: (f64, f64),
    rx: (f64, f64),
}

/// Gbit/s.
const BULK_TRANSFER: [Line; 4] = [
    Line { queues: 1, tx: (17.244, 38.189), rx: (6.000, 28.108) },
    Line { queues: 2, tx: (24.023, 54.783), rx: (9.416, 40.624) },
    Line { queues: 3, tx: (29.148, 85.777), rx: (17.196, 54.118) },
    Line { queues: 4, tx: (39.782, 99.530), rx: (18.502, 46.859) },
];

/// Mpps.
const SMALL_PACKETS: [Line; 3] = [
    Line { queues: 1, tx: (0.684, 2.49), rx: (0.439, 2.96) },
    Line { queues: 2, tx: (0.953, 4.74), rx: (0.755, 5.07) },
    Line { queues: 4, tx: (1.890, 8.80), rx: (1.390, 9.92) },
];

/// Before and after.
pub(super) fn figures(size: u32, queues: u32, direction: Direction) -> Option<(f64, f64)> {
    let table: &[Line] = match size {
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

/// How many times as fast it was.
pub(super) fn ratio(size: u32, queues: u32, direction: Direction) -> Option<f64> {
    figures(size, queues, direction).map(|(before, after)| after / before)
}

/// How many times as fast as a peer it shall be.
pub(super) fn wanted(peer: Peer, size: u32) -> Option<f64> {
    match (peer, size) {
        (_, 64) => Some(1.2),
        (Peer::Memif, 1500) => Some(1.0),
        _ => None,
    }
}

/// Octets that a packet takes on the wire beside those that are counted here: preamble, start of
/// frame, check sequence, the gap between frames (section 5 of the design document).
const ON_THE_WIRE: u32 = 7 + 1 + 4 + 12;

/// Packets a second that a link carries.
pub(super) fn line_rate(gigabits: f64, size: u32) -> f64 {
    gigabits * 1e9 / (f64::from(size + ON_THE_WIRE) * 8.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_those_of_the_tables() {
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
    fn line_rates_are_those_of_the_glossary() {
        // There the check sequence is counted: 64 octets with it are 60 without.
        for (gigabits, size, expected) in
            [(10.0, 60, 14.88e6), (40.0, 124, 33.78e6), (100.0, 1496, 8.22e6)]
        {
            let found = line_rate(gigabits, size);
            assert!((found / expected - 1.0).abs() < 0.002, "{size}: {found}");
        }
    }
}

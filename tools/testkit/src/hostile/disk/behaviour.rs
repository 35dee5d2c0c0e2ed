//! Behaviours of a neighbour towards the backend of its disk.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Behaviour of the neighbour of the disk rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
pub enum DiskBehaviour {
    /// The same as the victim, to a disk of its own
    Honest,
    /// No neighbour
    Absent,
    /// Segments that end outside their page, in slots and in lists
    SegmentsOutside,
    /// Segments whose first sector is behind their last
    SectorsReversed,
    /// Sectors beyond the disk
    BeyondEnd,
    /// Sector numbers that overflow when anything is added or multiplied
    SectorOverflow,
    /// Lists of segments that change while the backend reads them
    ChangingLists,
    /// Requests of 65535 segments, and of 255 in a slot
    Segments65535,
    /// Undefined operations
    UnknownOperations,
    /// Grant references of other guests
    ForeignGrefs,
    /// Requests of random bytes
    Nonsense,
    /// Events without a request
    EventStorm,
    /// A producer index beyond the ring, and back as soon as the device was closed
    ProducerOverflow,
    /// Connecting and disconnecting
    Reattach,
    /// Other pages in every request, more than blkback keeps mapped, which is allowed
    FreshGrefs,
}

impl DiskBehaviour {
    /// Prefix that distinguishes the names from those of packet rows.
    const PREFIX: &str = "disk-";

    /// Finds the behaviour of that name.
    pub fn parse(name: &str) -> Option<DiskBehaviour> {
        let rest = name.strip_prefix(DiskBehaviour::PREFIX)?;
        DiskBehaviour::from_str(rest, false).ok()
    }

    /// Returns the name used on the command line and in the table.
    pub fn name(self) -> String {
        let value = self.to_possible_value();
        let rest = value.map_or_else(String::new, |value| value.get_name().to_owned());
        format!("{}{rest}", DiskBehaviour::PREFIX)
    }

    /// Returns the explanation that `--list` prints.
    pub fn meaning(self) -> String {
        let value = self.to_possible_value();
        value.and_then(|v| v.get_help().map(ToString::to_string)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_behaviour_parses_from_its_name_and_has_a_meaning() {
        for row in DiskBehaviour::value_variants() {
            assert_eq!(DiskBehaviour::parse(&row.name()), Some(*row));
            assert!(!row.meaning().is_empty(), "{row:?}");
        }
        assert_eq!(DiskBehaviour::parse("disk-segments65535"), Some(DiskBehaviour::Segments65535));
        assert_eq!(DiskBehaviour::parse("honest"), None);
    }
}

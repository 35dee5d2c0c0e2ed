//! What a neighbour can do to whom serves its disk.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What the neighbour does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
pub enum DiskBehaviour {
    /// The same as the victim, to a disk of its own
    Honest,
    /// There is none
    Absent,
    /// Segments that end outside their page, in slots and in lists
    SegmentsOutside,
    /// Segments whose first sector is behind their last
    SectorsReversed,
    /// Sectors beyond the disk
    BeyondEnd,
    /// Sector numbers that overflow when anything is added or multiplied
    SectorOverflow,
    /// Lists of segments that change while they are read
    ChangingLists,
    /// Requests of 65535 segments, and of 255 in a slot
    Segments65535,
    /// Operations that there are not
    UnknownOperations,
    /// Pages of other guests
    ForeignGrefs,
    /// Requests of random bytes
    Nonsense,
    /// Events that announce nothing
    EventStorm,
    /// A producer index beyond the ring, and back as soon as the device was closed
    ProducerOverflow,
    /// Connecting and disconnecting
    Reattach,
    /// Other pages in every request, more than are kept mapped, which is allowed
    FreshGrefs,
}

impl DiskBehaviour {
    /// What its name begins with, to tell it from what is done to networks.
    const PREFIX: &str = "disk-";

    /// The behaviour of that name.
    pub(in super::super) fn parse(name: &str) -> Option<DiskBehaviour> {
        let rest = name.strip_prefix(DiskBehaviour::PREFIX)?;
        DiskBehaviour::from_str(rest, false).ok()
    }

    /// Its name on the command line and in the table.
    pub(in super::super) fn name(self) -> String {
        let value = self.to_possible_value();
        let rest = value.map_or_else(String::new, |value| value.get_name().to_owned());
        format!("{}{rest}", DiskBehaviour::PREFIX)
    }

    /// What it means.
    pub(in super::super) fn meaning(self) -> String {
        let value = self.to_possible_value();
        value.and_then(|v| v.get_help().map(ToString::to_string)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_behaviour_has_a_name_that_leads_to_it_and_a_meaning() {
        for row in DiskBehaviour::value_variants() {
            assert_eq!(DiskBehaviour::parse(&row.name()), Some(*row));
            assert!(!row.meaning().is_empty(), "{row:?}");
        }
        assert_eq!(DiskBehaviour::parse("disk-segments65535"), Some(DiskBehaviour::Segments65535));
        assert_eq!(DiskBehaviour::parse("honest"), None);
    }
}

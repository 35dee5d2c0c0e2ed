//! Behaviours of a neighbour towards the backend of its network interface.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::disk::behaviour::DiskBehaviour;

/// Behaviour of a neighbour, on a network or on a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NeighbourBehaviour {
    /// Behaviour on a network.
    Packets(Behaviour),
    /// Behaviour on a disk.
    Disks(DiskBehaviour),
}

impl NeighbourBehaviour {
    /// Finds the row of that name.
    ///
    /// # Errors
    ///
    /// Returns a message for the user if there is no such row.
    pub fn parse(name: &str) -> Result<NeighbourBehaviour, String> {
        let packets = || Behaviour::from_str(name, false).ok().map(NeighbourBehaviour::Packets);
        let found = DiskBehaviour::parse(name).map(NeighbourBehaviour::Disks).or_else(packets);
        found.ok_or_else(|| "there is no such behaviour; --list names all there are".to_owned())
    }

    pub fn packets(self) -> Option<Behaviour> {
        if let NeighbourBehaviour::Packets(behaviour) = self { Some(behaviour) } else { None }
    }

    pub fn disks(self) -> Option<DiskBehaviour> {
        if let NeighbourBehaviour::Disks(behaviour) = self { Some(behaviour) } else { None }
    }
}

/// Behaviour of the neighbour of the packet rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Behaviour {
    /// The same as the victim, to the same port
    Honest,
    /// No neighbour
    Absent,
    /// Packets smaller than their fragments, shorter than a header, across a page's end
    BadSizes,
    /// Packets of 19 slots, one more than a backend takes
    Slots19,
    /// Packets in pages that are not granted
    BadGrefs,
    /// A full ring of extra infos for each packet
    ExtraChains,
    /// Packets of 18 slots of which 17 are empty
    ZeroFragments,
    /// Packets of the maximum length, which is allowed
    LargePackets,
    /// Grants revoked and issued again while a backend reads the packets in them
    Flipping,
    /// Packets to everybody
    Broadcast,
    /// Random source and destination addresses, new ones in every packet
    MadeUpAddresses,
    /// Events without a request
    EventStorm,
    /// Receive buffers posted, responses never consumed
    Deaf,
    /// Packets accepted for a moment, then none for a while; the victim sends to it as well
    Hoarder,
    /// A producer index beyond the ring, and back as soon as the device was closed
    ProducerOverflow,
    /// Connecting and disconnecting
    Reattach,
    /// Lists of pages to be staged that change while the backend reads them
    ChangingLists,
    /// Lists of 513, 65535 and more pages to be staged, or of none
    LongLists,
    /// Pages staged and taken out again, many such messages at a time
    StagingStorm,
    /// Pages removed from staging while packets in them are in flight
    StagingInFlight,
    /// One page in two lists of pages to be staged, and twice in one
    StagingTwice,
    /// Control messages without end, whose responses it never consumes
    ControlDeaf,
    /// Many writes of states to the store, valid and invalid
    StateFlood,
    /// Requests to the hub that it does not know
    HubFlood,
    /// Messages that make the hub close the connection; a launcher brings the guest back
    Rejoin,
}

impl Behaviour {
    /// Returns the name used on the command line and in the table.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Returns `true` if the behaviour concerns pages that stay mapped. Such a row uses mode `staging`
    /// for the neighbour, regardless of the victim's mode.
    pub fn needs_staging(self) -> bool {
        matches!(
            self,
            Behaviour::ChangingLists
                | Behaviour::LongLists
                | Behaviour::StagingStorm
                | Behaviour::StagingInFlight
                | Behaviour::StagingTwice
                | Behaviour::ControlDeaf
        )
    }

    /// Returns the explanation that `--list` prints.
    pub fn meaning(self) -> String {
        let value = self.to_possible_value();
        value.and_then(|v| v.get_help().map(ToString::to_string)).unwrap_or_default()
    }
}

//! Socket owners: the 64-bit tag that connects an event of the host with the flow it concerns.

/// Kinds of flows and listeners that own a socket.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum OwnerKind {
    /// Carries a TCP connection.
    Tcp = 1,
    /// Carries datagrams of one UDP association.
    Udp = 2,
    /// Carries echo requests of one flow.
    Icmp = 3,
    /// Accepts TCP connections from outside.
    TcpListener = 4,
    /// Receives datagrams from outside.
    UdpListener = 5,
    /// Sends queries to name servers.
    Dns = 6,
    /// Receives notifications of changes of the host's own addresses.
    Addresses = 7,
    /// Carries a connection between two sockets: that of the server's side.
    Relay = 8,
    /// Receives datagrams at the guest's loopback.
    RelayListener = 9,
    /// Carries the datagrams of one client of a [`RelayListener`](Self::RelayListener).
    RelayClient = 10,
    /// Receives and sends datagrams of a multicast group.
    MulticastGroup = 11,
    /// Carries questions to multicast groups, and the answers.
    MulticastQuestion = 12,
    /// Carries a connection between two sockets: that of the client's side. It has the table of [`Relay`](Self::Relay).
    RelayOuter = 13,
    /// File of the thread that drives the engine ([`RunnerFile`]).
    Runner = 14,
}

impl OwnerKind {
    const ALL: [OwnerKind; 14] = [
        OwnerKind::Tcp,
        OwnerKind::Udp,
        OwnerKind::Icmp,
        OwnerKind::TcpListener,
        OwnerKind::UdpListener,
        OwnerKind::Dns,
        OwnerKind::Addresses,
        OwnerKind::Relay,
        OwnerKind::RelayListener,
        OwnerKind::RelayClient,
        OwnerKind::MulticastGroup,
        OwnerKind::MulticastQuestion,
        OwnerKind::RelayOuter,
        OwnerKind::Runner,
    ];
}

/// Files of a thread that drives an engine, besides the sockets of its host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum RunnerFile {
    /// Readable when frames of the guest wait.
    Link = 0,
    /// Ends the runner, or interrupts it.
    Stop = 1,
    /// Raised when other runners hand something over.
    Team = 2,
}

impl RunnerFile {
    /// Returns the owner of the file.
    pub fn owner(self) -> Owner {
        Owner { kind: OwnerKind::Runner, index: u32::from(self as u8), generation: 0 }
    }
}

/// Owner of a socket: an entry of a table, and its generation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Owner {
    /// Use of the socket; each kind has a table of its own.
    pub kind: OwnerKind,
    pub index: u32,
    /// Generation of the entry, counted modulo 2^24.
    pub generation: u32,
}

/// Width of a generation in the tag, in bits.
const GENERATION_BITS: u32 = 24;

impl Owner {
    /// Only owner of the kind [`OwnerKind::Addresses`].
    pub const ADDRESSES: Owner = Owner { kind: OwnerKind::Addresses, index: 0, generation: 0 };

    /// Mask of the generation bits that an [`Owner`] keeps.
    pub const GENERATION_MASK: u32 = (1 << GENERATION_BITS) - 1;

    /// Encodes the owner as the tag of an event.
    pub fn to_word(self) -> u64 {
        let kind = u64::from(self.kind as u8) << 56;
        kind | u64::from(self.generation & Self::GENERATION_MASK) << 32 | u64::from(self.index)
    }

    /// Decodes the owner of an event.
    pub fn from_word(word: u64) -> Option<Owner> {
        let [kind, g2, g1, g0, index @ ..] = word.to_be_bytes();
        let kind = OwnerKind::ALL.into_iter().find(|&known| known as u8 == kind)?;
        let generation = u32::from_be_bytes([0, g2, g1, g0]);
        Some(Owner { kind, index: u32::from_be_bytes(index), generation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_encoded_and_decoded_is_unchanged() {
        for kind in OwnerKind::ALL {
            let owner = Owner { kind, index: u32::MAX - 3, generation: Owner::GENERATION_MASK - 1 };
            assert_eq!(Owner::from_word(owner.to_word()), Some(owner));
        }
        assert_eq!(Owner::from_word(0), None);
        assert_eq!(Owner::from_word(u64::MAX), None);
    }
}

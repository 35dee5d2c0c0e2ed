//! Whose a socket is.

/// What a socket is for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum OwnerKind {
    /// A TCP conversation.
    Tcp = 1,
    /// Datagrams of one conversation.
    Udp = 2,
    /// Echo requests.
    Icmp = 3,
    /// Waits for TCP connections from outside.
    TcpListener = 4,
    /// Waits for datagrams from outside.
    UdpListener = 5,
    /// Names are looked up by it.
    Dns = 6,
    /// Notifications of changes of the host's own addresses.
    Addresses = 7,
}

impl OwnerKind {
    const ALL: [OwnerKind; 7] = [
        OwnerKind::Tcp,
        OwnerKind::Udp,
        OwnerKind::Icmp,
        OwnerKind::TcpListener,
        OwnerKind::UdpListener,
        OwnerKind::Dns,
        OwnerKind::Addresses,
    ];
}

/// Whose a socket is: the place in a table, and which of its successive owners.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Owner {
    /// What the socket is for; each kind has a table of its own.
    pub kind: OwnerKind,
    /// The place.
    pub index: u32,
    /// Counts the owners of this place; 24 bits.
    pub generation: u32,
}

const GENERATION_BITS: u32 = 24;

impl Owner {
    /// The only owner of the kind [`OwnerKind::Addresses`].
    pub const ADDRESSES: Owner = Owner { kind: OwnerKind::Addresses, index: 0, generation: 0 };

    /// The first 24 bits of a generation: what an [`Owner`] keeps of it.
    pub const GENERATION_MASK: u32 = (1 << GENERATION_BITS) - 1;

    /// As the host's events carry it.
    pub fn to_word(self) -> u64 {
        let kind = u64::from(self.kind as u8) << 56;
        kind | u64::from(self.generation & Self::GENERATION_MASK) << 32 | u64::from(self.index)
    }

    /// The owner of an event.
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
    fn owners_survive_their_way_through_an_event() {
        for kind in OwnerKind::ALL {
            let owner = Owner { kind, index: u32::MAX - 3, generation: Owner::GENERATION_MASK - 1 };
            assert_eq!(Owner::from_word(owner.to_word()), Some(owner));
        }
        assert_eq!(Owner::from_word(0), None);
        assert_eq!(Owner::from_word(u64::MAX), None);
    }
}

//! Between netif's checksum bits and offload metadata.
//!
//! # Theory of operation
//!
//! netif says of a checksum only two things: that it is *blank*, and that the data is *validated*
//! (`netif.h`; the two bits trade places between the rings, which is the ring's business, not ours).
//! There is no start and no offset: the receiver finds them in the headers, which it can do for TCP
//! and UDP over IPv4 and IPv6. So:
//!
//! * coming in, [`from_netif`] derives a [`Checksum::Partial`] from [`Layers`], or refuses;
//! * going out, [`to_netif`] turns metadata into bits, or refuses if a bit cannot say it; the sender
//!   then finishes the checksum itself.
//!
//! In a blank field Linux guests leave the pseudo header's sum, but nothing makes a hostile or an old
//! one do so. [`reset_pseudo_header`] puts the right sum there; a backend that hands the packet to
//! anybody else should call it, or the receiver gets a wrong checksum with a "verified" mark on it.

use crate::checksum::verify::{ChecksumError, pseudo_header_sum};
use crate::meta::{Checksum, ChecksumPlace};
use crate::packet::{Layers, Transport};

/// netif's two checksum bits, whichever ring they come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NetifChecksum {
    /// The checksum field is blank (holds the pseudo header's sum).
    pub blank: bool,
    /// The data is known to be right.
    pub validated: bool,
}

/// Why a blank checksum cannot be derived from, or told by, netif's bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlankError {
    /// Only TCP and UDP have a blank checksum in netif.
    #[error("checksum blank on a packet that is neither TCP nor UDP")]
    NotTcpOrUdp,
    /// A checksum over parts of a datagram cannot be finished in one part.
    #[error("checksum blank on a fragment")]
    Fragment,
    /// A finished checksum would run to the end of the packet, UDP's own ends before it.
    #[error("checksum blank on a UDP datagram of {udp} octets in an IP payload of {payload}")]
    UdpSurplus {
        /// UDP length.
        udp: u16,
        /// Octets of IP payload.
        payload: u32,
    },
    /// The blank checksum is not where the receiver would look for it (a tunnelled packet's, say).
    #[error("blank checksum at {offered:?}, a netif receiver would take it to be at {found:?}")]
    Elsewhere {
        /// Place in the metadata.
        offered: ChecksumPlace,
        /// Place that the headers give.
        found: ChecksumPlace,
    },
}

/// The place of the checksum that a blank bit stands for.
///
/// # Errors
/// [`BlankError`] if the packet is not a whole TCP or UDP packet, or its lengths do not fit.
pub fn derive_place(layers: &Layers) -> Result<ChecksumPlace, BlankError> {
    if layers.is_fragment() {
        return Err(BlankError::Fragment);
    }
    let place = layers.checksum_place().ok_or(BlankError::NotTcpOrUdp)?;
    if let Transport::Udp(udp) = layers.transport() {
        let payload = layers.network_end() - u32::from(udp.offset);
        if u32::from(udp.length) != payload {
            return Err(BlankError::UdpSurplus { udp: udp.length, payload });
        }
    }
    Ok(place)
}

/// Metadata for netif's bits. Blank implies validated, so it decides when both are set.
///
/// # Errors
/// [`BlankError`] if `blank` is set on a packet for which it has no meaning.
pub fn from_netif(bits: NetifChecksum, layers: &Layers) -> Result<Checksum, BlankError> {
    match bits {
        NetifChecksum { blank: true, .. } => derive_place(layers).map(Checksum::from),
        NetifChecksum { validated: true, .. } => Ok(Checksum::Verified),
        _ => Ok(Checksum::None),
    }
}

/// netif's bits for metadata. A blank checksum sets both, as Linux does: the data never left memory.
///
/// # Errors
/// [`BlankError`] if the bit would be understood differently; finish the checksum first
/// ([`complete_scattered`](crate::checksum::complete_scattered)).
pub fn to_netif(checksum: Checksum, layers: &Layers) -> Result<NetifChecksum, BlankError> {
    if let Some(offered) = checksum.place() {
        let found = derive_place(layers)?;
        if offered != found {
            return Err(BlankError::Elsewhere { offered, found });
        }
        return Ok(NetifChecksum { blank: true, validated: true });
    }
    Ok(NetifChecksum { blank: false, validated: checksum == Checksum::Verified })
}

/// Why the pseudo header's sum could not be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResetError {
    /// There is no place for it.
    #[error(transparent)]
    Blank(#[from] BlankError),
    /// It cannot be computed.
    #[error(transparent)]
    Checksum(#[from] ChecksumError),
}

/// Stores the right pseudo header sum in the blank checksum field of `headers`, whatever the sender
/// had put there, and returns the field's place.
///
/// # Errors
/// [`ResetError`] if the packet has no such field, or `headers` are not those of `layers`.
pub fn reset_pseudo_header(
    headers: &mut [u8],
    layers: &Layers,
) -> Result<ChecksumPlace, ResetError> {
    let place = derive_place(layers)?;
    let sum = pseudo_header_sum(headers, layers)?;
    let len = headers.len();
    let field = headers
        .get_mut(place.field()..place.field_end())
        .ok_or(ChecksumError::ForeignHeaders { needed: place.field_end(), headers: len })?;
    field.copy_from_slice(&sum.to_be_bytes());
    Ok(place)
}

#[cfg(test)]
mod tests;

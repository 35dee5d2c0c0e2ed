//! Translation between netif's checksum bits and offload metadata.
//!
//! # Theory of operation
//!
//! netif describes a checksum with two bits only: it is *blank*, or the data is *validated* (`netif.h`).
//! The two bits swap between the rings; the ring's parser handles that. netif gives no start and no offset.
//! The receiver derives them from the headers, which works for TCP and UDP over IPv4 and IPv6. So:
//!
//! * On input, [`from_netif`] derives a [`Checksum::Partial`] from [`Layers`], or refuses.
//! * On output, [`to_netif`] turns metadata into bits, or refuses if no bit expresses it. The sender then
//!   completes the checksum itself.
//!
//! Linux guests store the pseudo header's sum in a blank field, but a hostile or old guest may not.
//! [`reset_pseudo_header`] stores the right sum. A backend that forwards the packet should call it.
//! Otherwise the receiver gets a wrong checksum marked as verified.

use crate::checksum::verify::{ChecksumError, pseudo_header_sum};
use crate::meta::{Checksum, ChecksumPlace};
use crate::packet::{Layers, Transport};

/// Checksum bits of netif, independent of the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NetifChecksum {
    /// The checksum field is blank: it holds the pseudo header's sum.
    pub blank: bool,
    /// The data is known to be correct.
    pub validated: bool,
}

/// Reasons for which netif's bit cannot express a blank checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlankError {
    /// Packet other than TCP and UDP, the only ones with a blank checksum in netif.
    #[error("checksum blank on a packet that is neither TCP nor UDP")]
    NotTcpOrUdp,
    /// Fragment: its checksum spans the whole datagram.
    #[error("checksum blank on a fragment")]
    Fragment,
    /// UDP datagram shorter than the IP payload. A receiver would sum to the end of the packet, but UDP's
    /// own checksum ends before it.
    #[error("checksum blank on a UDP datagram of {udp} bytes in an IP payload of {payload}")]
    UdpSurplus {
        /// Length field of the UDP header.
        udp: u16,
        /// Bytes of the IP payload.
        payload: u32,
    },
    /// Checksum at another place than the receiver would derive, for example in a tunnelled packet.
    #[error("blank checksum at {offered:?}, a netif receiver would take it to be at {found:?}")]
    Elsewhere {
        /// Place in the metadata.
        offered: ChecksumPlace,
        /// Place that the headers give.
        found: ChecksumPlace,
    },
}

/// Derives the place of the checksum that a blank bit means.
///
/// # Errors
/// Returns [`BlankError`] if the packet is no whole TCP or UDP packet, or its lengths disagree.
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

/// Translates netif's bits to metadata. Blank implies validated, so it takes precedence.
///
/// # Errors
/// Returns [`BlankError`] if `blank` is set on a packet for which it has no meaning.
pub fn from_netif(bits: NetifChecksum, layers: &Layers) -> Result<Checksum, BlankError> {
    match bits {
        NetifChecksum { blank: true, .. } => derive_place(layers).map(Checksum::from),
        NetifChecksum { validated: true, .. } => Ok(Checksum::Verified),
        _ => Ok(Checksum::None),
    }
}

/// Translates metadata to netif's bits. A blank checksum sets both, as in Linux: the data never left
/// memory.
///
/// # Errors
/// Returns [`BlankError`] if the receiver would derive another place. Complete the checksum first
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

/// Reasons for which the pseudo header's sum cannot be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResetError {
    /// Packet without a blank checksum field.
    #[error(transparent)]
    Blank(#[from] BlankError),
    /// Packet without a computable pseudo header.
    #[error(transparent)]
    Checksum(#[from] ChecksumError),
}

/// Stores the right pseudo header sum in the blank checksum field of `headers`, replacing the sender's
/// value. Returns the field's place.
///
/// # Errors
/// Returns [`ResetError`] if the packet has no such field, or `headers` are not those of `layers`.
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

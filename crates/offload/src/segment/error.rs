//! Why a super-packet cannot be split.

use super::HEADER_MAX;
use crate::accept::Refusal;
use crate::octets::OctetsMissing;

/// Why a super-packet cannot be split, or its next segment not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// The frame is an ordinary one.
    #[error("the frame has no segmentation order; send it as it is")]
    NoOrder,
    /// The metadata does not fit the headers.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The headers of a segment are longer than [`HEADER_MAX`].
    #[error("segments with {needed} octets of headers, the limit is {HEADER_MAX}")]
    HeadersTooLong {
        /// Octets needed.
        needed: usize,
    },
    /// Headers and `Layers` do not belong together.
    #[error("headers of {given} octets are not those of the parsed frame, {needed} are needed")]
    ForeignHeaders {
        /// Octets needed.
        needed: usize,
        /// Octets given.
        given: usize,
    },
    /// The UDP header's length is not that of the IP payload.
    #[error("UDP super-packet of {udp} octets in an IP payload of {payload}")]
    UdpLength {
        /// UDP length.
        udp: u16,
        /// Octets of IP payload.
        payload: u32,
    },
    /// Fragments of one IPv6 datagram carry an identification that the datagram did not have.
    #[error("IPv6 fragments need an identification; give one with `with_fragment_id`")]
    NoFragmentId,
    /// A fragment's checksum cannot be left blank, since it spans all of them.
    #[error("fragments cannot have a blank checksum; use `next_complete`")]
    BlankFragment,
    /// The storage for a segment's headers is too short.
    #[error("a segment's headers have {needed} octets, there is room for {given}")]
    HeaderRoom {
        /// Octets needed.
        needed: usize,
        /// Octets given.
        given: usize,
    },
    /// The payload could not be summed.
    #[error(transparent)]
    Octets(#[from] OctetsMissing),
}

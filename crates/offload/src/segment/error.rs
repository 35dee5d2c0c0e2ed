//! Errors of the segmenter.

use super::HEADER_MAX;
use crate::accept::Refusal;
use crate::octets::BytesMissing;

/// Reasons for which a super-packet, or its next segment, cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// Ordinary frame without a segmentation request.
    #[error("the frame has no segmentation request; send it as it is")]
    NoOrder,
    /// Metadata that does not match the headers.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Segment headers longer than [`HEADER_MAX`].
    #[error("segments with {needed} bytes of headers, the limit is {HEADER_MAX}")]
    HeadersTooLong {
        /// Bytes that the headers need.
        needed: usize,
    },
    /// Headers of another frame than `Layers`.
    #[error("headers of {given} bytes are not those of the parsed frame, {needed} are needed")]
    ForeignHeaders {
        /// Bytes that the frame's headers need.
        needed: usize,
        /// Bytes in the slice.
        given: usize,
    },
    /// UDP length that differs from the IP payload's.
    #[error("UDP super-packet of {udp} bytes in an IP payload of {payload}")]
    UdpLength {
        /// Length field of the UDP header.
        udp: u16,
        /// Bytes of the IP payload.
        payload: u32,
    },
    /// Missing identification of an IPv6 datagram's fragments; the datagram has none.
    #[error("IPv6 fragments need an identification; give one with `with_fragment_id`")]
    NoFragmentId,
    /// Blank checksum on a fragment, which is impossible: the checksum spans all fragments.
    #[error("fragments cannot have a blank checksum; use `next_complete`")]
    BlankFragment,
    /// Storage too short for a segment's headers.
    #[error("a segment's headers have {needed} bytes, there is room for {given}")]
    HeaderRoom {
        /// Bytes that the headers need.
        needed: usize,
        /// Bytes of the storage.
        given: usize,
    },
    /// Payload that could not be summed.
    #[error(transparent)]
    Octets(#[from] BytesMissing),
}

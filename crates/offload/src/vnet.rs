//! Virtio-net header in front of each frame of a TAP, a vhost ring or a virtqueue.
//!
//! All fields are little endian (virtio 1.x; on a TAP after `TUNSETVNETLE`, or on a little-endian host).
//! The header has two forms: 10 bytes (legacy), and 12 with `num_buffers` (virtio 1.x, or mergeable
//! buffers).
//!
//! [`VnetHeader`] holds unvalidated fields; decoding never fails. [`VnetHeader::offered`] translates
//! them, and [`VnetHeader::accept`] also validates them against the frame. Only accepted metadata may be
//! acted on. `hdr_len` is a hint. It is ignored on input, because kernels store the length of the linear
//! part there. On output it is the true length of the headers.

use crate::accept::{self, Refusal};
use crate::meta::{Checksum, Gso, GsoKind, OffloadMeta};
use crate::packet::{Layers, ParseError};

/// Length of the legacy header in bytes.
pub const LEGACY_LEN: usize = 10;
/// Length of the virtio 1.x header in bytes.
pub const MODERN_LEN: usize = 12;

/// Bits of [`VnetHeader::flags`]; unknown ones are ignored.
pub mod flags {
    /// The checksum is blank; `csum_start` and `csum_offset` are valid.
    pub const NEEDS_CSUM: u8 = 1;
    /// The checksum was verified.
    pub const DATA_VALID: u8 = 2;
}

/// Values of the field [`VnetHeader::gso_type`].
pub mod gso_type {
    /// Frame without a segmentation request.
    pub const NONE: u8 = 0;
    /// TCP segmentation over IPv4.
    pub const TCPV4: u8 = 1;
    /// UDP fragmentation (UFO), deprecated.
    pub const UDP: u8 = 3;
    /// TCP segmentation over IPv6.
    pub const TCPV6: u8 = 4;
    /// UDP segmentation (USO), IPv4 and IPv6.
    pub const UDP_L4: u8 = 5;
    /// Bit: the packet is inside a UDP tunnel over IPv4.
    pub const UDP_TUNNEL_IPV4: u8 = 0x20;
    /// Bit: the packet is inside a UDP tunnel over IPv6.
    pub const UDP_TUNNEL_IPV6: u8 = 0x40;
    /// Bit: TCP with CWR set.
    pub const ECN: u8 = 0x80;
}

/// Unvalidated virtio-net header. Field names are those of the specification.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VnetHeader {
    /// Bits of the module [`flags`].
    pub flags: u8,
    /// Value of the module [`gso_type`].
    pub gso_type: u8,
    /// Length of all headers in bytes, only a hint.
    pub hdr_len: u16,
    /// Payload bytes of each segment.
    pub gso_size: u16,
    /// First summed byte, from the start of the frame.
    pub csum_start: u16,
    /// Bytes from `csum_start` to the checksum field.
    pub csum_offset: u16,
    /// Receive buffers of the frame, in the 12-byte form only. A device writes at least 1 into a guest's
    /// receive buffer; everywhere else it is 0.
    pub num_buffers: u16,
}

/// Reasons for which a frame with a virtio-net header is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VnetError {
    /// Segmentation type that virtio does not define.
    #[error("unknown segmentation type {gso_type:#04x}")]
    UnknownGso {
        /// Type byte of the header.
        gso_type: u8,
    },
    /// Segmentation inside a UDP tunnel, which Ringfence never offers.
    #[error("segmentation type {gso_type:#04x} names a tunnel, which was not negotiated")]
    TunnelGso {
        /// Type byte of the header.
        gso_type: u8,
    },
    /// Offload request for a frame whose headers do not parse.
    #[error("offloads requested for a frame whose headers do not parse: {0}")]
    Parse(#[from] ParseError),
    /// Metadata that breaks a rule of [`accept`].
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// Reasons for which metadata has no virtio-net header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EmitError {
    /// Super-packet without a blank checksum, which virtio 1.x, 5.1.6.2 requires.
    #[error("super-packet without a blank checksum; pass the metadata through `accept` first")]
    GsoWithoutChecksum,
}

impl VnetHeader {
    /// Decodes the 10-byte form.
    #[must_use]
    pub fn from_legacy(bytes: &[u8; LEGACY_LEN]) -> Self {
        let [flags, gso_type, h0, h1, g0, g1, s0, s1, o0, o1] = *bytes;
        Self {
            flags,
            gso_type,
            hdr_len: u16::from_le_bytes([h0, h1]),
            gso_size: u16::from_le_bytes([g0, g1]),
            csum_start: u16::from_le_bytes([s0, s1]),
            csum_offset: u16::from_le_bytes([o0, o1]),
            num_buffers: 0,
        }
    }

    /// Decodes the 12-byte form.
    #[must_use]
    pub fn from_modern(bytes: &[u8; MODERN_LEN]) -> Self {
        let [legacy @ .., n0, n1] = *bytes;
        Self { num_buffers: u16::from_le_bytes([n0, n1]), ..Self::from_legacy(&legacy) }
    }

    /// Encodes the 10-byte form, which omits `num_buffers`.
    #[must_use]
    pub fn to_legacy(&self) -> [u8; LEGACY_LEN] {
        let [h0, h1] = self.hdr_len.to_le_bytes();
        let [g0, g1] = self.gso_size.to_le_bytes();
        let [s0, s1] = self.csum_start.to_le_bytes();
        let [o0, o1] = self.csum_offset.to_le_bytes();
        [self.flags, self.gso_type, h0, h1, g0, g1, s0, s1, o0, o1]
    }

    /// Encodes the 12-byte form.
    #[must_use]
    pub fn to_modern(&self) -> [u8; MODERN_LEN] {
        let [b0, b1, b2, b3, b4, b5, b6, b7, b8, b9] = self.to_legacy();
        let [n0, n1] = self.num_buffers.to_le_bytes();
        [b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, n0, n1]
    }

    /// Translates the header's request without validating it against the frame.
    ///
    /// A header with both `NEEDS_CSUM` and `DATA_VALID` requests a blank checksum. `DATA_VALID` is the
    /// sender's claim; a guest vouches only for its own data.
    ///
    /// # Errors
    /// Returns [`VnetError::UnknownGso`] or [`VnetError::TunnelGso`].
    pub fn offered(&self) -> Result<OffloadMeta, VnetError> {
        let checksum = if self.flags & flags::NEEDS_CSUM != 0 {
            Checksum::Partial { start: self.csum_start, offset: self.csum_offset }
        } else if self.flags & flags::DATA_VALID != 0 {
            Checksum::Verified
        } else {
            Checksum::None
        };
        Ok(OffloadMeta { checksum, gso: self.offered_gso()? })
    }

    fn offered_gso(&self) -> Result<Option<Gso>, VnetError> {
        let gso_type = self.gso_type;
        if gso_type & (gso_type::UDP_TUNNEL_IPV4 | gso_type::UDP_TUNNEL_IPV6) != 0 {
            return Err(VnetError::TunnelGso { gso_type });
        }
        let kind = match gso_type & !gso_type::ECN {
            gso_type::NONE if gso_type == gso_type::NONE => return Ok(None),
            gso_type::NONE => return Err(Refusal::EcnWithoutTcp.into()),
            gso_type::TCPV4 => GsoKind::TcpV4,
            gso_type::TCPV6 => GsoKind::TcpV6,
            gso_type::UDP_L4 => GsoKind::Udp,
            gso_type::UDP => GsoKind::UdpFragment,
            _ => return Err(VnetError::UnknownGso { gso_type }),
        };
        Ok(Some(Gso { kind, ecn: gso_type & gso_type::ECN != 0, size: self.gso_size }))
    }

    /// Translates the header's request and validates it against its frame. The module [`accept`] has the
    /// rules, and the one case that writes to `headers`.
    ///
    /// `headers` is the private copy of the frame's first bytes (after this header); `layers` is the result
    /// of [`Layers::parse`] on it. A frame without a request is accepted even if it did not parse, because a
    /// switch forwards it unchanged.
    ///
    /// # Errors
    /// Returns [`VnetError`]; the caller drops the frame and counts it.
    pub fn accept(
        &self,
        headers: &mut [u8],
        layers: &Result<Layers, ParseError>,
    ) -> Result<OffloadMeta, VnetError> {
        let offered = self.offered()?;
        if offered.is_finished() {
            return Ok(offered);
        }
        let layers = layers.as_ref().map_err(|error| *error)?;
        Ok(accept::accept(offered, headers, layers)?)
    }

    /// Builds the header for accepted metadata. `header_len` is [`Layers::header_len`], or 0 if unknown: it
    /// is a hint that only a segmenting receiver reads. `num_buffers` is 0.
    ///
    /// # Errors
    /// Returns [`EmitError::GsoWithoutChecksum`]. Accepted metadata never gives this error.
    pub fn for_frame(meta: OffloadMeta, header_len: u16) -> Result<Self, EmitError> {
        let mut header = match meta.checksum {
            Checksum::Partial { start, offset } => Self {
                flags: flags::NEEDS_CSUM,
                csum_start: start,
                csum_offset: offset,
                ..Self::default()
            },
            Checksum::Verified => Self { flags: flags::DATA_VALID, ..Self::default() },
            Checksum::None => Self::default(),
        };
        let Some(gso) = meta.gso else {
            return Ok(header);
        };
        if meta.checksum.place().is_none() {
            return Err(EmitError::GsoWithoutChecksum);
        }
        let kind = match gso.kind {
            GsoKind::TcpV4 => gso_type::TCPV4,
            GsoKind::TcpV6 => gso_type::TCPV6,
            GsoKind::Udp => gso_type::UDP_L4,
            GsoKind::UdpFragment => gso_type::UDP,
        };
        header.gso_type = if gso.ecn { kind | gso_type::ECN } else { kind };
        header.gso_size = gso.size;
        header.hdr_len = header_len;
        Ok(header)
    }
}

#[cfg(test)]
mod tests;

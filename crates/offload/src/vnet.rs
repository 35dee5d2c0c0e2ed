//! The virtio-net header in front of each frame of a TAP, a vhost ring or a virtqueue.
//!
//! Little endian throughout (virtio 1.x; on a TAP after `TUNSETVNETLE`, or on a little-endian host).
//! Two forms: 10 octets (legacy), and 12 with `num_buffers` (virtio 1.x, or mergeable buffers).
//!
//! [`VnetHeader`] is the header as it came: reading one never fails and means nothing yet.
//! [`VnetHeader::offered`] translates its numbers, and [`VnetHeader::accept`] also checks them against
//! the frame, after which the metadata may be acted on. `hdr_len` is a hint and ignored on the way in
//! (kernels put the linear part's length there); on the way out it is the headers' true length.

use crate::accept::{self, Refusal};
use crate::meta::{Checksum, Gso, GsoKind, OffloadMeta};
use crate::packet::{Layers, ParseError};

/// Octets of the legacy form.
pub const LEGACY_LEN: usize = 10;
/// Octets of the virtio 1.x form.
pub const MODERN_LEN: usize = 12;

/// Bits of [`VnetHeader::flags`]; unknown ones are ignored.
pub mod flags {
    /// The checksum is blank, `csum_start` and `csum_offset` count.
    pub const NEEDS_CSUM: u8 = 1;
    /// The checksum was verified.
    pub const DATA_VALID: u8 = 2;
}

/// Values of [`VnetHeader::gso_type`].
pub mod gso_type {
    /// No segmentation.
    pub const NONE: u8 = 0;
    /// TCP over IPv4.
    pub const TCPV4: u8 = 1;
    /// UDP fragmentation.
    pub const UDP: u8 = 3;
    /// TCP over IPv6.
    pub const TCPV6: u8 = 4;
    /// UDP segmentation.
    pub const UDP_L4: u8 = 5;
    /// Bit: the packet is inside a UDP tunnel over IPv4.
    pub const UDP_TUNNEL_IPV4: u8 = 0x20;
    /// Bit: the packet is inside a UDP tunnel over IPv6.
    pub const UDP_TUNNEL_IPV6: u8 = 0x40;
    /// Bit: TCP with CWR set.
    pub const ECN: u8 = 0x80;
}

/// A virtio-net header as it came, or as it goes out. Field names are the specification's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VnetHeader {
    /// See [`flags`].
    pub flags: u8,
    /// See [`gso_type`].
    pub gso_type: u8,
    /// Octets of all headers; a hint.
    pub hdr_len: u16,
    /// Payload octets of a segment.
    pub gso_size: u16,
    /// First octet summed, from the start of the frame.
    pub csum_start: u16,
    /// Octets from there to the checksum field.
    pub csum_offset: u16,
    /// Receive buffers the frame is spread over: the 12-octet form only. A device writes at least 1
    /// into a guest's receive buffer; everywhere else it is 0.
    pub num_buffers: u16,
}

/// Why a frame with a virtio-net header was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VnetError {
    /// Unknown segmentation type.
    #[error("unknown segmentation type {gso_type:#04x}")]
    UnknownGso {
        /// The type octet.
        gso_type: u8,
    },
    /// Segmentation inside a UDP tunnel, which is not offered to anybody.
    #[error("segmentation type {gso_type:#04x} names a tunnel, which was not negotiated")]
    TunnelGso {
        /// The type octet.
        gso_type: u8,
    },
    /// The header asks for something, but the frame's own headers do not parse.
    #[error("offloads requested for a frame whose headers do not parse: {0}")]
    Parse(#[from] ParseError),
    /// The numbers break a rule.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// Why metadata cannot be put into a virtio-net header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EmitError {
    /// A super-packet must leave with a blank checksum (virtio 1.x, 5.1.6.2).
    #[error("super-packet without a blank checksum; pass the metadata through `accept` first")]
    GsoWithoutChecksum,
}

impl VnetHeader {
    /// Reads the 10-octet form.
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

    /// Reads the 12-octet form.
    #[must_use]
    pub fn from_modern(bytes: &[u8; MODERN_LEN]) -> Self {
        let [legacy @ .., n0, n1] = *bytes;
        Self { num_buffers: u16::from_le_bytes([n0, n1]), ..Self::from_legacy(&legacy) }
    }

    /// Writes the 10-octet form; `num_buffers` has no place there.
    #[must_use]
    pub fn to_legacy(&self) -> [u8; LEGACY_LEN] {
        let [h0, h1] = self.hdr_len.to_le_bytes();
        let [g0, g1] = self.gso_size.to_le_bytes();
        let [s0, s1] = self.csum_start.to_le_bytes();
        let [o0, o1] = self.csum_offset.to_le_bytes();
        [self.flags, self.gso_type, h0, h1, g0, g1, s0, s1, o0, o1]
    }

    /// Writes the 12-octet form.
    #[must_use]
    pub fn to_modern(&self) -> [u8; MODERN_LEN] {
        let [b0, b1, b2, b3, b4, b5, b6, b7, b8, b9] = self.to_legacy();
        let [n0, n1] = self.num_buffers.to_le_bytes();
        [b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, n0, n1]
    }

    /// What the header asks for, not yet checked against the frame.
    ///
    /// A header with both `NEEDS_CSUM` and `DATA_VALID` asks for a blank checksum. `DATA_VALID` is the
    /// sender's word; from a guest it vouches for its own data only.
    ///
    /// # Errors
    /// [`VnetError::UnknownGso`], [`VnetError::TunnelGso`].
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

    /// What the header asks for, checked against its frame: see [`accept`] for the
    /// rules, and for the one case in which `headers` is written to.
    ///
    /// `headers` is the private copy of the frame's first bytes (after this header), `layers` what
    /// [`Layers::parse`] said of it. A frame that asks for nothing is accepted even if it did not
    /// parse: a switch forwards it as it is.
    ///
    /// # Errors
    /// [`VnetError`]: drop the frame and count it.
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

    /// The header for accepted metadata. `header_len` is [`Layers::header_len`] (0 if not known: it is
    /// a hint, and only a segmenting receiver looks at it). `num_buffers` is 0.
    ///
    /// # Errors
    /// [`EmitError::GsoWithoutChecksum`], which cannot happen for metadata that was accepted.
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

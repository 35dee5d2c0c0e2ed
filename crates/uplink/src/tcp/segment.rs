//! TCP segment headers: parsing those of the guest, writing those for the guest.

use ringfence_offload::packet::tcp_flags;
use ringfence_offload::{Layers, packet::Transport};

use super::seq::Seq;
use crate::packet::Packet;

/// Length of a header without options, in bytes.
pub const HEADER_LEN: usize = 20;

/// Length of the options of our SYNs: maximum segment size, window scale, padding.
pub const SYN_OPTIONS_LEN: usize = 12;

/// Maximum window scale (RFC 7323, 2.3).
pub const SCALE_MAX: u8 = 14;

/// TCP options that a SYN negotiates (RFC 9293, RFC 7323).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SynOptions {
    /// Maximum segment size that the sender accepts, if announced.
    pub mss: Option<u16>,
    /// Window scale in bits; `None` if the sender does not support scaling.
    pub scale: Option<u8>,
}

impl SynOptions {
    /// Parses options. Unknown options are skipped, a truncated one ends the parsing.
    pub fn parse(mut options: &[u8]) -> SynOptions {
        let mut found = SynOptions::default();
        while let [kind, rest @ ..] = options {
            options = match kind {
                0 => break,
                1 => rest,
                _ => {
                    let Some(&len) = rest.first() else { break };
                    let Some(body) = options.get(2..usize::from(len)) else { break };
                    match (kind, body) {
                        (2, &[high, low]) => found.mss = Some(u16::from_be_bytes([high, low])),
                        (3, &[scale]) => found.scale = Some(scale.min(SCALE_MAX)),
                        _ => {}
                    }
                    &options[usize::from(len)..]
                }
            };
        }
        found
    }

    /// Writes the options of our SYNs.
    pub fn write(mss: u16, scale: Option<u8>) -> [u8; SYN_OPTIONS_LEN] {
        let [high, low] = mss.to_be_bytes();
        let [kind, len, scale] = scale.map_or([1, 1, 1], |scale| [3, 3, scale]);
        [2, 4, high, low, 1, kind, len, scale, 1, 1, 1, 1]
    }
}

/// Ports of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ports {
    /// Port of the sender.
    pub from: u16,
    /// Port of the receiver.
    pub to: u16,
}

impl Ports {
    /// Returns the ports of a segment in the other direction.
    pub fn reversed(self) -> Ports {
        Ports { from: self.to, to: self.from }
    }
}

/// Header fields of a segment from the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    pub ports: Ports,
    /// Sequence number of the first byte, or of the SYN.
    pub seq: Seq,
    /// Acknowledgement number; valid if [`Segment::ack`] is true.
    pub acknowledged: Seq,
    /// Flag bits, see [`tcp_flags`].
    pub flags: u8,
    /// Window field as received, not scaled.
    pub window: u16,
    /// Distance from `seq` to the byte after the urgent one, if there is one.
    pub urgent: Option<u16>,
    /// Length of the payload in bytes.
    pub len: u32,
}

impl Segment {
    /// Reads the segment of a packet, and its options. Returns `None` if the packet is not TCP.
    pub fn read<'a>(packet: &Packet<'a>) -> Option<(Segment, &'a [u8])> {
        let len = packet.layers.payload_len();
        let options = options_of(&packet.layers, packet.transport())?;
        Some((Segment::parse(packet.transport().first_chunk()?, len), options))
    }

    /// Parses the fixed part of a header that `len` bytes of payload follow.
    pub fn parse(header: &[u8; HEADER_LEN], len: u32) -> Segment {
        let [s0, s1, d0, d1, q0, q1, q2, q3, a0, a1, a2, a3, _, flags, w0, w1, _, _, u0, u1] =
            *header;
        let urgent = u16::from_be_bytes([u0, u1]);
        let is_urgent = flags & tcp_flags::URG != 0 && urgent > 0;
        Segment {
            ports: Ports { from: u16::from_be_bytes([s0, s1]), to: u16::from_be_bytes([d0, d1]) },
            seq: Seq(u32::from_be_bytes([q0, q1, q2, q3])),
            acknowledged: Seq(u32::from_be_bytes([a0, a1, a2, a3])),
            flags,
            window: u16::from_be_bytes([w0, w1]),
            urgent: is_urgent.then_some(urgent),
            len,
        }
    }

    /// Returns `true` for the first segment of a connection that the guest opens.
    pub(crate) fn opens(&self) -> bool {
        self.flags & (tcp_flags::SYN | tcp_flags::ACK | tcp_flags::RST) == tcp_flags::SYN
    }

    /// Returns `true` if all of these flags are set.
    pub fn has(&self, flags: u8) -> bool {
        self.flags & flags == flags
    }

    /// Returns `true` if the segment has an acknowledgement.
    pub fn ack(&self) -> bool {
        self.has(tcp_flags::ACK)
    }

    /// Returns the sequence space the segment occupies: payload, SYN and FIN.
    pub fn extent(&self) -> u32 {
        self.len + u32::from(self.has(tcp_flags::SYN)) + u32::from(self.has(tcp_flags::FIN))
    }

    /// Returns the sequence number after the segment.
    pub fn end(&self) -> Seq {
        self.seq + self.extent()
    }
}

fn options_of<'a>(layers: &Layers, transport: &'a [u8]) -> Option<&'a [u8]> {
    let Transport::Tcp(tcp) = layers.transport() else { return None };
    transport.get(HEADER_LEN..usize::from(tcp.header_len))
}

/// Header fields of a segment for the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Header {
    pub ports: Ports,
    /// Sequence number of the first byte.
    pub seq: Seq,
    /// Acknowledgement number; valid if ACK is set.
    pub acknowledged: Seq,
    /// Flag bits, see [`tcp_flags`].
    pub flags: u8,
    /// Window field as sent, already scaled.
    pub window: u16,
    /// Distance from `seq` to the byte after the urgent one; valid if URG is set.
    pub urgent: u16,
}

impl Header {
    /// Writes the header and `options` to the front of `out`, with `checksum` in the checksum field. Returns
    /// the length written. Returns `None` if they do not fit, or if the options' length is not a multiple of
    /// four up to 40 bytes.
    pub fn write(&self, options: &[u8], checksum: u16, out: &mut [u8]) -> Option<usize> {
        let len = HEADER_LEN + options.len();
        let words =
            u8::try_from(len / 4).ok().filter(|&words| words < 16 && len.is_multiple_of(4))?;
        let (header, rest) = out.get_mut(..len)?.split_first_chunk_mut::<HEADER_LEN>()?;
        header[0..2].copy_from_slice(&self.ports.from.to_be_bytes());
        header[2..4].copy_from_slice(&self.ports.to.to_be_bytes());
        header[4..8].copy_from_slice(&self.seq.0.to_be_bytes());
        header[8..12].copy_from_slice(&self.acknowledged.0.to_be_bytes());
        header[12] = words << 4;
        header[13] = self.flags;
        header[14..16].copy_from_slice(&self.window.to_be_bytes());
        header[16..18].copy_from_slice(&checksum.to_be_bytes());
        header[18..20].copy_from_slice(&self.urgent.to_be_bytes());
        rest.copy_from_slice(options);
        Some(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn written_options_parse_to_the_same_values() {
        let written = SynOptions::write(1460, Some(8));
        assert_eq!(SynOptions::parse(&written), SynOptions { mss: Some(1460), scale: Some(8) });
        let plain = SynOptions::write(536, None);
        assert_eq!(SynOptions::parse(&plain), SynOptions { mss: Some(536), scale: None });
    }

    #[test]
    fn linux_syn_options_parse_to_mss_and_scale() {
        // MSS 1460, SACK permitted, timestamps, NOP, window scale 7.
        let options = [2, 4, 5, 180, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7];
        assert_eq!(SynOptions::parse(&options), SynOptions { mss: Some(1460), scale: Some(7) });
    }

    #[test]
    fn scale_beyond_limit_is_clamped() {
        assert_eq!(SynOptions::parse(&[3, 3, 200]).scale, Some(SCALE_MAX));
    }

    #[test]
    fn header_parsed_and_written_again_is_unchanged() {
        let header: [u8; 20] =
            [0x1f, 0x90, 0x00, 0x50, 1, 2, 3, 4, 5, 6, 7, 8, 0x50, 0x38, 0x10, 0, 0xab, 0xcd, 0, 3];
        let segment = Segment::parse(&header, 10);
        assert_eq!(segment.ports, Ports { from: 8080, to: 80 });
        assert_eq!((segment.seq, segment.acknowledged), (Seq(0x0102_0304), Seq(0x0506_0708)));
        assert!(segment.ack() && segment.has(tcp_flags::PSH) && !segment.has(tcp_flags::SYN));
        assert_eq!((segment.window, segment.urgent, segment.len), (0x1000, Some(3), 10));
        let again = Header {
            ports: segment.ports,
            seq: segment.seq,
            acknowledged: segment.acknowledged,
            flags: segment.flags,
            window: segment.window,
            urgent: 3,
        };
        let mut out = [0; 20];
        assert_eq!(again.write(&[], 0xabcd, &mut out), Some(20));
        assert_eq!(out, header);
    }

    proptest! {
        #[test]
        fn arbitrary_options_parse_without_panic(options in prop::collection::vec(any::<u8>(), 0..60)) {
            let found = SynOptions::parse(&options);
            prop_assert!(found.scale.is_none_or(|scale| scale <= SCALE_MAX));
        }
    }
}

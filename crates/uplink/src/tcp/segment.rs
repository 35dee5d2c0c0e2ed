//! TCP segments: those of the guest are read, those for it are written.

use ringfence_offload::packet::tcp_flags;
use ringfence_offload::{Layers, packet::Transport};

use super::seq::Seq;
use crate::packet::Packet;

/// Octets of a header without options.
pub const HEADER_LEN: usize = 20;

/// Octets of the options of our SYNs: maximum segment size, window scale, SACK permitted, padding.
pub const SYN_OPTIONS_LEN: usize = 12;

/// The window scale has 14 as its limit (RFC 7323, 2.3).
pub const SCALE_MAX: u8 = 14;

/// What a guest's SYN says of the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SynOptions {
    /// The longest segment it takes; `None` when it does not say.
    pub mss: Option<u16>,
    /// By how many bits its windows are to be shifted; `None`: it knows nothing of scaling.
    pub scale: Option<u8>,
}

impl SynOptions {
    /// Reads options. What is not known, or is cut short, is left out: it ends the reading at worst.
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

    /// Writes options as our SYNs have them.
    pub fn write(mss: u16, scale: Option<u8>) -> [u8; SYN_OPTIONS_LEN] {
        let [high, low] = mss.to_be_bytes();
        let [kind, len, scale] = scale.map_or([1, 1, 1], |scale| [3, 3, scale]);
        [2, 4, high, low, 1, kind, len, scale, 1, 1, 1, 1]
    }
}

/// A segment of the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Ports: the guest's, the other end's.
    pub ports: (u16, u16),
    /// Place of the first octet, or of the SYN.
    pub seq: Seq,
    /// Up to where the guest has everything; counts if [`Segment::ack`].
    pub acknowledged: Seq,
    /// [`tcp_flags`].
    pub flags: u8,
    /// The window as it came, not scaled.
    pub window: u16,
    /// From `seq` to the octet behind the urgent one, if there is one.
    pub urgent: Option<u16>,
    /// Octets of payload.
    pub len: u32,
}

impl Segment {
    /// The segment of a packet, and its options. `None` if the packet is not TCP.
    pub fn read<'a>(packet: &Packet<'a>) -> Option<(Segment, &'a [u8])> {
        let len = packet.layers.payload_len();
        let options = options_of(&packet.layers, packet.transport())?;
        Some((Segment::parse(packet.transport().first_chunk()?, len), options))
    }

    /// Reads the fixed part of a header before `len` octets of payload.
    pub fn parse(header: &[u8; HEADER_LEN], len: u32) -> Segment {
        let [s0, s1, d0, d1, q0, q1, q2, q3, a0, a1, a2, a3, _, flags, w0, w1, _, _, u0, u1] =
            *header;
        let urgent = u16::from_be_bytes([u0, u1]);
        let is_urgent = flags & tcp_flags::URG != 0 && urgent > 0;
        Segment {
            ports: (u16::from_be_bytes([s0, s1]), u16::from_be_bytes([d0, d1])),
            seq: Seq(u32::from_be_bytes([q0, q1, q2, q3])),
            acknowledged: Seq(u32::from_be_bytes([a0, a1, a2, a3])),
            flags,
            window: u16::from_be_bytes([w0, w1]),
            urgent: is_urgent.then_some(urgent),
            len,
        }
    }

    /// Whether all of these flags are set.
    pub fn has(&self, flags: u8) -> bool {
        self.flags & flags == flags
    }

    /// Whether it has an acknowledgement.
    pub fn ack(&self) -> bool {
        self.has(tcp_flags::ACK)
    }

    /// Places it takes up: its octets, SYN and FIN.
    pub fn extent(&self) -> u32 {
        self.len + u32::from(self.has(tcp_flags::SYN)) + u32::from(self.has(tcp_flags::FIN))
    }

    /// The place behind it.
    pub fn end(&self) -> Seq {
        self.seq + self.extent()
    }
}

fn options_of<'a>(layers: &Layers, transport: &'a [u8]) -> Option<&'a [u8]> {
    let Transport::Tcp(tcp) = layers.transport() else { return None };
    transport.get(HEADER_LEN..usize::from(tcp.header_len))
}

/// A header for the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Header {
    /// Ports: the other end's, the guest's.
    pub ports: (u16, u16),
    /// Place of the first octet.
    pub seq: Seq,
    /// Up to where everything of the guest has come; counts if ACK is set.
    pub acknowledged: Seq,
    /// [`tcp_flags`].
    pub flags: u8,
    /// The window as it goes, scaled already.
    pub window: u16,
    /// From `seq` to the octet behind the urgent one, if URG is set.
    pub urgent: u16,
}

impl Header {
    /// Writes the header and options to the front of `out`, the checksum field holding `checksum`;
    /// returns how many octets they have. `None` when they do not fit. Options have a multiple of four
    /// octets, at most 40.
    pub fn write(&self, options: &[u8], checksum: u16, out: &mut [u8]) -> Option<usize> {
        let len = HEADER_LEN + options.len();
        let words =
            u8::try_from(len / 4).ok().filter(|&words| words < 16 && len.is_multiple_of(4))?;
        let (header, rest) = out.get_mut(..len)?.split_first_chunk_mut::<HEADER_LEN>()?;
        header[0..2].copy_from_slice(&self.ports.0.to_be_bytes());
        header[2..4].copy_from_slice(&self.ports.1.to_be_bytes());
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
    fn our_options_are_understood() {
        let written = SynOptions::write(1460, Some(8));
        assert_eq!(SynOptions::parse(&written), SynOptions { mss: Some(1460), scale: Some(8) });
        let plain = SynOptions::write(536, None);
        assert_eq!(SynOptions::parse(&plain), SynOptions { mss: Some(536), scale: None });
    }

    #[test]
    fn a_linux_syn_is_read() {
        // MSS 1460, SACK permitted, timestamps, NOP, window scale 7.
        let options = [2, 4, 5, 180, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7];
        assert_eq!(SynOptions::parse(&options), SynOptions { mss: Some(1460), scale: Some(7) });
    }

    #[test]
    fn a_scale_beyond_the_limit_is_the_limit() {
        assert_eq!(SynOptions::parse(&[3, 3, 200]).scale, Some(SCALE_MAX));
    }

    #[test]
    fn a_header_deconstructs_to_its_fields() {
        let header: [u8; 20] =
            [0x1f, 0x90, 0x00, 0x50, 1, 2, 3, 4, 5, 6, 7, 8, 0x50, 0x38, 0x10, 0, 0xab, 0xcd, 0, 3];
        let segment = Segment::parse(&header, 10);
        assert_eq!(segment.ports, (8080, 80));
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
        fn options_of_any_kind_are_read_to_an_end(options in prop::collection::vec(any::<u8>(), 0..60)) {
            let found = SynOptions::parse(&options);
            prop_assert!(found.scale.is_none_or(|scale| scale <= SCALE_MAX));
        }
    }
}

//! IP fragmentation: datagrams that are longer than the link's MTU reach the guest in fragments.
//!
//! The host has reassembled the datagram; a router would have forwarded its fragments. Over IPv6 the
//! fragments look as if the sender had made them (RFC 8200, 4.5).

use ringfence_offload::OffloadMeta;
use ringfence_offload::checksum::{Accumulator, never_zero, sum};
use ringfence_offload::packet::protocol;

use crate::emit::{ETHERNET_LEN, Ends, UdpEnds};
use crate::link::{Committed, GuestLink, Slots};
use crate::packet::{self, Marks};

/// Length of an IPv6 fragment header, in bytes.
const FRAGMENT_LEN: usize = 8;

/// Fields of all fragments of a packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields {
    /// Identification of the packet.
    pub(crate) id: u16,
    /// Hop limit and traffic class.
    pub(crate) marks: Marks,
    /// Maximum length of a fragment, in bytes.
    pub(crate) mtu: usize,
}

/// Sends a UDP datagram in fragments. Returns the number of frames sent.
pub(crate) fn send_udp(
    UdpEnds { ends, from, to }: &UdpEnds,
    bytes: &[u8],
    fields: Fields,
    link: &mut dyn GuestLink,
) -> usize {
    let length = bytes.len() + 8;
    let Ok(length_field) = u16::try_from(length) else { return 0 };
    let mut udp = [0; 8];
    udp[..2].copy_from_slice(&from.to_be_bytes());
    udp[2..4].copy_from_slice(&to.to_be_bytes());
    udp[4..6].copy_from_slice(&length_field.to_be_bytes());
    let mut checksum = Accumulator::with_sum(ends.pseudo_header(protocol::UDP, length));
    checksum.add(&udp);
    checksum.add_sum(sum(bytes));
    udp[6..8].copy_from_slice(&never_zero(checksum.checksum()).to_be_bytes());

    send(ends, protocol::UDP, &udp, bytes, fields, link)
}

/// Sends a packet with the payload `head` and `bytes` in fragments. Returns the number of frames sent.
pub(crate) fn send(
    ends: &Ends,
    protocol: u8,
    head: &[u8; 8],
    bytes: &[u8],
    fields: Fields,
    link: &mut dyn GuestLink,
) -> usize {
    let length = bytes.len() + 8;
    let v6 = usize::from(!ends.to.is_ipv4()) * FRAGMENT_LEN;
    let headers = ends.header_len() + v6;
    let room = (fields.mtu + ETHERNET_LEN).saturating_sub(headers) & !7;
    if room < 8 {
        return 0;
    }
    let mut sent = 0;
    let mut at = 0;
    while at < length {
        let end = (at + room).min(length);
        let mut slots = Slots::new();
        link.reserve(1, headers + end - at, &mut slots);
        let Some(frame) = slots.first_mut().and_then(|slot| slot.get_mut(..headers + end - at))
        else {
            return sent;
        };
        let body = &mut frame[headers..];
        if at == 0 {
            body[..8].copy_from_slice(head);
            body[8..].copy_from_slice(&bytes[..end - 8]);
        } else {
            body.copy_from_slice(&bytes[at - 8..end - 8]);
        }
        if write_headers(ends, protocol, frame, fields, (at, end < length)).is_none() {
            return sent;
        }
        let len = frame.len();
        drop(slots);
        link.commit(&[Committed { len, meta: OffloadMeta::PLAIN }]);
        sent += 1;
        at = end;
    }
    sent
}

/// Writes the headers of the fragment at byte offset `at`.
fn write_headers(
    ends: &Ends,
    protocol: u8,
    frame: &mut [u8],
    Fields { id, marks, .. }: Fields,
    (at, more): (usize, bool),
) -> Option<()> {
    let payload = frame.len() - ends.header_len();
    let offset = u16::try_from(at).ok()?;
    if ends.to.is_ipv4() {
        ends.write(frame, protocol, payload, id)?;
        let ip = frame.get_mut(ETHERNET_LEN..ETHERNET_LEN + 20)?;
        let flags = (offset / 8) | (u16::from(more) << 13);
        ip[6..8].copy_from_slice(&flags.to_be_bytes());
        packet::set_marks(ip, marks.hops, marks.class)?;
    } else {
        ends.write(frame, protocol::IPV6_FRAGMENT, payload, id)?;
        packet::set_marks(frame.get_mut(ETHERNET_LEN..)?, marks.hops, marks.class)?;
        let header = frame.get_mut(ends.header_len()..)?.get_mut(..FRAGMENT_LEN)?;
        header[0] = protocol;
        header[1] = 0;
        header[2..4].copy_from_slice(&(offset | u16::from(more)).to_be_bytes());
        header[4..8].copy_from_slice(&u32::from(id).to_be_bytes());
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Wire;
    use ringfence_offload::Layers;
    use ringfence_offload::packet::Network;

    #[test]
    fn fragments_joined_equal_the_datagram() {
        for (from, to, header) in [("192.0.2.1", "10.0.0.2", 34), ("2001:db8::1", "fd00::2", 62)] {
            let ends = Ends {
                from_mac: [2; 6],
                to_mac: [4; 6],
                from: from.parse().unwrap(),
                to: to.parse().unwrap(),
            };
            let bytes: Vec<u8> = (0..5000u16).map(|n| n.to_le_bytes()[0]).collect();
            let mut link = Wire::plain();
            let udp = UdpEnds { ends, from: 53, to: 1000 };
            let marks = Marks { hops: 9, class: 0xb9, ..Marks::default() };
            let fields = Fields { id: 7, marks, mtu: 1500 };
            assert_eq!(send_udp(&udp, &bytes, fields, &mut link), 4);
            let mut joined = Vec::new();
            for (at, frame) in link.frames.iter().enumerate() {
                assert!(frame.len() <= 1514);
                let layers = Layers::parse(frame, u32::try_from(frame.len()).unwrap()).unwrap();
                assert!(layers.is_fragment(), "{at}");
                let (hops, class) = match layers.network() {
                    Network::Ipv4(_) => (frame[22], frame[15]),
                    _ => (frame[21], frame[14] << 4 | frame[15] >> 4),
                };
                assert_eq!((hops, class), (9, 0xb9));
                joined.extend_from_slice(&frame[header..]);
            }
            assert_eq!(joined[8..], bytes);
            let mut sum = Accumulator::with_sum(ends.pseudo_header(protocol::UDP, joined.len()));
            sum.add(&joined);
            assert_eq!(sum.checksum(), 0, "the checksum is right");
        }
    }
}

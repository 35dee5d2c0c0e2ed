//! Bodies of the fuzz targets, also run by the property tests.
//!
//! [`packet_parse`] checks more than the absence of panics. Parsed offsets must lie inside the bytes given,
//! accepted metadata must match the headers as read by plain indexing, and completed checksums must verify.

use crate::accept::{self, MAX_UDP_SEGMENTS, RESERVED_GSO_SIZE};
use crate::blank::{NetifChecksum, from_netif, reset_pseudo_header, to_netif};
use crate::checksum::verify::{Verdict, pseudo_header_sum, verify_ipv4_header, verify_transport};
use crate::checksum::{Accumulator, complete_scattered, internet_checksum};
use crate::meta::{Checksum, GsoKind, OffloadMeta};
use crate::packet::{Layers, Network, Transport};
use crate::vnet::{MODERN_LEN, VnetHeader};

mod coalesce;
mod segment;
#[cfg(test)]
mod tests;
mod traffic;

#[cfg(test)]
pub(crate) use coalesce::check_round;
pub use coalesce::{Frame, coalesce, frames_of_a_round};
pub use segment::segment;
pub use traffic::{believing_nobody, is_the_same};

/// Input bytes before the frame: a virtio-net header, then `captured`, `missing` (frame bytes beyond the
/// input) and a cut position.
const PREFIX: usize = MODERN_LEN + 6;

/// Runs one case on any bytes: a virtio-net header, 6 bytes of settings, a frame.
///
/// # Panics
/// Panics if the crate breaks a guarantee.
pub fn packet_parse(data: &[u8]) {
    let Some((prefix, frame)) = data.split_first_chunk::<PREFIX>() else {
        return;
    };
    let [vnet @ .., c0, c1, m0, m1, p0, p1] = *prefix;
    let captured = usize::from(u16::from_le_bytes([c0, c1])).min(frame.len());
    let missing = u32::from(u16::from_le_bytes([m0, m1]));
    let cut = usize::from(u16::from_le_bytes([p0, p1]));
    let Ok(len) = u32::try_from(frame.len()) else {
        return;
    };

    check_checksum_of_pieces(frame, cut);
    let (headers, payload) = frame.split_at(captured);
    let layers = Layers::parse(headers, len + missing);
    if let Ok(layers) = &layers {
        check_layers_inside(layers, headers.len(), len + missing);
        check_blank_round_trip(headers, layers);
        if missing == 0 {
            check_completed_verifies(headers, payload, cut, layers);
        }
    }
    check_vnet(&VnetHeader::from_modern(&vnet), headers, &layers);
}

fn check_checksum_of_pieces(bytes: &[u8], cut: usize) {
    let (first, rest) = bytes.split_at(cut.min(bytes.len()));
    let mut sum = Accumulator::new();
    sum.add(first);
    sum.add(rest);
    assert_eq!(sum.checksum(), internet_checksum(bytes), "a cut at {cut} changes the sum");
}

fn check_layers_inside(layers: &Layers, headers: usize, frame_len: u32) {
    let header_len = usize::from(layers.header_len());
    assert!(header_len <= headers, "{layers:?} reaches beyond {headers} bytes");
    assert!(usize::from(layers.captured()) <= headers);
    assert!(layers.network_offset() <= layers.header_len());
    assert!(u32::from(layers.header_len()) <= layers.network_end(), "{layers:?}");
    assert!(layers.network_end() <= frame_len && layers.frame_len() == frame_len);
    if let Some(offset) = layers.transport_offset() {
        assert!(offset > layers.network_offset() && offset <= layers.header_len());
    }
    if let Some(place) = layers.checksum_place() {
        assert!(place.field_end() <= header_len, "the field is inside the header");
    }
}

fn check_blank_round_trip(headers: &[u8], layers: &Layers) {
    let bits = NetifChecksum { blank: true, validated: true };
    let Ok(checksum) = from_netif(bits, layers) else {
        return;
    };
    assert_eq!(to_netif(checksum, layers), Ok(bits));
    let mut headers = headers.to_vec();
    if let Ok(place) = reset_pseudo_header(&mut headers, layers) {
        assert_eq!(Checksum::from(place), checksum);
        let field = [headers[place.field()], headers[place.field() + 1]];
        assert_eq!(Ok(u16::from_be_bytes(field)), pseudo_header_sum(&headers, layers));
    }
}

/// Asserts that a frame without padding verifies after completion of its checksum, and only then.
fn check_completed_verifies(headers: &[u8], payload: &[u8], cut: usize, layers: &Layers) {
    let pieces = payload.split_at(cut.min(payload.len()));
    let pieces = [pieces.0, pieces.1];
    // Both functions must accept any bytes without a panic.
    let _ = verify_transport(headers, pieces, layers);
    let _ = verify_ipv4_header(headers, layers);
    if layers.network_end() != layers.frame_len() {
        return;
    }
    let mut headers = headers.to_vec();
    let Ok(place) = reset_pseudo_header(&mut headers, layers) else {
        return;
    };
    let stored = complete_scattered(&mut headers, pieces, place);
    assert!(matches!(stored, Ok(1..)), "a finished checksum is stored and never zero: {stored:?}");
    assert_eq!(verify_transport(&headers, pieces, layers), Ok(Verdict::Correct));
    headers[place.field()] ^= 0x55;
    assert_ne!(verify_transport(&headers, pieces, layers), Ok(Verdict::Correct));
}

fn check_vnet(
    vnet: &VnetHeader,
    headers: &[u8],
    layers: &Result<Layers, crate::packet::ParseError>,
) {
    assert_eq!(VnetHeader::from_modern(&vnet.to_modern()), *vnet);
    let mut private = headers.to_vec();
    let Ok(meta) = vnet.accept(&mut private, layers) else {
        assert_eq!(private, headers, "a refused frame is not written to");
        return;
    };
    let Ok(layers) = layers else {
        assert!(meta.is_finished(), "offloads without headers");
        return;
    };
    check_accepted(meta, &private, layers);
    assert_eq!(accept::accept(meta, &mut private, layers), Ok(meta), "accepting is idempotent");
    let emitted = VnetHeader::for_frame(meta, layers.header_len());
    let again = emitted.map(|header| header.accept(&mut private, &Ok(*layers)));
    assert_eq!(again, Ok(Ok(meta)), "what was accepted can be passed on");
}

/// Checks accepted metadata against the headers, read by plain indexing.
fn check_accepted(meta: OffloadMeta, headers: &[u8], layers: &Layers) {
    if let Some(place) = meta.checksum.place() {
        assert!(place.field_end() <= headers.len(), "the field can be written");
        assert!(usize::from(place.start) >= 34, "addresses cannot be overwritten");
        assert!(!layers.is_fragment());
    }
    let Some(gso) = meta.gso else {
        return;
    };
    let network = usize::from(layers.network_offset());
    let transport = usize::from(layers.transport_offset().unwrap_or_default());
    assert_eq!(
        meta.checksum,
        Checksum::Partial {
            start: u16::try_from(transport).unwrap_or_default(),
            offset: gso.kind.checksum_offset()
        }
    );
    let version = headers[network] >> 4;
    match gso.kind {
        GsoKind::TcpV4 => assert_eq!((version, headers[network + 9]), (4, 6)),
        GsoKind::TcpV6 => assert_eq!(version, 6),
        GsoKind::Udp | GsoKind::UdpFragment => assert!(matches!(version, 4 | 6)),
    }
    let is_tcp = matches!(layers.transport(), Transport::Tcp(_));
    assert_eq!(is_tcp, gso.kind.is_tcp());
    assert!(matches!(layers.network(), Network::Ipv4(_) | Network::Ipv6(_)));
    assert!(gso.size != 0 && gso.size != RESERVED_GSO_SIZE);
    let header_len = if is_tcp { usize::from(headers[transport + 12] >> 4) * 4 } else { 8 };
    let payload = usize::try_from(layers.frame_len()).unwrap_or(usize::MAX) - transport;
    let size = usize::from(gso.size);
    match gso.kind {
        GsoKind::UdpFragment => assert!(payload > size && size >= 8),
        GsoKind::Udp => {
            assert!(payload - 8 > size);
            assert!((payload - 8).div_ceil(size) <= MAX_UDP_SEGMENTS as usize);
        }
        GsoKind::TcpV4 | GsoKind::TcpV6 => assert!(payload - header_len > size),
    }
}

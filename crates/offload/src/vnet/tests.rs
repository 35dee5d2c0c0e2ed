use super::*;
use crate::blank::reset_pseudo_header;
use crate::checksum::complete_partial;
use crate::test_frames::{self as frames, frame, grown, len};

/// Header of a TCP packet over IPv4 with 20 bytes of options, MSS 1448.
const TSO: [u8; 12] = [1, 1, 74, 0, 0xa8, 0x05, 34, 0, 16, 0, 0, 0];

const TSO_META: OffloadMeta = OffloadMeta {
    checksum: Checksum::Partial { start: 34, offset: 16 },
    gso: Some(Gso { kind: GsoKind::TcpV4, ecn: false, size: 1448 }),
};

fn tso_header() -> VnetHeader {
    VnetHeader {
        flags: flags::NEEDS_CSUM,
        gso_type: gso_type::TCPV4,
        hdr_len: 74,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
        num_buffers: 0,
    }
}

#[test]
fn vnet_header_bytes_deconstruct_to_fields() {
    assert_eq!(VnetHeader::from_modern(&TSO), tso_header());
    let [legacy @ .., _, _] = TSO;
    assert_eq!(VnetHeader::from_legacy(&legacy), tso_header());
    let last = VnetHeader::from_modern(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x34, 0x12]);
    assert_eq!(last.num_buffers, 0x1234);
}

#[test]
fn vnet_header_fields_construct_bytes() {
    assert_eq!(tso_header().to_modern(), TSO);
    assert_eq!(tso_header().to_legacy(), TSO[..10]);
}

#[test]
fn vnet_header_offer_parses() {
    assert_eq!(tso_header().offered(), Ok(TSO_META));
    let mut bytes = grown(frames::TCP_V4, 5000);
    let layers = Layers::parse(&bytes, len(&bytes));
    assert_eq!(tso_header().accept(&mut bytes, &layers), Ok(TSO_META));
}

#[test]
fn vnet_header_bytes_round_trip() {
    assert_eq!(VnetHeader::for_frame(TSO_META, 74), Ok(tso_header()));
    let unblank = OffloadMeta { checksum: Checksum::Verified, ..TSO_META };
    assert_eq!(VnetHeader::for_frame(unblank, 74), Err(EmitError::GsoWithoutChecksum));
}

/// Checks that a kernel's headers are accepted and emitted byte for byte.
#[test]
fn kernel_vnet_headers_are_accepted_and_emitted_again() {
    let tcp = Some(Gso { kind: GsoKind::TcpV4, ecn: false, size: 1460 });
    let uso = Some(Gso { kind: GsoKind::Udp, ecn: false, size: 1000 });
    for ((header, start, frame_len), offset, gso) in
        [(frames::VNET_TSO, 16, tcp), (frames::VNET_USO, 6, uso), (frames::VNET_UDP, 6, None)]
    {
        let header: [u8; MODERN_LEN] = frame(header).try_into().unwrap();
        let mut bytes = frame(start);
        bytes.resize(frame_len, 0);
        let kernels = bytes.clone();
        let layers = Layers::parse(&bytes, len(&bytes));
        let meta = VnetHeader::from_modern(&header).accept(&mut bytes, &layers).unwrap();
        assert_eq!(meta, OffloadMeta { checksum: Checksum::Partial { start: 34, offset }, gso });

        // Our pseudo header sum is the kernel's.
        let layers = layers.unwrap();
        reset_pseudo_header(&mut bytes, &layers).unwrap();
        assert_eq!(bytes, kernels);

        let header_len = if gso.is_some() { layers.header_len() } else { 0 };
        assert_eq!(VnetHeader::for_frame(meta, header_len).unwrap().to_modern(), header);
    }
}

#[test]
fn kernel_blank_checksum_completes_to_kernel_value() {
    let mut bytes = frame(frames::VNET_UDP.1);
    let place = VnetHeader::from_modern(&frame(frames::VNET_UDP.0).try_into().unwrap());
    let place = place.offered().unwrap().checksum.place().unwrap();
    complete_partial(&mut bytes, place).unwrap();
    assert_eq!(bytes[40..], frame(frames::UDP_V4)[40..]);
}

#[test]
fn gso_kind_numbers_translate_both_ways() {
    for (kind, ecn, number) in [
        (GsoKind::TcpV4, false, 1),
        (GsoKind::UdpFragment, false, 3),
        (GsoKind::TcpV6, false, 4),
        (GsoKind::Udp, false, 5),
        (GsoKind::TcpV4, true, 0x81),
        (GsoKind::TcpV6, true, 0x84),
    ] {
        let meta = OffloadMeta { gso: Some(Gso { kind, ecn, size: 9 }), ..TSO_META };
        let header = VnetHeader::for_frame(meta, 0).unwrap();
        assert_eq!(header.gso_type, number);
        assert_eq!(header.offered(), Ok(meta));
    }
}

#[test]
fn vnet_flags_translate_and_unknown_flags_are_ignored() {
    for (flags, checksum) in [
        (0, Checksum::None),
        (2, Checksum::Verified),
        (1, Checksum::Partial { start: 34, offset: 16 }),
        (3, Checksum::Partial { start: 34, offset: 16 }),
        (0xfc, Checksum::None),
    ] {
        let header = VnetHeader { flags, gso_type: 0, ..tso_header() };
        assert_eq!(header.offered(), Ok(OffloadMeta { checksum, gso: None }));
    }
    let verified = OffloadMeta { checksum: Checksum::Verified, gso: None };
    assert_eq!(VnetHeader::for_frame(verified, 0).unwrap().to_modern()[..2], [2, 0]);
}

#[test]
fn unknown_or_tunnel_gso_type_is_refused() {
    for gso_type in [2, 6, 7, 0x10, 0x11, 0x82] {
        let header = VnetHeader { gso_type, ..tso_header() };
        assert_eq!(header.offered(), Err(VnetError::UnknownGso { gso_type }));
    }
    for gso_type in [0x20, 0x21, 0x44, 0x61] {
        let header = VnetHeader { gso_type, ..tso_header() };
        assert_eq!(header.offered(), Err(VnetError::TunnelGso { gso_type }));
    }
    let ecn_alone = VnetHeader { gso_type: 0x80, ..tso_header() };
    assert_eq!(ecn_alone.offered(), Err(VnetError::Refused(Refusal::EcnWithoutTcp)));
}

#[test]
fn header_length_hint_is_ignored() {
    let mut bytes = grown(frames::TCP_V4, 5000);
    let layers = Layers::parse(&bytes, len(&bytes));
    for hdr_len in [0, 1, 73, 5074, 65535] {
        let header = VnetHeader { hdr_len, ..tso_header() };
        assert_eq!(header.accept(&mut bytes, &layers), Ok(TSO_META));
    }
}

#[test]
fn unparsed_frame_with_offload_request_is_refused() {
    let layers = Layers::parse(&[0; 13], 13);
    let plain = VnetHeader::default().accept(&mut [0; 13], &layers);
    assert_eq!(plain, Ok(OffloadMeta::PLAIN));
    let refused = tso_header().accept(&mut [0; 13], &layers);
    assert_eq!(refused, Err(VnetError::Parse(layers.unwrap_err())));
}

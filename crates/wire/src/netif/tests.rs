//! Layout tests with real bytes: deconstruct, construct, parse, emit.

use super::extra::*;
use super::*;
use crate::grant::Gref;
use core::num::NonZeroU16;

mod emit;
mod rx;
mod tx;

/// Bytes of a request: gref 0x0403_0201, offset 64, checksum blank and more data, id 0x1122, 1514 bytes.
const TX_REQUEST: [u8; 12] = [1, 2, 3, 4, 64, 0, 5, 0, 0x22, 0x11, 0xEA, 0x05];

fn tx_request() -> TxRequest {
    let flags = TxFlags::CHECKSUM_BLANK.with_if(true, TxFlags::MORE_DATA);
    TxRequest { gref: Gref(0x0403_0201), offset: 64, flags, id: 0x1122, size: 1514 }
}

#[test]
fn tx_request_bytes_deconstruct_to_fields() {
    let request = TxRequest::from_bytes(TX_REQUEST);
    assert_eq!(request.gref, Gref(0x0403_0201));
    assert_eq!(request.offset, 64);
    assert_eq!(request.flags.0, 5);
    assert_eq!(request.id, 0x1122);
    assert_eq!(request.size, 1514);
}

#[test]
fn tx_request_fields_construct_bytes() {
    assert_eq!(tx_request().to_bytes(), TX_REQUEST);
}

#[test]
fn tx_request_parses_with_checksum_state() {
    assert_eq!(TxRequest::from_bytes(TX_REQUEST), tx_request());
    assert_eq!(tx_request().flags.checksum(), Checksum { blank: true, validated: false });
}

#[test]
fn tx_request_bytes_round_trip() {
    assert_eq!(TxRequest::from_bytes(TX_REQUEST).to_bytes(), TX_REQUEST);
}

/// Bytes of a response: id 0x1122, ERROR.
const TX_RESPONSE: [u8; 4] = [0x22, 0x11, 0xFF, 0xFF];

#[test]
fn tx_response_bytes_deconstruct_to_fields() {
    let response = TxResponse::from_bytes(TX_RESPONSE);
    assert_eq!(response.id, 0x1122);
    assert_eq!(response.status, Status::Error);
}

#[test]
fn tx_response_fields_construct_bytes() {
    assert_eq!(TxResponse { id: 0x1122, status: Status::Error }.to_bytes(), TX_RESPONSE);
}

#[test]
fn tx_response_status_numbers_parse() {
    for (raw, status) in [
        (-2, Status::Dropped),
        (-1, Status::Error),
        (0, Status::Okay),
        (1, Status::Null),
        (7, Status::Unknown(7)),
    ] {
        let [s0, s1] = i16::to_le_bytes(raw);
        assert_eq!(TxResponse::from_bytes([0, 0, s0, s1]).status, status);
    }
}

#[test]
fn tx_response_bytes_and_status_numbers_round_trip() {
    assert_eq!(TxResponse::from_bytes(TX_RESPONSE).to_bytes(), TX_RESPONSE);
    for raw in i16::MIN..=i16::MAX {
        assert_eq!(Status::from_raw(raw).to_raw(), raw);
    }
}

/// Bytes of a request: id 0x1122, padding, gref 0x0403_0201.
const RX_REQUEST: [u8; 8] = [0x22, 0x11, 0, 0, 1, 2, 3, 4];

#[test]
fn rx_request_bytes_deconstruct_to_fields() {
    let request = RxRequest::from_bytes(RX_REQUEST);
    assert_eq!(request.id, 0x1122);
    assert_eq!(request.gref, Gref(0x0403_0201));
}

#[test]
fn rx_request_fields_construct_bytes() {
    assert_eq!(RxRequest { id: 0x1122, gref: Gref(0x0403_0201) }.to_bytes(), RX_REQUEST);
}

#[test]
fn rx_request_padding_is_ignored() {
    let mut padded = RX_REQUEST;
    padded[2..4].fill(0xAA);
    assert_eq!(RxRequest::from_bytes(padded), RxRequest::from_bytes(RX_REQUEST));
}

#[test]
fn rx_request_padding_is_emitted_as_zero() {
    let mut padded = RX_REQUEST;
    padded[2..4].fill(0xAA);
    assert_eq!(RxRequest::from_bytes(padded).to_bytes(), RX_REQUEST, "padding is written as 0");
}

/// Bytes of a response: id 0x1122, offset 256, checksum blank and extra info, 1514 bytes.
const RX_RESPONSE: [u8; 8] = [0x22, 0x11, 0, 1, 10, 0, 0xEA, 0x05];

fn rx_response() -> RxResponse {
    let flags = RxFlags::CHECKSUM_BLANK.with_if(true, RxFlags::EXTRA_INFO);
    RxResponse { id: 0x1122, offset: 256, flags, status: 1514 }
}

#[test]
fn rx_response_bytes_deconstruct_to_fields() {
    let response = RxResponse::from_bytes(RX_RESPONSE);
    assert_eq!(response.id, 0x1122);
    assert_eq!(response.offset, 256);
    assert_eq!(response.flags.0, 10);
    assert_eq!(response.status, 1514);
}

#[test]
fn rx_response_fields_construct_bytes() {
    assert_eq!(rx_response().to_bytes(), RX_RESPONSE);
}

#[test]
fn rx_response_status_gives_length_or_failure() {
    assert_eq!(RxResponse::from_bytes(RX_RESPONSE), rx_response());
    assert_eq!(rx_response().size(), Ok(1514));
    assert_eq!(RxResponse::failed(1, Status::Dropped).size(), Err(Status::Dropped));
    assert_eq!(RxResponse { status: i16::MAX, ..rx_response() }.size(), Ok(32767));
}

#[test]
fn rx_response_bytes_round_trip() {
    assert_eq!(RxResponse::from_bytes(RX_RESPONSE).to_bytes(), RX_RESPONSE);
    assert_eq!(
        RxResponse::failed(0x1122, Status::Error).to_bytes(),
        [0x22, 0x11, 0, 0, 0, 0, 0xFF, 0xFF]
    );
}

#[test]
fn checksum_bits_are_swapped_between_tx_and_rx() {
    assert_eq!(TxFlags(1).checksum(), Checksum { blank: true, validated: false });
    assert_eq!(RxFlags(1).checksum(), Checksum { blank: false, validated: true });
    assert_eq!(TxFlags(2).checksum(), Checksum { blank: false, validated: true });
    assert_eq!(RxFlags(2).checksum(), Checksum { blank: true, validated: false });
    for bits in 0..4 {
        assert_eq!(TxFlags::from(TxFlags(bits).checksum()), TxFlags(bits));
        assert_eq!(RxFlags::from(RxFlags(bits).checksum()), RxFlags(bits));
    }
}

/// GSO, more to come, segments of 1448 bytes, TCP over IPv6.
const GSO: [u8; 8] = [1, 1, 0xA8, 0x05, 2, 0, 0, 0];

fn gso() -> Extra {
    let segment_size = NonZeroU16::new(1448).unwrap();
    Extra::Gso(Gso { protocol: GsoProtocol::TcpV6, segment_size })
}

/// Returns each type with its bytes, without the flag for another one.
fn extras() -> [([u8; 8], Extra); 6] {
    let hash = PacketHash {
        kind: HashType::Ipv6Tcp,
        algorithm: HashAlgorithm::Toeplitz,
        value: 0x0403_0201,
    };
    [
        ([1, 0, 0xA8, 0x05, 2, 0, 0, 0], gso()),
        ([2, 0, 1, 0, 94, 1, 2, 3], Extra::Multicast(MulticastChange::Add([1, 0, 94, 1, 2, 3]))),
        ([3, 0, 1, 0, 94, 1, 2, 3], Extra::Multicast(MulticastChange::Del([1, 0, 94, 1, 2, 3]))),
        ([4, 0, 3, 1, 1, 2, 3, 4], Extra::Hash(hash)),
        ([5, 0, 0, 1, 0, 0, 0, 0], Extra::Xdp { headroom: 256 }),
        ([99, 0, 1, 2, 3, 4, 5, 6], Extra::Unknown { kind: 99, body: [1, 2, 3, 4, 5, 6] }),
    ]
}

#[test]
fn extra_kind_and_more_flag_are_read() {
    assert_eq!(RawExtra(GSO).kind(), ExtraType::Gso);
    assert!(RawExtra(GSO).has_more());
    assert!(!RawExtra([1, 0xFE, 0, 0, 0, 0, 0, 0]).has_more(), "other flags mean nothing");
}

#[test]
fn gso_extra_constructs_bytes() {
    assert_eq!(gso().emit(true).0, GSO);
}

#[test]
fn extra_of_invalid_type_or_gso_is_rejected() {
    for (bytes, extra) in extras() {
        assert_eq!(RawExtra(bytes).parse(), Ok(extra));
    }
    assert_eq!(RawExtra([0; 8]).parse(), Err(ExtraError::InvalidType));
    assert_eq!(RawExtra([1, 0, 0, 0, 1, 0, 0, 0]).parse(), Err(ExtraError::GsoSizeZero));
    for kind in [0, 3, 255] {
        assert_eq!(
            RawExtra([1, 0, 1, 0, kind, 0, 0, 0]).parse(),
            Err(ExtraError::GsoUnknownType { kind })
        );
    }
}

#[test]
fn extra_of_each_type_emits_its_bytes() {
    for (bytes, extra) in extras() {
        assert_eq!(extra.emit(false).0, bytes);
        assert_eq!(extra.emit(true).0[1], 1);
    }
}

#[test]
fn netif_numbers_match_header() {
    assert_eq!(SLOTS_MAX, 18);
    assert_eq!(RING_ENTRIES, 256);
    for raw in 0..=255 {
        assert_eq!(ExtraType::from_raw(raw).to_raw(), raw);
        assert_eq!(HashType::from_raw(raw).to_raw(), raw);
        assert_eq!(HashAlgorithm::from_raw(raw).to_raw(), raw);
    }
}

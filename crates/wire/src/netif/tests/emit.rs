//! Chain encoder tests: emitted slots and rejected packets.

use crate::grant::Gref;
use crate::netif::emit::*;
use crate::netif::extra::{Extra, Gso, GsoProtocol};
use crate::netif::rx::{RxChain, RxChainParser, RxOutcome};
use crate::netif::tx::{Fragment, TxChain, TxChainParser, TxOutcome};
use crate::netif::*;
use core::num::NonZeroU16;
use proptest::prelude::*;

const GSO: Extra =
    Extra::Gso(Gso { protocol: GsoProtocol::TcpV4, segment_size: NonZeroU16::new(1448).unwrap() });
const BLANK: Checksum = Checksum { blank: true, validated: true };

fn tx_part(id: u16, offset: u16, len: u16) -> TxPart {
    TxPart { gref: Gref(8 + u32::from(id)), offset, len, id }
}

#[test]
fn tx_packet_with_extras_emits_chain() {
    let mut slots = Vec::new();
    let parts = [tx_part(1, 96, 4000), tx_part(2, 0, 1000)];
    let xdp = Extra::Xdp { headroom: 0 };
    let count = emit_tx(&parts, BLANK, &[GSO, xdp], |slot| slots.push(slot)).unwrap();
    assert_eq!(count, 4);
    let first = TxRequest::from_bytes(slots[0]);
    assert_eq!((first.size, first.flags.0), (5000, 0b1111), "the size of the whole");
    assert_eq!(slots[1], [1, 1, 0xA8, 0x05, 1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(slots[2], [5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let last = TxRequest::from_bytes(slots[3]);
    assert_eq!((last.id, last.size, last.flags), (2, 1000, TxFlags::NONE));
}

#[test]
fn rx_packet_with_extra_emits_chain() {
    let mut slots = Vec::new();
    let parts = [RxPart { id: 1, offset: 0, len: 4096 }, RxPart { id: 3, offset: 0, len: 10 }];
    let count = emit_rx(&parts, BLANK, &[GSO], |slot| slots.push(slot)).unwrap();
    assert_eq!(count, 3);
    let first = RxResponse::from_bytes(slots[0]);
    assert_eq!((first.status, first.flags.0), (4096, 0b1111), "its own size");
    assert_eq!(slots[1], [1, 0, 0xA8, 0x05, 1, 0, 0, 0]);
    let last = RxResponse::from_bytes(slots[2]);
    assert_eq!((last.id, last.status, last.flags), (3, 10, RxFlags::NONE));
}

#[test]
fn invalid_packet_emits_no_slot() {
    let put = |_: [u8; 12]| panic!("a slot was put");
    let emit = |parts: &[TxPart], extras: &[Extra]| emit_tx(parts, BLANK, extras, put);
    let part = tx_part(1, 0, 100);
    assert_eq!(emit(&[], &[]), Err(ChainEmitError::Fragments { found: 0, limit: 18 }));
    assert_eq!(emit(&[part; 19], &[]), Err(ChainEmitError::Fragments { found: 19, limit: 18 }));
    assert_eq!(emit(&[part], &[GSO; 9]), Err(ChainEmitError::TooManyExtras { found: 9, limit: 8 }));
    assert_eq!(
        emit(&[part, tx_part(2, 4000, 97)], &[]),
        Err(ChainEmitError::CrossesPage { index: 1, offset: 4000, len: 97 })
    );
    assert_eq!(emit(&[tx_part(1, 0, 13)], &[]), Err(ChainEmitError::Size { total: 13 }));
    assert_eq!(emit(&[tx_part(1, 0, 4096); 16], &[]), Err(ChainEmitError::Size { total: 65536 }));
}

#[test]
fn split_by_page_cuts_at_page_boundaries() {
    let ranges: Vec<_> = split_by_page(4000, 5000).collect();
    assert_eq!(
        ranges,
        [
            PageRange { page: 0, offset: 4000, len: 96 },
            PageRange { page: 1, offset: 0, len: 4096 },
            PageRange { page: 2, offset: 0, len: 808 },
        ]
    );
    assert_eq!(split_by_page(8192, 1).next(), Some(PageRange { page: 2, offset: 0, len: 1 }));
    assert_eq!(split_by_page(100, 0).count(), 0);
    assert_eq!(split_by_page(0, 65535).count(), 16);
}

fn any_extras() -> impl Strategy<Value = Vec<Extra>> {
    let extra = prop_oneof![
        Just(GSO),
        any::<u16>().prop_map(|headroom| Extra::Xdp { headroom }),
        (6u8.., any::<[u8; 6]>()).prop_map(|(kind, body)| Extra::Unknown { kind, body }),
    ];
    prop::collection::vec(extra, 0..=EXTRAS_MAX)
}

proptest! {
    #[test]
    fn emitted_tx_packet_parses_to_same_fragments(
        offset in 0usize..4096,
        len in 14usize..=65535,
        blank: bool,
        validated: bool,
        extras in any_extras(),
    ) {
        let checksum = Checksum { blank, validated };
        let parts: Vec<TxPart> = (0..)
            .zip(split_by_page(offset, len))
            .map(|(id, range)| tx_part(id, range.offset, range.len))
            .collect();
        let mut slots = Vec::new();
        let count = emit_tx(&parts, checksum, &extras, |slot| slots.push(slot)).unwrap();
        prop_assert_eq!(count as usize, parts.len() + extras.len());
        let mut chain = TxChain::new(RING_ENTRIES);
        let mut fetch = |index: u32| slots[index as usize];
        let outcome = TxChainParser::new(RING_ENTRIES).next(count, &mut fetch, &mut chain);
        prop_assert_eq!(outcome, TxOutcome::Packet);
        prop_assert_eq!(usize::from(chain.total()), len);
        prop_assert_eq!(chain.checksum(), checksum);
        prop_assert_eq!(chain.extras().gso.is_some(), extras.contains(&GSO));
        let sent = parts.iter().map(|part| {
            let TxPart { gref, offset, len, .. } = *part;
            Fragment { gref, offset, len }
        });
        prop_assert!(sent.eq(chain.fragments().iter().copied()));
    }

    #[test]
    fn emitted_rx_packet_parses_to_same_fragments(
        offset in 0usize..4096,
        len in 14usize..=65535,
        blank: bool,
        validated: bool,
        extras in any_extras(),
    ) {
        let checksum = Checksum { blank, validated };
        let parts: Vec<RxPart> = (0..)
            .zip(split_by_page(offset, len))
            .map(|(id, range)| RxPart { id, offset: range.offset, len: range.len })
            .collect();
        let mut slots = Vec::new();
        let count = emit_rx(&parts, checksum, &extras, |slot| slots.push(slot)).unwrap();
        let mut chain = RxChain::new();
        let mut fetch = |index: u32| slots[index as usize];
        let outcome = RxChainParser::new(RING_ENTRIES).next(count, &mut fetch, &mut chain);
        prop_assert_eq!(outcome, RxOutcome::Packet);
        prop_assert_eq!(chain.total() as usize, len);
        prop_assert_eq!(chain.slots(), count);
        prop_assert_eq!(chain.checksum(), checksum);
        let sent = parts.iter().map(|part| (part.offset, part.len));
        prop_assert!(sent.eq(chain.fragments().iter().map(|part| (part.offset, part.len))));
    }
}

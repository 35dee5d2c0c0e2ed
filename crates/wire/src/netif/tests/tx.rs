//! Tx chain parser tests: valid and invalid chains, and the fuzz body.

use crate::fuzzing::tx_chain;
use crate::grant::Gref;
use crate::netif::extra::{Extra, ExtraError, Gso, GsoProtocol, MulticastChange};
use crate::netif::tx::*;
use crate::netif::*;
use core::num::NonZeroU16;
use proptest::prelude::*;

const MORE: u16 = 4;
const EXTRA: u16 = 8;
const GSO: [u8; 12] = [1, 0, 0xA8, 0x05, 1, 0, 0, 0, 9, 9, 9, 9];

/// Builds a request for page `id` + 100.
fn request(id: u16, offset: u16, size: u16, flags: u16) -> [u8; 12] {
    TxRequest { gref: Gref(u32::from(id) + 100), offset, flags: TxFlags(flags), id, size }
        .to_bytes()
}

fn fragment(id: u16, offset: u16, len: u16) -> Fragment {
    Fragment { gref: Gref(u32::from(id) + 100), offset, len }
}

/// Builds an extra info of `kind` with a zero body.
fn extra(kind: u8, more: bool) -> [u8; 12] {
    let mut slot = [0; 12];
    slot[0] = kind;
    slot[1] = u8::from(more);
    slot
}

fn parse(slots: &[[u8; 12]]) -> (TxOutcome, TxChain) {
    let mut chain = TxChain::new(RING_ENTRIES);
    let available = u32::try_from(slots.len()).unwrap();
    let mut fetch = |index: u32| slots[index as usize];
    let outcome = TxChainParser::new(RING_ENTRIES).next(available, &mut fetch, &mut chain);
    (outcome, chain)
}

fn refusal(slots: &[[u8; 12]]) -> TxRefusal {
    let (outcome, chain) = parse(slots);
    let TxOutcome::Refused(refusal) = outcome else { panic!("{outcome:?}") };
    assert_eq!(chain.fragments(), []);
    refusal
}

#[test]
fn tx_ring_without_requests_is_empty() {
    assert_eq!(parse(&[]).0, TxOutcome::Empty);
}

#[test]
fn tx_packet_in_one_slot_parses() {
    let (outcome, chain) = parse(&[request(1, 64, 1514, 3), request(2, 0, 60, 0)]);
    assert_eq!(outcome, TxOutcome::Packet);
    assert_eq!(chain.fragments(), [fragment(1, 64, 1514)]);
    assert_eq!(chain.total(), 1514);
    assert_eq!(chain.checksum(), Checksum { blank: true, validated: true });
    assert_eq!(chain.owed(), [Owed { id: 1, kind: SlotKind::Request }]);
}

#[test]
fn tx_first_fragment_is_total_minus_rest() {
    let (outcome, chain) =
        parse(&[request(1, 96, 9000, MORE), request(2, 0, 4096, MORE), request(3, 0, 904, 0)]);
    assert_eq!(outcome, TxOutcome::Packet);
    assert_eq!(
        chain.fragments(),
        [fragment(1, 96, 4000), fragment(2, 0, 4096), fragment(3, 0, 904)]
    );
}

#[test]
fn tx_extras_after_first_request_are_parsed_and_answered_null() {
    let (outcome, chain) =
        parse(&[request(1, 0, 5000, MORE | EXTRA), extra(99, true), GSO, request(2, 0, 1000, 0)]);
    assert_eq!(outcome, TxOutcome::Packet);
    assert_eq!(chain.fragments(), [fragment(1, 0, 4000), fragment(2, 0, 1000)]);
    let segment_size = NonZeroU16::new(1448).unwrap();
    assert_eq!(chain.extras().gso, Some(Gso { protocol: GsoProtocol::TcpV4, segment_size }));
    assert_eq!(chain.extras().skipped, 1);
    let responses: Vec<TxResponse> = chain.responses(Status::Okay).collect();
    assert_eq!(
        responses,
        [
            TxResponse { id: 1, status: Status::Okay },
            TxResponse { id: 0, status: Status::Null },
            TxResponse { id: 0, status: Status::Null },
            TxResponse { id: 2, status: Status::Okay },
        ]
    );
}

#[test]
fn tx_extra_flag_on_later_request_is_ignored() {
    let (outcome, chain) = parse(&[request(1, 0, 100, MORE), request(2, 0, 50, EXTRA)]);
    assert_eq!(outcome, TxOutcome::Packet);
    assert_eq!(chain.owed().len(), 2);
}

#[test]
fn tx_chain_reused_for_next_packet_is_reset() {
    let slots = [
        request(1, 0, 5000, MORE | EXTRA | 3),
        GSO,
        request(2, 0, 0, MORE),
        request(3, 0, 1000, 0),
        request(4, 0, 60, 0),
    ];
    let mut chain = TxChain::new(RING_ENTRIES);
    let parser = TxChainParser::new(RING_ENTRIES);
    let outcome = parser.next(5, &mut |index| slots[index as usize], &mut chain);
    assert_eq!((outcome, chain.owed().len()), (TxOutcome::Packet, 4));
    let outcome = parser.next(1, &mut |_| slots[4], &mut chain);
    assert_eq!(outcome, TxOutcome::Packet);
    assert_eq!(chain, parse(&slots[4..]).1);
}

#[test]
fn tx_chain_of_more_than_eighteen_slots_is_refused() {
    let chain_of = |count: u16| {
        let flags = |id| if id + 1 < count { MORE } else { 0 };
        (0..count)
            .map(|id| request(id, 0, if id == 0 { count * 100 } else { 100 }, flags(id)))
            .collect::<Vec<_>>()
    };
    let (outcome, chain) = parse(&chain_of(18));
    assert_eq!((outcome, chain.fragments().len()), (TxOutcome::Packet, 18));
    for count in [19, 20, 21, 200] {
        let (outcome, chain) = parse(&chain_of(count));
        let found = u32::from(count);
        assert_eq!(outcome, TxOutcome::Refused(TxRefusal::TooManySlots { found, limit: 18 }));
        assert_eq!(chain.owed().len(), usize::from(count), "all of it is consumed");
        assert!(chain.responses(Status::Error).all(|response| response.status == Status::Error));
    }
}

#[test]
fn tx_chain_of_two_slots_without_sg_is_refused() {
    let slots = [request(1, 0, 100, MORE), request(2, 0, 50, 0)];
    let mut chain = TxChain::new(RING_ENTRIES);
    let parser = TxChainParser::new(RING_ENTRIES).with_slot_limit(0);
    let outcome = parser.next(2, &mut |index| slots[index as usize], &mut chain);
    assert_eq!(outcome, TxOutcome::Refused(TxRefusal::TooManySlots { found: 2, limit: 1 }));
    let outcome = parser.next(1, &mut |_| slots[1], &mut chain);
    assert_eq!(outcome, TxOutcome::Packet);
    assert_eq!(TxChainParser::new(256).with_slot_limit(99), TxChainParser::new(256));
}

#[test]
fn staging_grants_design_16_1_total_below_ethernet_header_is_refused() {
    assert_eq!(refusal(&[request(1, 0, 13, 0)]), TxRefusal::TooShort { total: 13, least: 14 });
    assert_eq!(parse(&[request(1, 0, 14, 0)]).0, TxOutcome::Packet);
}

#[test]
fn staging_grants_design_16_2_fragment_across_page_end_is_refused() {
    assert_eq!(parse(&[request(1, 96, 4000, 0)]).0, TxOutcome::Packet);
    assert_eq!(
        refusal(&[request(1, 97, 4000, 0)]),
        TxRefusal::CrossesPage { index: 0, offset: 97, len: 4000 }
    );
    assert_eq!(
        refusal(&[request(1, 0, 65535, 0)]),
        TxRefusal::CrossesPage { index: 0, offset: 0, len: 65535 }
    );
    assert_eq!(
        refusal(&[request(1, 0, 100, MORE), request(2, 65535, 50, 0)]),
        TxRefusal::CrossesPage { index: 1, offset: 65535, len: 50 }
    );
}

#[test]
fn xsa_270_total_smaller_than_fragments_is_refused() {
    assert_eq!(
        refusal(&[request(1, 0, 100, MORE), request(2, 0, 101, 0)]),
        TxRefusal::SmallerThanFragments { total: 100, fragments: 101 }
    );
    // The sum exceeds 16 bits; truncated, it would be small again.
    let wraps = [request(1, 0, 100, MORE), request(2, 0, 0xFFFF, MORE), request(3, 0, 11, 0)];
    assert_eq!(refusal(&wraps), TxRefusal::SmallerThanFragments { total: 100, fragments: 0x1000A });
}

#[test]
fn xsa_448_zero_length_fragments_are_dropped() {
    let (outcome, chain) = parse(&[
        request(1, 0, 100, MORE),
        request(2, 4096, 0, MORE),
        request(3, 0, 40, MORE),
        request(4, 0, 0, 0),
    ]);
    assert_eq!(outcome, TxOutcome::Packet);
    assert_eq!(chain.fragments(), [fragment(1, 0, 60), fragment(3, 0, 40)]);
    assert_eq!(chain.empty_fragments(), 2);
    assert_eq!(chain.owed().len(), 4);
}

#[test]
fn xsa_448_zero_length_first_fragment_is_dropped() {
    let (outcome, chain) = parse(&[request(1, 0, 100, MORE), request(2, 0, 100, 0)]);
    assert_eq!(outcome, TxOutcome::Packet);
    assert_eq!(chain.fragments(), [fragment(2, 0, 100)]);
    assert_eq!(chain.empty_fragments(), 1);
}

#[test]
fn xsa_423_eighteen_slots_of_one_byte_are_accepted() {
    let flags = |id| if id < 17 { MORE } else { 0 };
    let size = |id| match id {
        0 => 17,
        17 => 0,
        _ => 1,
    };
    let slots: Vec<_> = (0..18).map(|id| request(id, 4095, size(id), flags(id))).collect();
    let (outcome, chain) = parse(&slots);
    assert_eq!(outcome, TxOutcome::Packet);
    assert_eq!(chain.total(), 17);
    assert!(chain.fragments().iter().all(|fragment| fragment.len == 1));
}

#[test]
fn tx_chain_with_bad_extra_is_refused_and_answered() {
    let mut gso_of_size_0 = GSO;
    gso_of_size_0[2..4].fill(0);
    let mut gso_of_type_9 = GSO;
    gso_of_type_9[4] = 9;
    for (slot, error) in [
        (extra(0, false), ExtraError::InvalidType),
        (gso_of_size_0, ExtraError::GsoSizeZero),
        (gso_of_type_9, ExtraError::GsoUnknownType { kind: 9 }),
    ] {
        let slots = [request(1, 0, 100, MORE | EXTRA), slot, request(2, 0, 50, 0)];
        assert_eq!(refusal(&slots), TxRefusal::BadExtra(error));
        let responses: Vec<_> =
            parse(&slots).1.responses(Status::Error).map(|response| response.status).collect();
        assert_eq!(responses, [Status::Error, Status::Null, Status::Error]);
    }
}

#[test]
fn tx_extras_beyond_limit_are_refused() {
    let chain_of = |count: u8| {
        let mut slots = vec![request(1, 0, 100, EXTRA)];
        slots.extend((1..=count).map(|index| extra(77, index < count)));
        slots
    };
    let (outcome, chain) = parse(&chain_of(8));
    assert_eq!((outcome, chain.extras().skipped), (TxOutcome::Packet, 8));
    let (outcome, chain) = parse(&chain_of(200));
    assert_eq!(outcome, TxOutcome::Refused(TxRefusal::TooManyExtras { found: 200, limit: 8 }));
    assert_eq!(chain.owed().len(), 201);
}

#[test]
fn tx_filter_request_of_zero_size_is_accepted() {
    let add = Extra::Multicast(MulticastChange::Add([1, 0, 94, 0, 0, 251]));
    let [t, f, b0, b1, b2, b3, b4, b5] = add.emit(false).0;
    let slots = [request(7, 0, 0, EXTRA), [t, f, b0, b1, b2, b3, b4, b5, 0, 0, 0, 0]];
    let (outcome, chain) = parse(&slots);
    assert_eq!(outcome, TxOutcome::FilterRequest);
    assert_eq!(chain.extras().multicast[..], [MulticastChange::Add([1, 0, 94, 0, 0, 251])]);
    assert_eq!((chain.fragments(), chain.total()), (&[][..], 0));
    let responses: Vec<_> = chain.responses(Status::Okay).collect();
    assert_eq!(responses[0], TxResponse { id: 7, status: Status::Okay });
    assert_eq!(responses[1].status, Status::Null);
}

#[test]
fn tx_chain_without_end_is_fatal() {
    let unfinished = |published| TxOutcome::Fatal(TxFatal::Unfinished { published });
    assert_eq!(parse(&[request(1, 0, 100, MORE)]).0, unfinished(1));
    assert_eq!(parse(&[request(1, 0, 100, EXTRA)]).0, unfinished(1));
    assert_eq!(parse(&[request(1, 0, 100, EXTRA), extra(9, true)]).0, unfinished(2));
    let longer = TxOutcome::Fatal(TxFatal::LongerThanRing { entries: 256 });
    assert_eq!(parse(&[request(1, 0, 100, MORE); 256]).0, longer);
    // The parser stops even if a caller announces more slots than the ring has.
    assert_eq!(parse(&[request(1, 0, 100, MORE); 300]).0, longer);
    let mut slots = vec![extra(9, true); 256];
    slots[0] = request(1, 0, 100, EXTRA);
    assert_eq!(parse(&slots).0, longer);
}

#[test]
fn xsa_155_tx_slot_is_fetched_once() {
    // A frontend that changes a slot on every fetch: from the second fetch on it crosses the page.
    let mut fetches = [0u16; 3];
    let mut fetch = |index: u32| {
        let fetch_count = &mut fetches[index as usize];
        *fetch_count += 1;
        let flags = if index < 2 { MORE } else { 0 };
        request(7, 4000 * (*fetch_count - 1), if index == 0 { 120 } else { 40 }, flags)
    };
    let mut chain = TxChain::new(RING_ENTRIES);
    let outcome = TxChainParser::new(RING_ENTRIES).next(3, &mut fetch, &mut chain);
    assert_eq!(outcome, TxOutcome::Packet);
    assert_eq!(fetches, [1, 1, 1]);
}

#[test]
fn tx_chain_of_whole_ring_does_not_reallocate() {
    let mut chain = TxChain::new(RING_ENTRIES);
    let before = chain.owed().as_ptr();
    let mut slots = vec![request(1, 0, 100, MORE); 255];
    slots.push(request(2, 0, 0, 0));
    let parser = TxChainParser::new(RING_ENTRIES);
    let outcome = parser.next(256, &mut |index| slots[index as usize], &mut chain);
    assert_eq!(outcome, TxOutcome::Refused(TxRefusal::TooManySlots { found: 256, limit: 18 }));
    assert_eq!(chain.owed().as_ptr(), before);
}

#[test]
fn tx_refusal_labels_are_distinct() {
    let refusals = [
        TxRefusal::BadExtra(ExtraError::InvalidType),
        TxRefusal::TooManyExtras { found: 9, limit: 8 },
        TxRefusal::TooManySlots { found: 19, limit: 18 },
        TxRefusal::TooShort { total: 0, least: 14 },
        TxRefusal::SmallerThanFragments { total: 0, fragments: 1 },
        TxRefusal::CrossesPage { index: 0, offset: 0, len: 0 },
    ];
    let mut labels: Vec<_> = refusals.iter().map(TxRefusal::label).collect();
    labels.dedup();
    assert_eq!(labels.len(), refusals.len());
}

/// Generates mostly plausible slots: small numbers, plausible flags, sometimes an extra info.
fn plausible_slot() -> impl Strategy<Value = [u8; 12]> {
    let size = prop_oneof![4 => 0u16..200, 1 => 3900u16..4200, 1 => any::<u16>()];
    let offset = prop_oneof![4 => 0u16..100, 1 => 3900u16..4200];
    let flags = prop::sample::select(vec![0, 0, MORE, MORE, EXTRA, MORE | EXTRA, 3]);
    let data = (any::<u16>(), offset, size, flags)
        .prop_map(|(id, offset, size, flags)| request(id, offset, size, flags));
    let extra = (0u8..8, any::<bool>(), 0u8..4).prop_map(|(kind, more, value)| {
        let mut slot = extra(kind, more);
        slot[2..5].fill(value);
        slot
    });
    prop_oneof![3 => data, 1 => extra]
}

/// Generates chains with MORE_DATA in all slots but the last, so that long packets appear.
fn long_chain() -> impl Strategy<Value = Vec<[u8; 12]>> {
    (1u16..40, 0u16..300, any::<bool>()).prop_map(|(count, size, extra)| {
        let flags = |id| if id + 1 < count { MORE } else { 0 };
        let size = |id| if id == 0 { size.saturating_mul(count) } else { size };
        let mut slots: Vec<_> = (0..count).map(|id| request(id, 0, size(id), flags(id))).collect();
        if extra {
            slots[0][6] |= 8;
            slots.insert(1, GSO);
        }
        slots
    })
}

proptest! {
    #[test]
    fn fuzz_tx_chain_any_bytes(data in prop::collection::vec(any::<u8>(), 0..800)) {
        tx_chain(&data);
    }

    #[test]
    fn fuzz_tx_chain_plausible(
        settings: [u8; 2],
        slots in prop::collection::vec(plausible_slot(), 0..60),
    ) {
        tx_chain(&[&settings, slots.as_flattened()].concat());
    }

    #[test]
    fn fuzz_tx_chain_long(
        settings: [u8; 2],
        chains in prop::collection::vec(long_chain(), 1..8),
    ) {
        tx_chain(&[&settings, chains.concat().as_flattened()].concat());
    }
}

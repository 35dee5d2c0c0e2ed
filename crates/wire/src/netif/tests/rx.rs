//! Rx chain parser tests: valid and invalid chains, and the fuzz body.

use crate::fuzzing::rx_responses;
use crate::netif::extra::{ExtraError, Gso, GsoProtocol};
use crate::netif::rx::*;
use crate::netif::*;
use core::num::NonZeroU16;
use proptest::prelude::*;

const MORE: u16 = 4;
const EXTRA: u16 = 8;
const GSO: [u8; 8] = [1, 0, 0xA8, 0x05, 1, 0, 0, 0];

fn response(offset: u16, status: i16, flags: u16) -> [u8; 8] {
    RxResponse { id: 0xAAAA, offset, flags: RxFlags(flags), status }.to_bytes()
}

fn fragment(slot: u32, offset: u16, len: u16) -> RxFragment {
    RxFragment { slot, offset, len }
}

fn parse(slots: &[[u8; 8]]) -> (RxOutcome, RxChain) {
    let mut chain = RxChain::new();
    let available = u32::try_from(slots.len()).unwrap();
    let mut fetch = |index: u32| slots[index as usize];
    let outcome = RxChainParser::new(RING_ENTRIES).next(available, &mut fetch, &mut chain);
    (outcome, chain)
}

fn refusal(slots: &[[u8; 8]]) -> RxRefusal {
    let (outcome, chain) = parse(slots);
    let RxOutcome::Refused(refusal) = outcome else { panic!("{outcome:?}") };
    assert_eq!(chain.fragments(), []);
    refusal
}

#[test]
fn rx_ring_without_responses_is_empty() {
    assert_eq!(parse(&[]).0, RxOutcome::Empty);
}

#[test]
fn rx_packet_in_one_slot_parses() {
    let (outcome, chain) = parse(&[response(256, 1514, 1), response(0, 60, 0)]);
    assert_eq!(outcome, RxOutcome::Packet);
    assert_eq!(chain.fragments(), [fragment(0, 256, 1514)]);
    assert_eq!((chain.total(), chain.slots()), (1514, 1));
    assert_eq!(chain.checksum(), Checksum { blank: false, validated: true });
}

#[test]
fn rx_chain_with_extra_sums_fragment_lengths() {
    let (outcome, chain) = parse(&[
        response(0, 4096, MORE | EXTRA),
        GSO,
        response(0, 4096, MORE),
        response(8, 100, EXTRA),
    ]);
    assert_eq!(outcome, RxOutcome::Packet);
    assert_eq!(chain.total(), 8292);
    assert_eq!(
        chain.fragments(),
        [fragment(0, 0, 4096), fragment(2, 0, 4096), fragment(3, 8, 100)],
        "the slot with the extra info is no fragment, but counts"
    );
    let segment_size = NonZeroU16::new(1448).unwrap();
    assert_eq!(chain.extras().gso, Some(Gso { protocol: GsoProtocol::TcpV4, segment_size }));
}

#[test]
fn rx_chain_with_failed_slot_is_refused_and_consumed() {
    let slots = [response(0, 100, MORE), response(0, -1, MORE), response(0, 100, 0)];
    assert_eq!(refusal(&slots), RxRefusal::BackendFailed { slot: 1, status: Status::Error });
    assert_eq!(parse(&slots).1.slots(), 3, "all of it is consumed");
    assert_eq!(
        refusal(&[response(0, i16::MIN, 0)]),
        RxRefusal::BackendFailed { slot: 0, status: Status::Unknown(i16::MIN) }
    );
}

#[test]
fn rx_fragment_across_page_end_is_refused() {
    assert_eq!(parse(&[response(96, 4000, 0)]).0, RxOutcome::Packet);
    assert_eq!(
        refusal(&[response(97, 4000, 0)]),
        RxRefusal::CrossesPage { slot: 0, offset: 97, len: 4000 }
    );
    assert_eq!(
        refusal(&[response(0, 100, MORE | EXTRA), GSO, response(65535, i16::MAX, 0)]),
        RxRefusal::CrossesPage { slot: 2, offset: 65535, len: 32767 }
    );
}

#[test]
fn rx_packet_below_14_or_above_65535_bytes_is_refused() {
    assert_eq!(refusal(&[response(0, 13, 0)]), RxRefusal::TooShort { total: 13, least: 14 });
    let mut slots = [response(0, 4096, MORE); 16];
    slots[15] = response(0, 4095, 0);
    assert_eq!(parse(&slots).1.total(), 65535);
    slots[15] = response(0, 4096, 0);
    assert_eq!(refusal(&slots), RxRefusal::TooLong { total: 65536, limit: 65535 });
}

#[test]
fn rx_chain_beyond_slot_limit_is_refused_and_beyond_ring_is_fatal() {
    let chain_of = |count: usize| {
        let mut slots = vec![response(0, 100, MORE); count];
        slots[count - 1] = response(0, 100, 0);
        slots
    };
    assert_eq!(parse(&chain_of(18)).0, RxOutcome::Packet);
    assert_eq!(refusal(&chain_of(19)), RxRefusal::TooManySlots { found: 19, limit: 18 });
    assert_eq!(parse(&chain_of(256)).1.slots(), 256);
    let unfinished = RxOutcome::Fatal(RxFatal::Unfinished { published: 3 });
    assert_eq!(parse(&[response(0, 100, MORE); 3]).0, unfinished);
    let longer = RxOutcome::Fatal(RxFatal::LongerThanRing { entries: 256 });
    assert_eq!(parse(&[response(0, 100, MORE); 256]).0, longer);
    assert_eq!(parse(&[response(0, 100, MORE); 300]).0, longer);
}

#[test]
fn rx_extras_beyond_limit_are_refused_and_unknown_ones_skipped() {
    let chain_of = |count: u8| {
        let mut slots = vec![response(0, 100, EXTRA)];
        slots.extend((1..=count).map(|index| [88, u8::from(index < count), 0, 0, 0, 0, 0, 0]));
        slots
    };
    let (outcome, chain) = parse(&chain_of(8));
    assert_eq!((outcome, chain.extras().skipped), (RxOutcome::Packet, 8));
    assert_eq!(refusal(&chain_of(9)), RxRefusal::TooManyExtras { found: 9, limit: 8 });
    assert_eq!(
        refusal(&[response(0, 100, EXTRA), [0; 8]]),
        RxRefusal::BadExtra(ExtraError::InvalidType)
    );
}

#[test]
fn rx_gso_prefix_is_refused() {
    assert_eq!(refusal(&[response(0, 100, 0x10)]), RxRefusal::GsoPrefix);
}

#[test]
fn rx_empty_fragments_are_dropped() {
    let (outcome, chain) =
        parse(&[response(0, 0, MORE), response(0, 60, MORE), response(4096, 0, 0)]);
    assert_eq!(outcome, RxOutcome::Packet);
    assert_eq!(chain.fragments(), [fragment(1, 0, 60)]);
    assert_eq!(chain.empty_fragments(), 2);
}

#[test]
fn xsa_155_rx_slot_is_fetched_once() {
    let mut fetches = [0u16; 2];
    let mut fetch = |index: u32| {
        let fetch_count = &mut fetches[index as usize];
        *fetch_count += 1;
        response(4000 * (*fetch_count - 1), 96, if index == 0 { MORE } else { 0 })
    };
    let mut chain = RxChain::new();
    let outcome = RxChainParser::new(RING_ENTRIES).next(2, &mut fetch, &mut chain);
    assert_eq!(outcome, RxOutcome::Packet);
    assert_eq!(fetches, [1, 1]);
}

/// Generates mostly plausible slots: small numbers, plausible flags, sometimes an extra info.
fn plausible_slot() -> impl Strategy<Value = [u8; 8]> {
    let status = prop_oneof![6 => 0i16..200, 3 => 3900i16..4100, 1 => any::<i16>()];
    let offset = prop_oneof![4 => 0u16..100, 1 => 3900u16..4200];
    let flags = prop::sample::select(vec![0, 0, MORE, MORE, MORE, EXTRA, MORE | EXTRA, 0x13]);
    let data =
        (offset, status, flags).prop_map(|(offset, status, flags)| response(offset, status, flags));
    let extra = (0u8..8, any::<bool>(), 0u8..4)
        .prop_map(|(kind, more, value)| [kind, u8::from(more), value, value, value, 0, 0, 0]);
    prop_oneof![4 => data, 1 => extra]
}

/// Generates chains with MORE_DATA in all slots but the last, so that long packets appear.
fn long_chain() -> impl Strategy<Value = Vec<[u8; 8]>> {
    (1usize..40, prop_oneof![0i16..300, Just(4096)]).prop_map(|(count, size)| {
        let mut slots = vec![response(0, size, MORE); count];
        slots[count - 1] = response(0, size, 0);
        slots
    })
}

proptest! {
    #[test]
    fn fuzz_rx_responses_any_bytes(data in prop::collection::vec(any::<u8>(), 0..600)) {
        rx_responses(&data);
    }

    #[test]
    fn fuzz_rx_responses_plausible(
        settings: [u8; 2],
        slots in prop::collection::vec(plausible_slot(), 0..60),
    ) {
        rx_responses(&[&settings, slots.as_flattened()].concat());
    }

    #[test]
    fn fuzz_rx_responses_long(
        settings: [u8; 2],
        chains in prop::collection::vec(long_chain(), 1..8),
    ) {
        rx_responses(&[&settings, chains.concat().as_flattened()].concat());
    }
}

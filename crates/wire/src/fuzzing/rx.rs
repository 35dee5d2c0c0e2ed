use super::{RingInput, check_extra, first_bad_extra, first_chain, u16_at, unknown_extras};
use crate::netif::emit::{RxPart, emit_rx};
use crate::netif::rx::{RxChain, RxChainParser, RxFatal, RxFragment, RxOutcome, RxRefusal};
use crate::netif::{RxResponse, Status};

type Slot = [u8; RxResponse::SIZE];

/// Parses chain after chain from an rx ring and compares each with the naive oracle.
pub fn rx_responses(data: &[u8]) {
    let Some(input) = RingInput::new(data, RxResponse::SIZE) else { return };
    let slots: Vec<Slot> = input.bytes.as_chunks().0.to_vec();
    let parser = RxChainParser::new(input.entries);
    let mut chain = RxChain::new();
    let mut left = &slots[..];
    loop {
        let mut fetched = 0;
        let mut fetch = |index: u32| {
            assert_eq!(index, fetched, "slots are fetched once each, in order (XSA-155)");
            fetched += 1;
            left[index as usize]
        };
        let available = u32::try_from(left.len()).expect("at most 256 slots");
        let outcome = parser.next(available, &mut fetch, &mut chain);
        assert_eq!(fetched, chain.slots(), "each slot fetched is accounted for");
        assert_eq!(outcome, expected(left, &input), "{left:02x?}");
        check_chain(outcome, &chain, left);
        match outcome {
            RxOutcome::Empty | RxOutcome::Fatal(_) => break,
            _ => left = &left[chain.slots() as usize..],
        }
    }
}

/// Predicts the outcome with a naive reading of the rules.
fn expected(slots: &[Slot], input: &RingInput<'_>) -> RxOutcome {
    let Some(first) = slots.first() else { return RxOutcome::Empty };
    let published = u32::try_from(slots.len()).expect("at most 256 slots");
    let Some(found) = first_chain(slots, 4) else {
        return RxOutcome::Fatal(if published == input.entries {
            RxFatal::LongerThanRing { entries: input.entries }
        } else {
            RxFatal::Unfinished { published }
        });
    };
    if let Some(error) = first_bad_extra(slots, &found.extras) {
        return RxOutcome::Refused(RxRefusal::BadExtra(error));
    }
    let count = |list: &[usize]| u32::try_from(list.len()).expect("at most 256 slots");
    if found.extras.len() > 8 {
        let found = count(&found.extras);
        return RxOutcome::Refused(RxRefusal::TooManyExtras { found, limit: 8 });
    }
    if found.data.len() > 17 {
        let found = 1 + count(&found.data);
        return RxOutcome::Refused(RxRefusal::TooManySlots { found, limit: 18 });
    }
    if u16_at(first, 4) & 0x10 != 0 {
        return RxOutcome::Refused(RxRefusal::GsoPrefix);
    }
    let mut total = 0;
    for &at in [0].iter().chain(&found.data) {
        let slot = u32::try_from(at).expect("at most 256 slots");
        let (offset, status) = (u16_at(&slots[at], 2), u16_at(&slots[at], 6));
        if status >= 0x8000 {
            let status = Status::from_raw(i16::from_le_bytes(status.to_le_bytes()));
            return RxOutcome::Refused(RxRefusal::BackendFailed { slot, status });
        }
        let len = u32::from(status);
        if u32::from(offset) + len > 4096 {
            return RxOutcome::Refused(RxRefusal::CrossesPage { slot, offset, len });
        }
        total += len;
    }
    match total {
        0..14 => RxOutcome::Refused(RxRefusal::TooShort { total, least: 14 }),
        14..65536 => RxOutcome::Packet,
        _ => RxOutcome::Refused(RxRefusal::TooLong { total, limit: 65535 }),
    }
}

/// Checks the chain's contents other than the outcome.
fn check_chain(outcome: RxOutcome, chain: &RxChain, slots: &[Slot]) {
    if outcome != RxOutcome::Packet {
        assert_eq!((chain.fragments(), chain.total()), (&[][..], 0));
    }
    if matches!(outcome, RxOutcome::Empty | RxOutcome::Fatal(_)) {
        return;
    }
    let found = first_chain(slots, 4).expect("the chain has an end");
    assert_eq!(chain.slots() as usize, found.len);
    assert_eq!(chain.extras().skipped, unknown_extras(slots, &found.extras));
    found.extras.iter().for_each(|&index| check_extra(slots[index]));
    if outcome != RxOutcome::Packet {
        return;
    }
    let naive: Vec<RxFragment> = [0]
        .iter()
        .chain(&found.data)
        .map(|&at| RxFragment {
            slot: u32::try_from(at).expect("at most 256 slots"),
            offset: u16_at(&slots[at], 2),
            len: u16_at(&slots[at], 6),
        })
        .filter(|fragment| fragment.len != 0)
        .collect();
    assert_eq!(chain.fragments(), naive);
    let sum: u32 = naive.iter().map(|fragment| u32::from(fragment.len)).sum();
    assert_eq!(chain.total(), sum);
    let first = u16_at(&slots[0], 4);
    assert_eq!(chain.checksum().validated, first & 1 != 0);
    assert_eq!(chain.checksum().blank, first & 2 != 0);
    check_round_trip(chain);
}

/// Asserts that the packet survives emitting and parsing again.
fn check_round_trip(chain: &RxChain) {
    let part = |(id, fragment): (u16, &RxFragment)| {
        let RxFragment { offset, len, .. } = *fragment;
        RxPart { id, offset, len }
    };
    let parts: Vec<RxPart> = (0..).zip(chain.fragments()).map(part).collect();
    let mut slots: Vec<Slot> = Vec::new();
    let emitted = emit_rx(&parts, chain.checksum(), &[], |slot| slots.push(slot));
    let available = emitted.expect("a packet that was taken can be sent");
    let mut again = RxChain::new();
    let mut fetch = |index: u32| slots[index as usize];
    let outcome = RxChainParser::new(256).next(available, &mut fetch, &mut again);
    assert_eq!(outcome, RxOutcome::Packet);
    assert_eq!((again.total(), again.checksum()), (chain.total(), chain.checksum()));
    let places = |chain: &RxChain| {
        chain.fragments().iter().map(|part| (part.offset, part.len)).collect::<Vec<_>>()
    };
    assert_eq!(places(&again), places(chain));
}

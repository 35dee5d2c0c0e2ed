use super::{RingInput, check_extra, first_bad_extra, first_chain, u16_at, unknown_extras};
use crate::netif::emit::{TxPart, emit_tx};
use crate::netif::extra::Extra;
use crate::netif::tx::{
    Fragment, Owed, SlotKind, TxChain, TxChainParser, TxFatal, TxOutcome, TxRefusal,
};
use crate::netif::{Status, TxRequest};

type Slot = [u8; TxRequest::SIZE];

/// Parses chain after chain from a tx ring and compares each with the naive oracle.
pub fn tx_chain(data: &[u8]) {
    let Some(input) = RingInput::new(data, TxRequest::SIZE) else { return };
    let slots: Vec<Slot> = input.bytes.as_chunks().0.to_vec();
    let parser = TxChainParser::new(input.entries).with_slot_limit(input.slot_limit);
    let mut chain = TxChain::new(input.entries);
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
        assert_eq!(fetched as usize, chain.owed().len(), "each slot fetched is accounted for");
        assert_eq!(outcome, expected(left, &input), "{left:02x?}");
        check_chain(outcome, &chain, left);
        match outcome {
            TxOutcome::Empty | TxOutcome::Fatal(_) => break,
            _ => left = &left[chain.owed().len()..],
        }
    }
}

/// Predicts the outcome with a naive reading of the rules.
fn expected(slots: &[Slot], input: &RingInput<'_>) -> TxOutcome {
    let Some(first) = slots.first() else { return TxOutcome::Empty };
    let published = u32::try_from(slots.len()).expect("at most 256 slots");
    let Some(found) = first_chain(slots, 6) else {
        return TxOutcome::Fatal(if published == input.entries {
            TxFatal::LongerThanRing { entries: input.entries }
        } else {
            TxFatal::Unfinished { published }
        });
    };
    if let Some(error) = first_bad_extra(slots, &found.extras) {
        return TxOutcome::Refused(TxRefusal::BadExtra(error));
    }
    let count = |list: &[usize]| u32::try_from(list.len()).expect("at most 256 slots");
    if found.extras.len() > 8 {
        let found = count(&found.extras);
        return TxOutcome::Refused(TxRefusal::TooManyExtras { found, limit: 8 });
    }
    let requests = 1 + count(&found.data);
    if requests > input.slot_limit {
        let limit = input.slot_limit;
        return TxOutcome::Refused(TxRefusal::TooManySlots { found: requests, limit });
    }
    if found.extras.iter().any(|&index| matches!(slots[index][0], 2 | 3)) {
        return TxOutcome::FilterRequest;
    }
    let total = u32::from(u16_at(first, 10));
    if total < 14 {
        return TxOutcome::Refused(TxRefusal::TooShort { total, least: 14 });
    }
    let sizes: Vec<u32> = found.data.iter().map(|&at| u32::from(u16_at(&slots[at], 10))).collect();
    let fragments = sizes.iter().sum();
    if fragments > total {
        return TxOutcome::Refused(TxRefusal::SmallerThanFragments { total, fragments });
    }
    let offsets = [0].iter().chain(&found.data).map(|&at| u16_at(&slots[at], 4));
    let sizes = [total - fragments].into_iter().chain(sizes);
    for (index, (offset, len)) in (0..).zip(offsets.zip(sizes)) {
        if u64::from(offset) + u64::from(len) > 4096 {
            return TxOutcome::Refused(TxRefusal::CrossesPage { index, offset, len });
        }
    }
    TxOutcome::Packet
}

/// Checks the chain's contents other than the outcome.
fn check_chain(outcome: TxOutcome, chain: &TxChain, slots: &[Slot]) {
    if outcome != TxOutcome::Packet {
        assert_eq!((chain.fragments(), chain.total()), (&[][..], 0));
    }
    if matches!(outcome, TxOutcome::Empty | TxOutcome::Fatal(_)) {
        return;
    }
    let found = first_chain(slots, 6).expect("the chain has an end");
    assert_eq!(chain.owed().len(), found.len);
    for (index, owed) in chain.owed().iter().enumerate() {
        let naive = if found.extras.contains(&index) {
            Owed { id: 0, kind: SlotKind::Extra }
        } else {
            Owed { id: u16_at(&slots[index], 8), kind: SlotKind::Request }
        };
        assert_eq!(*owed, naive);
    }
    let extras = chain.owed().iter().filter(|owed| owed.kind == SlotKind::Extra).count();
    let nulls = chain.responses(Status::Error).filter(|response| response.status == Status::Null);
    assert_eq!(nulls.count(), extras, "extra infos are answered NULL, requests are not");
    assert_eq!(chain.extras().skipped, unknown_extras(slots, &found.extras));
    for &index in &found.extras {
        check_extra(*slots[index].first_chunk().expect("12 bytes"));
    }
    if outcome == TxOutcome::Packet {
        check_packet(chain, slots, &found.data);
        check_round_trip(chain);
    }
}

/// Checks the guarantees of [`TxChain`] for a packet.
fn check_packet(chain: &TxChain, slots: &[Slot], data: &[usize]) {
    assert_eq!(chain.total(), u16_at(&slots[0], 10));
    let sum: u32 = chain.fragments().iter().map(|fragment| u32::from(fragment.len)).sum();
    assert_eq!(sum, u32::from(chain.total()));
    assert_eq!(chain.fragments().len() + chain.empty_fragments() as usize, 1 + data.len());
    let mut requests = [0].iter().chain(data).map(|&index| TxRequest::from_bytes(slots[index]));
    for &Fragment { gref, offset, len } in chain.fragments() {
        assert!(len > 0 && u32::from(offset) + u32::from(len) <= 4096);
        let named = requests.any(|request| (request.gref, request.offset) == (gref, offset));
        assert!(named, "fragments are in the order of the requests");
    }
    let first = u16_at(&slots[0], 6);
    assert_eq!(chain.checksum().blank, first & 1 != 0);
    assert_eq!(chain.checksum().validated, first & 2 != 0);
}

/// Asserts that the packet survives emitting and parsing again.
fn check_round_trip(chain: &TxChain) {
    let part = |(id, fragment): (u16, &Fragment)| {
        let Fragment { gref, offset, len } = *fragment;
        TxPart { gref, offset, len, id }
    };
    let parts: Vec<TxPart> = (0..).zip(chain.fragments()).map(part).collect();
    let extras = chain.extras();
    let list: Vec<Extra> = [
        extras.gso.map(Extra::Gso),
        extras.hash.map(Extra::Hash),
        extras.xdp_headroom.map(|headroom| Extra::Xdp { headroom }),
    ]
    .into_iter()
    .flatten()
    .collect();
    let mut slots: Vec<Slot> = Vec::new();
    let emitted = emit_tx(&parts, chain.checksum(), &list, |slot| slots.push(slot));
    let available = emitted.expect("a packet that was taken can be sent");
    assert_eq!(available as usize, slots.len());
    let mut again = TxChain::new(256);
    let mut fetch = |index: u32| slots[index as usize];
    let outcome = TxChainParser::new(256).next(available, &mut fetch, &mut again);
    assert_eq!(outcome, TxOutcome::Packet);
    assert_eq!(again.fragments(), chain.fragments());
    assert_eq!((again.total(), again.checksum()), (chain.total(), chain.checksum()));
    assert_eq!(again.extras().gso, extras.gso);
    assert_eq!(again.extras().hash, extras.hash);
    assert_eq!(again.extras().xdp_headroom, extras.xdp_headroom);
}

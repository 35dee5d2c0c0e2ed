//! Layouts against hand-written bytes, and rules at their limits.

use super::*;
use crate::grant::Gref;
use proptest::prelude::*;

const RULES: Rules = Rules {
    sectors: 2048,
    sector_size: 512,
    read_only: false,
    flush: true,
    barrier: true,
    discard: true,
    extents: true,
    write_zeroes: true,
    indirect_segments: SEGMENTS_MAX,
};

fn parse(abi: Abi, slot: &Slot) -> (BlkRequest, Vec<SegmentRange>) {
    let mut segments = vec![];
    (BlkRequest::parse(abi, slot, &RULES, &mut segments), segments)
}

fn segment(gref: u32, first: u8, last: u8) -> SegmentRange {
    SegmentRange::new(Gref(gref), first, last).unwrap()
}

/// Builds a slot from bytes at offsets, zero elsewhere.
fn slot(parts: &[(usize, &[u8])]) -> Slot {
    let mut slot = [0; 112];
    for (at, bytes) in parts {
        slot[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    slot
}

#[test]
fn direct_request_in_each_layout_round_trips() {
    // Write, two segments, handle 0x0102, id 0x1122334455667788, sector 0x10.
    let id = 0x1122_3344_5566_7788u64.to_le_bytes();
    let first: &[u8] = &[9, 0, 0, 0, 1, 7, 0, 0];
    let second: &[u8] = &[10, 0, 0, 0, 0, 0, 0, 0];
    for (abi, at) in [(Abi::X86_64, [8, 16, 24, 32]), (Abi::X86_32, [4, 12, 20, 28])] {
        let head: &[u8] = &[1, 2, 2, 1];
        let bytes =
            slot(&[(0, head), (at[0], &id), (at[1], &[16]), (at[2], first), (at[3], second)]);
        let (request, segments) = parse(abi, &bytes);
        assert_eq!((request.id, request.operation), (0x1122_3344_5566_7788, 1));
        let transfer = Transfer { direction: Direction::Write, sector: 16, sectors: 8 };
        assert_eq!(request.body, Ok(Body::Transfer(transfer)));
        assert_eq!(segments, [segment(9, 1, 7), segment(10, 0, 0)]);
        assert_eq!((segments[0].offset(), segments[0].len()), (512, 3584));
        let again = direct(
            abi,
            Operation::Write,
            RequestName { id: request.id, handle: 0x0102 },
            16,
            &segments,
        )
        .unwrap();
        assert_eq!(again, bytes);
    }
}

#[test]
fn indirect_request_in_each_layout_round_trips() {
    for (abi, [id, sector, handle, grefs]) in
        [(Abi::X86_64, [8, 16, 24, 28]), (Abi::X86_32, [4, 12, 20, 24])]
    {
        let bytes = slot(&[
            (0, &[6, 0, 0, 1]),
            (id, &[5]),
            (sector, &[8]),
            (handle, &[3, 0]),
            (grefs, &[77, 0, 0, 0]),
        ]);
        let (request, segments) = parse(abi, &bytes);
        let Ok(Body::Indirect(head)) = request.body else { panic!("{request:?}") };
        assert!(segments.is_empty());
        assert_eq!(request.operation, 0, "the inner one, or Linux' frontend disables its disk");
        assert_eq!((head.pages(), head.descriptor_bytes()), (&[Gref(77)][..], 256 * 8));
        assert_eq!(
            indirect(abi, Direction::Read, RequestName { id: 5, handle: 3 }, 8, 256, head.pages()),
            Some(bytes)
        );
        let list: Vec<_> = (0..256).map(|n| segment(n, 0, 1)).collect();
        let descriptors: Vec<u8> = indirect_descriptors(&list).flatten().collect();
        let mut found = vec![];
        let transfer = head.segments(&descriptors, &RULES, &mut found).unwrap();
        assert_eq!((transfer.sector, transfer.sectors, found), (8, 512, list));
    }
}

#[test]
fn discard_in_each_layout_round_trips() {
    for (abi, [id, sector, count]) in [(Abi::X86_64, [8, 16, 24]), (Abi::X86_32, [4, 12, 20])] {
        let bytes = slot(&[(0, &[5, 1, 9, 0]), (id, &[6]), (sector, &[8]), (count, &[16])]);
        let (request, _) = parse(abi, &bytes);
        assert_eq!(request.body, Ok(Body::Discard { sector: 8, sectors: 16, secure: true }));
        assert_eq!(discard(abi, RequestName { id: 6, handle: 9 }, 8, 16, true), bytes);
    }
}

#[test]
fn write_of_zeros_in_each_layout_round_trips() {
    for (abi, [id, sector, count]) in [(Abi::X86_64, [8, 16, 24]), (Abi::X86_32, [4, 12, 20])] {
        let bytes = slot(&[(0, &[0xE1, 1, 9, 0]), (id, &[6]), (sector, &[8]), (count, &[16])]);
        let (request, segments) = parse(abi, &bytes);
        assert_eq!(request.body, Ok(Body::WriteZeroes { sector: 8, sectors: 16, allocate: true }));
        assert!(segments.is_empty());
        assert_eq!(write_zeroes(abi, RequestName { id: 6, handle: 9 }, 8, 16, true), bytes);
        for (rules, refusal) in [
            (Rules { write_zeroes: false, ..RULES }, BlkRefusal::NotOffered { operation: 0xE1 }),
            (Rules { read_only: true, ..RULES }, BlkRefusal::ReadOnly),
            (
                Rules { sectors: 23, ..RULES },
                BlkRefusal::BeyondDisk { sector: 8, count: 16, limit: 23 },
            ),
        ] {
            let refused = BlkRequest::parse(abi, &bytes, &rules, &mut vec![]).body;
            assert_eq!(refused, Err(refusal));
        }
    }
}

#[test]
fn query_of_extents_in_each_layout_round_trips() {
    for (abi, [id, sector, count, gref]) in
        [(Abi::X86_64, [8, 16, 24, 32]), (Abi::X86_32, [4, 12, 20, 28])]
    {
        let bytes = slot(&[
            (0, &[0xE0, 0, 9, 0]),
            (id, &[6]),
            (sector, &[8]),
            (count, &[0, 4]),
            (gref, &[77]),
        ]);
        let (request, segments) = parse(abi, &bytes);
        assert_eq!(request.body, Ok(Body::Extents { sector: 8, sectors: 1024 }));
        assert_eq!(segments, [segment(77, 0, 7)]);
        assert_eq!(extents(abi, RequestName { id: 6, handle: 9 }, 8, 1024, Gref(77)), bytes);
        let plain = Rules { extents: false, ..RULES };
        let refused = BlkRequest::parse(abi, &bytes, &plain, &mut vec![]).body;
        assert_eq!(refused, Err(BlkRefusal::NotOffered { operation: 0xE0 }));
    }
    let whole = extents(Abi::X86_64, RequestName { id: 6, handle: 9 }, 8, 2041, Gref(77));
    let beyond = BlkRefusal::BeyondDisk { sector: 8, count: 2041, limit: 2048 };
    assert_eq!(parse(Abi::X86_64, &whole).0.body, Err(beyond));
}

#[test]
fn extent_in_each_state_round_trips() {
    let zero = ExtentState { hole: false, zero: true };
    for (state, flags) in [(ExtentState::DATA, 0), (ExtentState::HOLE, 3), (zero, 2)] {
        let bytes = [1, 2, 0, 0, flags, 0, 0, 0];
        let extent = Extent { sectors: 0x201, state };
        assert_eq!((extent.to_bytes(), Extent::from_bytes(bytes)), (bytes, extent));
    }
}

#[test]
fn xsa_216_response_padding_is_zero() {
    let response = Response { id: u64::MAX, operation: 0xEE, status: Status::Error };
    let bytes = response.to_bytes();
    let expected = [255, 255, 255, 255, 255, 255, 255, 255, 0xEE, 0, 255, 255, 0, 0, 0, 0];
    assert_eq!(bytes, expected);
    assert_eq!(Response::from_bytes(bytes), response);
    assert_eq!(Abi::ALL.map(Abi::response_bytes), [16, 12]);
}

#[test]
fn abi_name_selects_layout() {
    assert_eq!(Abi::from_name(b"arm-abi"), Some(Abi::X86_64));
    for abi in Abi::ALL {
        assert_eq!(Abi::from_name(abi.name().as_bytes()), Some(abi));
    }
    assert_eq!(Abi::from_name(b"x86_64-abi\n"), None);
    let entries =
        |abi: Abi, pages: usize| crate::ring::entry_count(pages * 4096, abi.request_bytes());
    assert_eq!([1, 2, 4, 8, 16].map(|n| entries(Abi::X86_64, n)), [32, 64, 128, 256, 512]);
    assert_eq!(entries(Abi::X86_32, 1), 32);
}

/// Returns the rule that a read of one segment breaks.
fn refusal(sector: u64, first: u8, last: u8, rules: &Rules) -> Option<BlkRefusal> {
    let mut bytes = slot(&[(0, &[0, 1]), (24, &[8, 0, 0, 0, first, last])]);
    bytes[16..24].copy_from_slice(&sector.to_le_bytes());
    BlkRequest::parse(Abi::X86_64, &bytes, rules, &mut vec![]).body.err()
}

#[test]
fn xsa_270_segment_beyond_page_or_disk_is_refused() {
    assert_eq!(refusal(2040, 0, 7, &RULES), None);
    let reversed = BlkRefusal::SectorsReversed { index: 0, first: 5, last: 4 };
    assert_eq!(refusal(0, 5, 4, &RULES), Some(reversed));
    assert_eq!(refusal(0, 0, 8, &RULES), Some(BlkRefusal::BeyondPage { index: 0, last: 8 }));
    assert_eq!(refusal(0, 255, 255, &RULES), Some(BlkRefusal::BeyondPage { index: 0, last: 255 }));
    let beyond = BlkRefusal::BeyondDisk { sector: 2041, count: 8, limit: 2048 };
    assert_eq!(refusal(2041, 0, 7, &RULES), Some(beyond));
    let overflow = BlkRefusal::Overflow { sector: u64::MAX - 6, count: 8 };
    assert_eq!(refusal(u64::MAX - 6, 0, 7, &RULES), Some(overflow));
    let large = Rules { sector_size: 4096, ..RULES };
    assert_eq!(refusal(8, 0, 7, &large), None);
    let unaligned = BlkRefusal::Unaligned { sector: 8, count: 7, sector_size: 4096 };
    assert_eq!(refusal(8, 1, 7, &large), Some(unaligned));
    assert!(refusal(9, 0, 7, &large).is_some());
}

#[test]
fn flush_and_barrier_without_segments_are_accepted_on_read_only_disk() {
    for operation in [Operation::Flush, Operation::Barrier] {
        let empty =
            direct(Abi::X86_64, operation, RequestName { id: 1, handle: 0 }, 0, &[]).unwrap();
        let (request, _) = parse(Abi::X86_64, &empty);
        let body = request.body.unwrap();
        assert!(matches!(body, Body::Flush(None) | Body::Barrier(None)), "{body:?}");
        let one = direct(
            Abi::X86_64,
            operation,
            RequestName { id: 1, handle: 0 },
            8,
            &[segment(9, 0, 7)],
        )
        .unwrap();
        let body = parse(Abi::X86_64, &one).0.body.unwrap();
        assert!(matches!(body, Body::Flush(Some(_)) | Body::Barrier(Some(_))), "{body:?}");
        let read_only = Rules { read_only: true, ..RULES };
        let judge = |slot| BlkRequest::parse(Abi::X86_64, slot, &read_only, &mut vec![]).body;
        assert!(judge(&empty).is_ok());
        assert_eq!(judge(&one), Err(BlkRefusal::ReadOnly));
    }
}

#[test]
fn refusal_labels_are_distinct() {
    let (sector, count, limit) = (0, 0, 0);
    let all = [
        BlkRefusal::UnknownOperation { operation: 0 },
        BlkRefusal::NotOffered { operation: 0 },
        BlkRefusal::NotIndirect { operation: 0 },
        BlkRefusal::ReadOnly,
        BlkRefusal::Nothing,
        BlkRefusal::TooManySegments { found: 0, limit: 0 },
        BlkRefusal::SectorsReversed { index: 0, first: 0, last: 0 },
        BlkRefusal::BeyondPage { index: 0, last: 0 },
        BlkRefusal::Overflow { sector, count },
        BlkRefusal::BeyondDisk { sector, count, limit },
        BlkRefusal::Unaligned { sector, count, sector_size: 0 },
    ];
    let names: std::collections::BTreeSet<_> = all.iter().map(BlkRefusal::label).collect();
    assert_eq!(names.len(), all.len());
}

/// Bytes that are mostly small, so that requests are often well-formed.
fn slots() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![4 => Just(0u8), 4 => 0u8..9, 1 => any::<u8>()];
    prop::collection::vec(byte, 124..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn request_of_small_bytes_matches_naive_oracle(data in slots()) {
        crate::fuzzing::blkif_request(&data);
    }

    #[test]
    fn request_of_any_bytes_matches_naive_oracle(data in prop::collection::vec(any::<u8>(), 0..300)) {
        crate::fuzzing::blkif_request(&data);
    }
}

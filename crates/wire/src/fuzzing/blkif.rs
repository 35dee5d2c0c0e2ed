use crate::blkif::{
    Abi, BlkRefusal, BlkRequest, Body, Direction, Operation, RequestName, Rules, SegmentRange,
    Slot, Status, Transfer, direct, discard, extents, indirect, indirect_descriptors, write_zeroes,
};

/// Parses one blkif request with its segment descriptors and compares it with a naive oracle. Accepted
/// requests are emitted and parsed again.
pub fn blkif_request(data: &[u8]) {
    let Some((settings, rest)) = data.split_first_chunk::<12>() else { return };
    let Some((slot, descriptors)) = rest.split_first_chunk::<112>() else { return };
    let abi = Abi::ALL[usize::from(settings[0] & 1)];
    let bit = |n: u8| settings[1] & (1 << n) != 0;
    let size = u64::from(u32::from_le_bytes([settings[4], settings[5], settings[6], settings[7]]));
    let rules = Rules {
        sectors: if bit(4) { u64::MAX / 512 } else { size },
        sector_size: if bit(5) { 4096 } else { 512 },
        read_only: settings[0] & 2 != 0,
        flush: bit(1),
        barrier: bit(2),
        discard: bit(3),
        extents: bit(6),
        write_zeroes: bit(7),
        indirect_segments: u16::from_le_bytes([settings[2], settings[3]]),
    };
    let mut segments = vec![];
    let request = BlkRequest::parse(abi, slot, &rules, &mut segments);
    // The response to an indirect request echoes the inner operation.
    assert_eq!(request.operation, if slot[0] == 6 { slot[1] } else { slot[0] });
    assert_eq!(request.id, number(slot, if abi == Abi::X86_64 { 8 } else { 4 }, 8));
    match &request.body {
        Err(refusal) => {
            assert!(segments.is_empty());
            assert_eq!(
                Some(*refusal),
                expected_refusal(abi, slot, &rules),
                "{slot:02x?} {rules:?}"
            );
            let unsupported = refusal.status() == Status::NotSupported;
            let unknown = matches!(
                refusal,
                BlkRefusal::UnknownOperation { .. } | BlkRefusal::NotOffered { .. }
            );
            assert_eq!(unsupported, unknown);
        }
        Ok(body) => {
            assert_eq!(None, expected_refusal(abi, slot, &rules), "{slot:02x?} {rules:?}");
            check_body(abi, &request, body, &rules, segments, descriptors);
        }
    }
}

/// Returns the little-endian number of `width` bytes at offset `at`.
fn number(bytes: &[u8], at: usize, width: usize) -> u64 {
    bytes[at..at + width].iter().rev().fold(0, |sum, byte| sum * 256 + u64::from(*byte))
}

fn check_range(sector: u64, sectors: u64, rules: &Rules) {
    assert!(sectors > 0);
    let end = u128::from(sector) + u128::from(sectors);
    assert!(end <= u128::from(rules.sectors));
    assert_eq!((sector * 512) % u64::from(rules.sector_size), 0);
    assert_eq!((sectors * 512) % u64::from(rules.sector_size), 0);
}

fn check_segments(transfer: &Transfer, segments: &[SegmentRange], rules: &Rules) {
    let mut bytes = 0;
    for segment in segments {
        assert!(segment.len() >= 512 && segment.len().is_multiple_of(512));
        assert!(u32::from(segment.offset()) + u32::from(segment.len()) <= 4096);
        bytes += u64::from(segment.len());
    }
    assert_eq!(bytes, transfer.sectors * 512);
    check_range(transfer.sector, transfer.sectors, rules);
    assert!(!rules.read_only || transfer.direction == Direction::Read);
}

fn check_body(
    abi: Abi,
    request: &BlkRequest,
    body: &Body,
    rules: &Rules,
    mut segments: Vec<SegmentRange>,
    descriptors: &[u8],
) {
    let name = RequestName { id: request.id, handle: 7 };
    let operation = Operation::from_raw(request.operation);
    let again = match body {
        Body::Transfer(transfer) => {
            check_segments(transfer, &segments, rules);
            direct(abi, operation, name, transfer.sector, &segments).expect("11 at most")
        }
        Body::Flush(written) | Body::Barrier(written) => {
            if let Some(transfer) = written {
                check_segments(transfer, &segments, rules);
            }
            let sector = written.map_or(0, |transfer| transfer.sector);
            direct(abi, operation, name, sector, &segments).expect("11 at most")
        }
        Body::Discard { sector, sectors, secure } => {
            check_range(*sector, *sectors, rules);
            discard(abi, name, *sector, *sectors, *secure)
        }
        Body::WriteZeroes { sector, sectors, allocate } => {
            check_range(*sector, *sectors, rules);
            assert!(!rules.read_only);
            write_zeroes(abi, name, *sector, *sectors, *allocate)
        }
        Body::Extents { sector, sectors } => {
            check_range(*sector, *sectors, rules);
            let [page] = segments[..] else { panic!("one page") };
            assert_eq!((page.offset(), page.len()), (0, 4096));
            extents(abi, name, *sector, *sectors, page.gref())
        }
        Body::Indirect(head) => {
            let count = u16::try_from(head.descriptor_bytes() / 8).expect("a u16 on the wire");
            assert!(count > 0 && count <= rules.indirect_segments && head.pages().len() <= 8);
            assert!(head.pages().len() * 4096 >= head.descriptor_bytes());
            match head.segments(descriptors, rules, &mut segments) {
                Ok(transfer) => {
                    check_segments(&transfer, &segments, rules);
                    let bytes: Vec<u8> = indirect_descriptors(&segments).flatten().collect();
                    let mut again = vec![];
                    assert_eq!(head.segments(&bytes, rules, &mut again), Ok(transfer));
                    assert_eq!(again, segments);
                    let pages = head.pages();
                    indirect(abi, head.direction(), name, transfer.sector, count, pages)
                        .expect("8 pages at most")
                }
                Err(_) => {
                    assert!(segments.is_empty());
                    return;
                }
            }
        }
    };
    let mut same = vec![];
    let reread = BlkRequest::parse(abi, &again, rules, &mut same);
    assert_eq!(reread, *request);
    if !matches!(body, Body::Indirect(_)) {
        assert_eq!(same, segments);
    }
}

/// Predicts the refusal of a slot with a naive reading of the rules, in wide integers.
fn expected_refusal(abi: Abi, slot: &Slot, rules: &Rules) -> Option<BlkRefusal> {
    let (sector_at, tail) = if abi == Abi::X86_64 { (16, 24) } else { (12, 20) };
    let operation = slot[0];
    let offered = match operation {
        0 | 1 => true,
        2 => rules.barrier,
        3 => rules.flush,
        5 => rules.discard,
        6 => rules.indirect_segments != 0,
        0xE0 => rules.extents,
        0xE1 => rules.write_zeroes,
        _ => return Some(BlkRefusal::UnknownOperation { operation }),
    };
    if !offered {
        return Some(BlkRefusal::NotOffered { operation });
    }
    let sector = number(slot, sector_at, 8);
    match operation {
        5 | 0xE1 if rules.read_only => Some(BlkRefusal::ReadOnly),
        5 | 0xE0 | 0xE1 => expected_range_refusal(sector, number(slot, tail, 8), rules),
        6 if slot[1] > 1 => Some(BlkRefusal::NotIndirect { operation: slot[1] }),
        6 if slot[1] == 1 && rules.read_only => Some(BlkRefusal::ReadOnly),
        6 => {
            let found = u16::try_from(number(slot, 2, 2)).expect("two bytes");
            let limit = rules.indirect_segments.min(4096);
            match found {
                0 => Some(BlkRefusal::Nothing),
                _ if found > limit => Some(BlkRefusal::TooManySegments { found, limit }),
                _ => None,
            }
        }
        _ => {
            let count = slot[1];
            if rules.read_only && (operation == 1 || (operation > 1 && count > 0)) {
                return Some(BlkRefusal::ReadOnly);
            }
            match count {
                0 if operation < 2 => return Some(BlkRefusal::Nothing),
                0 => return None,
                12.. => {
                    return Some(BlkRefusal::TooManySegments { found: count.into(), limit: 11 });
                }
                _ => {}
            }
            let mut sectors = 0;
            for index in 0..u32::from(count) {
                let at = tail + 8 * index as usize;
                let (first, last) = (slot[at + 4], slot[at + 5]);
                if last < first {
                    return Some(BlkRefusal::SectorsReversed { index, first, last });
                }
                if last > 7 {
                    return Some(BlkRefusal::BeyondPage { index, last });
                }
                sectors += u64::from(last) - u64::from(first) + 1;
            }
            expected_range_refusal(sector, sectors, rules)
        }
    }
}

fn expected_range_refusal(sector: u64, count: u64, rules: &Rules) -> Option<BlkRefusal> {
    let end = u128::from(sector) + u128::from(count);
    let unit = u64::from(rules.sector_size / 512);
    if count == 0 {
        Some(BlkRefusal::Nothing)
    } else if end > u128::from(u64::MAX) {
        Some(BlkRefusal::Overflow { sector, count })
    } else if end > u128::from(rules.sectors) {
        Some(BlkRefusal::BeyondDisk { sector, count, limit: rules.sectors })
    } else if !sector.is_multiple_of(unit) || !count.is_multiple_of(unit) {
        Some(BlkRefusal::Unaligned { sector, count, sector_size: rules.sector_size })
    } else {
        None
    }
}

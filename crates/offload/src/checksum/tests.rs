use proptest::prelude::*;

use super::incremental::{replace, update, update_bytes};
use super::partial::never_zero;
use super::*;
use crate::meta::ChecksumPlace;

/// RFC 1071 as written: 16-bit words, a carry brought back at once.
fn naive_sum(bytes: &[u8]) -> u16 {
    let mut sum = 0u32;
    for pair in bytes.chunks(2) {
        let low = pair.get(1).copied().unwrap_or(0);
        sum += u32::from(u16::from_be_bytes([pair[0], low]));
        if sum > 0xffff {
            sum -= 0xffff;
        }
    }
    u16::try_from(sum).unwrap()
}

/// The header of a UDP packet of 115 bytes, 192.168.0.1 to 192.168.0.199.
const IPV4_HEADER: [u8; 20] = [
    0x45, 0x00, 0x00, 0x73, 0x00, 0x00, 0x40, 0x00, 0x40, 0x11, 0xb8, 0x61, 0xc0, 0xa8, 0x00, 0x01,
    0xc0, 0xa8, 0x00, 0xc7,
];

#[test]
fn sum_of_rfc_1071_example_matches() {
    let data = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
    assert_eq!(sum(&data), 0xddf2);
    assert_eq!(internet_checksum(&data), 0x220d);
}

#[test]
fn checksum_over_correct_ipv4_header_is_zero() {
    assert_eq!(internet_checksum(&IPV4_HEADER), 0);
    let mut blank = IPV4_HEADER;
    blank[10..12].fill(0);
    assert_eq!(internet_checksum(&blank), 0xb861);
}

#[test]
fn sum_of_empty_and_odd_lengths_is_padded() {
    assert_eq!(sum(&[]), 0);
    assert_eq!(sum(&[0xab]), 0xab00);
    assert_eq!(sum(&[0x12, 0x34, 0x56]), 0x1234 + 0x5600);
}

#[test]
fn sum_of_all_ones_folds_every_carry() {
    for len in [2, 16, 4096, 65534, 1 << 20] {
        assert_eq!(sum(&vec![0xff; len]), 0xffff, "{len} bytes");
    }
}

#[test]
fn fold_at_limits_matches_modulo() {
    let modulo = |sum: u64| match u16::try_from(sum % 0xffff).unwrap() {
        0 if sum != 0 => 0xffff,
        rest => rest,
    };
    let edges = [0, 1, 0xffff, 0x1_0000, 0x1_ffff, 0xffff_ffff, 0x1_0000_0000, 0xffff_0000_ffff];
    for edge in edges.into_iter().chain([u64::MAX, u64::MAX - 1, u64::MAX << 16, u64::MAX << 48]) {
        assert_eq!(fold(edge), modulo(edge), "{edge:#x}");
    }
}

/// RFC 1624, section 4: the case that RFC 1141's form gets wrong (it gives 0xFFFF).
#[test]
fn update_of_rfc_1624_example_matches() {
    assert_eq!(update(0xdd2f, 0x5555, 0x3285), 0x0000);
}

#[test]
fn update_bytes_after_address_change_matches_full_sum() {
    let mut header = IPV4_HEADER;
    let new = [10, 1, 2, 3];
    let checksum = update_bytes(0xb861, &[192, 168, 0, 1], &new);
    header[12..16].copy_from_slice(&new);
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    assert_eq!(internet_checksum(&header), 0);
}

#[test]
fn pseudo_header_v4_includes_every_field() {
    let bytes = [10, 0, 0, 1, 10, 0, 0, 2, 0, 6, 0x12, 0x34];
    let sum = pseudo::pseudo_header_v4([10, 0, 0, 1], [10, 0, 0, 2], 6, 0x1234);
    assert_eq!(sum, naive_sum(&bytes));
}

#[test]
fn pseudo_header_v6_includes_every_field() {
    let source = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    let destination = [0xff; 16];
    let mut bytes = [source, destination].concat();
    bytes.extend([0, 1, 0x02, 0x03, 0, 0, 0, 17]);
    assert_eq!(pseudo::pseudo_header_v6(source, destination, 17, 0x1_0203), naive_sum(&bytes));
}

#[test]
fn completed_checksum_of_zero_is_stored_as_ones() {
    // Sum 0xffff, so the checksum comes out as zero.
    let mut frame = [0xff, 0xff, 0x00, 0x00];
    let place = ChecksumPlace { start: 0, offset: 2 };
    assert_eq!(complete_partial(&mut frame, place), Ok(0xffff));
    assert_eq!(frame, [0xff; 4]);
    assert_eq!((never_zero(0), never_zero(1)), (0xffff, 1));
}

#[test]
fn completion_with_field_beyond_headers_is_rejected() {
    let mut frame = [0u8; 10];
    for (start, offset, end) in [(0, 9, 11), (9, 0, 11), (65535, 65535, 131_072), (8, 1, 11)] {
        let place = ChecksumPlace { start, offset };
        let refused = Err(PartialError::FieldOutside { end, headers: 10 });
        assert_eq!(complete_partial(&mut frame, place), refused);
    }
    assert!(complete_partial(&mut frame, ChecksumPlace { start: 8, offset: 0 }).is_ok());
}

#[test]
fn completion_into_shorter_headers_is_rejected() {
    let place = ChecksumPlace { start: 0, offset: 6 };
    let completion = Completion::begin(place, &[0; 8]).unwrap();
    let refused = Err(PartialError::FieldOutside { end: 8, headers: 7 });
    assert_eq!(completion.finish(&mut [0; 7]), refused);
}

proptest! {
    #[test]
    fn sum_of_any_slice_matches_naive_sum(bytes in prop::collection::vec(any::<u8>(), 0..2048), skip in 0usize..17) {
        // Any start, so that every alignment of the words is met.
        let bytes = bytes.get(skip..).unwrap_or_default();
        prop_assert_eq!(sum(bytes), naive_sum(bytes));
    }

    #[test]
    fn sum_over_any_pieces_matches_whole(
        bytes in prop::collection::vec(any::<u8>(), 0..600),
        lengths in prop::collection::vec(0usize..40, 0..40),
    ) {
        let mut rest = bytes.as_slice();
        let mut accumulator = Accumulator::new();
        for len in lengths {
            let (piece, left) = rest.split_at(len.min(rest.len()));
            accumulator.add(piece);
            rest = left;
        }
        accumulator.add(rest);
        prop_assert_eq!(accumulator.fold(), naive_sum(&bytes));
        prop_assert_eq!(accumulator.checksum(), internet_checksum(&bytes));
    }

    #[test]
    fn sum_with_seed_matches_seed_as_data(seed in any::<u16>(), bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let mut seeded = Accumulator::with_sum(seed);
        seeded.add(&bytes);
        let mut added = Accumulator::new();
        added.add(&bytes);
        added.add_sum(seed);
        let whole = [&seed.to_be_bytes(), bytes.as_slice()].concat();
        prop_assert_eq!(seeded.fold(), naive_sum(&whole));
        prop_assert_eq!(added.fold(), seeded.fold());
    }

    /// The result is the same number as a full sum, up to the two forms of zero.
    #[test]
    fn update_of_any_word_matches_full_sum(
        bytes in prop::collection::vec(any::<u8>(), 8..64),
        word in 0usize..4,
        new in any::<[u8; 2]>(),
    ) {
        let before = internet_checksum(&bytes);
        let mut changed = bytes.clone();
        changed[2 * word..][..2].copy_from_slice(&new);
        let old = u16::from_be_bytes([bytes[2 * word], bytes[2 * word + 1]]);
        let updated = update(before, old, u16::from_be_bytes(new));
        prop_assert_eq!(updated % 0xffff, internet_checksum(&changed) % 0xffff);
        // A receiver accepts both forms of zero.
        let mut whole = Accumulator::with_sum(updated);
        whole.add(&changed);
        prop_assert_eq!(whole.checksum(), 0);
        prop_assert_eq!(replace(!before, old, u16::from_be_bytes(new)), !updated);
    }

    /// A finished checksum makes the covered bytes sum to zero, however the payload is cut.
    #[test]
    fn completed_checksum_over_any_pieces_verifies(
        headers in prop::collection::vec(any::<u8>(), 2..128),
        payload in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..99), 0..6),
        start in 0usize..128,
        offset in 0usize..128,
    ) {
        let mut headers = headers;
        let start = start.min(headers.len() - 2);
        let offset = offset.min(headers.len() - 2 - start) & !1;
        let place = ChecksumPlace {
            start: u16::try_from(start).unwrap(),
            offset: u16::try_from(offset).unwrap(),
        };
        let before = [headers.as_slice(), &payload.concat()].concat();
        let pieces = payload.iter().map(Vec::as_slice);
        let stored = complete_scattered(&mut headers, pieces, place).unwrap();
        prop_assert_ne!(stored, 0);
        prop_assert_eq!(stored, never_zero(!naive_sum(&before[start..])));

        let mut one_piece = before.clone();
        prop_assert_eq!(complete_partial(&mut one_piece, place), Ok(stored));
        prop_assert_eq!(&one_piece[..headers.len()], headers.as_slice());

        // Blank field holding the seed: verifying puts the seed back beside the data.
        let seed = u16::from_be_bytes([before[start + offset], before[start + offset + 1]]);
        let mut verify = Accumulator::with_sum(seed);
        verify.add(&one_piece[start..]);
        prop_assert_eq!(verify.checksum(), 0);
    }
}

use proptest::prelude::*;
use ringfence_memory::WriteList;
use ringfence_offload::checksum::internet_checksum;

use super::*;

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| u8::try_from(i % 251).unwrap()).collect()
}

fn bytes(frame: FrameView<'_>) -> Vec<u8> {
    let mut out = vec![0; frame.len() + 1];
    let n = frame.copy_to(&mut out);
    out.truncate(n);
    out
}

fn push(batch: &mut Batch, bytes: &[u8]) -> u32 {
    let offset = batch.reserve(bytes.len()).unwrap();
    batch.scratch_mut(offset..offset + bytes.len()).unwrap().copy_from_slice(bytes);
    batch.push_contiguous(offset, bytes.len(), OffloadMeta::PLAIN).unwrap()
}

#[test]
fn short_frame_has_header_only() {
    let mut batch = Batch::with_capacity(4, 4096);
    let index = push(&mut batch, &pattern(64));
    let frame = batch.get(index).unwrap();
    assert_eq!(frame.header(), pattern(64));
    assert_eq!(frame.segments().len(), 0);
    assert_eq!(frame.contiguous(), Some(&pattern(64)[..]));
}

#[test]
fn long_contiguous_frame_has_one_segment_and_stays_contiguous() {
    let mut batch = Batch::with_capacity(4, 4096);
    push(&mut batch, &pattern(3));
    let index = push(&mut batch, &pattern(1500));
    let frame = batch.get(index).unwrap();
    assert_eq!(frame.header(), &pattern(1500)[..HEADER_MAX]);
    assert_eq!(frame.segments().len(), 1);
    assert_eq!(frame.contiguous(), Some(&pattern(1500)[..]));
    assert_eq!(bytes(frame), pattern(1500));
}

#[test]
fn clear_releases_lent_segments() {
    let lent = LentSlice::anonymous(4096);
    lent.copy_from(100, &pattern(1000)).unwrap();
    let mut batch = Batch::with_capacity(4, 4096);
    let offset = batch.reserve(14).unwrap();
    let mut frame = batch.frame(offset, 14).unwrap();
    frame.lent(lent.clone(), 100, 1000).unwrap();
    let index = frame.finish(OffloadMeta::PLAIN);
    let view = batch.get(index).unwrap();
    assert_eq!((view.len(), view.contiguous()), (1014, None));
    assert_eq!(&bytes(view)[14..], pattern(1000));
    assert_eq!(batch.lent.len(), 1);
    batch.clear();
    assert_eq!(batch.lent.len(), 0);
    assert_eq!((batch.len(), batch.scratch_left()), (0, 4096));
}

#[test]
fn dropped_builder_leaves_batch_unchanged() {
    let mut batch = Batch::with_capacity(4, 4096);
    let offset = batch.reserve(100).unwrap();
    let mut frame = batch.frame(offset, 20).unwrap();
    frame.private(offset + 20, 80).unwrap();
    frame.lent(LentSlice::anonymous(64), 0, 64).unwrap();
    drop(frame);
    assert_eq!((batch.len(), batch.segments.len(), batch.lent.len()), (0, 0, 0));
}

#[test]
fn range_outside_reserved_or_lent_memory_is_refused() {
    let mut batch = Batch::with_capacity(4, 4096);
    batch.reserve(100).unwrap();
    let refused = BatchError::NotReserved { offset: 50, len: 51, reserved: 100 };
    assert_eq!(batch.push_contiguous(50, 51, OffloadMeta::PLAIN), Err(refused));
    assert!(batch.scratch_mut(usize::MAX..usize::MAX).is_err());
    assert!(batch.push_contiguous(usize::MAX, 1, OffloadMeta::PLAIN).is_err());
    assert!(batch.frame(0, 100).unwrap().private(99, 2).is_err());
    assert!(batch.frame(0, 1).unwrap().lent(LentSlice::anonymous(64), 60, 5).is_err());
    batch.reserve(HEADER_MAX).unwrap();
    assert_eq!(batch.frame(0, 257).unwrap_err(), BatchError::Header { len: 257 });
    assert_eq!(batch.reserve(4096), None);
    assert_eq!(batch.len(), 0);
}

#[test]
fn frame_and_segment_beyond_limit_are_refused() {
    let mut batch = Batch::with_capacity(2, 4096);
    batch.reserve(100).unwrap();
    let mut frame = batch.frame(0, 14).unwrap();
    for _ in 0..SEGMENTS_MAX {
        frame.private(14, 1).unwrap();
    }
    assert_eq!(frame.private(14, 1), Err(BatchError::Segments));
    assert_eq!(frame.private(14, 0), Ok(()), "an empty segment takes no place");
    assert_eq!(frame.lent(LentSlice::anonymous(8), 0, 8), Err(BatchError::Segments));
    let index = frame.finish(OffloadMeta::PLAIN);
    let mut list = WriteList::new();
    list.push(&[0; 12]).unwrap();
    batch.get(index).unwrap().gather(&mut list).unwrap();
    assert_eq!(list.bytes(), 12 + 14 + SEGMENTS_MAX);
    push(&mut batch, &[0; 14]);
    let full = BatchError::Frames { limit: 2 };
    assert_eq!(batch.push_contiguous(0, 14, OffloadMeta::PLAIN), Err(full));
}

/// Piece of a frame, by the kind of its memory.
#[derive(Clone, Debug)]
enum Piece {
    Private(Vec<u8>),
    Lent(usize, Vec<u8>),
}

fn piece() -> impl Strategy<Value = Piece> {
    let bytes = prop::collection::vec(any::<u8>(), 0..5000);
    prop_oneof![
        bytes.clone().prop_map(Piece::Private),
        (0usize..64, bytes).prop_map(|(at, bytes)| Piece::Lent(at, bytes)),
    ]
}

fn build(batch: &mut Batch, header: &[u8], pieces: &[Piece], meta: OffloadMeta) -> u32 {
    let mut private = header.to_vec();
    for piece in pieces {
        if let Piece::Private(bytes) = piece {
            private.extend_from_slice(bytes);
        }
    }
    let start = batch.reserve(private.len()).unwrap();
    batch.scratch_mut(start..start + private.len()).unwrap().copy_from_slice(&private);
    let mut at = start + header.len();
    let mut frame = batch.frame(start, header.len()).unwrap();
    for piece in pieces {
        match piece {
            Piece::Private(bytes) => {
                frame.private(at, bytes.len()).unwrap();
                at += bytes.len();
            }
            Piece::Lent(offset, bytes) => {
                let slice = LentSlice::anonymous(offset + bytes.len());
                slice.copy_from(*offset, bytes).unwrap();
                frame.lent(slice, *offset, bytes.len()).unwrap();
            }
        }
    }
    frame.finish(meta)
}

proptest! {
    #[test]
    fn frame_of_several_pieces_reads_in_order(
        header in prop::collection::vec(any::<u8>(), 0..=HEADER_MAX),
        pieces in prop::collection::vec(piece(), 0..8),
        room in 0usize..30_000,
    ) {
        let mut batch = Batch::with_capacity(4, 1 << 17);
        push(&mut batch, &[0xee; 33]);
        let index = build(&mut batch, &header, &pieces, OffloadMeta::PLAIN);
        let mut all = header.clone();
        for piece in &pieces {
            match piece {
                Piece::Private(bytes) | Piece::Lent(_, bytes) => all.extend_from_slice(bytes),
            }
        }
        let view = batch.get(index).unwrap();
        prop_assert_eq!(view.len(), all.len());
        prop_assert_eq!(view.header(), &header[..]);
        let mut out = vec![0; room];
        let n = view.copy_to(&mut out);
        prop_assert_eq!(n, room.min(all.len()));
        prop_assert_eq!(&out[..n], &all[..n]);
        let mut seen = view.header().to_vec();
        for segment in view.segments() {
            segment.for_each_piece(|piece| seen.extend_from_slice(piece));
        }
        prop_assert_eq!(&seen, &all);
        if let Some(contiguous) = view.contiguous() {
            prop_assert_eq!(contiguous, &all[..]);
        }
    }

    #[test]
    fn blank_checksum_over_several_pieces_is_completed(
        header in prop::collection::vec(any::<u8>(), 60..=HEADER_MAX),
        pieces in prop::collection::vec(piece(), 0..6),
    ) {
        let mut header = header;
        let (start, offset) = (34u16, 6u16);
        header[40..42].fill(0);
        let mut batch = Batch::with_capacity(4, 1 << 17);
        let meta = OffloadMeta { checksum: Checksum::Partial { start, offset }, gso: None };
        let index = build(&mut batch, &header, &pieces, meta);
        batch.finish_checksum(index).unwrap();
        let view = batch.get(index).unwrap();
        prop_assert_eq!(view.meta().checksum, Checksum::Verified);
        let all = bytes(view);
        // The checksum over data that includes a valid checksum is zero.
        prop_assert_eq!(internet_checksum(&all[34..]), 0);
    }
}

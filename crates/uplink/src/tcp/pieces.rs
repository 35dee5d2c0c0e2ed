//! Payload of the guest in parts of frames.

use core::ops::Range;

use crate::host::Piece;

/// Appends a range of the bytes of all pieces to `bytes`.
pub(super) fn gather(pieces: &[Piece<'_>], range: Range<usize>, bytes: &mut Vec<u8>) {
    let mut before = 0;
    for piece in pieces {
        let skip = range.start.saturating_sub(before).min(piece.len);
        let take = range.end.saturating_sub(before).min(piece.len);
        let (start, end) = (piece.start + skip, piece.start + take);
        let mut at = 0;
        for part in piece.frame.pieces() {
            let from = start.saturating_sub(at).min(part.len());
            let to = end.saturating_sub(at).min(part.len());
            if from < to {
                part.for_each_piece_of(from..to, |some| bytes.extend_from_slice(some));
            }
            at += part.len();
        }
        before += piece.len;
        if before >= range.end {
            break;
        }
    }
}

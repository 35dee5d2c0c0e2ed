//! Bodies of the fuzz targets. `cargo test` runs the same functions as property tests.
//!
//! Each body reads arbitrary bytes as a peer's writes and panics if the parser breaks a guarantee.
//! Chains are compared with a naive oracle of the rules. The oracle shares no code with the parser:
//! it uses lists instead of a walk, and wide integers instead of checked ones.

mod blkif;
mod frame_stream;
mod rx;
mod tx;
mod xenstore;

pub use blkif::blkif_request;
pub use frame_stream::frame_stream;
pub use rx::rx_responses;
pub use tx::tx_chain;
pub use xenstore::xenstore_message;

use crate::netif::extra::{ExtraError, RawExtra};

/// Ring contents decoded from the fuzzer's input.
struct RingInput<'a> {
    /// Slots of the ring, 1 to 256.
    entries: u32,
    /// Maximum request slots of one packet.
    slot_limit: u32,
    /// Published slots, at most `entries`.
    bytes: &'a [u8],
}

impl<'a> RingInput<'a> {
    /// Decodes two settings bytes, then slots of `slot_size` bytes.
    fn new(data: &'a [u8], slot_size: usize) -> Option<RingInput<'a>> {
        let (&[size, limit], bytes) = data.split_first_chunk()?;
        // Mostly the size of a real ring, sometimes a ring small enough for a chain to fill.
        let entries = 1u32 << (8 - u32::from(size % 16).saturating_sub(7));
        let published = bytes.len().min(entries as usize * slot_size);
        Some(RingInput {
            entries,
            slot_limit: u32::from(limit % 18) + 1,
            bytes: &bytes[..published],
        })
    }
}

/// Returns the little-endian number at offset `at`.
fn u16_at(slot: &[u8], at: usize) -> u16 {
    u16::from(slot[at]) + 256 * u16::from(slot[at + 1])
}

/// Slot positions of the first chain: its extra infos, its further data slots, its length.
struct ChainShape {
    extras: Vec<usize>,
    data: Vec<usize>,
    len: usize,
}

/// Finds the first chain in `slots`; returns `None` if it does not end within them. `flags_at` is
/// the offset of the flags in a data slot; both rings use the same bits.
fn first_chain<const N: usize>(slots: &[[u8; N]], flags_at: usize) -> Option<ChainShape> {
    let has = |index: usize, flag: u16| u16_at(&slots[index], flags_at) & flag != 0;
    let mut extras = Vec::new();
    if has(0, 8) {
        let last = (1..slots.len()).find(|&index| slots[index][1] & 1 == 0)?;
        extras.extend(1..=last);
    }
    let mut data = Vec::new();
    if has(0, 4) {
        let begin = 1 + extras.len();
        let last = (begin..slots.len()).find(|&index| !has(index, 4))?;
        data.extend(begin..=last);
    }
    let len = 1 + extras.len() + data.len();
    Some(ChainShape { extras, data, len })
}

/// Returns the first error among the first eight extra infos.
fn first_bad_extra<const N: usize>(slots: &[[u8; N]], extras: &[usize]) -> Option<ExtraError> {
    extras.iter().take(8).find_map(|&index| match slots[index][..8] {
        [0, ..] => Some(ExtraError::InvalidType),
        [1, _, 0, 0, ..] => Some(ExtraError::GsoSizeZero),
        [1, _, _, _, 1 | 2, ..] => None,
        [1, _, _, _, kind, ..] => Some(ExtraError::GsoUnknownType { kind }),
        _ => None,
    })
}

/// Counts extra infos of unknown type among the first eight.
fn unknown_extras<const N: usize>(slots: &[[u8; N]], extras: &[usize]) -> u32 {
    extras.iter().take(8).map(|&index| u32::from(slots[index][0] > 5)).sum()
}

/// Asserts that an extra info survives emitting and parsing again.
fn check_extra(slot: [u8; 8]) {
    let raw = RawExtra(slot);
    if let Ok(extra) = raw.parse() {
        let again = extra.emit(raw.has_more());
        assert_eq!(again.parse(), Ok(extra));
        assert_eq!(again.has_more(), raw.has_more());
    }
}

//! The bodies of the fuzz targets. The same functions run as property tests under `cargo test`.
//!
//! Each takes any bytes, reads them as what a peer might have written, and panics if a promise of
//! the parser does not hold. Chains are compared with a naive reading of the rules, written
//! without a look at the parser: lists instead of a walk, wide integers instead of checked ones.

mod blkif;
mod rx;
mod tx;
mod xenstore;

pub use blkif::blkif_request;
pub use rx::rx_responses;
pub use tx::tx_chain;
pub use xenstore::xenstore_message;

use crate::netif::extra::{ExtraError, RawExtra};

/// A ring as the fuzzer sees it.
struct Scene<'a> {
    /// Slots of the ring: 1 to 256.
    entries: u32,
    /// Most request slots taken.
    slot_limit: u32,
    /// What is published: at most `entries` slots.
    bytes: &'a [u8],
}

impl<'a> Scene<'a> {
    /// Two bytes of settings, then slots of `slot_size` bytes.
    fn new(data: &'a [u8], slot_size: usize) -> Option<Scene<'a>> {
        let (&[size, limit], bytes) = data.split_first_chunk()?;
        // Mostly the size of a real ring, sometimes one that a chain can fill.
        let entries = 1u32 << (8 - u32::from(size % 16).saturating_sub(7));
        let published = bytes.len().min(entries as usize * slot_size);
        Some(Scene { entries, slot_limit: u32::from(limit % 18) + 1, bytes: &bytes[..published] })
    }
}

/// The little-endian number at `at`.
fn u16_at(slot: &[u8], at: usize) -> u16 {
    u16::from(slot[at]) + 256 * u16::from(slot[at + 1])
}

/// The slots of the first chain, by position: its extra infos, its further data slots, its length.
struct Cut {
    extras: Vec<usize>,
    data: Vec<usize>,
    len: usize,
}

/// Cuts the first chain off `slots`, or `None` if it does not end within them. The flags are at
/// `flags_at` in a data slot; they are the same bits on both rings.
fn cut<const N: usize>(slots: &[[u8; N]], flags_at: usize) -> Option<Cut> {
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
    Some(Cut { extras, data, len })
}

/// The first rule that one of the first eight extra infos breaks.
fn first_bad_extra<const N: usize>(slots: &[[u8; N]], extras: &[usize]) -> Option<ExtraError> {
    extras.iter().take(8).find_map(|&index| match slots[index][..8] {
        [0, ..] => Some(ExtraError::InvalidType),
        [1, _, 0, 0, ..] => Some(ExtraError::GsoSizeZero),
        [1, _, _, _, 1 | 2, ..] => None,
        [1, _, _, _, kind, ..] => Some(ExtraError::GsoUnknownType { kind }),
        _ => None,
    })
}

/// Extra infos of unknown type among the first eight.
fn unknown_extras<const N: usize>(slots: &[[u8; N]], extras: &[usize]) -> u32 {
    extras.iter().take(8).map(|&index| u32::from(slots[index][0] > 5)).sum()
}

/// What an extra info says is what it says once written again.
fn check_extra(slot: [u8; 8]) {
    let raw = RawExtra(slot);
    if let Ok(extra) = raw.parse() {
        let again = extra.emit(raw.has_more());
        assert_eq!(again.parse(), Ok(extra));
        assert_eq!(again.has_more(), raw.has_more());
    }
}

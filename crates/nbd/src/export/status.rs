//! Block status: turns the extents of a disk into a reply.
//!
//! The disk's list begins at the sector that contains the first byte of the request, and may end before the request
//! does or behind it. The reply begins at the first byte and never reaches beyond the last.

use ringfence_block::storage::extents::{self, ExtentState, LIST_BYTES};
use ringfence_sys::numbers::bounded;

use super::buffers::Payload;
use super::unaligned::Span;
use crate::protocol::serve::{ClientRequest, NbdCommand, status_entry};

/// Range of the buffer that a query needs: it holds the disk's list, then the entries of the reply.
pub(super) const BUFFER: Span = Span { offset: 0, len: LIST_BYTES };

/// Replaces the disk's list in `payload` by the entries of the reply. Returns their number, which is 0 if the list
/// cannot be used.
pub(super) fn encode(request: &ClientRequest, sector_size: u32, payload: &mut Payload) -> usize {
    let span = Span::of(request);
    let one = matches!(request.command, Ok(NbdCommand::BlockStatus { one: true }));
    let mut skip = span.offset - span.widened(sector_size).offset;
    let mut left = span.len;
    let mut entries: Vec<u8> = vec![];
    for (len, state) in extents::load(&payload.bytes).unwrap_or_default() {
        let hidden = len.min(skip);
        skip -= hidden;
        let len = (len - hidden).min(left);
        if len > 0 && (!one || entries.is_empty()) {
            entries.extend(entry(len, state));
            left -= len;
        }
    }
    let cut = payload.bytes.slice(0, entries.len());
    match cut.and_then(|bytes| bytes.copy_from(0, &entries).map(|()| bytes)) {
        Ok(bytes) => payload.bytes = bytes,
        Err(_) => return 0,
    }
    entries.len() / 8
}

fn entry(len: u64, state: ExtentState) -> [u8; 8] {
    // The length of a request has 32 bits.
    status_entry(bounded(len, u32::MAX), state)
}

#[cfg(test)]
mod tests {
    use ringfence_block::storage::extents::ExtentList;

    use super::super::buffers::Buffers;
    use super::*;

    /// Returns length and flags of each entry of the reply to a query, for a disk with these extents.
    fn reply(offset: u64, len: u32, one: bool, extents: &[(u64, ExtentState)]) -> Vec<(u32, u32)> {
        let mut payload = Buffers::default().take(BUFFER, 512).unwrap();
        let mut list = ExtentList::new(1 << 40, 512);
        extents.iter().for_each(|(len, state)| list.push(*len, *state));
        list.store([&payload.bytes].into_iter()).unwrap();
        let command = Ok(NbdCommand::BlockStatus { one });
        let request =
            ClientRequest { cookie: 1, offset, len, command, structured: true, payload: 0 };
        let count = encode(&request, 512, &mut payload);
        let mut bytes = vec![0; payload.bytes.len()];
        payload.bytes.copy_to(0, &mut bytes).unwrap();
        assert_eq!(bytes.len(), count * 8);
        let number = |part: &[u8]| u32::from_be_bytes(part.try_into().unwrap());
        bytes.chunks(8).map(|entry| (number(&entry[..4]), number(&entry[4..]))).collect()
    }

    #[test]
    fn reply_lies_within_query_of_any_bytes() {
        let extents =
            [(1024, ExtentState::HOLE), (512, ExtentState::DATA), (9 << 30, ExtentState::HOLE)];
        assert_eq!(reply(0, 4096, false, &extents), [(1024, 3), (512, 0), (2560, 3)]);
        assert_eq!(reply(700, 1000, false, &extents), [(836, 3), (164, 0)]);
        assert_eq!(reply(700, 1, false, &extents), [(1, 3)]);
        assert_eq!(reply(0, 4096, true, &extents), [(1024, 3)]);
        assert_eq!(
            reply(0, u32::MAX, false, &extents),
            [(1024, 3), (512, 0), (u32::MAX - 1536, 3)]
        );
    }
}

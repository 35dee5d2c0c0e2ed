//! Block status: turns the extents of a disk into a reply.
//!
//! The disk's list begins at the sector that contains the first byte of the request, and may end before the request
//! does or behind it. The reply begins at the first byte and never reaches beyond the last.
//!
//! Programs such as `qemu-img map` ask for one extent at a time, and then for what follows it. The disk is not asked
//! again for each: the rest of its list is kept ([`Walk`]) for the query that goes on where the last one ended.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ringfence_block::storage::extents::{self, ExtentState, LIST_BYTES};
use ringfence_sys::numbers::bounded;

use super::buffers::Payload;
use super::unaligned::Span;
use crate::protocol::serve::{ClientRequest, NbdCommand, status_entry};

/// Range of the buffer that a query needs: it holds the disk's list, then the entries of the reply.
pub(super) const BUFFER: Span = Span { offset: 0, len: LIST_BYTES };

/// Maximum age of a list that answers later queries. Others may write to the disk too, by other exports or servers.
const WALK_AGE_MAX: Duration = Duration::from_secs(1);

/// Extents behind those that were reported, for a client that goes from one to the next.
pub(super) struct Walk {
    /// Offset of the first extent in bytes.
    next: u64,
    rest: VecDeque<(u64, ExtentState)>,
    /// Number of changes of the disk when it was asked.
    changes: u64,
    since: Instant,
}

impl Walk {
    /// Returns the extent at the begin of a query: its length in bytes, at most that of the query, and its state.
    /// `None` if the walk does not go on there, or the disk was written since.
    pub(super) fn answer(
        &mut self,
        request: &ClientRequest,
        changes: u64,
    ) -> Option<(u32, ExtentState)> {
        let current = self.changes == changes && self.since.elapsed() <= WALK_AGE_MAX;
        let (len, state) =
            self.rest.front_mut().filter(|_| current && self.next == request.offset)?;
        let taken = bounded((*len).min(request.len.into()), request.len);
        let answer = (taken, *state);
        *len -= u64::from(taken);
        if *len == 0 {
            self.rest.pop_front();
        }
        self.next += u64::from(taken);
        Some(answer)
    }
}

/// Returns `true` if the query may have one extent alone.
fn is_for_one(request: &ClientRequest) -> bool {
    matches!(request.command, Ok(NbdCommand::BlockStatus { one: true }))
}

/// Replaces the disk's list in `payload` by the entries of the reply. Returns their number, which is 0 if the list
/// cannot be used, and the walk that a query for one extent begins. `changes` is the number of changes of the disk when
/// it was asked.
pub(super) fn encode(
    request: &ClientRequest,
    sector_size: u32,
    changes: u64,
    payload: &mut Payload,
) -> (usize, Option<Walk>) {
    let span = Span::of(request);
    let mut skip = span.offset - span.widened(sector_size).offset;
    let mut left = span.len;
    let mut extents: VecDeque<(u64, ExtentState)> = VecDeque::new();
    for (len, state) in extents::load(&payload.bytes).unwrap_or_default() {
        let hidden = len.min(skip);
        skip -= hidden;
        let len = (len - hidden).min(left);
        if len > 0 {
            extents.push_back((len, state));
            left -= len;
        }
    }
    let mut walk = None;
    if is_for_one(request) {
        let rest = extents.split_off(extents.len().min(1));
        let next = span.offset + extents.front().map_or(0, |(len, _)| *len);
        walk = Some(Walk { next, rest, changes, since: Instant::now() });
    }
    let entries: Vec<u8> = extents.into_iter().flat_map(|(len, state)| entry(len, state)).collect();
    let cut = payload.bytes.slice(0, entries.len());
    match cut.and_then(|bytes| bytes.copy_from(0, &entries).map(|()| bytes)) {
        Ok(bytes) => payload.bytes = bytes,
        Err(_) => return (0, None),
    }
    (entries.len() / 8, walk)
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
        let (count, _) = encode(&request, 512, 0, &mut payload);
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

    #[test]
    fn walk_answers_next_queries_until_disk_changes() {
        let (hole, data) = (ExtentState::HOLE, ExtentState::DATA);
        let mut payload = Buffers::default().take(BUFFER, 512).unwrap();
        let mut list = ExtentList::new(1 << 40, 512);
        for (len, state) in [(1024, hole), (512, data), (4096, hole), (512, data), (9 << 30, hole)]
        {
            list.push(len, state);
        }
        list.store([&payload.bytes].into_iter()).unwrap();
        let at = |offset, len| ClientRequest {
            cookie: 1,
            offset,
            len,
            command: Ok(NbdCommand::BlockStatus { one: true }),
            structured: true,
            payload: 0,
        };
        let (count, walk) = encode(&at(100, 10_000), 512, 7, &mut payload);
        let mut walk = walk.unwrap();
        assert_eq!(count, 1);
        assert_eq!(walk.answer(&at(1536, 100), 7), None, "another place");
        assert_eq!(walk.answer(&at(1024, 100_000), 8), None, "written meanwhile");
        assert_eq!(walk.answer(&at(1024, 100_000), 7), Some((512, data)));
        assert_eq!(walk.answer(&at(1536, 1000), 7), Some((1000, hole)));
        assert_eq!(walk.answer(&at(2536, 100_000), 7), Some((3096, hole)));
        assert_eq!(walk.answer(&at(5632, 100_000), 7), Some((512, data)));
        assert_eq!(walk.answer(&at(6144, 100_000), 7), Some((3956, hole)), "the first query's end");
        assert_eq!(walk.answer(&at(10_100, 100_000), 7), None, "nothing is left");
    }
}

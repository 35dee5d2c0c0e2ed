//! Memory of requests: the pieces to send, and the places of received data and extents.

use std::collections::BTreeMap;

use ringfence_block::storage::Request;
use ringfence_block::storage::extents::ExtentState;
use ringfence_memory::LentSlice;

use super::{Active, Owner, QueuedCommand};
use crate::protocol::numbers::state;

/// Returns the request that a reply belongs to, and the offset of its command in it.
pub(super) fn request_of<'a>(
    commands: &BTreeMap<u64, QueuedCommand>,
    requests: &'a BTreeMap<u64, Active>,
    cookie: u64,
) -> Option<(&'a Request, u64)> {
    let command = commands.get(&cookie)?;
    let Owner::Request(key) = command.owner else { return None };
    Some((&requests.get(&key)?.request, command.at))
}

/// Calls `each` with the pieces of memory that hold `len` bytes from byte `from` of a request.
fn each_piece(request: &Request, from: u64, len: u64, mut each: impl FnMut(LentSlice)) {
    let (mut skip, mut left) = (from, len);
    for segment in &request.segments {
        let whole = segment.memory.len() as u64;
        if skip < whole && left > 0 {
            let step = (whole - skip).min(left);
            left -= step;
            if let (Ok(at), Ok(step)) = (usize::try_from(skip), usize::try_from(step))
                && let Ok(piece) = segment.memory.slice(at, step)
            {
                each(piece);
            }
        }
        skip = skip.saturating_sub(whole);
    }
}

pub(super) fn pieces(request: &Request, from: u64, len: u64) -> Vec<LentSlice> {
    let mut pieces = vec![];
    each_piece(request, from, len, |piece| pieces.push(piece));
    pieces
}

/// Stores received bytes, or zeros, in the memory of a request. The range lies within the request, as
/// [`crate::protocol::replies`] checked.
pub(super) fn fill(request: &Request, from: u64, mut bytes: Option<&[u8]>, len: u64) {
    each_piece(request, from, len, |piece| {
        let result = match &mut bytes {
            None => piece.zero(0, piece.len()),
            Some(bytes) => {
                let (head, rest) = bytes.split_at(piece.len().min(bytes.len()));
                *bytes = rest;
                piece.copy_from(0, head)
            }
        };
        // The memory is writable, as checked at submission.
        debug_assert!(result.is_ok());
    });
}

impl Active {
    /// Adds an extent that the server reported.
    pub(super) fn add_extent(&mut self, len: u32, flags: u32) {
        let state = ExtentState { hole: flags & state::HOLE != 0, zero: flags & state::ZERO != 0 };
        if let Some(list) = &mut self.extents {
            list.push(len.into(), state);
        }
    }

    /// Stores the list of extents in the memory of the request. Returns the errno of the failure.
    pub(super) fn store_extents(&self) -> Result<(), i32> {
        let Some(list) = &self.extents else { return Err(libc::EIO) };
        list.store(self.request.segments.iter().map(|segment| &segment.memory))
            .map_err(|_| libc::EFAULT)
    }
}

//! Memory of a request: its segments as one range of bytes.

use std::io;
use std::os::fd::AsFd;

use ringfence_memory::{LIST_MAX, LentSlice, ReadList, WriteList};
use ringfence_sys::numbers::usize_from;

use crate::storage::Segment;
use crate::storage::file::DirectRules;

/// Segments of a request.
#[derive(Clone, Copy)]
pub(super) struct Pieces<'a>(pub(super) &'a [Segment]);

impl Pieces<'_> {
    /// Returns the memory of `len` bytes from byte `from` on, at most [`LIST_MAX`] pieces.
    fn list(self, from: u64, len: u64) -> io::Result<Vec<LentSlice>> {
        let (mut skip, mut left) = (usize_from(from), usize_from(len));
        let mut list = vec![];
        for segment in self.0 {
            let whole = segment.memory.len();
            if skip < whole && left > 0 && list.len() < LIST_MAX {
                let step = (whole - skip).min(left);
                list.push(segment.memory.slice(skip, step).map_err(io::Error::other)?);
                left -= step;
            }
            skip = skip.saturating_sub(whole);
        }
        Ok(list)
    }

    /// Calls `each` for the pieces of `len` bytes, with the position of the piece.
    fn each(
        self,
        from: u64,
        len: usize,
        mut each: impl FnMut(&LentSlice, usize) -> Result<(), ringfence_memory::OutOfRange>,
    ) -> io::Result<()> {
        let mut at = 0;
        while at < len {
            let list = self.list(from + at as u64, (len - at) as u64)?;
            if list.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            for piece in list {
                each(&piece, at).map_err(io::Error::other)?;
                at += piece.len();
            }
        }
        Ok(())
    }

    /// Copies private bytes to the pieces from byte `from` on.
    pub(super) fn fill(self, from: u64, bytes: &[u8]) -> io::Result<()> {
        self.each(from, bytes.len(), |piece, at| piece.copy_from(0, &bytes[at..at + piece.len()]))
    }

    /// Copies the pieces from byte `from` on to private memory.
    pub(super) fn gather(self, from: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.each(from, bytes.len(), |piece, at| piece.copy_to(0, &mut bytes[at..at + piece.len()]))
    }

    /// Zeroes `len` bytes from byte `from` on.
    pub(super) fn zero(self, from: u64, len: u64) -> io::Result<()> {
        self.each(from, usize_from(len), |piece, _| piece.zero(0, piece.len()))
    }

    /// Returns `true` if the file can read and write the pieces directly.
    pub(super) fn fit(self, from: u64, len: u64, rules: Option<DirectRules>) -> bool {
        let Some(rules) = rules else { return true };
        let fits = |piece: &LentSlice| {
            piece.is_aligned_to(rules.memory as usize)
                && piece.len().is_multiple_of(rules.offset as usize)
        };
        self.list(from, len).is_ok_and(|list| list.iter().all(fits))
    }

    /// Reads once from a file into the pieces. Returns the number of bytes.
    pub(super) fn read_once(
        self,
        file: impl AsFd,
        offset: u64,
        from: u64,
        len: u64,
    ) -> io::Result<u64> {
        let pieces = self.list(from, len)?;
        let mut list = ReadList::new();
        for piece in &pieces {
            list.push_lent(piece, 0, piece.len()).map_err(io::Error::other)?;
        }
        Ok(list.read_at(file, offset)? as u64)
    }

    /// Writes once from the pieces to a file. Returns the number of bytes.
    pub(super) fn write_once(
        self,
        file: impl AsFd,
        offset: u64,
        from: u64,
        len: u64,
    ) -> io::Result<u64> {
        let pieces = self.list(from, len)?;
        let mut list = WriteList::new();
        for piece in &pieces {
            list.push_lent(piece, 0, piece.len()).map_err(io::Error::other)?;
        }
        Ok(list.write_at(file, offset)? as u64)
    }
}

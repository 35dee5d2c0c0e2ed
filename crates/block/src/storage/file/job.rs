//! Request to a file as a sequence of steps, independent of the engine.
//!
//! An engine calls [`Job::next`], executes the [`Step`] on the file and passes its result to
//! [`Job::advance`], until [`Next::Over`]. The job handles partial transfers, bounce buffers, retries, and
//! operations that the file system does not support.

use core::ops::Range;
use std::io;
use std::os::fd::AsFd;

use ringfence_memory::LentSlice;
use ringfence_sys::numbers::usize_from;
use rustix::fs::FallocateFlags;

use super::bounce::{BUFFER_MAX, BounceBuffers};
use super::facts::{FileFacts, FileKind};
use super::options::{Bounce, CacheMode, FileOptions};
use crate::storage::{Done, Op, Request, check_request, extents};

/// Maximum number of memory pieces in one step: the capacity of one scatter-gather list of the threads.
pub(super) const PIECES_MAX: usize = 32;

/// Maximum number of retries without progress after `EINTR` or `EAGAIN`.
const RETRIES_MAX: u32 = 100;

/// Settings shared by all requests to a file.
#[derive(Clone)]
pub(super) struct Policy {
    facts: FileFacts,
    cache: CacheMode,
    bounce_always: bool,
    pub(super) discard: bool,
    /// Zeros need no storage, unless the request asks for it.
    frees_zeros: bool,
    zeros: LentSlice,
}

impl Policy {
    pub(super) fn new(facts: &FileFacts, options: &FileOptions, zeros: LentSlice) -> Policy {
        let bounce_always = match options.bounce {
            Bounce::Always => true,
            Bounce::Never => false,
            Bounce::Auto => facts.checksums && facts.direct.is_some(),
        };
        let discard = options.discard && facts.can_discard;
        // A file with holes promises no space for all of the disk, so zeros need not hold any.
        let frees_zeros = discard || (facts.sparse && facts.can_discard);
        Policy { facts: *facts, cache: options.cache, bounce_always, discard, frees_zeros, zeros }
    }

    /// Returns the settings of the same file with another size in bytes.
    pub(super) fn resized(&self, bytes: u64) -> Policy {
        let mut resized = self.clone();
        resized.facts.bytes = bytes;
        resized
    }

    pub(super) fn kind(&self) -> FileKind {
        self.facts.kind
    }

    fn fits(&self, piece: &LentSlice) -> bool {
        let Some(rules) = self.facts.direct else { return true };
        piece.is_aligned_to(rules.memory as usize)
            && piece.len().is_multiple_of(rules.offset as usize)
    }
}

/// Operation on the file that an engine executes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Read into the pieces.
    Read { offset: u64 },
    /// Write of the pieces, durable if `sync`.
    Write { offset: u64, sync: bool },
    /// Call of `fdatasync`.
    Sync,
    /// Call of `fallocate`.
    Allocate { mode: FallocateFlags, offset: u64, len: u64 },
    /// Discard ioctl of a block device.
    Discard { secure: bool, offset: u64, len: u64 },
    /// Storing of the list of the extents in the pieces.
    Extents { offset: u64, len: u64, sector: u32 },
}

/// Next action for a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// Execute the step and report its result.
    Step(Step),
    /// Wait for a bounce buffer of another job.
    Wait,
    /// Finish with this result.
    Over(Result<(), i32>),
}

/// Stores the list of the extents of a range of the file in the pieces.
pub(super) fn store_extents(
    file: impl AsFd,
    range: Range<u64>,
    sector: u32,
    pieces: &[LentSlice],
) -> io::Result<()> {
    let list = extents::of_file(file, range, sector)?;
    list.store(pieces.iter()).map_err(io::Error::other)
}

/// Method of zeroing a range, in the order of the attempts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Zeroing {
    /// Frees the storage.
    Punch,
    /// Keeps the storage, or allocates it.
    Range,
    /// Writes zeros as data, which always works.
    Write,
}

impl Zeroing {
    /// Returns the first method for a request.
    fn of(op: Op, policy: &Policy) -> Zeroing {
        match op {
            Op::WriteZeroes { allocate: false } if policy.frees_zeros => Zeroing::Punch,
            _ => Zeroing::Range,
        }
    }
}

/// Request and its progress.
pub(super) struct Job {
    request: Request,
    /// Completed bytes; for a flush, completed steps.
    done: u64,
    /// Bounce buffer of the step in progress.
    bounce: Option<LentSlice>,
    /// Set if all data goes through bounce buffers.
    uses_buffers: bool,
    zeroing: Zeroing,
    /// Set if the range was discarded or zeroed and must still be made durable.
    sync_last: bool,
    retries: u32,
}

impl Job {
    pub(super) fn new(request: Request, policy: &Policy) -> Job {
        let transfers = matches!(request.op, Op::Read | Op::Write { .. });
        let uses_buffers = transfers
            && (policy.bounce_always
                || !request.segments.iter().all(|segment| policy.fits(&segment.memory)));
        Job {
            zeroing: Zeroing::of(request.op, policy),
            request,
            done: 0,
            bounce: None,
            uses_buffers,
            sync_last: false,
            retries: 0,
        }
    }

    /// Validates the request against the properties of the file.
    pub(super) fn check(&self, policy: &Policy) -> Result<(), i32> {
        let facts = &policy.facts;
        check_request(&self.request, facts.bytes, facts.sector_size, facts.read_only)
    }

    /// Returns the memory and its registered name if the next step uses exactly one registered segment.
    pub(super) fn registered(&self) -> Option<(u64, &LentSlice)> {
        match self.request.segments.as_slice() {
            [one] if self.done == 0 && !self.uses_buffers => Some((one.registered?, &one.memory)),
            _ => None,
        }
    }

    /// Returns the next action. For a transfer, appends the memory to `pieces`.
    pub(super) fn next(
        &mut self,
        policy: &Policy,
        pieces: &mut Vec<LentSlice>,
        buffers: &mut BounceBuffers,
    ) -> io::Result<Next> {
        let Request { op, offset, len, .. } = self.request;
        let over = self.done >= len;
        let offset = offset.saturating_add(self.done);
        let sync = policy.cache.is_synchronous();
        Ok(match op {
            Op::Read | Op::Write { .. } if over => Next::Over(Ok(())),
            Op::Read => {
                if !self.gather(policy, pieces, buffers)? {
                    return Ok(Next::Wait);
                }
                Next::Step(Step::Read { offset })
            }
            Op::Write { fua } => {
                if !self.gather(policy, pieces, buffers)? {
                    return Ok(Next::Wait);
                }
                let sync = sync || (fua && policy.cache != CacheMode::Unsafe);
                Next::Step(Step::Write { offset, sync })
            }
            Op::Flush if self.done > 0 || policy.cache == CacheMode::Unsafe => Next::Over(Ok(())),
            Op::Flush => Next::Step(Step::Sync),
            Op::Discard { .. } | Op::WriteZeroes { .. } if over && !(sync && self.sync_last) => {
                Next::Over(Ok(()))
            }
            Op::Discard { .. } | Op::WriteZeroes { .. } if over => Next::Step(Step::Sync),
            Op::Discard { secure } => self.discard(policy, secure),
            Op::WriteZeroes { .. } => self.zero(policy, pieces),
            // A block device has no holes that its file could tell.
            Op::Extents if policy.facts.kind == FileKind::BlockDevice => {
                Next::Over(Err(libc::EOPNOTSUPP))
            }
            Op::Extents if over => Next::Over(Ok(())),
            Op::Extents => {
                pieces.extend(extents::memory(&self.request.segments).cloned());
                Next::Step(Step::Extents { offset, len, sector: policy.facts.sector_size })
            }
        })
    }

    fn discard(&self, policy: &Policy, secure: bool) -> Next {
        let Request { offset, len, .. } = self.request;
        if !policy.discard || (secure && !policy.facts.discard_secure) {
            return Next::Over(Err(libc::EOPNOTSUPP));
        }
        Next::Step(match policy.facts.kind {
            FileKind::BlockDevice => Step::Discard { secure, offset, len },
            FileKind::Regular => Step::Allocate {
                mode: FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                offset,
                len,
            },
        })
    }

    fn zero(&self, policy: &Policy, pieces: &mut Vec<LentSlice>) -> Next {
        let Request { offset, len, .. } = self.request;
        let keep = FallocateFlags::KEEP_SIZE;
        let mode = match self.zeroing {
            Zeroing::Range => FallocateFlags::ZERO_RANGE | keep,
            Zeroing::Punch => FallocateFlags::PUNCH_HOLE | keep,
            Zeroing::Write => {
                let left = len - self.done;
                let step = usize::try_from(left)
                    .map_or(policy.zeros.len(), |left| left.min(policy.zeros.len()));
                pieces.extend(policy.zeros.slice(0, step).ok());
                let sync = policy.cache.is_synchronous();
                return Next::Step(Step::Write { offset: offset + self.done, sync });
            }
        };
        Next::Step(Step::Allocate { mode, offset, len })
    }

    /// Appends the memory of the next step to `pieces`. Returns `false` if there is no bounce buffer.
    fn gather(
        &mut self,
        policy: &Policy,
        pieces: &mut Vec<LentSlice>,
        buffers: &mut BounceBuffers,
    ) -> io::Result<bool> {
        let left = usize_from(self.request.len - self.done);
        if !self.uses_buffers {
            if self.done == 0 && self.request.segments.len() <= PIECES_MAX {
                pieces.extend(self.request.segments.iter().map(|segment| segment.memory.clone()));
            } else {
                self.pieces_from(self.done, left, |piece| {
                    pieces.push(piece);
                    pieces.len() < PIECES_MAX
                });
                // The rest of a partial transfer may be misaligned.
                if !pieces.iter().all(|piece| policy.fits(piece)) {
                    pieces.clear();
                    self.uses_buffers = true;
                }
            }
        }
        if !self.uses_buffers {
            return Ok(true);
        }
        let step = left.min(BUFFER_MAX);
        let Some(buffer) = buffers.take(step)? else { return Ok(false) };
        if matches!(self.request.op, Op::Write { .. }) {
            let mut at = 0;
            let mut copied = Ok(());
            self.pieces_from(self.done, step, |piece| {
                copied = buffer.copy_from_lent(at, &piece, 0, piece.len());
                at += piece.len();
                copied.is_ok()
            });
            copied.map_err(io::Error::other)?;
        }
        pieces.push(buffer.slice(0, step).map_err(io::Error::other)?);
        self.bounce = Some(buffer);
        Ok(true)
    }

    /// Calls `each` with the pieces of `len` bytes from byte `from` of the request, until it returns `false`.
    fn pieces_from(&self, from: u64, len: usize, mut each: impl FnMut(LentSlice) -> bool) {
        let (mut skip, mut left) = (from, len);
        for segment in &self.request.segments {
            let whole = segment.memory.len();
            if let Ok(within) = usize::try_from(skip)
                && within < whole
            {
                let step = (whole - within).min(left);
                left -= step;
                let Ok(piece) = segment.memory.slice(within, step) else { return };
                if !each(piece) || left == 0 {
                    return;
                }
            }
            skip = skip.saturating_sub(whole as u64);
        }
    }

    /// Records the result of a step: the number of bytes transferred, or the errno.
    pub(super) fn advance(
        &mut self,
        buffers: &mut BounceBuffers,
        result: Result<u32, i32>,
    ) -> Result<(), i32> {
        let outcome = self.take_result(result);
        if let Some(buffer) = self.bounce.take() {
            buffers.give_back(buffer);
        }
        outcome
    }

    fn take_result(&mut self, result: Result<u32, i32>) -> Result<(), i32> {
        let moved = match result {
            Ok(moved) => moved,
            Err(libc::EINTR | libc::EAGAIN) if self.retries < RETRIES_MAX => {
                self.retries += 1;
                return Ok(());
            }
            Err(errno) => return self.fall_back(errno),
        };
        self.retries = 0;
        let len = self.request.len;
        match self.request.op {
            Op::Flush => self.done = 1,
            Op::Extents => self.done = len,
            Op::Discard { .. } | Op::WriteZeroes { .. } if self.done >= len => {
                self.sync_last = false
            }
            Op::Discard { .. } | Op::WriteZeroes { .. } if self.zeroing != Zeroing::Write => {
                self.done = len;
                self.sync_last = true;
            }
            // The file ends before the disk does: it was truncated.
            Op::Read if moved == 0 => return Err(libc::EIO),
            Op::Write { .. } | Op::WriteZeroes { .. } if moved == 0 => return Err(libc::ENOSPC),
            Op::Read => {
                self.copy_out(moved as usize).map_err(|_| libc::EFAULT)?;
                self.done += u64::from(moved);
            }
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Discard { .. } => {
                self.done += u64::from(moved);
            }
        }
        Ok(())
    }

    /// Selects the next method of zeroing after an error, or returns the error.
    fn fall_back(&mut self, errno: i32) -> Result<(), i32> {
        let cannot = matches!(errno, libc::EOPNOTSUPP | libc::EINVAL | libc::ENODEV);
        self.zeroing = match (self.request.op, self.zeroing) {
            (Op::WriteZeroes { .. }, Zeroing::Punch) if cannot => Zeroing::Range,
            (Op::WriteZeroes { .. }, Zeroing::Range) if cannot => Zeroing::Write,
            _ => return Err(errno),
        };
        Ok(())
    }

    /// Copies read data from the bounce buffer to the request's memory.
    fn copy_out(&self, len: usize) -> Result<(), ringfence_memory::OutOfRange> {
        let Some(buffer) = &self.bounce else { return Ok(()) };
        let mut at = 0;
        let mut copied = Ok(());
        self.pieces_from(self.done, len.min(buffer.len()), |piece| {
            copied = piece.copy_from_lent(0, buffer, at, piece.len());
            at += piece.len();
            copied.is_ok()
        });
        copied
    }

    /// Ends the job and returns its result.
    pub(super) fn finish(mut self, buffers: &mut BounceBuffers, result: Result<(), i32>) -> Done {
        if let Some(buffer) = self.bounce.take() {
            buffers.give_back(buffer);
        }
        self.request.done(result)
    }
}

//! One request, as a sequence of steps.

use std::io;

use ringfence_memory::LentSlice;
use rustix::fs::FallocateFlags;

use super::bounce::{BUFFER_MAX, Bounces};
use super::facts::{FileFacts, FileKind};
use super::options::{Bounce, CacheMode, FileOptions};
use crate::storage::{Done, Op, Request, check_request};

/// Pieces of memory in one step: what one scatter-gather list of the threads holds.
pub(super) const PIECES_MAX: usize = 32;

/// Times that the kernel may ask to try again, without any progress.
const RETRIES_MAX: u32 = 100;

/// What holds for all requests to a file.
#[derive(Clone)]
pub(super) struct Policy {
    facts: FileFacts,
    cache: CacheMode,
    bounce_always: bool,
    pub(super) discard: bool,
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
        Policy { facts: *facts, cache: options.cache, bounce_always, discard, zeros }
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

/// What an engine has to do for a job, on the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Read into the pieces.
    Read { offset: u64 },
    /// Write the pieces.
    Write { offset: u64, sync: bool },
    /// `fdatasync`.
    Sync,
    /// `fallocate`.
    Allocate { mode: FallocateFlags, offset: u64, len: u64 },
    /// The ioctl for block devices.
    Discard { secure: bool, offset: u64, len: u64 },
}

/// What comes next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// Do this, and tell.
    Step(Step),
    /// There is no bounce buffer: ask again when one came back.
    Wait,
    /// It is over.
    Over(Result<(), i32>),
}

/// How a range is zeroed, from the best to what always works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Zeroing {
    Range,
    Punch,
    Write,
}

/// A request and how far it is.
pub(super) struct Job {
    request: Request,
    /// Bytes (or, for operations without any, steps) that are over.
    done: u64,
    /// Of the step in progress, when it goes through a buffer.
    bounce: Option<LentSlice>,
    /// All of it goes through buffers.
    bounces: bool,
    zeroing: Zeroing,
    /// The range was given up or zeroed; it is to be made durable.
    sync_last: bool,
    retries: u32,
}

impl Job {
    pub(super) fn new(request: Request, policy: &Policy) -> Job {
        let transfers = matches!(request.op, Op::Read | Op::Write { .. });
        let bounces = transfers
            && (policy.bounce_always
                || !request.segments.iter().all(|segment| policy.fits(&segment.memory)));
        Job {
            request,
            done: 0,
            bounce: None,
            bounces,
            zeroing: Zeroing::Range,
            sync_last: false,
            retries: 0,
        }
    }

    /// Whether the request is one that may be started at all.
    pub(super) fn check(&self, policy: &Policy) -> Result<(), i32> {
        let facts = &policy.facts;
        check_request(&self.request, facts.bytes, facts.sector_size, facts.read_only)
    }

    /// The only piece of memory and the name it is registered by, where a step is exactly that.
    pub(super) fn registered(&self) -> Option<(u64, &LentSlice)> {
        match self.request.segments.as_slice() {
            [one] if self.done == 0 && !self.bounces => Some((one.registered?, &one.memory)),
            _ => None,
        }
    }

    /// What comes next; for a transfer, puts the memory into `pieces`.
    pub(super) fn next(
        &mut self,
        policy: &Policy,
        pieces: &mut Vec<LentSlice>,
        buffers: &mut Bounces,
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
            Op::Discard { .. } | Op::WriteZeroes if over && !(sync && self.sync_last) => {
                Next::Over(Ok(()))
            }
            Op::Discard { .. } | Op::WriteZeroes if over => Next::Step(Step::Sync),
            Op::Discard { secure } => self.discard(policy, secure),
            Op::WriteZeroes => self.zero(policy, pieces),
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

    /// Puts the memory of the next step into `pieces`. `false` if there is no buffer.
    fn gather(
        &mut self,
        policy: &Policy,
        pieces: &mut Vec<LentSlice>,
        buffers: &mut Bounces,
    ) -> io::Result<bool> {
        let left = usize::try_from(self.request.len - self.done).unwrap_or(usize::MAX);
        if !self.bounces {
            if self.done == 0 && self.request.segments.len() <= PIECES_MAX {
                pieces.extend(self.request.segments.iter().map(|segment| segment.memory.clone()));
            } else {
                self.pieces_from(self.done, left, |piece| {
                    pieces.push(piece);
                    pieces.len() < PIECES_MAX
                });
                // What is left of a transfer that stopped halfway may not be aligned.
                if !pieces.iter().all(|piece| policy.fits(piece)) {
                    pieces.clear();
                    self.bounces = true;
                }
            }
        }
        if !self.bounces {
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

    /// Calls `each` with the pieces of `len` bytes from byte `from` of the request, until it says no.
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

    /// What came of the step: bytes transferred, or the errno.
    pub(super) fn advance(
        &mut self,
        policy: &Policy,
        buffers: &mut Bounces,
        result: Result<u32, i32>,
    ) -> Result<(), i32> {
        let outcome = self.take_result(policy, result);
        if let Some(buffer) = self.bounce.take() {
            buffers.give_back(buffer);
        }
        outcome
    }

    fn take_result(&mut self, policy: &Policy, result: Result<u32, i32>) -> Result<(), i32> {
        let moved = match result {
            Ok(moved) => moved,
            Err(libc::EINTR | libc::EAGAIN) if self.retries < RETRIES_MAX => {
                self.retries += 1;
                return Ok(());
            }
            Err(errno) => return self.fall_back(policy, errno),
        };
        self.retries = 0;
        let len = self.request.len;
        match self.request.op {
            Op::Flush => self.done = 1,
            Op::Discard { .. } | Op::WriteZeroes if self.done >= len => self.sync_last = false,
            Op::Discard { .. } | Op::WriteZeroes if self.zeroing != Zeroing::Write => {
                self.done = len;
                self.sync_last = true;
            }
            // The file ends before the disk does: somebody made it shorter.
            Op::Read if moved == 0 => return Err(libc::EIO),
            Op::Write { .. } | Op::WriteZeroes if moved == 0 => return Err(libc::ENOSPC),
            Op::Read => {
                self.copy_out(moved as usize).map_err(|_| libc::EFAULT)?;
                self.done += u64::from(moved);
            }
            Op::Write { .. } | Op::WriteZeroes | Op::Discard { .. } => {
                self.done += u64::from(moved);
            }
        }
        Ok(())
    }

    /// Another way to the same end, where there is one.
    fn fall_back(&mut self, policy: &Policy, errno: i32) -> Result<(), i32> {
        let cannot = matches!(errno, libc::EOPNOTSUPP | libc::EINVAL | libc::ENODEV);
        self.zeroing = match (self.request.op, self.zeroing) {
            (Op::WriteZeroes, Zeroing::Range) if cannot && policy.discard => Zeroing::Punch,
            (Op::WriteZeroes, Zeroing::Range | Zeroing::Punch) if cannot => Zeroing::Write,
            _ => return Err(errno),
        };
        Ok(())
    }

    /// What was read to a buffer goes to where it was wanted.
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

    /// Ends the job.
    pub(super) fn finish(mut self, buffers: &mut Bounces, result: Result<(), i32>) -> Done {
        if let Some(buffer) = self.bounce.take() {
            buffers.give_back(buffer);
        }
        self.request.done(result)
    }
}

//! The using side, by `/dev/xen/gntdev`.
//!
//! A call of [`Grantee::map`] is one request, one `mmap`, and one hypercall in the kernel, for each
//! kind of access in it. The driver maps all of a request or nothing, and says only that something
//! failed: then the pages of that request are mapped one by one, which costs the peer whose
//! references they are, and each gets its own result (XSA-361). Why one failed is not told; that is
//! [`GrantStatus::GeneralError`], which is also what Xen itself says of most.
//!
//! The first eight references are the console's and the store's (`GNTTAB_NR_RESERVED_ENTRIES`): a
//! toolstack lends those pages to dom0, and a frontend that names them would have its backend write
//! there. They are refused without asking Xen.
//!
//! A call of [`Grantee::copy`] is one request for up to [`COPY_MAX`] copies, which the kernel hands
//! to Xen in groups of 16, each with a status of its own. A source in lent memory is copied to a
//! private buffer first: it may be a frame of another domain, which Xen does not take for local
//! memory of this one (it answers `bad_page`).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ringfence_memory::{LentSlice, Mapping, PAGE_SIZE, Protection};
use rustix::io::Errno;

use super::abi::{self, CopyEnd, CopySegment, MapRequest};
use super::channel::XenChannel;
use crate::copy::{CopyList, CopyLocal, CopyOp};
use crate::{Access, Channel, Counters, DomId, GrantStatus, Grantee, Gref};

/// Pages that one grantee may have mapped at a time through [`Grantee::map`] (XSA-300).
pub const MAPPED_MAX: usize = 4096;

/// Most copies in one request.
pub const COPY_MAX: usize = 256;

/// How often a mapping is tried whose page the granter's domain has paged out, and the pause
/// between two attempts.
const EAGAIN_ATTEMPTS: u32 = 10;
const EAGAIN_PAUSE: Duration = Duration::from_millis(1);

struct Shared {
    device: OwnedFd,
    mapped: Mutex<usize>,
    counters: Arc<Counters>,
}

impl Shared {
    /// Counts `pages` as mapped if there is room for them.
    fn take_room(&self, pages: usize) -> bool {
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = pages <= MAPPED_MAX - *mapped;
        if fits {
            *mapped += pages;
        }
        fits
    }

    fn give_room(&self, pages: usize) {
        *self.mapped.lock().unwrap_or_else(PoisonError::into_inner) -= pages;
    }
}

/// Pages of one request; removed together when the last handle is gone.
struct MappedPages {
    mapping: Option<Mapping>,
    index: u64,
    count: u32,
    shared: Arc<Shared>,
}

impl Drop for MappedPages {
    fn drop(&mut self) {
        // In this order: the driver forgets the request only when it is not mapped any more.
        drop(self.mapping.take());
        let forgotten = abi::unmap(self.shared.device.as_fd(), self.index, self.count);
        debug_assert!(forgotten.is_ok(), "{forgotten:?}");
        self.shared.counters.grant_unmaps.add(u64::from(self.count));
        self.shared.counters.syscalls.add(2);
        self.shared.give_room(self.count as usize);
    }
}

/// What the kernel does when a page is mapped no more; see [`XenGrantee::map_with_notice`].
#[derive(Clone, Copy, Default)]
pub struct UnmapNotice<'a> {
    /// Clears the octet at this offset of the page.
    pub clear: Option<u16>,
    /// Notifies the other end of this channel.
    pub event: Option<&'a XenChannel>,
}

/// Uses pages that one granter lent to this domain.
pub struct XenGrantee {
    granter: DomId,
    shared: Arc<Shared>,
    request: MapRequest,
    segments: Vec<CopySegment>,
    bounce: Vec<u8>,
}

impl XenGrantee {
    pub(super) fn new(granter: DomId, device: OwnedFd, counters: Arc<Counters>) -> XenGrantee {
        let shared = Arc::new(Shared { device, mapped: Mutex::new(0), counters });
        XenGrantee {
            granter,
            shared,
            request: MapRequest::default(),
            segments: Vec::new(),
            bounce: Vec::new(),
        }
    }

    /// Maps `grefs` together, or none of them.
    fn map_together(
        &mut self,
        grefs: impl Iterator<Item = Gref>,
        access: Access,
    ) -> Result<Arc<MappedPages>, GrantStatus> {
        self.request.begin();
        for gref in grefs {
            self.request.push(self.granter, gref);
        }
        let count = self.request.count();
        if !self.shared.take_room(count as usize) {
            return Err(GrantStatus::NoSpace);
        }
        let mapped = self.map_request(count, access);
        if mapped.is_err() {
            self.shared.give_room(count as usize);
        }
        mapped
    }

    fn map_request(&mut self, count: u32, access: Access) -> Result<Arc<MappedPages>, GrantStatus> {
        let device = self.shared.device.as_fd();
        let protection = match access {
            Access::ReadOnly => Protection::ReadOnly,
            Access::ReadWrite => Protection::ReadWrite,
        };
        let index = self.request.submit(device).map_err(status_of)?;
        let mut attempts = 1;
        self.shared.counters.syscalls.add(2);
        let mapping = loop {
            let bytes = count as usize * PAGE_SIZE;
            match Mapping::new(device, index, bytes, protection) {
                Ok(mapping) => break mapping,
                Err(error) => {
                    let errno = Errno::from_io_error(&error).unwrap_or(Errno::INVAL);
                    if errno == Errno::AGAIN && attempts < EAGAIN_ATTEMPTS {
                        attempts += 1;
                        self.shared.counters.syscalls.add(1);
                        std::thread::sleep(EAGAIN_PAUSE);
                        continue;
                    }
                    self.shared.counters.syscalls.add(1);
                    let _ = abi::unmap(device, index, count);
                    return Err(status_of(errno));
                }
            }
        };
        self.shared.counters.grant_maps.add(u64::from(count));
        let shared = Arc::clone(&self.shared);
        Ok(Arc::new(MappedPages { mapping: Some(mapping), index, count, shared }))
    }

    /// Maps one page, writable, and leaves word with the kernel of what to do when it is mapped no
    /// more, be it that the handles were dropped or that this process was killed: so the granter
    /// learns of it, which Xen by itself tells nobody.
    ///
    /// # Errors
    ///
    /// As for [`Grantee::map`]; the page is not mapped either when word cannot be left.
    pub fn map_with_notice(
        &mut self,
        gref: Gref,
        notice: UnmapNotice<'_>,
    ) -> Result<LentSlice, GrantStatus> {
        let mapped = self.map_together([gref].into_iter(), Access::ReadWrite)?;
        let offset = usize::from(notice.clear.unwrap_or(0));
        if offset >= PAGE_SIZE {
            return Err(GrantStatus::BadPage);
        }
        let port = notice.event.map(|channel| channel.port().0);
        let place = mapped.index + offset as u64;
        self.shared.counters.syscalls.add(1);
        let device = self.shared.device.as_fd();
        abi::set_unmap_notify(device, place, notice.clear.is_some(), port).map_err(status_of)?;
        part(&mapped, 0)
    }

    /// Maps those of `pages` that are wanted for `access`, into their places in `out`.
    fn map_kind(
        &mut self,
        pages: &[(Gref, Access)],
        access: Access,
        out: &mut [Result<LentSlice, GrantStatus>],
    ) {
        let wanted = |page: &(Gref, Access)| page.1 == access && !is_reserved(page.0);
        let of_kind = || pages.iter().enumerate().filter(move |(_, page)| wanted(page));
        let several = match of_kind().count() {
            0 => return,
            count => count > 1,
        };
        let together = self.map_together(of_kind().map(|(_, page)| page.0), access);
        match together {
            Ok(mapped) => {
                for (nth, (place, _)) in of_kind().enumerate() {
                    out[place] = part(&mapped, nth);
                }
            }
            Err(GrantStatus::GeneralError | GrantStatus::Again) if several => {
                for (place, (gref, _)) in of_kind() {
                    let alone = self.map_together([*gref].into_iter(), access);
                    out[place] = alone.and_then(|mapped| part(&mapped, 0));
                }
            }
            Err(status) => of_kind().for_each(|(place, _)| out[place] = Err(status)),
        }
    }

    /// Does the copies of one request.
    fn copy_chunk(&mut self, ops: &[CopyOp], statuses: &mut Vec<GrantStatus>) {
        let bounced = ops.iter().map(bounced_len).sum();
        self.bounce.clear();
        self.bounce.resize(bounced, 0);
        self.segments.clear();
        let mut bounce = &mut self.bounce[..];
        for op in ops {
            let foreign = CopyEnd::foreign(self.granter, op.gref, op.offset);
            // Of no octets the kernel asks Xen nothing.
            let len = if is_reserved(op.gref) { 0 } else { op.len };
            let segment = match &op.local {
                CopyLocal::Into(ptr) => CopySegment::fetch(foreign, CopyEnd::local(*ptr), len),
                CopyLocal::From(ptr) => CopySegment::store(CopyEnd::local(*ptr), foreign, len),
                CopyLocal::FromLent(lent) => {
                    let (bytes, rest) = bounce.split_at_mut(bounced_len(op));
                    bounce = rest;
                    // It is exactly these bytes, which the list has seen to.
                    let copied = lent.copy_to(0, bytes);
                    debug_assert!(copied.is_ok());
                    CopySegment::store(CopyEnd::local(bytes.as_ptr()), foreign, len)
                }
            };
            self.segments.push(segment);
        }
        // SAFETY: the CopyList that is being executed borrows the private memory of each element,
        // exclusively where it is written; the others are in `self.bounce`, which is not touched
        // until the call has returned.
        let done = unsafe { abi::copy(self.shared.device.as_fd(), &mut self.segments) };
        let counters = &self.shared.counters;
        counters.syscalls.add(1);
        counters.grant_copies.add(ops.len() as u64);
        counters.grant_copy_bytes.add(ops.iter().map(|op| u64::from(op.len)).sum());
        match done {
            Ok(()) => statuses.extend(ops.iter().zip(&self.segments).map(|(op, segment)| {
                if is_reserved(op.gref) { GrantStatus::BadGref } else { segment.status() }
            })),
            // Then no status means anything, whatever was copied.
            Err(errno) => statuses.extend(ops.iter().map(|_| status_of(errno))),
        }
    }
}

fn is_reserved(gref: Gref) -> bool {
    gref < Gref::FIRST_FREE
}

fn bounced_len(op: &CopyOp) -> usize {
    match op.local {
        CopyLocal::FromLent(_) => op.len.into(),
        CopyLocal::Into(_) | CopyLocal::From(_) => 0,
    }
}

/// A handle to the `nth` page of a request.
fn part(mapped: &Arc<MappedPages>, nth: usize) -> Result<LentSlice, GrantStatus> {
    let mapping = mapped.mapping.as_ref().ok_or(GrantStatus::GeneralError)?;
    // SAFETY: the owner holds the mapping until it is dropped.
    let page = unsafe { mapping.part(Arc::clone(mapped) as _, nth * PAGE_SIZE, PAGE_SIZE) };
    page.map_err(|_| GrantStatus::GeneralError)
}

/// What the driver's answer means. Which status Xen gave is not told.
fn status_of(errno: Errno) -> GrantStatus {
    match errno {
        Errno::AGAIN => GrantStatus::Again,
        Errno::NOMEM | Errno::NOSPC | Errno::NFILE | Errno::MFILE => GrantStatus::NoDeviceSpace,
        _ => GrantStatus::GeneralError,
    }
}

impl Grantee for XenGrantee {
    fn granter(&self) -> DomId {
        self.granter
    }

    fn map(&mut self, pages: &[(Gref, Access)], out: &mut Vec<Result<LentSlice, GrantStatus>>) {
        let from = out.len();
        out.resize_with(from + pages.len(), || Err(GrantStatus::BadGref));
        for access in [Access::ReadWrite, Access::ReadOnly] {
            self.map_kind(pages, access, &mut out[from..]);
        }
    }

    fn copy(&mut self, mut list: CopyList<'_, '_>) {
        let (ops, statuses) = list.parts();
        statuses.clear();
        for chunk in ops.chunks(COPY_MAX) {
            self.copy_chunk(chunk, statuses);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_driver_says_becomes_a_status() {
        assert_eq!(status_of(Errno::INVAL), GrantStatus::GeneralError);
        assert_eq!(status_of(Errno::FAULT), GrantStatus::GeneralError);
        assert_eq!(status_of(Errno::AGAIN), GrantStatus::Again);
        assert_eq!(status_of(Errno::NOMEM), GrantStatus::NoDeviceSpace);
    }
}

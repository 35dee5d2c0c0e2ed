//! Accessing side on Xen, through `/dev/xen/gntdev`.
//!
//! A call of [`Grantee::map`] makes one request, one `mmap` and one hypercall for each kind of access in
//! it. The driver maps all pages of a request or none, and does not report which one failed. After a
//! failure the pages are therefore mapped one by one, so that each gets its own result (XSA-361). The
//! driver does not report the reason either: the status is [`GrantStatus::GeneralError`].
//!
//! The first eight references belong to the console and the store (`GNTTAB_NR_RESERVED_ENTRIES`). A
//! toolstack grants those pages to dom0, so a frontend that names them could make its backend write
//! there. They are refused without a request.
//!
//! A call of [`Grantee::copy`] makes one request for up to [`COPY_MAX`] copies. The kernel passes them to
//! Xen in groups of 16, each copy with its own status. A source in lent memory is copied to a private
//! buffer first: it may be a frame of another domain, which Xen refuses as local memory (`bad_page`).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ringfence_memory::{LentSlice, Mapping, PAGE_SIZE, Protection, page_aligned};
use ringfence_sys::counters::Counters;
use ringfence_wire::grant::{Access, DomId, GrantStatus, Gref};
use rustix::io::Errno;

use super::abi::{self, CopyEnd, CopySegment, MapRequest};
use super::channel::XenChannel;
use crate::copy::{CopyList, CopyLocal, CopyOp};
use crate::events::Channel;
use crate::grants::Grantee;

/// Maximum number of pages that one grantee may have mapped through [`Grantee::map`] (XSA-300).
pub const MAPPED_MAX: usize = 4096;

/// Maximum number of copies in one request.
pub const COPY_MAX: usize = 256;

/// Retries of a mapping whose page the granter's domain has paged out, and the pause between them.
const EAGAIN_ATTEMPTS: u32 = 10;
const EAGAIN_PAUSE: Duration = Duration::from_millis(1);

struct SharedGrantee {
    device: OwnedFd,
    mapped: Mutex<usize>,
    counters: Arc<Counters>,
}

impl SharedGrantee {
    /// Counts `pages` as mapped if the limit allows. Returns `false` otherwise.
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

/// Pages of one request. They are unmapped together when the last handle is dropped.
struct MappedPages {
    mapping: Option<Mapping>,
    index: u64,
    count: u32,
    shared: Arc<SharedGrantee>,
}

impl Drop for MappedPages {
    fn drop(&mut self) {
        // In this order: the driver refuses to remove a request that is still mapped.
        drop(self.mapping.take());
        let forgotten = abi::unmap(self.shared.device.as_fd(), self.index, self.count);
        debug_assert!(forgotten.is_ok(), "{forgotten:?}");
        self.shared.counters.grant_unmaps.add(u64::from(self.count));
        self.shared.counters.syscalls.add(2);
        self.shared.give_room(self.count as usize);
    }
}

/// Kernel actions when a page is unmapped; see [`XenGrantee::map_with_notice`].
#[derive(Clone, Copy, Default)]
pub struct UnmapNotice<'a> {
    /// Offset of a byte in the page that the kernel clears.
    pub clear: Option<u16>,
    /// Channel whose other end the kernel notifies.
    pub event: Option<&'a XenChannel>,
}

/// User of one granter's pages by the kernel's gntdev: it maps and copies them.
pub struct XenGrantee {
    granter: DomId,
    shared: Arc<SharedGrantee>,
    request: MapRequest,
    segments: Vec<CopySegment>,
    bounce: Vec<u8>,
}

impl XenGrantee {
    pub(super) fn new(granter: DomId, device: OwnedFd, counters: Arc<Counters>) -> XenGrantee {
        let shared = Arc::new(SharedGrantee { device, mapped: Mutex::new(0), counters });
        XenGrantee {
            granter,
            shared,
            request: MapRequest::default(),
            segments: Vec::new(),
            bounce: Vec::new(),
        }
    }

    /// Maps all of `grefs`, or none.
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

    /// Maps one writable page and registers `notice` with the kernel. The kernel acts when the page is
    /// unmapped, also if this process is killed. Without a notice Xen does not tell the granter.
    ///
    /// # Errors
    ///
    /// Returns the status of [`Grantee::map`]. The page is not mapped if the notice is refused.
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

    /// Maps those of `pages` that are requested for `access`, into their positions in `out`.
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

    /// Executes the copies of one request.
    fn copy_chunk(&mut self, ops: &[CopyOp], statuses: &mut Vec<GrantStatus>) {
        let bounced = ops.iter().map(bounced_len).sum();
        self.segments.clear();
        let mut bounce = page_aligned(&mut self.bounce, bounced);
        for op in ops {
            let foreign = CopyEnd::foreign(self.granter, op.gref, op.offset);
            // For a length of 0 the kernel makes no hypercall.
            let len = if is_reserved(op.gref) { 0 } else { op.len };
            let segment = match &op.local {
                CopyLocal::Into(ptr) => CopySegment::fetch(foreign, CopyEnd::local(*ptr), len),
                CopyLocal::From(ptr) => CopySegment::store(CopyEnd::local(*ptr), foreign, len),
                CopyLocal::FromLent(lent) => {
                    let (bytes, rest) = bounce.split_at_mut(bounced_len(op));
                    bounce = rest;
                    // The list has sliced the source to exactly these bytes.
                    let copied = lent.copy_to(0, bytes);
                    debug_assert!(copied.is_ok());
                    CopySegment::store(CopyEnd::local(bytes.as_ptr()), foreign, len)
                }
            };
            self.segments.push(segment);
        }
        // SAFETY: the CopyList in execution borrows the private memory of each element, exclusively if
        // it is written. The other local ends are in `self.bounce`, which is untouched until the call
        // returns.
        let done = unsafe { abi::copy(self.shared.device.as_fd(), &mut self.segments) };
        let counters = &self.shared.counters;
        counters.syscalls.add(1);
        counters.grant_copies.add(ops.len() as u64);
        counters.grant_copy_bytes.add(ops.iter().map(|op| u64::from(op.len)).sum());
        match done {
            Ok(()) => statuses.extend(ops.iter().zip(&self.segments).map(|(op, segment)| {
                if is_reserved(op.gref) { GrantStatus::BadGref } else { segment.status() }
            })),
            // The call failed as a whole: the segments' statuses are invalid.
            Err(errno) => statuses.extend(ops.iter().map(|_| status_of(errno))),
        }
    }
}

/// Number of references that the toolstack grants in each domain: 0 for the console and 1 for the store. A guest's own
/// begin behind them. Linux leaves out six more; GRUB uses them.
const RESERVED: u32 = 2;

/// Returns `true` for a page that the guest has not granted itself. A missing key that was read as 0 must not map the
/// console.
fn is_reserved(gref: Gref) -> bool {
    gref.0 < RESERVED
}

fn bounced_len(op: &CopyOp) -> usize {
    match op.local {
        CopyLocal::FromLent(_) => op.len.into(),
        CopyLocal::Into(_) | CopyLocal::From(_) => 0,
    }
}

/// Returns a handle to the `nth` page of a request.
fn part(mapped: &Arc<MappedPages>, nth: usize) -> Result<LentSlice, GrantStatus> {
    let mapping = mapped.mapping.as_ref().ok_or(GrantStatus::GeneralError)?;
    // SAFETY: the owner keeps the mapping until it is dropped.
    let page = unsafe { mapping.part(Arc::clone(mapped) as _, nth * PAGE_SIZE, PAGE_SIZE) };
    page.map_err(|_| GrantStatus::GeneralError)
}

/// Converts the driver's error. The driver does not report Xen's own status.
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
    use crate::copy::CopyOps;

    #[test]
    fn driver_errno_becomes_grant_status() {
        assert_eq!(status_of(Errno::INVAL), GrantStatus::GeneralError);
        assert_eq!(status_of(Errno::FAULT), GrantStatus::GeneralError);
        assert_eq!(status_of(Errno::AGAIN), GrantStatus::Again);
        assert_eq!(status_of(Errno::NOMEM), GrantStatus::NoDeviceSpace);
    }

    /// Creates a grantee whose driver refuses every request.
    fn refused() -> XenGrantee {
        let device = std::fs::File::open("/dev/null").unwrap();
        XenGrantee::new(DomId(1), device.into(), Arc::default())
    }

    #[test]
    fn xsa_300_pages_mapped_beyond_limit_are_refused() {
        let grantee = refused();
        assert!(grantee.shared.take_room(MAPPED_MAX));
        assert!(!grantee.shared.take_room(1));
        grantee.shared.give_room(3);
        assert!(!grantee.shared.take_room(4));
        assert!(grantee.shared.take_room(3));
    }

    #[test]
    fn xsa_362_failed_request_sets_status_of_each_page_and_holds_no_room() {
        let mut grantee = refused();
        let page = |gref, access| (Gref(gref), access);
        let pages = [
            page(8, Access::ReadOnly),
            page(1, Access::ReadWrite),
            page(2, Access::ReadWrite),
            page(0, Access::ReadOnly),
        ];
        let mut out = Vec::new();
        grantee.map(&pages, &mut out);
        let statuses: Vec<_> = out.into_iter().map(|page| page.err()).collect();
        let (failed, reserved) = (Some(GrantStatus::GeneralError), Some(GrantStatus::BadGref));
        assert_eq!(statuses, [failed, reserved, failed, reserved]);
        assert_eq!(*grantee.shared.mapped.lock().unwrap(), 0);
        assert_eq!(grantee.shared.counters.values().grant_maps, 0);
    }

    #[test]
    fn xsa_365_failed_request_sets_error_status_of_each_copy() {
        let mut grantee = refused();
        let (mut into, lent) = ([0u8; 16], LentSlice::anonymous(PAGE_SIZE));
        let mut ops = CopyOps::new();
        let mut list = ops.begin();
        list.read(Gref(8), 0, &mut into).unwrap();
        list.write(Gref(9), 0, b"bytes").unwrap();
        list.write_lent(Gref(10), 0, &lent, 100, 200).unwrap();
        grantee.copy(list);
        assert_eq!(ops.statuses(), [GrantStatus::GeneralError; 3]);
    }
}

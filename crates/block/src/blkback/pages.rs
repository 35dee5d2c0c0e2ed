//! Connection of [`ringfence_access::RequestAccess`] with blkif requests and with the queue of a disk.

use ringfence_access::request_access::{PagePart, PageRange, PageRegistry};
use ringfence_memory::LentSlice;
use ringfence_platform::{Access, GrantStatus};
use ringfence_wire::blkif::{Direction, SegmentRange};

use crate::storage::{DiskQueue, Segment};

impl From<PagePart> for Segment {
    fn from(PagePart { memory, registered }: PagePart) -> Segment {
        Segment { memory, registered }
    }
}

/// The queue registers kept pages with the kernel.
impl PageRegistry for dyn DiskQueue + '_ {
    fn register(&mut self, name: u64, page: &LentSlice) -> bool {
        DiskQueue::register(self, name, page)
    }

    fn unregister(&mut self, name: u64) {
        DiskQueue::unregister(self, name);
    }
}

/// Returns the ranges of pages of validated segments.
pub(super) fn page_ranges(segments: &[SegmentRange]) -> impl Iterator<Item = PageRange> + Clone {
    segments.iter().map(|segment| PageRange {
        gref: segment.gref(),
        offset: segment.offset(),
        len: segment.len(),
    })
}

/// Returns the access that the backend needs: a read from the disk writes the guest's page.
pub(super) fn access_for(direction: Direction) -> Access {
    match direction {
        Direction::Read => Access::ReadWrite,
        Direction::Write => Access::ReadOnly,
    }
}

/// Returns the rule that a guest breaks if a page of its request is not accessible.
pub(super) fn grant_rule(status: GrantStatus) -> &'static str {
    match status {
        GrantStatus::BadGref => "blk_gref_not_granted",
        GrantStatus::PermissionDenied => "blk_grant_denied",
        GrantStatus::BadPage => "blk_page_beyond_arena",
        GrantStatus::Again => "blk_grant_revoked",
        GrantStatus::NoSpace => "blk_too_many_mapped",
        _ => "blk_grant_error",
    }
}

//! Size of a page.

/// Page size in bytes of ring protocols and grants, independent of the operating system (`ring.h`).
pub const PAGE_SIZE: usize = 4096;

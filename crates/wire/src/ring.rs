//! Header layout of the shared ring page (Xen's `io/ring.h`).
//!
//! | offset | field | written by | start value |
//! |---|---|---|---|
//! | 0 | `req_prod` | frontend | 0 |
//! | 4 | `req_event` | backend | 1 |
//! | 8 | `rsp_prod` | backend | 0 |
//! | 12 | `rsp_event` | frontend | 1 |
//! | 64 | entries | both | |
//!
//! The frontend initialises the whole header; the backend initialises none of it. Indices are
//! free-running `u32`. An index modulo the number of entries gives its slot.

/// Page size in bytes of rings and grants, independent of the machine's page size.
pub const PAGE_SIZE: usize = 4096;

/// Offset of the request producer index.
pub const REQ_PROD: usize = 0;
/// Offset of the request index at which the backend wants an event.
pub const REQ_EVENT: usize = 4;
/// Offset of the response producer index.
pub const RSP_PROD: usize = 8;
/// Offset of the response index at which the frontend wants an event.
pub const RSP_EVENT: usize = 12;
/// Offset of the first entry, which is the length of the header.
pub const ENTRIES: usize = 64;

/// Returns the entries of `entry_size` bytes in a ring of `ring_bytes` bytes: the largest power of
/// two that fits behind the header. Returns 0 if none fits or `entry_size` is 0.
pub const fn entry_count(ring_bytes: usize, entry_size: usize) -> u32 {
    if entry_size == 0 || ring_bytes < ENTRIES {
        return 0;
    }
    let fit = (ring_bytes - ENTRIES) / entry_size;
    match fit.checked_ilog2() {
        None => 0,
        Some(log) if log < 32 => 1 << log,
        Some(_) => 1 << 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_count_of_xen_rings_matches_their_headers() {
        assert_eq!(entry_count(PAGE_SIZE, 12), 256, "netif tx");
        assert_eq!(entry_count(PAGE_SIZE, 8), 256, "netif rx: 504 fit");
        assert_eq!(entry_count(PAGE_SIZE, 16), 128, "netif control: 252 fit");
        assert_eq!(entry_count(PAGE_SIZE, 112), 32, "blkif x86_64");
        assert_eq!(entry_count(PAGE_SIZE, 108), 32, "blkif x86_32");
        assert_eq!(entry_count(16 * PAGE_SIZE, 112), 512, "blkif, 16 pages");
    }

    #[test]
    fn entry_count_of_degenerate_sizes_is_bounded() {
        assert_eq!(entry_count(PAGE_SIZE, 0), 0);
        assert_eq!(entry_count(63, 12), 0);
        assert_eq!(entry_count(64, 12), 0);
        assert_eq!(entry_count(64 + 12, 12), 1);
        assert_eq!(entry_count(usize::MAX, 1), 1 << 31);
    }
}

//! Private buffers that begin at a page boundary.

use crate::page::PAGE_SIZE;

/// Returns `len` bytes of `buffer` from a page boundary on, and grows it as needed. Their content is undefined.
///
/// The hypervisor copies between one page and one page: a page's worth of bytes that begins elsewhere costs two
/// operations.
pub fn page_aligned(buffer: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if buffer.len() < len + PAGE_SIZE {
        buffer.resize(len + PAGE_SIZE, 0);
    }
    let start = buffer.as_ptr().addr().wrapping_neg() % PAGE_SIZE;
    &mut buffer[start..start + len]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_begin_at_page_boundary_at_every_length() {
        let mut buffer = Vec::new();
        for len in [0, 1, PAGE_SIZE, 200_000, 5, 3 * PAGE_SIZE] {
            let bytes = page_aligned(&mut buffer, len);
            assert_eq!((bytes.len(), bytes.as_ptr().addr() % PAGE_SIZE), (len, 0));
            bytes.fill(1);
        }
    }
}

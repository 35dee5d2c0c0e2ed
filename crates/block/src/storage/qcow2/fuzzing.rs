//! Body of the fuzz target of headers, which also runs as a property test.

use std::path::Path;

use super::chain::next_member;
use crate::storage::qcow2_header::Header;

/// Parses the first bytes of a file as an image, and the names in it. An accepted header has bounded tables.
pub fn header(data: &[u8]) {
    let Ok(header) = Header::parse(data) else { return };
    let cluster = header.cluster();
    assert!((512..=2 << 20).contains(&cluster));
    assert!(header.l1.1 * 8 <= 32 << 20 && header.refcount_table.1 <= 8 << 20);
    assert!(header.l1.0.is_multiple_of(cluster) && header.refcount_table.0.is_multiple_of(cluster));
    // Each byte of the disk has its entry.
    assert!(u128::from(header.l1.1) * u128::from(cluster * (cluster / 8)) >= header.bytes.into());
    assert!(header.memory() < 1 << 30);
    if let Some(backing) = &header.backing {
        let _ = next_member(Path::new("/images/image"), backing);
    }
}

//! Virtio-net headers of frames that are assembled in the frame ring.

use ringfence_offload::vnet::{EmitError, MODERN_LEN, VnetHeader};
use ringfence_offload::{Layers, OffloadMeta};
use ringfence_sys::numbers::bounded;

/// Returns the length of all headers of a frame of `frame_len` bytes that begins with `header`; 0 if it cannot
/// be parsed.
#[inline]
pub(crate) fn headers_len(header: &[u8], frame_len: usize) -> u16 {
    let frame_len = bounded(frame_len, u32::MAX);
    Layers::parse(header, frame_len).map_or(0, |layers| layers.header_len())
}

/// Builds the virtio-net header of a frame whose own headers have `headers` bytes, 0 if unknown.
///
/// A receiver that segments needs the length. The kernel's TAP also uses it as the part of a packet to keep
/// contiguous. Without it, a long packet needs 64 KiB of contiguous memory, which may not be available.
pub(crate) fn vnet_header(headers: u16, meta: OffloadMeta) -> Result<[u8; MODERN_LEN], EmitError> {
    let header = VnetHeader::for_frame(meta, headers)?;
    Ok(VnetHeader { hdr_len: headers, ..header }.to_modern())
}

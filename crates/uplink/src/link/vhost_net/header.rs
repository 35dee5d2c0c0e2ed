//! The virtio-net header of a frame that is put together here.

use ringfence_offload::vnet::{EmitError, MODERN_LEN, VnetHeader};
use ringfence_offload::{Layers, OffloadMeta};

/// Octets of all headers of a frame of `frame_len` octets that begins with `header`; 0 when they cannot be
/// told.
pub(crate) fn headers_len(header: &[u8], frame_len: usize) -> u16 {
    let frame_len = u32::try_from(frame_len).unwrap_or(u32::MAX);
    Layers::parse(header, frame_len).map_or(0, |layers| layers.header_len())
}

/// The header of a frame whose own headers have `headers` octets, 0 if that was not asked. A receiver that
/// segments needs to know; to the kernel's TAP it says as well how much of a packet to keep in one piece. Of a
/// long one without it, that is all: 64 KiB in a row of memory, which a machine that is short of it has not.
pub(crate) fn vnet_header(headers: u16, meta: OffloadMeta) -> Result<[u8; MODERN_LEN], EmitError> {
    let header = VnetHeader::for_frame(meta, headers)?;
    Ok(VnetHeader { hdr_len: headers, ..header }.to_modern())
}

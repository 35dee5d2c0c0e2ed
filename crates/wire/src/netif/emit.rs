//! Chain encoders: write one packet into slots of either ring.
//!
//! Both encoders check every rule first and write no slot if one would be broken. So a bug of ours
//! does not look like an attack to the peer. [`super::tx`] and [`super::rx`] accept every chain built
//! here.

use super::extra::Extra;
use super::{
    Checksum, EXTRAS_MAX, PACKET_MAX, PACKET_MIN, RxFlags, RxResponse, SLOTS_MAX, TxFlags,
    TxRequest, within_page,
};
use crate::grant::Gref;
use crate::ring::PAGE_SIZE;
use thiserror::Error;

/// Fragment that the frontend sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TxPart {
    /// Page that holds the fragment.
    pub gref: Gref,
    pub offset: u16,
    /// Length of the fragment in bytes.
    pub len: u16,
    /// Id that the response echoes.
    pub id: u16,
}

/// Fragment that the backend placed in a posted page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RxPart {
    /// Id of the answered request.
    pub id: u16,
    pub offset: u16,
    /// Length of the fragment in bytes.
    pub len: u16,
}

/// Reasons for which a packet cannot be sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum ChainEmitError {
    /// No fragments, or too many.
    #[error("a packet in {found} fragments, 1 to {limit} can be sent")]
    Fragments {
        /// Fragments of the packet.
        found: usize,
        /// Maximum, equal to [`SLOTS_MAX`].
        limit: usize,
    },
    #[error("{found} extra infos with one packet, the limit is {limit}")]
    TooManyExtras {
        /// Extra infos of the packet.
        found: usize,
        /// Maximum, equal to [`EXTRAS_MAX`].
        limit: usize,
    },
    /// Fragment reaches over the end of its page.
    #[error("fragment {index}: {len} bytes from offset {offset} on cross the page")]
    CrossesPage {
        /// Fragment index, counted from 0.
        index: usize,
        offset: u16,
        len: u16,
    },
    /// Packet shorter than an Ethernet header or longer than [`PACKET_MAX`].
    #[error("a packet of {total} bytes, {PACKET_MIN} to {PACKET_MAX} can be sent")]
    Size {
        /// Bytes of all fragments.
        total: u32,
    },
}

/// Checks the rules common to both rings; returns the packet's length.
fn check(
    parts: impl ExactSizeIterator<Item = (u16, u16)>,
    extras: &[Extra],
) -> Result<u16, ChainEmitError> {
    let found = parts.len();
    if !(1..=SLOTS_MAX).contains(&found) {
        return Err(ChainEmitError::Fragments { found, limit: SLOTS_MAX });
    }
    if extras.len() > EXTRAS_MAX {
        return Err(ChainEmitError::TooManyExtras { found: extras.len(), limit: EXTRAS_MAX });
    }
    let mut total = 0u32;
    for (index, (offset, len)) in parts.enumerate() {
        if !within_page(offset, u32::from(len)) {
            return Err(ChainEmitError::CrossesPage { index, offset, len });
        }
        // At most 18 fragments of 4096 bytes.
        total += u32::from(len);
    }
    u16::try_from(total).ok().filter(|_| total >= PACKET_MIN).ok_or(ChainEmitError::Size { total })
}

/// Writes the extra infos, which follow the first fragment.
fn put_extras(extras: &[Extra], mut put: impl FnMut([u8; 8])) {
    for (index, extra) in extras.iter().enumerate() {
        put(extra.emit(index + 1 < extras.len()).0);
    }
}

/// Writes the slots of one packet for the tx ring in order. Returns their number, always
/// `parts.len() + extras.len()`. A multicast change turns the chain into a filter request for the
/// receiver.
///
/// # Errors
/// Returns [`ChainEmitError`] without writing a slot.
pub fn emit_tx(
    parts: &[TxPart],
    checksum: Checksum,
    extras: &[Extra],
    mut put: impl FnMut([u8; TxRequest::SIZE]),
) -> Result<u32, ChainEmitError> {
    let total = check(parts.iter().map(|part| (part.offset, part.len)), extras)?;
    let mut slots = 0;
    let mut flags = TxFlags::from(checksum).with_if(!extras.is_empty(), TxFlags::EXTRA_INFO);
    // The first request carries the length of the whole packet.
    let mut size = total;
    for (index, part) in parts.iter().enumerate() {
        let TxPart { gref, offset, id, .. } = *part;
        let flags_now = flags.with_if(index + 1 < parts.len(), TxFlags::MORE_DATA);
        put(TxRequest { gref, offset, flags: flags_now, id, size }.to_bytes());
        slots += 1;
        if index == 0 {
            put_extras(extras, |[t, f, b0, b1, b2, b3, b4, b5]| {
                put([t, f, b0, b1, b2, b3, b4, b5, 0, 0, 0, 0]);
                slots += 1;
            });
        }
        flags = TxFlags::NONE;
        size = parts.get(index + 1).map_or(0, |next| next.len);
    }
    Ok(slots)
}

/// Writes the slots of one packet for the rx ring in order. Returns their number, always
/// `parts.len() + extras.len()`.
///
/// Each slot consumes the request of that ring slot: the first fragment's, then one for each extra
/// info (whose page stays untouched), then the others'. `parts` must name requests accordingly.
///
/// # Errors
/// Returns [`ChainEmitError`] without writing a slot.
pub fn emit_rx(
    parts: &[RxPart],
    checksum: Checksum,
    extras: &[Extra],
    mut put: impl FnMut([u8; RxResponse::SIZE]),
) -> Result<u32, ChainEmitError> {
    check(parts.iter().map(|part| (part.offset, part.len)), extras)?;
    let mut slots = 0;
    let mut flags = RxFlags::from(checksum).with_if(!extras.is_empty(), RxFlags::EXTRA_INFO);
    for (index, part) in parts.iter().enumerate() {
        let RxPart { id, offset, len } = *part;
        let flags_now = flags.with_if(index + 1 < parts.len(), RxFlags::MORE_DATA);
        let status = i16::try_from(len).expect("a fragment has been checked to fit a page");
        put(RxResponse { id, offset, flags: flags_now, status }.to_bytes());
        slots += 1;
        if index == 0 {
            put_extras(extras, |extra| {
                put(extra);
                slots += 1;
            });
        }
        flags = RxFlags::NONE;
    }
    Ok(slots)
}

/// Part of a buffer that lies in one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageRange {
    /// Page index in the buffer, counted from 0.
    pub page: usize,
    pub offset: u16,
    /// Length in bytes, 1 to 4096.
    pub len: u16,
}

/// Splits `len` bytes that start `offset` bytes into a buffer at page boundaries. Yields one range for
/// each page.
pub fn split_by_page(offset: usize, len: usize) -> impl Iterator<Item = PageRange> {
    let end = offset.saturating_add(len);
    let mut at = offset;
    core::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let (page, within) = (at / PAGE_SIZE, at % PAGE_SIZE);
        let len = (PAGE_SIZE - within).min(end - at);
        at += len;
        let narrow = |bytes| u16::try_from(bytes).expect("at most a page");
        Some(PageRange { page, offset: narrow(within), len: narrow(len) })
    })
}

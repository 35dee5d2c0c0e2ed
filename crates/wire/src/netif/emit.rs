//! Chains to be sent: a packet into slots, on either ring.
//!
//! Both emitters check everything first and put no slot if a rule would be broken, so that a bug of
//! ours does not look like an attack to the peer. What they put, [`super::tx`] and [`super::rx`]
//! take.

use super::extra::Extra;
use super::{
    Checksum, EXTRAS_MAX, PACKET_MAX, PACKET_MIN, RxFlags, RxResponse, SLOTS_MAX, TxFlags,
    TxRequest, within_page,
};
use crate::grant::Gref;
use crate::ring::PAGE_SIZE;
use thiserror::Error;

/// A fragment to be sent by the frontend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TxPart {
    /// The page it is in.
    pub gref: Gref,
    /// Where in the page.
    pub offset: u16,
    /// Its bytes.
    pub len: u16,
    /// Comes back in the response.
    pub id: u16,
}

/// A fragment that the backend put into a posted page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RxPart {
    /// Of the request that is answered.
    pub id: u16,
    /// Where in the page.
    pub offset: u16,
    /// Its bytes.
    pub len: u16,
}

/// Why a packet cannot be sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum ChainEmitError {
    /// No fragment, or too many.
    #[error("a packet in {found} fragments, 1 to {limit} can be sent")]
    Fragments {
        /// Fragments given.
        found: usize,
        /// [`SLOTS_MAX`].
        limit: usize,
    },
    /// Too many extra infos.
    #[error("{found} extra infos with one packet, the limit is {limit}")]
    TooManyExtras {
        /// Extra infos given.
        found: usize,
        /// [`EXTRAS_MAX`].
        limit: usize,
    },
    /// A fragment reaches over the end of its page.
    #[error("fragment {index}: {len} bytes from offset {offset} on cross the page")]
    CrossesPage {
        /// Which fragment, counted from 0.
        index: usize,
        /// Its offset.
        offset: u16,
        /// Its bytes.
        len: u16,
    },
    /// Shorter than an Ethernet header or longer than an IP packet.
    #[error("a packet of {total} bytes, {PACKET_MIN} to {PACKET_MAX} can be sent")]
    Size {
        /// Bytes of all fragments.
        total: u32,
    },
}

/// Checks the rules that both rings share; the packet's size.
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

/// Puts the extra infos, which stand between the first fragment and the others.
fn put_extras(extras: &[Extra], mut put: impl FnMut([u8; 8])) {
    for (index, extra) in extras.iter().enumerate() {
        put(extra.emit(index + 1 < extras.len()).0);
    }
}

/// Puts the slots of one packet for the tx ring, in order; returns how many that are, always
/// `parts.len() + extras.len()`. A multicast change makes the receiver take the chain for a filter
/// request, not for a packet.
///
/// # Errors
/// [`ChainEmitError`], with nothing put.
pub fn emit_tx(
    parts: &[TxPart],
    checksum: Checksum,
    extras: &[Extra],
    mut put: impl FnMut([u8; TxRequest::SIZE]),
) -> Result<u32, ChainEmitError> {
    let total = check(parts.iter().map(|part| (part.offset, part.len)), extras)?;
    let mut slots = 0;
    let mut flags = TxFlags::from(checksum).with_if(!extras.is_empty(), TxFlags::EXTRA_INFO);
    // The first request carries the size of the whole.
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

/// Puts the slots of one packet for the rx ring, in order; returns how many that are, always
/// `parts.len() + extras.len()`.
///
/// Each slot uses up the request of that ring slot: the first fragment's, then one for each extra
/// info (whose page stays untouched), then the others'. `parts` must name requests accordingly.
///
/// # Errors
/// [`ChainEmitError`], with nothing put.
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

/// A part of a buffer that lies in one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageRange {
    /// Which page of the buffer, counted from 0.
    pub page: usize,
    /// Where in the page it starts.
    pub offset: u16,
    /// Its bytes, 1 to 4096.
    pub len: u16,
}

/// Cuts `len` bytes that start `offset` bytes into a buffer of whole pages at the ends of the
/// pages: one fragment for each.
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

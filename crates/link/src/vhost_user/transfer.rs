//! Frames between the vrings of a guest and the uplink.

use ringfence_frame::batch::HEADER_MAX;
use ringfence_frame::tap::accept;
use ringfence_frame::{Batch, DropReason};
use ringfence_offload::vnet::{LEGACY_LEN, MODERN_LEN, VnetHeader};
use ringfence_ring::split::backend::BackendQueue;
use ringfence_sys::numbers::{bounded, usize_from};
use ringfence_vhost_user::ClientFault;
use ringfence_vhost_user::device::Device;
use ringfence_vhost_user::memory::GuestMemory;
use ringfence_wire::virtio::{Descriptor, feature, flag};

/// Length of the shortest frame: an Ethernet header.
const SHORTEST: usize = 14;

/// Takes a chain of a queue. Indirect tables lie in `memory`.
fn take(
    queue: &mut BackendQueue,
    memory: &GuestMemory,
    chain: &mut Vec<Descriptor>,
) -> Result<Option<u16>, ClientFault> {
    let table = |address, len| {
        let (lent, offset) = memory.at(address, len).ok()?;
        lent.slice(offset, len).ok()
    };
    Ok(queue.take(table, chain)?)
}

/// Returns the length of the virtio-net header in front of each frame.
pub(super) fn header_len(device: &Device) -> usize {
    let is_modern = device.has(feature::VERSION_1) || device.has(feature::MRG_RXBUF);
    if is_modern { MODERN_LEN } else { LEGACY_LEN }
}

/// Result of taking a frame of the guest.
pub(super) enum TakenChain {
    /// Frame of this length was added.
    Frame(usize),
    Dropped(DropReason),
    /// No chain is there.
    Nothing,
}

/// Receive side: chains that the guest filled.
#[derive(Debug, Default)]
pub(super) struct Receiver {
    chain: Vec<Descriptor>,
    /// Heads of the chains in which frames of the batch may lie.
    held: Vec<u16>,
}

impl Receiver {
    /// Adds the next frame, of at most `frame_max` bytes, to the batch. Its payload stays in the guest's memory.
    pub(super) fn take(
        &mut self,
        queue: &mut BackendQueue,
        (memory, header_len): (&GuestMemory, usize),
        batch: &mut Batch,
        frame_max: usize,
    ) -> Result<TakenChain, ClientFault> {
        let Some(head) = take(queue, memory, &mut self.chain)? else {
            return Ok(TakenChain::Nothing);
        };
        self.held.push(head);
        let readable = || self.chain.iter().filter(|link| link.flags & flag::WRITE == 0);
        let bytes: u64 = readable().map(|link| u64::from(link.len)).sum();
        let len = usize_from(bytes).saturating_sub(header_len);
        if len < SHORTEST {
            return Ok(TakenChain::Dropped(DropReason::Runt));
        }
        if len > frame_max {
            return Ok(TakenChain::Dropped(DropReason::Oversize));
        }
        let lengths = FrameLengths { header: header_len, frame: len };
        let added = add(readable(), memory, lengths, batch)?;
        Ok(added.map_or_else(TakenChain::Dropped, |()| TakenChain::Frame(len)))
    }

    /// Returns the chains of the last batch to the guest.
    pub(super) fn finish(&mut self, queue: &mut BackendQueue) {
        self.held.drain(..).for_each(|head| queue.finish(head, 0));
    }

    /// Forgets the chains: their vring is gone.
    pub(super) fn forget(&mut self) {
        self.held.clear();
    }
}

/// Bytes of a virtio-net header, and of the frame behind it.
#[derive(Clone, Copy)]
struct FrameLengths {
    header: usize,
    frame: usize,
}

/// Adds a frame behind a virtio-net header to the batch.
fn add<'a>(
    links: impl Iterator<Item = &'a Descriptor>,
    memory: &GuestMemory,
    FrameLengths { header: header_len, frame: len }: FrameLengths,
    batch: &mut Batch,
) -> Result<Result<(), DropReason>, ClientFault> {
    let private = len.min(HEADER_MAX);
    let Some(at) = batch.reserve(private) else { return Ok(Err(DropReason::Unreadable)) };
    let Ok(mut frame) = batch.frame(at, private) else { return Ok(Err(DropReason::Unreadable)) };
    let mut header = [0; MODERN_LEN];
    let (mut in_header, mut in_frame) = (0, 0);
    for link in links {
        let (lent, start) = memory.at(link.address, link.len as usize)?;
        let (mut offset, mut left) = (start, link.len as usize);
        for (private, filled) in
            [(&mut header[..header_len], &mut in_header), (frame.header_mut(), &mut in_frame)]
        {
            let part = left.min(private.len() - *filled);
            let copied = lent.copy_to(offset, &mut private[*filled..*filled + part]);
            debug_assert!(copied.is_ok(), "the range was looked up");
            (*filled, offset, left) = (*filled + part, offset + part, left - part);
        }
        if frame.lent(lent.clone(), offset, left).is_err() {
            return Ok(Err(DropReason::Unreadable));
        }
    }
    let meta = accept(VnetHeader::from_modern(&header), frame.header_mut(), len);
    Ok(match meta {
        Some(meta) => {
            frame.finish(meta);
            Ok(())
        }
        None => Err(DropReason::BadOffload),
    })
}

/// Result of writing a frame for the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Written {
    Whole,
    /// The guest has too few buffers at present: this many chains.
    TooFew(u16),
    /// Even all buffers of the vring, or those that the driver can use for one frame, are too few.
    TooLong,
}

/// Send side: chains that a frame fills.
#[derive(Debug, Default)]
pub(super) struct Sender {
    chain: Vec<Descriptor>,
    /// Writable descriptors of the frame's chains.
    links: Vec<Descriptor>,
    /// Heads of these chains, with the bytes for which each has room.
    heads: Vec<(u16, usize)>,
}

impl Sender {
    /// Copies a frame to the guest. `bytes` has a virtio-net header of 12 bytes, and the frame.
    pub(super) fn write(
        &mut self,
        queue: &mut BackendQueue,
        (device, memory): (u64, &GuestMemory),
        header_len: usize,
        bytes: &[u8],
    ) -> Result<Written, ClientFault> {
        let has = |feature| device & feature != 0;
        let Some((header, frame)) = bytes.split_first_chunk::<MODERN_LEN>() else {
            return Ok(Written::TooLong);
        };
        let gathered =
            self.gather(queue, memory, header_len + frame.len(), has(feature::MRG_RXBUF))?;
        if gathered != Written::Whole {
            queue.untake(self.heads.iter().map(|&(head, _)| head));
            return Ok(gathered);
        }
        // A driver without this feature takes no marks about checksums.
        let mut header = if has(feature::GUEST_CSUM) { *header } else { [0; MODERN_LEN] };
        let buffers = bounded(self.heads.len(), u16::MAX);
        header[LEGACY_LEN..].copy_from_slice(&buffers.to_le_bytes());
        self.fill(memory, [&header[..header_len], frame])?;
        let mut left = header_len + frame.len();
        for &(head, room) in &self.heads {
            let used = left.min(room);
            left -= used;
            queue.finish(head, bounded(used, u32::MAX));
        }
        Ok(Written::Whole)
    }

    /// Takes chains with room for `needed` bytes: one, or several if they may be merged.
    fn gather(
        &mut self,
        queue: &mut BackendQueue,
        memory: &GuestMemory,
        needed: usize,
        may_merge: bool,
    ) -> Result<Written, ClientFault> {
        self.links.clear();
        self.heads.clear();
        let mut room = 0;
        while room < needed {
            let taken = self.heads.len();
            if taken == usize::from(queue.size()) || taken > 0 && !may_merge {
                return Ok(Written::TooLong);
            }
            let Some(head) = take(queue, memory, &mut self.chain)? else {
                return Ok(Written::TooFew(bounded(taken, u16::MAX)));
            };
            let writable = self.chain.iter().filter(|link| link.flags & flag::WRITE != 0);
            let first = self.links.len();
            self.links.extend(writable);
            let own: usize = self.links[first..].iter().map(|link| link.len as usize).sum();
            self.heads.push((head, own));
            room += own;
        }
        Ok(Written::Whole)
    }

    /// Copies bytes into the chains, which have room for them.
    fn fill(&self, memory: &GuestMemory, parts: [&[u8]; 2]) -> Result<(), ClientFault> {
        let mut links = self.links.iter();
        let (mut address, mut room) = (0, 0);
        for mut part in parts {
            while !part.is_empty() {
                if room == 0 {
                    let Some(link) = links.next() else { return Ok(()) };
                    (address, room) = (link.address, link.len as usize);
                    continue;
                }
                let len = room.min(part.len());
                let (lent, offset) = memory.at(address, len)?;
                let written = lent.copy_from(offset, &part[..len]);
                debug_assert!(written.is_ok(), "the range was looked up");
                (address, room, part) = (address + len as u64, room - len, &part[len..]);
            }
        }
        Ok(())
    }
}

//! Front-end of two network cards: one machine sends, the other receives and checks every byte.
//!
//! ```text
//!  Sender: slots ── vring 1 ──> card ... card ── vring 0 ──> Receiver: buffers, Checker
//!     ▲                                                          │
//!     └──────────── window: packets on the way ──────────────────┘
//! ```
//!
//! The receiver has buffers for all packets on the way, so no device has a reason to drop one. Frames up to the MTU are
//! datagrams of UDP in one descriptor, super-packets are segments of TCP in up to three. With a pool the frames are copied to it and from it, as the guest module does.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use ringfence_memory::{DeviceAccess, DeviceRange, PAGE_SIZE};
use ringfence_offload::checksum::internet_checksum;
use ringfence_offload::checksum::pseudo::pseudo_header_v4;
use ringfence_offload::packet::protocol;
use ringfence_offload::vnet::{MODERN_LEN, VnetHeader, flags, gso_type};
use ringfence_sys::numbers::bounded;
use ringfence_vhost_user::testing::{FrontShape, Frontend};
use ringfence_wire::vhost_user::number;
use ringfence_wire::virtio::feature;

use super::args::Way;
use super::front::{FrontEnd, Stopwatch, Worked, frontend, kick, wait};
use super::measure::Skipped;
use crate::packet::{Bad, Checker, Reading, Template};

/// Longest frame that is no super-packet.
const FRAME_PLAIN: u32 = 1514;
/// Entries of each vring, QEMU's default.
const ENTRIES: u16 = 256;
/// Vrings of a card.
const TO_GUEST: usize = 0;
const FROM_GUEST: usize = 1;
/// Features of a Linux driver for every frame, and for super-packets.
const FEATURES: u64 =
    feature::MRG_RXBUF | feature::INDIRECT | feature::EVENT_IDX | feature::VERSION_1;
const SUPER_FEATURES: u64 =
    feature::CSUM | feature::GUEST_CSUM | feature::HOST_TSO4 | feature::GUEST_TSO4;
/// Length of the Ethernet header in bytes.
const ETHERNET: u16 = 14;
const IPV4: u16 = 20;
/// EtherType of IPv4, in network byte order.
const IPV4_TYPE: [u8; 2] = [8, 0];
/// Bytes of the headers up to the EtherType.
const START: usize = MODERN_LEN + ETHERNET as usize;
const TCP: u16 = 20;
const UDP: u16 = 8;
/// Port of both machines.
const PORT: u16 = 7000;
/// Maximum bytes of a descriptor of the sender: a fragment of Linux's socket buffers.
const FRAGMENT: usize = 32 << 10;
/// Payload of each segment that a super-packet stands for.
const SEGMENT: u16 = 1448;
/// Bytes that are read at once from lent memory.
const PIECE: usize = 512;
/// Time limits for the first packet to arrive, and for one attempt.
const UP_WITHIN: Duration = Duration::from_secs(20);
const ATTEMPT: Duration = Duration::from_millis(100);

/// End of the path: addresses of a machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine {
    pub(super) mac: [u8; 6],
    pub(super) ip: [u8; 4],
}

/// Card of a machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Card<'a> {
    pub(super) machine: Machine,
    pub(super) socket: &'a Path,
    /// Way in which the machine hands its memory over. For the front-end a shield is as trust.
    pub(super) way: Way,
}

/// Frames of one length between two machines.
struct Frames {
    packet: Template,
    vnet: VnetHeader,
}

impl Frames {
    fn new(size: u32, from: Machine, to: Machine) -> Frames {
        let packet = Template::framed(size, &headers(size, from, to));
        if !is_super(size) {
            return Frames { packet, vnet: VnetHeader::default() };
        }
        let vnet = VnetHeader {
            flags: flags::NEEDS_CSUM,
            gso_type: gso_type::TCPV4,
            hdr_len: ETHERNET + IPV4 + TCP,
            gso_size: SEGMENT,
            csum_start: ETHERNET + IPV4,
            csum_offset: 16,
            num_buffers: 0,
        };
        Frames { packet, vnet }
    }

    /// Returns the bytes of a virtio-net header and a frame without a number.
    fn bytes(&self) -> Vec<u8> {
        [&self.vnet.to_modern(), self.packet.bytes()].concat()
    }
}

/// Returns `true` for frames that are longer than the MTU allows.
pub(super) fn is_super(size: u32) -> bool {
    size > FRAME_PLAIN
}

/// Returns the length of the headers of a frame.
fn headers_len(size: u32) -> usize {
    usize::from(ETHERNET + IPV4 + if is_super(size) { TCP } else { UDP })
}

/// Returns the headers of a datagram without a checksum, or of a segment whose checksum is blank.
fn headers(size: u32, from: Machine, to: Machine) -> Vec<u8> {
    let total = bounded(size as usize - usize::from(ETHERNET), u16::MAX);
    let protocol = if is_super(size) { protocol::TCP } else { protocol::UDP };
    let mut ip = [0; IPV4 as usize];
    ip[0] = 0x45;
    ip[2..4].copy_from_slice(&total.to_be_bytes());
    // Do not fragment; TTL.
    ip[6..10].copy_from_slice(&[0x40, 0, 64, protocol]);
    ip[12..16].copy_from_slice(&from.ip);
    ip[16..].copy_from_slice(&to.ip);
    let sum = internet_checksum(&ip).to_be_bytes();
    ip[10..12].copy_from_slice(&sum);
    let mut transport = [PORT, PORT].map(u16::to_be_bytes).concat();
    if is_super(size) {
        let pseudo = pseudo_header_v4(from.ip, to.ip, protocol, u32::from(total - IPV4));
        // Number and acknowledgement; five words of header, ACK, window; checksum, urgent pointer.
        transport.extend([0; 8]);
        transport.extend([0x50, 0x10, 0xff, 0xff]);
        transport.extend(pseudo.to_be_bytes());
        transport.extend([0; 2]);
    } else {
        transport.extend((total - IPV4).to_be_bytes());
        transport.extend([0; 2]);
    }
    [&to.mac[..], &from.mac, &IPV4_TYPE, &ip, &transport].concat()
}

/// Connects to a card whose buffers have these bytes, and sets it up.
fn connect(card: Card<'_>, buffers: usize, size: u32) -> anyhow::Result<Frontend> {
    let features = FEATURES | if is_super(size) { SUPER_FEATURES } else { 0 };
    let shape = FrontShape {
        vrings: 2,
        size: ENTRIES,
        buffers,
        features,
        protocol: 0,
        has_mark: card.way == Way::Pool,
    };
    let mut front = frontend(card.socket, shape)?;
    let (offered, _) = front.ask(number::GET_FEATURES, &[])?;
    let offered = offered.first_chunk().map_or(0, |word| u64::from_ne_bytes(*word));
    if features & SUPER_FEATURES & !offered != 0 {
        return Err(Skipped("the backend offers no TSO".to_owned()).into());
    }
    front.set_up()?;
    Ok(front)
}

/// Front-end of the machine that sends.
struct Sender {
    front: Frontend,
    frames: Frames,
    /// Frame to copy from, if slots are in a pool.
    private: Option<Vec<u8>>,
    /// Offsets and descriptors of the slots.
    slots: Vec<(usize, Vec<DeviceRange>)>,
    free: Vec<u32>,
}

impl Sender {
    fn connect(card: Card<'_>, to: Machine, size: u32) -> anyhow::Result<Sender> {
        let frames = Frames::new(size, card.machine, to);
        let bytes = frames.bytes();
        let stride = bytes.len().next_multiple_of(PAGE_SIZE);
        let front = connect(card, window(size) * stride, size)?;
        let slots: Vec<_> = (0..window(size))
            .map(|slot| {
                let at = front.buffers_at() + slot * stride;
                let fragments = (0..bytes.len()).step_by(FRAGMENT).map(|offset| {
                    let len = FRAGMENT.min(bytes.len() - offset);
                    front.range(at + offset, len, DeviceAccess::Read)
                });
                (at, fragments.collect())
            })
            .collect();
        for (at, _) in &slots {
            front.memory.copy_from(*at, &bytes)?;
        }
        let free = (0..).take(slots.len()).collect();
        let private = (card.way == Way::Pool).then_some(bytes);
        Ok(Sender { front, frames, private, slots, free })
    }

    /// Adds a packet with this number, which the next kick makes available. Returns `false` if no slot is free.
    fn push(&mut self, sequence: u64) -> anyhow::Result<bool> {
        let Some(slot) = self.free.pop() else { return Ok(false) };
        let (at, fragments) = &self.slots[slot as usize];
        let memory = &self.front.memory;
        if let Some(private) = &mut self.private {
            self.frames.packet.number(&mut private[MODERN_LEN..], sequence, false);
            memory.copy_from(*at, private)?;
        } else {
            self.frames.packet.number_lent(memory, at + MODERN_LEN, sequence)?;
        }
        self.front.vrings[FROM_GUEST].driver.push(fragments, slot)?;
        Ok(true)
    }

    /// Takes the slots back that the device has used. Returns their number.
    fn reclaim(&mut self) -> anyhow::Result<usize> {
        let before = self.free.len();
        while let Some(used) = self.front.vrings[FROM_GUEST].driver.pop()? {
            self.free.push(used.token);
        }
        Ok(self.free.len() - before)
    }
}

/// Returns the number of packets that may be on the way: for each the receiver has buffers.
fn window(size: u32) -> usize {
    usize::from(ENTRIES) / (MODERN_LEN + size as usize).div_ceil(buffer_bytes(size))
}

/// Returns the length of a buffer of the receiver.
fn buffer_bytes(size: u32) -> usize {
    if is_super(size) { PAGE_SIZE } else { PAGE_SIZE / 2 }
}

/// Front-end of the machine that receives.
struct Receiver {
    front: Frontend,
    /// Memory to copy to, if buffers are in a pool.
    private: Option<Vec<u8>>,
    buffer: usize,
    checker: Checker,
    /// Type of segmentation that frames must have kept.
    gso_type: u8,
    /// Buffers of the frame that is being received, with their bytes; and the number that is missing.
    parts: Vec<(u32, usize)>,
    missing: u16,
    /// Set while the frame is not of the sender.
    is_foreign: bool,
}

impl Receiver {
    fn connect(card: Card<'_>, frames: &Frames, size: u32) -> anyhow::Result<Receiver> {
        let buffer = buffer_bytes(size);
        let front = connect(card, usize::from(ENTRIES) * buffer, size)?;
        let mut receiver = Receiver {
            front,
            private: (card.way == Way::Pool).then(|| vec![0; buffer]),
            buffer,
            checker: Checker::framed(size, headers_len(size)),
            gso_type: frames.vnet.gso_type,
            parts: Vec::new(),
            missing: 0,
            is_foreign: false,
        };
        (0..ENTRIES.into()).try_for_each(|number| receiver.post(number))?;
        Ok(receiver)
    }

    fn at(&self, buffer: u32) -> usize {
        self.front.buffers_at() + buffer as usize * self.buffer
    }

    fn post(&mut self, buffer: u32) -> anyhow::Result<()> {
        let range = self.front.range(self.at(buffer), self.buffer, DeviceAccess::Write);
        Ok(self.front.vrings[TO_GUEST].driver.push(&[range], buffer)?)
    }

    /// Takes the next whole frame of the sender from the vring. Returns `false` if none is there. Announcements of a card are
    /// no frames of the sender.
    fn pop(&mut self) -> anyhow::Result<bool> {
        while let Some(used) = self.front.vrings[TO_GUEST].driver.pop()? {
            if self.missing == 0 {
                let start = self.front.memory.fetch::<START>(self.at(used.token))?;
                let start = start.into_unchecked();
                let header = start.first_chunk().map(VnetHeader::from_modern).unwrap_or_default();
                self.is_foreign = !start.ends_with(&IPV4_TYPE);
                ensure!(
                    self.is_foreign || header.gso_type == self.gso_type,
                    "a frame has segmentation type {} in place of {}",
                    header.gso_type,
                    self.gso_type
                );
                self.missing = header.num_buffers.max(1);
            }
            self.parts.push((used.token, used.len as usize));
            self.missing -= 1;
            if self.missing == 0 && self.is_foreign {
                self.return_parts()?;
            } else if self.missing == 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the buffers of a frame to the vring.
    fn return_parts(&mut self) -> anyhow::Result<()> {
        let mut parts = std::mem::take(&mut self.parts);
        parts.drain(..).try_for_each(|(buffer, _)| self.post(buffer))?;
        self.parts = parts;
        Ok(())
    }

    /// Checks the frame that was popped, and returns its buffers to the vring.
    fn check(&mut self) -> anyhow::Result<Result<bool, Bad>> {
        let mut reading = Reading::new();
        // The virtio-net header is no part of the frame.
        let mut skipped = MODERN_LEN;
        for &(buffer, len) in &self.parts {
            let (start, part) = (self.at(buffer), skipped.min(len));
            skipped -= part;
            if let Some(private) = &mut self.private {
                self.front.memory.copy_to(start, &mut private[..len])?;
                reading.add(&private[part..len]);
                continue;
            }
            let mut piece = [0; PIECE];
            for at in (part..len).step_by(PIECE) {
                let piece = &mut piece[..PIECE.min(len - at)];
                self.front.memory.copy_to(start + at, piece)?;
                reading.add(piece);
            }
        }
        self.return_parts()?;
        Ok(self.checker.take_reading(reading))
    }
}

/// Front-ends of both machines.
pub(super) struct CardFront {
    sender: Sender,
    receiver: Receiver,
    window: usize,
    /// Packets on the way.
    in_flight: usize,
    /// Number of the next packet.
    next: u64,
    worked: Worked,
}

impl CardFront {
    /// Connects to both cards. Returns once a packet has arrived.
    ///
    /// # Errors
    ///
    /// Returns [`Skipped`] if a card cannot have frames of this size, or the error of a set-up.
    pub(super) fn connect(from: Card<'_>, to: Card<'_>, size: u32) -> anyhow::Result<CardFront> {
        let sender = Sender::connect(from, to.machine, size)?;
        let receiver = Receiver::connect(to, &sender.frames, size)?;
        let (window, worked) = (window(size), Worked::default());
        let mut front = CardFront { sender, receiver, window, in_flight: 0, next: 1, worked };
        kick(&mut front.receiver.front.vrings[TO_GUEST], &mut front.worked);
        front.wait_for_path()?;
        Ok(front)
    }

    /// Sends packets until one arrives: backends that connect to each other may lose the first ones.
    fn wait_for_path(&mut self) -> anyhow::Result<()> {
        let until = Instant::now() + UP_WITHIN;
        while Instant::now() < until {
            self.receiver.checker.resume_behind(self.next - 1);
            if self.sender.push(self.next)? {
                self.next += 1;
            }
            kick(&mut self.sender.front.vrings[FROM_GUEST], &mut self.worked);
            let attempt = Instant::now() + ATTEMPT;
            while Instant::now() < attempt {
                self.sender.reclaim()?;
                let mut has_arrived = false;
                while self.receiver.pop()? {
                    match self.receiver.check()? {
                        Ok(_) => has_arrived = true,
                        // A packet of an earlier attempt.
                        Err(Bad::Repeated { .. }) => {}
                        Err(bad) => return Err(bad.into()),
                    }
                }
                // The window counts on all buffers.
                kick(&mut self.receiver.front.vrings[TO_GUEST], &mut self.worked);
                if has_arrived {
                    return Ok(());
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        anyhow::bail!("no packet arrived within {UP_WITHIN:?}")
    }

    /// Receives and checks all packets that are there. Returns their number.
    fn receive(&mut self) -> anyhow::Result<usize> {
        let mut received = 0;
        while self.receiver.pop()? {
            self.receiver.check()?.context("a packet was lost or damaged on its way")?;
            received += 1;
        }
        if received > 0 {
            kick(&mut self.receiver.front.vrings[TO_GUEST], &mut self.worked);
        }
        self.in_flight -= received;
        self.worked.done += received as u64;
        Ok(received)
    }

    /// Sends as many packets as the window allows. Returns their number.
    fn send(&mut self) -> anyhow::Result<usize> {
        let mut sent = 0;
        while self.in_flight < self.window && self.sender.push(self.next)? {
            self.next += 1;
            self.in_flight += 1;
            sent += 1;
        }
        if sent > 0 {
            kick(&mut self.sender.front.vrings[FROM_GUEST], &mut self.worked);
        }
        Ok(sent)
    }

    /// Waits for a packet, and for a free slot if one is missing.
    fn wait(&mut self) -> anyhow::Result<()> {
        if self.receiver.front.vrings[TO_GUEST].driver.arm(1)? {
            return Ok(());
        }
        let is_blocked = self.sender.free.is_empty();
        if is_blocked && self.sender.front.vrings[FROM_GUEST].driver.arm(1)? {
            return Ok(());
        }
        let received = &self.receiver.front.vrings[TO_GUEST];
        let returned = is_blocked.then(|| &self.sender.front.vrings[FROM_GUEST]);
        let vrings: Vec<_> = [Some(received), returned].into_iter().flatten().collect();
        wait(&vrings, &mut self.worked)
    }
}

impl FrontEnd for CardFront {
    fn work(&mut self, length: Duration) -> anyhow::Result<Worked> {
        self.worked = Worked::default();
        let begun = Stopwatch::start();
        loop {
            let continues = begun.elapsed() < length;
            let mut progress = self.receive()? + self.sender.reclaim()?;
            if continues {
                progress += self.send()?;
            } else if self.in_flight == 0 {
                return Ok(begun.stop(self.worked));
            }
            if progress == 0 {
                self.wait()?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receiver_has_buffers_for_every_packet_of_the_window() {
        assert_eq!((window(64), window(1514), window(65_535)), (256, 256, 15));
    }

    #[test]
    fn frames_have_valid_headers_and_their_number_behind_them() {
        let [from, to] = [1, 2].map(|n| Machine { mac: [2, 0, 0, 0, 0, n], ip: [10, 0, 0, n] });
        for size in [64, 65, 1514, 1515, 65_535] {
            let frames = Frames::new(size, from, to);
            let bytes = frames.bytes();
            assert_eq!(bytes.len(), MODERN_LEN + size as usize);
            let frame = &bytes[MODERN_LEN..];
            assert_eq!(internet_checksum(&frame[14..34]), 0);
            let layers = ringfence_offload::packet::Layers::parse(frame, size);
            let len = layers.as_ref().map(|layers| usize::from(layers.header_len()));
            assert_eq!(len, Ok(headers_len(size)), "{size}");
            let mut headers = frame[..headers_len(size)].to_vec();
            assert!(frames.vnet.accept(&mut headers, &layers).is_ok(), "{size}");
        }
    }
}

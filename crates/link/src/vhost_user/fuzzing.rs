//! Fuzz target `vhost_user`: a hypervisor that sends arbitrary messages, and a driver that writes arbitrary virtqueues. A
//! property test runs it, too.

// #syscall none: a hypervisor of tests

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use ringfence_frame::{Batch, DropReason, Fault, Port};
use ringfence_memory::{DeviceAccess, LentSlice, Mapping, Protection};
use ringfence_offload::OffloadMeta;
use ringfence_wire::vhost_user::{PROTOCOL_FEATURES, number, protocol_feature, request};
use ringfence_wire::virtio::{Descriptor, SplitLayout};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::{FEATURES, SUPER_PACKET_MAX, VhostUserLink, VhostUserOptions};
use crate::clients::Clients;
use crate::frame_ring::FrameShape;
use ringfence_uplink::link::{Committed, GuestLink, Slots};

/// Bytes of the guest's memory. The file has as many more behind it, which the device must not touch.
const MEMORY: usize = 64 << 10;
/// Entries of a vring that is set up by the rules.
const ENTRIES: u16 = 8;
/// Start of the second vring in the guest's memory.
const SECOND: usize = 4096;
/// Maximum of steps in one case.
const STEPS_MAX: usize = 200;

/// Hypervisor and driver of one machine.
struct Machine {
    socket: UnixStream,
    file: OwnedFd,
    event: OwnedFd,
    /// Socket for requests of the link.
    requests: OwnedFd,
    /// The whole file, mapped.
    memory: LentSlice,
    base: u64,
}

impl Machine {
    fn new(socket: UnixStream) -> Option<Machine> {
        let file = rustix::fs::memfd_create("memory", MemfdFlags::CLOEXEC).ok()?;
        rustix::fs::ftruncate(&file, 2 * MEMORY as u64).ok()?;
        let memory = Mapping::new(&file, 0, 2 * MEMORY, Protection::ReadWrite).ok()?.lent();
        let base = memory.device_range(0, 1, DeviceAccess::Write).ok()?.address();
        let event = eventfd(0, EventfdFlags::NONBLOCK).ok()?;
        let (requests, _) = UnixStream::pair().ok()?;
        Some(Machine { socket, file, event, requests: requests.into(), memory, base })
    }

    /// Sends bytes with a file, or none. The link may have closed its end.
    fn send_bytes(&self, bytes: &[u8], file: Option<BorrowedFd<'_>>) {
        let files: Vec<_> = file.into_iter().collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&files));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = rustix::net::sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, flags);
    }

    fn send(&self, number: u32, payload: &[u8]) {
        let file = match number {
            number::SET_MEM_TABLE | number::ADD_MEM_REG => Some(self.file.as_fd()),
            number::SET_VRING_KICK | number::SET_VRING_CALL | number::SET_VRING_ERR => {
                Some(self.event.as_fd())
            }
            number::SET_BACKEND_REQ_FD => Some(self.requests.as_fd()),
            _ => None,
        };
        self.send_bytes(&request(number, false, payload), file);
    }

    /// Sends the messages by which a hypervisor sets up a machine with these features.
    fn set_up(&self, features: u64) {
        self.send(number::SET_PROTOCOL_FEATURES, &words(&[protocol_feature::CONFIGURE_MEM_SLOTS]));
        self.send(number::SET_FEATURES, &words(&[features]));
        self.send(number::SET_MEM_TABLE, &words(&[1, self.base, MEMORY as u64, self.base, 0]));
        let Some(layout) = SplitLayout::new(ENTRIES) else { return };
        for index in 0..2 {
            let start = self.base + u64::from(index) * SECOND as u64;
            let at = |offset: usize| start + offset as u64;
            let tables = [at(0), at(layout.used_flags()), at(layout.avail_flags()), 0];
            self.send(number::SET_VRING_NUM, &state(index, ENTRIES.into()));
            self.send(number::SET_VRING_ADDR, &[state(index, 0), words(&tables)].concat());
            self.send(number::SET_VRING_KICK, &words(&[index.into()]));
            self.send(number::SET_VRING_CALL, &words(&[index.into()]));
            self.send(number::SET_VRING_ENABLE, &state(index, 1));
        }
    }

    /// Writes into the guest's memory, as far as the bytes lie in it.
    fn write(&self, offset: usize, bytes: &[u8]) {
        if offset + bytes.len() <= MEMORY {
            let written = self.memory.copy_from(offset, bytes);
            debug_assert!(written.is_ok(), "it lies in the memory");
        }
    }

    /// Carries out a step.
    fn act(&self, [what, a, b, c, d, e, f, g]: [u8; 8]) {
        let Some(layout) = SplitLayout::new(ENTRIES) else { return };
        let start = if a & 1 == 0 { 0 } else { SECOND };
        let (low, high) = (u16::from_le_bytes([b, c]), u16::from_le_bytes([d, e]));
        match what & 15 {
            // A descriptor, mostly of a buffer in the guest's memory.
            0..=5 => {
                let outside = u64::from(g >> 6) << 40;
                let address = self.base.wrapping_add(low.into()).wrapping_add(outside);
                let len = u32::from(high) << (g & 15);
                let descriptor =
                    Descriptor { address, len, flags: f.into(), next: (f >> 4).into() };
                let at = start + usize::from(a >> 1 & 15) * 16;
                self.write(at, &descriptor.to_bytes());
            }
            // An entry of the available ring, and its index.
            6..=9 => {
                let entry = layout.avail_entry(u16::from(a >> 1) % ENTRIES);
                self.write(start + entry, &u16::from(b).to_le_bytes());
                self.write(start + layout.avail_idx(), &u16::from(c).to_le_bytes());
            }
            10 => self.write(low.into(), &[d, e, f, g, d, e, f, g]),
            11 => {
                let table = [a.into(), self.base, low.into(), self.base + u64::from(high), 0];
                let whole = [0, self.base, MEMORY as u64, self.base, 0];
                let (number, payload) = match g & 7 {
                    0..=3 => (number::SET_MEM_TABLE, table),
                    4 => (number::ADD_MEM_REG, table),
                    5 => (number::ADD_MEM_REG, whole),
                    6 => (number::REM_MEM_REG, table),
                    _ => (number::REM_MEM_REG, whole),
                };
                self.send(number, &words(&payload));
            }
            12 => self.send((a % 48).into(), &state(b.into(), u32::from(high) << (f & 31))),
            13 => self.send((a % 48).into(), &words(&[b.into(), self.base + u64::from(high)])),
            14 => {
                let tables = [low, high, u16::from(f) << 4, 0].map(|at| self.base + u64::from(at));
                let address = [state((a & 3).into(), 0), words(&tables)].concat();
                self.send(number::SET_VRING_ADDR, &address);
            }
            _ => {
                self.send_bytes(&[a, b, c, d, e, f, g, a, b, c, d, e][..usize::from(g % 13)], None)
            }
        }
    }

    /// Returns `true` if the file is as it was behind the guest's memory.
    fn is_untouched_behind(&self) -> bool {
        let mut bytes = vec![0; MEMORY];
        let read = self.memory.copy_to(MEMORY, &mut bytes);
        read.is_ok() && bytes.iter().all(|byte| *byte == 0)
    }
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn state(index: u32, value: u32) -> Vec<u8> {
    [index.to_ne_bytes(), value.to_ne_bytes()].concat()
}

/// Runs a link against arbitrary messages and virtqueues. The first byte selects the negotiated features, and whether the
/// machine is set up by the rules first. Each group of eight bytes is a step of the machine; the link then runs a round.
///
/// # Panics
///
/// Panics if the link returns an invalid frame, writes behind the memory that it was given, or loses a client without
/// counting why.
pub fn vhost_user(data: &[u8]) {
    let Some((&first, steps)) = data.split_first() else { return };
    let Ok((own, socket)) = UnixStream::pair() else { return };
    if own.set_nonblocking(true).is_err() {
        return;
    }
    let (shape, clients) = (FrameShape { frames: 8, long: 2 }, Clients::Connected(own.into()));
    let pairs = if first & 2 == 0 { 1 } else { 2 };
    let options = VhostUserOptions { pairs, ..VhostUserOptions::default() };
    let made = VhostUserLink::new(clients, 1500, shape, Arc::default(), options);
    let (Ok(mut link), Some(machine)) = (made, Machine::new(socket)) else { return };
    if first & 1 != 0 {
        let left_out = u64::from(first >> 1) << 27 | u64::from(first >> 4);
        machine.set_up(FEATURES & !left_out | PROTOCOL_FEATURES);
    }
    let mut batch = Batch::with_capacity(8, 200_000);
    for step in steps.as_chunks::<8>().0.iter().take(STEPS_MAX) {
        machine.act(*step);
        if let Err(fault) = round(&mut link, &mut batch, step[0]) {
            let broken = link.queue.counters.drops(DropReason::BadRequest);
            match fault {
                Fault::Misbehaved(_) => assert_eq!(broken, 1, "a broken rule is counted"),
                // The link answers a client that does not read, or finds its end.
                Fault::Gone => {}
                fault => panic!("{fault}"),
            }
            break;
        }
    }
    assert!(machine.is_untouched_behind(), "the device wrote behind the guest's memory");
}

/// Runs a round of the link: frames of the guest, and one for it.
fn round(link: &mut VhostUserLink, batch: &mut Batch, what: u8) -> Result<(), Fault> {
    link.transport.has_messages = true;
    link.receive(batch, 8)?;
    for frame in batch.iter() {
        assert!((14..=SUPER_PACKET_MAX).contains(&frame.len()), "a frame of {}", frame.len());
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(&mut bytes);
    }
    batch.clear();
    link.complete()?;
    if what & 16 != 0 {
        let len = 60 << (what >> 5);
        let mut slots = Slots::new();
        link.reserve(1, len, &mut slots);
        let is_free = slots.first_mut().map(|slot| slot[..len].fill(0x5a)).is_some();
        drop(slots);
        if is_free {
            link.commit(&[Committed { len, meta: OffloadMeta::PLAIN }]);
        }
    }
    Port::flush(link)?;
    link.arm().map(drop)
}

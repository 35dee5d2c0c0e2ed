//! Fuzz target `vhost_user_disk`: a hypervisor that sends arbitrary messages, a driver that writes arbitrary virtqueues
//! and requests, and arbitrary bytes in the in-flight log. A property test runs it, too.

// #syscall none: a hypervisor of tests

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use ringfence_frame::Fault;
use ringfence_memory::{LentSlice, Mapping, Protection};
use ringfence_vhost_user::clients::Clients;
use ringfence_vhost_user::testing::{FrontShape, Frontend, log_file, state, words};
use ringfence_wire::vhost_user::{PROTOCOL_FEATURES, number, protocol_feature};
use ringfence_wire::virtio::{Descriptor, SplitLayout};

use super::testing::{FEATURES, PROTOCOL};
use super::{DiskOptions, VhostUserDisk};
use crate::storage::memory::MemoryDisk;

/// Entries of a vring that is set up by the rules.
const ENTRIES: u16 = 8;
/// Bytes for buffers. As many more are in the file, which the device must not touch.
const BUFFERS: usize = 64 << 10;
/// Maximum of steps in one case.
const STEPS_MAX: usize = 200;
/// Bytes of the in-flight log.
const LOG: u64 = 4096;

/// Hypervisor and driver of one machine.
struct Machine {
    front: Frontend,
    /// Length of the memory that the device may use.
    lent: usize,
    /// All of the file.
    whole: LentSlice,
    log: OwnedFd,
    log_memory: LentSlice,
}

impl Machine {
    fn new(socket: UnixStream) -> Option<Machine> {
        let shape = FrontShape {
            vrings: 2,
            size: ENTRIES,
            buffers: BUFFERS,
            features: FEATURES,
            // It waits for no answer.
            protocol: 0,
            has_mark: false,
        };
        let mut front = Frontend::new(shape).ok()?;
        front.attach(socket).ok()?;
        front.socket().ok()?.set_nonblocking(true).ok()?;
        let lent = front.memory.len();
        let whole = lent + BUFFERS;
        rustix::fs::ftruncate(&front.file, whole as u64).ok()?;
        let whole = Mapping::new(&front.file, 0, whole, Protection::ReadWrite).ok()?.lent();
        let log = log_file(LOG).ok()?;
        let log_memory = Mapping::new(&log, 0, 4096, Protection::ReadWrite).ok()?.lent();
        Some(Machine { front, lent, whole, log, log_memory })
    }

    /// Sends a request with the file that belongs to it. The disk may have closed its end.
    fn send(&self, number: u32, payload: &[u8]) {
        let file: Option<BorrowedFd<'_>> = match number {
            number::SET_MEM_TABLE | number::ADD_MEM_REG => Some(self.front.file.as_fd()),
            number::SET_VRING_KICK => Some(self.front.vrings[0].kick.as_fd()),
            number::SET_VRING_CALL | number::SET_VRING_ERR => {
                Some(self.front.vrings[0].call.as_fd())
            }
            number::SET_INFLIGHT_FD => Some(self.log.as_fd()),
            _ => None,
        };
        let files: Vec<_> = file.into_iter().collect();
        let _ = self.front.send(number, payload, &files);
    }

    /// Sends the messages by which a hypervisor sets up a machine.
    fn set_up(&self, has_log: bool) {
        let protocol = PROTOCOL | protocol_feature::CONFIGURE_MEM_SLOTS;
        self.send(number::SET_PROTOCOL_FEATURES, &words(&[protocol]));
        self.send(number::SET_FEATURES, &words(&[FEATURES | PROTOCOL_FEATURES]));
        let base = self.front.base();
        self.send(number::SET_MEM_TABLE, &words(&[1, base, self.lent as u64, base, 0]));
        if has_log {
            let queues = [2, ENTRIES].map(u16::to_ne_bytes).concat();
            self.send(number::SET_INFLIGHT_FD, &[words(&[LOG, 0]), queues].concat());
        }
        for index in 0..2 {
            let _ = self.front.send_vring(index);
        }
    }

    /// Writes into the memory that the device may use, as far as the bytes lie in it.
    fn write(&self, offset: usize, bytes: &[u8]) {
        if offset + bytes.len() <= self.lent {
            let written = self.whole.copy_from(offset, bytes);
            debug_assert!(written.is_ok(), "it lies in the memory");
        }
    }

    /// Carries out a step.
    fn act(&self, [what, a, b, c, d, e, f, g]: [u8; 8]) {
        let Some(layout) = SplitLayout::new(ENTRIES) else { return };
        let start = self.front.tables_at(u16::from(a & 1));
        let buffers = self.front.buffers_at();
        let base = self.front.base();
        let (low, high) = (u16::from_le_bytes([b, c]), u16::from_le_bytes([d, e]));
        match what & 15 {
            // A descriptor, mostly of a buffer in the memory.
            0..=4 => {
                let address = (base + buffers as u64 + u64::from(low)) | u64::from(g >> 7) << 40;
                let len = u32::from(high & 0xfff) << (g & 7);
                let descriptor =
                    Descriptor { address, len, flags: f.into(), next: (f >> 4).into() };
                self.write(start + usize::from(a >> 1 & 7) * 16, &descriptor.to_bytes());
            }
            // The header of a request.
            5 | 6 => {
                let header = [[a >> 4, 0, 0, 0, 0, 0, 0, 0], [d, e & f, f & g, 0, 0, 0, 0, 0]];
                self.write(buffers + usize::from(low), header.as_flattened());
            }
            // An entry of the available ring, and its index.
            7..=9 => {
                let entry = layout.avail_entry(u16::from(a >> 1) % ENTRIES);
                self.write(start + entry, &u16::from(b).to_le_bytes());
                self.write(start + layout.avail_idx(), &u16::from(c).to_le_bytes());
            }
            10 => {
                let _ = self.log_memory.copy_from(usize::from(low & 0x1ff), &[d, e, f, g]);
            }
            11 => {
                let len = if f & 1 == 0 { self.lent as u64 } else { low.into() };
                let region = words(&[0, base, len, base, 0]);
                match a >> 5 {
                    0 => self.send(number::ADD_MEM_REG, &region),
                    1 | 2 => self.send(number::REM_MEM_REG, &region),
                    _ => self.set_up(a & 1 != 0),
                }
            }
            12 => self.send((a % 48).into(), &state(b.into(), u32::from(high) << (f & 31))),
            13 => {
                let payload = words(&[b.into(), low.into(), u64::from(high), 0]);
                self.send((a % 48).into(), &payload[..usize::from(g) % 33]);
            }
            14 => {
                let tables = [low, high, u16::from(f) << 4, 0].map(|at| base + u64::from(at));
                let address = [state((a & 3).into(), 0), words(&tables)].concat();
                self.send(number::SET_VRING_ADDR, &address);
            }
            _ => {
                let bytes = [a, b, c, d, e, f, g, a, b, c, d, e];
                let _ = self.front.send_bytes(&bytes[..usize::from(g % 13)], &[]);
            }
        }
    }

    /// Returns `true` if the file is as it was behind the memory of the device.
    fn is_untouched_behind(&self) -> bool {
        let mut bytes = vec![0; self.whole.len() - self.lent];
        let read = self.whole.copy_to(self.lent, &mut bytes);
        read.is_ok() && bytes.iter().all(|byte| *byte == 0)
    }
}

/// Runs a disk against arbitrary messages, virtqueues and logs. The first byte says whether the machine is set up by the
/// rules first, and with a log. Each group of eight bytes is a step of the machine; the disk then runs a round.
///
/// # Panics
///
/// Panics if the disk writes behind the memory that it was given, or loses a client without counting why.
pub fn vhost_user_disk(data: &[u8]) {
    let Some((&first, steps)) = data.split_first() else { return };
    let (Ok((own, socket)), Ok(storage)) = (UnixStream::pair(), MemoryDisk::new(1 << 20, 512))
    else {
        return;
    };
    if own.set_nonblocking(true).is_err() {
        return;
    }
    let made = VhostUserDisk::new(Clients::Connected(own.into()), &storage, DiskOptions::default());
    let (Ok(mut disk), Some(machine)) = (made, Machine::new(socket)) else { return };
    if first & 1 != 0 {
        machine.set_up(first & 2 != 0);
    }
    for step in steps.as_chunks::<8>().0.iter().take(STEPS_MAX) {
        machine.act(*step);
        disk.has_messages = true;
        match disk.round() {
            Ok(_) => {}
            Err(Fault::Misbehaved(_)) => {
                assert_eq!(disk.reporter.count(), 1, "a broken rule is counted");
                break;
            }
            // The disk answers a client that does not read, or finds its end.
            Err(Fault::Gone) => break,
            Err(fault) => panic!("{fault}"),
        }
        let _ = disk.arm();
    }
    assert!(machine.is_untouched_behind(), "the device wrote behind the memory");
}

//! Link of vhost-net with a socket of the kernel behind its interface.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use ringfence_frame::{Batch, Port};
use ringfence_link::frame_ring::FrameShape;
use ringfence_link::vhost_net::{Protection, VhostLink};
use ringfence_offload::OffloadMeta;
use ringfence_platform::Counters;
use ringfence_platform::vhost;
use ringfence_sys::tap::Tap;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::ClockId;

use super::args::DatagramDirection;
use crate::usage::{clock, vhost_worker_ns};

const NAME: &str = "bench0";
const HOST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const PORT: u16 = 7000;
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
const MAC_WORD: &str = "02:00:00:00:00:07";
/// Maximum size of an IP packet, so that none is segmented.
const MTU: u16 = 65_520;
/// Ethernet, IPv4 and UDP headers.
const HEADERS: usize = 14 + 20 + 8;
/// Packets in flight at a time.
const BATCH: usize = 16;
/// Time after which a packet counts as lost.
const PATIENCE: Duration = Duration::from_secs(30);

/// Resources used, with the amount of work.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spent {
    pub(super) packets: u64,
    pub(super) bytes: u64,
    pub(super) cpu_ns: u64,
    pub(super) took: Duration,
    /// Messages UPDATE and INVALIDATE.
    pub(super) changes: u64,
}

pub(super) struct Rig {
    _tap: Tap,
    link: VhostLink,
    system: Arc<Counters>,
    socket: UdpSocket,
    headers: [u8; HEADERS],
    payload: Vec<u8>,
    /// Sequence number of the next packet.
    number: u64,
}

impl Rig {
    /// Creates the link. The calling thread needs a network namespace of its own without such an interface.
    pub(super) fn new(protection: Protection, size: u16) -> anyhow::Result<Rig> {
        let tap = Tap::create(NAME).context("an interface")?;
        // Without this the kernel sends IPv6 packets of its own.
        let quiet = format!("/proc/sys/net/ipv6/conf/{NAME}/disable_ipv6");
        match std::fs::write(&quiet, "1") {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).context(quiet);
            }
            _ => {}
        }
        ip(&["link", "set", NAME, "mtu", &MTU.to_string()])?;
        ip(&["addr", "add", &format!("{HOST}/24"), "dev", NAME])?;
        ip(&["link", "set", NAME, "arp", "off"])?;
        ip(&["link", "set", NAME, "address", MAC_WORD])?;
        ip(&["link", "set", NAME, "up"])?;
        let socket = UdpSocket::bind((HOST, PORT)).context("a socket")?;
        rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, 16 << 20)?;
        rustix::net::sockopt::set_socket_send_buffer_size_force(&socket, 16 << 20)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let system = Arc::<Counters>::default();
        let device = vhost::open()?;
        let shape = FrameShape::default();
        let link = VhostLink::start_protected(
            device,
            &tap.fd,
            tap.offloads,
            MTU,
            shape,
            Arc::clone(&system),
            protection,
        )?;
        let (headers, payload) = (headers(size)?, vec![0x5a; usize::from(size)]);
        Ok(Rig { _tap: tap, link, system, socket, headers, payload, number: 0 })
    }

    /// Carries packets for `length` after a warm-up.
    pub(super) fn measure(
        &mut self,
        direction: DatagramDirection,
        seconds: Duration,
    ) -> anyhow::Result<Spent> {
        let mut batch = Batch::default();
        // One pass over the ring and all buffers.
        while self.number < 512 {
            self.carry(direction, &mut batch)?;
        }
        let before = self.now()?;
        let (began, first) = (Instant::now(), self.number);
        while began.elapsed() < seconds {
            self.carry(direction, &mut batch)?;
        }
        let took = began.elapsed();
        let after = self.now()?;
        let packets = self.number - first;
        Ok(Spent {
            packets,
            bytes: packets * self.payload.len() as u64,
            cpu_ns: after.0 - before.0,
            took,
            changes: after.1 - before.1,
        })
    }

    /// Reads the CPU time, and the number of changes to the worker's table.
    fn now(&self) -> anyhow::Result<(u64, u64)> {
        let counted = self.system.values();
        let cpu = clock(ClockId::ProcessCPUTime) + worker_ns()?;
        Ok((cpu, counted.window_issues + counted.window_revokes))
    }

    fn carry(&mut self, direction: DatagramDirection, batch: &mut Batch) -> anyhow::Result<()> {
        match direction {
            DatagramDirection::ToGuest => self.inward(),
            DatagramDirection::FromGuest => self.outward(batch),
        }
    }

    fn inward(&mut self) -> anyhow::Result<()> {
        let end = Instant::now() + PATIENCE;
        while self.link.room()? < BATCH {
            ensure!(Instant::now() < end, "the worker does not go on");
            std::thread::yield_now();
        }
        let (len, mut number) = (HEADERS + self.payload.len(), self.number);
        let frames = self.link.frames();
        frames.reserve(BATCH, len, |room| {
            room[..HEADERS].copy_from_slice(&self.headers);
            room[HEADERS..len].copy_from_slice(&self.payload);
            room[HEADERS..HEADERS + 8].copy_from_slice(&number.to_ne_bytes());
            number += 1;
        });
        for _ in 0..BATCH {
            frames.commit(len, OffloadMeta::PLAIN)?;
        }
        self.link.flush()?;
        let mut bytes = vec![0; self.payload.len() + 1];
        for _ in 0..BATCH {
            let len = self.socket.recv(&mut bytes).context("a packet to the guest")?;
            ensure!(
                len == self.payload.len() && bytes[..8] == self.number.to_ne_bytes(),
                "packet {} is another",
                self.number
            );
            self.number += 1;
        }
        Ok(())
    }

    fn outward(&mut self, batch: &mut Batch) -> anyhow::Result<()> {
        let first = self.number;
        for number in first..first + BATCH as u64 {
            self.payload[..8].copy_from_slice(&number.to_ne_bytes());
            let to = SocketAddr::from((GUEST, PORT + 1));
            self.socket.send_to(&self.payload, to).context("a packet from the guest")?;
        }
        let end = Instant::now() + PATIENCE;
        while self.number < first + BATCH as u64 {
            self.link.receive(batch, BATCH)?;
            for frame in batch.iter() {
                let number = frame.header().get(HEADERS..HEADERS + 8);
                ensure!(
                    number == Some(&self.number.to_ne_bytes())
                        && frame.len() == HEADERS + self.payload.len(),
                    "packet {} is another",
                    self.number
                );
                self.number += 1;
            }
            let was_empty = batch.is_empty();
            batch.clear();
            self.link.complete()?;
            ensure!(Instant::now() < end, "packet {} is lost", self.number);
            if was_empty && !self.link.arm()? {
                let tick = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
                let mut files: Vec<PollFd<'_>> = self
                    .link
                    .wait_fds()
                    .into_iter()
                    .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
                    .collect();
                poll(&mut files, Some(&tick))?;
                drop(files);
                self.link.clear_events()?;
            }
        }
        Ok(())
    }
}

fn ip(words: &[&str]) -> anyhow::Result<()> {
    let done = Command::new("ip").args(words).status().context("ip (Debian: iproute2)")?;
    ensure!(done.success(), "`ip {}` failed", words.join(" "));
    Ok(())
}

/// Returns the headers of a datagram of `payload` bytes to the host.
fn headers(payload: u16) -> anyhow::Result<[u8; HEADERS]> {
    let mut bytes = [0; HEADERS];
    bytes[..6].copy_from_slice(&MAC);
    bytes[6..14].copy_from_slice(&[2, 0, 0, 0, 0, 1, 8, 0]);
    let udp = payload.checked_add(8).context("a longer datagram than there are")?;
    let ip = udp.checked_add(20).context("a longer datagram than there are")?;
    bytes[14] = 0x45;
    bytes[16..18].copy_from_slice(&ip.to_be_bytes());
    (bytes[22], bytes[23]) = (64, 17);
    bytes[26..30].copy_from_slice(&GUEST.octets());
    bytes[30..34].copy_from_slice(&HOST.octets());
    let words = bytes[14..34].as_chunks::<2>().0.iter();
    let sum: u32 = words.map(|pair| u32::from(u16::from_be_bytes(*pair))).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = u16::try_from((sum & 0xffff) + (sum >> 16)).context("a sum of 16 bits")?;
    bytes[24..26].copy_from_slice(&(!sum).to_be_bytes());
    for (place, word) in bytes[34..].as_chunks_mut::<2>().0.iter_mut().zip([7001, PORT, udp, 0]) {
        *place = word.to_be_bytes();
    }
    Ok(bytes)
}

/// Returns the CPU time of the kernel's vhost workers for this process.
fn worker_ns() -> anyhow::Result<u64> {
    let name = format!("vhost-{}", std::process::id());
    vhost_worker_ns(|found| found == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagram_headers_have_valid_checksums() {
        let bytes = headers(1000).unwrap();
        assert_eq!(bytes[..6], [2, 0, 0, 0, 0, 7]);
        let words = bytes[14..34].as_chunks::<2>().0.iter();
        let sum: u32 = words.map(|pair| u32::from(u16::from_be_bytes(*pair))).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
        assert_eq!(bytes[38..40], 1008u16.to_be_bytes());
        assert!(headers(u16::MAX).is_err());
    }
}

//! vhost-net device behind a TAP interface of its own, driven packet by packet.
//!
//! Headers lie in memory of the driver. Payload lies at I/O addresses that the trial chooses.

use std::io::{self, Write as _};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ringfence_memory::{DeviceAccess, DeviceRange, LentSlice, Mapping, PAGE_SIZE};
use ringfence_platform::iotlb::{IotlbSpace, Miss};
use ringfence_platform::vhost::{self, QueueName, VhostNet, VhostSetup};
use ringfence_ring::split::{DriverQueue, Used};
use ringfence_sys::tap::Tap;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Bytes before the payload of a datagram: virtio-net, Ethernet, IPv4 and UDP headers.
pub(crate) const HEADERS: usize = 12 + 14 + 20 + 8;

/// Entries of each queue.
const QUEUE: u16 = 256;

/// Bytes reserved for the headers of a packet.
const HEADER_ROOM: usize = 64;

const PATIENCE: Duration = Duration::from_secs(60);

/// Event of a queue.
#[derive(Debug)]
pub(crate) enum Came {
    /// The device has completed a buffer.
    Used(Used),
    /// The worker stopped at an address that was not granted to it for this access. The miss is present if
    /// the kernel reports it.
    Refused(Option<Miss>),
}

/// Device with its queues, memory and interface.
pub(crate) struct Rig {
    tap: Tap,
    device: VhostNet,
    pub(crate) space: Arc<IotlbSpace>,
    queues: [DriverQueue; 2],
    own: LentSlice,
    mac: [u8; 6],
    host: Ipv4Addr,
    /// Socket of the host's side.
    pub(crate) socket: UdpSocket,
}

fn ip(arguments: &str) -> anyhow::Result<()> {
    let done = Command::new("ip").args(arguments.split(' ')).status().context("ip")?;
    anyhow::ensure!(done.success(), "`ip {arguments}` failed");
    Ok(())
}

/// Creates an interface that carries only the trial's packets: 10.79.N.1 is the host, with one neighbour
/// 10.79.N.2. Returns the host's address too.
pub(crate) fn interface(number: u8) -> anyhow::Result<(Tap, Ipv4Addr)> {
    let name = format!("edge{number}");
    let tap = Tap::create(&name)?;
    let quiet = format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6");
    match std::fs::write(&quiet, "1") {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error).context(quiet),
        _ => {}
    }
    let host = Ipv4Addr::new(10, 79, number, 1);
    ip(&format!("addr add {host}/24 dev {name}"))?;
    ip(&format!("link set {name} arp off"))?;
    ip(&format!("link set {name} up"))?;
    Ok((tap, host))
}

impl Rig {
    /// Creates a device whose network has this number.
    pub(crate) fn new(number: u8) -> anyhow::Result<Rig> {
        let (tap, host) = interface(number)?;
        let mac = std::fs::read_to_string(format!("/sys/class/net/{}/address", tap.name))?;
        let bytes: Result<Vec<u8>, _> =
            mac.trim().split(':').map(|pair| u8::from_str_radix(pair, 16)).collect();
        let mac = bytes?.try_into().ok().context("an address of six bytes")?;
        let own = Mapping::private(2 * usize::from(QUEUE) * HEADER_ROOM)?.lent();
        let setup =
            VhostSetup { sizes: [QUEUE; 2], regions: vec![own.device_region()], in_order: false };
        let (device, space, queues) =
            VhostNet::start_translated(vhost::open()?, tap.fd.as_fd(), setup)?;
        let socket = UdpSocket::bind((host, 7000))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(Rig { tap, device, space, queues, own, mac, host, socket })
    }

    /// Returns the address to which the host sends packets for the device.
    pub(crate) fn inward(&self) -> SocketAddr {
        let [a, b, c, _] = self.host.octets();
        SocketAddr::from(([a, b, c, 2], 7001))
    }

    fn queue(&mut self, name: QueueName) -> &mut DriverQueue {
        &mut self.queues[usize::from(name == QueueName::Transmit)]
    }

    /// Queues a datagram with this payload; [`Rig::kick`] sends it. The token selects the room for headers.
    pub(crate) fn send(&mut self, payload: DeviceRange, token: u32) -> anyhow::Result<()> {
        let headers = headers(self.mac, self.host, usize::try_from(payload.len())?)?;
        let at = (usize::from(QUEUE) + token as usize) * HEADER_ROOM;
        self.own.copy_from(at, &headers)?;
        let headers = self.own.device_range(at, HEADERS, DeviceAccess::Read)?;
        Ok(self.queue(QueueName::Transmit).push(&[headers, payload], token)?)
    }

    /// Posts a buffer for payload; [`Rig::kick`] makes it visible to the device.
    pub(crate) fn post(&mut self, payload: DeviceRange, token: u32) -> anyhow::Result<()> {
        let headers =
            self.own.device_range(token as usize * HEADER_ROOM, HEADERS, DeviceAccess::Write)?;
        Ok(self.queue(QueueName::Receive).push(&[headers, payload], token)?)
    }

    pub(crate) fn kick(&mut self, queue: QueueName) -> anyhow::Result<()> {
        if self.queue(queue).publish() {
            self.device.kick(queue)?;
        }
        Ok(())
    }

    /// Returns the next completed buffer, if there is one.
    pub(crate) fn pop(&mut self, queue: QueueName) -> anyhow::Result<Option<Used>> {
        Ok(self.queue(queue).pop()?)
    }

    /// Waits until a buffer is completed or the worker stops.
    pub(crate) fn wait(&mut self, queue: QueueName) -> anyhow::Result<Came> {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(used) = self.pop(queue)? {
                return Ok(Came::Used(used));
            }
            if let Some(refused) = self.refused()? {
                return Ok(refused);
            }
            anyhow::ensure!(Instant::now() < end, "the worker does nothing");
            if !self.queue(queue).arm(1)? {
                let tick = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
                poll(&mut [PollFd::new(&self.device, PollFlags::IN)], Some(&tick))?;
            }
        }
    }

    /// Returns the refusal if the worker has stopped.
    pub(crate) fn refused(&mut self) -> anyhow::Result<Option<Came>> {
        let events = self.device.take_events()?;
        anyhow::ensure!(!events.backend_gone, "the interface is gone");
        if events.missed {
            let miss = self.space.take_miss()?;
            // The worker reports the miss at each attempt.
            while self.space.take_miss()?.is_some() {}
            return Ok(Some(Came::Refused(miss)));
        }
        Ok(events.failed.map(|_| Came::Refused(None)))
    }

    /// Takes the queues from the worker, discards the packets in the interface, and starts again.
    pub(crate) fn restart(&mut self) -> anyhow::Result<()> {
        self.device.stop()?;
        while self.space.take_miss()?.is_some() {}
        let mut frame = vec![0; 1 << 16];
        while rustix::io::read(&self.tap.fd, &mut frame).is_ok() {}
        self.socket.set_nonblocking(true)?;
        while self.socket.recv(&mut frame).is_ok() {}
        self.socket.set_nonblocking(false)?;
        self.queues = self.device.restart(self.tap.fd.as_fd())?;
        Ok(())
    }
}

/// Returns the headers of a datagram from the device to the host, the virtio-net header first.
fn headers(mac: [u8; 6], host: Ipv4Addr, payload: usize) -> anyhow::Result<[u8; HEADERS]> {
    let mut bytes = [0; HEADERS];
    let mut rest = &mut bytes[12..];
    rest.write_all(&mac)?;
    rest.write_all(&[2, 0, 0, 0, 0, 1, 8, 0])?;
    let udp = u16::try_from(8 + payload)?;
    let [a, b, c, _] = host.octets();
    let mut ip = [0u8; 20];
    ip[0] = 0x45;
    ip[2..4].copy_from_slice(&(20 + udp).to_be_bytes());
    (ip[8], ip[9]) = (64, 17);
    ip[12..16].copy_from_slice(&[a, b, c, 2]);
    ip[16..20].copy_from_slice(&host.octets());
    let words = ip.as_chunks::<2>().0.iter().map(|pair| u32::from(u16::from_be_bytes(*pair)));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    ip[10..12].copy_from_slice(&(!u16::try_from((sum & 0xffff) + (sum >> 16))?).to_be_bytes());
    rest.write_all(&ip)?;
    for word in [7001, 7000, udp, 0] {
        rest.write_all(&word.to_be_bytes())?;
    }
    Ok(bytes)
}

/// Maximum bytes of payload that fit a page and a datagram.
pub(crate) const PAYLOAD_MAX: usize = 1472;

const _: () = assert!(PAYLOAD_MAX < PAGE_SIZE);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagram_headers_have_valid_checksums() {
        let bytes = headers([1; 6], Ipv4Addr::new(10, 79, 0, 1), 1000).unwrap();
        let words = bytes[26..46].as_chunks::<2>().0.iter();
        let sum: u32 = words.map(|pair| u32::from(u16::from_be_bytes(*pair))).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
        assert_eq!(u16::from_be_bytes([bytes[50], bytes[51]]), 1008);
    }
}

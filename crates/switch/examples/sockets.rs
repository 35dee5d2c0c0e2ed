//! Switch between three Unix datagram sockets: a datagram is an Ethernet frame.
//!
//! `cargo run -p ringfence-switch --example sockets`

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::time::Duration;

use ringfence_frame::{
    Batch, DropReason, Fault, Port, PortCapabilities, PortCounters, Received, Transmitted,
};
use ringfence_offload::OffloadMeta;
use ringfence_switch::dataplane::{DataplaneConfig, DataplaneWorker};
use ringfence_switch::forwarding::{Fabric, PortPolicy, Switch};

const MTU: u16 = 1500;

/// Port whose peer is the other end of a datagram socket pair.
struct SocketPort {
    socket: UnixDatagram,
    counters: Arc<PortCounters>,
}

impl SocketPort {
    fn pair() -> std::io::Result<(SocketPort, UnixDatagram)> {
        let (socket, peer) = UnixDatagram::pair()?;
        socket.set_nonblocking(true)?;
        Ok((SocketPort { socket, counters: Arc::default() }, peer))
    }
}

impl Port for SocketPort {
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        let max = self.capabilities().frame_max();
        let mut frames = 0;
        while frames < budget && batch.has_room_for(max) {
            let Some(offset) = batch.reserve(max) else { break };
            let scratch = batch
                .scratch_mut(offset..offset + max)
                .map_err(|_| Fault::system("no scratch memory", ErrorKind::OutOfMemory))?;
            match self.socket.recv(scratch) {
                Ok(len) if batch.push_contiguous(offset, len, OffloadMeta::PLAIN).is_ok() => {
                    self.counters.received(1, len as u64);
                    frames += 1;
                }
                Ok(_) => self.counters.dropped(DropReason::Unreadable),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(Fault::system("cannot read from the socket", error)),
            }
        }
        Ok(Received { frames, work: frames })
    }

    fn complete(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        let mut done = Transmitted::default();
        for frame in batch.select(frames) {
            let mut bytes = vec![0; frame.len()];
            frame.copy_to(&mut bytes);
            if self.socket.send(&bytes).is_ok() {
                self.counters.sent(1, bytes.len() as u64);
                done.sent += 1;
            } else {
                self.counters.dropped(DropReason::PortFull);
                done.dropped += 1;
            }
        }
        Ok(done)
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        // A socket with a datagram is readable, so it ends the sleep at once.
        Ok(false)
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.socket.as_fd()]
    }

    fn capabilities(&self) -> PortCapabilities {
        PortCapabilities::plain(MTU)
    }

    fn counters(&self) -> &Arc<PortCounters> {
        &self.counters
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let fabric = Fabric::Switch(Switch::new());
    let on_gone = |port: ringfence_switch::dataplane::PortGone| {
        eprintln!("port {} ended: {}", port.name, port.reason);
    };
    let (worker, handle) =
        DataplaneWorker::new(fabric, DataplaneConfig::default(), Arc::default(), on_gone)?;
    let thread = std::thread::spawn(move || worker.run());
    let mut peers = Vec::new();
    for name in ["a", "b", "c"] {
        let (port, peer) = SocketPort::pair()?;
        handle.add_port(Box::new(port), PortPolicy::default(), name)?;
        peer.set_read_timeout(Some(Duration::from_secs(10)))?;
        peers.push(peer);
    }

    // `a` broadcasts, `b` answers to the address that the switch has learned.
    let (a, b) = ([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
    let ethertype = [0x88, 0xb5];
    peers[0].send(&[&[0xff; 6][..], &a, &ethertype, b"hello"].concat())?;
    let mut frame = [0; 1514];
    for peer in [1, 2] {
        let len = peers[peer].recv(&mut frame)?;
        println!("peer {peer} received {:?}", String::from_utf8_lossy(&frame[14..len]));
    }
    peers[1].send(&[&a[..], &b, &ethertype, b"answer"].concat())?;
    let len = peers[0].recv(&mut frame)?;
    println!("peer 0 received {:?}", String::from_utf8_lossy(&frame[14..len]));

    for port in handle.stats().into_iter().flat_map(|stats| stats.ports) {
        let sent = port.counters.iter().find(|(name, _)| *name == "tx_frames");
        println!("port {}: {} frames sent", port.name, sent.map_or(0, |(_, count)| *count));
    }
    drop(handle);
    thread.join().map_err(|_| "the worker panicked")?;
    Ok(())
}

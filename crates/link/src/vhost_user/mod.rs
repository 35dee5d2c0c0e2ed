//! vhost-user link: the network interface of a virtual machine, in the memory that its hypervisor shares.
//!
//! QEMU and libvirt connect to a Unix socket and pass the machine's memory and pairs of vrings. The link is their device:
//!
//! ```text
//! guest's driver -> vrings 1, 3, .. -> Batch (payload in place) -> engine or worker
//! guest's driver <- vrings 0, 2, .. <- copy <- FrameRing        <- engine or worker
//! hypervisor    <-> requests and answers on the socket (`device`)
//! ```
//!
//! * **From the guest.** Headers are copied, and payload goes to a socket from the guest's memory. Its chains are
//!   returned after the batch.
//! * **To the guest.** Frames are assembled in a [`FrameRing`](crate::frame_ring::FrameRing), and copied into the guest's buffers.
//! * Kicks and messages arrive by one epoll. Kicks are suppressed until the thread is about to sleep.
//! * One thread serves all pairs. A frame to the guest takes the pair of its flow (`steering`); a pair without buffers
//!   holds up the frames behind it.
//!
//! One client is connected at a time, as on a [`stream`](super::stream). A client that connects again sets everything up
//! again; flows survive.
//!
//! # Guarantees
//!
//! * The link reaches all memory that the hypervisor shares, and no other. Every address and length in it is
//!   checked, and read once. A [`PoolRule`] refuses a client that shares more than a pool.
//! * No client blocks the link: it writes to no descriptor of a client, and signals eventfds in a way that never blocks
//!   ([`EventSignal`]).
//! * A client or driver that breaks a rule ([`ClientFault`]) loses its connection. The client can shrink its
//!   memory's file under the link; that ends this process, which serves no other guest.

#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub mod fuzzing;
mod steering;
#[cfg(test)]
mod tests;
mod transfer;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ringfence_frame::{
    Batch, ChecksumOffload, DropReason, Fault, GsoOffload, PortCapabilities, Received,
};
use ringfence_offload::vnet::MODERN_LEN;
use ringfence_platform::Counters;
use ringfence_ring::split::backend::BackendQueue;
use ringfence_sys::event_signal::EventSignal;
use ringfence_sys::numbers::bounded;
use ringfence_vhost_user::ClientReporter;
use ringfence_vhost_user::device::{Device, DeviceOffer, Parts, Vring};
use ringfence_vhost_user::messages::{self, Incoming};
pub use ringfence_vhost_user::{
    ClientFault, ClientReport, HandedOver, MachineMemory, MachineState, PoolFault, PoolRule,
    Reporter,
};
use ringfence_wire::vhost_user::{PROTOCOL_FEATURES, Request, protocol_feature};
use ringfence_wire::virtio::feature;

use super::clients::{ClientSlot, Clients};
use super::frame_ring::FrameShape;
use super::ring_link::{FrameQueue, RingLink, RingTransport, has_room};
use steering::Steering;
use transfer::{Receiver, Sender, TakenChain, Written, header_len};

/// Maximum number of queue pairs.
pub const PAIRS_MAX: u16 = 16;

/// Returns the vring with buffers for frames to the guest.
const fn to_guest(pair: usize) -> usize {
    2 * pair
}

/// Returns the vring with frames from the guest.
const fn from_guest(pair: usize) -> usize {
    2 * pair + 1
}

/// Features that a driver may use.
const FEATURES: u64 = feature::CSUM
    | feature::GUEST_CSUM
    | feature::GUEST_TSO4
    | feature::GUEST_TSO6
    | feature::GUEST_ECN
    | feature::HOST_TSO4
    | feature::HOST_TSO6
    | feature::HOST_ECN
    | feature::HOST_USO
    | feature::GUEST_USO4
    | feature::GUEST_USO6
    | feature::MTU
    | feature::GUEST_ANNOUNCE
    | feature::MRG_RXBUF
    | feature::INDIRECT
    | feature::EVENT_IDX
    | feature::VERSION_1
    | PROTOCOL_FEATURES;
/// Returns the offer of a network card with so many pairs of queues.
fn card(pairs: u16, mtu: u16) -> DeviceOffer {
    let (features, protocol) = match pairs {
        1 => (FEATURES, protocol_feature::MTU),
        _ => (FEATURES | feature::MULTIQUEUE, protocol_feature::MTU | protocol_feature::MULTIQUEUE),
    };
    DeviceOffer { features, protocol, vrings: 2 * usize::from(pairs), queues: pairs, mtu }
}

/// Maximum of messages in one round.
const MESSAGES_PER_ROUND: usize = 32;
/// Number of rounds after which a busy link looks for messages.
const ROUNDS_PER_LOOK: u32 = 64;

/// Link on the vrings of a virtual machine. See the [module](self) for the protocol.
pub type VhostUserLink = RingLink<VhostUserTransport>;

/// Settings of a link beyond the shape of its frames.
pub struct VhostUserOptions {
    /// Number of queue pairs, from 1 to [`PAIRS_MAX`].
    pub pairs: u16,
    /// Rule for the memory of clients.
    pub pool: PoolRule,
    /// Function that receives each change of the clients' state. It must not block.
    pub report: Option<Reporter>,
}

impl Default for VhostUserOptions {
    fn default() -> VhostUserOptions {
        VhostUserOptions { pairs: 1, pool: PoolRule::default(), report: None }
    }
}

/// Vrings of a virtual machine.
pub struct VhostUserTransport {
    clients: ClientSlot,
    device: Device,
    reporter: ClientReporter,
    /// One for each queue pair.
    receivers: Vec<Receiver>,
    /// Queue pair that is polled first in the next round.
    first: usize,
    sender: Sender,
    steering: Steering,
    /// Queue pair, and its chains with buffers that were there and too few. The sender waits for more.
    too_few: Option<(usize, u16)>,
    /// A message or a client may be there.
    has_messages: bool,
    rounds: u32,
    mtu: u16,
    capabilities: PortCapabilities,
}

impl std::fmt::Debug for VhostUserTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VhostUserTransport").field("device", &self.device).finish_non_exhaustive()
    }
}

impl VhostUserLink {
    /// Creates a link for frames of at most `mtu` bytes behind the Ethernet header. System calls are counted in
    /// `system`.
    ///
    /// # Errors
    ///
    /// Returns an error if memory or descriptors are exhausted, or `shape` is invalid.
    pub fn new(
        clients: Clients,
        mtu: u16,
        shape: FrameShape,
        system: Arc<Counters>,
        options: VhostUserOptions,
    ) -> io::Result<VhostUserLink> {
        let pairs = options.pairs.clamp(1, PAIRS_MAX);
        let transport = VhostUserTransport {
            clients: ClientSlot::new(clients)?,
            device: Device::new(card(pairs, mtu), Vec::new(), options.pool, EventSignal::new()?)?,
            reporter: ClientReporter::new(options.report),
            receivers: (0..pairs).map(|_| Receiver::default()).collect(),
            first: 0,
            sender: Sender::default(),
            steering: Steering::new(pairs.into()),
            too_few: None,
            has_messages: true,
            rounds: 0,
            mtu,
            capabilities: PortCapabilities::plain(mtu),
        };
        RingLink::from_transport(transport, shape, Arc::default(), system)
    }

    /// Returns `true` while a client is connected.
    pub fn is_connected(&self) -> bool {
        self.transport.is_connected()
    }
}

impl VhostUserTransport {
    fn is_connected(&self) -> bool {
        self.clients.client().is_some()
    }

    /// Forgets the client's device: its memory, vrings and features.
    fn reset(&mut self, queue: &mut FrameQueue) {
        self.device.reset(self.clients.epoll());
        self.capabilities = capabilities(0, self.mtu);
        self.receivers.iter_mut().for_each(Receiver::forget);
        self.steering.forget();
        self.drop_waiting(queue);
    }

    fn disconnect(&mut self, queue: &mut FrameQueue) -> Result<(), Fault> {
        self.reset(queue);
        self.clients.disconnect()
    }

    /// Ends the connection of a client that breaks the rules.
    fn refuse(&mut self, queue: &mut FrameQueue, fault: ClientFault) -> Result<(), Fault> {
        queue.counters.dropped(DropReason::BadRequest);
        self.reporter.refused();
        self.reset(queue);
        self.clients.refuse(fault)
    }

    /// Handles clients and messages that are there. Returns their number.
    fn attend(&mut self, queue: &mut FrameQueue) -> Result<usize, Fault> {
        let mut work = 0;
        self.has_messages = false;
        if self.clients.accept(&queue.system)? {
            work += 1;
        }
        while work < MESSAGES_PER_ROUND && self.is_connected() {
            match self.handle_message(queue) {
                Ok(Some(true)) => work += 1,
                Ok(Some(false)) => return Ok(work),
                Ok(None) => {
                    self.disconnect(queue)?;
                    return Ok(work + 1);
                }
                Err(fault) => {
                    self.refuse(queue, fault)?;
                    return Ok(work + 1);
                }
            }
        }
        self.has_messages = work >= MESSAGES_PER_ROUND;
        Ok(work)
    }

    /// Handles the next message of the client. Returns `None` if the client has gone, and `false` if no message is
    /// there.
    fn handle_message(&mut self, queue: &FrameQueue) -> Result<Option<bool>, ClientFault> {
        let Some(client) = self.clients.client() else { return Ok(None) };
        let message = match messages::receive(client, &queue.system)? {
            Incoming::Gone => return Ok(None),
            Incoming::Nothing => return Ok(Some(false)),
            Incoming::Message(message) => message,
        };
        let sets_features =
            matches!(message.request, Request::SetFeatures(_) | Request::ResetOwner);
        let answer = self.device.handle(message.request, message.files, self.clients.epoll())?;
        if sets_features {
            self.capabilities = capabilities(self.device.features(), self.mtu);
        }
        let acknowledges = self.device.acknowledges();
        let answered =
            messages::answer(client, &message.header, &answer, acknowledges, &queue.system)?;
        Ok(answered.then_some(true))
    }

    /// Takes frames of the guest, from each of its queue pairs.
    fn take_frames(
        &mut self,
        queue: &mut FrameQueue,
        batch: &mut Batch,
        budget: usize,
        received: &mut Received,
    ) -> Result<(), ClientFault> {
        let pairs = self.receivers.len();
        let first = self.first;
        self.first = (first + 1) % pairs;
        for pair in (first..pairs).chain(0..first) {
            self.take_frames_of(pair, queue, batch, budget, received)?;
        }
        Ok(())
    }

    fn take_frames_of(
        &mut self,
        pair: usize,
        queue: &mut FrameQueue,
        batch: &mut Batch,
        budget: usize,
        received: &mut Received,
    ) -> Result<(), ClientFault> {
        let header_len = header_len(&self.device);
        let Parts { memory, vrings, .. } = self.device.parts();
        let Some(vring) = &mut vrings[from_guest(pair)].queue else { return Ok(()) };
        let receiver = &mut self.receivers[pair];
        while received.work < budget && has_room(batch, SUPER_PACKET_MAX) {
            match receiver.take(vring, (memory, header_len), batch, SUPER_PACKET_MAX)? {
                TakenChain::Nothing => break,
                TakenChain::Frame(len) => {
                    received.frames += 1;
                    queue.received(batch, len);
                    let last = bounded(batch.len() - 1, u32::MAX);
                    let header = batch.get(last).map_or(&[][..], |frame| frame.header());
                    self.steering.record(header, len, pair);
                }
                TakenChain::Dropped(reason) => queue.counters.dropped(reason),
            }
            received.work += 1;
        }
        Ok(())
    }

    /// Drops the frames that wait.
    fn drop_waiting(&mut self, queue: &mut FrameQueue) {
        queue.drop_waiting();
        self.too_few = None;
    }

    /// Sends the frames that wait for buffers, once there are more: a worker flushes only ports that it sent frames to.
    /// Returns the number of frames.
    fn resume(&mut self, queue: &mut FrameQueue) -> Result<usize, Fault> {
        let Some((pair, few)) = self.too_few else { return Ok(0) };
        let chains = self.device.vrings[to_guest(pair)].queue.as_mut();
        // A driver that breaks a rule is found by the attempt.
        if chains.is_some_and(|chains| chains.available().is_ok_and(|count| count <= few)) {
            return Ok(0);
        }
        let waiting = queue.frames.waiting();
        self.send_waiting(queue)?;
        Ok(waiting.saturating_sub(queue.frames.waiting()))
    }

    fn write_waiting(&mut self, queue: &mut FrameQueue) -> Result<(), ClientFault> {
        let (features, header_len) = (self.device.features(), header_len(&self.device));
        let Parts { memory, vrings, .. } = self.device.parts();
        while let Some(frame) = queue.frames.next_waiting() {
            let bytes = queue.frames.bytes(&frame);
            let wanted = self.steering.pair(bytes.get(MODERN_LEN..).unwrap_or_default());
            let Some((pair, vring)) = running(vrings, wanted) else { break };
            match self.sender.write(vring, (features, memory), header_len, bytes)? {
                Written::TooFew(chains) => {
                    self.too_few = Some((pair, chains));
                    break;
                }
                Written::TooLong => queue.finish_dropped(DropReason::TooLong),
                Written::Whole => queue.finish_sent(),
            }
        }
        Ok(())
    }
}

/// Returns the queue for a frame to the guest: that of the wanted pair if it runs, or else the first that does.
fn running(vrings: &mut [Vring], wanted: usize) -> Option<(usize, &mut BackendQueue)> {
    let runs =
        |pair: &usize| vrings.get(to_guest(*pair)).is_some_and(|vring| vring.queue.is_some());
    let pair = Some(wanted).filter(runs).or_else(|| (0..vrings.len() / 2).find(runs))?;
    vrings[to_guest(pair)].queue.as_mut().map(|queue| (pair, queue))
}

/// Length of the longest frame: the longest IP packet behind its link header.
const SUPER_PACKET_MAX: usize = 65_535 + ringfence_frame::port::LINK_HEADER_MAX;

/// Returns the egress capabilities of a guest with these features.
fn capabilities(features: u64, mtu: u16) -> PortCapabilities {
    let has = |feature| features & feature != 0;
    let has_checksum = has(feature::GUEST_CSUM);
    let gso = GsoOffload {
        tcp_v4: has_checksum && has(feature::GUEST_TSO4),
        tcp_v6: has_checksum && has(feature::GUEST_TSO6),
        ecn: has(feature::GUEST_ECN),
        udp: has_checksum && has(feature::GUEST_USO4) && has(feature::GUEST_USO6),
    };
    let checksum = if has_checksum { ChecksumOffload::Any } else { ChecksumOffload::None };
    let scatter_gather = gso.tcp_v4 || gso.tcp_v6 || gso.udp;
    PortCapabilities { checksum, gso, scatter_gather, mtu }
}

impl RingTransport for VhostUserTransport {
    fn receive(
        &mut self,
        queue: &mut FrameQueue,
        batch: &mut Batch,
        budget: usize,
    ) -> Result<Received, Fault> {
        let mut received = Received::default();
        self.rounds = self.rounds.wrapping_add(1);
        if self.has_messages || self.rounds.is_multiple_of(ROUNDS_PER_LOOK) {
            received.work += self.attend(queue)?;
        }
        received.work += self.resume(queue)?;
        if let Err(fault) = self.take_frames(queue, batch, budget, &mut received) {
            batch.clear();
            received.frames = 0;
            self.refuse(queue, fault)?;
        }
        self.reporter.report(self.device.memory().handed_over());
        Ok(received)
    }

    fn send_waiting(&mut self, queue: &mut FrameQueue) -> Result<(), Fault> {
        self.too_few = None;
        if queue.frames.waiting() == 0 {
            return Ok(());
        }
        if running(&mut self.device.vrings, 0).is_none() {
            self.drop_waiting(queue);
            return Ok(());
        }
        let sent = self.write_waiting(queue);
        let Parts { vrings, signal, .. } = self.device.parts();
        for vring in vrings.iter_mut().step_by(2) {
            if vring.publish(signal) {
                queue.system.syscalls.add(1);
            }
        }
        sent.or_else(|fault| self.refuse(queue, fault))
    }

    fn complete(&mut self, queue: &FrameQueue) -> Result<(), Fault> {
        let Parts { vrings, signal, .. } = self.device.parts();
        for (receiver, vring) in self.receivers.iter_mut().zip(vrings.iter_mut().skip(1).step_by(2))
        {
            let Some(chains) = &mut vring.queue else { continue };
            receiver.finish(chains);
            if vring.publish(signal) {
                queue.system.syscalls.add(1);
            }
        }
        Ok(())
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        if self.has_messages {
            return Ok(true);
        }
        // A driver that breaks a rule is found by the next round.
        let mut is_ready = false;
        let mut arm = |vring: usize, few| {
            if let Some(chains) = &mut self.device.vrings[vring].queue {
                is_ready |= chains.arm(few).unwrap_or(true);
            }
        };
        (0..self.receivers.len()).for_each(|pair| arm(from_guest(pair), 0));
        if let Some((pair, few)) = self.too_few {
            arm(to_guest(pair), few);
        }
        Ok(is_ready)
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.clients.epoll()]
    }

    fn clear_events(&mut self, queue: &FrameQueue) -> Result<(), Fault> {
        for vring in &mut self.device.vrings {
            if let Some(chains) = &mut vring.queue {
                chains.suppress();
            }
        }
        queue.system.syscalls.add(1);
        self.has_messages |= self.clients.take_events()?;
        Ok(())
    }

    fn capabilities(&self) -> PortCapabilities {
        self.capabilities
    }

    fn is_full(&self) -> bool {
        self.too_few.is_some()
    }
}

//! What frames come from and go to.
//!
//! # Contract
//!
//! A port is owned by one data-plane thread, which calls it in rounds:
//!
//! 1. [`Port::receive`] appends frames to a batch. It never blocks.
//! 2. The frames are delivered: [`Port::transmit`] of other ports is called with the batch. It never
//!    blocks either, and it is synchronous: when it returns, the bytes were copied or written, or the
//!    frame was dropped and counted.
//! 3. The batch is cleared, so that nothing refers to the port's memory any more, and
//!    [`Port::complete`] is called: now the sender may be told that its buffers are free. One
//!    publication, at most one notification, for all of them.
//! 4. At the end of the round [`Port::flush`] is called where `transmit` was: likewise for the
//!    receiver.
//!
//! Before the thread sleeps it *arms* every port ([`Port::arm`]): asks the peer for an event and
//! looks once more for work. It then waits for [`Port::wait_fds`] to become readable.
//!
//! A port never hurts another one. What it cannot take it drops and counts
//! ([`Port::counters`]); when it is of no more use it returns a [`Fault`] and is removed, alone.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ringfence_offload::GsoKind;

use crate::batch::Batch;
use crate::commands::{PortCommand, PortReply};
use crate::counters::PortCounters;

/// Bytes of an Ethernet header with one VLAN tag: what a frame may have beyond the MTU.
pub const LINK_HEADER_MAX: usize = 18;

/// Bytes of the longest super-packet that is passed on, link header included: netif has 16 bits for
/// that. Linux makes none that is longer.
pub const SUPER_FRAME_MAX: usize = 0xFFFF;

/// What a port found when it was asked for frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Received {
    /// Frames appended to the batch.
    pub frames: usize,
    /// Pieces of work found: frames, refused requests, responses, newly posted buffers. Zero means
    /// that an event before this call announced nothing.
    pub work: usize,
}

/// What became of frames handed to a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Transmitted {
    /// Frames that went out.
    pub sent: usize,
    /// Frames that were dropped, each counted by reason.
    pub dropped: usize,
}

/// Why a port is of no more use.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The peer broke a rule after which nothing it says can be trusted.
    #[error("the peer misbehaved: {0}")]
    Misbehaved(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The peer, or the device, is no longer there.
    #[error("the other end is gone")]
    Gone,
    /// The system refused something the port cannot do without.
    #[error("{what}: {source}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
}

impl Fault {
    /// The peer broke a rule after which nothing it says can be trusted.
    pub fn misbehaved(why: impl std::error::Error + Send + Sync + 'static) -> Fault {
        Fault::Misbehaved(Box::new(why))
    }

    /// The system refused something.
    pub fn system(what: &'static str, source: impl Into<std::io::Error>) -> Fault {
        Fault::System { what, source: source.into() }
    }
}

/// Which blank checksums a port can send as they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ChecksumOffload {
    /// None: every checksum must be finished.
    #[default]
    None,
    /// Those that netif can tell by one bit: TCP and UDP at their usual places.
    Netif {
        /// Over IPv4 (unless `feature-no-csum-offload`).
        ipv4: bool,
        /// Over IPv6 (`feature-ipv6-csum-offload`).
        ipv6: bool,
    },
    /// Any, wherever it starts and is stored (virtio-net header).
    Any,
}

/// Which super-packets a port can send as they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GsoOffload {
    /// TCP over IPv4.
    pub tcp_v4: bool,
    /// TCP over IPv6.
    pub tcp_v6: bool,
    /// TCP with CWR set.
    pub ecn: bool,
    /// UDP segmentation.
    pub udp: bool,
}

impl GsoOffload {
    /// Whether super-packets of this kind are taken.
    pub fn takes(self, kind: GsoKind, ecn: bool) -> bool {
        let known = match kind {
            GsoKind::TcpV4 => self.tcp_v4,
            GsoKind::TcpV6 => self.tcp_v6,
            GsoKind::Udp => self.udp,
            GsoKind::UdpFragment => false,
        };
        known && (self.ecn || !ecn)
    }
}

/// What a port can send. It does not change while the port is in a data plane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PortCapabilities {
    /// Blank checksums.
    pub checksum: ChecksumOffload,
    /// Super-packets.
    pub gso: GsoOffload,
    /// Whether a frame may lie in several pieces at the receiver (`feature-sg`). Without it, no
    /// frame is longer than the MTU, whatever `gso` says.
    pub scatter_gather: bool,
    /// Bytes behind the Ethernet header that a frame of the wire has at most.
    pub mtu: u16,
}

impl PortCapabilities {
    /// A port that takes finished frames of at most `mtu` bytes.
    pub const fn plain(mtu: u16) -> PortCapabilities {
        PortCapabilities {
            checksum: ChecksumOffload::None,
            gso: GsoOffload { tcp_v4: false, tcp_v6: false, ecn: false, udp: false },
            scatter_gather: false,
            mtu,
        }
    }

    /// Bytes of the longest frame that is not a super-packet.
    pub fn frame_max(&self) -> usize {
        usize::from(self.mtu) + LINK_HEADER_MAX
    }

    /// Bytes of the longest frame of all.
    pub fn longest(&self) -> usize {
        let GsoOffload { tcp_v4, tcp_v6, udp, .. } = self.gso;
        if self.scatter_gather && (tcp_v4 || tcp_v6 || udp) {
            SUPER_FRAME_MAX.max(self.frame_max())
        } else {
            self.frame_max()
        }
    }
}

/// A source and destination of frames. See the [module](self) for the contract.
pub trait Port: Send {
    /// Appends at most `budget` frames to `batch`, as far as it has room ([`Batch::has_room_for`]
    /// included), and counts them. Never blocks; its effort is bounded by `budget` whatever the peer does, refused requests included.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the port; frames it appended in the same call are not delivered.
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault>;

    /// The frames of the last `receive` were delivered or dropped, and the batch holds nothing of
    /// this port any more: publish what the sender waits for, with at most one notification.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the port.
    fn complete(&mut self) -> Result<(), Fault>;

    /// Sends the frames of `frames` (indices into the batch), in this order, and counts them. Never
    /// blocks: what does not fit is dropped. All of them conform to [`Port::capabilities`].
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the port.
    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault>;

    /// Keeps every `parts`th queue, from the first on, and gives the others up as ports of their own:
    /// the `n`th of them has the queues `n`, `n + parts` and so on. There are no more of them than
    /// there are queues, and none of a port without queues. Called once, before the first round; from
    /// then on the parts may be in different data planes, at the same time.
    fn split_off(&mut self, parts: usize) -> Vec<Box<dyn Port>> {
        let _ = parts;
        Vec::new()
    }

    /// Carries out what the control side orders of one of its queues, by its number in the whole
    /// device, also where this port is a part of it. Called between rounds: no frame
    /// refers to any page of this port.
    fn execute(&mut self, queue: u16, command: PortCommand) -> PortReply {
        drop((queue, command));
        PortReply::Unsupported
    }

    /// The round is over: publish what was transmitted in it, with at most one notification.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the port.
    fn flush(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    /// How many frames of the largest size there is room for. When it is zero, the next
    /// [`Port::arm`] asks for an event when there is room again.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the port.
    fn room(&mut self) -> Result<usize, Fault> {
        Ok(usize::MAX)
    }

    /// Free slots, each of a page, for the frames of senders that wait when there are too few
    /// ([`Batch::limit`]). A port without slots has room for everything.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the port.
    fn slots(&mut self) -> Result<usize, Fault> {
        Ok(usize::MAX)
    }

    /// Somebody waits until so many slots are free: the next [`Port::arm`] asks for an event then.
    fn await_slots(&mut self, _slots: usize) {}

    /// Asks for an event when there is something to receive, then looks once more: `true` means
    /// that there is work already and the thread must not sleep.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the port.
    fn arm(&mut self) -> Result<bool, Fault>;

    /// When the port is to be asked again even if no event comes by then: a time of the monotonic
    /// clock, which must lie ahead once [`Port::arm`] was called. `None` when there is nothing to
    /// wait for but events.
    fn deadline(&self) -> Option<core::time::Duration> {
        None
    }

    /// What becomes readable when there is something to receive. The same files as long as the port
    /// is in a data plane. They are watched level-triggered.
    fn wait_fds(&self) -> Vec<BorrowedFd<'_>>;

    /// Takes back the events that made a file of [`Port::wait_fds`] readable. Where the file is
    /// readable because frames wait in it, there is nothing to do.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the port.
    fn clear_events(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    /// What this port can send.
    fn capabilities(&self) -> PortCapabilities;

    /// Its counters.
    fn counters(&self) -> &Arc<PortCounters>;
}

//! The engine: frames in, sockets, frames out. See the [crate] for the order of calls.

use core::time::Duration;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ringfence_net::{Batch, FrameView};
use ringfence_offload::Layers;
use ringfence_offload::meta::Checksum;
use ringfence_offload::packet::{Network, Transport};
use rustix::io::Errno;

use crate::config::Config;
use crate::context::Context;
use crate::counters::UplinkCounters;
use crate::host::{Host, OwnerKind, Ready};
use crate::link::{Committed, GuestSide, Slots};
use crate::packet::Packet;
use crate::replies::Replies;
use crate::tcp::Tcp;

/// Guest packets on one side, sockets on the other.
pub struct Uplink {
    config: Config,
    host: Box<dyn Host>,
    replies: Replies,
    counters: Arc<UplinkCounters>,
    tcp: Tcp,
    ready: Vec<Ready>,
}

/// The engine's parts, borrowed one by one.
macro_rules! context {
    ($self:ident, $now:expr) => {
        Context {
            config: &$self.config,
            host: &mut *$self.host,
            replies: &mut $self.replies,
            counters: &$self.counters,
            now: $now,
        }
    };
}

impl Uplink {
    /// An uplink by the sockets of `host`.
    pub fn new(config: Config, host: Box<dyn Host>, counters: Arc<UplinkCounters>) -> Uplink {
        let tcp = Tcp::new(&config);
        Uplink { config, host, replies: Replies::default(), counters, tcp, ready: Vec::new() }
    }

    /// What it counts.
    pub fn counters(&self) -> &Arc<UplinkCounters> {
        &self.counters
    }

    /// What it was told.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// TCP conversations, whatever their state.
    pub fn tcp_flows(&self) -> usize {
        self.tcp.len()
    }

    /// Takes the frames of `frames` (indices into the batch) from the guest. When it returns, nothing
    /// refers to the batch any more.
    pub fn input(&mut self, batch: &Batch, frames: &[u32], now: Duration) {
        for frame in batch.select(frames) {
            self.counters.frames_in.add(1);
            self.frame(frame, now);
        }
        self.tcp.input_ends(&mut context!(self, now));
    }

    fn frame(&mut self, frame: FrameView<'_>, now: Duration) {
        let counters = &self.counters;
        let len = u32::try_from(frame.len()).unwrap_or(u32::MAX);
        let Ok(layers) = Layers::parse(frame.header(), len) else {
            return counters.drop_malformed.add(1);
        };
        let to = frame.header().first_chunk::<6>().copied().unwrap_or_default();
        let is_group = to[0] & 1 != 0;
        if to != self.config.mac && !is_group {
            return counters.drop_not_for_us.add(1);
        }
        let Some(packet) = Packet::read(frame, layers) else {
            return counters.drop_unknown.add(1);
        };
        self.packet(&packet, now);
    }

    fn packet(&mut self, packet: &Packet<'_>, now: Duration) {
        let counters = &self.counters;
        if !self.config.access.source_is_allowed(packet.source) {
            return counters.drop_forged_source.add(1);
        }
        if packet.layers.is_fragment() {
            return counters.drop_fragment.add(1);
        }
        if matches!(packet.layers.network(), Network::Ipv6(ip) if ip.routed) {
            return counters.drop_routed.add(1);
        }
        if !checksum_is_right(packet) {
            return counters.drop_checksum.add(1);
        }
        match packet.layers.transport() {
            Transport::Tcp(_) => self.tcp.input(packet, &mut context!(self, now)),
            _ => counters.drop_unknown.add(1),
        }
    }

    /// Takes the events of the host's sockets.
    ///
    /// # Errors
    ///
    /// The host's: it is of no more use.
    pub fn poll_host(&mut self, now: Duration) -> Result<usize, Errno> {
        self.ready.clear();
        self.host.poll(&mut self.ready)?;
        let mut events = core::mem::take(&mut self.ready);
        let count = events.len();
        for ready in events.drain(..) {
            match ready.owner.kind {
                OwnerKind::Tcp => self.tcp.ready(ready, &mut context!(self, now)),
                _ => tracing::debug!(?ready, "an event without an owner"),
            }
        }
        self.ready = events;
        Ok(count)
    }

    /// Does what is due by the clock.
    pub fn run_timers(&mut self, now: Duration) {
        self.tcp.run_timers(&mut context!(self, now));
    }

    /// When [`run_timers`](Self::run_timers) is to be called next.
    pub fn deadline(&self) -> Option<Duration> {
        self.tcp.deadline()
    }

    /// Sends what is owed to the guest, and what sockets have for it, as far as the link has room.
    /// Returns whether there is more that only waits for its turn, or for room.
    pub fn output(&mut self, link: &mut dyn GuestSide, now: Duration) -> bool {
        let mut more = !self.send_replies(link);
        if !more {
            more = self.tcp.output(link, &mut context!(self, now));
            // Conversations that ended on the way out left resets.
            more |= !self.send_replies(link);
        }
        link.flush();
        more
    }

    /// Sends the frames that wait; `false` when the link has no room for all of them.
    fn send_replies(&mut self, link: &mut dyn GuestSide) -> bool {
        self.counters.drop_reply.add(self.replies.take_dropped());
        while let Some((frame, meta)) = self.replies.front() {
            let mut slots = Slots::new();
            link.reserve(1, frame.len(), &mut slots);
            let Some(room) = slots.first_mut().and_then(|slot| slot.get_mut(..frame.len())) else {
                return false;
            };
            room.copy_from_slice(frame);
            let done = Committed { len: frame.len(), meta };
            drop(slots);
            link.commit(&[done]);
            self.counters.frames_out.add(1);
            self.replies.pop();
        }
        true
    }

    /// Readable when [`poll_host`](Self::poll_host) would find something.
    pub fn wait_fd(&self) -> BorrowedFd<'_> {
        self.host.wait_fd()
    }
}

/// Whether the transport checksum may be relied on. What never left memory has none to check.
fn checksum_is_right(packet: &Packet<'_>) -> bool {
    match packet.frame.meta().checksum {
        Checksum::Partial { .. } | Checksum::Verified => true,
        Checksum::None => crate::packet::checksum_is_right(packet),
    }
}

//! Frames and connections that belong to another engine of the guest. See [`crate::share`].

use core::net::IpAddr;
use core::time::Duration;

use ringfence_frame::Batch;
use ringfence_offload::OffloadMeta;
use ringfence_offload::packet::Transport;

use super::Uplink;
use crate::context::Context;
use crate::packet::{Mac, Packet};
use crate::share::{Handoff, Visited};

impl Uplink {
    /// Returns the engine to which an unfragmented packet goes, with the engines that do not have its connection. Returns
    /// `None` if this engine handles it.
    pub(super) fn other_owner(&self, packet: &Packet<'_>) -> Option<(usize, Visited)> {
        let share = &self.config.share;
        if let Transport::Tcp(_) = packet.layers.transport() {
            let key = self.tcp.foreign(packet)?;
            return share.next_of_flow(key.guest, key.remote, self.visited);
        }
        let engine = share.of_packet(packet);
        (engine != share.index).then_some((engine, Visited::default()))
    }

    pub(super) fn hand_over(&mut self, engine: usize, packet: &Packet<'_>, visited: Visited) {
        let mut bytes = vec![0; packet.frame.len()];
        packet.frame.copy_to(&mut bytes);
        let meta = packet.frame.meta();
        self.handoffs.push((engine, Handoff::Frame { bytes, meta, visited }));
    }

    /// Learns the guest's addresses from a packet. The first engine, which opens connections from outside, learns them too.
    pub(super) fn learn(&mut self, mac: Mac, source: IpAddr) {
        let is_new = self.config.guest.learn(mac, source);
        if is_new && self.config.share.index != 0 {
            self.handoffs.push((0, Handoff::Learned { mac, source }));
        }
    }

    /// Takes the frames and connections that belong to other engines, with the engine's index.
    pub fn take_handoffs(&mut self) -> impl Iterator<Item = (usize, Handoff)> + '_ {
        self.counters.handed_over.add(self.handoffs.len() as u64);
        self.handoffs.drain(..)
    }

    /// Accepts a frame or a connection from another engine.
    pub fn accept_handoff(&mut self, handoff: Handoff, now: Duration) {
        match handoff {
            Handoff::Frame { bytes, meta, visited } => {
                self.visited = visited;
                self.frame_alone(&bytes, meta, now);
                self.visited = Visited::default();
            }
            Handoff::Learned { mac, source } => {
                self.config.guest.learn(mac, source);
            }
            Handoff::Wake => self.follow_changes(now),
            Handoff::Connection { file, client, guest } => {
                if let Some(mac) = self.config.guest.mac {
                    self.tcp.accept(file, client, guest, mac, &mut context!(self, now));
                }
            }
        }
    }

    /// Handles a frame that is in no batch.
    pub(super) fn frame_alone(&mut self, bytes: &[u8], meta: OffloadMeta, now: Duration) {
        let mut batch = Batch::with_capacity(1, bytes.len());
        let pushed = batch.reserve(bytes.len()).and_then(|offset| {
            batch.scratch_mut(offset..offset + bytes.len()).ok()?.copy_from_slice(bytes);
            batch.push_contiguous(offset, bytes.len(), meta).ok()
        });
        if let Some(index) = pushed {
            self.input(&batch, &[index], now);
        }
    }
}

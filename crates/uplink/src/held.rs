//! Packets that wait for the answer to a question about their destination ([`asking`](crate::egress::asking)).
//!
//! An engine holds copies of queries, SYNs and datagrams. When a question is over, it handles the copies as if they had come then:
//! they open flows, or are refused, by the usual rules. A repetition of a packet that is held is dropped. The bytes count as
//! first bytes that wait for a verdict.

use core::ops::Range;
use core::time::Duration;
use std::sync::Arc;

use ringfence_offload::OffloadMeta;
use ringfence_offload::packet::Transport;

use crate::egress::{Egress, Waiting};
use crate::packet::Packet;

/// Maximum number of packets that an engine holds. Further ones are lost, as on a full link.
pub(crate) const PACKETS_MAX: usize = 128;
/// Maximum number of packets that wait for one answer.
pub(crate) const PACKETS_OF_QUESTION_MAX: usize = 32;
/// Maximum length of a packet that is held, in bytes.
const LEN_MAX: usize = 4096;
/// Length of ports and sequence number at the beginning of a TCP header.
const PORTS_AND_SEQ: usize = 8;

#[derive(Debug)]
struct HeldPacket {
    waiting: Waiting,
    /// Bytes of the frame that a repetition has, too. IP headers differ in their identification, SYNs in their time stamps.
    compared: Range<usize>,
    frame: Vec<u8>,
    meta: OffloadMeta,
    egress: Arc<Egress>,
}

impl Drop for HeldPacket {
    fn drop(&mut self) {
        self.egress.release(self.frame.len());
    }
}

/// Packets of one engine that wait for answers, in the order of their arrival.
#[derive(Debug, Default)]
pub(crate) struct HeldPackets {
    list: Vec<HeldPacket>,
}

impl HeldPackets {
    /// Holds a copy of a packet. Returns `false` if it is lost.
    pub(crate) fn hold(
        &mut self,
        packet: &Packet<'_>,
        waiting: Waiting,
        egress: &Arc<Egress>,
    ) -> bool {
        let length = packet.frame.len();
        let same = self.list.iter().filter(|held| held.waiting.id == waiting.id).count();
        if self.list.len() >= PACKETS_MAX || same >= PACKETS_OF_QUESTION_MAX || length > LEN_MAX {
            return false;
        }
        let mut frame = vec![0; length];
        packet.frame.copy_to(&mut frame);
        let transport = packet.layers.transport_offset().map_or(length, usize::from);
        let is_tcp = matches!(packet.layers.transport(), Transport::Tcp(_));
        let compared = transport..if is_tcp { transport + PORTS_AND_SEQ } else { length };
        let is_same = |held: &HeldPacket| {
            held.waiting.id == waiting.id
                && held.frame.get(held.compared.clone()) == frame.get(compared.clone())
        };
        if self.list.iter().any(is_same) {
            return true;
        }
        if !egress.hold(length) {
            return false;
        }
        let (meta, egress) = (packet.frame.meta(), Arc::clone(egress));
        self.list.push(HeldPacket { waiting, compared, frame, meta, egress });
        true
    }

    /// Takes the packets whose questions are over, or whose policy is in force no more.
    pub(crate) fn take_answered(&mut self) -> Vec<(Vec<u8>, OffloadMeta)> {
        let is_over = |held: &mut HeldPacket| !held.egress.is_waiting(held.waiting.id);
        let over = self.list.extract_if(.., is_over);
        over.map(|mut held| {
            held.egress.release(held.frame.len());
            (core::mem::take(&mut held.frame), held.meta)
        })
        .collect()
    }

    /// Ends the questions whose time is over.
    pub(crate) fn run_timers(&self, now: Duration) {
        if let Some(late) = self.list.iter().find(|held| held.waiting.until <= now) {
            late.egress.expire_questions(now);
        }
    }

    /// Returns the time at which [`run_timers`](Self::run_timers) must be called next.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.list.iter().map(|held| held.waiting.until).min()
    }
}

#[cfg(test)]
mod tests;

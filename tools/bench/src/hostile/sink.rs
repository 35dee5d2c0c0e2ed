//! Verifying port in the driver domain's switch, which receives the victim's packets, and answers them on request.
//!
//! It belongs to no guest, so the measurement does not depend on the speed of one more guest.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_frame::batch::{Batch, BatchError};
use ringfence_frame::counters::PortCounters;
use ringfence_frame::port::{
    ChecksumOffload, Fault, Port, PortCapabilities, Received, Transmitted,
};
use rustix::time::ClockId;

use super::super::packet::{Bad, Checker, Template};
use super::super::usage::clock;
use super::orders::{Arrivals, SinkSetup};
use ringfence_offload::OffloadMeta;
use ringfence_testkit::hostile::adversary::SINK_MAC;

/// MTU above any packet's size.
const MTU: u16 = u16::MAX - 18;

/// Counters of arrivals, and the victim's address. The worker updates them once a batch.
#[derive(Default)]
pub(crate) struct Tally(Mutex<Counted>);

#[derive(Default)]
struct Counted {
    victim: Option<[u8; 6]>,
    arrivals: Arrivals,
}

impl Tally {
    fn lock(&self) -> MutexGuard<'_, Counted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_victim(&self, mac: [u8; 6]) {
        self.lock().victim = Some(mac);
    }

    pub(crate) fn now(&self) -> Arrivals {
        Arrivals { at: clock(ClockId::Monotonic), ..self.lock().arrivals }
    }
}

/// Maximum number of answers that wait. A victim that asks has one packet in flight.
const ANSWERS_MAX: usize = 64;

/// Port that verifies and counts packets.
pub(crate) struct SinkPort {
    tally: Arc<Tally>,
    checker: Checker,
    counters: Arc<PortCounters>,
    size: u32,
    answers: bool,
    /// Packet to the victim that the answers are made of.
    template: Option<([u8; 6], Template)>,
    /// Numbers of the packets to be answered.
    due: Vec<u64>,
}

impl SinkPort {
    pub(crate) fn new(size: u32, setup: SinkSetup, tally: &Arc<Tally>) -> SinkPort {
        SinkPort {
            tally: Arc::clone(tally),
            checker: Checker::verifying(size, setup.verify),
            counters: Arc::new(PortCounters::default()),
            size,
            answers: setup.answers,
            template: None,
            due: Vec::new(),
        }
    }

    /// Appends the answers that are due to a batch. Returns their number.
    fn answer(&mut self, batch: &mut Batch, budget: usize) -> Result<usize, BatchError> {
        let Some(victim) = self.tally.lock().victim else { return Ok(0) };
        let is_known = self.template.as_ref().is_some_and(|(mac, _)| *mac == victim);
        if !is_known {
            self.template = Some((victim, Template::between(self.size, victim, SINK_MAC)));
        }
        let Some((_, template)) = &self.template else { return Ok(0) };
        let len = template.bytes().len();
        let mut sent = 0;
        while sent < budget.min(self.due.len()) && batch.has_room_for(len) {
            let Some(at) = batch.reserve(len) else { break };
            let packet = batch.scratch_mut(at..at + len)?;
            packet.copy_from_slice(template.bytes());
            template.number(packet, self.due[sent], false);
            batch.push_contiguous(at, len, OffloadMeta::PLAIN)?;
            sent += 1;
        }
        self.due.drain(..sent);
        Ok(sent)
    }
}

impl Port for SinkPort {
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        if self.due.is_empty() {
            return Ok(Received::default());
        }
        let sent = self.answer(batch, budget).map_err(Fault::misbehaved)?;
        Ok(Received { frames: sent, work: sent })
    }

    fn complete(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        let mut counted = self.tally.lock();
        let Counted { victim, arrivals } = &mut *counted;
        let mut bytes = 0;
        for frame in batch.select(frames) {
            bytes += frame.len() as u64;
            if victim.is_none() || frame.header().get(6..12) != victim.as_ref().map(|m| &m[..]) {
                arrivals.others += 1;
                continue;
            }
            match self.checker.take(frame) {
                Ok(_) => {
                    arrivals.verified += 1;
                    if self.answers && self.due.len() < ANSWERS_MAX {
                        self.due.push(self.checker.packets() - 1);
                    }
                }
                Err(Bad::Lost { from, to }) => {
                    arrivals.missing += to - from + 1;
                    arrivals.verified += 1;
                    // The packet passed verification before its number was compared.
                    self.checker.resume_behind(to + 1);
                    if self.answers && self.due.len() < ANSWERS_MAX {
                        self.due.push(to + 1);
                    }
                }
                Err(_) => arrivals.damaged += 1,
            }
        }
        self.counters.sent(frames.len() as u64, bytes);
        Ok(Transmitted { sent: frames.len(), dropped: 0 })
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        Ok(!self.due.is_empty())
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn capabilities(&self) -> PortCapabilities {
        PortCapabilities {
            checksum: ChecksumOffload::Any,
            scatter_gather: true,
            ..PortCapabilities::plain(MTU)
        }
    }

    fn counters(&self) -> &Arc<PortCounters> {
        &self.counters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VICTIM: [u8; 6] = [2, 0, 0, 0, 0, 7];

    fn deliver(sink: &mut SinkPort, packets: &[Vec<u8>]) {
        let mut batch = Batch::default();
        for packet in packets {
            let at = batch.reserve(packet.len()).unwrap();
            batch.scratch_mut(at..at + packet.len()).unwrap().copy_from_slice(packet);
            batch.push_contiguous(at, packet.len(), OffloadMeta::PLAIN).unwrap();
        }
        let all: Vec<u32> = (0..).take(packets.len()).collect();
        sink.transmit(&batch, &all).unwrap();
    }

    #[test]
    fn sink_counts_verified_damaged_and_other_packets() {
        let tally = Arc::new(Tally::default());
        let mut sink = SinkPort::new(64, SinkSetup::VERIFYING, &tally);
        tally.set_victim(VICTIM);
        let template = Template::between(64, [9; 6], VICTIM);
        let packet = |sequence| {
            let mut packet = template.bytes().to_vec();
            template.number(&mut packet, sequence, false);
            packet
        };
        let foreign = Template::between(64, [9; 6], [2, 0, 0, 0, 0, 8]).bytes().to_vec();
        let mut spoilt = packet(2);
        spoilt[50] ^= 1;
        deliver(&mut sink, &[packet(0), packet(1), foreign, spoilt, packet(3)]);
        // The damaged packet also counts as missing.
        let seen = tally.now();
        assert_eq!((seen.verified, seen.missing, seen.damaged, seen.others), (3, 1, 1, 1));
        deliver(&mut sink, &[packet(9), packet(10), packet(10)]);
        let seen = tally.now();
        assert_eq!((seen.verified, seen.missing, seen.damaged, seen.others), (5, 6, 2, 1));
    }

    #[test]
    fn answer_has_the_number_of_the_victims_packet_and_comes_once() {
        let tally = Arc::new(Tally::default());
        let setup = SinkSetup { answers: true, ..SinkSetup::VERIFYING };
        let mut sink = SinkPort::new(64, setup, &tally);
        tally.set_victim(VICTIM);
        let template = Template::between(64, SINK_MAC, VICTIM);
        let packet = |sequence| {
            let mut packet = template.bytes().to_vec();
            template.number(&mut packet, sequence, false);
            packet
        };
        let foreign = Template::between(64, SINK_MAC, [2, 0, 0, 0, 0, 8]).bytes().to_vec();
        deliver(&mut sink, &[packet(0), foreign, packet(2)]);
        assert!(sink.arm().unwrap(), "answers wait");
        let mut batch = Batch::default();
        let got = sink.receive(&mut batch, 64).unwrap();
        assert_eq!((got.frames, batch.len()), (2, 2));
        let mut checker = Checker::new(64);
        let frames: Vec<_> = batch.iter().collect();
        assert_eq!(frames[0].header()[..6], VICTIM);
        assert_eq!(checker.take(frames[0]), Ok(false));
        assert_eq!(checker.take(frames[1]), Err(Bad::Lost { from: 1, to: 1 }));
        assert!(!sink.arm().unwrap());
        assert_eq!(sink.receive(&mut batch, 64).unwrap(), Received::default());
    }
}

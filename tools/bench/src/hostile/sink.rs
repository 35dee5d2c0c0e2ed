//! Verifying port in the driver domain's switch, which receives the victim's packets.
//!
//! It belongs to no guest, so the measurement does not depend on the speed of one more guest.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_frame::batch::Batch;
use ringfence_frame::counters::PortCounters;
use ringfence_frame::port::{
    ChecksumOffload, Fault, Port, PortCapabilities, Received, Transmitted,
};
use rustix::time::ClockId;

use super::super::packet::{Bad, Checker};
use super::super::usage::clock;
use super::orders::Arrivals;

/// MTU above any packet's size.
const MTU: u16 = u16::MAX - 18;

/// Counters of arrivals, and the victim's address. The worker updates them once a batch.
#[derive(Default)]
pub(super) struct Tally(Mutex<Counted>);

#[derive(Default)]
struct Counted {
    victim: Option<[u8; 6]>,
    arrivals: Arrivals,
}

impl Tally {
    fn lock(&self) -> MutexGuard<'_, Counted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_victim(&self, mac: [u8; 6]) {
        self.lock().victim = Some(mac);
    }

    pub(super) fn now(&self) -> Arrivals {
        Arrivals { at: clock(ClockId::Monotonic), ..self.lock().arrivals }
    }
}

/// Port that verifies and counts packets.
pub(super) struct SinkPort {
    tally: Arc<Tally>,
    checker: Checker,
    counters: Arc<PortCounters>,
}

impl SinkPort {
    pub(super) fn new(size: u32, tally: &Arc<Tally>) -> SinkPort {
        let counters = Arc::new(PortCounters::default());
        SinkPort { tally: Arc::clone(tally), checker: Checker::new(size), counters }
    }
}

impl Port for SinkPort {
    fn receive(&mut self, _: &mut Batch, _: usize) -> Result<Received, Fault> {
        Ok(Received::default())
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
                Ok(_) => arrivals.verified += 1,
                Err(Bad::Lost { from, to }) => {
                    arrivals.missing += to - from + 1;
                    arrivals.verified += 1;
                    // The packet passed verification before its number was compared.
                    self.checker.resume_behind(to + 1);
                }
                Err(_) => arrivals.damaged += 1,
            }
        }
        self.counters.sent(frames.len() as u64, bytes);
        Ok(Transmitted { sent: frames.len(), dropped: 0 })
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        Ok(false)
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
    use crate::packet::Template;
    use ringfence_offload::OffloadMeta;

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
        let mut sink = SinkPort::new(64, &tally);
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
}

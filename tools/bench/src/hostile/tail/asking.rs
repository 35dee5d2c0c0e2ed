//! Honest guest that asks: sends one packet, and sleeps until the answer of the verifying port arrives.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hdrhistogram::Histogram;
use ringfence_frame::batch::{Batch, FrameView};
use ringfence_frame::port::Port;
use ringfence_net::staging::TxStaging;
use ringfence_net::vif::frontend::VifFrontend;
use ringfence_offload::OffloadMeta;
use ringfence_platform::local::LocalPlatform;
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_testkit::hostile::adversary::SINK_MAC;
use rustix::event::Timespec;

use super::super::orders::{GuestIdentity, HostileAnswer, NeighbourSetup, RoundTrips, RowCommand};
use crate::domain::connect_frontend;
use crate::latency::end::histogram;
use crate::packet::{Bad, Checker, Template};
use crate::params::Verify;
use crate::work::sleep;

/// Time after which an answer counts as lost.
const LOST_AFTER: Duration = Duration::from_secs(1);
/// Maximum length of one sleep.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// Packets of a batch.
const ROUND: usize = 64;
/// Quantiles that are reported.
const QUANTILES: [f64; 3] = [0.5, 0.99, 0.999];
/// Packets to the neighbour with each question, if the guest talks to it.
const TALK: usize = 4;

/// Serves orders until the parent closes the channel.
pub(in super::super) fn serve(
    channel: &Channel,
    setup: &NeighbourSetup,
    place: &GuestIdentity,
    talks: bool,
    hub: OwnedFd,
) -> anyhow::Result<()> {
    let platform = LocalPlatform::connect(hub)?;
    let frontend = VifFrontend::new(&platform, place.device(), place.mtu)?;
    let mut connected = connect_frontend(&platform, frontend, TxStaging::Off, None)?;
    let port = connected.host.0.as_mut().context("the vif was connected but is gone")?;
    channel.send(&HostileAnswer::Ready, &[])?;
    let mut asker = Asker::new(setup.size, place, talks);
    loop {
        match channel.receive::<RowCommand>() {
            Ok((RowCommand::Ask(length), _)) => {
                let asked = asker.ask(&mut **port, length)?;
                channel.send(&HostileAnswer::Asked(asked), &[])?;
            }
            Ok((other, _)) => bail!("a guest that asks was told {other:?}"),
            Err(ChannelError::Closed) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Packets and answers of a guest.
struct Asker {
    template: Template,
    /// Packet to the neighbour, once its address is known.
    neighbour: Option<Template>,
    place: GuestIdentity,
    talks: bool,
    checker: Checker,
    batch: Batch,
    sequence: u64,
}

impl Asker {
    fn new(size: u32, place: &GuestIdentity, talks: bool) -> Asker {
        Asker {
            template: Template::between(size, SINK_MAC, place.mac),
            neighbour: None,
            place: place.clone(),
            talks,
            checker: Checker::verifying(size, Verify::Full),
            batch: Batch::default(),
            sequence: 0,
        }
    }

    /// Asks one packet after the other for so long.
    fn ask(&mut self, port: &mut dyn Port, length: Duration) -> anyhow::Result<RoundTrips> {
        let mut times: Histogram<u64> = histogram()?;
        let mut lost = 0;
        let began = Instant::now();
        while began.elapsed() < length {
            match self.round_trip(port)? {
                Some(time) => times.saturating_record(u64::try_from(time.as_nanos())?),
                None => lost += 1,
            }
        }
        Ok(summary(&times, lost))
    }

    /// Sends a packet and waits for its answer. Returns `None` if there is none.
    fn round_trip(&mut self, port: &mut dyn Port) -> anyhow::Result<Option<Duration>> {
        let began = Instant::now();
        self.send(port)?;
        loop {
            if self.receive(port)? {
                self.sequence += 1;
                return Ok(Some(began.elapsed()));
            }
            if began.elapsed() > LOST_AFTER {
                self.checker.resume_behind(self.sequence);
                self.sequence += 1;
                return Ok(None);
            }
            sleep(port, None, Some(&NAP))?;
        }
    }

    fn send(&mut self, port: &mut dyn Port) -> anyhow::Result<()> {
        self.batch.clear();
        let room = port.room().context("looking for room")?;
        let neighbour = self.neighbour.iter().flat_map(|to| core::iter::repeat_n(to, TALK));
        let mut indices = Vec::new();
        for template in core::iter::once(&self.template).chain(neighbour).take(room) {
            let len = template.bytes().len();
            let at = self.batch.reserve(len).context("a full batch")?;
            let packet = self.batch.scratch_mut(at..at + len)?;
            packet.copy_from_slice(template.bytes());
            template.number(packet, self.sequence, false);
            indices.push(self.batch.push_contiguous(at, len, OffloadMeta::PLAIN)?);
        }
        port.transmit(&self.batch, &indices).context("sending")?;
        port.flush().context("flushing")
    }

    /// Takes what has arrived. Returns `true` if the answer was among it.
    fn receive(&mut self, port: &mut dyn Port) -> anyhow::Result<bool> {
        let mut is_answered = false;
        loop {
            self.batch.clear();
            let got = port.receive(&mut self.batch, ROUND).context("receiving")?;
            for frame in self.batch.iter() {
                let from = source(frame);
                if from == Some(SINK_MAC) {
                    is_answered |= verify(&mut self.checker, frame, self.sequence)?;
                } else if self.talks && self.neighbour.is_none() {
                    let size = u32::try_from(self.template.bytes().len())?;
                    let to = |mac| Template::between(size, mac, self.place.mac);
                    self.neighbour = from.map(to);
                }
            }
            self.batch.clear();
            port.complete().context("answering")?;
            if got.work == 0 {
                return Ok(is_answered);
            }
        }
    }
}

/// Returns the figures of all answers. The times themselves would exceed a message.
fn summary(times: &Histogram<u64>, lost: u64) -> RoundTrips {
    RoundTrips {
        answered: times.len(),
        lost,
        quantiles: QUANTILES.map(|part| times.value_at_quantile(part)),
        longest: times.max(),
    }
}

/// Returns the address that sent a frame.
fn source(frame: FrameView<'_>) -> Option<[u8; 6]> {
    frame.header().get(6..12)?.try_into().ok()
}

/// Verifies an answer. Returns `false` for one that counted as lost before.
fn verify(checker: &mut Checker, frame: FrameView<'_>, wanted: u64) -> anyhow::Result<bool> {
    match checker.take(frame) {
        Ok(_) => Ok(checker.packets() == wanted + 1),
        Err(Bad::Repeated { found, .. }) if found < wanted => Ok(false),
        Err(bad) => Err(bad).context("an answer"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(packets: &[Vec<u8>]) -> Batch {
        let mut batch = Batch::default();
        for packet in packets {
            let at = batch.reserve(packet.len()).unwrap();
            batch.scratch_mut(at..at + packet.len()).unwrap().copy_from_slice(packet);
            batch.push_contiguous(at, packet.len(), OffloadMeta::PLAIN).unwrap();
        }
        batch
    }

    #[test]
    fn late_answer_is_none_and_a_damaged_one_is_an_error() {
        let template = Template::between(64, [2; 6], SINK_MAC);
        let answer = |sequence| {
            let mut packet = template.bytes().to_vec();
            template.number(&mut packet, sequence, false);
            packet
        };
        let mut damaged = answer(5);
        damaged[50] ^= 1;
        let batch = batch(&[answer(3), answer(4), damaged]);
        let mut frames = batch.iter();
        let mut checker = Checker::verifying(64, Verify::Full);
        // Packet 3 counted as lost, and packet 4 was asked after it.
        checker.resume_behind(3);
        assert_eq!(source(frames.next().unwrap()), Some(SINK_MAC));
        let mut frames = batch.iter();
        assert!(!verify(&mut checker, frames.next().unwrap(), 4).unwrap());
        assert!(verify(&mut checker, frames.next().unwrap(), 4).unwrap());
        assert!(verify(&mut checker, frames.next().unwrap(), 5).is_err());
    }

    #[test]
    fn quantiles_are_those_of_all_answers() {
        let mut times = histogram().unwrap();
        for (value, count) in [(10_000, 985), (50_000, 10), (90_000, 5)] {
            times.record_n(value, count).unwrap();
        }
        let found = summary(&times, 3);
        assert_eq!((found.answered, found.lost), (1000, 3));
        for (found, wanted) in found.quantiles.into_iter().zip([10_000u64, 50_000, 90_000]) {
            assert!(found.abs_diff(wanted) < wanted / 500, "{found} {wanted}");
        }
    }
}

//! What is done to frames that the port they leave by cannot take as they are.
//!
//! # Theory of operation
//!
//! A frame stays as it came for as long as possible: its checksum blank, its segments one. Only when
//! it leaves by a port that cannot pass that on is it finished, here, and nowhere else. So a port
//! only ever sees frames that conform to its [`PortCapabilities`].
//!
//! * A blank checksum is finished in the batch. The batch's other receivers then get the finished
//!   frame too, which every one of them can take.
//! * A super-packet that the port does not take is dropped and counted. No port offers its peer to
//!   send kinds that it does not take itself.

use ringfence_offload::blank::derive_place;
use ringfence_offload::packet::Network;
use ringfence_offload::{ChecksumPlace, Layers};

use crate::batch::{Batch, FrameView};
use crate::counters::{DropReason, PortCounters};
use crate::port::{ChecksumOffload, PortCapabilities};

/// What has to be done to a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Pass,
    FinishChecksum,
    Drop(DropReason),
}

/// Makes each of `frames` (indices into `batch`) one that a port of these `capabilities` takes;
/// strikes those that cannot be, and counts them in `counters`, the port's.
pub fn prepare(
    batch: &mut Batch,
    frames: &mut Vec<u32>,
    capabilities: &PortCapabilities,
    counters: &PortCounters,
) {
    frames.retain(|&index| {
        let Some(frame) = batch.get(index) else { return false };
        let reason = match judge(&frame, capabilities) {
            Verdict::Pass => return true,
            Verdict::FinishChecksum if batch.finish_checksum(index).is_ok() => return true,
            Verdict::FinishChecksum => DropReason::ChecksumUnfinished,
            Verdict::Drop(reason) => reason,
        };
        counters.dropped(reason);
        false
    });
}

fn judge(frame: &FrameView<'_>, capabilities: &PortCapabilities) -> Verdict {
    let meta = frame.meta();
    if let Some(gso) = meta.gso {
        let taken = capabilities.scatter_gather && capabilities.gso.takes(gso.kind, gso.ecn);
        if !taken {
            return Verdict::Drop(DropReason::GsoUnsupported);
        }
    } else if frame.len() > capabilities.frame_max() {
        return Verdict::Drop(DropReason::TooLong);
    }
    match meta.checksum.place() {
        Some(place) if !takes_blank(frame, place, capabilities.checksum) => match meta.gso {
            // Its checksum is of many packets, which only the one who splits it can finish.
            Some(_) => Verdict::Drop(DropReason::GsoUnsupported),
            None => Verdict::FinishChecksum,
        },
        _ => Verdict::Pass,
    }
}

/// Whether a port with this offload can pass on that the checksum at `place` is blank.
fn takes_blank(frame: &FrameView<'_>, place: ChecksumPlace, offload: ChecksumOffload) -> bool {
    let (ipv4, ipv6) = match offload {
        ChecksumOffload::None => return false,
        ChecksumOffload::Any => return true,
        ChecksumOffload::Netif { ipv4, ipv6 } => (ipv4, ipv6),
    };
    let Ok(frame_len) = u32::try_from(frame.len()) else { return false };
    let Ok(layers) = Layers::parse(frame.header(), frame_len) else { return false };
    let version = match layers.network() {
        Network::Ipv4(_) => ipv4,
        Network::Ipv6(_) => ipv6,
        Network::Arp | Network::Other(_) => false,
    };
    version && derive_place(&layers) == Ok(place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::GsoOffload;
    use ringfence_offload::checksum::internet_checksum;
    use ringfence_offload::{Checksum, Gso, GsoKind, OffloadMeta};

    const UDP_PLACE: Checksum = Checksum::Partial { start: 34, offset: 6 };

    /// A UDP datagram of `payload` octets over IPv4.
    fn udp(payload: usize) -> Vec<u8> {
        let mut frame = vec![0x5a; 42 + payload];
        frame[12..14].copy_from_slice(&[0x08, 0x00]);
        frame[14..34].fill(0);
        frame[14] = 0x45;
        let ip_len = u16::try_from(28 + payload).unwrap().to_be_bytes();
        frame[16..18].copy_from_slice(&ip_len);
        frame[23] = 17;
        let udp_len = u16::try_from(8 + payload).unwrap().to_be_bytes();
        frame[38..40].copy_from_slice(&udp_len);
        // In place of the pseudo header's sum: then the finished datagram alone sums to zero.
        frame[40..42].fill(0);
        frame
    }

    fn batch(frame: &[u8], meta: OffloadMeta) -> Batch {
        let mut batch = Batch::with_capacity(1, 1 << 16);
        let offset = batch.reserve(frame.len()).unwrap();
        batch.scratch_mut(offset..offset + frame.len()).unwrap().copy_from_slice(frame);
        batch.push_contiguous(offset, frame.len(), meta).unwrap();
        batch
    }

    fn prepared(batch: &mut Batch, capabilities: &PortCapabilities) -> Result<(), DropReason> {
        let counters = PortCounters::default();
        let mut frames = vec![0];
        prepare(batch, &mut frames, capabilities, &counters);
        let dropped = DropReason::ALL.iter().find(|&&reason| counters.drops(reason) > 0);
        assert_eq!(frames.is_empty(), dropped.is_some());
        dropped.map_or(Ok(()), |&reason| Err(reason))
    }

    fn capabilities(checksum: ChecksumOffload) -> PortCapabilities {
        PortCapabilities { checksum, ..PortCapabilities::plain(1500) }
    }

    #[test]
    fn a_blank_checksum_is_finished_only_for_a_port_that_cannot_pass_it_on() {
        let meta = OffloadMeta { checksum: UDP_PLACE, gso: None };
        let netif = |ipv4, ipv6| ChecksumOffload::Netif { ipv4, ipv6 };
        for (offload, finished) in [
            (ChecksumOffload::None, true),
            (ChecksumOffload::Any, false),
            (netif(true, false), false),
            (netif(false, true), true),
        ] {
            let mut batch = batch(&udp(501), meta);
            prepared(&mut batch, &capabilities(offload)).unwrap();
            let frame = batch.get(0).unwrap();
            assert_eq!(frame.meta().is_finished(), finished, "{offload:?}");
            let sum = internet_checksum(&frame.contiguous().unwrap()[34..]);
            assert_eq!(sum == 0, finished, "{offload:?}");
        }
    }

    #[test]
    fn netif_cannot_tell_a_blank_checksum_elsewhere() {
        let elsewhere = Checksum::Partial { start: 44, offset: 16 };
        let mut batch = batch(&udp(100), OffloadMeta { checksum: elsewhere, gso: None });
        let netif = ChecksumOffload::Netif { ipv4: true, ipv6: true };
        prepared(&mut batch, &capabilities(netif)).unwrap();
        assert!(batch.get(0).unwrap().meta().is_finished());
    }

    #[test]
    fn a_checksum_field_outside_the_header_drops_the_frame() {
        let outside = Checksum::Partial { start: 300, offset: 6 };
        let mut batch = batch(&udp(1000), OffloadMeta { checksum: outside, gso: None });
        let dropped = prepared(&mut batch, &capabilities(ChecksumOffload::None));
        assert_eq!(dropped, Err(DropReason::ChecksumUnfinished));
    }

    #[test]
    fn a_frame_is_as_long_as_the_port_takes() {
        let any = capabilities(ChecksumOffload::Any);
        let mut fits = batch(&udp(1500 + 18 - 42), OffloadMeta::PLAIN);
        assert_eq!(prepared(&mut fits, &any), Ok(()));
        let mut long = batch(&udp(1500 + 18 - 41), OffloadMeta::PLAIN);
        assert_eq!(prepared(&mut long, &any), Err(DropReason::TooLong));
    }

    #[test]
    fn a_super_packet_passes_where_its_kind_is_taken_and_nowhere_else() {
        let gso = Gso { kind: GsoKind::Udp, ecn: false, size: 1000 };
        let meta = OffloadMeta { checksum: UDP_PLACE, gso: Some(gso) };
        let takes = PortCapabilities {
            gso: GsoOffload { udp: true, ..GsoOffload::default() },
            scatter_gather: true,
            ..capabilities(ChecksumOffload::Any)
        };
        assert_eq!(prepared(&mut batch(&udp(9000), meta), &takes), Ok(()));
        let refused = Err(DropReason::GsoUnsupported);
        for lacks in [
            capabilities(ChecksumOffload::Any),
            PortCapabilities { scatter_gather: false, ..takes },
            PortCapabilities { checksum: ChecksumOffload::None, ..takes },
        ] {
            assert_eq!(prepared(&mut batch(&udp(9000), meta), &lacks), refused, "{lacks:?}");
        }
    }
}

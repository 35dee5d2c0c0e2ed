//! Fuzz target of egress processing: a port gets the same traffic as was sent, in any form that it takes.

mod filter;

pub use filter::address_filter;
use ringfence_frame::batch::{Batch, DERIVED_MAX, HEADER_MAX};
use ringfence_frame::counters::PortCounters;
use ringfence_frame::port::{ChecksumOffload, GsoOffload, PortCapabilities, Transmitted};
use ringfence_frame::testing::copy_of;
use ringfence_memory::LentSlice;
use ringfence_offload::OffloadMeta;
use ringfence_offload::fuzzing::{Frame, believing_nobody, frames_of_a_round, is_the_same};

use crate::egress::{EgressPort, EgressProcessor};

/// Runs one case: a byte that selects the port's capabilities, then a case of
/// [`ringfence_offload::fuzzing::coalesce`]. Bit 7 of that case's settings puts the payload into lent
/// memory, in pieces whose size the settings select.
///
/// # Panics
///
/// Panics if the port gets a frame that it does not take, or traffic other than what was sent.
pub fn egress(data: &[u8]) {
    let Some((&selection, rest)) = data.split_first() else { return };
    let Some((settings, frames)) = frames_of_a_round(rest) else { return };
    let sent: Vec<Frame> = frames.into_iter().map(believing_nobody).collect();
    let capabilities = capabilities(selection);
    let counters = PortCounters::default();
    let mut batch = Batch::with_capacity(sent.len(), sent.iter().map(|(b, _)| b.len()).sum());
    let piece = (settings & 0x80 != 0).then(|| usize::from(settings) * 16);
    for (bytes, meta) in &sent {
        add(&mut batch, bytes, *meta, piece);
    }
    let all: Vec<u32> = (0..).take(batch.len()).collect();
    assert_eq!(all.len(), sent.len());
    let mut got = Vec::new();
    let port = EgressPort { capabilities: &capabilities, counters: &counters, joins: true };
    EgressProcessor::default().process(&mut batch, &all, port, |batch, ready| {
        for frame in batch.select(ready) {
            check_conforms(frame.meta(), frame.len(), &capabilities);
            got.push((copy_of(&frame), frame.meta()));
        }
        Some(Transmitted { sent: ready.len(), dropped: 0 })
    });
    assert_eq!(
        (batch.len(), batch.derivable()),
        (sent.len(), DERIVED_MAX),
        "no derived frame stays in the batch"
    );
    if counters.drops_total() == 0 {
        is_the_same(&sent, &got);
    }
}

fn capabilities(selection: u8) -> PortCapabilities {
    let bit = |n: u8| selection >> n & 1 == 1;
    let checksum = match selection >> 5 & 3 {
        0 => ChecksumOffload::None,
        1 => ChecksumOffload::Netif { ipv4: bit(0), ipv6: bit(7) },
        2 => ChecksumOffload::Netif { ipv4: true, ipv6: true },
        _ => ChecksumOffload::Any,
    };
    let gso = GsoOffload { tcp_v4: !bit(0), tcp_v6: !bit(1), ecn: !bit(2), udp: !bit(3) };
    // With this MTU no frame is too long.
    PortCapabilities { checksum, gso, scatter_gather: !bit(4), mtu: u16::MAX }
}

fn check_conforms(meta: OffloadMeta, len: usize, capabilities: &PortCapabilities) {
    assert!(len <= capabilities.longest(), "{len} bytes");
    if let Some(gso) = meta.gso {
        assert!(capabilities.gso.takes(gso.kind, gso.ecn));
        assert!(capabilities.scatter_gather || len <= capabilities.frame_max());
    }
    let blank = meta.checksum.place().is_some();
    assert!(!blank || capabilities.checksum != ChecksumOffload::None, "blank checksum");
}

fn add(batch: &mut Batch, bytes: &[u8], meta: OffloadMeta, piece: Option<usize>) {
    let private = piece.map_or(bytes.len(), |_| bytes.len().min(HEADER_MAX));
    let offset = batch.reserve(private).unwrap_or_default();
    if let Ok(scratch) = batch.scratch_mut(offset..offset + private) {
        scratch.copy_from_slice(&bytes[..private]);
    }
    if private == bytes.len() {
        let added = batch.push_contiguous(offset, private, meta);
        assert!(added.is_ok(), "{added:?}");
        return;
    }
    let lent = LentSlice::anonymous(bytes.len());
    assert!(lent.copy_from(0, bytes).is_ok());
    // At most about 20 pieces, because a frame may have only so many.
    let piece = piece.unwrap_or_default().max(bytes.len() / 20).max(1);
    let Ok(mut frame) = batch.frame(offset, private) else { panic!("the batch has no room") };
    for at in (private..bytes.len()).step_by(piece) {
        let added = frame.lent(lent.clone(), at, piece.min(bytes.len() - at));
        assert!(added.is_ok(), "{added:?}");
    }
    frame.finish(meta);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use ringfence_frame::testing::tcp_frame;

    /// Builds a case whose frames are the segments of a super-packet. Each step changes one segment.
    fn case(selection: u8, settings: u8, v6: bool, payload: usize, steps: &[[u8; 3]]) -> Vec<u8> {
        let frame = tcp_frame(v6, payload);
        let kind = if v6 { 4 } else { 1 };
        // The virtio-net header: NEEDS_CSUM, the kind, segments of 100 bytes, the checksum at offset 16 of TCP.
        let start = if v6 { 54 } else { 34 };
        let vnet = [1, kind, 0, 0, 100, 0, start, 0, 16, 0, 0, 0];
        let len = u16::try_from(frame.len()).unwrap().to_le_bytes();
        [&[selection, settings][..], &vnet, &len, &frame, &steps.concat()].concat()
    }

    proptest! {
        #[test]
        fn egress_frames_of_any_port_carry_ingress_traffic(
            selection in any::<u8>(),
            settings in any::<u8>(),
            v6 in any::<bool>(),
            payload in 100usize..6000,
            // Most steps keep the segment; the others omit, repeat, damage or merge it.
            steps in proptest::collection::vec(
                prop_oneof![
                    8 => (0u8..3).prop_map(|how| [how, 0, 0]),
                    1 => (3u8..8, 0u8..120, any::<u8>())
                        .prop_map(|(what, at, xor)| [what, at, xor]),
                ],
                0..48,
            ),
        ) {
            egress(&case(selection, settings, v6, payload, &steps));
        }

        #[test]
        fn any_bytes_are_processed_without_panic(data in proptest::collection::vec(any::<u8>(), 0..600)) {
            egress(&data);
        }
    }
}

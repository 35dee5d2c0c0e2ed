//! Fuzz target `virtqueues`: a device that writes arbitrary data. A property test runs it, too.

use ringfence_frame::{Batch, Fault, Port};
use ringfence_offload::OffloadMeta;
use ringfence_ring::split::QueueFeatures;
use ringfence_uplink::link::{Committed, GuestLink, Slots};
use ringfence_wire::virtio::UsedElement;

use crate::frame_ring::FrameShape;
use crate::vhost_net::link::VhostLink;
use crate::vhost_net::link::mock::{Mock, MockState, lock, pair};

/// Maximum of frames in a batch.
const BUDGET: usize = 8;

/// Runs a link against a device that writes arbitrary data. The first byte selects the negotiated features.
/// Each group of four bytes selects an action of device and driver, with its numbers.
///
/// # Panics
///
/// Panics if the link returns data that the device did not write, continues after a violation, or does not
/// count it.
pub fn virtqueues(data: &[u8]) {
    let Some((&features, steps)) = data.split_first() else { return };
    let features = QueueFeatures {
        indirect: features & 1 != 0,
        event_idx: features & 2 != 0,
        in_order: features & 4 != 0,
    };
    let Some((mut link, ends)) = pair([8, 16], features, FrameShape { frames: 8, long: 2 }) else {
        return;
    };
    let mut batch = Batch::with_capacity(BUDGET, 8192);
    for step in steps.as_chunks::<4>().0.iter().take(300) {
        device_does(&mut lock(&ends), *step);
        if let Err(fault) = driver_does(&mut link, &mut batch, *step) {
            let broken: u64 = link.rules().all().values().sum();
            assert!(matches!(fault, Fault::Misbehaved(_)), "{fault}");
            assert_eq!(broken, 1, "a broken rule ends the link and is counted: {fault}");
            return;
        }
    }
    assert!(link.rules().all().is_empty(), "a rule was broken and the link went on");
}

/// Runs an action of the device: a whole frame, or arbitrary ring entries.
fn device_does(ends: &mut MockState, [what, a, b, c]: [u8; 4]) {
    let number = u16::from_le_bytes([a, b]);
    let element = UsedElement { id: u32::from(a & 31), len: u32::from(c) << (b & 15) };
    match what >> 4 {
        0..=3 => {
            let mut bytes = vec![c; 12 + usize::from(number)];
            bytes[..10].fill(0);
            bytes[0] = b & 3;
            let _ = ends.deliver(&bytes);
        }
        4 => {
            if let Some(buffer) = ends.receive.take() {
                ends.fill(&buffer, &[a, b, c, a, b, c, a, b, c, a, b & 15, 0]);
                ends.receive.finish(buffer.head, u32::from(c));
            }
        }
        5 => ends.receive.put_used(element, 1),
        6 => ends.transmit.put_used(element, 1),
        7 => ends.receive.put_used(UsedElement { id: number.into(), len: u32::MAX }, c.into()),
        8 => drop(ends.transmit.publish_index(number)),
        9 => drop(ends.receive.publish_index(number)),
        10..=12 => {
            while let Some(request) = ends.transmit.take() {
                ends.transmit.finish(request.head, 0);
            }
        }
        _ => {}
    }
    if what & 8 != 0 {
        let _ = ends.receive.publish();
        let _ = ends.transmit.publish();
    }
}

/// Runs an action of the driver.
fn driver_does(
    link: &mut VhostLink<Mock>,
    batch: &mut Batch,
    [what, a, b, _]: [u8; 4],
) -> Result<(), Fault> {
    match what & 7 {
        0..=2 => {
            let received = link.receive(batch, BUDGET)?;
            assert!(received.frames <= received.work && received.work <= BUDGET);
            for frame in batch.iter() {
                let mut bytes = vec![0; frame.len()];
                assert_eq!(frame.copy_to(&mut bytes), frame.len(), "all of a frame is there");
            }
            let all: Vec<u32> = (0..u32::try_from(batch.len()).unwrap_or(0)).collect();
            if what & 7 == 2 {
                link.transmit(batch, &all)?;
            }
            batch.clear();
            link.complete()?;
        }
        3 | 4 => {
            let len = 60 + usize::from(a) * usize::from(b);
            let mut slots = Slots::new();
            GuestLink::reserve(link, usize::from(a & 15), len, &mut slots);
            let frames = vec![Committed { len, meta: OffloadMeta::PLAIN }; slots.len()];
            drop(slots);
            GuestLink::commit(link, &frames);
            GuestLink::flush(link);
            // The next receive returns a violation that was found here.
            link.receive(batch, 0)?;
        }
        5 => drop(Port::arm(link)?),
        6 => link.clear_events()?,
        _ => drop(link.room()?),
    }
    Ok(())
}

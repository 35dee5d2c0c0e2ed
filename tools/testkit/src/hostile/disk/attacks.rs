//! Attacks on the backend of a disk, one burst at a time.

use ringfence_platform::{Gref, Platform};
use ringfence_wire::blkif::{
    Abi, Direction, Operation, RequestName, SEGMENTS_MAX, SegmentRange, Slot, direct, indirect,
    indirect_descriptors,
};

use super::adversary::{DiskAdversary, Right, whole};
use super::behaviour::DiskBehaviour;

/// Offset of a request's first segment: its reference, its first sector, its last.
const SEGMENT: usize = 24;
/// Maximum segments of a direct request.
const SEGMENTS: usize = 11;
/// Events in a burst.
const EVENTS: usize = 64;
/// Requests whose list changes in one burst.
const LISTS: u32 = 8;
const FLIPS: u32 = 4096;
/// Pages that are used in rotation: more than blkback keeps of a ring.
const FRESH: usize = 4000;
/// Sectors in a page.
const SECTORS: u64 = 8;

/// State of an attack between bursts.
pub struct DiskAttackState {
    round: u32,
    random: u64,
    next: usize,
}

impl Default for DiskAttackState {
    fn default() -> DiskAttackState {
        DiskAttackState { round: 0, random: 0x2545_F491_4F6C_DD1D, next: 0 }
    }
}

impl DiskAttackState {
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}

/// Runs one burst of a behaviour, as large as the ring permits, and validates the responses.
pub fn burst<P: Platform>(
    adversary: &mut DiskAdversary<P>,
    behaviour: DiskBehaviour,
    state: &mut DiskAttackState,
) -> anyhow::Result<()> {
    state.round = state.round.wrapping_add(1);
    adversary.take()?;
    let round = state.round;
    match behaviour {
        // These rows have no hostile guest.
        DiskBehaviour::Absent | DiskBehaviour::Honest => Ok(()),
        DiskBehaviour::SegmentsOutside => {
            let sectors = [[0, 8], [8, 8], [7, 255], [255, 255]];
            segments(adversary, round, &sectors)
        }
        DiskBehaviour::SectorsReversed => {
            segments(adversary, round, &[[5, 4], [7, 0], [1, 0], [6, 5]])
        }
        DiskBehaviour::BeyondEnd => adversary.post(|adversary, n| {
            let end = adversary.sectors;
            let sector = [end, end - SECTORS + 1, end + 1, end.saturating_mul(4)];
            (read(adversary, sector[n as usize % 4]), Right::ERROR)
        }),
        DiskBehaviour::SectorOverflow => adversary.post(|adversary, n| {
            let sector = [u64::MAX, u64::MAX - SECTORS + 1, u64::MAX / 512 + 1, 1 << 63];
            (read(adversary, sector[n as usize % 4]), Right::ERROR)
        }),
        DiskBehaviour::ChangingLists => changing_lists(adversary),
        DiskBehaviour::Segments65535 => adversary.post(|adversary, n| match n % 2 {
            0 => (listed(adversary, u16::MAX), Right::ERROR),
            _ => (with(read(adversary, 0), 1, &[255]), Right::ERROR),
        }),
        DiskBehaviour::UnknownOperations => adversary.post(|adversary, n| {
            let operation = [4, 7, 128, 255][n as usize % 4];
            (with(read(adversary, 0), 0, &[operation]), Right::UNSUPPORTED)
        }),
        DiskBehaviour::ForeignGrefs => foreign(adversary, state),
        DiskBehaviour::Nonsense => adversary.post(|_, _| (nonsense(state), Right::ANY)),
        DiskBehaviour::FreshGrefs => fresh(adversary, state),
        DiskBehaviour::EventStorm => (0..EVENTS).try_for_each(|_| adversary.notify()),
        DiskBehaviour::ProducerOverflow => adversary.publish(1 << 20),
        DiskBehaviour::Reattach => Ok(()),
    }
}

/// Returns a slot with some bytes changed.
fn with(mut slot: Slot, at: usize, bytes: &[u8]) -> Slot {
    slot[at..at + bytes.len()].copy_from_slice(bytes);
    slot
}

fn request(operation: Operation, sector: u64, segments: &[SegmentRange]) -> Slot {
    direct(Abi::NATIVE, operation, RequestName { id: 0, handle: 0 }, sector, segments)
        .expect("few enough for a slot")
}

/// Returns a request that reads one page.
fn read<P: Platform>(adversary: &DiskAdversary<P>, sector: u64) -> Slot {
    request(Operation::Read, sector, &[adversary.whole(0)])
}

/// Returns an indirect read request of `count` segments.
fn listed<P: Platform>(adversary: &DiskAdversary<P>, count: u16) -> Slot {
    let pages = [adversary.list.gref()];
    indirect(Abi::NATIVE, Direction::Read, RequestName { id: 0, handle: 0 }, 0, count, &pages)
        .expect("one page of a list")
}

/// Posts requests whose first segment has these sectors, alternately direct and indirect.
fn segments<P: Platform>(
    adversary: &mut DiskAdversary<P>,
    round: u32,
    sectors: &[[u8; 2]; 4],
) -> anyhow::Result<()> {
    if round.is_multiple_of(2) {
        return adversary.post(|adversary, n| {
            let slot = read(adversary, 0);
            (with(slot, SEGMENT + 4, &sectors[n as usize % 4]), Right::ERROR)
        });
    }
    let gref = adversary.whole(0).gref().0.to_le_bytes();
    for (at, sectors) in (0..).step_by(8).zip(sectors) {
        adversary.list.memory().copy_from(at, &gref)?;
        adversary.list.memory().copy_from(at + 4, sectors)?;
    }
    adversary.post(|adversary, n| (listed(adversary, [1, 2, 3, 4][n as usize % 4]), Right::ERROR))
}

/// Changes a list to nonsense and back while the backend reads it. It may see either, or a mixture.
fn changing_lists<P: Platform>(adversary: &mut DiskAdversary<P>) -> anyhow::Result<()> {
    let good =
        SegmentRange::new(adversary.whole(0).gref(), 0, 0).expect("a page has a first sector");
    let bytes: Vec<u8> = indirect_descriptors(&[good; SEGMENTS_MAX as usize]).flatten().collect();
    adversary.list.memory().copy_from(0, &bytes)?;
    let before = adversary.free();
    for _ in 0..LISTS.min(before) {
        let slot = listed(adversary, SEGMENTS_MAX);
        adversary.put(slot, Right::EITHER)?;
    }
    adversary.publish(0)?;
    let last = (usize::from(SEGMENTS_MAX) - 1) * 8;
    let [a, b, c, d] = good.gref().0.to_le_bytes();
    for _ in 0..FLIPS {
        adversary.list.memory().copy_from(last, &[0xFF, 0xFF, 0xFF, 0xFF, 9, 255, 0, 0])?;
        adversary.take()?;
        if adversary.free() >= before {
            break;
        }
        adversary.list.memory().copy_from(last, &[a, b, c, d, 0, 0, 0, 0])?;
    }
    Ok(())
}

/// Posts references that other guests have granted, but not this one.
fn foreign<P: Platform>(
    adversary: &mut DiskAdversary<P>,
    state: &mut DiskAttackState,
) -> anyhow::Result<()> {
    let span = adversary.foreign.len().max(1);
    adversary.post(|adversary, n| {
        state.next = (state.next + 1) % span;
        let gref = adversary.foreign.clone().nth(state.next).unwrap_or(u32::MAX);
        let operation = if n % 2 == 0 { Operation::Read } else { Operation::Write };
        (request(operation, 0, &[adversary.whole(0), whole(Gref(gref))]), Right::ERROR)
    })
}

/// Posts other granted pages in every request: more than blkback keeps mapped.
fn fresh<P: Platform>(
    adversary: &mut DiskAdversary<P>,
    state: &mut DiskAttackState,
) -> anyhow::Result<()> {
    adversary.lend_up_to(FRESH);
    adversary.post(|adversary, _| {
        let ranges: Vec<_> = (0..SEGMENTS).map(|n| adversary.whole(state.next + n)).collect();
        state.next = (state.next + SEGMENTS) % adversary.pages.len();
        (request(Operation::Read, 0, &ranges), Right::OKAY)
    })
}

/// Returns random bytes whose operation is often a defined one.
fn nonsense(state: &mut DiskAttackState) -> Slot {
    let mut slot: Slot = [0; 112];
    for bytes in slot.chunks_mut(8) {
        let random = state.random().to_le_bytes();
        bytes.copy_from_slice(&random[..bytes.len()]);
    }
    slot[0] &= 7;
    if slot[2] & 1 == 0 {
        // A sector on the disk lets the backend parse the remaining fields too.
        slot[17..SEGMENT].fill(0);
        slot[1] &= 15;
    }
    slot
}

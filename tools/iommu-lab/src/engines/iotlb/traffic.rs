//! Trial `traffic`: packets from and to granted pages.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use ringfence_access::iommu::{RegionShape, RegionTable};
use ringfence_access::window::reuse::ReuseCache;
use ringfence_access::window::{PageSource, SourcePolicy};
use ringfence_memory::{DeviceAccess, DeviceRange, LentSlice};
use ringfence_platform::vhost::QueueName;
use ringfence_platform::{Access, Counters, Gref, PageId, TranslationTable, WindowShape};

use super::rig::{Came, HEADERS, PAYLOAD_MAX, Rig};
use super::{GUEST, NEIGHBOUR, table};

/// Packets in flight at a time.
const BATCH: u32 = 32;

/// Shape with more pages than entries.
const SHAPE: WindowShape = WindowShape { writable: 192, read_only: 192, entries: 256 };

/// Pseudo-random numbers, the same in every run (SplitMix64).
pub(super) struct Dice(pub(super) u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Location of the payload of one packet.
struct Place {
    page: PageId,
    gref: Gref,
    offset: u32,
    len: u32,
    memory: LentSlice,
}

impl Place {
    fn range(&self, region: RegionShape, access: DeviceAccess) -> anyhow::Result<DeviceRange> {
        region.range(self.gref, self.offset, self.len, access).context("no address")
    }

    /// Returns payload bytes that are unique to packet `number`.
    fn bytes(&self, number: u64) -> Vec<u8> {
        let mut dice = Dice(number);
        let mut bytes = number.to_ne_bytes().to_vec();
        while bytes.len() < self.len as usize {
            bytes.extend(dice.next().to_ne_bytes());
        }
        bytes.truncate(self.len as usize);
        bytes
    }
}

/// Source of pages, and of the references that grant them.
trait Pages {
    fn take(&mut self, access: Access, dice: &mut Dice) -> anyhow::Result<(PageId, Gref)>;
    fn memory(&self, page: PageId) -> Option<LentSlice>;
    fn over(&mut self, page: PageId, dice: &mut Dice) -> anyhow::Result<()>;
}

/// Random pages, granted or not. Some grants are revoked without need.
struct ByChance {
    table: RegionTable,
    cache: ReuseCache,
    busy: Vec<bool>,
}

impl Pages for ByChance {
    fn take(&mut self, access: Access, dice: &mut Dice) -> anyhow::Result<(PageId, Gref)> {
        let kind: Vec<PageId> = SHAPE.pages_for(access).collect();
        let page = loop {
            let at = usize::try_from(dice.below(kind.len() as u64))?;
            if !self.busy[kind[at].0 as usize] {
                break kind[at];
            }
        };
        self.busy[page.0 as usize] = true;
        let gref = match self.cache.again(page) {
            Some(gref) => gref,
            None => self.cache.first(&mut self.table, page)?,
        };
        Ok((page, gref))
    }

    fn memory(&self, page: PageId) -> Option<LentSlice> {
        self.table.memory(page)
    }

    fn over(&mut self, page: PageId, dice: &mut Dice) -> anyhow::Result<()> {
        self.busy[page.0 as usize] = false;
        self.cache.over(page);
        let other = PageId(u32::try_from(dice.below(u64::from(SHAPE.pages())))?);
        if dice.below(32) == 0 && !self.busy[other.0 as usize] {
            self.cache.purge(&mut self.table, other)?;
        }
        Ok(())
    }
}

/// Pages from pools, which reuse the page used last.
struct FromPools(PageSource);

impl Pages for FromPools {
    fn take(&mut self, access: Access, _: &mut Dice) -> anyhow::Result<(PageId, Gref)> {
        let page = self.0.take(access).context("no page is free")?;
        Ok((page, self.0.lend(page)?))
    }

    fn memory(&self, page: PageId) -> Option<LentSlice> {
        self.0.memory(page).cloned()
    }

    fn over(&mut self, page: PageId, _: &mut Dice) -> anyhow::Result<()> {
        self.0.give_back(page);
        Ok(())
    }
}

pub(super) fn run(packets: u64) -> anyhow::Result<()> {
    let (mut rig, counters) = (Rig::new(0)?, Arc::<Counters>::default());
    let by_chance = table(&rig, GUEST, SHAPE, &counters)?;
    let region = by_chance.region();
    let (cache, busy) = (ReuseCache::new(SHAPE), vec![false; SHAPE.pages() as usize]);
    let mut by_chance = ByChance { table: by_chance, cache, busy };
    let per_packet = carry(&mut rig, &mut by_chance, region, packets, &counters)?;
    println!("pages by chance: {per_packet:.4} issued or revoked for each packet");
    anyhow::ensure!(per_packet > 0.2, "pages were not revoked and issued again");
    drop(by_chance);

    let pooled = table(&rig, NEIGHBOUR, SHAPE, &counters)?;
    let region = pooled.region();
    let mut pools = FromPools(PageSource::new(Box::new(pooled), 64, SourcePolicy::default()));
    // Warm-up until every page in use is granted.
    carry(&mut rig, &mut pools, region, 4 * u64::from(BATCH), &counters)?;
    let per_packet = carry(&mut rig, &mut pools, region, packets / 4, &counters)?;
    println!("pages from pools: {per_packet:.4} issued or revoked for each packet");
    anyhow::ensure!(per_packet < 0.01, "grants are not used again");
    Ok(())
}

/// Sends packets in both directions and compares every byte. Returns the pages issued and revoked for
/// each packet.
fn carry(
    rig: &mut Rig,
    pages: &mut dyn Pages,
    region: RegionShape,
    packets: u64,
    counters: &Counters,
) -> anyhow::Result<f64> {
    let before = counters.values();
    let (mut dice, mut number, began) = (Dice(7), 0, Instant::now());
    while number < packets {
        let access = if dice.below(2) == 0 { Access::ReadOnly } else { Access::ReadWrite };
        let mut places = Vec::new();
        for _ in 0..BATCH {
            let (page, gref) = pages.take(access, &mut dice)?;
            let len = 8 + u32::try_from(dice.below(PAYLOAD_MAX as u64 - 7))?;
            let offset = u32::try_from(dice.below(u64::from(4097 - len)))?;
            let memory = pages.memory(page).context("no memory")?;
            places.push(Place { page, gref, offset, len, memory });
        }
        match access {
            Access::ReadOnly => outward(rig, region, &places, number)?,
            Access::ReadWrite => inward(rig, region, &places, number)?,
        }
        for place in places {
            pages.over(place.page, &mut dice)?;
        }
        number += u64::from(BATCH);
    }
    let after = counters.values();
    let took = began.elapsed().as_secs_f64();
    #[allow(clippy::cast_precision_loss, reason = "figures for people")]
    let (changes, packets) = (
        (after.window_issues + after.window_revokes - before.window_issues - before.window_revokes)
            as f64,
        number as f64,
    );
    println!("{packets} packets, all as they were sent, {:.0} a second", packets / took);
    Ok(changes / packets)
}

fn outward(rig: &mut Rig, region: RegionShape, places: &[Place], first: u64) -> anyhow::Result<()> {
    for ((place, number), token) in places.iter().zip(first..).zip(0..) {
        place.memory.copy_from(place.offset as usize, &place.bytes(number))?;
        rig.send(place.range(region, DeviceAccess::Read)?, token)?;
    }
    rig.kick(QueueName::Transmit)?;
    let mut bytes = [0; 2048];
    for (place, number) in places.iter().zip(first..) {
        let len = rig.socket.recv(&mut bytes).context("a packet outward")?;
        anyhow::ensure!(bytes[..len] == place.bytes(number), "packet {number} is another");
    }
    for token in 0..places.len() {
        let came = rig.wait(QueueName::Transmit)?;
        let Came::Used(used) = came else { anyhow::bail!("outward, {token}: {came:x?}") };
        anyhow::ensure!(used.token as usize == token, "{used:?}, not {token}");
    }
    Ok(())
}

fn inward(rig: &mut Rig, region: RegionShape, places: &[Place], first: u64) -> anyhow::Result<()> {
    for (place, token) in places.iter().zip(0..) {
        rig.post(place.range(region, DeviceAccess::Write)?, token)?;
    }
    rig.kick(QueueName::Receive)?;
    let to = rig.inward();
    for (place, number) in places.iter().zip(first..) {
        rig.socket.send_to(&place.bytes(number), to).context("a packet inward")?;
    }
    let mut bytes = [0; 2048];
    for (token, (place, number)) in places.iter().zip(first..).enumerate() {
        let came = rig.wait(QueueName::Receive)?;
        let Came::Used(used) = came else { anyhow::bail!("inward, {token}: {came:x?}") };
        let expected = HEADERS + place.len as usize;
        anyhow::ensure!(
            used.token as usize == token && used.len as usize == expected,
            "{used:?}, not {token} of {expected}"
        );
        let bytes = &mut bytes[..place.len as usize];
        place.memory.copy_to(place.offset as usize, bytes)?;
        anyhow::ensure!(*bytes == place.bytes(number)[..], "packet {number} is another");
    }
    Ok(())
}

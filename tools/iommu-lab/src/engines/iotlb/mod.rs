//! Engine `iotlb`: a worker of kernel vhost-net accesses granted pages and no others.

mod canary;
mod refused;
mod rig;
mod traffic;

use std::sync::Arc;

use anyhow::Context as _;
use clap::Subcommand;
use ringfence_access::iommu::{AddressSpace, RegionShape, RegionTable};
use ringfence_memory::DeviceAccess;
use ringfence_memory::FIRST_IO_ADDRESS;
use ringfence_platform::vhost::QueueName;
use ringfence_platform::{
    Access, Counters, DomId, Gref, PageId, TranslationTable, WindowHandle, WindowShape,
};
use ringfence_testkit::conformance::windows::{LEAST, WindowPeer, WindowSuite};

use rig::{Came, HEADERS, Rig};

/// First I/O addresses of two guests' regions.
const GUEST: u64 = FIRST_IO_ADDRESS;
const NEIGHBOUR: u64 = FIRST_IO_ADDRESS + (1 << 40);

/// Trial of the engine.
#[derive(Clone, Copy, Subcommand)]
pub(crate) enum Trial {
    /// Every case of the conformance suite of translation tables
    Conformance,
    /// Packets both ways from and to pages that are revoked and issued again at random arrive as they were
    /// sent; with pools, hardly anything is issued or revoked
    Traffic {
        /// Packets
        packets: u64,
    },
    /// A page revoked while packets come in is not written any more
    Canary {
        /// Times
        rounds: u32,
    },
    /// No more is issued than the kernel keeps
    Entries,
    /// A page that is issued when the worker misses it is accessed as if it had been issued before
    FaultIn,
    /// Of two links, one whose worker accesses an ungranted page ends, and the other continues
    Refused,
}

/// Runs a trial. Returns `true` if it passed.
pub(crate) fn run(trial: Trial) -> anyhow::Result<bool> {
    match trial {
        Trial::Conformance => return conformance(),
        Trial::Traffic { packets } => traffic::run(packets)?,
        Trial::Canary { rounds } => canary::run(rounds)?,
        Trial::Entries => entries()?,
        Trial::FaultIn => fault_in()?,
        Trial::Refused => refused::run()?,
    }
    Ok(true)
}

/// Creates a grant table in the rig's address space.
fn table(
    rig: &Rig,
    base: u64,
    window: WindowShape,
    counters: &Arc<Counters>,
) -> anyhow::Result<RegionTable> {
    let region = RegionShape { base, window, page: 4096 };
    let space = Arc::clone(&rig.space) as Arc<dyn AddressSpace>;
    RegionTable::new(DomId(0), WindowHandle(1), region, space, Arc::clone(counters))
        .context("a table")
}

/// Worker in the role of the grantee of one guest.
struct IotlbPeer {
    rig: Rig,
    region: RegionShape,
}

impl IotlbPeer {
    /// Sends a packet whose payload is the page's first eight bytes. Returns them as received.
    fn try_read(&mut self, gref: Gref) -> anyhow::Result<Option<u64>> {
        let Some(payload) = self.region.range(gref, 0, 8, DeviceAccess::Read) else {
            return Ok(None);
        };
        self.rig.send(payload, 0)?;
        self.rig.kick(QueueName::Transmit)?;
        if self.is_refused(QueueName::Transmit, gref)? {
            return Ok(None);
        }
        let mut bytes = [0; 8];
        anyhow::ensure!(self.rig.socket.recv(&mut bytes)? == 8, "another packet came");
        Ok(Some(u64::from_ne_bytes(bytes)))
    }

    /// Receives a packet whose payload goes to the page's first eight bytes.
    fn try_write(&mut self, gref: Gref, tag: u64) -> anyhow::Result<()> {
        let Some(payload) = self.region.range(gref, 0, 8, DeviceAccess::Write) else {
            return Ok(());
        };
        self.rig.post(payload, 0)?;
        self.rig.kick(QueueName::Receive)?;
        self.rig.socket.send_to(&tag.to_ne_bytes(), self.rig.inward())?;
        self.is_refused(QueueName::Receive, gref)?;
        Ok(())
    }

    fn is_refused(&mut self, queue: QueueName, gref: Gref) -> anyhow::Result<bool> {
        match self.rig.wait(queue)? {
            Came::Used(used) => {
                let expected = if queue == QueueName::Receive { HEADERS + 8 } else { 0 };
                anyhow::ensure!(used.len as usize == expected, "{used:?}");
                Ok(false)
            }
            Came::Refused(missed) => {
                let address = self.region.address(gref);
                let right = missed.is_none_or(|miss| Some(miss.address) == address);
                anyhow::ensure!(right, "{missed:x?} is not at {address:x?}");
                self.rig.restart()?;
                Ok(true)
            }
        }
    }
}

impl WindowPeer for IotlbPeer {
    fn read(&mut self, gref: Gref) -> Result<Option<u64>, String> {
        self.try_read(gref).map_err(|e| format!("{e:#}"))
    }

    fn write(&mut self, gref: Gref, tag: u64) -> Result<(), String> {
        self.try_write(gref, tag).map_err(|e| format!("{e:#}"))
    }
}

fn conformance() -> anyhow::Result<bool> {
    let (rig, counters) = (Rig::new(0)?, Arc::default());
    let mut guest = table(&rig, GUEST, LEAST, &counters)?;
    let mut neighbour = table(&rig, NEIGHBOUR, LEAST, &counters)?;
    let mut peer = IotlbPeer { rig, region: guest.region() };
    let mut suite = WindowSuite { table: &mut guest, neighbour: &mut neighbour, peer: &mut peer };
    let summary = suite.run(&mut |case| println!("{case}"));
    println!("iotlb: {} passed, {} failed", summary.passed, summary.failed);
    Ok(summary.failed == 0 && summary.passed > 0)
}

/// Issues more pages than the kernel's table has entries; the kernel drops the oldest silently.
fn entries() -> anyhow::Result<()> {
    const MORE: u32 = 4096;
    let (rig, counters) = (Rig::new(0)?, Arc::default());
    let (most, own) = (rig.space.entries(), rig.space.mapped());
    anyhow::ensure!(most > own && most < MORE as usize, "{most} entries, {own} of them ours");
    let window = WindowShape { writable: 0, read_only: MORE, entries: MORE };
    let mut table = table(&rig, GUEST, window, &counters)?;
    let mut issued = 0;
    for (gref, page) in window.grefs().zip(window.pages_for(Access::ReadOnly)) {
        table.memory(page).context("no memory")?.copy_from(0, &page.0.to_ne_bytes())?;
        match table.issue(gref, page, Access::ReadOnly) {
            Ok(()) => issued += 1,
            Err(why) => {
                println!("{why}");
                break;
            }
        }
    }
    anyhow::ensure!(issued + own == most, "{issued} entries were issued");
    let mut peer = IotlbPeer { rig, region: table.region() };
    let grefs: Vec<Gref> = window.grefs().take(issued).collect();
    for gref in [grefs[0], grefs[1], grefs[issued - 1]] {
        let page = u64::from(gref.0 - Gref::FIRST_FREE.0);
        let found = peer.try_read(gref)?;
        anyhow::ensure!(found == Some(page), "under {gref}: {found:?}, not {page}");
    }
    table.revoke(grefs[0])?;
    let (gref, page) = (grefs[0], PageId(MORE - 1));
    table.issue(gref, page, Access::ReadOnly).context("an entry was free")?;
    println!("{issued} pages were issued, {own} entries are the driver's own: {most} in all");
    Ok(())
}

/// Checks that the worker stops at a page that is not issued, and continues once it is.
fn fault_in() -> anyhow::Result<()> {
    let (mut rig, counters) = (Rig::new(0)?, Arc::default());
    let mut table = table(&rig, GUEST, LEAST, &counters)?;
    let page = LEAST.pages_for(Access::ReadOnly).next().context("no page")?;
    for (gref, tag) in LEAST.grefs().zip(0x31u64..) {
        table.prepare(page)?;
        table.memory(page).context("no memory")?.copy_from(0, &tag.to_ne_bytes())?;
        let payload = table.region().range(gref, 0, 8, DeviceAccess::Read).context("no address")?;
        rig.send(payload, 0)?;
        rig.kick(QueueName::Transmit)?;
        let came = rig.wait(QueueName::Transmit)?;
        let Came::Refused(Some(miss)) = came else { anyhow::bail!("{came:x?}, not a miss") };
        let right = miss.address == payload.address() && miss.access == Access::ReadOnly;
        anyhow::ensure!(right, "{miss:x?}");
        table.issue(gref, page, Access::ReadOnly)?;
        let came = rig.wait(QueueName::Transmit)?;
        anyhow::ensure!(matches!(came, Came::Used(_)), "{came:x?}");
        let mut bytes = [0; 8];
        anyhow::ensure!(rig.socket.recv(&mut bytes)? == 8, "another packet came");
        anyhow::ensure!(u64::from_ne_bytes(bytes) == tag, "{bytes:x?}, not {tag:#x}");
        table.revoke(gref)?;
    }
    println!("{} pages were missed, issued then, and sent from", LEAST.entries);
    Ok(())
}

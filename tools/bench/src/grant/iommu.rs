//! Grant operations where an I/O translation table enforces them. The grantee is a device, so there is no
//! look-up, and no page is accessed.

use std::sync::Arc;

use iommu_lab::vfio::{Container, Device, VfioError};
use ringfence_access::iommu::{AddressSpace, RegionShape, RegionTable};
use ringfence_memory::FIRST_IO_ADDRESS;
use ringfence_platform::vhost::{self, VhostError};
use ringfence_platform::{
    Access, Counters, DomId, Gref, PageId, TranslationTable, WindowHandle, WindowShape,
};
use rustix::time::ClockId;

use super::cases::Cost;
use crate::usage::clock;

const PAGES: u32 = 512;
const SHAPE: WindowShape = WindowShape { writable: PAGES, read_only: 0, entries: PAGES };
/// First I/O address: below the limit of IOMMUs with 39 address bits.
const VFIO_BASE: u64 = 0x4000_0000;

/// Names of the operations, and pages of one call.
pub(super) const OPERATIONS: [(&str, u32); 5] = [
    ("issue", 1),
    ("revoke", 1),
    ("fresh again", 1),
    ("revoke by force", 1),
    ("revoke by force", 256),
];

/// Grant table behind an I/O translation table.
pub(super) struct Engine {
    table: RegionTable,
    counters: Arc<Counters>,
    /// Device in the address space, which has no effect without a device.
    _device: Option<Device>,
}

impl Engine {
    /// Creates the engine of kernel vhost.
    pub(super) fn iotlb() -> Result<Engine, VhostError> {
        let space = vhost::bare_space(&vhost::open()?)?;
        let no_table = |source| VhostError::Setting { what: "memory for a table", source };
        Engine::new(space, None, FIRST_IO_ADDRESS).map_err(no_table)
    }

    /// Creates the engine of the machine's IOMMU, for a device that VFIO owns.
    pub(super) fn vfio(device: &str) -> Result<Engine, VfioError> {
        let (space, device) = Container::open(device)?;
        let no_table = |source| VfioError::Step { what: "memory for a table", source };
        Engine::new(Arc::new(space), Some(device), VFIO_BASE).map_err(no_table)
    }

    fn new(
        space: Arc<dyn AddressSpace>,
        device: Option<Device>,
        base: u64,
    ) -> std::io::Result<Engine> {
        let counters = Arc::<Counters>::default();
        let region = RegionShape { base, window: SHAPE, page: 4096 };
        let (handle, system) = (WindowHandle(1), Arc::clone(&counters));
        let table = RegionTable::new(DomId(0), handle, region, space, system)?;
        Ok(Engine { table, counters, _device: device })
    }

    pub(super) fn name(&self) -> &'static str {
        self.table.engine().name
    }

    /// Returns the median cost of all rounds.
    pub(super) fn median(
        &mut self,
        operation: &str,
        pages: u32,
        rounds: u32,
    ) -> anyhow::Result<Cost> {
        let mut costs = Vec::new();
        for round in 0..=rounds {
            let cost = self.round(operation, pages)?;
            // The first round is a warm-up.
            if round > 0 {
                costs.push(cost);
            }
        }
        costs.sort_by(|a, b| a.ns.total_cmp(&b.ns));
        Ok(costs[costs.len() / 2])
    }

    fn round(&mut self, operation: &str, pages: u32) -> anyhow::Result<Cost> {
        let grefs: Vec<Gref> = SHAPE.grefs().collect();
        let issue = |engine: &mut Engine| -> anyhow::Result<()> {
            for (gref, page) in grefs.iter().zip(0..) {
                engine.table.issue(*gref, PageId(page), Access::ReadWrite)?;
            }
            Ok(())
        };
        let revoke = |engine: &mut Engine| -> anyhow::Result<()> {
            for gref in &grefs {
                engine.table.revoke(*gref)?;
            }
            Ok(())
        };
        let cost = match operation {
            "issue" => {
                let cost = self.timed(issue)?;
                revoke(self)?;
                cost
            }
            "revoke" => {
                issue(self)?;
                self.timed(revoke)?
            }
            "fresh again" => {
                issue(self)?;
                revoke(self)?;
                self.timed(|engine| Ok(engine.table.scrub().map(|_| ())?))?
            }
            _ => {
                issue(self)?;
                self.timed(|engine| {
                    for some in grefs.chunks(pages as usize) {
                        engine.table.revoke_forced(some)?;
                    }
                    Ok(())
                })?
            }
        };
        self.table.scrub()?;
        Ok(cost)
    }

    /// Times an operation applied to every page.
    fn timed(
        &mut self,
        part: impl FnOnce(&mut Engine) -> anyhow::Result<()>,
    ) -> anyhow::Result<Cost> {
        let syscalls = self.counters.values().syscalls;
        let began = clock(ClockId::ThreadCPUTime);
        part(self)?;
        let ns = clock(ClockId::ThreadCPUTime) - began;
        let syscalls = self.counters.values().syscalls - syscalls;
        let per_page = |n: u64| n as f64 / f64::from(PAGES);
        Ok(Cost { ns: per_page(ns), syscalls: per_page(syscalls) })
    }
}

//! Operations of the grant benchmark, one for each row.

use anyhow::Context;
use ringfence_access::window::EngineFacts;
use ringfence_platform::local::{ArenaShape, LocalGrantee, LocalGranter, LocalPlatform};
use ringfence_platform::{
    Access, CopyOps, DomId, Grantee, Granter, Gref, Lease, PageId, Platform, TranslationTable,
    WindowPlace, WindowShape, WindowView,
};
use rustix::time::ClockId;

use crate::hub::RunningHub;
use crate::usage::clock;

/// Pages of each kind, and entries of the window.
const PAGES: u32 = 512;
const SHAPE: WindowShape = WindowShape { writable: PAGES, read_only: 0, entries: PAGES };
/// Pages of a batch call.
const BATCH: u32 = 32;

/// Operation of one row.
#[derive(Clone, Copy)]
pub(crate) struct GrantCase {
    pub(crate) operation: &'static str,
    pub(crate) engine: &'static str,
    pub(crate) pages: u32,
    run: fn(&mut Bench, &mut Timer) -> anyhow::Result<()>,
}

const fn window(
    operation: &'static str,
    pages: u32,
    run: fn(&mut Bench, &mut Timer) -> anyhow::Result<()>,
) -> GrantCase {
    GrantCase { operation, engine: "window", pages, run }
}

const fn grants(
    operation: &'static str,
    pages: u32,
    run: fn(&mut Bench, &mut Timer) -> anyhow::Result<()>,
) -> GrantCase {
    GrantCase { operation, engine: "grants", pages, run }
}

/// Operations of all rows.
pub(crate) const ALL: &[GrantCase] = &[
    window("issue", 1, |b, t| b.issue_and_revoke(t, Part::Issue)),
    window("revoke", 1, |b, t| b.issue_and_revoke(t, Part::Revoke)),
    window("fresh again", 1, |b, t| b.fresh_again(t, 1)),
    window("fresh again", 256, |b, t| b.fresh_again(t, 256)),
    window("look up", 1, |b, t| b.look_up(t, 1)),
    window("look up", BATCH, |b, t| b.look_up(t, BATCH)),
    window("revoke by force", 1, |b, t| b.forced(t, 1)),
    window("revoke by force", 256, |b, t| b.forced(t, 256)),
    window("revoke by force, mapped a lot", 1, |b, t| b.forced_much_mapped(t)),
    grants("lend", 1, |b, t| b.lend_and_take_back(t, Part::Issue)),
    grants("take back", 1, |b, t| b.lend_and_take_back(t, Part::Revoke)),
    grants("map", 1, |b, t| b.map(t, 1, Part::Issue)),
    grants("unmap", 1, |b, t| b.map(t, 1, Part::Revoke)),
    grants("map", BATCH, |b, t| b.map(t, BATCH, Part::Issue)),
    grants("unmap", BATCH, |b, t| b.map(t, BATCH, Part::Revoke)),
    grants("copy 64 octets", 1, |b, t| b.copy(t, 64, 1)),
    grants("copy 4096 octets", 1, |b, t| b.copy(t, 4096, 1)),
    grants("copy 4096 octets", BATCH, |b, t| b.copy(t, 4096, BATCH)),
    grants("look up (kept)", 1, Bench::kept),
];

/// Half of a pair of operations that is timed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Issue,
    Revoke,
}

/// Cost of an operation for each page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    pub(crate) ns: f64,
    pub(crate) syscalls: f64,
}

/// Sum of the timed parts of a round.
#[derive(Default)]
struct Timer {
    ns: u64,
    syscalls: u64,
    pages: u64,
}

/// Two domains with a window and an ordinary arena between them.
pub(crate) struct Bench {
    rounds: u32,
    mappings: u32,
    table: Box<dyn TranslationTable>,
    view: WindowView,
    granter: LocalGranter,
    grantee: LocalGrantee,
    guest: LocalPlatform,
    driver: LocalPlatform,
    _hub: RunningHub,
}

impl Bench {
    /// Creates both domains. `rounds` are those of each [`Bench::median`], `mappings` those of the rows that map often.
    pub(crate) fn new(rounds: u32, mappings: u32) -> anyhow::Result<Bench> {
        let hub = RunningHub::start()?;
        let driver = LocalPlatform::connect(hub.0.admit(Some(DomId(0)), true)?.1)?;
        let guest = LocalPlatform::connect(hub.0.admit(None, false)?.1)?
            .with_arena(ArenaShape::of(PAGES, PAGES));
        let table = guest.window(DomId(0), SHAPE)?;
        let EngineFacts { one_sided, .. } = table.engine();
        anyhow::ensure!(one_sided, "the engine is not the one to be measured");
        let view = driver.open_window(guest.domid(), table.handle(), PAGES)?;
        let granter = guest.granter(DomId(0))?;
        let grantee = driver.grantee(guest.domid())?;
        Ok(Bench { rounds, mappings, table, view, granter, grantee, guest, driver, _hub: hub })
    }

    /// Returns the median cost of all rounds.
    pub(crate) fn median(&mut self, case: &GrantCase) -> anyhow::Result<Cost> {
        let mut costs = Vec::new();
        for round in 0..=self.rounds {
            let mut timer = Timer::default();
            (case.run)(self, &mut timer).with_context(|| case.operation.to_owned())?;
            let per_page = |n: u64| n as f64 / timer.pages.max(1) as f64;
            // The first round is a warm-up.
            if round > 0 {
                costs.push(Cost { ns: per_page(timer.ns), syscalls: per_page(timer.syscalls) });
            }
        }
        costs.sort_by(|a, b| a.ns.total_cmp(&b.ns));
        Ok(costs[costs.len() / 2])
    }

    fn syscalls(&self) -> u64 {
        self.guest.counters().values().syscalls + self.driver.counters().values().syscalls
    }

    /// Times `part`, which handles this many pages.
    fn timed<T>(
        &mut self,
        timer: &mut Timer,
        pages: u32,
        part: impl FnOnce(&mut Self) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let syscalls = self.syscalls();
        let began = clock(ClockId::ThreadCPUTime);
        let outcome = part(self)?;
        timer.ns += clock(ClockId::ThreadCPUTime) - began;
        timer.syscalls += self.syscalls() - syscalls;
        timer.pages += u64::from(pages);
        Ok(outcome)
    }

    fn issue(&mut self, pages: u32) -> anyhow::Result<()> {
        for (gref, page) in SHAPE.grefs().zip(0..pages) {
            self.table.issue(gref, PageId(page), Access::ReadWrite)?;
        }
        Ok(())
    }

    fn revoke(&mut self, pages: u32) -> anyhow::Result<()> {
        for (gref, _) in SHAPE.grefs().zip(0..pages) {
            self.table.revoke(gref)?;
        }
        Ok(())
    }

    /// Accesses the pages on both sides, so that both have them mapped.
    fn touch(&mut self, pages: u32) -> anyhow::Result<()> {
        let mut found = Vec::new();
        let wanted = SHAPE.grefs().map(|gref| (gref, Access::ReadWrite));
        self.view.begin(wanted.take(pages as usize), &mut found);
        for ((gref, place), page) in SHAPE.grefs().zip(found).zip(0..) {
            let place = place.map_err(|status| anyhow::anyhow!("{gref}: {status}"))?;
            let (memory, offset) = self.view.memory(place);
            memory.copy_from(offset, &[1])?;
            let own = self.table.memory(PageId(page)).context("a page of the window")?;
            own.copy_from(0, &[1])?;
            self.view.end(gref);
        }
        Ok(())
    }

    fn issue_and_revoke(&mut self, timer: &mut Timer, part: Part) -> anyhow::Result<()> {
        match part {
            Part::Issue => {
                self.timed(timer, PAGES, |b| b.issue(PAGES))?;
                self.revoke(PAGES)?;
            }
            Part::Revoke => {
                self.issue(PAGES)?;
                self.touch(PAGES)?;
                self.timed(timer, PAGES, |b| b.revoke(PAGES))?;
            }
        }
        self.table.scrub()?;
        Ok(())
    }

    fn fresh_again(&mut self, timer: &mut Timer, at_once: u32) -> anyhow::Result<()> {
        for _ in 0..PAGES / at_once {
            self.issue(at_once)?;
            self.touch(at_once)?;
            self.revoke(at_once)?;
            self.timed(timer, at_once, |b| Ok(b.table.scrub()?))?;
        }
        Ok(())
    }

    fn look_up(&mut self, timer: &mut Timer, at_once: u32) -> anyhow::Result<()> {
        self.issue(PAGES)?;
        let grefs: Vec<Gref> = SHAPE.grefs().collect();
        let mut found: Vec<Result<WindowPlace, _>> = Vec::with_capacity(PAGES as usize);
        self.timed(timer, PAGES * 8, |b| {
            for batch in core::iter::repeat_n(grefs.chunks(at_once as usize), 8).flatten() {
                found.clear();
                b.view.begin(batch.iter().map(|gref| (*gref, Access::ReadWrite)), &mut found);
                batch.iter().for_each(|gref| b.view.end(*gref));
            }
            Ok(())
        })?;
        anyhow::ensure!(found.iter().all(Result::is_ok), "a page was not found");
        self.revoke(PAGES)?;
        self.table.scrub()?;
        Ok(())
    }

    fn forced(&mut self, timer: &mut Timer, at_once: u32) -> anyhow::Result<()> {
        let grefs: Vec<Gref> = SHAPE.grefs().take(at_once as usize).collect();
        for _ in 0..PAGES / at_once {
            self.issue(at_once)?;
            self.touch(at_once)?;
            self.timed(timer, at_once, |b| Ok(b.table.revoke_forced(&grefs)?))?;
        }
        Ok(())
    }

    fn forced_much_mapped(&mut self, timer: &mut Timer) -> anyhow::Result<()> {
        let open = |b: &Bench| b.driver.open_window(b.guest.domid(), b.table.handle(), PAGES);
        let mut views = (0..self.mappings).map(|_| open(self)).collect::<Result<Vec<_>, _>>()?;
        for _ in 0..4 {
            self.issue(1)?;
            self.touch(1)?;
            let first = Gref::FIRST_FREE;
            for view in &mut views {
                let mut found = Vec::new();
                view.begin([(first, Access::ReadWrite)].into_iter(), &mut found);
                if let [Ok(place)] = found[..] {
                    let (memory, offset) = view.memory(place);
                    memory.copy_from(offset, &[1])?;
                }
                view.end(first);
            }
            self.timed(timer, 1, |b| Ok(b.table.revoke_forced(&[first])?))?;
        }
        Ok(())
    }

    fn lend(&mut self, pages: u32) -> anyhow::Result<Vec<Lease>> {
        let lent = (0..pages).map(|_| self.granter.lend(Access::ReadWrite));
        Ok(lent.collect::<Result<Vec<_>, _>>()?)
    }

    fn take_back(&mut self, leases: Vec<Lease>) -> anyhow::Result<()> {
        for lease in leases {
            self.granter.take_back(lease).map_err(|still| anyhow::anyhow!("{still}"))?;
        }
        Ok(())
    }

    fn lend_and_take_back(&mut self, timer: &mut Timer, part: Part) -> anyhow::Result<()> {
        if part == Part::Issue {
            let leases = self.timed(timer, PAGES, |b| b.lend(PAGES))?;
            return self.take_back(leases);
        }
        let leases = self.lend(PAGES)?;
        self.timed(timer, PAGES, |b| b.take_back(leases))
    }

    fn map(&mut self, timer: &mut Timer, at_once: u32, part: Part) -> anyhow::Result<()> {
        let leases = self.lend(PAGES)?;
        let wanted: Vec<_> = leases.iter().map(|l| (l.gref(), Access::ReadWrite)).collect();
        for batch in wanted.chunks(at_once as usize) {
            let mapping = |b: &mut Bench| {
                let mut pages = Vec::with_capacity(batch.len());
                b.grantee.map(batch, &mut pages);
                for page in &pages {
                    let page = page.as_ref().map_err(|status| anyhow::anyhow!("map: {status}"))?;
                    page.copy_from(0, &[1])?;
                }
                Ok(pages)
            };
            if part == Part::Issue {
                drop(self.timed(timer, at_once, mapping)?);
            } else {
                let pages = mapping(self)?;
                self.timed(timer, at_once, |_| {
                    drop(pages);
                    Ok(())
                })?;
            }
        }
        self.take_back(leases)
    }

    fn copy(&mut self, timer: &mut Timer, bytes: usize, at_once: u32) -> anyhow::Result<()> {
        let leases = self.lend(PAGES)?;
        let mut room = vec![0; bytes * at_once as usize];
        let mut ops = CopyOps::new();
        for batch in leases.chunks(at_once as usize) {
            self.timed(timer, at_once, |b| {
                let mut list = ops.begin();
                for (lease, into) in batch.iter().zip(room.chunks_exact_mut(bytes)) {
                    list.read(lease.gref(), 0, into)?;
                }
                b.grantee.copy(list);
                Ok(())
            })?;
        }
        self.take_back(leases)
    }

    fn kept(&mut self, timer: &mut Timer) -> anyhow::Result<()> {
        use ringfence_access::staging::{StagedPage, StagingTable};
        let leases = self.lend(PAGES)?;
        let mut table = StagingTable::new();
        let mut pages = Vec::new();
        for lease in &leases {
            let (gref, access) = (lease.gref(), lease.access());
            let memory = self.grantee.keep(gref, access);
            let memory = memory.map_err(|status| anyhow::anyhow!("{gref}: {status}"))?;
            pages.push(StagedPage { gref, access, memory });
        }
        table.add(pages).map_err(|(_, why)| why)?;
        let mut bytes = 0;
        self.timed(timer, PAGES * 8, |_| {
            for lease in core::iter::repeat_n(&leases, 8).flatten() {
                let page = table.get(std::hint::black_box(lease.gref()), Access::ReadWrite);
                bytes += std::hint::black_box(page.map_or(0, |page| page.len()));
            }
            Ok(())
        })?;
        anyhow::ensure!(bytes == PAGES as usize * 8 * 4096, "a page was not found");
        drop(table);
        self.take_back(leases)
    }
}

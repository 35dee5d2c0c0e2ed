//! Engines `vfio` and `iommufd`: a device accesses granted pages and no others.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use iommu_lab::vfio::{Container, Interface, Strictness, VfioError, group_of, strictness};
use ringfence_access::iommu::{AddressSpace, RegionShape, RegionTable};
use ringfence_memory::{LentSlice, Mapping, PAGE_SIZE};
use ringfence_platform::{Access, DomId, Gref, PageId, TranslationTable, WindowHandle};
use ringfence_testkit::conformance::windows::{LEAST, WindowPeer, WindowSuite};

use crate::edu::{Edu, LONGEST};
use crate::kernel_log::KernelLog;

/// First I/O addresses of the driver domain's own region and those of two guests.
const OWN: u64 = 0x1000_0000;
const GUEST: u64 = 0x4000_0000;
const NEIGHBOUR: u64 = 0x5000_0000;

/// Content of the device's buffer before a transfer into it.
const MARK: u64 = 0x6d61_726b_6d61_726b;

/// Interval after which the kernel logs again: it logs at most ten IOMMU messages in five seconds.
const SILENCE: Duration = Duration::from_secs(6);

/// Trial of the engine.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Trial {
    /// Every case of the conformance suite of translation tables
    Conformance,
    /// An access after its revocation is refused by the IOMMU, and the kernel names its address
    Fault,
    /// A page revoked while the device writes to it holds the whole transfer or nothing
    InFlight,
    /// The kernel was started so that unmapping takes effect at once
    Strict,
    /// A device has one user, and a second one gets an error that says so
    Twice,
}

/// Kernel interface. `best` must choose the newer one if both exist.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum By {
    /// Type1 interface of VFIO
    Type1,
    /// Device files with iommufd
    Iommufd,
    /// Interface that the product would choose
    Best,
}

impl By {
    fn interface(self, device: &str) -> Interface {
        match self {
            By::Type1 => Interface::Type1,
            By::Iommufd => Interface::Iommufd,
            By::Best => Interface::best(device),
        }
    }
}

struct Bench {
    container: Arc<Container>,
    edu: Edu,
    own: LentSlice,
}

impl Bench {
    fn open(device: &str, by: By) -> anyhow::Result<Bench> {
        let (container, file) = Container::open_by(by.interface(device), device)?;
        let edu = Edu::new(file)?;
        let own = Mapping::private(PAGE_SIZE).context("a page")?.lent();
        container.map(OWN, &own, Access::ReadWrite).context("the driver domain's own page")?;
        Ok(Bench { container: Arc::new(container), edu, own })
    }

    fn table(&self, base: u64) -> anyhow::Result<RegionTable> {
        let region = RegionShape { base, window: LEAST, page: 4096 };
        let space = Arc::clone(&self.container) as Arc<dyn AddressSpace>;
        RegionTable::new(DomId(0), WindowHandle(1), region, space, Arc::default())
            .context("a table")
    }

    /// Fills the device's buffer with the first `len` bytes of the driver domain's page.
    fn load(&self, len: usize) -> anyhow::Result<()> {
        self.edu.fetch(OWN, len)
    }

    /// Returns the eight bytes that the device reads at `address`; `None` if the access is refused.
    fn read(&self, address: u64) -> anyhow::Result<Option<u64>> {
        self.own.copy_from(0, &MARK.to_ne_bytes())?;
        self.load(8)?;
        self.edu.fetch(address, 8)?;
        self.edu.store(OWN, 8)?;
        let found = word(&self.own)?;
        Ok((found != MARK && found != 0).then_some(found))
    }

    fn write(&self, address: u64, tag: u64) -> anyhow::Result<()> {
        self.own.copy_from(0, &tag.to_ne_bytes())?;
        self.load(8)?;
        self.edu.store(address, 8)
    }
}

/// Returns the first eight bytes of a page.
fn word(page: &LentSlice) -> anyhow::Result<u64> {
    let mut bytes = [0; 8];
    page.copy_to(0, &mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Device in the role of the grantee of one guest.
struct VfioPeer<'a> {
    bench: &'a Bench,
    region: RegionShape,
}

impl WindowPeer for VfioPeer<'_> {
    fn read(&mut self, gref: Gref) -> Result<Option<u64>, String> {
        let Some(address) = self.region.address(gref) else { return Ok(None) };
        self.bench.read(address).map_err(|e| format!("{e:#}"))
    }

    fn write(&mut self, gref: Gref, tag: u64) -> Result<(), String> {
        let Some(address) = self.region.address(gref) else { return Ok(()) };
        self.bench.write(address, tag).map_err(|e| format!("{e:#}"))
    }
}

/// Runs a trial on `device`. Returns `true` if it passed.
pub(crate) fn run(device: &str, trial: Trial, by: By) -> anyhow::Result<bool> {
    match trial {
        Trial::Strict => match strictness(group_of(device)?) {
            Strictness::Strict => println!("the IOMMU is strict"),
            Strictness::Lazy(why) => anyhow::bail!(why),
        },
        Trial::Conformance => return conformance(&Bench::open(device, by)?),
        Trial::Fault => fault(&Bench::open(device, by)?)?,
        Trial::InFlight => in_flight(&Bench::open(device, by)?)?,
        Trial::Twice => twice(device, by)?,
    }
    Ok(true)
}

fn conformance(bench: &Bench) -> anyhow::Result<bool> {
    let (mut table, mut neighbour) = (bench.table(GUEST)?, bench.table(NEIGHBOUR)?);
    let mut peer = VfioPeer { bench, region: table.region() };
    let mut suite = WindowSuite { table: &mut table, neighbour: &mut neighbour, peer: &mut peer };
    let summary = suite.run(&mut |case| println!("{case}"));
    let engine = bench.container.engine().name;
    println!("{engine}: {} passed, {} failed", summary.passed, summary.failed);
    Ok(summary.failed == 0 && summary.passed > 0)
}

fn twice(device: &str, by: By) -> anyhow::Result<()> {
    let first = Bench::open(device, by)?;
    match Bench::open(device, by) {
        Ok(_) => anyhow::bail!("a device that has a user was opened"),
        Err(error) => {
            let busy = matches!(error.downcast_ref(), Some(VfioError::Busy { .. }));
            anyhow::ensure!(busy, "it was said wrongly: {error:#}");
            println!("{error}");
        }
    }
    drop(first);
    // The last user has closed the device and all mappings.
    Bench::open(device, by).map(|_| ())
}

fn fault(bench: &Bench) -> anyhow::Result<()> {
    let mut table = bench.table(GUEST)?;
    let mut neighbour = bench.table(NEIGHBOUR)?;
    let (gref, page) = (Gref::FIRST_FREE, PageId(0));
    let read_only = table.shape().pages_for(Access::ReadOnly).next().context("no page")?;
    let second = Gref(gref.0 + 1);
    neighbour.issue(second, PageId(0), Access::ReadWrite)?;
    table.issue(gref, page, Access::ReadWrite)?;
    let at = table.region().address(gref).context("no address")?;
    bench.write(at, 1)?;
    let memory = table.memory(page).context("no memory")?;
    anyhow::ensure!(word(&memory)? == 1, "the device does not reach what it was granted");
    std::thread::sleep(SILENCE);
    let mut log = KernelLog::open()?;
    anyhow::ensure!(log.faults()?.is_empty(), "the log was not empty");

    table.revoke(gref)?;
    bench.write(at, 2)?;
    anyhow::ensure!(word(&memory)? == 1, "the device wrote after the revocation");
    expect(&mut log, at, "writing what was revoked")?;
    table.issue(second, read_only, Access::ReadOnly)?;
    let at = table.region().address(second).context("no address")?;
    bench.write(at, 3)?;
    let memory = table.memory(read_only).context("no memory")?;
    anyhow::ensure!(word(&memory)? == 0, "the device wrote what it may read");
    expect(&mut log, at, "writing what was granted for reading")?;
    table.revoke(second)?;
    anyhow::ensure!(bench.read(at)?.is_none(), "the device read what it was not granted");
    expect(&mut log, at, "reading what was revoked")?;
    // The other guest's page under that reference stayed accessible at its own address.
    let beside = neighbour.region().address(second).context("no address")?;
    bench.write(beside, 4)?;
    let theirs = neighbour.memory(PageId(0)).context("no memory")?;
    anyhow::ensure!(word(&theirs)? == 4, "the neighbour's own grant does not hold");
    Ok(())
}

/// Fails unless the kernel logs exactly `address`.
fn expect(log: &mut KernelLog, address: u64, what: &str) -> anyhow::Result<()> {
    let faults = log.faults()?;
    anyhow::ensure!(
        !faults.is_empty() && faults.iter().all(|fault| *fault == address),
        "{what} at {address:#x}: the kernel's log has {faults:x?}"
    );
    println!("{what}: the IOMMU refused {address:#x}");
    Ok(())
}

fn in_flight(bench: &Bench) -> anyhow::Result<()> {
    const NEW: u8 = 0xa5;
    let mut table = bench.table(GUEST)?;
    let (gref, page) = (Gref::FIRST_FREE, PageId(0));
    let at = table.region().address(gref).context("no address")?;
    let (mut old, mut new) = (0, 0);
    for delay in [0, 50, 90, 95, 100, 105, 110, 120, 200] {
        table.prepare(page)?;
        table.issue(gref, page, Access::ReadWrite)?;
        bench.own.copy_from(0, &[NEW; PAGE_SIZE])?;
        bench.load(LONGEST)?;
        bench.edu.start_store(at, LONGEST)?;
        std::thread::sleep(Duration::from_millis(delay));
        table.revoke(gref)?;
        let mut then = vec![0; LONGEST];
        let memory = table.memory(page).context("no memory")?;
        memory.copy_to(0, &mut then)?;
        bench.edu.wait()?;
        let mut later = vec![0; LONGEST];
        memory.copy_to(0, &mut later)?;
        anyhow::ensure!(then == later, "after {delay} ms: the page changed after its revocation");
        match (later.iter().all(|b| *b == 0), later.iter().all(|b| *b == NEW)) {
            (true, false) => old += 1,
            (false, true) => new += 1,
            _ => anyhow::bail!("after {delay} ms: a part of the page was written"),
        }
    }
    println!("revoked in flight: {old} times nothing was written, {new} times all");
    anyhow::ensure!(old > 0, "no revocation came before the device's write");
    Ok(())
}

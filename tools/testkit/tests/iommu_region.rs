//! A region table over an address space that is only a list in memory.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};

use ringfence_access::iommu::{AddressSpace, RegionShape, RegionTable};
use ringfence_memory::{DeviceAccess, DeviceRegion, LentSlice, PAGE_SIZE};
use ringfence_platform::window::{EngineFacts, IssueError};
use ringfence_platform::{
    Access, DomId, Gref, PageId, RevokeError, TranslationTable, WindowHandle, WindowShape,
};
use ringfence_testkit::conformance::Outcome;
use ringfence_testkit::conformance::windows::{LEAST, WindowPeer, WindowSuite};

/// Address space in memory: the pages that are mapped, and a switch that makes each call fail.
#[derive(Default)]
struct List {
    mapped: Mutex<BTreeMap<u64, (LentSlice, Access)>>,
    refuses: Mutex<bool>,
}

impl AddressSpace for List {
    fn engine(&self) -> EngineFacts {
        EngineFacts { name: "list", one_sided: true, in_flight: "none", cost: "none" }
    }

    fn map(&self, address: u64, memory: &LentSlice, access: Access) -> io::Result<()> {
        if *self.refuses.lock().unwrap() {
            return Err(rustix::io::Errno::NOSPC.into());
        }
        assert_eq!(memory.len(), PAGE_SIZE);
        let before = self.mapped.lock().unwrap().insert(address, (memory.clone(), access));
        assert!(before.is_none(), "{address:#x} is mapped already");
        Ok(())
    }

    fn map_region(&self, _: u64, _: &DeviceRegion, _: Access) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn unmap(&self, address: u64) -> io::Result<()> {
        if *self.refuses.lock().unwrap() {
            return Err(rustix::io::Errno::IO.into());
        }
        self.mapped
            .lock()
            .unwrap()
            .remove(&address)
            .map(drop)
            .ok_or(rustix::io::Errno::NOENT.into())
    }
}

/// Device that reaches the pages of the list.
struct Device<'a> {
    space: &'a List,
    region: RegionShape,
}

impl WindowPeer for Device<'_> {
    fn read(&mut self, gref: Gref) -> Result<Option<u64>, String> {
        let address = self.region.address(gref);
        let mapped = self.space.mapped.lock().unwrap();
        let found = address.and_then(|address| mapped.get(&address));
        Ok(found.map(|(memory, _)| memory.load_u64(0, SeqCst).unwrap()))
    }

    fn write(&mut self, gref: Gref, tag: u64) -> Result<(), String> {
        let address = self.region.address(gref);
        let mapped = self.space.mapped.lock().unwrap();
        if let Some((memory, Access::ReadWrite)) = address.and_then(|at| mapped.get(&at)) {
            memory.store_u64(0, tag, SeqCst).unwrap();
        }
        Ok(())
    }
}

fn table(space: &Arc<List>, base: u64) -> RegionTable {
    let region = RegionShape { base, window: LEAST, page: 4096 };
    let space = Arc::clone(space) as Arc<dyn AddressSpace>;
    RegionTable::new(DomId(0), WindowHandle(1), region, space, Arc::default()).unwrap()
}

#[test]
fn region_table_passes_window_conformance_suite() {
    let space = Arc::new(List::default());
    let (mut one, mut other) = (table(&space, 1 << 32), table(&space, 1 << 33));
    let mut peer = Device { space: &space, region: one.region() };
    let mut suite = WindowSuite { table: &mut one, neighbour: &mut other, peer: &mut peer };
    let summary = suite.run(&mut |case| assert_eq!(case.outcome, Outcome::Passed, "{}", case.name));
    assert_eq!((summary.failed, summary.skipped), (0, 0));
    assert!(summary.passed >= 14);
}

#[test]
fn operation_refused_by_kernel_leaves_table_unchanged() {
    let space = Arc::new(List::default());
    let mut table = table(&space, 0x1000);
    let gref = Gref::FIRST_FREE;
    *space.refuses.lock().unwrap() = true;
    let refused = table.issue(gref, PageId(0), Access::ReadWrite);
    assert_eq!(refused, Err(IssueError::System(rustix::io::Errno::NOSPC.raw_os_error())));
    *space.refuses.lock().unwrap() = false;
    table.issue(gref, PageId(0), Access::ReadWrite).unwrap();
    *space.refuses.lock().unwrap() = true;
    let refused = RevokeError::System(rustix::io::Errno::IO.raw_os_error());
    assert_eq!(table.revoke(gref), Err(refused));
    assert_eq!(table.revoke_forced(&[gref]), Err(refused));
    assert_eq!(table.prepare(PageId(0)), Err(RevokeError::Busy), "the device has it still");
    *space.refuses.lock().unwrap() = false;
    assert_eq!(table.revoke(gref), Ok(PageId(0)));
    drop(table);
    assert!(space.mapped.lock().unwrap().is_empty());
}

#[test]
fn region_with_invalid_shape_is_refused() {
    let space: Arc<dyn AddressSpace> = Arc::new(List::default());
    for (base, window) in [
        (7, LEAST),
        (u64::MAX - 0xfff, LEAST),
        (0, WindowShape { writable: 0, read_only: 0, entries: 1 }),
        (0, WindowShape { entries: 0, ..LEAST }),
    ] {
        let region = RegionShape { base, window, page: 4096 };
        let made =
            RegionTable::new(DomId(0), WindowHandle(1), region, Arc::clone(&space), Arc::default());
        assert!(made.is_err(), "{region:?}");
    }
}

#[test]
fn gref_outside_region_has_no_address() {
    let region = RegionShape { base: 0x10_0000, window: LEAST, page: 4096 };
    let first = Gref::FIRST_FREE.0;
    assert_eq!(region.address(Gref(first)), Some(0x10_0000 + u64::from(first) * 4096));
    assert_eq!(region.address(Gref(first + LEAST.entries)), None);
    assert_eq!(region.address(Gref(0)), None);
    assert_eq!(region.address(Gref(u32::MAX)), None);
}

#[test]
fn area_pages_are_mapped_whole_and_keep_content_after_revocation() {
    #[derive(Default)]
    struct Ranges(Mutex<BTreeMap<u64, (u64, u64, Access)>>);
    impl AddressSpace for Ranges {
        fn engine(&self) -> EngineFacts {
            EngineFacts { name: "ranges", one_sided: true, in_flight: "none", cost: "none" }
        }
        fn map_region(&self, at: u64, memory: &DeviceRegion, access: Access) -> io::Result<()> {
            self.0.lock().unwrap().insert(at, (memory.address(), memory.len(), access));
            Ok(())
        }
        fn unmap(&self, at: u64) -> io::Result<()> {
            self.0.lock().unwrap().remove(&at).map(drop).ok_or(rustix::io::Errno::NOENT.into())
        }
    }
    let mut area = ringfence_memory::SendArea::new(6 * 4096).unwrap();
    let window = WindowShape { writable: 0, read_only: 3, entries: 2 };
    let region = RegionShape { base: ringfence_memory::FIRST_IO_ADDRESS, window, page: 8192 };
    let space = Arc::new(Ranges::default());
    let make = |region: RegionShape| {
        let space = Arc::clone(&space) as Arc<dyn AddressSpace>;
        RegionTable::over(DomId(0), region, area.device_region(), space, Arc::default())
    };
    for wrong in [
        RegionShape { page: 4095, ..region },
        RegionShape { page: 0, ..region },
        RegionShape { window: WindowShape { read_only: 4, ..window }, ..region },
        RegionShape { window: WindowShape { writable: 1, read_only: 2, ..window }, ..region },
    ] {
        assert!(make(wrong).is_err(), "{wrong:?}");
    }
    let mut table = make(region).unwrap();
    let gref = Gref::FIRST_FREE;
    area.bytes_mut().fill(7);
    table.issue(gref, PageId(2), Access::ReadOnly).unwrap();
    let address = region.address(gref).unwrap();
    let expected = (area.device_region().address() + 4 * 4096, 8192, Access::ReadOnly);
    assert_eq!(space.0.lock().unwrap().get(&address), Some(&expected));
    let part = region.range(gref, 8000, 192, DeviceAccess::Read).unwrap();
    assert_eq!((part.address(), part.len()), (address + 8000, 192));
    assert_eq!(region.range(gref, 8000, 193, DeviceAccess::Read), None);
    assert_eq!(region.range(gref, u32::MAX, 1, DeviceAccess::Read), None);
    assert_eq!(region.range(Gref(gref.0 + 2), 0, 1, DeviceAccess::Read), None);
    // An address of user space cannot be an I/O address, so the region names none.
    let low = RegionShape { base: 1 << 32, ..region };
    assert_eq!(low.range(gref, 0, 1, DeviceAccess::Read), None);
    assert_eq!(table.revoke(gref), Ok(PageId(2)));
    table.prepare(PageId(2)).unwrap();
    assert!(table.memory(PageId(2)).is_none() && area.bytes().iter().all(|b| *b == 7));
    table.issue(gref, PageId(2), Access::ReadOnly).unwrap();
    drop(table);
    assert!(space.0.lock().unwrap().is_empty());
}

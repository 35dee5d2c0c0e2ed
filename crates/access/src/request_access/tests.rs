//! Tests of the uses of a request's pages in each mode, with real grants of the local platform.

use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};
use ringfence_platform::local::{LocalGrantee, LocalGranter, LocalPlatform};
use ringfence_platform::{
    Granter, Lease, PageId, Platform, RevokeError, TranslationTable, WindowShape,
};

use super::*;
use crate::window::mark;

/// Guest with a granter, and a backend.
struct Pair {
    hub: HubHandle,
    thread: Option<std::thread::JoinHandle<std::io::Result<()>>>,
    guest: LocalPlatform,
    backend: LocalPlatform,
    granter: LocalGranter,
}

impl Pair {
    fn new() -> Pair {
        let (hub, handle) = Hub::new(HubLimits::default()).unwrap();
        let thread = std::thread::spawn(move || hub.run());
        let connect = || LocalPlatform::connect(handle.admit(None, false).unwrap().1).unwrap();
        let (guest, backend) = (connect(), connect());
        let granter = guest.granter(backend.domid()).unwrap();
        Pair { hub: handle, thread: Some(thread), guest, backend, granter }
    }

    fn access(&self, mode: Mode, keeps: Option<PersistentLimits>) -> RequestAccess<LocalGrantee> {
        RequestAccess::new(self.backend.grantee(self.guest.domid()).unwrap(), mode, keeps)
    }

    fn lend(&mut self, count: usize) -> Vec<Lease> {
        (0..count).map(|_| self.granter.lend(Access::ReadWrite).unwrap()).collect()
    }

    /// Takes every page back once. Returns those that the backend uses.
    fn take_back(&mut self, leases: Vec<Lease>) -> Vec<Lease> {
        let tries = leases.into_iter().map(|lease| self.granter.take_back(lease));
        let busy = tries.filter_map(Result::err).inspect(|still| {
            assert_eq!(still.why, RevokeError::Busy);
        });
        busy.map(|still| still.lease).collect()
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.hub.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap().unwrap();
        }
    }
}

/// Registry that accepts every page.
#[derive(Default)]
struct Names(Vec<u64>);

impl PageRegistry for Names {
    fn register(&mut self, name: u64, page: &LentSlice) -> bool {
        assert_eq!(page.len(), PAGE_SIZE);
        self.0.push(name);
        true
    }

    fn unregister(&mut self, name: u64) {
        let place = self.0.iter().position(|other| *other == name).unwrap();
        self.0.remove(place);
    }
}

/// Ranges of 512 bytes at offset 1024 of each page.
fn ranges(leases: &[Lease]) -> Vec<PageRange> {
    let range = |lease: &Lease| PageRange { gref: lease.gref(), offset: 1024, len: 512 };
    leases.iter().map(range).collect()
}

fn begin(
    pages: &mut RequestAccess<LocalGrantee>,
    ranges: &[PageRange],
    access: Access,
    registry: &mut Names,
) -> Result<(PageHold, Vec<PagePart>), PageError> {
    let mut parts = Vec::new();
    let begun = pages.begin(ranges.iter().copied(), access, Duration::ZERO, registry, &mut parts);
    if begun.is_err() {
        assert!(parts.is_empty());
    }
    begun.map(|hold| (hold, parts))
}

fn first_byte(part: &PagePart) -> u8 {
    part.memory.fetch::<1>(0).unwrap().into_unchecked()[0]
}

#[test]
fn map_mode_unmaps_pages_at_end_of_request() {
    let mut pair = Pair::new();
    let mut pages = pair.access(Mode::Map, None);
    let leases = pair.lend(3);
    leases.iter().for_each(|lease| lease.memory().copy_from(1024, &[7]).unwrap());
    let ranges = ranges(&leases);
    let (hold, mut parts) =
        begin(&mut pages, &ranges, Access::ReadOnly, &mut Names::default()).unwrap();
    assert!(parts.iter().all(|part| part.memory.len() == 512 && first_byte(part) == 7));
    let leases = pair.take_back(leases);
    assert_eq!(leases.len(), 3, "every page is in use during the I/O");
    pages.end(hold, &mut parts);
    assert!(parts.is_empty());
    assert!(pair.take_back(leases).is_empty());
}

#[test]
fn persistent_mode_unmaps_pages_when_shrunk_after_request() {
    let mut pair = Pair::new();
    let mut pages = pair.access(Mode::Persistent, Some(PersistentLimits::default()));
    let leases = pair.lend(3);
    let (ranges, mut names) = (ranges(&leases), Names::default());
    let (hold, mut parts) = begin(&mut pages, &ranges, Access::ReadWrite, &mut names).unwrap();
    assert!(parts.iter().all(|part| part.registered.is_some()) && names.0.len() == 3);
    pages.shrink(&mut names);
    assert_eq!(pages.kept(), 3, "a page in use stays");
    pages.end(hold, &mut parts);
    let leases = pair.take_back(leases);
    assert_eq!(leases.len(), 3, "pages stay mapped between requests");
    pages.shrink(&mut names);
    assert!(names.0.is_empty() && pages.kept() == 0);
    assert!(pair.take_back(leases).is_empty());
}

#[test]
fn pages_over_persistent_limit_are_unmapped_at_end_of_request() {
    let mut pair = Pair::new();
    let limits = PersistentLimits { pages: 1, ..PersistentLimits::default() };
    let mut pages = pair.access(Mode::Persistent, Some(limits));
    let leases = pair.lend(3);
    let (ranges, mut names) = (ranges(&leases), Names::default());
    let (hold, mut parts) = begin(&mut pages, &ranges, Access::ReadWrite, &mut names).unwrap();
    let registered: Vec<bool> = parts.iter().map(|part| part.registered.is_some()).collect();
    assert_eq!(registered, [true, false, false]);
    for (byte, (part, lease)) in (1..).zip(parts.iter().zip(&leases)) {
        part.memory.copy_from(0, &[byte]).unwrap();
        assert_eq!(lease.memory().fetch::<1>(1024).unwrap().into_unchecked(), [byte]);
    }
    pages.end(hold, &mut parts);
    assert_eq!(pair.take_back(leases).len(), 1);
}

#[test]
fn copy_mode_maps_nothing_and_copies_in_both_directions() {
    let mut pair = Pair::new();
    let mut pages = pair.access(Mode::Copy, None);
    let leases = pair.lend(2);
    leases[1].memory().copy_from(1024, &[9]).unwrap();
    let (ranges, mut names) = (ranges(&leases), Names::default());
    let (hold, mut parts) = begin(&mut pages, &ranges, Access::ReadOnly, &mut names).unwrap();
    assert_eq!((parts.len(), parts[0].memory.len()), (1, 1024));
    assert_eq!(parts[0].memory.fetch::<1>(512).unwrap().into_unchecked(), [9]);
    pages.end(hold, &mut parts);
    let (hold, mut parts) = begin(&mut pages, &ranges, Access::ReadWrite, &mut names).unwrap();
    parts[0].memory.copy_from(512, &[5]).unwrap();
    pages.copy_out(&hold, ranges.iter().copied()).unwrap();
    assert_eq!(leases[1].memory().fetch::<1>(1024).unwrap().into_unchecked(), [5]);
    assert!(pair.take_back(leases).is_empty(), "nothing is mapped during the I/O");
    assert_eq!(
        pages.copy_out(&hold, ranges.iter().copied()),
        Err(GrantStatus::BadGref),
        "a page that is revoked during the I/O fails this request"
    );
    pages.end(hold, &mut parts);
}

/// Window of four pages, of which the first three are issued.
fn issued(pair: &Pair) -> (Box<dyn TranslationTable>, Vec<Gref>) {
    let shape = WindowShape { writable: 4, read_only: 0, entries: 4 };
    let mut table = pair.guest.window(pair.backend.domid(), shape).unwrap();
    let grefs: Vec<Gref> = shape.grefs().take(3).collect();
    for (page, gref) in (0..).map(PageId).zip(&grefs) {
        table.issue(*gref, page, Access::ReadWrite).unwrap();
    }
    (table, grefs)
}

#[test]
fn window_mode_ends_use_of_pages_at_end_of_request() {
    let mut pair = Pair::new();
    let (mut table, grefs) = issued(&pair);
    let view = pair.backend.open_window(pair.guest.domid(), table.handle(), 4).unwrap();
    let mut pages = pair.access(Mode::Window, None).with_window(Some(view));
    let leases = pair.lend(1);
    // One page of the request is an ordinary grant, which is mapped for it.
    let mut wanted: Vec<PageRange> =
        grefs.iter().map(|gref| PageRange { gref: mark(*gref), offset: 0, len: 4096 }).collect();
    wanted.insert(1, ranges(&leases)[0]);
    let (hold, mut parts) =
        begin(&mut pages, &wanted, Access::ReadWrite, &mut Names::default()).unwrap();
    assert_eq!(parts.iter().map(|p| p.memory.len()).collect::<Vec<_>>(), [4096, 512, 4096, 4096]);
    parts[2].memory.copy_from(0, &[3]).unwrap();
    let second = table.memory(PageId(1)).unwrap();
    assert_eq!(second.fetch::<1>(0).unwrap().into_unchecked(), [3]);
    assert!(grefs.iter().all(|gref| table.revoke(*gref) == Err(RevokeError::Busy)));
    let leases = pair.take_back(leases);
    assert_eq!(leases.len(), 1);
    pages.end(hold, &mut parts);
    assert!(grefs.iter().all(|gref| table.revoke(*gref).is_ok()));
    assert!(pair.take_back(leases).is_empty());
}

#[test]
fn request_with_one_bad_page_fails_and_holds_no_other_page() {
    let mut pair = Pair::new();
    let (mut table, grefs) = issued(&pair);
    let view = pair.backend.open_window(pair.guest.domid(), table.handle(), 4).unwrap();
    let kept = Some(PersistentLimits::default());
    let bad = PageRange { gref: Gref(4000), offset: 0, len: 4096 };
    let mut names = Names::default();
    for (mode, keeps, view) in
        [(Mode::Map, None, None), (Mode::Copy, None, None), (Mode::Window, kept, Some(view))]
    {
        let in_window = view.is_some();
        let mut pages = pair.access(mode, keeps).with_window(view);
        let leases = pair.lend(2);
        let mut wanted = ranges(&leases);
        if in_window {
            wanted.push(PageRange { gref: mark(grefs[0]), offset: 0, len: 4096 });
        }
        wanted.push(bad);
        let failed = begin(&mut pages, &wanted, Access::ReadOnly, &mut names).err();
        assert_eq!(failed, Some(PageError::Failed(GrantStatus::BadGref)), "{mode}");
        pages.shrink(&mut names);
        assert!(pair.take_back(leases).is_empty(), "{mode}");
    }
    assert!(table.revoke(grefs[0]).is_ok() && names.0.is_empty());
}

#[test]
fn descriptor_pages_are_copied_in_every_mode() {
    let mut pair = Pair::new();
    let leases = pair.lend(2);
    leases[0].memory().copy_from(4095, &[1]).unwrap();
    leases[1].memory().copy_from(0, &[2, 3]).unwrap();
    let grefs: Vec<Gref> = leases.iter().map(Lease::gref).collect();
    for keeps in [None, Some(PersistentLimits::default())] {
        let mut pages = pair.access(Mode::Persistent, keeps);
        let mut bytes = [0; 4098];
        pages.copy_pages(&grefs, Duration::ZERO, &mut bytes).unwrap();
        assert_eq!(bytes[4094..], [0, 1, 2, 3]);
        let missing = pages.copy_pages(&[Gref(4000)], Duration::ZERO, &mut bytes[..8]);
        assert_eq!(missing, Err(GrantStatus::BadGref));
    }
}

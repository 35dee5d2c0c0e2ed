//! Grant windows between two processes: no use after revocation, and the cost of a peer that is stopped or
//! keeps every page it can.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

mod common;

use std::io::Read;
use std::os::fd::AsRawFd;
use std::process::Child;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use common::Machine;
use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::{
    Access, DomId, Grantee, Granter, Gref, Lease, PageId, Platform, RevokeError, TranslationTable,
    WindowHandle, WindowPlace, WindowShape, WindowView,
};
use rustix::process::{Pid, Signal, kill_process};

/// Time limit of each wait for the other side.
const TIME_LIMIT: Duration = Duration::from_secs(120);

/// Offsets in the control page: the granter's step, the child's step, the child's count of uses, and, for
/// each entry, the generation that is issued there.
const STOP: usize = 0;
const STEP: usize = 8;
const USES: usize = 16;
const CURRENT: usize = 64;

fn load(page: &LentSlice, at: usize) -> u64 {
    page.load_u64(at, SeqCst).unwrap()
}

fn store(page: &LentSlice, at: usize, value: u64) {
    page.store_u64(at, value, SeqCst).unwrap();
}

/// Granter's end of a grant window to a child process, with the control page.
struct Peer {
    child: Child,
    table: Box<dyn TranslationTable>,
    control: Lease,
}

impl Peer {
    fn start(machine: &Machine, granter: &LocalPlatform, role: &str, shape: WindowShape) -> Peer {
        let (id, socket) = machine.guest_socket();
        let table = granter.window(id, shape).unwrap();
        let control = granter.granter(id).unwrap().lend(Access::ReadWrite).unwrap();
        let (handle, gref) = (table.handle().0, control.gref());
        let task = format!("{} {handle} {gref}", granter.domid());
        let child = common::child(role, &task, socket);
        Peer { child, table, control }
    }

    fn wait_for(&self, step: u64) {
        let begun = Instant::now();
        while load(self.control.memory(), STEP) < step {
            assert!(begun.elapsed() < TIME_LIMIT, "the peer does not reach step {step}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn set_step(&self, step: u64) {
        store(self.control.memory(), STOP, step);
    }

    fn end(mut self) {
        let mut output = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        assert!(self.child.wait().unwrap().success(), "the peer printed:\n{output}");
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Stops every thread of the child and waits until all are stopped.
    fn stop(&self) {
        self.signal(Signal::STOP);
        let begun = Instant::now();
        let tasks = format!("/proc/{}/task", self.child.id());
        let stopped = || {
            let mut all = std::fs::read_dir(&tasks).unwrap();
            all.all(|task| {
                let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
                stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
            })
        };
        while !stopped() {
            assert!(begun.elapsed() < TIME_LIMIT, "a thread is running");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Returns the child's end: the view of its grant window, and the control page.
fn join_as_child() -> (WindowView, LentSlice) {
    let (task, platform) = common::task();
    let [granter, handle, control] = task.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{task}")
    };
    let granter = DomId(granter.parse().unwrap());
    let mut mapped = Vec::new();
    let mut grantee = platform.grantee(granter).unwrap();
    grantee.map(&[(Gref(control.parse().unwrap()), Access::ReadWrite)], &mut mapped);
    let handle = WindowHandle(handle.parse().unwrap());
    let view = platform.open_window(granter, handle, 4096).unwrap();
    // These stay open until the process ends.
    std::mem::forget(platform);
    std::mem::forget(grantee);
    (view, mapped.pop().unwrap().unwrap())
}

/// Waits until the granter has reached `step`.
fn wait_for_granter(control: &LentSlice, step: u64) {
    let begun = Instant::now();
    while load(control, STOP) < step {
        assert!(begun.elapsed() < TIME_LIMIT, "the granter is silent");
        std::thread::sleep(Duration::from_millis(1));
    }
}

const ENTRIES: u32 = 4;
const STRESS: WindowShape = WindowShape { writable: 0, read_only: 16, entries: ENTRIES };

fn current_of(gref: Gref) -> usize {
    CURRENT + (gref.0 - Gref::FIRST_FREE.0) as usize * 8
}

#[test]
#[ignore = "the child's side of window_use_racing_revocation_never_reaches_next_page"]
fn run_user_in_child_process() {
    let (mut view, control) = join_as_child();
    let (mut out, mut uses) = (Vec::new(), 0);
    let mut last = Instant::now();
    while load(&control, STOP) == 0 {
        out.clear();
        view.begin(STRESS.grefs().map(|gref| (gref, Access::ReadOnly)), &mut out);
        for (gref, found) in STRESS.grefs().zip(&out) {
            let Ok(place) = found else { continue };
            let expected = load(&control, current_of(gref));
            let (memory, offset) = view.memory(*place);
            let words = [offset, offset + PAGE_SIZE - 8].map(|at| load(memory, at));
            // A use blocks cooperative revocation. The page holds the issued generation, or zeros after a forced
            // revocation.
            let good = |word: u64| word == 0 || word == expected;
            assert!(words.into_iter().all(good), "{words:?}, issued {expected}");
            uses += 1;
            view.end(gref);
        }
        store(&control, USES, uses);
        if out.iter().any(Result::is_ok) {
            last = Instant::now();
        }
        assert!(last.elapsed() < TIME_LIMIT, "no page is issued");
    }
}

/// One process issues and revokes as fast as it can, alternately in cooperation and by force; another uses
/// the pages it finds. During a use the page holds the issued generation, or zeros after force. It never
/// holds content that was stored for another reference. `cargo xtask soak window` runs ten million rounds.
#[test]
#[ignore = "long: many rounds of two processes"]
fn window_use_racing_revocation_never_reaches_next_page() {
    let rounds: u64 =
        std::env::var("RINGFENCE_SOAK_ROUNDS").map_or(100_000, |n| n.parse().unwrap());
    let machine = Machine::new();
    let guest = machine.guest();
    let mut peer = Peer::start(&machine, &guest, "run_user_in_child_process", STRESS);
    let control = peer.control.memory().clone();
    let begun = Instant::now();
    let (mut round, mut generation, mut page) = (0, 0u64, 0);
    let mut issued = [false; ENTRIES as usize];
    let (mut busy, mut forced, mut held) = (0u64, 0u64, 0u64);
    while round < rounds || load(&control, USES) == 0 {
        let (table, before) = (&mut peer.table, round);
        for (gref, issued) in STRESS.grefs().zip(&mut issued) {
            page = (page + 1) % STRESS.read_only;
            if *issued || table.prepare(PageId(page)).is_err() {
                continue;
            }
            generation += 1;
            let memory = table.memory(PageId(page)).unwrap();
            store(&memory, 0, generation);
            store(&memory, PAGE_SIZE - 8, generation);
            store(&control, current_of(gref), generation);
            *issued = table.issue(gref, PageId(page), Access::ReadOnly).is_ok();
            round += u64::from(*issued);
            held += u64::from(!*issued);
        }
        if round == before {
            // Every page is in use or held. Yields, so that the user runs on a machine with one processor.
            std::thread::yield_now();
            assert!(peer.child.try_wait().unwrap().is_none(), "the user exited");
        }
        let by_force = generation.is_multiple_of(3);
        for (gref, issued) in STRESS.grefs().zip(&mut issued).filter(|(_, issued)| **issued) {
            if by_force {
                table.revoke_forced(&[gref]).unwrap();
                (*issued, forced) = (false, forced + 1);
            } else if table.revoke(gref).is_ok() {
                *issued = false;
            } else {
                busy += 1;
            }
        }
    }
    peer.set_step(1);
    let took = begun.elapsed();
    let uses = load(&control, USES);
    eprintln!(
        "{round} rounds in {took:?}: {uses} uses, {busy} times busy, {forced} revoked by force, \
         {held} times held"
    );
    let mut table = std::mem::replace(&mut peer.table, guest.window(DomId(0), STRESS).unwrap());
    peer.end();
    assert!(uses > 0);
    assert_eq!(table.held().pages, 0);
}

const MANY: WindowShape = WindowShape { writable: 1024, read_only: 1024, entries: 2048 };
/// Number of pages that the peer also puts into pipes, where its kernel pins them.
const PINNED: u32 = 8;
/// Number of mappings that the peer creates of one page.
const MAPPINGS: usize = 60_000;

fn tag(page: PageId) -> u64 {
    0x5EC2_E700_0000_0000 | u64::from(page.0)
}

fn issue_all(table: &mut dyn TranslationTable) {
    for (gref, page) in MANY.grefs().zip((0..MANY.pages()).map(PageId)) {
        store(&table.memory(page).unwrap(), 8, tag(page));
        table.issue(gref, page, MANY.access_of(page).unwrap()).unwrap();
    }
}

/// Begins a use of every page and checks its content.
fn use_every_page(view: &mut WindowView) -> Vec<WindowPlace> {
    let mut out = Vec::new();
    view.begin(MANY.grefs().map(|gref| (gref, Access::ReadOnly)), &mut out);
    let places: Vec<WindowPlace> = out.into_iter().map(Result::unwrap).collect();
    for (place, page) in places.iter().zip((0..).map(PageId)) {
        let (memory, at) = view.memory(*place);
        assert_eq!(load(memory, at + 8), tag(page));
    }
    places
}

/// Creates further mappings of a mapped page, with `mremap` from an old length of 0. Returns their number.
fn map_again(page: &LentSlice, times: usize) -> usize {
    let mut made = 0;
    while made < times {
        // SAFETY: the source is a shared mapping of a page; the new one is at an address of the
        // kernel's choice, replaces nothing, and is only read below.
        let new = unsafe { libc::mremap(address(page), 0, PAGE_SIZE, libc::MREMAP_MAYMOVE) };
        if new == libc::MAP_FAILED {
            break;
        }
        // SAFETY: mapped above and readable; no code writes to it meanwhile.
        let _ = unsafe { new.cast::<u64>().read_volatile() };
        made += 1;
    }
    made
}

/// Returns the address at which a page is mapped.
fn address(page: &LentSlice) -> *mut libc::c_void {
    let address = usize::try_from(page.device_region().address()).unwrap();
    core::ptr::with_exposed_provenance_mut(address)
}

#[test]
#[ignore = "the child's side of forced_revocation_from_stopped_peer_takes_every_page"]
fn run_hoarder_in_child_process() {
    let (mut view, control) = join_as_child();
    wait_for_granter(&control, 1);
    let places = use_every_page(&mut view);
    // Pages given to pipes are pinned.
    let mut pipes = Vec::new();
    for place in &places[..PINNED as usize] {
        let (memory, at) = view.memory(*place);
        let (from, into) = std::io::pipe().unwrap();
        let page = memory.slice(at, PAGE_SIZE).unwrap();
        let vec = libc::iovec { iov_base: address(&page), iov_len: PAGE_SIZE };
        // SAFETY: the page stays mapped; the kernel takes a reference to it.
        let gone = unsafe { libc::vmsplice(into.as_raw_fd(), &raw const vec, 1, 0) };
        assert_eq!(gone, 4096);
        pipes.push((from, into));
    }
    let (memory, at) = view.memory(*places.last().unwrap());
    let made = map_again(&memory.slice(at, PAGE_SIZE).unwrap(), MAPPINGS);
    store(&control, USES, made as u64);
    store(&control, STEP, 1);
    // The granter stops this process here and resumes it after the revocation.
    wait_for_granter(&control, 2);
    let found = places.iter().map(|place| {
        let (memory, at) = view.memory(*place);
        load(memory, at + 8)
    });
    assert_eq!(found.filter(|word| *word != 0).count(), 0, "a revoked page is readable");
    for ((mut from, into), page) in pipes.into_iter().zip((0..).map(PageId)) {
        drop(into);
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        let word = u64::from_le_bytes(*bytes[8..].first_chunk().unwrap());
        assert_eq!(word, tag(page), "a pinned page has new content");
    }
    store(&control, STEP, 2);
    // The peer never lowers its status words. The granter kills it here.
    wait_for_granter(&control, u64::MAX);
}

#[test]
#[ignore = "the child's side of forced_revocation_from_stopped_peer_takes_every_page"]
fn run_correct_user_in_child_process() {
    let (mut view, control) = join_as_child();
    wait_for_granter(&control, 1);
    let mut rounds = 0;
    let first = Gref::FIRST_FREE;
    while load(&control, STOP) < 2 {
        let mut out = Vec::new();
        view.begin([(first, Access::ReadWrite)].into_iter(), &mut out);
        let place = out.pop().unwrap().unwrap();
        let (memory, at) = view.memory(place);
        // Answers the number that the granter stored.
        let asked = load(memory, at + 8);
        store(memory, at + 16, asked + 1);
        view.end(first);
        rounds += 1;
        store(&control, USES, rounds);
    }
}

/// Checks that another peer answers a request in its grant window.
fn check_is_served(peer: &Peer, number: u64) {
    let page = peer.table.memory(PageId(0)).unwrap();
    store(&page, 8, number);
    let begun = Instant::now();
    while load(&page, 16) != number + 1 {
        assert!(begun.elapsed() < TIME_LIMIT, "the other peer is not served");
        std::thread::yield_now();
    }
}

#[test]
fn forced_revocation_from_stopped_peer_takes_every_page() {
    let machine = Machine::new();
    let guest = machine.guest();
    let mut hoarder = Peer::start(&machine, &guest, "run_hoarder_in_child_process", MANY);
    let mut other = Peer::start(&machine, &guest, "run_correct_user_in_child_process", MANY);
    issue_all(&mut *hoarder.table);
    issue_all(&mut *other.table);
    hoarder.set_step(1);
    other.set_step(1);
    check_is_served(&other, 100);
    hoarder.wait_for(1);
    let mappings = load(hoarder.control.memory(), USES);
    hoarder.stop();
    // The granter copies the content out while the peer claims to use the pages.
    let table = &mut hoarder.table;
    let kept: Vec<u64> =
        (0..MANY.pages()).map(|page| load(&table.memory(PageId(page)).unwrap(), 8)).collect();
    let all: Vec<Gref> = MANY.grefs().collect();
    assert_eq!(table.revoke(all[0]), Err(RevokeError::Busy));
    let mut timed = |what: &str, at_once: usize, grefs: &[Gref]| {
        let begun = Instant::now();
        for some in grefs.chunks(at_once) {
            table.revoke_forced(some).unwrap();
        }
        let each = begun.elapsed() / u32::try_from(grefs.len()).unwrap();
        eprintln!("by force from a peer that is stopped, {what}: {each:?} a page");
    };
    let (most, last) = all.split_at(all.len() - 1);
    timed("one page at a time", 1, &most[..512]);
    check_is_served(&other, 200);
    timed("256 pages at a time", 256, &most[512..]);
    timed(&format!("one page that it maps {mappings} times"), 1, last);
    check_is_served(&other, 300);
    // No revoked page is readable, no copied content is lost, and every held page is counted.
    for (page, kept) in (0..).map(PageId).zip(&kept) {
        assert_eq!(load(&table.memory(page).unwrap(), 8), 0);
        assert_eq!(*kept, tag(page));
    }
    assert_eq!(table.held().pages, MANY.pages());
    hoarder.set_step(2);
    hoarder.signal(Signal::CONT);
    hoarder.wait_for(2);
    assert_eq!(hoarder.table.held().pages, MANY.pages(), "a page was released");
    // The peer's exit releases its pages.
    hoarder.child.kill().unwrap();
    hoarder.child.wait().unwrap();
    let begun = Instant::now();
    while hoarder.table.held().pages > 0 {
        assert!(begun.elapsed() < TIME_LIMIT, "{} pages are held", hoarder.table.held().pages);
        std::thread::sleep(Duration::from_millis(1));
    }
    hoarder.table.scrub().unwrap();
    issue_all(&mut *hoarder.table);
    check_is_served(&other, 400);
    other.set_step(2);
    other.end();
}

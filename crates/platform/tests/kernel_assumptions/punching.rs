//! Hole punching, the local platform's forced revocation.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use crate::memory::{Mapped, PAGE, arena, punch};
use crate::not_in_this_kernel;
use crate::peer::Peer;

/// Words shared with the child processes.
struct Flags<'a> {
    punched: &'a AtomicU64,
    seen: &'a [AtomicU64],
    done: &'a [AtomicU64],
}

impl<'a> Flags<'a> {
    fn of(page: &'a Mapped) -> Flags<'a> {
        let words = page.words();
        Flags { punched: &words[0], seen: &words[1..3], done: &words[3..5] }
    }

    /// Waits until both children have reached `round`.
    fn wait(&self, words: &[AtomicU64], round: u64) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while words.iter().any(|word| word.load(SeqCst) < round) {
            assert!(Instant::now() < deadline, "the children hang in round {round}");
            std::thread::yield_now();
        }
    }
}

/// Assumption: when the punch returns, no mapping in any process reaches the old page.
///
/// The peers read without a pause. In round `n` the page holds `n` until it is punched; then a flag
/// is set to `n`. A peer that sees the flag and still reads `n` reached the page after the call.
#[test]
fn read_after_punch_returned_never_finds_old_page() {
    const ROUNDS: u64 = 200;
    let (fd, flags) = (arena(3), Mapped::anonymous());
    let own = Mapped::new(&fd, 0, 3, true);
    own.set(0, u64::MAX);
    own.set(2, u64::MAX);
    let state = Flags::of(&flags);
    let mut peers = Vec::new();
    for (number, write) in [(0, true), (1, false)] {
        peers.push(Peer::fork(|line| {
            let page = Mapped::new(&fd, 1, 1, write);
            let mut late = 0;
            for round in 1..=ROUNDS {
                while page.get(0) != round {
                    std::thread::yield_now();
                }
                state.seen[number].store(round, SeqCst);
                // Each iteration reads the flag first, then the page.
                loop {
                    let gone = state.punched.load(SeqCst) == round;
                    let found = page.get(0);
                    if gone {
                        late += u64::from(found == round);
                        break;
                    }
                }
                state.done[number].store(round, SeqCst);
            }
            line.send(late);
        }));
    }
    for round in 1..=ROUNDS {
        own.set(1, round);
        state.wait(state.seen, round);
        punch(&fd, 1, 1).unwrap();
        state.punched.store(round, SeqCst);
        state.wait(state.done, round);
    }
    for peer in peers {
        assert_eq!(peer.receive(), 0, "reads of the old page after the punch had returned");
    }
    assert_eq!(
        (own.get(0), own.get(1), own.get(2)),
        (u64::MAX, 0, u64::MAX),
        "the neighbouring pages stay"
    );
}

/// Assumption: after a punch the page reads as zeros. Hazard: from then on the old mapping reaches the
/// content that is stored there next. Therefore a page is not lent again before its user has released it.
#[test]
fn old_mapping_after_punch_reads_zeros_then_new_content() {
    let fd = arena(1);
    let own = Mapped::new(&fd, 0, 1, true);
    own.set(0, 1);
    let peer = Peer::fork(|line| {
        let page = Mapped::new(&fd, 0, 1, true);
        line.send(page.get(0));
        while line.receive().is_some_and(|more| more != 0) {
            let found = page.get(0);
            page.set(0, 7);
            line.send(found);
        }
    });
    assert_eq!(peer.receive(), 1);
    punch(&fd, 0, 1).unwrap();
    peer.send(1);
    assert_eq!(peer.receive(), 0, "a fresh page");
    // Both sides have the same page, so the peer also reads the content of the granter's next loan.
    peer.send(1);
    assert_eq!(peer.receive(), 7);
    own.set(0, 2);
    peer.send(1);
    assert_eq!(peer.receive(), 2);
    peer.send(0);
}

/// Assumption: a punch also reaches mappings that the peer inherited, moved or duplicated.
#[test]
fn punch_reaches_inherited_moved_and_duplicated_mappings() {
    let fd = arena(2);
    let own = Mapped::new(&fd, 0, 2, true);
    own.set(1, 1);
    let inherited = Mapped::new(&fd, 0, 2, true);
    assert_eq!(inherited.get(1), 1);
    let peer = Peer::fork(|line| {
        let moved = remap(Mapped::new(&fd, 1, 1, true), false);
        let doubled = remap(Mapped::new(&fd, 1, 1, true), true);
        let grandchild = Peer::fork(|line| {
            line.receive();
            line.send(inherited.get(1) << 8 | moved.get(0) << 4 | doubled.get(0));
        });
        line.send(inherited.get(1) << 8 | moved.get(0) << 4 | doubled.get(0));
        line.receive();
        line.send(inherited.get(1) << 8 | moved.get(0) << 4 | doubled.get(0));
        grandchild.send(1);
        line.send(grandchild.receive());
    });
    assert_eq!(peer.receive(), 0x111);
    punch(&fd, 0, 2).unwrap();
    peer.send(1);
    assert_eq!(peer.receive(), 0, "inherited, moved, doubled");
    assert_eq!(peer.receive(), 0, "the same in a child of the peer");
}

/// Moves a mapping of one page, or duplicates it (an old size of 0 requests that).
fn remap(page: Mapped, double: bool) -> Mapped {
    let old_size = if double { 0 } else { PAGE };
    let (start, len) = page.into_address();
    let room = Mapped::anonymous().into_address().0;
    // SAFETY: the source is a mapping of one page, the target a page of our own that is replaced.
    let target = unsafe {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        libc::mremap(start.cast(), old_size, PAGE, flags, room)
    };
    assert_eq!(target.cast(), room);
    if double {
        // SAFETY: the page is mapped, and nothing else owns it.
        drop(unsafe { Mapped::adopt(start, len) });
    }
    // SAFETY: the page was moved or doubled here.
    unsafe { Mapped::adopt(room, PAGE) }
}

/// Assumption: a peer that maps a page as often as the kernel permits makes the punch slow, not
/// impossible. The test prints the durations, which bound the cost of one forced revocation.
#[test]
fn punch_of_page_with_60000_mappings_clears_all_of_them() {
    const MAPPINGS: usize = 60_000;
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    if limit.trim().parse::<usize>().unwrap() < MAPPINGS + 2000 {
        return not_in_this_kernel(format!("vm.max_map_count is {}", limit.trim()));
    }
    let fd = arena(1);
    let own = Mapped::new(&fd, 0, 1, true);
    own.set(0, 1);
    let time = |punched: &dyn Fn()| {
        let begun = Instant::now();
        punched();
        begun.elapsed()
    };
    let alone = time(&|| punch(&fd, 0, 1).unwrap());
    own.set(0, 1);
    let peer = Peer::fork(|line| {
        let mut pages = Vec::with_capacity(MAPPINGS);
        while pages.len() < MAPPINGS {
            match Mapped::try_new(&fd, 0, 1, false) {
                Ok(page) => pages.push(page),
                Err(_) => break,
            }
        }
        line.send(pages.iter().map(|page| page.get(0)).sum());
        line.receive();
        line.send(pages.iter().map(|page| page.get(0)).sum());
    });
    assert_eq!(peer.receive(), MAPPINGS as u64);
    let crowded = time(&|| punch(&fd, 0, 1).unwrap());
    peer.send(1);
    assert_eq!(peer.receive(), 0, "the sum that these mappings read");
    eprintln!("a punch took {alone:?}, and {crowded:?} with {MAPPINGS} mappings of the page");
}

/// Assumption: one call punches a run of pages. The test prints its duration and that of single calls,
/// and asserts neither.
#[test]
fn punch_of_256_pages_in_one_call_clears_all_of_them() {
    const PAGES: usize = 256;
    let fd = arena(PAGES);
    let own = Mapped::new(&fd, 0, PAGES, true);
    let fill = || (0..PAGES).for_each(|page| own.set(page, 1));
    let left = || (0..PAGES).map(|page| own.get(page)).sum::<u64>();
    fill();
    let begun = Instant::now();
    (0..PAGES).for_each(|page| punch(&fd, page, 1).unwrap());
    let singly = begun.elapsed();
    assert_eq!(left(), 0);
    fill();
    let begun = Instant::now();
    punch(&fd, 0, PAGES).unwrap();
    let together = begun.elapsed();
    assert_eq!(left(), 0);
    eprintln!("{PAGES} pages: one call {together:?}, a call each {singly:?}");
}

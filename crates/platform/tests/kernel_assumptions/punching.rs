//! Hole punching is what stands for revocation by the hypervisor.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use crate::memory::{Mapped, PAGE, arena, punch};
use crate::not_in_this_kernel;
use crate::peer::Peer;

/// Words shared with the children.
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

    /// Waits until both children have come to `round`.
    fn wait(&self, words: &[AtomicU64], round: u64) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while words.iter().any(|word| word.load(SeqCst) < round) {
            assert!(Instant::now() < deadline, "the children hang in round {round}");
            std::thread::yield_now();
        }
    }
}

/// Assumption: when the call returns, no mapping in any process reaches the old page.
///
/// The peer reads without a pause. In round `n` the page holds `n` until it is punched; then a flag
/// is set to `n`. A peer that sees the flag and still reads `n` reached the page after the call.
#[test]
fn a_punch_has_reached_every_process_when_it_returns() {
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
                // Read all the time: the flag first, then the page.
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
            line.tell(late);
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
        assert_eq!(peer.hear(), 0, "reads of the old page after the punch had returned");
    }
    assert_eq!(
        (own.get(0), own.get(1), own.get(2)),
        (u64::MAX, 0, u64::MAX),
        "its neighbours stay"
    );
}

/// Assumption: what is read after a punch is a fresh zero page. Hazard: from then on the mapping
/// reaches what is put there next; so a page whose user has not let go is not lent again.
#[test]
fn a_punched_page_is_fresh_and_reached_again_by_old_mappings() {
    let fd = arena(1);
    let own = Mapped::new(&fd, 0, 1, true);
    own.set(0, 1);
    let peer = Peer::fork(|line| {
        let page = Mapped::new(&fd, 0, 1, true);
        line.tell(page.get(0));
        while line.hear().is_some_and(|more| more != 0) {
            let found = page.get(0);
            page.set(0, 7);
            line.tell(found);
        }
    });
    assert_eq!(peer.hear(), 1);
    punch(&fd, 0, 1).unwrap();
    peer.tell(1);
    assert_eq!(peer.hear(), 0, "a fresh page");
    // The same page for both, and so with what the granter would lend in it next.
    peer.tell(1);
    assert_eq!(peer.hear(), 7);
    own.set(0, 2);
    peer.tell(1);
    assert_eq!(peer.hear(), 2);
    peer.tell(0);
}

/// Assumption: mappings that were inherited, moved or doubled by the peer are reached as well.
#[test]
fn a_punch_reaches_forked_moved_and_doubled_mappings() {
    let fd = arena(2);
    let own = Mapped::new(&fd, 0, 2, true);
    own.set(1, 1);
    let inherited = Mapped::new(&fd, 0, 2, true);
    assert_eq!(inherited.get(1), 1);
    let peer = Peer::fork(|line| {
        let moved = remap(Mapped::new(&fd, 1, 1, true), false);
        let doubled = remap(Mapped::new(&fd, 1, 1, true), true);
        let grandchild = Peer::fork(|line| {
            line.hear();
            line.tell(inherited.get(1) << 8 | moved.get(0) << 4 | doubled.get(0));
        });
        line.tell(inherited.get(1) << 8 | moved.get(0) << 4 | doubled.get(0));
        line.hear();
        line.tell(inherited.get(1) << 8 | moved.get(0) << 4 | doubled.get(0));
        grandchild.tell(1);
        line.tell(grandchild.hear());
    });
    assert_eq!(peer.hear(), 0x111);
    punch(&fd, 0, 2).unwrap();
    peer.tell(1);
    assert_eq!(peer.hear(), 0, "inherited, moved, doubled");
    assert_eq!(peer.hear(), 0, "the same in a child of the peer");
}

/// Moves a mapping of one page, or makes a second one of it (by an old size of none).
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
        // SAFETY: it is still mapped, and nobody's.
        drop(unsafe { Mapped::adopt(start, len) });
    }
    // SAFETY: the page was moved or doubled here.
    unsafe { Mapped::adopt(room, PAGE) }
}

/// Assumption: a peer that maps a page as often as the kernel lets it makes the punch slow, not
/// impossible. The time is for the reader: it bounds what one forced revocation can cost.
#[test]
fn sixty_thousand_mappings_of_a_page_are_punched_at_once() {
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
        line.tell(pages.iter().map(|page| page.get(0)).sum());
        line.hear();
        line.tell(pages.iter().map(|page| page.get(0)).sum());
    });
    assert_eq!(peer.hear(), MAPPINGS as u64);
    let crowded = time(&|| punch(&fd, 0, 1).unwrap());
    peer.tell(1);
    assert_eq!(peer.hear(), 0, "what all these mappings read now");
    eprintln!("a punch took {alone:?}, and {crowded:?} with {MAPPINGS} mappings of the page");
}

/// Assumption: a run of pages is punched by one call at less than the cost of the pages one by
/// one. (The time is reported, not asserted.)
#[test]
fn a_run_of_pages_is_punched_by_one_call() {
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

//! Stress test for use after revocation. One process lends pages and revokes them at the worst moments;
//! another checks each word that it reads, and writes where it may.
//!
//! Every round has a number, which is in every word of its page. The processes share a control page that
//! stays lent. It has a slot for each round in flight, with an offer (number, reference, kind of use) and
//! the answer. As soon as a page is returned, by its user or by force, the lender lends it again under
//! another reference and fills it with *poison*. A user that reads poison, or whose write is found in
//! it, used a page after its revocation.
//!
//! The test runs 100,000 rounds; `RINGFENCE_SOAK_ROUNDS=10000000` makes it a soak test.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

mod common;

use std::collections::HashMap;
use std::io::Read;
use std::process::Child;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_platform::local::{ArenaShape, LocalGranter};
use ringfence_platform::{
    Access, CopyOps, DomId, GrantStatus, Grantee, Granter, Gref, Lease, Platform,
};

use common::Machine;

/// Number of rounds in flight.
const SLOTS: usize = 32;

/// Time limit of each wait for the other side.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Offset in the control page of the lender's stop flag.
const STOP: usize = 4088;

/// Offset in the control page of the slot that the user works on. The lender revokes in that slot first, to
/// hit the use.
const AT_WORK: usize = 4080;

/// Word that no round writes.
const POISON: u64 = 0xDEAD_DEAD_DEAD_DEAD;

/// Content of every page lent for reading, from start to end.
const READ_ONLY_FILL: u64 = 0x57A9_D19A_57A9_D19A;

/// Returns the word that the user writes in a round.
fn written(round: u64) -> u64 {
    round | 1 << 63
}

/// Kind of use of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Use {
    MapAndRead,
    MapAndWrite,
    CopyOut,
    CopyIn,
}

impl Use {
    fn of(number: u64) -> Use {
        match number % 4 {
            0 => Use::MapAndRead,
            1 => Use::MapAndWrite,
            2 => Use::CopyOut,
            _ => Use::CopyIn,
        }
    }
}

/// Kind of revocation of a page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Revocation {
    /// Cooperative, after the user's answer: must succeed at once.
    Patient,
    /// Cooperative, at any time, until either the user or the revocation has finished.
    Racing,
    /// Forced, at any time.
    Forced,
}

fn offer_at(slot: usize) -> usize {
    slot * 32
}
fn gref_at(slot: usize) -> usize {
    slot * 32 + 8
}
fn answer_at(slot: usize) -> usize {
    slot * 32 + 16
}
fn outcome_at(slot: usize) -> usize {
    slot * 32 + 24
}

fn load(page: &LentSlice, at: usize) -> u64 {
    page.load_u64(at, SeqCst).unwrap()
}

fn store(page: &LentSlice, at: usize, value: u64) {
    page.store_u64(at, value, SeqCst).unwrap();
}

fn fill(page: &LentSlice, word: u64) {
    page.copy_from(0, &filled(word)).unwrap();
}

fn filled(word: u64) -> Vec<u8> {
    word.to_ne_bytes().repeat(PAGE_SIZE / 8)
}

fn content(page: &LentSlice) -> Vec<u8> {
    let mut bytes = vec![0; PAGE_SIZE];
    page.copy_to(0, &mut bytes).unwrap();
    bytes
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word))
}

/// Pseudorandom number generator with a fixed seed.
struct Random(u64);

impl Random {
    fn below(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % sides
    }
}

/// Outcomes that the user reports for a round.
const USED: u64 = 1;
const REFUSED: u64 = 2;

#[test]
#[ignore = "the child's side of page_use_racing_revocation_never_reaches_next_lease"]
fn run_user_in_child_process() {
    let (task, platform) = common::task();
    let [lender, control] = task.split(' ').collect::<Vec<_>>()[..] else { panic!("{task}") };
    let lender = DomId(lender.parse().unwrap());
    let mut user = User { grantee: platform.grantee(lender).unwrap(), random: Random(7) };
    let control = user.map(Gref(control.parse().unwrap()), Access::ReadWrite).unwrap();
    let mut done = [0; SLOTS];
    let mut last = Instant::now();
    while load(&control, STOP) == 0 {
        let mut idle = true;
        for (slot, done) in done.iter_mut().enumerate() {
            let round = load(&control, offer_at(slot));
            if round != *done {
                let gref = Gref(u32::try_from(load(&control, gref_at(slot))).unwrap());
                store(&control, AT_WORK, slot as u64);
                let outcome = user.round(round, gref);
                store(&control, outcome_at(slot), outcome);
                store(&control, answer_at(slot), round);
                (*done, idle, last) = (round, false, Instant::now());
            }
        }
        assert!(last.elapsed() < TIME_LIMIT, "the lender is silent");
        if idle {
            std::thread::yield_now();
        }
    }
}

struct User<G> {
    grantee: G,
    random: Random,
}

impl<G: Grantee> User<G> {
    fn map(&mut self, gref: Gref, access: Access) -> Result<LentSlice, GrantStatus> {
        let mut out = Vec::new();
        self.grantee.map(&[(gref, access)], &mut out);
        out.pop().unwrap()
    }

    fn round(&mut self, round: u64, gref: Gref) -> u64 {
        let kind = Use::of(round);
        let used = match kind {
            Use::MapAndRead | Use::MapAndWrite => self.by_mapping(round, gref, kind),
            Use::CopyOut => self.copy_out(round, gref),
            Use::CopyIn => self.copy_in(round, gref),
        };
        match used {
            Ok(()) => USED,
            Err(GrantStatus::BadGref | GrantStatus::Again | GrantStatus::PermissionDenied) => {
                REFUSED
            }
            Err(other) => panic!("round {round} ({kind:?}) was refused with \"{other}\""),
        }
    }

    fn by_mapping(&mut self, round: u64, gref: Gref, kind: Use) -> Result<(), GrantStatus> {
        let write = kind == Use::MapAndWrite;
        let access = if write { Access::ReadWrite } else { Access::ReadOnly };
        let page = self.map(gref, access)?;
        for _ in 0..=self.random.below(4) {
            check(round, &content(&page));
            if write {
                fill(&page, written(round));
            }
            // Yields now and then, so that the lender runs meanwhile on a machine with one processor.
            if self.random.below(16) == 0 {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn copy_out(&mut self, round: u64, gref: Gref) -> Result<(), GrantStatus> {
        let mut bytes = vec![0; PAGE_SIZE];
        let mut ops = CopyOps::new();
        let mut list = ops.begin();
        list.read(gref, 0, &mut bytes).unwrap();
        self.grantee.copy(list);
        okay(&ops)?;
        check(round, &bytes);
        Ok(())
    }

    fn copy_in(&mut self, round: u64, gref: Gref) -> Result<(), GrantStatus> {
        let bytes = filled(written(round));
        let mut ops = CopyOps::new();
        let mut list = ops.begin();
        list.write(gref, 0, &bytes).unwrap();
        self.grantee.copy(list);
        okay(&ops)
    }
}

fn okay(ops: &CopyOps) -> Result<(), GrantStatus> {
    match ops.statuses() {
        [GrantStatus::Okay] => Ok(()),
        [status] => Err(*status),
        other => panic!("{other:?}"),
    }
}

/// Checks the content of a page. It may hold the word of this round, the word that its user wrote, or,
/// after a forced revocation, zeros, in any mixture, since pages are punched while they are read. A late
/// user may also find a page to which its reference was issued since: a reference has no generation.
fn check(round: u64, bytes: &[u8]) {
    // Fast path for nearly every call.
    if bytes == filled(round) || bytes == filled(written(round)) {
        return;
    }
    for (at, word) in words(bytes).enumerate() {
        let fits = [round, written(round), 0, READ_ONLY_FILL].contains(&word);
        assert!(fits, "round {round}: word {at} is {word:#x}, after the page was revoked");
    }
}

/// Lender's record of a round in flight.
struct Round {
    number: u64,
    revocation: Revocation,
    /// Lease of the page until its revocation.
    lease: Option<Lease>,
    /// Pages that were lent after the revocation; the user does not know their references.
    decoys: Vec<Lease>,
}

struct Lender {
    granter: LocalGranter,
    control: LentSlice,
    random: Random,
    slots: Vec<Option<Round>>,
    next: u64,
    seen: HashMap<(Revocation, &'static str), u64>,
}

impl Lender {
    fn count(&mut self, revocation: Revocation, what: &'static str) {
        *self.seen.entry((revocation, what)).or_default() += 1;
    }

    /// Starts a round in a slot.
    fn begin(&mut self, slot: usize) {
        let number = self.next;
        self.next += 1;
        let lease = self.granter.lend(Access::ReadWrite).unwrap();
        fill(lease.memory(), number);
        store(&self.control, gref_at(slot), lease.gref().0.into());
        store(&self.control, offer_at(slot), number);
        let revocation = match self.random.below(3) {
            0 => Revocation::Patient,
            1 => Revocation::Racing,
            _ => Revocation::Forced,
        };
        self.slots[slot] =
            Some(Round { number, revocation, lease: Some(lease), decoys: Vec::new() });
    }

    /// Continues the round in a slot. Returns `true` if it ended.
    fn advance(&mut self, slot: usize) -> bool {
        let mut round = self.slots[slot].take().unwrap();
        let answered = load(&self.control, answer_at(slot)) == round.number;
        if let Some(lease) = round.lease.take() {
            round.lease = self.revoke(&mut round, lease, answered);
        }
        if answered && round.lease.is_none() {
            self.end(slot, round);
            return true;
        }
        self.slots[slot] = Some(round);
        false
    }

    /// Tries to revoke the page. Returns the lease if the page stays lent.
    fn revoke(&mut self, round: &mut Round, lease: Lease, answered: bool) -> Option<Lease> {
        match round.revocation {
            Revocation::Patient if !answered => return Some(lease),
            // Revokes at once, or at a random moment during the use.
            _ if !answered && self.random.below(3) != 0 => return Some(lease),
            Revocation::Patient => self.granter.take_back(lease).unwrap(),
            Revocation::Racing => match self.granter.take_back(lease) {
                Ok(()) => self.count(round.revocation, if answered { "late" } else { "early" }),
                Err(still) => {
                    assert!(!answered, "round {} is answered and the page busy", round.number);
                    self.count(round.revocation, "busy");
                    return Some(still.lease);
                }
            },
            Revocation::Forced => {
                let before = self.granter.quarantined();
                self.granter.revoke_forced(vec![lease]).unwrap();
                let in_use = self.granter.quarantined() > before;
                self.count(round.revocation, if in_use { "in use" } else { "not in use" });
            }
        }
        self.poison(round);
        None
    }

    /// Lends the revoked page again, under a reference that the user does not know. The next reference is the
    /// revoked one, and so is the next page. A page of the other kind is lent first, to separate them.
    fn poison(&mut self, round: &mut Round) {
        round.decoys.push(self.granter.lend(Access::ReadOnly).unwrap());
        for _ in 0..2 {
            let lease = self.granter.lend(Access::ReadWrite).unwrap();
            let before = load(lease.memory(), 0);
            if [round.number, written(round.number)].contains(&before) {
                self.count(round.revocation, "same page");
            }
            fill(lease.memory(), POISON);
            round.decoys.push(lease);
        }
    }

    /// Ends a round whose user has answered. Checks that no write of the user is in a decoy.
    fn end(&mut self, slot: usize, round: Round) {
        match load(&self.control, outcome_at(slot)) {
            USED => self.count(round.revocation, "used"),
            REFUSED => self.count(round.revocation, "refused"),
            other => panic!("round {} ended as {other}", round.number),
        }
        for lease in round.decoys {
            // The user cannot write to a page that was lent for reading.
            let wanted = if lease.access() == Access::ReadWrite { POISON } else { READ_ONLY_FILL };
            let found = content(lease.memory());
            if found != filled(wanted) {
                let late = words(&found).find(|word| *word != wanted);
                panic!("round {}: {late:x?} was written after the page was revoked", round.number);
            }
            self.granter.take_back(lease).unwrap();
        }
    }
}

#[test]
#[ignore = "long: 100,000 rounds"]
fn page_use_racing_revocation_never_reaches_next_lease() {
    let rounds = std::env::var("RINGFENCE_SOAK_ROUNDS").map_or(100_000, |n| n.parse().unwrap());
    let machine = Machine::new();
    let (id, socket) = machine.guest_socket();
    let lender = machine.guest().with_arena(ArenaShape::of(256, 64));
    let mut granter = lender.granter(id).unwrap();
    let control = granter.lend(Access::ReadWrite).unwrap();
    let task = format!("{} {}", lender.domid(), control.gref());
    let mut child = common::child("run_user_in_child_process", &task, socket);
    let mut state = Lender {
        granter,
        control: control.memory().clone(),
        random: Random(0x9E37_79B9_7F4A_7C15),
        slots: (0..SLOTS).map(|_| None).collect(),
        next: 1,
        seen: HashMap::new(),
    };
    state.fill_read_only_pages();
    let begun = Instant::now();
    let outcome =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| state.run(rounds, &mut child)));
    store(&state.control, STOP, 1);
    let mut output = String::new();
    child.stdout.take().unwrap().read_to_string(&mut output).unwrap();
    assert!(child.wait().unwrap().success(), "the user printed:\n{output}");
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
    let mut seen: Vec<_> = state.seen.iter().map(|(what, n)| format!("{what:?}: {n}")).collect();
    seen.sort();
    eprintln!("{rounds} rounds in {:?}: {}", begun.elapsed(), seen.join(", "));
    // Without these events the test would have checked nothing.
    let met = |revocation, what| state.seen.contains_key(&(revocation, what));
    for (revocation, what) in [
        (Revocation::Patient, "used"),
        (Revocation::Racing, "early"),
        (Revocation::Racing, "busy"),
        (Revocation::Racing, "used"),
        (Revocation::Racing, "refused"),
        (Revocation::Racing, "same page"),
        (Revocation::Forced, "in use"),
        (Revocation::Forced, "not in use"),
        (Revocation::Forced, "used"),
        (Revocation::Forced, "refused"),
    ] {
        assert!(met(revocation, what), "no round was {revocation:?} and {what}: {seen:?}");
    }
}

impl Lender {
    fn fill_read_only_pages(&mut self) {
        let leases: Vec<Lease> =
            std::iter::from_fn(|| self.granter.lend(Access::ReadOnly).ok()).collect();
        for lease in leases {
            fill(lease.memory(), READ_ONLY_FILL);
            self.granter.take_back(lease).unwrap();
        }
    }

    fn run(&mut self, rounds: u64, child: &mut Child) {
        let mut last = Instant::now();
        while self.next <= rounds || self.slots.iter().any(Option::is_some) {
            let mut idle = true;
            for slot in 0..SLOTS {
                let at_work = usize::try_from(load(&self.control, AT_WORK)).unwrap() % SLOTS;
                for slot in [at_work, slot] {
                    if self.slots[slot].is_some() {
                        idle &= !self.advance(slot);
                    }
                }
                if self.slots[slot].is_none() && self.next <= rounds {
                    self.begin(slot);
                    idle = false;
                }
            }
            if idle {
                let silent = last.elapsed();
                assert!(silent < TIME_LIMIT, "the user is silent");
                if silent > Duration::from_secs(1) {
                    assert!(child.try_wait().unwrap().is_none(), "the user exited");
                }
                std::thread::yield_now();
            } else {
                last = Instant::now();
            }
        }
    }
}

//! No use after revocation: two processes, one that lends and revokes at the worst moments, and one
//! that checks each word it sees, and writes where it may.
//!
//! Every round has a number, which is in every word of its page. The two talk over a page that stays
//! lent: a slot for each round under way, with an offer (number, reference, how to use it) and the
//! answer. As soon as a page is back, by its user's leave or by force, it is lent again under
//! another reference and filled with *poison*. A user that reads poison, or whose write is found in
//! it, used a page after it was revoked.
//!
//! 100,000 rounds are done by default; `RINGFENCE_SOAK_ROUNDS=10000000` makes it a soak.

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

/// Rounds under way at a time.
const SLOTS: usize = 32;

/// Neither side waits longer for the other.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where in the shared page the lender says that it is over.
const STOP: usize = 4088;

/// Where in the shared page the user says in which slot it is at work, so that the lender comes in
/// time.
const AT_WORK: usize = 4080;

/// No round has this in its words.
const POISON: u64 = 0xDEAD_DEAD_DEAD_DEAD;

/// In the pages lent for reading, from the beginning to the end.
const STAND_IN: u64 = 0x57A9_D19A_57A9_D19A;

/// What the user writes in a round, where it writes.
fn written(round: u64) -> u64 {
    round | 1 << 63
}

/// How a page is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Manner {
    MapAndRead,
    MapAndWrite,
    CopyOut,
    CopyIn,
}

impl Manner {
    fn of(number: u64) -> Manner {
        match number % 4 {
            0 => Manner::MapAndRead,
            1 => Manner::MapAndWrite,
            2 => Manner::CopyOut,
            _ => Manner::CopyIn,
        }
    }
}

/// How a page is taken back.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Revocation {
    /// After the user's answer: it has to work at once.
    Patient,
    /// While the user may be at it, until one of the two is through.
    Racing,
    /// By force, while the user may be at it.
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

/// Numbers that look random, the same every time.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % sides
    }
}

/// What the user reports of a round.
const USED: u64 = 1;
const REFUSED: u64 = 2;

#[test]
#[ignore = "the child's side of no_page_is_used_after_it_was_revoked"]
fn the_user_in_a_child() {
    let (orders, platform) = common::orders();
    let [lender, control] = orders.split(' ').collect::<Vec<_>>()[..] else { panic!("{orders}") };
    let lender = DomId(lender.parse().unwrap());
    let mut user = User { grantee: platform.grantee(lender).unwrap(), dice: Dice(7) };
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
        assert!(last.elapsed() < PATIENCE, "the lender is silent");
        if idle {
            std::thread::yield_now();
        }
    }
}

struct User<G> {
    grantee: G,
    dice: Dice,
}

impl<G: Grantee> User<G> {
    fn map(&mut self, gref: Gref, access: Access) -> Result<LentSlice, GrantStatus> {
        let mut out = Vec::new();
        self.grantee.map(&[(gref, access)], &mut out);
        out.pop().unwrap()
    }

    fn round(&mut self, round: u64, gref: Gref) -> u64 {
        let manner = Manner::of(round);
        let used = match manner {
            Manner::MapAndRead | Manner::MapAndWrite => self.by_mapping(round, gref, manner),
            Manner::CopyOut => self.copy_out(round, gref),
            Manner::CopyIn => self.copy_in(round, gref),
        };
        match used {
            Ok(()) => USED,
            Err(GrantStatus::BadGref | GrantStatus::Again | GrantStatus::PermissionDenied) => {
                REFUSED
            }
            Err(other) => panic!("round {round} ({manner:?}) was refused with \"{other}\""),
        }
    }

    fn by_mapping(&mut self, round: u64, gref: Gref, manner: Manner) -> Result<(), GrantStatus> {
        let write = manner == Manner::MapAndWrite;
        let access = if write { Access::ReadWrite } else { Access::ReadOnly };
        let page = self.map(gref, access)?;
        for _ in 0..=self.dice.roll(4) {
            check(round, &content(&page));
            if write {
                fill(&page, written(round));
            }
            // Now and then the lender gets its turn meanwhile, though there were one processor.
            if self.dice.roll(16) == 0 {
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

/// A page may hold what was lent in this round, what its user wrote into it, or, after force,
/// zeros; in any mixture, since pages are punched while they are read. And a user that comes too
/// late may find the page to which its reference was issued since: a reference has no generation.
fn check(round: u64, bytes: &[u8]) {
    // Nearly always, and much faster.
    if bytes == filled(round) || bytes == filled(written(round)) {
        return;
    }
    for (at, word) in words(bytes).enumerate() {
        let fits = [round, written(round), 0, STAND_IN].contains(&word);
        assert!(fits, "round {round}: word {at} is {word:#x}, after the page was revoked");
    }
}

/// A round under way, as the lender knows it.
struct Round {
    number: u64,
    revocation: Revocation,
    /// Until it is revoked.
    lease: Option<Lease>,
    /// Pages lent since: nobody was told of them.
    decoys: Vec<Lease>,
}

struct Lender {
    granter: LocalGranter,
    control: LentSlice,
    dice: Dice,
    slots: Vec<Option<Round>>,
    next: u64,
    seen: HashMap<(Revocation, &'static str), u64>,
}

impl Lender {
    fn count(&mut self, revocation: Revocation, what: &'static str) {
        *self.seen.entry((revocation, what)).or_default() += 1;
    }

    /// Begins a round in a slot.
    fn begin(&mut self, slot: usize) {
        let number = self.next;
        self.next += 1;
        let lease = self.granter.lend(Access::ReadWrite).unwrap();
        fill(lease.memory(), number);
        store(&self.control, gref_at(slot), lease.gref().0.into());
        store(&self.control, offer_at(slot), number);
        let revocation = match self.dice.roll(3) {
            0 => Revocation::Patient,
            1 => Revocation::Racing,
            _ => Revocation::Forced,
        };
        self.slots[slot] =
            Some(Round { number, revocation, lease: Some(lease), decoys: Vec::new() });
    }

    /// Goes on with the round in a slot; whether it ended.
    fn go_on(&mut self, slot: usize) -> bool {
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

    /// Tries to revoke; the lease if it goes on.
    fn revoke(&mut self, round: &mut Round, lease: Lease, answered: bool) -> Option<Lease> {
        match round.revocation {
            Revocation::Patient if !answered => return Some(lease),
            // At once, or somewhere in the middle of what the user does.
            _ if !answered && self.dice.roll(3) != 0 => return Some(lease),
            Revocation::Patient => self.granter.take_back(lease).unwrap(),
            Revocation::Racing => match self.granter.take_back(lease) {
                Ok(()) => self.count(round.revocation, if answered { "late" } else { "early" }),
                Err(still) => {
                    assert!(!answered, "round {} answered, and is busy", round.number);
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

    /// Lends again what was just revoked, where nobody is told of it. The reference is the next to
    /// be issued, and so is the page; that they part, a page of the other kind goes first.
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

    /// The user is through: nothing of it is where it must not be.
    fn end(&mut self, slot: usize, round: Round) {
        match load(&self.control, outcome_at(slot)) {
            USED => self.count(round.revocation, "used"),
            REFUSED => self.count(round.revocation, "refused"),
            other => panic!("round {} ended as {other}", round.number),
        }
        for lease in round.decoys {
            // Nobody can have written into a page that was lent for reading.
            let wanted = if lease.access() == Access::ReadWrite { POISON } else { STAND_IN };
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
fn no_page_is_used_after_it_was_revoked() {
    let rounds = std::env::var("RINGFENCE_SOAK_ROUNDS").map_or(100_000, |n| n.parse().unwrap());
    let machine = Machine::new();
    let (id, socket) = machine.guest_socket();
    let lender = machine.guest().with_arena(ArenaShape::of(256, 64));
    let mut granter = lender.granter(id).unwrap();
    let control = granter.lend(Access::ReadWrite).unwrap();
    let orders = format!("{} {}", lender.domid(), control.gref());
    let mut child = common::child("the_user_in_a_child", &orders, socket);
    let mut state = Lender {
        granter,
        control: control.memory().clone(),
        dice: Dice(0x9E37_79B9_7F4A_7C15),
        slots: (0..SLOTS).map(|_| None).collect(),
        next: 1,
        seen: HashMap::new(),
    };
    state.fill_stand_ins();
    let begun = Instant::now();
    let outcome =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| state.run(rounds, &mut child)));
    store(&state.control, STOP, 1);
    let mut said = String::new();
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(child.wait().unwrap().success(), "the user said:\n{said}");
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
    let mut seen: Vec<_> = state.seen.iter().map(|(what, n)| format!("{what:?}: {n}")).collect();
    seen.sort();
    eprintln!("{rounds} rounds in {:?}: {}", begun.elapsed(), seen.join(", "));
    // Else this test would have shown nothing.
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
    fn fill_stand_ins(&mut self) {
        let leases: Vec<Lease> =
            std::iter::from_fn(|| self.granter.lend(Access::ReadOnly).ok()).collect();
        for lease in leases {
            fill(lease.memory(), STAND_IN);
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
                        idle &= !self.go_on(slot);
                    }
                }
                if self.slots[slot].is_none() && self.next <= rounds {
                    self.begin(slot);
                    idle = false;
                }
            }
            if idle {
                let silent = last.elapsed();
                assert!(silent < PATIENCE, "the user is silent");
                if silent > Duration::from_secs(1) {
                    assert!(child.try_wait().unwrap().is_none(), "the user is gone");
                }
                std::thread::yield_now();
            } else {
                last = Instant::now();
            }
        }
    }
}

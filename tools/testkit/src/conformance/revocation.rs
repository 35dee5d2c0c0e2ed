//! Conformance cases of revocation.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_platform::{Access, Grantee, Granter, Gref, Lease, LendError, Platform, RevokeError};

use super::bench::{
    Bench, Stop, Verdict, holds, map_one, mapped, pattern, read_one, refused, require, take_back,
    write_one,
};
use super::outcome::Refused;

/// Checks that every use of a revoked page is refused.
fn out_of_reach(grantee: &mut impl Grantee, gref: Gref) -> Verdict {
    for access in [Access::ReadOnly, Access::ReadWrite] {
        let what = format!("mapping a page that is lent no more ({access:?})");
        refused(map_one(grantee, gref, access), Refused::NotIssued, &what)?;
    }
    refused(read_one(grantee, gref), Refused::NotIssued, "copying from such a page")?;
    refused(write_one(grantee, gref, 0, b"x"), Refused::NotIssued, "copying to such a page")
}

/// Copies the content of a page.
fn content(page: &LentSlice) -> Verdict<Vec<u8>> {
    let mut bytes = vec![0; PAGE_SIZE];
    page.copy_to(0, &mut bytes)?;
    Ok(bytes)
}

pub(super) mod a_page_in_use_is_not_taken_back {
    use super::*;

    /// Number of pages granted while the one in use may be granted again.
    const OTHERS: usize = 8;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        let mut leases = bench.lend(&mut granter, Access::ReadWrite, 1, "page")?;
        bench.talk.hear("mapped")?;
        let lease = leases.remove(0);
        let gref = lease.gref();
        let busy = match granter.take_back(lease) {
            Err(still) => {
                require!(still.why == RevokeError::Busy, "the refusal is \"{}\"", still.why);
                require!(
                    still.lease.gref() == gref,
                    "the lease of {} came back",
                    still.lease.gref()
                );
                holds(still.lease.memory(), 0, &pattern(0, PAGE_SIZE), "the page in use")?;
                Some(still.lease)
            }
            Ok(()) => None,
        };
        // In both outcomes, pages granted now are not under the user's old mapping.
        let others = others(&mut granter, gref)?;
        bench.talk.say("others", "lent and filled")?;
        bench.talk.hear("dropped")?;
        if let Some(lease) = busy {
            granter.take_back(lease)?;
        }
        take_back(&mut granter, others)
    }

    fn others(granter: &mut impl Granter, in_use: Gref) -> Verdict<Vec<Lease>> {
        let mut others = Vec::new();
        for _ in 0..OTHERS {
            let lease = granter.lend(Access::ReadWrite)?;
            require!(lease.gref() != in_use, "{in_use} was issued while it is in use");
            lease.memory().copy_from(0, &[0xBB; PAGE_SIZE])?;
            others.push(lease);
        }
        Ok(others)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        let gref = bench.borrowed("page")?[0];
        let page = mapped(&mut grantee, gref, Access::ReadWrite)?;
        let part = page.slice(0, PAGE_SIZE)?;
        drop(page);
        bench.talk.say("mapped", "and held through a part of it")?;
        bench.talk.hear("others")?;
        holds(&part, 0, &pattern(0, PAGE_SIZE), "the page in use")?;
        part.copy_from(0, b"still writable")?;
        drop(part);
        bench.talk.say("dropped", "all")
    }
}

pub(super) mod a_page_taken_back_is_out_of_reach {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        let mut leases = bench.lend(&mut granter, Access::ReadWrite, 2, "pages")?;
        bench.talk.hear("used")?;
        let kept = leases.split_off(1);
        take_back(&mut granter, leases)?;
        bench.talk.say("back", "the first")?;
        bench.talk.hear("done")?;
        holds(kept[0].memory(), 0, &pattern(1, PAGE_SIZE), "the page that stayed lent")?;
        take_back(&mut granter, kept)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        let grefs = bench.borrowed("pages")?;
        drop(mapped(&mut grantee, grefs[0], Access::ReadWrite)?);
        read_one(&mut grantee, grefs[0]).map_err(Stop::failed)?;
        bench.talk.say("used", "and let go of")?;
        bench.talk.hear("back")?;
        out_of_reach(&mut grantee, grefs[0])?;
        let page = mapped(&mut grantee, grefs[1], Access::ReadOnly)?;
        holds(&page, 0, &pattern(1, PAGE_SIZE), "the other page")?;
        drop(page);
        bench.talk.say("done", "nothing is mapped")
    }
}

pub(super) mod lending_again_keeps_generations {
    use super::*;

    const ROUNDS: usize = 20;
    const PAGES: usize = 4;

    /// Checks the content of granted pages over many rounds. A page holds zeros, or what was granted to the
    /// same peer before. A page that was never revoked by force stays in its generation.
    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        let mut known: HashMap<Vec<u8>, u32> = HashMap::new();
        for round in 0..ROUNDS {
            let mut leases = Vec::new();
            for place in 0..PAGES {
                let lease = granter.lend(Access::ReadOnly)?;
                let found = content(lease.memory())?;
                match known.get(&found) {
                    Some(generation) => require!(
                        *generation == lease.generation(),
                        "generation {} became {} without force",
                        generation,
                        lease.generation()
                    ),
                    None => {
                        let mark = pattern(1000 + round * PAGES + place, PAGE_SIZE);
                        lease.memory().copy_from(0, &mark)?;
                        known.insert(mark, lease.generation());
                    }
                }
                leases.push(lease);
            }
            let grefs: Vec<u32> = leases.iter().map(|lease| lease.gref().0).collect();
            if round % 5 == 0 {
                bench.talk.say_numbers(&format!("round-{round}"), &grefs)?;
                for (place, lease) in leases.iter().enumerate() {
                    let sum = checksum(&content(lease.memory())?);
                    bench.talk.say(&format!("sum-{round}-{place}"), sum)?;
                }
                bench.talk.hear(&format!("read-{round}"))?;
            }
            take_back(&mut granter, leases)?;
        }
        Ok(())
    }

    /// Checks that the user sees the current content of a page, whatever its reference named before.
    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        for round in (0..ROUNDS).step_by(5) {
            let grefs = bench.borrowed(&format!("round-{round}"))?;
            for (place, gref) in grefs.into_iter().enumerate() {
                let wanted: u64 = bench.talk.hear_number(&format!("sum-{round}-{place}"))?;
                let page = mapped(&mut grantee, gref, Access::ReadOnly)?;
                let found = checksum(&content(&page)?);
                require!(found == wanted, "round {round}: page {place} is another one");
                drop(page);
                let copied = read_one(&mut grantee, gref).map_err(Stop::failed)?;
                require!(checksum(&copied) == wanted, "round {round}: a copy of another page");
            }
            bench.talk.say(&format!("read-{round}"), "all")?;
        }
        Ok(())
    }

    fn checksum(bytes: &[u8]) -> u64 {
        let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3);
        bytes.iter().fold(0xCBF2_9CE4_8422_2325, step)
    }
}

pub(super) mod every_page_comes_back {
    use super::*;

    /// Number of pages that is enough to detect a leak.
    const ENOUGH: usize = 300;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        let first = all_of_a_kind(&mut granter)?;
        for round in 1..4 {
            let again = all_of_a_kind(&mut granter)?;
            require!(again == first, "round {round}: {again:?} pages were there, {first:?} before");
        }
        Ok(())
    }

    /// Grants all pages, one kind after the other, and takes them back. Returns the numbers by kind.
    fn all_of_a_kind(granter: &mut impl Granter) -> Verdict<[usize; 2]> {
        let mut counts = [0; 2];
        for (count, access) in counts.iter_mut().zip([Access::ReadWrite, Access::ReadOnly]) {
            let mut leases = Vec::new();
            while leases.len() < ENOUGH {
                match granter.lend(access) {
                    Ok(lease) => leases.push(lease),
                    Err(LendError::NoPage { .. } | LendError::NoReference { .. }) => break,
                    Err(other) => return Err(other.into()),
                }
            }
            require!(!leases.is_empty(), "no page at all to lend ({access:?})");
            *count = leases.len();
            take_back(granter, leases)?;
        }
        Ok(counts)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        bench.grantee().map(drop)
    }
}

/// Revokes by force pages that the user has mapped. On a platform without forced revocation, waits until
/// the user has unmapped them, takes them back and skips the case.
fn force<P: Platform>(
    bench: &mut Bench<'_, P>,
    granter: &mut P::Granter,
    leases: Vec<Lease>,
) -> Verdict {
    match granter.revoke_forced(leases) {
        Ok(()) => bench.talk.say("forced", "yes"),
        Err((leases, RevokeError::NeedsPeer)) => {
            bench.talk.say("forced", "no")?;
            bench.talk.hear("dropped")?;
            take_back(granter, leases)?;
            Err(Stop::skipped("the platform cannot revoke alone"))
        }
        Err((_, why)) => Err(Stop::Failed(format!("revoking by force: {why}"))),
    }
}

/// Returns `true` if the lender revoked by force. If not, releases `pages` and reports that.
fn was_forced<P: Platform>(bench: &mut Bench<'_, P>, pages: &mut Vec<LentSlice>) -> Verdict<bool> {
    let forced = bench.talk.hear("forced")? == "yes";
    if !forced {
        pages.clear();
        bench.talk.say("dropped", "all")?;
    }
    Ok(forced)
}

pub(super) mod force_takes_a_page_in_use {
    use super::*;

    const OTHERS: usize = 32;

    /// Number of pages among which the reference is searched.
    const LOOKED_THROUGH: usize = 4096;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        let leases = bench.lend(&mut granter, Access::ReadWrite, 1, "page")?;
        let (gref, generation) = (leases[0].gref(), leases[0].generation());
        let secret = pattern(777_777, PAGE_SIZE);
        leases[0].memory().copy_from(0, &secret)?;
        bench.talk.hear("mapped")?;
        force(bench, &mut granter, leases)?;
        bench.talk.hear("looked")?;
        // The user still has the page mapped. Pages granted now must be neither under that mapping nor
        // under that reference.
        let mut others = Vec::new();
        for _ in 0..OTHERS {
            let lease = granter.lend(Access::ReadWrite)?;
            require!(lease.gref() != gref, "{gref} was issued while the user has it mapped");
            let destroyed = content(lease.memory())? != secret;
            require!(destroyed, "what was revoked by force is still in a page that is lent");
            lease.memory().copy_from(0, &[0xCC; PAGE_SIZE])?;
            others.push(lease);
        }
        bench.talk.say("others", "lent and filled")?;
        bench.talk.hear("dropped")?;
        for lease in &others {
            holds(lease.memory(), 0, &[0xCC; PAGE_SIZE], "a page under no old mapping")?;
        }
        take_back(&mut granter, others)?;
        comes_back(&mut granter, gref, generation)
    }

    /// Checks that the reference is issued again after the user has unmapped it. Its page was never
    /// revoked or has a later generation.
    fn comes_back(granter: &mut impl Granter, gref: Gref, generation: u32) -> Verdict {
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline {
            let mut leases = Vec::new();
            while leases.len() < LOOKED_THROUGH
                && let Ok(lease) = granter.lend(Access::ReadWrite)
            {
                leases.push(lease);
            }
            let found = leases.iter().any(|lease| lease.gref() == gref);
            let later = leases.iter().any(|lease| lease.generation() == generation.wrapping_add(1));
            take_back(granter, leases)?;
            if found {
                require!(later, "no page is in the generation after {generation}");
                return Ok(());
            }
        }
        Err(Stop::Failed(format!("{gref} was not issued again")))
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        let gref = bench.borrowed("page")?[0];
        let mut pages = vec![mapped(&mut grantee, gref, Access::ReadWrite)?];
        bench.talk.say("mapped", "and held")?;
        if !was_forced(bench, &mut pages)? {
            return Ok(());
        }
        holds(&pages[0], 0, &[0; PAGE_SIZE], "a mapping of the page revoked by force")?;
        out_of_reach(&mut grantee, gref)?;
        bench.talk.say("looked", "nothing is left")?;
        bench.talk.hear("others")?;
        holds(&pages[0], 0, &[0; PAGE_SIZE], "that mapping, after others were lent")?;
        pages[0].copy_from(0, b"written in vain")?;
        pages.clear();
        bench.talk.say("dropped", "all")
    }
}

pub(super) mod force_takes_many_at_once {
    use super::*;

    const PAGES: usize = 60;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        let mut leases = bench.lend(&mut granter, Access::ReadWrite, PAGES, "writable")?;
        let read_only = bench.lend(&mut granter, Access::ReadOnly, PAGES, "read-only")?;
        bench.talk.hear("mapped")?;
        // Every third page stays, so runs and single pages of both kinds are revoked.
        let mut kept = Vec::new();
        let mut doomed = Vec::new();
        for (place, lease) in leases.drain(..).enumerate().chain(read_only.into_iter().enumerate())
        {
            if place % 3 == 1 { kept.push((place, lease)) } else { doomed.push(lease) }
        }
        doomed.reverse();
        if let Err(stop) = force(bench, &mut granter, doomed) {
            if let Stop::Skipped(_) = &stop {
                take_back(&mut granter, kept.into_iter().map(|(_, lease)| lease).collect())?;
            }
            return Err(stop);
        }
        bench.talk.hear("dropped")?;
        for (place, lease) in &kept {
            holds(lease.memory(), 0, &pattern(*place, PAGE_SIZE), "a page that stayed lent")?;
        }
        take_back(&mut granter, kept.into_iter().map(|(_, lease)| lease).collect())
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        let mut pages = Vec::new();
        for (label, access) in [("writable", Access::ReadWrite), ("read-only", Access::ReadOnly)] {
            let wanted: Vec<_> =
                bench.borrowed(label)?.into_iter().map(|gref| (gref, access)).collect();
            let mut out = Vec::new();
            grantee.map(&wanted, &mut out);
            for page in out {
                pages.push(page.map_err(|s| Stop::Failed(format!("a {label} page: {s}")))?);
            }
        }
        bench.talk.say("mapped", "all")?;
        if !was_forced(bench, &mut pages)? {
            return Ok(());
        }
        for (place, page) in pages.iter().enumerate() {
            let place = place % PAGES;
            let wanted =
                if place % 3 == 1 { pattern(place, PAGE_SIZE) } else { vec![0; PAGE_SIZE] };
            holds(page, 0, &wanted, &format!("page {place} after every third stayed"))?;
        }
        pages.clear();
        bench.talk.say("dropped", "all")
    }
}

//! Conformance cases of granting and mapping pages.

use ringfence_memory::{LentSlice, OutOfRange, PAGE_SIZE};
use ringfence_platform::{Access, GrantStatus, Grantee, Granter, Gref, Platform};

use super::bench::{
    Bench, Stop, Verdict, holds, map_one, mapped, pattern, read_one, refused, require, take_back,
    write_one,
};
use super::outcome::Refused;

pub(super) mod bytes_are_seen_both_ways {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        let leases = bench.lend(&mut granter, Access::ReadWrite, 1, "page")?;
        bench.talk.hear("written")?;
        let page = leases[0].memory();
        holds(page, 1000, b"from the user", "what the user wrote")?;
        holds(page, 0, &pattern(0, 1000), "what stands before it")?;
        page.copy_from(PAGE_SIZE - 3, b"end")?;
        bench.talk.say("answered", "at the end")?;
        bench.talk.hear("dropped")?;
        take_back(&mut granter, leases)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        let gref = bench.borrowed("page")?[0];
        let page = mapped(&mut grantee, gref, Access::ReadWrite)?;
        holds(&page, 0, &pattern(0, PAGE_SIZE), "what was lent")?;
        // A part of the page has the content at its offset.
        page.slice(1000, 100)?.copy_from(0, b"from the user")?;
        bench.talk.say("written", "at 1000")?;
        bench.talk.hear("answered")?;
        holds(&page, PAGE_SIZE - 3, b"end", "what the lender wrote into the mapped page")?;
        let beyond = page.copy_to(PAGE_SIZE - 2, &mut [0; 3]);
        require!(matches!(beyond, Err(OutOfRange::Bounds { .. })), "a read beyond the page");
        drop(page);
        bench.talk.say("dropped", "the mapping")
    }
}

pub(super) mod two_mappings_share_a_page {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        let leases = bench.lend(&mut granter, Access::ReadWrite, 1, "page")?;
        bench.talk.hear("dropped")?;
        holds(leases[0].memory(), 7, b"second", "what the second mapping wrote")?;
        take_back(&mut granter, leases)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        let gref = bench.borrowed("page")?[0];
        let first = mapped(&mut grantee, gref, Access::ReadOnly)?;
        let mut pair = Vec::new();
        grantee.map(&[(gref, Access::ReadWrite), (gref, Access::ReadOnly)], &mut pair);
        let [Ok(second), Ok(third)] = &pair[..] else {
            return Err(Stop::Failed(format!("the page twice in one call: {pair:?}")));
        };
        second.copy_from(7, b"second")?;
        holds(&first, 7, b"second", "seen in the first mapping")?;
        holds(third, 7, b"second", "seen in the third mapping")?;
        // Each mapping stays until its last handle, of any size, is dropped.
        let part = first.slice(7, 6)?;
        drop(first);
        pair.clear();
        holds(&part, 0, b"second", "seen through what is left")?;
        drop(part);
        bench.talk.say("dropped", "all")
    }
}

pub(super) mod a_read_only_mapping_refuses_writes {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        let leases = bench.lend(&mut granter, Access::ReadWrite, 1, "page")?;
        bench.talk.hear("dropped")?;
        holds(leases[0].memory(), 0, &pattern(0, PAGE_SIZE), "the page afterwards")?;
        take_back(&mut granter, leases)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        let gref = bench.borrowed("page")?[0];
        let page = mapped(&mut grantee, gref, Access::ReadOnly)?;
        refuses_writes(&page)?;
        drop(page);
        bench.talk.say("dropped", "the mapping")
    }
}

/// Checks that a read-only mapping cannot be written through.
fn refuses_writes(page: &LentSlice) -> Verdict {
    require!(!page.is_writable(), "the mapping says that it is writable");
    let attempts = [
        page.copy_from(0, b"x"),
        page.zero(0, 1),
        page.store_u32(0, 1, core::sync::atomic::Ordering::SeqCst),
        page.slice(8, 8)?.copy_from(0, b"x"),
    ];
    for (which, attempt) in attempts.into_iter().enumerate() {
        require!(attempt == Err(OutOfRange::ReadOnly), "write {which}: {attempt:?}");
    }
    Ok(())
}

pub(super) mod a_page_lent_for_reading_is_not_written {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        let leases = bench.lend(&mut granter, Access::ReadOnly, 1, "page")?;
        bench.talk.hear("mapped")?;
        let page = leases[0].memory();
        page.copy_from(0, b"changed by its owner")?;
        bench.talk.say("changed", "at 0")?;
        bench.talk.hear("dropped")?;
        holds(page, 20, &pattern(0, PAGE_SIZE)[20..], "the page afterwards")?;
        take_back(&mut granter, leases)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        let gref = bench.borrowed("page")?[0];
        let writable = map_one(&mut grantee, gref, Access::ReadWrite);
        refused(writable, Refused::ReadOnly, "a writable mapping")?;
        refused(write_one(&mut grantee, gref, 50, b"no"), Refused::ReadOnly, "a write by copy")?;
        // The same in one call with a mapping that is allowed.
        let mut both = Vec::new();
        grantee.map(&[(gref, Access::ReadWrite), (gref, Access::ReadOnly)], &mut both);
        require!(both.len() == 2, "{} results for 2 pages", both.len());
        let page = both.pop().ok_or_else(|| Stop::failed("no result"))?;
        let page = page.map_err(|status| Stop::Failed(format!("for reading: {status}")))?;
        refused(both.remove(0), Refused::ReadOnly, "a writable mapping among others")?;
        refuses_writes(&page)?;
        bench.talk.say("mapped", "for reading")?;
        bench.talk.hear("changed")?;
        holds(&page, 0, b"changed by its owner", "what the owner wrote")?;
        drop(page);
        bench.talk.say("dropped", "the mapping")
    }
}

pub(super) mod what_was_not_issued_is_refused {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        // A number inside the table that is no longer issued.
        let mut leases = bench.lend(&mut granter, Access::ReadWrite, 2, "pages")?;
        let issued = leases.split_off(1);
        take_back(&mut granter, leases)?;
        bench.talk.say("back", "the first")?;
        bench.talk.hear("done")?;
        holds(issued[0].memory(), 0, &pattern(1, PAGE_SIZE), "the page that was lent")?;
        take_back(&mut granter, issued)
    }

    /// References that are never issued: 0 and 1 are reserved, because a toolstack on Xen grants the pages
    /// of a domain's console and store under them. A table has at most 2^32 / 8 entries.
    const NEVER: [u32; 12] =
        [0, 1, 2, 3, 4, 5, 6, 7, 0x1FFF_FFFF, 0x7FFF_FFFF, 0x8000_0008, 0xFFFF_FFFF];

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        let grefs = bench.borrowed("pages")?;
        bench.talk.hear("back")?;
        let (former, issued) = (grefs[0], grefs[1]);
        let bad: Vec<Gref> = NEVER.map(Gref).into_iter().chain([former]).collect();
        for &gref in &bad {
            for access in [Access::ReadOnly, Access::ReadWrite] {
                let what = format!("mapping {gref} ({access:?})");
                refused(map_one(&mut grantee, gref, access), Refused::NotIssued, &what)?;
            }
            let what = format!("copying from {gref}");
            refused(read_one(&mut grantee, gref), Refused::NotIssued, &what)?;
            let what = format!("copying to {gref}");
            refused(write_one(&mut grantee, gref, 0, b"x"), Refused::NotIssued, &what)?;
        }
        among_good_ones(&mut grantee, &bad, issued)?;
        bench.talk.say("done", "nothing is mapped")
    }

    /// Checks that each page of a batch has its own status (XSA-361).
    fn among_good_ones(grantee: &mut impl Grantee, bad: &[Gref], good: Gref) -> Verdict {
        let pages: Vec<_> = bad
            .iter()
            .flat_map(|bad| [(good, Access::ReadOnly), (*bad, Access::ReadOnly)])
            .collect();
        let mut out = Vec::new();
        grantee.map(&pages, &mut out);
        require!(out.len() == pages.len(), "{} results for {} pages", out.len(), pages.len());
        for ((gref, _), result) in pages.iter().zip(out) {
            match result {
                Ok(page) if *gref == good => {
                    holds(&page, 0, &pattern(1, PAGE_SIZE), "the good page")?;
                }
                other if *gref != good => refused(other, Refused::NotIssued, "a bad page")?,
                other => return Err(Stop::Failed(format!("the good page: {other:?}"))),
            }
        }
        Ok(())
    }
}

pub(super) mod what_another_domain_was_lent_is_refused {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let third = bench.third.ok_or_else(|| Stop::skipped("there is no third domain"))?;
        let _open = bench.granter()?;
        let mut granter = bench.platform.granter(third)?;
        let mut leases = Vec::new();
        for access in [Access::ReadOnly, Access::ReadWrite] {
            let lease = granter.lend(access)?;
            lease.memory().copy_from(0, &pattern(0, PAGE_SIZE))?;
            leases.push(lease);
        }
        let grefs: Vec<u32> = leases.iter().map(|lease| lease.gref().0).collect();
        bench.talk.say_numbers("pages", &grefs)?;
        bench.talk.hear("done")?;
        for lease in &leases {
            holds(lease.memory(), 0, &pattern(0, PAGE_SIZE), "the page")?;
        }
        take_back(&mut granter, leases)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        for gref in bench.borrowed("pages")? {
            for access in [Access::ReadOnly, Access::ReadWrite] {
                let found = map_one(&mut grantee, gref, access);
                refused(found, Refused::OtherDomain, "mapping another's page")?;
            }
            let found = read_one(&mut grantee, gref);
            refused(found, Refused::OtherDomain, "copying from another's page")?;
            let found = write_one(&mut grantee, gref, 0, b"x");
            refused(found, Refused::OtherDomain, "copying to another's page")?;
        }
        bench.talk.say("done", "nothing is mapped")
    }
}

/// Number of pages in the largest batch.
const MANY: usize = 256;

pub(super) mod many_pages_in_one_batch {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        let leases = bench.lend(&mut granter, Access::ReadWrite, MANY, "pages")?;
        bench.talk.hear("dropped")?;
        for (place, lease) in leases.iter().enumerate() {
            let text = format!("page {place}");
            holds(lease.memory(), 2048, text.as_bytes(), "what the user wrote")?;
        }
        take_back(&mut granter, leases)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        let grefs = bench.borrowed("pages")?;
        // Every second page in reverse order, then the others forwards: adjacent and separate pages.
        let order: Vec<usize> = (0..MANY).rev().step_by(2).chain((0..MANY).step_by(2)).collect();
        let pages: Vec<_> = order.iter().map(|at| (grefs[*at], Access::ReadWrite)).collect();
        let mut out = Vec::new();
        grantee.map(&pages, &mut out);
        require!(out.len() == MANY, "{} results for {MANY} pages", out.len());
        let mut held = Vec::with_capacity(MANY);
        for (place, page) in order.iter().zip(out) {
            let page = page.map_err(|s| Stop::Failed(format!("page {place}: {s}")))?;
            holds(&page, 0, &pattern(*place, PAGE_SIZE), "a page of many")?;
            page.copy_from(2048, format!("page {place}").as_bytes())?;
            held.push(page);
        }
        // In another order than the mappings.
        while !held.is_empty() {
            held.swap_remove(held.len() / 3);
        }
        bench.talk.say("dropped", "all")
    }
}

pub(super) mod too_many_mappings_are_refused {
    use super::*;

    /// Number of mappings without a refusal from which a platform counts as unlimited.
    const ENOUGH: usize = 16384;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        let leases = bench.lend(&mut granter, Access::ReadOnly, MANY, "pages")?;
        bench.talk.hear("dropped")?;
        take_back(&mut granter, leases)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        let grefs = bench.borrowed("pages")?;
        let pages: Vec<_> = grefs.iter().map(|gref| (*gref, Access::ReadOnly)).collect();
        let mut held = Vec::new();
        let mut limited = None;
        while limited.is_none() && held.len() < ENOUGH {
            let mut out = Vec::new();
            grantee.map(&pages, &mut out);
            require!(out.len() == MANY, "{} results for {MANY} pages", out.len());
            for page in out {
                match page {
                    Ok(page) => held.push(page),
                    Err(status) => limited = Some(status),
                }
            }
        }
        if let Some(status) = limited {
            refused::<()>(Err(status), Refused::NoRoom, "a mapping beyond the limit")?;
        }
        for page in held.chunks_exact(MANY).filter_map(|batch| batch.last()) {
            holds(page, 0, &pattern(MANY - 1, PAGE_SIZE), "a page mapped before the limit")?;
        }
        held.clear();
        // Unmapping makes room for new mappings.
        let page = map_one(&mut grantee, grefs[0], Access::ReadOnly)
            .map_err(|status: GrantStatus| Stop::Failed(format!("after dropping: {status}")))?;
        holds(&page, 0, &pattern(0, PAGE_SIZE), "a page mapped after the limit")?;
        drop(page);
        bench.talk.say("dropped", "all")?;
        if limited.is_none() {
            return Err(Stop::Skipped(format!("no limit was met with {ENOUGH} mappings")));
        }
        Ok(())
    }
}

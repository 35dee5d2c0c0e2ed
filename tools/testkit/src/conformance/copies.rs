//! Conformance cases of grant copies, without mappings.

use ringfence_memory::PAGE_SIZE;
use ringfence_platform::copy::BadRange;
use ringfence_platform::{Access, CopyList, CopyOps, GrantStatus, Grantee, Gref, Platform};

use super::bench::{
    Bench, Stop, Verdict, holds, mapped, pattern, read_one, require, same, take_back, write_one,
};
use super::outcome::Refused;

/// Checks the statuses of a batch; `None` stands for okay.
fn statuses(ops: &CopyOps, wanted: &[Option<Refused>]) -> Verdict {
    let found = ops.statuses();
    require!(found.len() == wanted.len(), "{} statuses for {} copies", found.len(), wanted.len());
    for (place, (status, wanted)) in found.iter().zip(wanted).enumerate() {
        let fits = match wanted {
            None => *status == GrantStatus::Okay,
            Some(why) => why.statuses().contains(status),
        };
        require!(fits, "copy {place}: \"{status}\", expected {wanted:?}");
    }
    Ok(())
}

/// Checks that every copy of a batch succeeded.
fn all_done(ops: &CopyOps, count: usize) -> Verdict {
    statuses(ops, &vec![None; count])
}

pub(super) mod copies_go_both_ways {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        let mut leases = bench.lend(&mut granter, Access::ReadWrite, 1, "writable")?;
        leases.extend(bench.lend(&mut granter, Access::ReadOnly, 1, "read-only")?);
        bench.talk.hear("done")?;
        let page = leases[0].memory();
        holds(page, 0, &pattern(0, 300), "what stands before the bytes written")?;
        holds(page, 300, b"by copy", "the bytes written")?;
        holds(page, 307, &pattern(0, PAGE_SIZE)[307..], "what stands behind them")?;
        holds(leases[1].memory(), 0, &pattern(0, PAGE_SIZE), "the page lent for reading")?;
        take_back(&mut granter, leases)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        let grefs = [bench.borrowed("writable")?[0], bench.borrowed("read-only")?[0]];
        let wanted = pattern(0, PAGE_SIZE);
        for gref in grefs {
            let found = read_one(&mut grantee, gref).map_err(Stop::failed)?;
            same(&found, &wanted, "a whole page")?;
        }
        let (mut middle, mut end, mut none) = ([0u8; 99], [0u8; 1], [0u8; 0]);
        let mut ops = CopyOps::new();
        let mut list = ops.begin();
        list.read(grefs[0], 1001, &mut middle)?;
        list.read(grefs[1], 4095, &mut end)?;
        list.read(grefs[1], 4096, &mut none)?;
        list.write(grefs[0], 300, b"by copy")?;
        grantee.copy(list);
        all_done(&ops, 4)?;
        same(&middle, &wanted[1001..1100], "a part")?;
        same(&end, &wanted[4095..], "the last byte")?;
        let before = bench.platform.counters().values();
        write_one(&mut grantee, grefs[0], 300, b"by copy").map_err(Stop::failed)?;
        let counted = bench.platform.counters().values().since(&before);
        require!(
            (counted.grant_copies, counted.grant_copy_bytes) == (1, 7),
            "one copy of 7 bytes was counted as {counted:?}"
        );
        bench.talk.say("done", "nothing is mapped")
    }
}

pub(super) mod a_bad_copy_costs_only_itself {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        let mut leases = bench.lend(&mut granter, Access::ReadWrite, 3, "writable")?;
        leases.extend(bench.lend(&mut granter, Access::ReadOnly, 1, "read-only")?);
        take_back(&mut granter, vec![leases.remove(1)])?;
        bench.talk.say("back", "the one in the middle")?;
        bench.talk.hear("done")?;
        for (lease, written) in leases.iter().zip([&b"one"[..], b"two", b""]) {
            holds(lease.memory(), 0, written, "what was written")?;
        }
        holds(leases[2].memory(), 0, &pattern(0, PAGE_SIZE), "the page lent for reading")?;
        take_back(&mut granter, leases)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        let pages = bench.borrowed("writable")?;
        let read_only = bench.borrowed("read-only")?[0];
        bench.talk.hear("back")?;
        let mut read = [[0xEEu8; 64]; 5];
        let [a, b, c, d, e] = &mut read;
        let mut ops = CopyOps::new();
        let mut list = ops.begin();
        list.read(pages[0], 100, a)?;
        list.read(pages[1], 100, b)?;
        list.read(pages[2], 100, c)?;
        list.read(Gref(u32::MAX), 164, d)?;
        list.write(pages[0], 0, b"one")?;
        list.write(read_only, 0, b"no!")?;
        list.write(pages[1], 0, b"no!")?;
        list.write(pages[2], 0, b"two")?;
        list.read(read_only, 100, e)?;
        grantee.copy(list);
        let (gone, denied) = (Some(Refused::NotIssued), Some(Refused::ReadOnly));
        statuses(&ops, &[None, gone, None, gone, None, denied, gone, None, None])?;
        same(&read[0], &pattern(0, 164)[100..], "the first read")?;
        same(&read[2], &pattern(2, 164)[100..], "the read behind the bad one")?;
        same(&read[4], &pattern(0, 164)[100..], "the last read")?;
        same(&read[1], &[0xEE; 64], "what the bad read was for")?;
        bench.talk.say("done", "nothing is mapped")
    }
}

pub(super) mod copies_in_a_row_keep_their_places {
    use super::*;

    const PAGES: usize = 6;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        let leases = bench.lend(&mut granter, Access::ReadWrite, PAGES, "pages")?;
        bench.talk.hear("done")?;
        let wanted = pattern(99, PAGES * PAGE_SIZE);
        for (lease, wanted) in leases.iter().zip(wanted.chunks(PAGE_SIZE)) {
            holds(lease.memory(), 0, wanted, "a page written in pieces")?;
        }
        take_back(&mut granter, leases)
    }

    /// Splits all pages into pieces of `len` bytes: (page, offset, bytes).
    fn pieces(len: usize) -> Verdict<Vec<(usize, u16, usize)>> {
        let mut pieces = Vec::new();
        for page in 0..PAGES {
            for offset in (0..PAGE_SIZE).step_by(len) {
                let at = u16::try_from(offset).map_err(Stop::failed)?;
                pieces.push((page, at, len.min(PAGE_SIZE - offset)));
            }
        }
        Ok(pieces)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        let grefs = bench.borrowed("pages")?;
        let wanted: Vec<u8> = (0..PAGES).flat_map(|place| pattern(place, PAGE_SIZE)).collect();
        let mut ops = CopyOps::new();
        // Many pieces for each page, a few, and one: platforms may join adjacent pieces.
        for len in [61, 1000, 2048, PAGE_SIZE] {
            let pieces = pieces(len)?;
            let mut found = vec![0; PAGES * PAGE_SIZE];
            let mut list = ops.begin();
            let mut rest = &mut found[..];
            for &(page, offset, len) in &pieces {
                let (into, behind) = rest.split_at_mut(len);
                list.read(grefs[page], offset, into)?;
                rest = behind;
            }
            grantee.copy(list);
            all_done(&ops, pieces.len())?;
            same(&found, &wanted, "pages read in pieces")?;
        }
        write_in_pieces(&mut grantee, &mut ops, &grefs)?;
        bench.talk.say("done", "nothing is mapped")
    }

    /// Writes every second piece, then the others in reverse order.
    fn write_in_pieces(grantee: &mut impl Grantee, ops: &mut CopyOps, grefs: &[Gref]) -> Verdict {
        let bytes = pattern(99, PAGES * PAGE_SIZE);
        let pieces = pieces(700)?;
        let mut order: Vec<_> = pieces.iter().step_by(2).collect();
        order.extend(pieces.iter().skip(1).step_by(2).rev());
        let mut list = ops.begin();
        for (page, offset, len) in order {
            let from = page * PAGE_SIZE + usize::from(*offset);
            list.write(grefs[*page], *offset, &bytes[from..from + len])?;
        }
        grantee.copy(list);
        all_done(ops, pieces.len())
    }
}

pub(super) mod a_copy_stays_in_its_page {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        let leases = bench.lend(&mut granter, Access::ReadWrite, 2, "pages")?;
        bench.talk.hear("done")?;
        for (place, lease) in leases.iter().enumerate() {
            holds(lease.memory(), 0, &pattern(place, PAGE_SIZE), "a page nobody wrote")?;
        }
        take_back(&mut granter, leases)
    }

    fn adds_nothing(what: &str, list: &CopyList<'_, '_>, added: &Result<(), BadRange>) -> Verdict {
        require!(added.is_err(), "{what} was taken");
        require!(list.is_empty(), "{what} was refused and added");
        Ok(())
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        let grefs = bench.borrowed("pages")?;
        let page = mapped(&mut grantee, grefs[1], Access::ReadOnly)?;
        let (mut two, mut huge) = ([0u8; 2], vec![0u8; 70_000]);
        let mut ops = CopyOps::new();
        let mut list = ops.begin();
        let added = list.read(grefs[0], 4095, &mut two);
        adds_nothing("2 bytes at 4095", &list, &added)?;
        let added = list.read(grefs[0], 0, &mut huge);
        adds_nothing("70,000 bytes", &list, &added)?;
        let added = list.write(grefs[0], 4096, b"x");
        adds_nothing("a byte behind the page", &list, &added)?;
        let added = list.write(grefs[0], u16::MAX, b"");
        adds_nothing("nothing, far behind the page", &list, &added)?;
        let added = list.write_lent(grefs[0], 4000, &page, 0, 97);
        adds_nothing("97 lent bytes at 4000", &list, &added)?;
        let added = list.write_lent(grefs[0], 0, &page, 4000, 97);
        adds_nothing("lent bytes beyond what is lent", &list, &added)?;
        let added = list.write_lent(grefs[0], 0, &page, usize::MAX, 2);
        adds_nothing("lent bytes at the end of the world", &list, &added)?;
        grantee.copy(list);
        all_done(&ops, 0)?;
        drop(page);
        bench.talk.say("done", "nothing is mapped")
    }
}

pub(super) mod lent_bytes_are_copied_on {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut granter = bench.granter()?;
        let mut leases = bench.lend(&mut granter, Access::ReadOnly, 1, "source")?;
        leases.extend(bench.lend(&mut granter, Access::ReadWrite, 2, "pages")?);
        bench.talk.hear("done")?;
        let source = pattern(0, PAGE_SIZE);
        holds(leases[1].memory(), 10, &source[500..1510], "what was copied on")?;
        holds(leases[1].memory(), 0, &source[..10], "what stands before it")?;
        holds(leases[1].memory(), 1020, b"private", "the private bytes behind it")?;
        holds(leases[2].memory(), 0, &source, "the whole page")?;
        take_back(&mut granter, leases)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let mut grantee = bench.grantee()?;
        let source = bench.borrowed("source")?[0];
        let pages = bench.borrowed("pages")?;
        let page = mapped(&mut grantee, source, Access::ReadOnly)?;
        let part = page.slice(400, 2000)?;
        let mut ops = CopyOps::new();
        let mut list = ops.begin();
        list.write_lent(pages[0], 10, &part, 100, 1000)?;
        list.write_lent(pages[0], 1010, &page, 1500, 10)?;
        list.write_lent(pages[0], 4096, &page, 4096, 0)?;
        list.write(pages[0], 1020, b"private")?;
        list.write_lent(Gref(3), 0, &page, 0, 64)?;
        list.write_lent(source, 0, &page, 0, 64)?;
        list.write_lent(pages[1], 0, &page, 0, PAGE_SIZE)?;
        grantee.copy(list);
        let (gone, denied) = (Some(Refused::NotIssued), Some(Refused::ReadOnly));
        statuses(&ops, &[None, None, None, None, gone, denied, None])?;
        drop((page, part));
        bench.talk.say("done", "nothing is mapped")
    }
}

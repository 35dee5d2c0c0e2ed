//! Shared parts of the cases: verdicts, and the platform under test with helpers.

use std::fmt;

use ringfence_memory::{LentSlice, OutOfRange, PAGE_SIZE};

use super::dialogue::Dialogue;
use super::outcome::{Outcome, Refused};
use ringfence_platform::copy::BadRange;
use ringfence_platform::{
    Access, ChannelError, CopyOps, DomId, GrantStatus, Grantee, Granter, Gref, Lease, LendError,
    Platform, PlatformError, StillLent,
};
use ringfence_xenstore::StoreError;

/// Reasons for which a half of a case stops.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Stop {
    /// Failed check, with its message.
    Failed(String),
    /// Case that does not apply to the platform.
    Skipped(String),
}

impl Stop {
    pub(super) fn failed(what: impl fmt::Display) -> Stop {
        Stop::Failed(what.to_string())
    }

    pub(super) fn skipped(why: impl fmt::Display) -> Stop {
        Stop::Skipped(why.to_string())
    }

    pub(super) fn into_outcome(self) -> Outcome {
        match self {
            Stop::Failed(why) => Outcome::Failed(why),
            Stop::Skipped(why) => Outcome::Skipped(why),
        }
    }
}

macro_rules! failures {
    ($($error:ty),* $(,)?) => {
        $(impl From<$error> for Stop {
            fn from(error: $error) -> Stop {
                Stop::failed(error)
            }
        })*
    };
}

failures!(PlatformError, StoreError, LendError, ChannelError, OutOfRange, BadRange, StillLent);

/// Result of a half of a case.
pub(super) type Verdict<T = ()> = Result<T, Stop>;

/// Fails the half unless the condition holds.
macro_rules! require {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err($crate::conformance::bench::Stop::Failed(format!($($text)+)));
        }
    };
}
pub(super) use require;

/// Platform under test, with the dialogue to the other half.
pub(super) struct Bench<'p, P: Platform> {
    pub(super) platform: &'p P,
    pub(super) talk: Dialogue,
    pub(super) peer: DomId,
    pub(super) third: Option<DomId>,
}

impl<'p, P: Platform> Bench<'p, P> {
    pub(super) fn new(
        platform: &'p P,
        talk: Dialogue,
        peer: DomId,
        third: Option<DomId>,
    ) -> Bench<'p, P> {
        Bench { platform, talk, peer, third }
    }

    /// Runs a half of a case, and checks that nothing stays mapped after it.
    pub(super) fn watched(&mut self, half: fn(&mut Self) -> Verdict) -> Verdict {
        let before = self.platform.counters().values();
        half(self)?;
        let done = self.platform.counters().values().since(&before);
        require!(
            done.grant_maps == done.grant_unmaps,
            "{} pages were mapped, {} unmapped",
            done.grant_maps,
            done.grant_unmaps
        );
        Ok(())
    }

    /// Creates the lender's granter and announces it to the user.
    pub(super) fn granter(&mut self) -> Verdict<P::Granter> {
        let granter = self.platform.granter(self.peer)?;
        require!(granter.peer() == self.peer, "the granter lends to {}", granter.peer());
        self.talk.say("granter", "there")?;
        Ok(granter)
    }

    /// Creates the user's grantee after the lender has announced its granter.
    pub(super) fn grantee(&mut self) -> Verdict<P::Grantee> {
        self.talk.hear("granter")?;
        let grantee = self.platform.grantee(self.peer)?;
        require!(grantee.granter() == self.peer, "the grantee uses pages of {}", grantee.granter());
        Ok(grantee)
    }

    /// Grants `count` pages, each filled with [`pattern`] of its index, and announces them.
    pub(super) fn lend(
        &mut self,
        granter: &mut P::Granter,
        access: Access,
        count: usize,
        label: &str,
    ) -> Verdict<Vec<Lease>> {
        let mut leases = Vec::with_capacity(count);
        for place in 0..count {
            let lease = granter.lend(access)?;
            require!(lease.access() == access, "asked for {access:?}, lent {:?}", lease.access());
            require!(lease.memory().len() == PAGE_SIZE, "a page of {}", lease.memory().len());
            require!(lease.gref() >= Gref::FIRST_FREE, "{} is a reserved number", lease.gref());
            let taken = leases.iter().any(|other: &Lease| other.gref() == lease.gref());
            require!(!taken, "{} was issued twice", lease.gref());
            lease.memory().copy_from(0, &pattern(place, PAGE_SIZE))?;
            leases.push(lease);
        }
        let grefs: Vec<u32> = leases.iter().map(|lease| lease.gref().0).collect();
        self.talk.say_numbers(label, &grefs)?;
        Ok(leases)
    }

    /// Returns the references that the lender announced.
    pub(super) fn borrowed(&mut self, label: &str) -> Verdict<Vec<Gref>> {
        Ok(self.talk.hear_numbers(label)?.into_iter().map(Gref).collect())
    }
}

/// Takes pages back that the user has released.
pub(super) fn take_back(granter: &mut impl Granter, leases: Vec<Lease>) -> Verdict {
    for lease in leases {
        granter.take_back(lease)?;
    }
    Ok(())
}

/// Maps one page and returns its result.
pub(super) fn map_one(
    grantee: &mut impl Grantee,
    gref: Gref,
    access: Access,
) -> Result<LentSlice, GrantStatus> {
    let mut out = Vec::with_capacity(1);
    grantee.map(&[(gref, access)], &mut out);
    match (out.pop(), out.is_empty()) {
        (Some(result), true) => result,
        // Exactly one result must be returned for one page.
        _ => Err(GrantStatus::Unknown(i16::MAX)),
    }
}

/// Maps one page; a refusal fails the half.
pub(super) fn mapped(grantee: &mut impl Grantee, gref: Gref, access: Access) -> Verdict<LentSlice> {
    let page = map_one(grantee, gref, access)
        .map_err(|status| Stop::Failed(format!("{gref} was not mapped: {status}")))?;
    require!(page.len() == PAGE_SIZE, "a mapping of {} bytes", page.len());
    Ok(page)
}

/// Copies bytes out of one page.
pub(super) fn read_one(grantee: &mut impl Grantee, gref: Gref) -> Result<Vec<u8>, GrantStatus> {
    let mut bytes = vec![0; PAGE_SIZE];
    let mut ops = CopyOps::new();
    let mut list = ops.begin();
    list.read(gref, 0, &mut bytes).map_err(|_| GrantStatus::BadCopyArg)?;
    grantee.copy(list);
    only_status(&ops).map(|()| bytes)
}

/// Copies bytes into one page.
pub(super) fn write_one(
    grantee: &mut impl Grantee,
    gref: Gref,
    offset: u16,
    bytes: &[u8],
) -> Result<(), GrantStatus> {
    let mut ops = CopyOps::new();
    let mut list = ops.begin();
    list.write(gref, offset, bytes).map_err(|_| GrantStatus::BadCopyArg)?;
    grantee.copy(list);
    only_status(&ops)
}

fn only_status(ops: &CopyOps) -> Result<(), GrantStatus> {
    match ops.statuses() {
        [GrantStatus::Okay] => Ok(()),
        [status] => Err(*status),
        _ => Err(GrantStatus::Unknown(i16::MAX)),
    }
}

/// Checks that a use was refused with a status that fits the reason.
pub(super) fn refused<T>(result: Result<T, GrantStatus>, why: Refused, what: &str) -> Verdict {
    match result {
        Ok(_) => Err(Stop::Failed(format!("{what} was not refused"))),
        Err(status) if why.statuses().contains(&status) => Ok(()),
        Err(status) => Err(Stop::Failed(format!(
            "{what} was refused with \"{status}\", not with one of {:?}",
            why.statuses()
        ))),
    }
}

/// Returns bytes that differ by page index and by offset.
pub(super) fn pattern(place: usize, len: usize) -> Vec<u8> {
    let mut state = (place as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        })
        .collect()
}

/// Checks the bytes of a lent page from `offset` on.
pub(super) fn holds(page: &LentSlice, offset: usize, wanted: &[u8], what: &str) -> Verdict {
    let mut found = vec![0; wanted.len()];
    page.copy_to(offset, &mut found)?;
    same(&found, wanted, what)
}

/// Checks bytes and reports the first difference.
pub(super) fn same(found: &[u8], wanted: &[u8], what: &str) -> Verdict {
    require!(found.len() == wanted.len(), "{what}: {} bytes, not {}", found.len(), wanted.len());
    match found.iter().zip(wanted).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => Err(Stop::Failed(format!(
            "{what}: byte {at} is {:#04x}, not {:#04x}",
            found[at], wanted[at]
        ))),
    }
}

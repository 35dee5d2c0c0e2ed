//! What every [`Platform`] must do, as one text that runs in two domains.
//!
//! For whoever implements [`Platform`]: the suite is run once in each of two domains, as
//! [`Role::Lender`] in one and as [`Role::User`] in the other. They may be threads, processes, or
//! a guest and dom0 on a real machine: the two halves know of each other what the store tells them,
//! and nothing else. Then the roles are swapped.
//!
//! ```text
//!  domain A                          store                          domain B
//!  Suite{Lender}.run()   /local/domain/A/data/conformance/..   Suite{User}.run()
//!       says what it lent  ------------------------------------>  uses it
//!       looks at the effect <------------------------------------ says what it did
//! ```
//!
//! Each domain writes below `/local/domain/ID/data`, which a toolstack makes for it (libxl does;
//! [`prepare`] does the same). Both halves of a case agree on its outcome, so both report the
//! same.
//!
//! # Where platforms differ
//!
//! * The status of a refused reference: a set of statuses is accepted for each reason
//!   ([`Refused`]), since Xen says `general_error` where a finer one would fit.
//! * A page that the user has mapped: [`Granter::take_back`] says *Busy*; or, where the granter's
//!   kernel takes the page over until it is free (gntalloc), says that it was taken back, and the
//!   page is not lent again meanwhile.
//! * A channel that was cleared may become pending once more by what was sent before.
//! * Forced revocation and news of a closed channel are optional: without them the case is
//!   skipped.
//!
//! [`Granter::take_back`]: ringfence_platform::Granter::take_back

mod bench;
mod copies;
mod dialogue;
mod events;
mod grants;
mod revocation;
mod stores;
pub mod windows;

use std::fmt;
use std::time::Duration;

use ringfence_platform::{DomId, GrantStatus, Platform};
use ringfence_wire::xenstore::{NodeAccess, PermissionList};
use ringfence_xenstore::{StoreAccess, StoreError};

use bench::{Bench, Stop};
use dialogue::Dialogue;

/// Which half of the suite a domain plays.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Role {
    /// Lends pages and takes them back; allocates event channels.
    Lender,
    /// Uses what was lent; binds the channels.
    User,
}

impl Role {
    /// The name on the command line of a driver, and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Role::Lender => "lender",
            Role::User => "user",
        }
    }

    /// The other half.
    #[must_use]
    pub fn other(self) -> Role {
        match self {
            Role::Lender => Role::User,
            Role::User => Role::Lender,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How a case ended, the same in both domains.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// As it has to be.
    Passed,
    /// Not as it has to be, and what was found.
    Failed(String),
    /// Not checked, and why.
    Skipped(String),
}

/// The outcome of one case.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CaseReport {
    /// Its name.
    pub name: &'static str,
    /// How it ended.
    pub outcome: Outcome,
}

impl fmt::Display for CaseReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.outcome {
            Outcome::Passed => write!(f, "passed   {}", self.name),
            Outcome::Failed(why) => write!(f, "FAILED   {}: {why}", self.name),
            Outcome::Skipped(why) => write!(f, "skipped  {}: {why}", self.name),
        }
    }
}

/// How many cases ended how.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Summary {
    /// As they have to be.
    pub passed: usize,
    /// Not so.
    pub failed: usize,
    /// Not checked.
    pub skipped: usize,
}

impl Summary {
    fn count(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Passed => self.passed += 1,
            Outcome::Failed(_) => self.failed += 1,
            Outcome::Skipped(_) => self.skipped += 1,
        }
    }
}

/// Statuses that a platform may give for a use that it refuses.
///
/// Xen's hypervisor finds most of these in one test of the entry's first word, and says
/// `general_error`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// The reference is not issued, or is reserved.
    NotIssued,
    /// The page was lent to somebody else.
    OtherDomain,
    /// The page was lent for reading, and is wanted for writing.
    ReadOnly,
    /// More pages would be mapped than the platform has room for.
    NoRoom,
}

impl Refused {
    /// The statuses accepted.
    pub fn statuses(self) -> &'static [GrantStatus] {
        match self {
            Refused::NotIssued => &[GrantStatus::BadGref, GrantStatus::GeneralError],
            Refused::OtherDomain => {
                &[GrantStatus::PermissionDenied, GrantStatus::BadGref, GrantStatus::GeneralError]
            }
            Refused::ReadOnly => &[GrantStatus::PermissionDenied, GrantStatus::GeneralError],
            Refused::NoRoom => &[GrantStatus::NoSpace, GrantStatus::NoDeviceSpace],
        }
    }
}

/// One half of the suite, to be run in one domain.
#[derive(Clone, Copy, Debug)]
pub struct Suite {
    /// Which half.
    pub role: Role,
    /// The domain that runs the other half.
    pub peer: DomId,
    /// A third domain, which need not do anything, for what neither half may reach. On Xen any
    /// number that is not one of the two will do.
    pub third: Option<DomId>,
    /// How long the other half may take for a step. It may be started this much later as well.
    pub patience: Duration,
}

/// The half of one domain in one case.
type Half<P> = fn(&mut Bench<'_, P>) -> Result<(), Stop>;

/// A case: its name, what the lender does, what the user does.
struct Case<P: Platform> {
    name: &'static str,
    lender: Half<P>,
    user: Half<P>,
}

/// Runs one half of the suite with neither a third domain nor much patience; see [`Suite`].
pub fn run<P: Platform>(
    platform: &P,
    role: Role,
    peer: DomId,
    report: &mut dyn FnMut(CaseReport),
) -> Summary {
    Suite { role, peer, third: None, patience: Duration::from_secs(10) }.run(platform, report)
}

/// Makes the directory `/local/domain/ID/data`, owned by `domain`, as a toolstack does for each
/// domain that it starts. `store` is a privileged connection.
///
/// # Errors
///
/// The store's.
pub fn prepare(store: &mut impl StoreAccess, domain: DomId) -> Result<(), StoreError> {
    let data = format!("/local/domain/{domain}/data");
    store.mkdir(&data)?;
    store.set_perms(&data, &PermissionList::owned_by(domain, NodeAccess::None))
}

impl Suite {
    /// Runs this half; calls `report` after each case.
    ///
    /// A case that fails does not keep the next ones from being run; only when the other half is
    /// not heard of within `patience`, the rest counts as failed.
    pub fn run<P: Platform>(&self, platform: &P, report: &mut dyn FnMut(CaseReport)) -> Summary {
        let mut summary = Summary::default();
        let mut tell = |name, outcome: Outcome| {
            summary.count(&outcome);
            report(CaseReport { name, outcome });
        };
        match Dialogue::meet(platform, self) {
            Ok(talk) => {
                let third = self.third.filter(|id| *id != platform.domid() && *id != self.peer);
                self.run_cases(Bench::new(platform, talk, self.peer, third), &mut tell);
            }
            Err(why) => tell("the_two_halves_meet", why.into_outcome()),
        }
        summary
    }

    fn run_cases<P: Platform>(
        &self,
        mut bench: Bench<'_, P>,
        tell: &mut impl FnMut(&'static str, Outcome),
    ) {
        let mut silent = None;
        for case in cases::<P>() {
            if let Some(why) = &silent {
                tell(case.name, Outcome::Failed(format!("not run: {why}")));
                continue;
            }
            bench.talk.begin(case.name);
            let half = match self.role {
                Role::Lender => case.lender,
                Role::User => case.user,
            };
            let own = bench.watched(half);
            match bench.talk.agree(own) {
                Ok(outcome) => tell(case.name, outcome),
                Err(why) => {
                    let why = why.to_string();
                    tell(case.name, Outcome::Failed(why.clone()));
                    silent = Some(why);
                }
            }
        }
    }
}

/// Names the two halves of each case by the case: `case!(module::name)` stands for
/// `module::name::lender` and `module::name::user`.
macro_rules! cases {
    ($($module:ident::$name:ident,)*) => {
        vec![$(Case {
            name: stringify!($name),
            lender: $module::$name::lender,
            user: $module::$name::user,
        },)*]
    };
}

fn cases<P: Platform>() -> Vec<Case<P>> {
    cases![
        stores::domain_numbers_name_the_domain,
        stores::what_one_writes_the_other_reads,
        stores::permissions_hold,
        stores::nobody_writes_below_another,
        stores::a_watch_tells_of_changes,
        stores::a_transaction_is_all_or_nothing,
        stores::a_conflict_is_done_again,
        grants::bytes_are_seen_both_ways,
        grants::two_mappings_share_a_page,
        grants::a_read_only_mapping_refuses_writes,
        grants::a_page_lent_for_reading_is_not_written,
        grants::what_was_not_issued_is_refused,
        grants::what_another_domain_was_lent_is_refused,
        grants::many_pages_in_one_batch,
        grants::too_many_mappings_are_refused,
        copies::copies_go_both_ways,
        copies::a_bad_copy_costs_only_itself,
        copies::copies_in_a_row_keep_their_places,
        copies::a_copy_stays_in_its_page,
        copies::lent_bytes_are_copied_on,
        revocation::a_page_in_use_is_not_taken_back,
        revocation::a_page_taken_back_is_out_of_reach,
        revocation::lending_again_keeps_generations,
        revocation::every_page_comes_back,
        revocation::force_takes_a_page_in_use,
        revocation::force_takes_many_at_once,
        events::a_bound_channel_is_pending_once,
        events::notifications_merge,
        events::both_ends_notify,
        events::a_storm_is_cleared_in_bounded_time,
        events::a_channel_is_bound_once,
        events::a_foreign_channel_is_refused,
        events::a_closed_channel_is_noticed,
        events::closed_channels_make_room,
    ]
}

//! Conformance suite of [`Platform`]: one set of cases that runs in two domains.
//!
//! The suite is for implementations of [`Platform`]. It runs once in each of two domains, as
//! [`Role::Lender`] in one and as [`Role::User`] in the other; then the roles are swapped. The domains may
//! be threads, processes, or a guest and dom0 on a real machine. The halves communicate only through the
//! store.
//!
//! ```text
//!  domain A                          store                          domain B
//!  Suite{Lender}.run()   /local/domain/A/data/conformance/..   Suite{User}.run()
//!       says what it lent  ------------------------------------>  uses it
//!       looks at the effect <------------------------------------ says what it did
//! ```
//!
//! Each domain writes below `/local/domain/ID/data`, which a toolstack creates (libxl does, and so does
//! [`prepare`]). Both halves of a case agree on its outcome and report the same.
//!
//! # Where platforms differ
//!
//! * Status of a refused reference: each reason has a set of accepted statuses ([`Refused`]), because
//!   Xen returns `general_error` where a more precise status would fit.
//! * A page that the user has mapped: [`Granter::take_back`] returns *Busy*. Where the granter's kernel
//!   keeps the page until it is free (gntalloc), it succeeds, and the page is not granted again
//!   meanwhile.
//! * A channel that was cleared may become pending once more through an earlier notification.
//! * Forced revocation and the report of a closed channel are optional: without them the case is
//!   skipped.
//!
//! [`Granter::take_back`]: ringfence_platform::Granter::take_back

mod bench;
mod copies;
mod dialogue;
mod events;
mod grants;
mod outcome;
mod revocation;
mod stores;
pub mod windows;

use std::time::Duration;

use ringfence_platform::{DomId, Platform};
use ringfence_wire::xenstore::{NodeAccess, PermissionList};
use ringfence_xenstore::{StoreAccess, StoreError};

use bench::{Bench, Stop};
use dialogue::Dialogue;
pub use outcome::{CaseReport, Outcome, Refused, Role, Suite, Summary};

/// Function of one domain in one case; returns the reason for which it stopped early.
type Half<P> = fn(&mut Bench<'_, P>) -> Result<(), Stop>;

/// Case of the suite: its name, and the functions of the lender and the user.
struct ConformanceCase<P: Platform> {
    name: &'static str,
    lender: Half<P>,
    user: Half<P>,
}

/// Runs one half of the suite without a third domain and with a short time limit; see [`Suite`].
pub fn run<P: Platform>(
    platform: &P,
    role: Role,
    peer: DomId,
    report: &mut dyn FnMut(CaseReport),
) -> Summary {
    Suite { role, peer, third: None, patience: Duration::from_secs(10) }.run(platform, report)
}

/// Creates the directory `/local/domain/ID/data`, owned by `domain`, as a toolstack does for each
/// domain. `store` has to be a privileged connection.
///
/// # Errors
///
/// Returns the store's error.
pub fn prepare(store: &mut impl StoreAccess, domain: DomId) -> Result<(), StoreError> {
    let data = format!("/local/domain/{domain}/data");
    store.mkdir(&data)?;
    store.set_perms(&data, &PermissionList::owned_by(domain, NodeAccess::None))
}

impl Suite {
    /// Runs this half, and calls `report` after each case.
    ///
    /// A failed case does not stop the suite. If the other half does not respond within `patience`, the
    /// remaining cases count as failed.
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
        if silent.is_none() {
            // All cases are judged. A half that is late now has no result to give.
            let _ = bench.talk.end();
        }
    }
}

/// Names the two halves of each case by the case: `case!(module::name)` stands for
/// `module::name::lender` and `module::name::user`.
macro_rules! cases {
    ($($module:ident::$name:ident,)*) => {
        vec![$(ConformanceCase {
            name: stringify!($name),
            lender: $module::$name::lender,
            user: $module::$name::user,
        },)*]
    };
}

fn cases<P: Platform>() -> Vec<ConformanceCase<P>> {
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

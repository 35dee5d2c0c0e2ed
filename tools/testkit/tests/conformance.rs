//! Conformance suite on the local platform: with two threads, with two processes, and with faulty platforms
//! whose faults the suite must find.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

mod common;

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use ringfence_memory::LentSlice;
use ringfence_platform::local::{LocalChannel, LocalGrantee, LocalGranter, LocalPlatform};
use ringfence_platform::{
    Access, Channel, ChannelError, CopyList, Counters, DomId, EventPort, GrantStatus, Grantee,
    Granter, Gref, Lease, LendError, Platform, PlatformError, RevokeError, StillLent,
};
use ringfence_testkit::conformance::{CaseReport, Outcome, Role, Suite, Summary};
use ringfence_xenstore::StoreClient;

use common::Machine;

const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Runs a suite. Returns the cases that did not pass, and the summary.
fn run(platform: &impl Platform, suite: Suite) -> (Vec<CaseReport>, Summary) {
    let mut not_passed = Vec::new();
    let summary = suite.run(platform, &mut |case: CaseReport| {
        if case.outcome != Outcome::Passed {
            not_passed.push(case);
        }
    });
    (not_passed, summary)
}

/// Runs both roles in threads. Returns the cases that did not pass and the summary, of the lender and of
/// the user.
fn in_threads<L: Platform, U: Platform>(
    lender: &L,
    user: &U,
    third: DomId,
    patience: Duration,
) -> [(Vec<CaseReport>, Summary); 2] {
    let suite = |role, peer| Suite { role, peer, third: Some(third), patience };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| run(lender, suite(Role::Lender, user.domid())));
        let own = run(user, suite(Role::User, lender.domid()));
        [other.join().unwrap(), own]
    })
}

/// Checks that all cases pass on the local platform and that none is skipped.
fn conform(lender: &LocalPlatform, user: &LocalPlatform, third: DomId) {
    for (not_passed, summary) in in_threads(lender, user, third, TIME_LIMIT) {
        assert!(not_passed.is_empty(), "{not_passed:#?}");
        assert!(summary.passed >= 30, "{summary:?}");
    }
}

#[test]
fn local_domains_in_two_threads_conform_in_both_roles() {
    let machine = Machine::new();
    let (guest, third) = (machine.guest(), machine.guest());
    conform(&guest, &machine.toolstack, third.domid());
    conform(&machine.toolstack, &guest, third.domid());
}

#[test]
fn two_unprivileged_domains_conform_repeatedly() {
    let machine = Machine::new();
    let [a, b] = [machine.guest(), machine.guest()];
    for _ in 0..2 {
        conform(&a, &b, DomId(0));
    }
}

#[test]
#[ignore = "the child's side of local_domains_in_two_processes_conform_in_both_roles"]
fn run_role_in_child_process() {
    let (task, platform) = common::task();
    let [role, peer, third] = task.split(' ').collect::<Vec<_>>()[..] else { panic!("{task}") };
    let role = if role == "lender" { Role::Lender } else { Role::User };
    let id = |text: &str| DomId(text.parse().unwrap());
    let suite = Suite { role, peer: id(peer), third: Some(id(third)), patience: TIME_LIMIT };
    let summary = suite.run(&platform, &mut |case| println!("{case}"));
    assert_eq!((summary.failed, summary.skipped), (0, 0));
}

#[test]
fn local_domains_in_two_processes_conform_in_both_roles() {
    let machine = Machine::new();
    let third = machine.guest();
    for role in [Role::Lender, Role::User] {
        let (id, socket) = machine.guest_socket();
        let task = format!("{role} 0 {}", third.domid());
        let mut child = common::child("run_role_in_child_process", &task, socket);
        let (role, third) = (role.other(), Some(third.domid()));
        let suite = Suite { role, peer: id, third, patience: TIME_LIMIT };
        let (not_passed, summary) = run(&machine.toolstack, suite);
        let mut output = String::new();
        child.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        assert!(child.wait().unwrap().success(), "the child printed:\n{output}");
        assert!(not_passed.is_empty(), "{not_passed:#?}");
        assert!(summary.passed >= 30, "{summary:?}");
        assert_eq!(output.matches("passed   ").count(), summary.passed, "{output}");
    }
}

/// Fault of a platform.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wrong {
    /// The results of a batch of mappings are returned in another order.
    MapOrder,
    /// Mapping a grant that was never issued returns a page that is not the lender's.
    MapAnything,
    /// A page stays mapped after its last handle was dropped.
    MapLeak,
    /// A batch of copies is not carried out and has no statuses.
    NoCopies,
    /// Forced revocation does nothing and reports success.
    NoForce,
    /// A page in use is reported as returned, and its lease is forgotten.
    NotBusy,
    /// Clearing a channel always reports a pending event.
    AlwaysPending,
    /// The close of an end is not reported, and notifications to it are lost.
    Deaf,
}

/// Local platform with one fault.
struct Faulty {
    inner: LocalPlatform,
    wrong: Wrong,
}

struct FaultyGranter(LocalGranter, Wrong);
struct FaultyGrantee(LocalGrantee, Wrong);
struct FaultyChannel(LocalChannel, Wrong);

impl Platform for Faulty {
    type Granter = FaultyGranter;
    type Grantee = FaultyGrantee;
    type Channel = FaultyChannel;

    fn domid(&self) -> DomId {
        self.inner.domid()
    }
    fn store(&self) -> Result<StoreClient, PlatformError> {
        self.inner.store()
    }
    fn granter(&self, peer: DomId) -> Result<FaultyGranter, PlatformError> {
        Ok(FaultyGranter(self.inner.granter(peer)?, self.wrong))
    }
    fn grantee(&self, granter: DomId) -> Result<FaultyGrantee, PlatformError> {
        Ok(FaultyGrantee(self.inner.grantee(granter)?, self.wrong))
    }
    fn alloc_unbound(&self, peer: DomId) -> Result<FaultyChannel, PlatformError> {
        Ok(FaultyChannel(self.inner.alloc_unbound(peer)?, self.wrong))
    }
    fn bind_interdomain(
        &self,
        peer: DomId,
        port: EventPort,
    ) -> Result<FaultyChannel, PlatformError> {
        Ok(FaultyChannel(self.inner.bind_interdomain(peer, port)?, self.wrong))
    }
    fn counters(&self) -> &Arc<Counters> {
        self.inner.counters()
    }
}

impl Granter for FaultyGranter {
    fn peer(&self) -> DomId {
        self.0.peer()
    }
    fn lend(&mut self, access: Access) -> Result<Lease, LendError> {
        self.0.lend(access)
    }
    fn take_back(&mut self, lease: Lease) -> Result<(), StillLent> {
        match self.0.take_back(lease) {
            // This also lends the page again: the pool reuses returned pages.
            Err(still) if self.1 == Wrong::NotBusy => {
                let forced = self.0.revoke_forced(vec![still.lease]);
                forced.map_err(|(mut left, why)| StillLent { lease: left.remove(0), why })
            }
            outcome => outcome,
        }
    }
    fn revoke_forced(&mut self, leases: Vec<Lease>) -> Result<(), (Vec<Lease>, RevokeError)> {
        if self.1 == Wrong::NoForce { Ok(()) } else { self.0.revoke_forced(leases) }
    }
}

impl Grantee for FaultyGrantee {
    fn granter(&self) -> DomId {
        self.0.granter()
    }
    fn map(&mut self, pages: &[(Gref, Access)], out: &mut Vec<Result<LentSlice, GrantStatus>>) {
        let from = out.len();
        self.0.map(pages, out);
        match self.1 {
            Wrong::MapOrder => out[from..].reverse(),
            Wrong::MapLeak => std::mem::forget(out[from..].to_vec()),
            Wrong::MapAnything => {
                for result in &mut out[from..] {
                    if *result.as_ref().map_or_else(|status| status, |_| &GrantStatus::Okay)
                        == GrantStatus::BadGref
                    {
                        *result = Ok(LentSlice::anonymous(4096));
                    }
                }
            }
            _ => {}
        }
    }
    fn copy(&mut self, list: CopyList<'_, '_>) {
        if self.1 != Wrong::NoCopies {
            self.0.copy(list);
        }
    }
}

impl std::os::fd::AsFd for FaultyChannel {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Channel for FaultyChannel {
    fn port(&self) -> EventPort {
        self.0.port()
    }
    fn notify(&self) -> Result<(), ChannelError> {
        match self.0.notify() {
            Err(ChannelError::PeerGone) if self.1 == Wrong::Deaf => Ok(()),
            outcome => outcome,
        }
    }
    fn clear(&self) -> Result<bool, ChannelError> {
        match self.0.clear() {
            Ok(_) if self.1 == Wrong::AlwaysPending => Ok(true),
            // A broken implementation reports an end of file as an endless event.
            Err(ChannelError::PeerGone) if self.1 == Wrong::Deaf => Ok(true),
            outcome => outcome,
        }
    }
}

/// Checks that the case for each fault fails, on both sides.
#[test]
fn faulty_platform_fails_case_for_its_fault() {
    let faults = [
        (Wrong::MapOrder, "many_pages_in_one_batch"),
        (Wrong::MapAnything, "what_was_not_issued_is_refused"),
        (Wrong::MapLeak, "bytes_are_seen_both_ways"),
        (Wrong::NoCopies, "a_bad_copy_costs_only_itself"),
        (Wrong::NoForce, "force_takes_many_at_once"),
        (Wrong::NotBusy, "a_page_in_use_is_not_taken_back"),
        (Wrong::AlwaysPending, "a_bound_channel_is_pending_once"),
        (Wrong::Deaf, "a_closed_channel_is_noticed"),
    ];
    std::thread::scope(|scope| {
        for (wrong, case) in faults {
            scope.spawn(move || check_fault_is_found(wrong, case));
        }
    });
}

fn check_fault_is_found(wrong: Wrong, case: &str) {
    let machine = Machine::new();
    let [lender, user] = [machine.guest(), machine.guest()].map(|inner| Faulty { inner, wrong });
    for (not_passed, _) in in_threads(&lender, &user, DomId(0), TIME_LIMIT) {
        let found = not_passed
            .iter()
            .any(|found| found.name == case && matches!(found.outcome, Outcome::Failed(_)));
        assert!(found, "{wrong:?} was not found by {case}: {not_passed:#?}");
    }
}

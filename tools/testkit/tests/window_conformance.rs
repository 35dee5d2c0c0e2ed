//! Conformance of the translation table engine `arena`.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

mod common;

use std::time::Duration;

use ringfence_platform::local::LocalPlatform;
use ringfence_platform::{DomId, Platform};
use ringfence_testkit::conformance::windows::{LEAST, WindowProgram, WindowSuite};
use ringfence_testkit::conformance::{Outcome, Role, Suite};

use common::Machine;

#[test]
fn arena_engine_passes_window_conformance_suite() {
    let machine = Machine::new();
    let (guest, neighbour) = (machine.guest(), machine.guest());
    let mut table = guest.window(DomId(0), LEAST).unwrap();
    let mut beside = neighbour.window(DomId(0), LEAST).unwrap();
    let view = machine.toolstack.open_window(guest.domid(), table.handle(), 4096).unwrap();
    let mut peer = WindowProgram(view);
    let mut suite = WindowSuite { table: &mut *table, neighbour: &mut *beside, peer: &mut peer };
    let summary = suite.run(&mut |case| assert_eq!(case.outcome, Outcome::Passed, "{}", case.name));
    assert_eq!((summary.passed, summary.failed), (14, 0));
}

/// Runs the cases between two domains, as they run on Xen.
#[test]
fn arena_engine_passes_window_cases_between_domains() {
    let machine = Machine::new();
    let (lender, user) = (machine.guest(), machine.guest());
    let run = |platform: &LocalPlatform, role, peer| {
        let suite = Suite { role, peer, third: None, patience: Duration::from_secs(60) };
        let mut not_passed = Vec::new();
        let summary = suite.run_windows(platform, &mut |case| {
            if case.outcome != Outcome::Passed {
                not_passed.push(case);
            }
        });
        (summary.passed, not_passed)
    };
    let (own, other) = std::thread::scope(|scope| {
        let other = scope.spawn(|| run(&user, Role::User, lender.domid()));
        (run(&lender, Role::Lender, user.domid()), other.join().unwrap())
    });
    assert_eq!((own, other), ((15, vec![]), (1, vec![])));
}

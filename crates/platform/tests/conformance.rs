//! The conformance suite on the local platform: two threads, then two processes.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ringfence_platform::conformance::{self, CaseReport, Outcome, Role, Suite, Summary};
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};
use ringfence_platform::{DomId, Platform};

const PATIENCE: Duration = Duration::from_secs(20);

/// A hub with a toolstack (domain 0) and two guests, of which one does nothing.
struct Machine {
    hub: HubHandle,
    toolstack: LocalPlatform,
    bystander: LocalPlatform,
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.hub.stop();
    }
}

impl Machine {
    fn new() -> Machine {
        let (hub_thread, hub) = Hub::new(HubLimits::default()).unwrap();
        std::thread::spawn(move || hub_thread.run().unwrap());
        let join = |wanted, privileged| {
            LocalPlatform::connect(hub.admit(wanted, privileged).unwrap().1).unwrap()
        };
        let (toolstack, bystander) = (join(Some(DomId(0)), true), join(None, false));
        conformance::prepare(&mut toolstack.store().unwrap(), DomId(0)).unwrap();
        Machine { hub, toolstack, bystander }
    }

    /// The hub's end of a new domain that has a home.
    fn guest(&self) -> (DomId, OwnedFd) {
        let (id, socket) = self.hub.admit(None, false).unwrap();
        conformance::prepare(&mut self.toolstack.store().unwrap(), id).unwrap();
        (id, socket)
    }

    fn suite(&self, role: Role, peer: DomId) -> Suite {
        Suite { role, peer, third: Some(self.bystander.domid()), patience: PATIENCE }
    }
}

/// Runs a suite; what did not pass, and what all came to.
fn run(platform: &impl Platform, suite: Suite) -> (Vec<CaseReport>, Summary) {
    let mut remarkable = Vec::new();
    let summary = suite.run(platform, &mut |case: CaseReport| {
        if case.outcome != Outcome::Passed {
            remarkable.push(case);
        }
    });
    (remarkable, summary)
}

/// Runs both halves in threads. On the local platform nothing is skipped.
fn in_threads(machine: &Machine, lender: &LocalPlatform, user: &LocalPlatform) {
    let halves = std::thread::scope(|scope| {
        let half = |role, platform: &'_ LocalPlatform, peer: &LocalPlatform| {
            run(platform, machine.suite(role, peer.domid()))
        };
        let other = scope.spawn(move || half(Role::Lender, lender, user));
        let own = half(Role::User, user, lender);
        [other.join().unwrap(), own]
    });
    for (remarkable, summary) in halves {
        assert!(remarkable.is_empty(), "{remarkable:#?}");
        assert!(summary.passed >= 30, "{summary:?}");
    }
}

#[test]
fn local_domains_in_two_threads_conform_both_ways() {
    let machine = Machine::new();
    let guest = LocalPlatform::connect(machine.guest().1).unwrap();
    in_threads(&machine, &guest, &machine.toolstack);
    in_threads(&machine, &machine.toolstack, &guest);
}

#[test]
fn two_unprivileged_domains_conform_and_go_on_doing_so() {
    let machine = Machine::new();
    let [a, b] = [(); 2].map(|()| LocalPlatform::connect(machine.guest().1).unwrap());
    for _ in 0..2 {
        in_threads(&machine, &a, &b);
    }
}

/// In the environment of a child: its half.
const HALF: &str = "RINGFENCE_CONFORMANCE_HALF";

/// This program again, as the other half. Its hub connection is its standard input.
fn child(suite: Suite, socket: OwnedFd) -> Child {
    let half = format!("{} {} {}", suite.role, suite.peer, suite.third.unwrap());
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_half_of_a_child", "--nocapture", "--ignored"])
        .env(HALF, half)
        .stdin(Stdio::from(socket))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
#[ignore = "the child's side of local_domains_in_two_processes_conform_both_ways"]
fn the_half_of_a_child() {
    let half = std::env::var(HALF).unwrap();
    let [role, peer, third] = half.split(' ').collect::<Vec<_>>()[..] else { panic!("{half}") };
    let role = if role == "lender" { Role::Lender } else { Role::User };
    let id = |text: &str| DomId(text.parse().unwrap());
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let platform = LocalPlatform::connect(socket).unwrap();
    let suite = Suite { role, peer: id(peer), third: Some(id(third)), patience: PATIENCE };
    let summary = suite.run(&platform, &mut |case| println!("{case}"));
    assert_eq!((summary.failed, summary.skipped), (0, 0));
}

#[test]
fn local_domains_in_two_processes_conform_both_ways() {
    let machine = Machine::new();
    for role in [Role::Lender, Role::User] {
        let (id, socket) = machine.guest();
        let mut child = child(machine.suite(role, DomId(0)), socket);
        let (remarkable, summary) = run(&machine.toolstack, machine.suite(role.other(), id));
        let mut said = String::new();
        child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(child.wait().unwrap().success(), "the child said:\n{said}");
        assert!(remarkable.is_empty(), "{remarkable:#?}");
        assert!(summary.passed >= 30, "{summary:?}");
        assert_eq!(said.matches("passed   ").count(), summary.passed, "{said}");
    }
}

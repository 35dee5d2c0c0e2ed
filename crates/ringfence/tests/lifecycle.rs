//! Guests that start and end leave nothing behind, however they end.
//!
//! `command.rs` tests which processes end together and what they report. `cargo xtask soak` runs long series.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use rustix::process::Signal;

use support::needs::Need;
use support::processes::{Process, all};
use support::{GONE_WITHIN, Lab, MOMENT, Running, eventually};

/// Kernel objects that processes hold: memory files and namespaces, by number.
#[derive(Debug, Default, PartialEq, Eq)]
struct Holdings {
    arenas: BTreeSet<(u64, u64)>,
    namespaces: BTreeSet<String>,
}

impl Holdings {
    /// Collects the objects of the processes. Only root can read all of them.
    fn of(processes: &[Process]) -> Holdings {
        let mut holdings = Holdings::default();
        for process in processes {
            holdings.namespaces.extend(process.namespaces());
            let Ok(entries) = fs::read_dir(format!("/proc/{}/fd", process.pid)) else { continue };
            for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
                let is_arena = fs::read_link(&path)
                    .is_ok_and(|target| target.to_string_lossy().contains("memfd:ringfence"));
                if let (true, Ok(file)) = (is_arena, fs::metadata(&path)) {
                    holdings.arenas.insert((file.dev(), file.ino()));
                }
            }
        }
        holdings
    }

    fn without(self, other: &Holdings) -> Holdings {
        Holdings {
            arenas: self.arenas.difference(&other.arenas).copied().collect(),
            namespaces: self.namespaces.difference(&other.namespaces).cloned().collect(),
        }
    }

    /// Returns the objects that any process still holds.
    fn still_held(&self) -> Holdings {
        let now = Holdings::of(&all());
        Holdings {
            arenas: self.arenas.intersection(&now.arenas).copied().collect(),
            namespaces: self.namespaces.intersection(&now.namespaces).cloned().collect(),
        }
    }
}

/// Lets one test run at a time. Objects are identified by number, and the kernel gives the number of a destroyed
/// object to the next new one.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn sleeping_guest(lab: &Lab, options: &str) -> Running {
    let guest = lab.run(options, &["sleep", "300"]);
    guest.wait_up();
    guest
}

/// Returns the process of the driver domain that this guest started.
fn driver(guest: &Running) -> Process {
    guest.inner("driver")
}

#[test]
fn killed_process_leaves_no_namespace_arena_or_socket() {
    let _alone = alone();
    require!(Need::Guests, Need::Root);
    for victim in ["command", "guest-init", "frontend", "driver", "launcher"] {
        let lab = Lab::new();
        let guest = sleeping_guest(&lab, "--switch s");
        let is_sleep = |process: &&Process| process.arguments[0] == "sleep";
        let runs = eventually(MOMENT, || guest.processes().iter().any(|p| is_sleep(&p)));
        assert!(runs, "the command does not start");
        let processes = guest.processes();
        let own = Process::read(i32::try_from(std::process::id()).unwrap()).unwrap();
        let holdings = Holdings::of(&processes).without(&Holdings::of(&[own]));
        // Arenas of rings and packets for both directions, and namespaces of guest, frontend and driver domain.
        assert!(holdings.arenas.len() >= 2, "{holdings:?}");
        assert!(holdings.namespaces.len() >= 3 * 6, "{holdings:?}");
        let target = match victim {
            "command" => processes.iter().find(is_sleep).cloned(),
            "launcher" => processes.first().cloned(),
            role => Some(guest.inner(role)),
        };
        target.unwrap().signal(Signal::KILL);
        let gone = eventually(GONE_WITHIN, || {
            !processes.iter().any(Process::is_alive) && holdings.still_held() == Holdings::default()
        });
        let left: Vec<_> = processes.iter().filter(|process| process.is_alive()).collect();
        assert!(gone, "{victim} killed: {left:?}, {:?}", holdings.still_held());
        lab.assert_no_switch();
        guest.finish(MOMENT);
    }
}

/// Returns the number of descriptors of a driver domain with one guest left, once the number is stable.
fn settled(lab: &Lab, driver: &Process) -> usize {
    let ports = || lab.stats("s").ports.keys().filter(|name| *name != "gone").count();
    let mut before = usize::MAX;
    let settled = eventually(MOMENT, || {
        let now = driver.descriptors();
        let is_settled = ports() == 1 && now == before;
        before = now;
        std::thread::sleep(Duration::from_millis(100));
        is_settled
    });
    assert!(settled, "the driver domain does not settle: {before} descriptors, {} ports", ports());
    before
}

#[test]
#[ignore = "long: thirty guests"]
fn thirty_guests_leave_no_memory_or_descriptor_in_driver_domain() {
    let _alone = alone();
    require!(Need::Guests, Need::Root);
    /// Memory in KiB that an allocator may keep.
    const NOISE_KIB: u64 = 1024;
    let lab = Lab::new();
    let stays = sleeping_guest(&lab, "--switch s --name stays");
    let driver = driver(&stays);
    // The first guests make buffers grow.
    for _ in 0..5 {
        lab.run("-q --switch s", &["true"]).succeed(MOMENT);
    }
    let (descriptors, memory) = (settled(&lab, &driver), driver.own_memory_kib());
    for round in 0..30 {
        let mode = if round % 2 == 0 { "copy" } else { "map" };
        lab.run(&format!("-q --switch s --name n{round} --mode {mode}"), &["true"]).succeed(MOMENT);
    }
    assert_eq!(settled(&lab, &driver), descriptors, "descriptors of the driver domain");
    let grown = driver.own_memory_kib().saturating_sub(memory);
    assert!(grown <= NOISE_KIB, "the driver domain grew by {grown} KiB, from {memory} KiB");
    stays.end();
    lab.assert_no_switch();
}

#[test]
#[ignore = "long: many guests"]
fn refused_or_killed_guest_leaves_nothing_in_driver_domain() {
    let _alone = alone();
    require!(Need::Guests, Need::Root);
    let lab = Lab::new();
    let stays = sleeping_guest(&lab, "--switch s --name stays --address 10.9.0.1/24");
    let driver = driver(&stays);
    // Each kind once before the count begins.
    let disturb = || {
        for refused in ["--name stays", "--address 10.9.0.1/24"] {
            let finished = lab.run(&format!("--switch s {refused}"), &["true"]).finish(MOMENT);
            assert_eq!(finished.status, Some(125), "{finished:?}");
        }
        let killed = sleeping_guest(&lab, "--switch s --name killed --address 10.9.0.2/24");
        killed.processes()[0].signal(Signal::KILL);
        killed.finish(MOMENT);
        let killed = sleeping_guest(&lab, "--switch s --name killed --address 10.9.0.2/24");
        killed.inner("frontend").signal(Signal::KILL);
        killed.finish(MOMENT);
    };
    disturb();
    let before = settled(&lab, &driver);
    for _ in 0..5 {
        disturb();
    }
    assert_eq!(settled(&lab, &driver), before, "descriptors of the driver domain");
    assert!(stays.inner("frontend").is_alive(), "the guest that stays was not disturbed");
    stays.end();
    lab.assert_no_switch();
}

#[test]
fn guest_that_joins_while_last_one_leaves_is_served() {
    let _alone = alone();
    require!(Need::Guests);
    let lab = Lab::new();
    // The switch ends and is created again all the time. Each new guest finds some state in between.
    let rounds = |number: usize| {
        for round in 0..8 {
            let guest = lab.run(&format!("--switch s --name g{number}-{round}"), &["true"]);
            guest.succeed(MOMENT);
        }
    };
    std::thread::scope(|scope| {
        for number in 0..3 {
            scope.spawn(move || rounds(number));
        }
    });
    lab.assert_no_switch();
}

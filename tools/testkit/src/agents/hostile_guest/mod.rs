//! `ringfence-bench internal hostile-guest`: the adversary guest on real Xen, for tests.
//!
//! It runs in a guest whose own driver has released the interface, and lends its pages by gntalloc.
//! It runs each behaviour of [`attacks`] that needs no hub for a while. Then it offers keys with
//! which no device can be connected. The test observes the driver domain and the other guests itself.
//! This program only reports the number of bursts of each behaviour, and fails if one had none.

mod attacker;
mod disk;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use ringfence_net::vif::values::parse_mac;
use ringfence_platform::xen::{Side, XenPlatform};
use ringfence_platform::{DomId, Platform};
use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::{DeviceId, DeviceKind, XenbusState};
use ringfence_xenstore::StoreAccess;

use self::attacker::{Attacker, PACE, PAUSE, STEP_WITHIN};
use self::disk::VbdAttacker;
use crate::hostile::adversary::VifAdversary;
use crate::hostile::attacks::{self, AttackState};
use crate::hostile::behaviour::{Behaviour, NeighbourBehaviour};
use crate::hostile::control::WrongAnswer;

/// Time within which a backend would connect with acceptable keys.
const REFUSED_WITHIN: Duration = Duration::from_millis(500);

/// Time limit for backoff of a backend that has closed the device repeatedly.
const LET_IN_WITHIN: Duration = Duration::from_secs(120);

/// Runs every behaviour of an adversary on a vif or vbd, from inside a Xen guest
#[derive(Debug, Args)]
pub struct HostileGuestArgs {
    /// Time to run each behaviour
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    pub seconds: f64,

    /// Behaviours to run; all by default
    #[arg(long, value_name = "BEHAVIOUR", value_delimiter = ',', value_parser = NeighbourBehaviour::parse)]
    pub behaviours: Vec<NeighbourBehaviour>,

    /// Run the behaviours of disks (disk-…) instead of those of interfaces
    #[arg(long)]
    pub disk: bool,

    /// Number of the interface or disk
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub handle: u32,
}

/// Runs the adversary guest.
///
/// # Errors
///
/// Returns an error if a behaviour had no burst, or if the backend answered wrongly or connected with unusable keys.
pub fn run(args: &HostileGuestArgs) -> anyhow::Result<()> {
    if args.disk { run_disk(args) } else { run_packets(args) }
}

fn run_packets(args: &HostileGuestArgs) -> anyhow::Result<()> {
    let mut attacker = VifAttacker {
        adversary: join(args.handle)?,
        behaviour: Behaviour::Honest,
        state: AttackState::default(),
    };
    let mut runs = AttackRuns::new(args);
    for behaviour in behaviours(args) {
        (attacker.behaviour, attacker.state) = (behaviour, AttackState::default());
        runs.run(&mut attacker, &behaviour.name())?;
    }
    runs.end()?;
    let mut adversary = attacker.adversary;
    if args.behaviours.is_empty() {
        bad_keys(&mut adversary)?;
    }
    // A correct handshake must succeed at the end, so that the device is left connectable.
    let begin = Instant::now();
    while let Err(why) = adversary.connect() {
        ensure!(begin.elapsed() < LET_IN_WITHIN, "not connected after all that: {why:#}");
    }
    println!("connected after all that");
    adversary.handshake.leave()?;
    // The kernel's driver in the guest does not know these keys and would leave them behind.
    for key in [keys::CTRL_RING_REF, keys::EVENT_CHANNEL_CTRL] {
        adversary.forget(key)?;
    }
    Ok(())
}

fn run_disk(args: &HostileGuestArgs) -> anyhow::Result<()> {
    let mut attacker = VbdAttacker::join(args.handle)?;
    let wanted: Vec<_> = args.behaviours.iter().filter_map(|which| which.disks()).collect();
    let mut runs = AttackRuns::new(args);
    for behaviour in disk::behaviours(&wanted) {
        attacker.begin(behaviour);
        runs.run(&mut attacker, &behaviour.name())?;
    }
    runs.end()?;
    let begin = Instant::now();
    while let Err(why) = attacker.connect() {
        ensure!(begin.elapsed() < LET_IN_WITHIN, "not connected after all that: {why:#}");
    }
    println!("connected after all that");
    attacker.leave()
}

fn join(handle: u32) -> anyhow::Result<VifAdversary<XenPlatform>> {
    let platform = XenPlatform::open(Side::Frontend)?;
    let mut store = platform.store()?;
    let mut device =
        DeviceId { kind: DeviceKind::Vif, frontend: platform.domid(), backend: DomId(0), handle };
    let front = device.frontend_path();
    device.backend = DomId(store.read_u16(&format!("{front}/backend-id"))?);
    let mac = parse_mac(&store.read(&format!("{front}/mac"))?).context("the interface's mac")?;
    VifAdversary::new(platform, device, mac, blocking_store, PACE)
}

/// Opens the raw stream to the store in blocking mode.
fn blocking_store(
    platform: &XenPlatform,
) -> Result<std::os::fd::OwnedFd, ringfence_platform::PlatformError> {
    let fd = platform.store_connection()?;
    rustix::fs::fcntl_setfl(&fd, rustix::fs::OFlags::empty()).map_err(|errno| {
        ringfence_platform::PlatformError::System { what: "the store", source: errno.into() }
    })?;
    Ok(fd)
}

/// Returns the requested hostile behaviours that need no hub.
fn behaviours(args: &HostileGuestArgs) -> Vec<Behaviour> {
    let wanted: Vec<_> = match args.behaviours.as_slice() {
        [] => Behaviour::value_variants().to_vec(),
        some => some.iter().filter_map(|which| which.packets()).collect(),
    };
    let elsewhere = [Behaviour::Honest, Behaviour::Absent, Behaviour::HubFlood, Behaviour::Rejoin];
    wanted.into_iter().filter(|behaviour| !elsewhere.contains(behaviour)).collect()
}

struct VifAttacker {
    adversary: VifAdversary<XenPlatform>,
    behaviour: Behaviour,
    state: AttackState,
}

impl Attacker for VifAttacker {
    fn connect(&mut self) -> anyhow::Result<()> {
        self.adversary.connect()?;
        self.adversary.address_all()
    }

    fn burst(&mut self) -> anyhow::Result<()> {
        attacks::burst(&mut self.adversary, self.behaviour, &mut self.state)
    }

    fn is_over(&mut self) -> bool {
        self.behaviour == Behaviour::Reattach
            || self.adversary.handshake.was_closed().unwrap_or(true)
    }

    fn is_fatal(&self, why: &anyhow::Error) -> bool {
        why.is::<WrongAnswer>()
    }
}

/// Runs of all behaviours in sequence, and the names of those without a burst.
struct AttackRuns {
    length: Duration,
    idle: Vec<String>,
}

impl AttackRuns {
    fn new(args: &HostileGuestArgs) -> AttackRuns {
        AttackRuns { length: Duration::from_secs_f64(args.seconds), idle: Vec::new() }
    }

    fn run(&mut self, attacker: &mut dyn Attacker, name: &str) -> anyhow::Result<()> {
        let run = AttackRun::of(attacker, self.length).with_context(|| name.to_owned())?;
        println!("{name:<23} {}", run.told());
        if run.bursts == 0 {
            self.idle.push(name.to_owned());
        }
        Ok(())
    }

    fn end(self) -> anyhow::Result<()> {
        ensure!(self.idle.is_empty(), "never let in to do: {}", self.idle.join(", "));
        Ok(())
    }
}

/// Counters of one behaviour's run.
#[derive(Default)]
struct AttackRun {
    bursts: u64,
    connected: u64,
    refused: u64,
    last_failure: Option<String>,
}

impl AttackRun {
    fn of(attacker: &mut dyn Attacker, length: Duration) -> anyhow::Result<AttackRun> {
        let mut run = AttackRun::default();
        let begin = Instant::now();
        // After a failure the handshake runs again. At least one burst must succeed.
        let unfinished = |run: &AttackRun| {
            begin.elapsed() < length || run.bursts == 0 && begin.elapsed() < 4 * STEP_WITHIN
        };
        while unfinished(&run) {
            if let Err(why) = attacker.connect() {
                run.refused += 1;
                run.last_failure = Some(format!("{why:#}"));
                std::thread::sleep(PAUSE);
                continue;
            }
            run.connected += 1;
            while unfinished(&run) {
                if let Err(why) = attacker.burst() {
                    ensure!(!attacker.is_fatal(&why), why);
                    run.last_failure = Some(format!("{why:#}"));
                    break;
                }
                run.bursts += 1;
                std::thread::yield_now();
                if attacker.is_over() {
                    break;
                }
            }
        }
        Ok(run)
    }

    fn told(&self) -> String {
        let AttackRun { bursts, connected, refused, last_failure, .. } = self;
        let failure = last_failure.as_ref().map_or(String::new(), |why| format!(" ({why})"));
        format!("{bursts} bursts, connected {connected} times, not let in {refused} times{failure}")
    }
}

/// Change that makes the keys of a device unusable.
type Change = fn(&mut BTreeMap<&'static str, String>);

fn set(keys: &mut BTreeMap<&'static str, String>, key: &'static str, value: &str) {
    keys.insert(key, value.to_owned());
}

/// Changes with each of which no device can be connected. References 0 and 1 are pages that the
/// toolstack granted to dom0; ports 1 and 2 are the channels of console and store.
const BAD_KEYS: &[(&str, Change)] = &[
    ("an empty reference", |k| set(k, keys::TX_RING_REF, "")),
    ("the console's page as a ring", |k| set(k, keys::TX_RING_REF, "0")),
    ("the store's page as a ring", |k| set(k, keys::RX_RING_REF, "1")),
    ("a ring that was never granted", |k| set(k, keys::RX_RING_REF, "7777")),
    ("a ring beyond the table", |k| set(k, keys::RX_RING_REF, "4294967295")),
    ("a number too long", |k| set(k, keys::TX_RING_REF, "4294967296")),
    ("a negative number", |k| set(k, keys::TX_RING_REF, "-8")),
    ("no number", |k| set(k, keys::RX_RING_REF, "banana")),
    ("2000 digits", |k| set(k, keys::TX_RING_REF, &"9".repeat(2000))),
    ("bytes that are no text", |k| set(k, keys::EVENT_CHANNEL_TX, "\u{1}\u{7f}\u{fffd}")),
    ("a port that is not there", |k| set(k, keys::EVENT_CHANNEL_TX, "4000000000")),
    ("the store's channel", |k| set(k, keys::EVENT_CHANNEL_TX, "1")),
    ("the console's channel", |k| set(k, keys::EVENT_CHANNEL_RX, "2")),
    ("one channel twice", |k| {
        let port = k.get(keys::EVENT_CHANNEL_TX).cloned().unwrap_or_default();
        set(k, keys::EVENT_CHANNEL_RX, &port);
    }),
    ("a mode that is dead", |k| set(k, keys::REQUEST_RX_COPY, "0")),
    ("more queues than anybody has", |k| set(k, keys::MULTI_QUEUE_NUM_QUEUES, "4294967295")),
];

/// Publishes the keys after each change; fails if the backend connects.
fn bad_keys(adversary: &mut VifAdversary<XenPlatform>) -> anyhow::Result<()> {
    for (name, change) in BAD_KEYS {
        let_in(adversary).with_context(|| format!("before {name}"))?;
        let mut keys = adversary.keys();
        change(&mut keys);
        adversary.publish(&keys)?;
        let begin = Instant::now();
        let mut state = adversary.handshake.backend_state()?;
        while state == XenbusState::InitWait && begin.elapsed() < REFUSED_WITHIN {
            std::thread::sleep(PAUSE);
            state = adversary.handshake.backend_state()?;
        }
        println!("keys: {name}: the backend is {state}");
        ensure!(state != XenbusState::Connected, "the backend connected with {name}");
        adversary.forget(keys::MULTI_QUEUE_NUM_QUEUES)?;
    }
    println!("keys: all {} tried", BAD_KEYS.len());
    Ok(())
}

/// Brings the backend to `InitWait`, waiting for its backoff if necessary.
fn let_in(adversary: &mut VifAdversary<XenPlatform>) -> anyhow::Result<()> {
    let begin = Instant::now();
    while let Err(why) = adversary.begin() {
        ensure!(begin.elapsed() < LET_IN_WITHIN, "not let in: {why:#}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bad_key_differs_from_correct_keys() {
        let honest: BTreeMap<_, _> = [
            (keys::TX_RING_REF, "9"),
            (keys::RX_RING_REF, "10"),
            (keys::EVENT_CHANNEL_TX, "11"),
            (keys::EVENT_CHANNEL_RX, "12"),
            (keys::REQUEST_RX_COPY, "1"),
        ]
        .map(|(key, value)| (key, value.to_owned()))
        .into();
        for (name, change) in BAD_KEYS {
            let mut changed = honest.clone();
            change(&mut changed);
            assert_ne!(changed, honest, "{name}");
        }
    }
}

//! `ringfence-bench vhost-user net`: packets between two machines, through `ringfence vhost-user net` and other programs.
//!
//! ```text
//!  near machine ── [shield ──] card ── switch ── card ── far machine
//!  near machine ────────── port ── testpmd ── port ───── far machine
//! ```
//!
//! Both machines are the front-end of this process. The far one trusts its backend in every row, so that rows differ in the
//! way of the near one alone.

use std::path::PathBuf;
use std::process::Command;

use super::args::{CardPeer, Flow, NetArgs, Way};
use super::card::{Card, CardFront, Machine, is_super};
use super::measure::{DeviceRun, Program, Skipped, Workload, measure};
use super::report::{CostNames, Row, figure, names, with_costs};
use super::servers::Servers;
use crate::affinity::allowed;
use crate::harness::{Layout, left, right};
use crate::peers::{MISSING, TESTPMD, is_installed};

const NEAR: Machine = Machine { mac: [0x52, 0x54, 0, 0, 0, 1], ip: [10, 0, 0, 1] };
const FAR: Machine = Machine { mac: [0x52, 0x54, 0, 0, 0, 2], ip: [10, 0, 0, 2] };
/// Name of the switch, in a runtime directory of its own.
const SWITCH: &str = "bench";
/// Reason for which testpmd has no rows of super-packets: with DPDK 22.11 they do not pass the check.
const CHANGED: &str = "super-packets arrive changed through testpmd";
/// Memory of testpmd in MiB, with its packets.
const MEMORY: &str = "128";
const BUFFERS: &str = "--total-num-mbufs=16384";

/// Runs the benchmark of a network card.
pub(super) fn run(args: &NetArgs) -> anyhow::Result<()> {
    let mut works = Vec::new();
    for &direction in &args.directions {
        works.extend(args.sizes.iter().map(|&size| CardWork { size, direction }));
    }
    measure(&args.run, &works, &args.vs, layout())
}

/// Packets of one size in one direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct CardWork {
    size: u32,
    direction: Flow,
}

/// Sockets of both machines.
struct CardSockets {
    near: PathBuf,
    far: PathBuf,
}

impl Workload for CardWork {
    type Peer = CardPeer;
    type Sockets = CardSockets;
    type Front = CardFront;

    fn program(peer: CardPeer) -> &'static str {
        match peer {
            CardPeer::Testpmd => "testpmd",
        }
    }

    fn name(&self) -> String {
        format!("{} of {} bytes", self.direction.name(), self.size)
    }

    fn start(
        &self,
        program: Program<CardPeer>,
        way: Way,
        servers: &mut Servers,
    ) -> anyhow::Result<CardSockets> {
        let [mut near, far] = ["near", "far"].map(|name| servers.socket(name));
        if program == Program::Other(CardPeer::Testpmd) {
            if !is_installed() {
                return Err(Skipped(MISSING.to_owned()).into());
            }
            if is_super(self.size) {
                return Err(Skipped(CHANGED.to_owned()).into());
            }
            let sockets = CardSockets { near, far };
            let command = testpmd(&sockets)?;
            servers.start(TESTPMD, command, &[&sockets.near, &sockets.far])?;
            return Ok(sockets);
        }
        servers.start("far card", card(servers, &far, FAR, Way::Trust), &[&far])?;
        servers.start("near card", card(servers, &near, NEAR, way), &[&near])?;
        if way == Way::Shield {
            near = servers.start_shield(&near)?;
        }
        Ok(CardSockets { near, far })
    }

    /// Returns `None`: no counter of a card has the bytes that its process copies to the machine.
    fn copied(&self, _: Program<CardPeer>, _: Way, _: &Servers) -> anyhow::Result<Option<u64>> {
        Ok(None)
    }

    fn connect(
        &self,
        _: Program<CardPeer>,
        way: Way,
        sockets: &CardSockets,
    ) -> anyhow::Result<CardFront> {
        let near = Card { machine: NEAR, socket: &sockets.near, way };
        let far = Card { machine: FAR, socket: &sockets.far, way: Way::Trust };
        match self.direction {
            Flow::Out => CardFront::connect(near, far, self.size),
            Flow::In => CardFront::connect(far, near, self.size),
        }
    }
}

/// Returns the command of a card on the switch.
fn card(servers: &Servers, socket: &PathBuf, machine: Machine, way: Way) -> Command {
    let Machine { mac, ip } = machine;
    let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
    let address = format!("{}/24", std::net::Ipv4Addr::from(ip));
    let mut command = servers.ringfence(&["vhost-user", "net", "--switch", SWITCH, "--socket"]);
    command.arg(socket).args(["--mac", &mac, "--address", &address]);
    if way == Way::Pool {
        command.args(["--require-pool", "auto"]);
    }
    command
}

/// Returns the command of a testpmd that forwards between both sockets.
fn testpmd(sockets: &CardSockets) -> anyhow::Result<Command> {
    let cores = allowed()?;
    let at = |number: usize| cores.get(number).or(cores.first()).copied().unwrap_or(0);
    let mut command = Command::new(TESTPMD);
    // The first core has its sleeping main thread.
    command.args(["--lcores", &format!("0@{},1@{}", at(0), at(1)), "-m", MEMORY]);
    command.args(["--no-huge", "--no-shconf", "--no-pci", "--no-telemetry", "--iova-mode=va"]);
    for (number, socket) in [&sockets.near, &sockets.far].into_iter().enumerate() {
        let device = format!("net_vhost{number},iface={},queues=1", socket.display());
        command.arg("--vdev").arg(device);
    }
    command.args(["--", "--forward-mode=io", "--nb-cores=1", BUFFERS, "--disable-link-check"]);
    // Without a prompt it ends when its input does, unless it prints statistics from time to time.
    command.arg("--stats-period=86400");
    Ok(command)
}

const COSTS: CostNames = CostNames {
    front_ns: "front_cpu_ns_per_packet",
    backend_ns: "backend_cpu_ns_per_packet",
    syscalls: "syscalls_per_packet",
    allocations: "allocations_per_packet",
    kicks: "kicks_per_packet",
    calls: "calls_per_packet",
};

fn gbps(row: &Row<CardWork>) -> Option<f64> {
    let bits = f64::from(row.case.work.size) * 8.0;
    figure(row, |run| run.rate() * bits / 1e9)
}

fn layout() -> Layout<Row<CardWork>> {
    let layout = names()
        .column("direction", |row: &Row<CardWork>| row.case.work.direction.name(), left("dir", 4))
        .column("size", |row| row.case.work.size, right("size", 6))
        .column("pps", |row| figure(row, DeviceRun::rate), right("kpps", 8).unit(1e3).digits(1))
        .column("gbps", gbps, right("Gbit/s", 7).digits(2));
    with_costs(layout, &COSTS)
}

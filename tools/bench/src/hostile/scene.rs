//! Scene of a row: the processes of the packet rows, and parameters common to them and the disk rows.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::bail;
use ringfence_access::Mode;
use ringfence_testkit::hostile::behaviour::Behaviour;

use super::launcher::{Attachment, Rendezvous};
use super::orders::{Entrance, HostileAnswer, HostileRole, NeighbourSetup, RowCommand, SinkSetup};
use super::process::Process;
use crate::affinity::allowed;
use crate::domain::LINK_HEADER;

/// Time between the start of all processes and the measurement.
pub(super) const WARM_UP: Duration = Duration::from_millis(300);
/// Minimum MTU of a vif here.
pub(super) const MTU_MIN: u32 = 1500;

/// CPU core of each domain.
#[derive(Clone, Copy)]
pub(super) struct Cores {
    pub(super) driver: Option<usize>,
    pub(super) victim: Option<usize>,
    pub(super) neighbour: Option<usize>,
}

impl Cores {
    pub(super) fn find() -> anyhow::Result<Cores> {
        let mut each = allowed()?.into_iter();
        let [driver, victim, third] = [(); 3].map(|()| each.next());
        if victim.is_none() {
            eprintln!("ringfence: one core only: all domains share it, and take turns");
        }
        Ok(Cores { driver, victim: victim.or(driver), neighbour: third.or(victim).or(driver) })
    }
}

/// Parameters of a scene.
pub(super) struct SceneSpec {
    /// Bytes of a packet of the victim.
    pub(super) size: u32,
    pub(super) mode: Mode,
    pub(super) cores: Cores,
    pub(super) behaviour: Behaviour,
    /// Set if the victim waits for an answer to each packet. A neighbour on its core then yields to it.
    pub(super) asks: bool,
    /// Number that names the scene's files.
    pub(super) number: usize,
}

/// Processes of a row, all started.
pub(super) struct Scene {
    pub(super) driver: Process,
    pub(super) victim: Process,
    pub(super) neighbour: Option<Process>,
    attachment: Attachment,
    /// Hub session of an honest neighbour.
    _beside: Option<Attachment>,
    /// Socket through which a hostile neighbour attaches again.
    _rendezvous: Rendezvous,
}

impl Scene {
    /// Starts the driver domain, the victim and the neighbour.
    pub(super) fn start(spec: &SceneSpec) -> anyhow::Result<Scene> {
        let (rendezvous, listener) = Rendezvous::new(spec.number)?;
        let mtu = spec.size.saturating_sub(LINK_HEADER).max(MTU_MIN);
        let entrance = Entrance {
            socket: rendezvous.path(),
            mtu: u16::try_from(mtu)?,
            mode: spec.mode.name().to_owned(),
        };
        let Cores { driver, victim, neighbour } = spec.cores;
        let setup = |role, core| NeighbourSetup { role, core, size: spec.size, yields: false };
        let sink = SinkSetup { answers: spec.asks, ..SinkSetup::VERIFYING };
        let driver =
            Process::start(&setup(HostileRole::Driver(sink), driver), &[listener.as_fd()])?;
        driver.wait_ready()?;
        let attachment = Attachment::take(&entrance)?;
        match driver.ask(RowCommand::Victim(attachment.place.mac))? {
            HostileAnswer::Ready => {}
            other => bail!("the driver domain said {other:?}"),
        }
        let talks = spec.behaviour == Behaviour::Hoarder;
        let place = attachment.place.clone();
        let role = if spec.asks {
            HostileRole::Asking { place, talks }
        } else {
            HostileRole::Honest { place, talks }
        };
        let guest = Process::start(&setup(role, victim), &[attachment.hub.as_fd()])?;
        guest.wait_ready()?;
        let beside = (spec.behaviour == Behaviour::Honest).then(|| Attachment::take(&entrance));
        let beside = beside.transpose()?;
        let yields = spec.asks && neighbour == victim;
        let setup = |role| NeighbourSetup { yields, ..setup(role, neighbour) };
        let neighbour = match (spec.behaviour, &beside) {
            (Behaviour::Absent, _) => None,
            (_, Some(attachment)) => {
                let role = HostileRole::Honest { place: attachment.place.clone(), talks: false };
                Some(Process::start(&setup(role), &[attachment.hub.as_fd()])?)
            }
            (behaviour, None) => {
                let staging = behaviour.needs_staging().then_some(Mode::Staging);
                let mode = staging.unwrap_or(spec.mode).name().to_owned();
                let role =
                    HostileRole::Hostile { entrance: Entrance { mode, ..entrance }, behaviour };
                Some(Process::start(&setup(role), &[])?)
            }
        };
        neighbour.as_ref().map_or(Ok(()), Process::wait_ready)?;
        Ok(Scene {
            driver,
            victim: guest,
            neighbour,
            attachment,
            _beside: beside,
            _rendezvous: rendezvous,
        })
    }

    /// Returns the numbers of the processes.
    pub(super) fn processes(&self) -> String {
        let beside = self.neighbour.as_ref().map_or(String::new(), |n| n.pid().to_string());
        let [driver, victim] = [&self.driver, &self.victim].map(Process::pid);
        format!("driver domain {driver}, victim {victim}, neighbour {beside}")
    }

    /// Returns the charges of all guests but the victim. Fails if the victim is charged.
    pub(super) fn charges(&self) -> anyhow::Result<BTreeMap<String, u64>> {
        let stats = self.attachment.stats()?;
        let victim = format!("vif{}.0", self.attachment.place.domain);
        if let Some(rules) = stats.rules.get(&victim) {
            bail!("the victim is charged with {rules:?}");
        }
        let broken = stats.rules.values().chain([&stats.hub]).flatten();
        let counted = stats.ports.iter().filter(|(name, _)| **name != victim);
        let counted = counted.flat_map(|(_, counters)| counters).filter(|(name, _)| {
            name.starts_with("drop_") || matches!(name.as_str(), "spurious_wakeups" | "throttles")
        });
        let mut charges = BTreeMap::new();
        for (rule, count) in broken.chain(counted) {
            *charges.entry(rule.clone()).or_default() += count;
        }
        Ok(charges)
    }
}

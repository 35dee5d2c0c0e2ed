//! Adversary guest of a disk on real Xen, for tests (`ringfence-bench internal hostile-guest --disk`).
//!
//! Every response is validated there too; a wrong one fails the program.

use anyhow::Context;
use clap::ValueEnum;
use ringfence_platform::xen::{Side, XenPlatform};
use ringfence_platform::{DomId, Platform};
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use ringfence_xenstore::StoreAccess;

use super::attacker::{Attacker, PACE};
use crate::hostile::disk::adversary::{DiskAdversary, WrongResponse};
use crate::hostile::disk::attacks::{self, DiskAttackState};
use crate::hostile::disk::behaviour::DiskBehaviour;

/// References beyond any grant table that the kernel makes.
const FOREIGN: std::ops::Range<u32> = (1 << 20)..(1 << 20) + 1000;

/// Adversary guest with a disk, and its current behaviour.
pub(super) struct VbdAttacker {
    adversary: DiskAdversary<XenPlatform>,
    behaviour: DiskBehaviour,
    state: DiskAttackState,
}

/// Returns the hostile behaviours among those requested; all by default.
pub(super) fn behaviours(wanted: &[DiskBehaviour]) -> Vec<DiskBehaviour> {
    let wanted = match wanted {
        [] => DiskBehaviour::value_variants(),
        some => some,
    };
    let elsewhere = [DiskBehaviour::Honest, DiskBehaviour::Absent];
    wanted.iter().copied().filter(|behaviour| !elsewhere.contains(behaviour)).collect()
}

impl VbdAttacker {
    pub(super) fn join(handle: u32) -> anyhow::Result<VbdAttacker> {
        let platform = XenPlatform::open(Side::Frontend)?;
        let mut store = platform.store()?;
        let frontend = platform.domid();
        let mut device = DeviceId { kind: DeviceKind::Vbd, frontend, backend: DomId(0), handle };
        let front = device.frontend_path();
        let backend = store.read_u16(&format!("{front}/backend-id"));
        device.backend = DomId(backend.with_context(|| format!("the disk {handle}"))?);
        let adversary = DiskAdversary::new(platform, device, FOREIGN, PACE)?;
        Ok(VbdAttacker {
            adversary,
            behaviour: DiskBehaviour::Honest,
            state: DiskAttackState::default(),
        })
    }

    pub(super) fn begin(&mut self, behaviour: DiskBehaviour) {
        (self.behaviour, self.state) = (behaviour, DiskAttackState::default());
    }

    pub(super) fn leave(&mut self) -> anyhow::Result<()> {
        self.adversary.handshake.leave()
    }
}

impl Attacker for VbdAttacker {
    fn connect(&mut self) -> anyhow::Result<()> {
        self.adversary.connect()
    }

    fn burst(&mut self) -> anyhow::Result<()> {
        attacks::burst(&mut self.adversary, self.behaviour, &mut self.state)
    }

    fn is_over(&mut self) -> bool {
        self.behaviour == DiskBehaviour::Reattach
            || self.adversary.handshake.was_closed().unwrap_or(true)
    }

    fn is_fatal(&self, why: &anyhow::Error) -> bool {
        why.is::<WrongResponse>()
    }
}

//! Steps of a vbd: its storage, its handshake, and its teardown.

use std::sync::Arc;

use ringfence_platform::Platform;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenbus::end::Life;
use ringfence_xenstore::{StoreClient, StoreError};

use crate::devices::Look;
use crate::domain::{Backends, DriverDomain, Readiness, look_of};
use crate::vbds::{RingCounters, Vbd};

impl<P: Platform, D: DriverDomain> Backends<P, D> {
    /// Serves a vbd once.
    pub(crate) fn look_at_vbd(
        &mut self,
        device: &DeviceId,
        store: &mut StoreClient,
    ) -> Result<Look, StoreError> {
        D::refresh(self, device, store)?;
        let Some(mut vbd) = self.vbds.list.remove(device) else { return Ok(Look::Over) };
        vbd.backend.set_share(self.share);
        let readiness = D::open_vbd(self, device, &mut vbd);
        self.advance_replacement(device, &mut vbd, store);
        let reported = self.domain.report_storage(device, &mut vbd, store);
        let life = match readiness {
            Readiness::Blocked => Ok(Life::Alive),
            Readiness::Ready | Readiness::Failed => self.advance_vbd(device, &mut vbd, store),
        };
        self.vbds.list.insert(*device, vbd);
        reported?;
        Ok(look_of::<D>(life?, readiness != Readiness::Ready))
    }

    /// Advances the handshake of a vbd, and collects the counters of its rings.
    fn advance_vbd(
        &mut self,
        device: &DeviceId,
        vbd: &mut Vbd<D::Vbd>,
        store: &mut StoreClient,
    ) -> Result<Life, StoreError> {
        let before = vbd.backend.connection().copied();
        let penalized = vbd.backend.penalized().map(str::to_owned);
        let life = vbd.backend.look(&*self.platform, store);
        if vbd.backend.connection().copied() != before {
            self.vbds.retire_rings(&mut vbd.rings);
            let served = vbd.backend.served().into_iter();
            vbd.rings = served
                .flat_map(|served| served.counters())
                .map(|(queue, persistent)| RingCounters {
                    queue: Arc::clone(queue),
                    persistent: Arc::clone(persistent),
                })
                .collect();
            self.domain.vbd_changed(device, vbd);
        }
        if let Some(why) = vbd.backend.penalized().filter(|why| penalized.as_deref() != Some(why)) {
            self.domain.vbd_penalized(device, vbd, why);
        }
        life
    }

    /// Removes everything that was created for a vbd that is over. Its storage completes the requests in flight.
    pub(crate) fn forget_vbd(&mut self, device: &DeviceId) {
        let Some(mut vbd) = self.vbds.list.remove(device) else { return };
        self.vbds.retire_rings(&mut vbd.rings);
        for (rule, count) in vbd.backend.rules().all() {
            *self.vbds.retired_rules.entry(rule).or_default() += count;
        }
        vbd.backend.begin_to_leave();
        self.vbds.teardown.add(vbd.backend);
    }

    /// Starts to close a vbd, for the reason `why`. The vbd is due then.
    pub(crate) fn close_vbd(&mut self, device: &DeviceId, why: &str) {
        if let Some(vbd) = self.vbds.list.get_mut(device) {
            vbd.backend.close_with_penalty(why);
        }
    }
}

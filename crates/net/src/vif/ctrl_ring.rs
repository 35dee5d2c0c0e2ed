//! Control ring of a vif's backend: its connection.

use std::sync::Arc;

use ringfence_access::Mode;
use ringfence_access::staging::StagingLimits;
use ringfence_platform::{Gref, Platform};
use ringfence_wire::netif::keys;
use ringfence_wire::numbers::bounded;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenbus::connect::{RingName, bind_channel, map_ring};
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::PortHost;
use super::connect::{ConnectError, VifRejection};
use crate::ctrl::backend::{ControlRing, CtrlBackend, CtrlOptions};
use crate::rules::RuleCounters;

/// Terms of a control ring: queues, access mode, and takeover from a previous process.
pub(super) struct ControlTerms {
    pub(super) queues: u32,
    pub(super) mode: Mode,
    pub(super) adopting: bool,
}

/// Connects the control ring, if the frontend has one.
pub(super) fn open<P: Platform>(
    device: &DeviceId,
    terms: ControlTerms,
    platform: &P,
    store: &mut StoreClient,
    host: &mut impl PortHost,
    rules: &Arc<RuleCounters>,
) -> Result<Option<Box<dyn ControlRing>>, ConnectError> {
    let front = device.frontend_path();
    let Some(gref) = store.read_u32_opt(&format!("{front}/{}", keys::CTRL_RING_REF))? else {
        return Ok(None);
    };
    let port = store.read_u32(&format!("{front}/{}", keys::EVENT_CHANNEL_CTRL))?;
    let peer = device.frontend;
    let mut pages = platform.grantee(peer).map_err(ConnectError::Arena)?;
    let ring = map_ring(&mut pages, RingName::Named("control"), &[Gref(gref)])?;
    let channel = bind_channel(platform, peer, port)?;
    let stages = matches!(terms.mode, Mode::Staging | Mode::Window);
    let staging = stages.then(StagingLimits::default);
    // At most QUEUES_MAX.
    let queues = bounded(terms.queues, u16::MAX);
    let options = CtrlOptions { queues, staging };
    let control = match host.ctrl_record(device) {
        None => Ok(CtrlBackend::new(ring, channel, pages, options, rules)),
        Some(record) if terms.adopting => {
            CtrlBackend::adopt(ring, record, channel, pages, options, rules)
        }
        Some(record) => CtrlBackend::recorded(ring, record, channel, pages, options, rules),
    };
    let control = control.map_err(|fault| ConnectError::Device(VifRejection::Adopt(fault)))?;
    let control = control.sharing(host.staging_pools(device));
    Ok(Some(Box::new(control)))
}

//! Host's port on a switch: a TAP of the host.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringfence_frame::port::Port;
use ringfence_frame::tap::TapPort;
use ringfence_platform::Counters;
use ringfence_switch::dataplane::{AddPortError, DataplaneHandle, PortId};
use ringfence_switch::forwarding::PortPolicy;
use ringfence_sys::tap::TapOffloads;

use crate::domain::OtherPort;

/// TAP of the host, one file for each queue.
pub(crate) struct HostTap {
    pub(crate) queues: Vec<OwnedFd>,
    /// Work that the kernel leaves to the reader of frames.
    pub(crate) offloads: TapOffloads,
    /// Maximum length of a frame without its Ethernet header, in bytes.
    pub(crate) mtu: u16,
}

impl HostTap {
    /// Returns a port for each queue.
    pub(crate) fn into_ports(self, counters: &Arc<Counters>) -> Vec<Box<dyn Port>> {
        let HostTap { queues, offloads, mtu } = self;
        let port = |queue| {
            Box::new(TapPort::new(queue, offloads, mtu, Arc::clone(counters))) as Box<dyn Port>
        };
        queues.into_iter().map(port).collect()
    }
}

/// Host's port on a switch.
pub(crate) struct HostLeg {
    pub(crate) name: String,
    pub(crate) port: PortId,
}

impl HostLeg {
    /// Adds the port `name` to the switch.
    ///
    /// # Errors
    ///
    /// Returns [`AddPortError`] if a worker refuses the port; the TAP is closed then.
    pub(crate) fn attach(
        dataplane: &DataplaneHandle,
        name: String,
        tap: HostTap,
        policy: PortPolicy,
        counters: &Arc<Counters>,
    ) -> Result<HostLeg, AddPortError> {
        let port = dataplane.add_queues(tap.into_ports(counters), policy, &name)?;
        Ok(HostLeg { name, port })
    }

    /// Returns `true` if the port that ended is this one.
    pub(crate) fn is(&self, gone: &OtherPort) -> bool {
        self.port == gone.id && self.name == gone.name
    }
}

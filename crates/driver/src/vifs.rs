//! Vifs of a driver domain: handshakes, ports, control rings.
//!
//! The control thread owns everything here. Packets pass through the threads of the dataplane.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

use ringfence_hostnet::log::LineBudget;
use ringfence_net::vif::backend::VifBackend;
use ringfence_switch::dataplane::PortStats;
use ringfence_wire::xenbus::DeviceId;

use crate::ports::{PortEntry, Retired};

/// One vif: its handshake, its port, and the domain's own part.
pub(crate) struct Vif<S> {
    pub(crate) backend: VifBackend,
    pub(crate) entry: PortEntry,
    /// Reason for which the vif is not served for now.
    pub(crate) problem: Option<String>,
    /// Budget for log lines that the guest causes by connecting and disconnecting.
    pub(crate) lines: LineBudget,
    pub(crate) own: S,
}

impl<S> Vif<S> {
    /// Creates the record of a vif that is not connected.
    pub(crate) fn new(backend: VifBackend, own: S) -> Vif<S> {
        let (entry, problem, lines) = (PortEntry::default(), None, LineBudget::new());
        Vif { backend, entry, problem, lines, own }
    }
}

impl<S> Vif<S> {
    /// Returns the levels of the vif by name, with those of its port if it has one.
    pub(crate) fn levels(&self, port: Option<&PortStats>) -> BTreeMap<&'static str, u64> {
        let port = port.into_iter().flat_map(|port| port.levels.named());
        port.chain([("pages_staged", self.backend.staged().into())]).collect()
    }
}

/// Next step after a control ring was served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AfterControl {
    Wait,
    /// Serve the ring again after the others.
    Again,
    /// Advance the device, because it is to be closed.
    Look,
}

/// All vifs of a driver domain.
pub(crate) struct Vifs<S> {
    pub(crate) list: BTreeMap<DeviceId, Vif<S>>,
    /// Vifs that lost their Ethernet address to another vif, and that are due.
    pub(crate) displaced: Vec<DeviceId>,
    pub(crate) retired_ports: Retired,
    /// Sums of the rule violations of vifs that are gone.
    pub(crate) retired_rules: BTreeMap<&'static str, u64>,
}

impl<S> Vifs<S> {
    pub(crate) fn new() -> Vifs<S> {
        Vifs {
            list: BTreeMap::new(),
            displaced: Vec::new(),
            retired_ports: Retired::default(),
            retired_rules: BTreeMap::new(),
        }
    }

    /// Iterates over the vifs with a control ring. The descriptor is readable when the ring has requests.
    pub(crate) fn controls(&self) -> impl Iterator<Item = (DeviceId, BorrowedFd<'_>)> {
        self.list.iter().filter_map(|(device, vif)| Some((*device, vif.backend.control_fd()?)))
    }
}

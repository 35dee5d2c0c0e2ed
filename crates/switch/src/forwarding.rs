//! Forwarding: selects the egress ports of each frame.
//!
//! # Theory of operation
//!
//! A [`Switch`] learns the port of an address from the source addresses of frames. A frame to a known
//! address goes to that port alone. A frame to a group or to an unknown address is flooded: it goes to
//! every port except its ingress port. An address expires [`AGEING_SECONDS`] after its last use. A
//! [`Patch`] is a cable: frames received at one end are sent at the other.
//!
//! Neither of them calls a port. They read the headers of a batch and write a [`Plan`]: the indices of the
//! frames for each egress port, in order. So each port transmits once a batch, and tests need no I/O. The
//! caller passes in the time.
//!
//! # Protection against a hostile port
//!
//! * The port cannot evict the addresses of other ports. Each port has a share of the database; when the
//!   share is used up, a new address replaces one of the same port ([`table`]).
//! * The port cannot use the fixed address of another port ([`PortPolicy::mac`]). A port with a fixed
//!   address can use no other address. Frames with such sources are dropped and counted.
//! * A port with an [`AddressFilter`] can send only from its assigned IP addresses. It cannot redirect its
//!   neighbours, or claim to be their router or DHCP server ([`filter`]).
//! * The port cannot send to the protocols of bridges: frames to 01:80:C2:00:00:0x are dropped.
//!
//! An address without a fixed owner belongs to the port that used it last, as in every learning switch.

pub mod filter;
pub mod table;

#[cfg(test)]
mod tests;

use core::time::Duration;
use std::sync::Arc;

pub use ringfence_base::address::Mac;
use ringfence_frame::batch::{Batch, FrameView};
use ringfence_frame::counters::{DropReason, PortCounters};

use filter::AddressFilter;
use table::{Learned, MacTable};

/// Maximum number of ports of a switch.
pub const PORTS_MAX: usize = 256;

/// Ageing time of a learned address in seconds (IEEE 802.1Q, table 8-6).
pub const AGEING_SECONDS: u64 = 300;

/// Seconds between two sweeps for expired addresses.
const SWEEP_SECONDS: u64 = 30;

/// Length of the Ethernet header in bytes: both addresses and the EtherType.
const ETHERNET_HEADER: usize = 14;

/// Index of a port: below [`PORTS_MAX`], reused after the port is detached.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PortIndex(pub u16);

impl PortIndex {
    fn get(self) -> usize {
        usize::from(self.0)
    }
}

/// Rules of the switch for one port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortPolicy {
    /// Fixed address: the only source address of this port, which no other port may use.
    pub mac: Option<Mac>,
    /// Filter of the IP addresses that this port may use; `None` allows any.
    pub filter: Option<Arc<AddressFilter>>,
    /// Number of addresses that may be learned behind this port. The port gets fewer if the database has
    /// no more, but always the lower of this number and [`table::GUARANTEED`].
    pub addresses: u16,
    /// Set if small frames for this port are joined, in a switch. The port must take super-packets.
    pub join: bool,
    /// Set if they are joined in a patch: for the end that belongs to another machine than the sender, such as a port of
    /// the host's bridge. Each frame costs such an end a system call and a pass through the host's network stack.
    pub join_in_patch: bool,
}

impl Default for PortPolicy {
    fn default() -> Self {
        PortPolicy { mac: None, filter: None, addresses: 32, join: true, join_in_patch: false }
    }
}

/// Reasons for which a port is not attached.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AttachError {
    #[error("there are {limit} ports already: remove one first")]
    Full { limit: usize },
    /// Port index that is in use or out of range.
    #[error("port {} cannot be used", .0.0)]
    BadIndex(PortIndex),
    /// Fixed address that is a group address or zero.
    #[error("{} is not an address of one station", show(.0))]
    BadMac(Mac),
    /// Fixed address that another port has.
    #[error("another port has the address {}: give this one another", show(.0))]
    MacTaken(Mac),
}

fn show(mac: &Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Returns `true` for a non-zero address of one station.
fn is_station(mac: &Mac) -> bool {
    mac[0] & 1 == 0 && *mac != [0; 6]
}

/// Returns `true` for an address that no bridge forwards (IEEE 802.1Q, table 8-1).
fn is_link_local(mac: &Mac) -> bool {
    matches!(mac, [0x01, 0x80, 0xc2, 0, 0, 0..=0x0f])
}

/// Egress ports of the frames of a batch.
#[derive(Debug, Default)]
pub struct Plan {
    frames: Vec<Vec<u32>>,
    ports: Vec<PortIndex>,
}

impl Plan {
    /// Creates an empty plan.
    pub fn new() -> Plan {
        Plan::default()
    }

    /// Removes all entries and keeps the storage.
    pub fn clear(&mut self) {
        for port in self.ports.drain(..) {
            if let Some(frames) = self.frames.get_mut(port.get()) {
                frames.clear();
            }
        }
    }

    /// Returns the ports that receive frames, in the order in which they were added.
    pub fn ports(&self) -> &[PortIndex] {
        &self.ports
    }

    /// Returns the frames for `port`, ascending.
    pub fn frames(&self, port: PortIndex) -> &[u32] {
        self.frames.get(port.get()).map_or(&[], Vec::as_slice)
    }

    /// Returns the `n`th port of [`Plan::ports`] and its frames, for removal of some of them.
    pub fn entry_mut(&mut self, n: usize) -> Option<(PortIndex, &mut Vec<u32>)> {
        let port = *self.ports.get(n)?;
        Some((port, self.frames.get_mut(port.get())?))
    }

    pub(crate) fn add(&mut self, port: PortIndex, frame: u32) {
        if self.frames.len() <= port.get() {
            self.frames.resize_with(port.get() + 1, Vec::new);
        }
        let frames = &mut self.frames[port.get()];
        if frames.is_empty() {
            self.ports.push(port);
        }
        frames.push(frame);
    }
}

/// Decision for one frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Target {
    Port(PortIndex),
    Flood,
    Drop(DropReason),
}

/// Learning switch. See the [module](self).
#[derive(Debug)]
pub struct Switch {
    table: MacTable,
    /// Attached ports, ascending.
    attached: Vec<PortIndex>,
    /// Address filters of the ports, by index.
    filters: Vec<Option<Arc<AddressFilter>>>,
    /// Second of the last sweep for expired addresses.
    swept: u64,
}

impl Default for Switch {
    fn default() -> Self {
        Self::new()
    }
}

impl Switch {
    /// Creates a switch without ports.
    pub fn new() -> Switch {
        Switch {
            table: MacTable::new(),
            attached: Vec::with_capacity(PORTS_MAX),
            filters: vec![None; PORTS_MAX],
            swept: 0,
        }
    }

    /// Attaches a port.
    ///
    /// # Errors
    ///
    /// Returns [`AttachError`] if the port is refused; nothing has changed then.
    pub fn attach(&mut self, port: PortIndex, policy: PortPolicy) -> Result<(), AttachError> {
        let Err(position) = self.attached.binary_search(&port) else {
            return Err(AttachError::BadIndex(port));
        };
        if let Some(mac) = policy.mac.filter(|mac| !is_station(mac)) {
            return Err(AttachError::BadMac(mac));
        }
        self.table.attach(port, &policy)?;
        self.attached.insert(position, port);
        // The database accepted the index, so it is below the limit.
        if let Some(filter) = self.filters.get_mut(port.get()) {
            *filter = policy.filter;
        }
        Ok(())
    }

    /// Detaches a port and removes the addresses behind it.
    pub fn detach(&mut self, port: PortIndex) {
        self.table.detach(port);
        self.attached.retain(|&attached| attached != port);
        if let Some(filter) = self.filters.get_mut(port.get()) {
            *filter = None;
        }
    }

    /// Returns the number of known addresses.
    pub fn addresses(&self) -> usize {
        self.table.len()
    }

    /// Returns the forwarding database. Its [announcements](MacTable::announcements) are for the other
    /// switches of the same ports, which [apply](MacTable::apply_announcement) them.
    pub fn table_mut(&mut self) -> &mut MacTable {
        &mut self.table
    }

    /// Learns from the frames of `batch`, received from `source`, and adds their egress ports to `plan`.
    /// Frames without an egress port are dropped and counted in `counters`, those of the source. `now` is
    /// the time since any fixed moment.
    pub fn route(
        &mut self,
        source: PortIndex,
        batch: &Batch,
        now: Duration,
        counters: &PortCounters,
        plan: &mut Plan,
    ) {
        let now = now.as_secs();
        if now.saturating_sub(self.swept) >= SWEEP_SECONDS {
            self.table.sweep(now);
            self.swept = now;
        }
        let Switch { table, attached, filters, .. } = self;
        let filter = filters.get(source.get()).and_then(Option::as_deref);
        // Consecutive frames mostly have the same two addresses.
        let mut last: Option<([u8; 12], Target)> = None;
        for (index, frame) in (0u32..).zip(batch.iter()) {
            let Some(addresses) = addresses(&frame) else {
                counters.dropped(DropReason::Runt);
                continue;
            };
            let target = match last {
                Some((same, target)) if same == addresses => target,
                _ => target(table, source, &addresses, now),
            };
            last = Some((addresses, target));
            let checked = match target {
                Target::Drop(reason) => Err(reason),
                _ => filter.map_or(Ok(()), |filter| filter.check(&frame)),
            };
            match (target, checked) {
                (Target::Drop(reason), _) | (_, Err(reason)) => counters.dropped(reason),
                (Target::Port(port), Ok(())) => plan.add(port, index),
                (Target::Flood, Ok(())) => flood(attached, source, index, counters, plan),
            }
        }
    }
}

/// Adds every port except `source` to the plan of the frame.
fn flood(
    attached: &[PortIndex],
    source: PortIndex,
    index: u32,
    counters: &PortCounters,
    plan: &mut Plan,
) {
    let others = attached.iter().filter(|&&port| port != source);
    if others.clone().next().is_none() {
        counters.dropped(DropReason::NoDestination);
    }
    others.for_each(|&port| plan.add(port, index));
}

/// Learns the source address of a frame and decides about its destination address.
fn target(table: &mut MacTable, source: PortIndex, addresses: &[u8; 12], now: u64) -> Target {
    let (dst, src) = split(addresses);
    if !is_station(&src) {
        return Target::Drop(DropReason::BadSource);
    }
    if table.learn(src, source, now) == Learned::Spoofed {
        return Target::Drop(DropReason::SpoofedSource);
    }
    if is_link_local(&dst) {
        return Target::Drop(DropReason::LinkLocal);
    }
    if dst[0] & 1 == 1 {
        return Target::Flood;
    }
    match table.find(&dst, now) {
        Some(port) if port == source => Target::Drop(DropReason::SamePort),
        Some(port) => Target::Port(port),
        None => Target::Flood,
    }
}

/// Returns destination and source address, in the order of the frame, or `None` if the frame is shorter
/// than an Ethernet header.
fn addresses(frame: &FrameView<'_>) -> Option<[u8; 12]> {
    let header = frame.header().first_chunk::<ETHERNET_HEADER>()?;
    header.first_chunk::<12>().copied()
}

fn split(addresses: &[u8; 12]) -> (Mac, Mac) {
    let [d0, d1, d2, d3, d4, d5, s @ ..] = *addresses;
    ([d0, d1, d2, d3, d4, d5], s)
}

/// Cable between two ports. Like a switch, it drops frames with spoofed sources.
#[derive(Debug, Default)]
pub struct Patch {
    ends: [Option<(PortIndex, PortPolicy)>; 2],
}

impl Patch {
    /// Creates a patch without ports.
    pub fn new() -> Patch {
        Patch::default()
    }

    /// Attaches a port to a free end.
    ///
    /// # Errors
    ///
    /// Returns [`AttachError::Full`] if both ends are in use, [`AttachError::BadMac`] if the fixed address
    /// is not that of a station.
    pub fn attach(&mut self, port: PortIndex, policy: PortPolicy) -> Result<(), AttachError> {
        if let Some(mac) = policy.mac.filter(|mac| !is_station(mac)) {
            return Err(AttachError::BadMac(mac));
        }
        let free = self.ends.iter_mut().find(|end| end.is_none());
        *free.ok_or(AttachError::Full { limit: 2 })? = Some((port, policy));
        Ok(())
    }

    /// Detaches a port and frees its end.
    pub fn detach(&mut self, port: PortIndex) {
        for end in &mut self.ends {
            end.take_if(|(attached, _)| *attached == port);
        }
    }

    /// Returns the port at the other end than `port`.
    pub fn other(&self, port: PortIndex) -> Option<PortIndex> {
        self.ends.iter().flatten().map(|(end, _)| *end).find(|&end| end != port)
    }

    /// Returns the policy of the port.
    fn policy(&self, port: PortIndex) -> Option<&PortPolicy> {
        self.ends.iter().flatten().find(|(end, _)| *end == port).map(|(_, policy)| policy)
    }

    /// Adds every frame to the plan of the other end, unless its source is not an address of the port.
    pub fn route(
        &self,
        source: PortIndex,
        batch: &Batch,
        counters: &PortCounters,
        plan: &mut Plan,
    ) {
        let (other, policy) = (self.other(source), self.policy(source));
        let fixed = policy.and_then(|policy| policy.mac);
        let filter = policy.and_then(|policy| policy.filter.as_deref());
        for (index, frame) in (0u32..).zip(batch.iter()) {
            let Some(addresses) = addresses(&frame) else {
                counters.dropped(DropReason::Runt);
                continue;
            };
            if fixed.is_some_and(|mac| mac != split(&addresses).1) {
                counters.dropped(DropReason::SpoofedSource);
                continue;
            }
            match (other, filter.map_or(Ok(()), |filter| filter.check(&frame))) {
                (_, Err(reason)) => counters.dropped(reason),
                (Some(port), Ok(())) => plan.add(port, index),
                (None, Ok(())) => counters.dropped(DropReason::NoDestination),
            }
        }
    }
}

/// Connection between the ports of a dataplane.
#[derive(Debug)]
pub enum Fabric {
    Switch(Switch),
    Patch(Patch),
}

impl Fabric {
    /// Attaches a port. A patch uses only [`PortPolicy::mac`] and [`PortPolicy::filter`].
    ///
    /// # Errors
    ///
    /// Returns [`AttachError`] if the port is refused; nothing has changed then.
    pub fn attach(&mut self, port: PortIndex, policy: PortPolicy) -> Result<(), AttachError> {
        match self {
            Fabric::Switch(switch) => switch.attach(port, policy),
            Fabric::Patch(patch) => patch.attach(port, policy),
        }
    }

    /// Detaches a port from the fabric.
    pub fn detach(&mut self, port: PortIndex) {
        match self {
            Fabric::Switch(switch) => switch.detach(port),
            Fabric::Patch(patch) => patch.detach(port),
        }
    }

    /// Records announcements of learned addresses from now on, for other fabrics of the same ports.
    pub fn record_announcements(&mut self) {
        if let Fabric::Switch(switch) = self {
            switch.table.record_announcements();
        }
    }

    /// Adds the egress ports of the frames of `batch` to `plan`; see [`Switch::route`].
    pub fn route(
        &mut self,
        source: PortIndex,
        batch: &Batch,
        now: Duration,
        counters: &PortCounters,
        plan: &mut Plan,
    ) {
        match self {
            Fabric::Switch(switch) => switch.route(source, batch, now, counters, plan),
            Fabric::Patch(patch) => patch.route(source, batch, counters, plan),
        }
    }

    /// Returns the number of known addresses; 0 for a patch.
    pub fn addresses(&self) -> usize {
        match self {
            Fabric::Switch(switch) => switch.addresses(),
            Fabric::Patch(_) => 0,
        }
    }
}

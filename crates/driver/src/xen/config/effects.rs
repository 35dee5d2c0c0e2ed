//! Options of the file, and the time at which a change of each takes effect.

/// Time at which a change takes effect.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Effect {
    Now,
    /// For devices that connect after the reload.
    Connect,
    /// At the next start of the daemon.
    Restart,
}

impl Effect {
    /// Returns the word that the example configuration prints behind each option.
    pub fn word(self) -> &'static str {
        match self {
            Effect::Now => "now",
            Effect::Connect => "connect",
            Effect::Restart => "restart",
        }
    }
}

/// All options, and the time at which a change of each takes effect.
pub(super) const KEYS: &[(&str, Effect)] = &[
    ("serve.status-socket", Effect::Restart),
    ("serve.log-level", Effect::Now),
    ("network.attach", Effect::Restart),
    ("network.bridge", Effect::Connect),
    ("network.host-interface", Effect::Restart),
    ("network.mode", Effect::Connect),
    ("network.offloads", Effect::Connect),
    ("network.max-queues", Effect::Connect),
    ("network.check-source", Effect::Connect),
    ("network.addresses", Effect::Connect),
    ("network.multicast-control", Effect::Connect),
    ("network.stall-seconds", Effect::Connect),
    ("disks.serve", Effect::Restart),
    ("disks.paths", Effect::Restart),
    ("disks.nbd", Effect::Restart),
    ("disks.mode", Effect::Connect),
    ("disks.cache", Effect::Connect),
    ("disks.bounce", Effect::Connect),
    ("disks.engine", Effect::Connect),
    ("disks.sector-size", Effect::Connect),
    ("disks.max-queues", Effect::Connect),
    ("disks.ring-page-order", Effect::Connect),
    ("disks.indirect-segments", Effect::Connect),
    ("disks.persistent-pages", Effect::Connect),
    ("disks.persistent-seconds", Effect::Connect),
    ("limits.devices", Effect::Now),
    ("limits.devices-per-domain", Effect::Now),
    ("limits.disks", Effect::Now),
    ("limits.disks-per-domain", Effect::Now),
    ("metrics.listen", Effect::Restart),
    ("device", Effect::Connect),
    ("disk", Effect::Connect),
];

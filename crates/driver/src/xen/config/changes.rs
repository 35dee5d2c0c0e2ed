//! Differences between two configurations, and the time at which each takes effect.

use core::fmt;

use super::disks;
use super::effects::{Effect, KEYS};
use super::file::Config;

/// Options that differ between two configurations.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Changes(Vec<(&'static str, Effect)>);

impl Changes {
    /// Returns the options that differ, as `section.option`, and when each takes effect.
    pub fn all(&self) -> &[(&'static str, Effect)] {
        &self.0
    }

    /// Iterates over the options with one effect.
    pub fn with(&self, effect: Effect) -> impl Iterator<Item = &'static str> {
        self.0.iter().filter(move |(_, own)| *own == effect).map(|(name, _)| *name)
    }
}

impl fmt::Display for Changes {
    /// Formats the changes, as in `serve.log-level now; network.mode for devices that connect from now on`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("nothing changed");
        }
        for (n, (name, effect)) in self.0.iter().enumerate() {
            let when = match effect {
                Effect::Now => "now",
                Effect::Connect => "for devices that connect from now on",
                Effect::Restart => "when the daemon is started again",
            };
            write!(f, "{}{name} {when}", if n == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

impl Config {
    /// Compares with the configuration `new`.
    pub fn changes_to(&self, new: &Config) -> Changes {
        let differs = |name: &str| {
            let (s, n, l) = (&self.serve, &self.network, &self.limits);
            match name {
                "serve.status-socket" => s.status_socket != new.serve.status_socket,
                "serve.log-level" => s.log_level != new.serve.log_level,
                "network.attach" => n.attach != new.network.attach,
                "network.bridge" => n.bridge != new.network.bridge,
                "network.host-interface" => n.host_interface != new.network.host_interface,
                "network.mode" => n.mode != new.network.mode,
                "network.offloads" => n.offloads != new.network.offloads,
                "network.max-queues" => n.max_queues != new.network.max_queues,
                "network.check-source" => n.check_source != new.network.check_source,
                "network.addresses" => n.addresses != new.network.addresses,
                "network.multicast-control" => n.multicast_control != new.network.multicast_control,
                "network.stall-seconds" => n.stall_seconds != new.network.stall_seconds,
                "limits.devices" => l.devices != new.limits.devices,
                "limits.devices-per-domain" => {
                    l.devices_per_domain != new.limits.devices_per_domain
                }
                "limits.disks" => l.disks != new.limits.disks,
                "limits.disks-per-domain" => l.disks_per_domain != new.limits.disks_per_domain,
                "metrics.listen" => self.metrics.listen != new.metrics.listen,
                "device" => self.device != new.device,
                "disk" => self.disk != new.disk,
                name => disks::differs(name, &self.disks, &new.disks),
            }
        };
        Changes(KEYS.iter().copied().filter(|(name, _)| differs(name)).collect())
    }

    /// Returns the configuration in effect after a reload: `new` without the changes that need a restart.
    #[must_use]
    pub fn reloaded(&self, new: Config) -> Config {
        let mut next = new;
        next.serve.status_socket.clone_from(&self.serve.status_socket);
        next.network.attach = self.network.attach;
        next.network.host_interface.clone_from(&self.network.host_interface);
        next.disks.serve = self.disks.serve;
        next.disks.paths.clone_from(&self.disks.paths);
        next.disks.nbd = self.disks.nbd;
        next.metrics.clone_from(&self.metrics);
        next
    }
}

//! Metrics of the daemon and of guests' interfaces.

use core::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::disks;
use super::encode::{About, Labels, counter, each, family, gauge};
use crate::xen::status::{Attachment, Counts, Snapshot, VifStatus};

/// Content type of the text.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Counters of a port that have metrics of their own.
const TRAFFIC: [&str; 4] = ["rx_frames", "rx_bytes", "tx_frames", "tx_bytes"];

/// Renders the metrics as text in the OpenMetrics format.
pub fn render(snapshot: &Snapshot) -> String {
    let mut registry = Registry::with_prefix("ringfence");
    registry.register_collector(Box::new(Source(snapshot.clone())));
    let mut text = String::new();
    // Writing to a `String` never fails, and the collector fails only if a write does.
    let _ = prometheus_client::encoding::text::encode(&mut text, &registry);
    text
}

#[derive(Debug)]
struct Source(Snapshot);

fn labels_of(vif: &VifStatus) -> Labels<'_> {
    Labels::default().and("vif", &vif.name)
}

impl Collector for Source {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let e = &mut encoder;
        self.daemon(e)?;
        self.gone(e)?;
        self.devices(e)?;
        self.traffic(e)?;
        self.counts(e)?;
        disks::encode(&self.0, e)
    }
}

impl Source {
    fn daemon(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let daemon = &self.0.daemon;
        let none = Labels::default();
        let build = none.and("version", &daemon.version).and("platform", &daemon.platform);
        family(e, About::new("build_info", "Version and platform"), MetricType::Gauge, |m| {
            gauge(m, &build, 1)
        })?;
        let about = About::new("uptime_seconds", "Since the daemon began");
        family(e, about, MetricType::Gauge, |m| gauge(m, &none, daemon.uptime_seconds))?;
        let about =
            About::new("vifs_adopted", "Interfaces taken over from the daemon before this one");
        family(e, about, MetricType::Counter, |m| counter(m, &none, daemon.adopted))?;
        let about = About::new("path_operations", "Grant operations, system calls and the like");
        family(e, about, MetricType::Counter, |m| each(m, &none, "operation", &daemon.path))?;
        if let Some(addresses) = daemon.switch_addresses {
            let about = About::new("switch_addresses", "Ethernet addresses that the switch knows");
            family(e, about, MetricType::Gauge, |m| gauge(m, &none, addresses))?;
        }
        let Some(host) = &daemon.host_interface else { return Ok(()) };
        let labels = none.and("interface", &host.name);
        let about = About::new("host_port", "Counters of the host's port on the switch");
        family(e, about, MetricType::Counter, |m| each(m, &labels, "counter", &host.counters))
    }

    /// Writes the sums over devices that are gone.
    fn gone(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let (daemon, none) = (&self.0.daemon, Labels::default());
        let about = About::new("gone_ports", "Counters of ports that are gone");
        family(e, about, MetricType::Counter, |m| each(m, &none, "counter", &daemon.gone_ports))?;
        let about = About::new("gone_rule_violations", "Rules broken by devices that are gone");
        family(e, about, MetricType::Counter, |m| each(m, &none, "rule", &daemon.gone_rules))
    }

    fn devices(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let vifs = &self.0.vifs;
        let about = About::new("vifs", "Interfaces of guests");
        family(e, about, MetricType::Gauge, |m| gauge(m, &Labels::default(), vifs.len() as u64))?;
        family(e, About::new("vif_info", "Properties of an interface"), MetricType::Gauge, |m| {
            vifs.iter().try_for_each(|vif| {
                let (domain, handle) = (vif.domain.to_string(), vif.handle.to_string());
                let (tap, bridge) = match &vif.attachment {
                    Attachment::Switch => ("", ""),
                    Attachment::Tap { interface, bridge } => {
                        (interface.as_str(), bridge.as_deref().unwrap_or_default())
                    }
                };
                let labels = labels_of(vif)
                    .and("domid", &domain)
                    .and("domain", vif.domain_name.as_deref().unwrap_or_default())
                    .and("handle", &handle)
                    .and("mac", vif.mac.as_deref().unwrap_or_default())
                    .and("mode", &vif.mode)
                    .and("tap", tap)
                    .and("bridge", bridge);
                gauge(m, &labels, 1)
            })
        })?;
        let state = |vif: &VifStatus| u64::from(vif.connected);
        self.each_vif(e, About::new("vif_connected", "1 if frames can flow"), state)?;
        let about =
            About::new("vif_adopted", "1 if it was taken over from the daemon before this one");
        self.each_vif(e, about, |vif| u64::from(vif.adopted))?;
        let about =
            About::new("vif_stalled", "1 if the guest counts as stalled: it takes no frames");
        self.each_vif(e, about, |vif| u64::from(vif.is_stalled()))?;
        self.each_vif(e, About::new("vif_queues", "Queues in use"), |vif| vif.queue_count.into())?;
        let about = About::new("vif_staged_pages", "Pages of the guest that are staged");
        self.each_vif(e, about, |vif| vif.staged_pages.into())
    }

    fn each_vif(
        &self,
        e: &mut DescriptorEncoder<'_>,
        about: About<'_>,
        value: impl Fn(&VifStatus) -> u64,
    ) -> fmt::Result {
        family(e, about, MetricType::Gauge, |m| {
            self.0.vifs.iter().try_for_each(|vif| gauge(m, &labels_of(vif), value(vif)))
        })
    }

    fn traffic(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, sent, received) in [
            ("vif_frames", "Frames that a guest sent and received", "rx_frames", "tx_frames"),
            ("vif_bytes", "Bytes of these frames, with Ethernet headers", "rx_bytes", "tx_bytes"),
        ] {
            family(e, About { name, help }, MetricType::Counter, |m| {
                self.0.vifs.iter().try_for_each(|vif| {
                    let labels = labels_of(vif);
                    counter(m, &labels.and("direction", "sent"), sum(vif, sent))?;
                    counter(m, &labels.and("direction", "received"), sum(vif, received))
                })
            })?;
        }
        Ok(())
    }

    fn counts(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let about = About::new("vif_drops", "Frames that were dropped, by reason");
        self.each_count(e, about, "reason", |name| name.strip_prefix("drop_"))?;
        let about = About::new("vif_port", "Other counters of an interface's port");
        self.each_count(e, about, "counter", |name| {
            Some(name).filter(|name| !name.starts_with("drop_") && !TRAFFIC.contains(name))
        })?;
        let about = About::new("vif_tap", "Counters of the TAP interface's port");
        family(e, about, MetricType::Counter, |m| {
            let taps = self.0.vifs.iter().filter_map(|vif| Some((vif, vif.tap.as_ref()?)));
            taps.into_iter()
                .try_for_each(|(vif, counts)| each(m, &labels_of(vif), "counter", counts))
        })?;
        let about = About::new("vif_rule_violations", "Rules of the protocol that the guest broke");
        family(e, about, MetricType::Counter, |m| {
            self.0.vifs.iter().try_for_each(|vif| each(m, &labels_of(vif), "rule", &vif.rules))
        })
    }

    fn each_count(
        &self,
        e: &mut DescriptorEncoder<'_>,
        about: About<'_>,
        label: &'static str,
        pick: impl Fn(&str) -> Option<&str>,
    ) -> fmt::Result {
        family(e, about, MetricType::Counter, |m| {
            for vif in &self.0.vifs {
                for (name, count) in &total(vif) {
                    if let Some(name) = pick(name) {
                        counter(m, &labels_of(vif).and(label, name), *count)?;
                    }
                }
            }
            Ok(())
        })
    }
}

/// Returns the sum of one counter over all queues.
fn sum(vif: &VifStatus, name: &str) -> u64 {
    vif.queues.iter().filter_map(|queue| queue.counters.get(name)).sum()
}

/// Returns the sums of all counters over all queues.
fn total(vif: &VifStatus) -> Counts {
    let mut total = Counts::new();
    for (name, count) in vif.queues.iter().flat_map(|queue| &queue.counters) {
        *total.entry(name.clone()).or_default() += count;
    }
    total
}

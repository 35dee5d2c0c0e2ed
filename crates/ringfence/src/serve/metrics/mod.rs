//! Metrics of the daemon, in the OpenMetrics text format for Prometheus.
//!
//! The exporter's thread (`http`) asks the control thread for a [`Snapshot`], as `ringfence status` does,
//! and [`render`] turns it into text. The datapath does no work for metrics.
//!
//! Names follow the rules of Prometheus. Counters end in `_total`, and units are part of the name.
//! Variants of one measurement share a name and differ in labels. Directions are the guest's: `sent` and
//! `received`.

mod disks;
mod http;

#[cfg(test)]
pub(crate) mod tests;

use core::fmt;
use std::borrow::Cow;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabelSet, LabelSetEncoder, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use super::status::{Attachment, Counts, Snapshot, VifStatus};

pub use http::{Exporter, ExporterError};

/// Content type of the text.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

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

/// Names and values of labels. Values are escaped here, because the library writes them unchanged: a
/// guest's name must not be able to end its label.
#[derive(Clone, Debug, Default)]
pub(crate) struct Labels<'a>(Vec<(&'static str, Cow<'a, str>)>);

impl<'a> Labels<'a> {
    fn of(vif: &'a VifStatus) -> Labels<'a> {
        Labels::default().and("vif", &vif.name)
    }

    pub(crate) fn and(&self, name: &'static str, value: &'a str) -> Labels<'a> {
        let mut labels = self.clone();
        labels.0.push((name, escaped(value)));
        labels
    }
}

impl EncodeLabelSet for Labels<'_> {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        use prometheus_client::encoding::EncodeLabel;
        self.0
            .iter()
            .try_for_each(|(name, value)| (*name, value.as_ref()).encode(encoder.encode_label()))
    }
}

/// Escapes a label's value as the format requires.
fn escaped(text: &str) -> Cow<'_, str> {
    if text.contains(['\\', '"', '\n']) {
        text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n").into()
    } else {
        text.into()
    }
}

/// Describes a metric and writes its values.
pub(crate) fn family(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    kind: MetricType,
    mut write: impl FnMut(&mut MetricEncoder<'_>) -> fmt::Result,
) -> fmt::Result {
    let unit = if name.ends_with("seconds") { Some(&Unit::Seconds) } else { None };
    let name = unit.map_or(name, |_| name.trim_end_matches("_seconds"));
    write(&mut encoder.encode_descriptor(name, help, unit, kind)?)
}

pub(crate) fn gauge(
    metric: &mut MetricEncoder<'_>,
    labels: &Labels<'_>,
    value: u64,
) -> fmt::Result {
    if labels.0.is_empty() {
        return metric.encode_gauge(&value);
    }
    metric.encode_family(labels)?.encode_gauge(&value)
}

pub(crate) fn counter(
    metric: &mut MetricEncoder<'_>,
    labels: &Labels<'_>,
    value: u64,
) -> fmt::Result {
    if labels.0.is_empty() {
        return metric.encode_counter::<NoLabelSet, _, u64>(&value, None);
    }
    metric.encode_family(labels)?.encode_counter::<NoLabelSet, _, u64>(&value, None)
}

/// Writes one counter for each name, distinguished by a label.
fn each(
    metric: &mut MetricEncoder<'_>,
    labels: &Labels<'_>,
    label: &'static str,
    counts: &Counts,
) -> fmt::Result {
    counts.iter().try_for_each(|(name, count)| counter(metric, &labels.and(label, name), *count))
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
        family(e, ("build_info", "Version and platform"), MetricType::Gauge, |m| {
            gauge(m, &build, 1)
        })?;
        let about = ("uptime_seconds", "Since the daemon began");
        family(e, about, MetricType::Gauge, |m| gauge(m, &none, daemon.uptime_seconds))?;
        let about = ("vifs_adopted", "Interfaces taken over from the daemon before this one");
        family(e, about, MetricType::Counter, |m| counter(m, &none, daemon.adopted))?;
        let about = ("path_operations", "Grant operations, system calls and the like");
        family(e, about, MetricType::Counter, |m| each(m, &none, "operation", &daemon.path))?;
        if let Some(addresses) = daemon.switch_addresses {
            let about = ("switch_addresses", "Ethernet addresses that the switch knows");
            family(e, about, MetricType::Gauge, |m| gauge(m, &none, addresses))?;
        }
        let Some(host) = &daemon.host_interface else { return Ok(()) };
        let labels = none.and("interface", &host.name);
        let about = ("host_port", "Counters of the host's port on the switch");
        family(e, about, MetricType::Counter, |m| each(m, &labels, "counter", &host.counters))
    }

    /// Writes the sums over devices that are gone.
    fn gone(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let (daemon, none) = (&self.0.daemon, Labels::default());
        let about = ("gone_ports", "Counters of ports that are gone");
        family(e, about, MetricType::Counter, |m| each(m, &none, "counter", &daemon.gone_ports))?;
        let about = ("gone_rule_violations", "Rules broken by devices that are gone");
        family(e, about, MetricType::Counter, |m| each(m, &none, "rule", &daemon.gone_rules))
    }

    fn devices(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let vifs = &self.0.vifs;
        let about = ("vifs", "Interfaces of guests");
        family(e, about, MetricType::Gauge, |m| gauge(m, &Labels::default(), vifs.len() as u64))?;
        family(e, ("vif_info", "Properties of an interface"), MetricType::Gauge, |m| {
            vifs.iter().try_for_each(|vif| {
                let (domain, handle) = (vif.domain.to_string(), vif.handle.to_string());
                let (tap, bridge) = match &vif.attachment {
                    Attachment::Switch => ("", ""),
                    Attachment::Tap { interface, bridge } => {
                        (interface.as_str(), bridge.as_deref().unwrap_or_default())
                    }
                };
                let labels = Labels::of(vif)
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
        self.each_vif(e, ("vif_connected", "1 if frames can flow"), state)?;
        let about = ("vif_adopted", "1 if it was taken over from the daemon before this one");
        self.each_vif(e, about, |vif| u64::from(vif.adopted))?;
        let about = ("vif_stalled", "1 if the guest counts as stalled: it takes no frames");
        self.each_vif(e, about, |vif| u64::from(vif.is_stalled()))?;
        self.each_vif(e, ("vif_queues", "Queues in use"), |vif| vif.queue_count.into())?;
        let about = ("vif_staged_pages", "Pages of the guest that are staged");
        self.each_vif(e, about, |vif| vif.staged_pages.into())
    }

    fn each_vif(
        &self,
        e: &mut DescriptorEncoder<'_>,
        about: (&str, &str),
        value: impl Fn(&VifStatus) -> u64,
    ) -> fmt::Result {
        family(e, about, MetricType::Gauge, |m| {
            self.0.vifs.iter().try_for_each(|vif| gauge(m, &Labels::of(vif), value(vif)))
        })
    }

    fn traffic(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, sent, received) in [
            ("vif_frames", "Frames that a guest sent and received", "rx_frames", "tx_frames"),
            ("vif_bytes", "Bytes of these frames, with Ethernet headers", "rx_bytes", "tx_bytes"),
        ] {
            family(e, (name, help), MetricType::Counter, |m| {
                self.0.vifs.iter().try_for_each(|vif| {
                    let labels = Labels::of(vif);
                    counter(m, &labels.and("direction", "sent"), sum(vif, sent))?;
                    counter(m, &labels.and("direction", "received"), sum(vif, received))
                })
            })?;
        }
        Ok(())
    }

    fn counts(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let about = ("vif_drops", "Frames that were dropped, by reason");
        self.each_count(e, about, "reason", |name| name.strip_prefix("drop_"))?;
        let about = ("vif_port", "Other counters of an interface's port");
        self.each_count(e, about, "counter", |name| {
            Some(name).filter(|name| !name.starts_with("drop_") && !TRAFFIC.contains(name))
        })?;
        let about = ("vif_tap", "Counters of the TAP interface's port");
        family(e, about, MetricType::Counter, |m| {
            let taps = self.0.vifs.iter().filter_map(|vif| Some((vif, vif.tap.as_ref()?)));
            taps.into_iter()
                .try_for_each(|(vif, counts)| each(m, &Labels::of(vif), "counter", counts))
        })?;
        let about = ("vif_rule_violations", "Rules of the protocol that the guest broke");
        family(e, about, MetricType::Counter, |m| {
            self.0.vifs.iter().try_for_each(|vif| each(m, &Labels::of(vif), "rule", &vif.rules))
        })
    }

    fn each_count(
        &self,
        e: &mut DescriptorEncoder<'_>,
        about: (&str, &str),
        label: &'static str,
        pick: impl Fn(&str) -> Option<&str>,
    ) -> fmt::Result {
        family(e, about, MetricType::Counter, |m| {
            for vif in &self.0.vifs {
                for (name, count) in &total(vif) {
                    if let Some(name) = pick(name) {
                        counter(m, &Labels::of(vif).and(label, name), *count)?;
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

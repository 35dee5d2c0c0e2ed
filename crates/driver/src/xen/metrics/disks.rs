//! Metrics of guests' disks.

use core::fmt;

use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;

use super::encode::{About, Labels, counter, each, family, gauge};
use crate::xen::status::{Counts, Snapshot, VbdStatus};

/// Counters of a ring that have metrics of their own, with the value of the label `operation`.
const REQUESTS: [(&str, &str); 5] = [
    ("reads", "read"),
    ("writes", "write"),
    ("flushes", "flush"),
    ("discards", "discard"),
    ("zeroes", "write_zeroes"),
];
/// Counters of bytes, with the value of the label `direction`.
const BYTES: [(&str, &str); 2] = [("read_bytes", "read"), ("written_bytes", "written")];

fn of(disk: &VbdStatus) -> Labels<'_> {
    Labels::default().and("vbd", &disk.name)
}

/// Writes all metrics of disks.
pub(super) fn encode(snapshot: &Snapshot, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
    totals(snapshot, e)?;
    devices(snapshot, e)?;
    let about = About::new("vbd_requests", "Requests of a guest to its disk");
    named(&snapshot.disks, e, about, "operation", &REQUESTS)?;
    let about = About::new("vbd_bytes", "Bytes that a guest read from its disk, and that it wrote");
    named(&snapshot.disks, e, about, "direction", &BYTES)?;
    let about = About::new("vbd_queue", "Other counters of a disk's rings");
    family(e, about, MetricType::Counter, |m| {
        snapshot.disks.iter().try_for_each(|disk| {
            let mut others = total(disk);
            others.retain(|name, _| !REQUESTS.iter().chain(&BYTES).any(|(known, _)| known == name));
            each(m, &of(disk), "counter", &others)
        })
    })?;
    let about = About::new("vbd_rule_violations", "Rules of the protocol that the guest broke");
    family(e, about, MetricType::Counter, |m| {
        snapshot.disks.iter().try_for_each(|disk| each(m, &of(disk), "rule", &disk.rules))
    })
}

fn totals(snapshot: &Snapshot, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let (all, none) = (&snapshot.daemon.disks, Labels::default());
    let about = About::new("vbds_adopted", "Disks taken over from the daemon before this one");
    family(e, about, MetricType::Counter, |m| counter(m, &none, all.adopted))?;
    let about = About::new("vbds_finishing", "Removed disks whose storage still has requests");
    family(e, about, MetricType::Gauge, |m| gauge(m, &none, all.finishing))?;
    let about = About::new("gone_vbds", "Counters of rings of disks that are gone");
    family(e, about, MetricType::Counter, |m| each(m, &none, "counter", &all.gone))?;
    let about = About::new("gone_vbd_rule_violations", "Rules broken by disks that are gone");
    family(e, about, MetricType::Counter, |m| each(m, &none, "rule", &all.gone_rules))
}

fn devices(snapshot: &Snapshot, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let disks = &snapshot.disks;
    let about = About::new("vbds", "Disks of guests");
    family(e, about, MetricType::Gauge, |m| gauge(m, &Labels::default(), disks.len() as u64))?;
    family(e, About::new("vbd_info", "Properties of a disk"), MetricType::Gauge, |m| {
        disks.iter().try_for_each(|disk| {
            let domain = disk.domain.to_string();
            let labels = of(disk)
                .and("domid", &domain)
                .and("domain", disk.domain_name.as_deref().unwrap_or_default())
                .and("vdev", disk.vdev.as_deref().unwrap_or_default())
                .and("storage", disk.storage.as_deref().unwrap_or_default())
                .and("mode", &disk.mode);
            gauge(m, &labels, 1)
        })
    })?;
    let mut one = |name, help, value: fn(&VbdStatus) -> u64| {
        family(e, About { name, help }, MetricType::Gauge, |m| {
            disks.iter().try_for_each(|disk| gauge(m, &of(disk), value(disk)))
        })
    };
    one("vbd_connected", "1 if requests can flow", |disk| u64::from(disk.connected))?;
    one("vbd_adopted", "1 if it was taken over from the daemon before this one", |disk| {
        u64::from(disk.adopted)
    })?;
    one("vbd_persistent", "1 if the guest's pages stay mapped", |disk| u64::from(disk.persistent))?;
    one("vbd_queues", "Queues in use", |disk| disk.queues.len() as u64)?;
    one("vbd_size_bytes", "Size of a disk", |disk| disk.bytes.unwrap_or(0))
}

/// Writes the counters in `names`, distinguished by a label.
fn named(
    disks: &[VbdStatus],
    e: &mut DescriptorEncoder<'_>,
    about: About<'_>,
    label: &'static str,
    names: &[(&str, &str)],
) -> fmt::Result {
    family(e, about, MetricType::Counter, |m| {
        disks.iter().try_for_each(|disk| {
            let all = total(disk);
            names.iter().try_for_each(|(name, value)| {
                let count = all.get(*name).copied().unwrap_or(0);
                counter(m, &of(disk).and(label, value), count)
            })
        })
    })
}

/// Returns the sums of all counters over all rings.
fn total(disk: &VbdStatus) -> Counts {
    let mut total = Counts::new();
    for (name, count) in disk.queues.iter().flat_map(|queue| &queue.counters) {
        *total.entry(name.clone()).or_default() += count;
    }
    total
}

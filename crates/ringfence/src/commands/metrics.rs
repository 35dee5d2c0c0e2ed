//! `ringfence ps --metrics`: egress verdicts of the guests in the OpenMetrics text format.
//!
//! A guest has no port on the host for an exporter, and its launcher ends with it. Prometheus reads the text from a file
//! that a timer writes (the textfile collector of node_exporter).

use core::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::ps::Row;
use ringfence_driver::xen::metrics::encode::{About, Labels, counter, family, gauge};
use ringfence_uplink_process::totals::EgressTotals;

/// Renders the metrics of these guests. Guests without a policy have none.
pub(super) fn render(rows: &[Row]) -> String {
    let of = |row: &Row| Some((row.guest.name.clone(), row.pid.to_string(), row.egress?));
    let mut registry = Registry::with_prefix("ringfence");
    register_egress(&mut registry, rows.iter().filter_map(of).collect());
    let mut text = String::new();
    // Writing to a `String` never fails, and the collector fails only if a write does.
    let _ = prometheus_client::encoding::text::encode(&mut text, &registry);
    text
}

/// Adds the verdicts of guests: name, process number of the launcher or session, and totals of each.
pub(crate) fn register_egress(
    registry: &mut Registry,
    guests: Vec<(String, String, EgressTotals)>,
) {
    let egress = registry.sub_registry_with_prefix("guest_egress");
    egress.register_collector(Box::new(Source(guests)));
}

/// Name, process number of the launcher, and totals of each guest.
#[derive(Debug)]
struct Source(Vec<(String, String, EgressTotals)>);

/// Name and help of a counter, and its values with their verdicts, if it distinguishes them.
type Counted = (&'static str, &'static str, fn(&EgressTotals) -> Vec<(Option<&'static str>, u64)>);

const COUNTED: [Counted; 10] = [
    ("connections", "Connections, UDP associations and echo flows", |totals| {
        let (allowed, denied) = (totals.connections_allowed, totals.connections_denied);
        vec![(Some("allow"), allowed), (Some("deny"), denied)]
    }),
    ("hellos_denied", "Allowed connections that ended because of their first bytes", |totals| {
        vec![(None, totals.hellos_denied)]
    }),
    (
        "limits_reached",
        "Allowed connections that ended because their bytes reached the limit of a rule",
        |totals| vec![(None, totals.limits_reached)],
    ),
    ("datagrams_lost", "Datagrams dropped before a verdict", |totals| {
        vec![(None, totals.datagrams_lost)]
    }),
    ("queries", "DNS queries", |totals| {
        let (allowed, denied) = (totals.queries_allowed, totals.queries_refused);
        vec![(Some("allow"), allowed), (Some("deny"), denied)]
    }),
    ("answers_refused", "DNS answers with a private address for a public name", |totals| {
        vec![(None, totals.answers_refused)]
    }),
    ("questions", "Questions about destinations that no rule covers", |totals| {
        vec![(None, totals.questions)]
    }),
    ("answers_ignored", "Answers that were late, repeated or to no question", |totals| {
        vec![(None, totals.answers_ignored)]
    }),
    ("proxy_failures", "Connections that the upstream proxy did not carry", |totals| {
        vec![(None, totals.proxy_failures)]
    }),
    ("drop_not_proxied", "Packets dropped because an upstream proxy carries TCP alone", |totals| {
        vec![(None, totals.drop_not_proxied)]
    }),
];

fn labels_of<'a>(guest: &'a str, pid: &'a str) -> Labels<'a> {
    Labels::default().and("guest", guest).and("pid", pid)
}

impl Collector for Source {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, values) in COUNTED {
            family(&mut encoder, About { name, help }, MetricType::Counter, |metric| {
                for (guest, pid, totals) in &self.0 {
                    let labels = labels_of(guest, pid);
                    for (verdict, value) in values(totals) {
                        let labels =
                            verdict.map_or(labels.clone(), |text| labels.and("verdict", text));
                        counter(metric, &labels, value)?;
                    }
                }
                Ok(())
            })?;
        }
        let about = About::new("pins", "Addresses that are pinned to an allowed name now");
        family(&mut encoder, about, MetricType::Gauge, |metric| {
            let mut guests = self.0.iter();
            guests.try_for_each(|(guest, pid, totals)| {
                gauge(metric, &labels_of(guest, pid), totals.pins)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::{Description, LentPages};
    use ringfence_sandbox::cgroup::{Limits, Usage};

    fn row(name: &str, pid: i32, egress: Option<EgressTotals>) -> Row {
        let guest = Description {
            name: name.to_owned(),
            switch: None,
            command: Vec::new(),
            addresses: Vec::new(),
            uplink: Vec::new(),
            ports: Vec::new(),
            disks: Vec::new(),
            pages: LentPages::Small,
            filter: "default".to_owned(),
            policy: None,
            since: 0,
            cgroup: None,
            limits: Limits::default(),
            usage: Usage::default(),
        };
        Row { pid, memory: None, egress, guest }
    }

    #[test]
    fn text_has_each_verdict_of_each_guest_with_a_policy() {
        let totals = EgressTotals {
            connections_allowed: 1,
            connections_denied: 2,
            hellos_denied: 3,
            datagrams_lost: 4,
            queries_allowed: 5,
            queries_refused: 6,
            answers_refused: 7,
            pins: 8,
            questions: 9,
            answers_ignored: 10,
            limits_reached: 11,
            proxy_failures: 12,
            drop_not_proxied: 13,
        };
        let hostile = "x\"} 1\nforged 2";
        let rows =
            [row("web", 7, Some(totals)), row("plain", 8, None), row(hostile, 9, Some(totals))];
        let text = render(&rows);
        let samples = ringfence_driver::xen::metrics::testing::read(&text).unwrap();
        // Thirteen values of each of the two guests.
        assert_eq!(samples.len(), 26, "{text}");
        for (name, verdict, value) in [
            ("connections_total", "allow", 1.0),
            ("connections_total", "deny", 2.0),
            ("queries_total", "allow", 5.0),
            ("queries_total", "deny", 6.0),
        ] {
            let series = format!(
                "ringfence_guest_egress_{name}{{guest=\"web\",pid=\"7\",verdict=\"{verdict}\"}}"
            );
            assert_eq!(samples.get(&series), Some(&value), "{series}: {text}");
        }
        for (name, value) in [
            ("hellos_denied_total", 3.0),
            ("datagrams_lost_total", 4.0),
            ("answers_refused_total", 7.0),
            ("pins", 8.0),
            ("questions_total", 9.0),
            ("answers_ignored_total", 10.0),
            ("limits_reached_total", 11.0),
            ("proxy_failures_total", 12.0),
            ("drop_not_proxied_total", 13.0),
        ] {
            let series = format!("ringfence_guest_egress_{name}{{guest=\"web\",pid=\"7\"}}");
            assert_eq!(samples.get(&series), Some(&value), "{series}: {text}");
        }
        assert!(!text.contains("plain"));
    }
}

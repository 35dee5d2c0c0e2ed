//! `ringfence status --socket PATH --metrics`: state of a session in the OpenMetrics text format.
//!
//! As with `ringfence ps --metrics`, Prometheus reads the text from a file that a timer writes.

use core::fmt;
use std::path::Path;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use ringfence_driver::xen::metrics::encode::{About, Labels, counter, each, family, gauge};
use ringfence_pasta::session_status::SessionStatus;

use crate::commands::metrics::register_egress;

/// Renders the metrics of the session with this status socket.
pub(super) fn render(socket: &Path, status: SessionStatus) -> String {
    let mut registry = Registry::with_prefix("ringfence");
    if let Some(egress) = status.egress {
        register_egress(
            &mut registry,
            vec![(status.guest.clone(), status.pid.to_string(), egress)],
        );
    }
    let socket = socket.to_string_lossy().into_owned();
    let session = registry.sub_registry_with_prefix("session");
    session.register_collector(Box::new(Source { socket, status }));
    let mut text = String::new();
    // Writing to a `String` never fails, and the collector fails only if a write does.
    let _ = prometheus_client::encoding::text::encode(&mut text, &registry);
    text
}

/// Path of the status socket, and the state.
#[derive(Debug)]
struct Source {
    socket: String,
    status: SessionStatus,
}

impl Collector for Source {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let SessionStatus { program, uptime_seconds, machine, current, traffic, .. } = &self.status;
        let labels = Labels::default().and("socket", &self.socket).and("program", program);
        let about = About::new("uptime_seconds", "Time since the start");
        family(&mut encoder, about, MetricType::Gauge, |m| gauge(m, &labels, *uptime_seconds))?;
        let about = About::new(
            "memory_bytes",
            "Memory of a virtual machine: a pool that it has lent, all of it, or what a backend does not get",
        );
        family(&mut encoder, about, MetricType::Gauge, |m| {
            if let Some(memory) = machine.memory {
                let kind = if memory.is_pool { "lent" } else { "all" };
                gauge(m, &labels.and("kind", kind), memory.bytes)?;
            }
            gauge(m, &labels.and("kind", "withheld"), machine.withheld_bytes)
        })?;
        let about = About::new("clients_refused", "Clients that broke a rule");
        family(&mut encoder, about, MetricType::Counter, |m| {
            counter(m, &labels, machine.clients_refused)
        })?;
        let about = About::new("current", "1 if the process that carries the traffic has answered");
        family(&mut encoder, about, MetricType::Gauge, |m| gauge(m, &labels, u64::from(*current)))?;
        let about = About::new("traffic", "Counters of the process that carries the traffic");
        family(&mut encoder, about, MetricType::Counter, |m| each(m, &labels, "counter", traffic))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ringfence_uplink_process::totals::EgressTotals;
    use ringfence_vhost_user::{MachineMemory, MachineState};

    use super::*;

    fn status(egress: Option<EgressTotals>) -> SessionStatus {
        let hostile = "x\"} 1\nforged 2";
        SessionStatus {
            version: "1".to_owned(),
            program: "shield".to_owned(),
            guest: "vm".to_owned(),
            pid: 7,
            uptime_seconds: 9,
            link: "vhost-user".to_owned(),
            machine: MachineState {
                memory: Some(MachineMemory { bytes: 64, is_pool: true }),
                withheld_bytes: 4096,
                clients_refused: 2,
            },
            current: true,
            traffic: BTreeMap::from([("requests".to_owned(), 3), (hostile.to_owned(), 4)]),
            queues: Vec::new(),
            egress,
        }
    }

    #[test]
    fn text_has_state_and_counters_of_a_session_and_its_egress() {
        for egress in [None, Some(EgressTotals { queries_allowed: 5, ..EgressTotals::default() })] {
            let text = render(Path::new("/run/a\\b"), status(egress));
            let samples = ringfence_driver::xen::metrics::testing::read(&text).unwrap();
            let labels = "socket=\"/run/a\\\\b\",program=\"shield\"";
            let mut expected = vec![
                (format!("session_uptime_seconds{{{labels}}}"), 9.0),
                (format!("session_memory_bytes{{{labels},kind=\"lent\"}}"), 64.0),
                (format!("session_memory_bytes{{{labels},kind=\"withheld\"}}"), 4096.0),
                (format!("session_clients_refused_total{{{labels}}}"), 2.0),
                (format!("session_current{{{labels}}}"), 1.0),
                (format!("session_traffic_total{{{labels},counter=\"requests\"}}"), 3.0),
            ];
            if egress.is_some() {
                let labels = "guest=\"vm\",pid=\"7\",verdict=\"allow\"";
                expected.push((format!("guest_egress_queries_total{{{labels}}}"), 5.0));
            }
            for (name, value) in expected {
                let found = samples.get(&format!("ringfence_{name}"));
                assert_eq!(found, Some(&value), "{name}: {text}");
            }
            assert_eq!(text.contains("guest_egress"), egress.is_some(), "{text}");
        }
    }
}

//! `ringfence status GUEST`: state and counters of one guest.

use std::fmt;
use std::io::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::bail;
use ringfence_sandbox::channel::Channel;
use serde::Serialize;

use super::ps::{self, Row};
use super::{CounterTable, Counters, Reply, Request, find};
use ringfence_base::json::escape_controls;
use ringfence_block::blkback::engine_names;
use ringfence_driver::switchboard::{FrontendLevels, WindowLevels};
use ringfence_hostnet::out::Out;
use ringfence_hostnet::text::{byte_count, listed};
use ringfence_uplink_process::INTERFACE;
use ringfence_uplink_process::totals::QueueSentence;

/// Time limit for the answer of the guest's driver domain.
const ANSWER: Duration = Duration::from_secs(5);

/// Status as it is printed. Field names are part of the command's interface.
#[derive(Serialize)]
struct Status {
    #[serde(flatten)]
    row: Row,
    counters: Counters,
    /// Pages of 4 KiB that the driver domain can use now under ordinary grants.
    lent_pages: u64,
    /// Grant windows of the network interface, if it has any.
    windows: Option<WindowLevels>,
    /// Counters of each queue of the interface to the host's network that are not zero. Empty if it has one queue.
    uplink_queues: Vec<CounterTable>,
    /// Age of the guest in seconds, for the table.
    #[serde(skip)]
    age: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Table,
    TableWithCounters,
    Json,
}

/// Prints the status of the guest.
///
/// # Errors
///
/// Fails if no such guest runs, or if its driver domain does not answer.
pub(crate) fn print(guest: &str, form: Form) -> anyhow::Result<()> {
    let found = find::one(guest)?;
    found.channel.send(&Request::Counters, &[])?;
    let counters = match found.channel.receive_within(ANSWER)? {
        (Reply::Counters(counters), _) => *counters,
        (Reply::Failed { why, .. }, _) => bail!("{why}"),
        _ => bail!("{guest} is of another version of Ringfence"),
    };
    let FrontendLevels { lent_pages, windows } = levels(&found.channel).unwrap_or_default();
    let uplink_queues =
        ps::uplink_totals(&found.channel).map_or(Vec::new(), |totals| totals.queues);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let age = now.saturating_sub(found.guest.since);
    let row = ps::rows(vec![found], true).remove(0);
    let status = Status { row, counters, lent_pages, windows, uplink_queues, age };
    let text = match form {
        Form::Json => {
            format!("{}\n", escape_controls(serde_json::to_string_pretty(&status)?))
        }
        Form::Table => Table { status: &status, counters: false }.to_string(),
        Form::TableWithCounters => Table { status: &status, counters: true }.to_string(),
    };
    Ok(Out.write_all(text.as_bytes())?)
}

/// Requests the levels of the memory that the guest lends.
fn levels(launcher: &Channel) -> anyhow::Result<FrontendLevels> {
    launcher.send(&Request::Levels, &[])?;
    match launcher.receive_within(ANSWER)? {
        (Reply::Levels(levels), _) => Ok(levels),
        _ => bail!("the launcher is of another version of Ringfence"),
    }
}

/// Returns the levels of the grant windows of the guest of that name, or whose launcher has that process number; `None` if
/// its network interface has none.
///
/// # Errors
///
/// Fails if no such guest runs, or if its frontend does not answer.
pub fn windows_of(guest: &str) -> anyhow::Result<Option<WindowLevels>> {
    Ok(levels(&find::one(guest)?.channel)?.windows)
}

/// Status formatted as a table.
struct Table<'a> {
    status: &'a Status,
    counters: bool,
}

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Status { row, lent_pages, windows, age, .. } = self.status;
        let Row { pid, memory, guest, egress } = row;
        let listed_or_none = |list: &[String]| match list {
            [] => "none".to_owned(),
            _ => list.join(", "),
        };
        line(f, "guest", &guest.name)?;
        line(f, "command", &guest.command.join(" "))?;
        line(f, "process", &format!("{pid}, since {}", ps::age(*age)))?;
        if let Some(memory) = memory {
            line(f, "memory", &byte_count(*memory))?;
        }
        match &guest.switch {
            Some(switch) => {
                line(f, "switch", &format!("{switch}: {}", listed_or_none(&guest.addresses)))?;
            }
            None => line(f, "switch", "none")?,
        }
        line(f, "host's network", &listed_or_none(&guest.uplink))?;
        if let Some(egress) = egress {
            line(f, "egress", &egress.to_string())?;
        }
        line(f, "ports", &listed_or_none(&guest.ports))?;
        line(f, "disks", &listed_or_none(&guest.disks))?;
        line(f, "system calls", &guest.filter)?;
        if let Some(policy) = &guest.policy {
            line(f, "policy", policy)?;
        }
        let lent = byte_count(lent_pages.saturating_mul(4096));
        line(f, "lent memory", &format!("{lent} in {}", guest.pages))?;
        line(f, "limits", &guest.limits.to_string())?;
        if let Some(cgroup) = &guest.cgroup {
            let memory = guest.usage.memory.map(|bytes| format!("{} of memory", byte_count(bytes)));
            let pids = guest.usage.pids.map(|pids| format!("{pids} processes"));
            let used: Vec<String> = [memory, pids].into_iter().flatten().collect();
            let counts =
                if used.is_empty() { String::new() } else { format!(": {}", used.join(", ")) };
            line(f, "cgroup", &format!("{cgroup}{counts}"))?;
        }
        if let Some(windows) = windows {
            let share = windows.reused_share();
            let reused = share.map_or_else(String::new, |share| {
                format!(", {:.3} % of their uses without a grant operation", share * 100.0)
            });
            let (pages, used) = (windows.pages, windows.pages_in_use);
            line(f, "grant windows", &format!("{pages} pages, {used} in use{reused}"))?;
        }
        self.write_counters(f)
    }
}

impl Table<'_> {
    /// Writes the lines of devices and queues.
    fn write_counters(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Status { counters, uplink_queues, .. } = self.status;
        for (name, counts) in &counters.ports {
            // Directions are the guest's: the switch receives what the guest sends.
            let [sent, received] = byte_counts(counts, ["rx_bytes", "tx_bytes"]);
            line(f, name, &format!("{sent} sent to the switch, {received} received"))?;
        }
        for (number, counts) in uplink_queues.iter().enumerate() {
            line(f, &format!("{INTERFACE}.{number}"), &QueueSentence(counts).to_string())?;
        }
        for (name, counts) in &counters.disks {
            line(f, name, &disk_text(counts, counters.levels.get(name)))?;
        }
        for (name, counts) in &counters.rules {
            line(f, name, &format!("rules broken: {}", listed(counts)))?;
        }
        if self.counters {
            for (number, counts) in uplink_queues.iter().enumerate() {
                line(f, &format!("{INTERFACE}.{number}"), &listed(counts))?;
            }
            for (name, counts) in counters.ports.iter().chain(&counters.disks) {
                line(f, name, &listed(counts))?;
            }
        }
        Ok(())
    }
}

/// Writes a line with its heading.
fn line(f: &mut fmt::Formatter<'_>, head: &str, text: &str) -> fmt::Result {
    writeln!(f, "{:<16}{}", format!("{head}:"), ringfence_hostnet::text::printable(text))
}

/// Returns the traffic of a disk, and the engine that serves it.
fn disk_text(counts: &CounterTable, levels: Option<&CounterTable>) -> String {
    let [read, written] = byte_counts(counts, ["read_bytes", "written_bytes"]);
    let levels = levels.into_iter().flatten().map(|(name, level)| (name, *level));
    let engine = engine_names(levels).map_or(String::new(), |name| format!(", by {name}"));
    format!("{read} read, {written} written{engine}")
}

fn byte_counts(counts: &CounterTable, names: [&str; 2]) -> [String; 2] {
    names.map(|name| byte_count(counts.get(name).copied().unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::{Description, LentPages};
    use ringfence_sandbox::cgroup::{Limits, Usage};
    use ringfence_uplink_process::totals::EgressTotals;

    fn counts(pairs: &[(&str, u64)]) -> CounterTable {
        pairs.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    }

    #[test]
    fn table_has_traffic_and_broken_rules_and_all_counters_on_request() {
        let guest = Description {
            name: "web".to_owned(),
            switch: Some("blue".to_owned()),
            command: vec!["sh".to_owned(), "x\u{1b}[2J".to_owned()],
            addresses: vec!["10.0.0.2/16".to_owned()],
            uplink: vec![],
            ports: vec![],
            disks: vec!["d.img".to_owned()],
            pages: LentPages::Huge,
            filter: "default, families vsock".to_owned(),
            policy: Some("3 rules (p.toml)".to_owned()),
            since: 0,
            cgroup: None,
            limits: Limits::default(),
            usage: Usage::default(),
        };
        let mut counters = Counters::default();
        let port = counts(&[("rx_bytes", 20 << 10), ("tx_bytes", 7), ("rx_frames", 3)]);
        counters.ports.insert("vif2.0".to_owned(), port);
        let disk = counts(&[("read_bytes", 512)]);
        counters.disks.insert("vbd2.0".to_owned(), disk);
        counters.rules.insert("vif2.0".to_owned(), counts(&[("tx_producer_overflow", 1)]));
        let row = Row {
            pid: 7,
            memory: Some(3 << 20),
            egress: Some(EgressTotals { pins: 9, ..EgressTotals::default() }),
            guest,
        };
        let windows = Some(WindowLevels {
            reused: 999,
            issued: 1,
            evicted: 0,
            pages: 512,
            pages_in_use: 256,
        });
        let queue = counts(&[("tcp_bytes_in", 3 << 10), ("handed_over", 2), ("frames_in", 4)]);
        let uplink_queues = vec![CounterTable::new(), queue];
        let status = Status { row, counters, lent_pages: 512, windows, uplink_queues, age: 7200 };
        let text = Table { status: &status, counters: false }.to_string();
        for line in [
            "guest:          web\n",
            "command:        sh x\u{fffd}[2J\n",
            "process:        7, since 2 h\n",
            "switch:         blue: 10.0.0.2/16\n",
            "host's network: none\n",
            "egress:         0 connections allowed, 0 denied",
            "system calls:   default, families vsock\n",
            "policy:         3 rules (p.toml)\n",
            "lent memory:    2048 KiB in huge pages of 2 MiB\n",
            "limits:         none\n",
            "grant windows:  512 pages, 256 in use, 99.900 % of their uses without a grant operation\n",
            "vif2.0:         20 KiB sent to the switch, 7 B received\n",
            "up0.1:          3072 B sent by the guest, 0 B received, 2 handed over\n",
            "vbd2.0:         512 B read, 0 B written\n",
            "vif2.0:         rules broken: tx_producer_overflow 1\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
        assert!(!text.contains("rx_frames"));
        let text = Table { status: &status, counters: true }.to_string();
        assert!(text.contains("rx_bytes 20480, rx_frames 3, tx_bytes 7\n"), "{text}");
        let json = serde_json::to_value(&status).unwrap();
        assert_eq!((&json["name"], &json["pages"]), (&"web".into(), &"huge".into()));
        assert_eq!(json["windows"]["reused"], 999);
        assert_eq!(json["counters"]["ports"]["vif2.0"]["rx_frames"], 3);
    }
}

//! `ringfence ps`: table of the guests of this user.

use std::collections::HashMap;
use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use ringfence_sandbox::STATUS_FAILED;
use ringfence_sandbox::channel::Channel;
use serde::Serialize;

use super::find::{self, Found, Listing};
use super::{Description, Reply, Request, metrics};
use ringfence_base::json::escape_controls;
use ringfence_hostnet::causes::causes;
use ringfence_hostnet::out::{Out, is_closed};
use ringfence_hostnet::text::printable;
use ringfence_uplink_process::totals::{EgressTotals, UplinkTotals};

/// Exit status if a guest did not answer.
const STATUS_INCOMPLETE: u8 = 1;
/// Most characters of a command in the table.
const COMMAND_MAX: usize = 60;
/// Time limit for the answer of an uplink, which is not trusted.
const TOTALS_WITHIN: Duration = Duration::from_millis(500);

const EXAMPLES: &str = "\
Examples:
  All guests, one a line:
    ringfence ps

  The addresses of the guest `web`:
    ringfence ps --json | jq -r '.[] | select(.name == \"web\") | .addresses[]'

  For the textfile collector of node_exporter:
    ringfence ps --metrics > /var/lib/node_exporter/ringfence.prom";

/// List your guests
///
/// A guest is listed while its command runs. A guest whose launcher does not answer is named on standard error, and the exit
/// status is 1 then. SWITCH is `private-…` for a guest that has its switch for itself. MEMORY is
/// what its processes, Ringfence's included, have for themselves; the driver domain of a shared switch counts for the
/// guest that started it. The limit of `run --memory` follows it. POLICY is the number of rules of its egress policy;
/// `--json` names the files.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct PsArgs {
    /// Print a JSON array with everything that is known of each guest
    #[arg(long)]
    pub json: bool,

    /// Print the egress verdicts of guests with a policy for Prometheus, in the OpenMetrics text format
    #[arg(long, conflicts_with = "json")]
    pub metrics: bool,
}

/// Guest as it is printed. Field names are part of the command's interface.
#[derive(Serialize)]
pub(super) struct Row {
    /// Process number of its launcher.
    pub(super) pid: i32,
    /// Memory of its processes in bytes.
    pub(super) memory: Option<u64>,
    /// Totals of the egress policy, if there is one. The table does without.
    pub(super) egress: Option<EgressTotals>,
    #[serde(flatten)]
    pub(super) guest: Description,
}

/// Prints the guests. Returns the exit status.
pub fn main(args: &PsArgs) -> u8 {
    match print(args) {
        Ok(true) => 0,
        Ok(false) => STATUS_INCOMPLETE,
        Err(error) if is_closed(&error) => 0,
        Err(error) => {
            eprintln!("ringfence: ps: {}", causes(&error));
            STATUS_FAILED
        }
    }
}

/// Prints the guests. Returns `false` if some did not answer.
fn print(args: &PsArgs) -> anyhow::Result<bool> {
    let Listing { found, silent } = find::all()?;
    let rows = rows(found, args.json || args.metrics);
    let text = if args.metrics {
        metrics::render(&rows)
    } else if args.json {
        format!("{}\n", escape_controls(serde_json::to_string_pretty(&rows)?))
    } else {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        table(&rows, now)
    };
    Out.write_all(text.as_bytes())?;
    silent.iter().for_each(|silent| eprintln!("ringfence: ps: {silent}"));
    Ok(silent.is_empty())
}

/// Adds the memory of the guests' processes and, if asked for, the totals of their egress policies.
pub(super) fn rows(guests: Vec<Found>, with_egress: bool) -> Vec<Row> {
    let memory = memory_by_process();
    let row = |found: Found| Row {
        pid: found.pid,
        memory: own_memory(found.pid, &memory),
        egress: if with_egress { egress_totals(&found.channel) } else { None },
        guest: found.guest,
    };
    guests.into_iter().map(row).collect()
}

/// Asks a launcher for the totals of the guest's egress policy. Returns `None` if there is no policy, or no answer.
fn egress_totals(launcher: &Channel) -> Option<EgressTotals> {
    uplink_totals(launcher)?.egress
}

/// Requests the totals of a guest's uplink. Returns `None` if it has none, or if its launcher does not answer.
pub(super) fn uplink_totals(launcher: &Channel) -> Option<Box<UplinkTotals>> {
    launcher.send(&Request::UplinkTotals, &[]).ok()?;
    match launcher.receive_within(TOTALS_WITHIN).ok()? {
        (Reply::UplinkTotals(totals), _) => totals,
        _ => None,
    }
}

fn table(rows: &[Row], now: Duration) -> String {
    let head =
        ["NAME", "SWITCH", "PID", "SINCE", "MEMORY", "ADDRESS", "PORTS", "POLICY", "COMMAND"];
    let mut lines = vec![head.map(str::to_owned)];
    for Row { pid, memory, guest, .. } in rows {
        let command = guest.command.join(" ");
        let short: String = command.chars().take(COMMAND_MAX).collect();
        let address = guest.addresses.first().or(guest.uplink.first());
        let none = || "-".to_owned();
        lines.push(
            [
                guest.name.clone(),
                guest.switch.clone().unwrap_or_else(none),
                pid.to_string(),
                age(now.as_secs().saturating_sub(guest.since)),
                memory_cell(*memory, guest.limits.memory),
                address.cloned().unwrap_or_else(none),
                if guest.ports.is_empty() { none() } else { guest.ports.join(",") },
                guest.policy.as_ref().map_or_else(none, |policy| rules_of(policy)),
                short,
            ]
            .map(|cell| printable(&cell)),
        );
    }
    let mut widths = [0; 9];
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let format_line = |line: &[String; 9]| {
        let cells: Vec<String> =
            line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    lines.iter().map(format_line).collect()
}

/// Returns the part of a policy's description that fits in a column: the number of its rules.
fn rules_of(policy: &str) -> String {
    policy.split(" (").next().unwrap_or_default().to_owned()
}

/// Formats the memory of a guest, with its limit if there is one, in MiB.
fn memory_cell(used: Option<u64>, limit: Option<u64>) -> String {
    let mebibytes = |bytes: u64| bytes.div_ceil(1 << 20).to_string();
    let used = used.map_or_else(|| "-".to_owned(), mebibytes);
    match limit {
        Some(limit) => format!("{used}/{} MiB", mebibytes(limit)),
        None if used == "-" => used,
        None => format!("{used} MiB"),
    }
}

/// Formats a duration in seconds by its largest unit.
pub(super) fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86400 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86400),
    }
}

/// Parent and own memory in bytes of each process.
type Processes = HashMap<i32, (i32, u64)>;

/// Reads parent and own memory of all processes that /proc shows.
fn memory_by_process() -> Processes {
    let Ok(entries) = std::fs::read_dir("/proc") else { return HashMap::new() };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    pids.filter_map(|pid| Some((pid, process(pid)?))).collect()
}

fn process(pid: i32) -> Option<(i32, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain spaces and parentheses.
    let parent = stat.rsplit_once(") ")?.1.split_ascii_whitespace().nth(1)?.parse().ok()?;
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let mut pages = statm.split_ascii_whitespace().skip(1).map(str::parse::<u64>);
    let (resident, shared) = (pages.next()?.ok()?, pages.next()?.ok()?);
    let page = rustix::param::page_size() as u64;
    Some((parent, resident.saturating_sub(shared) * page))
}

/// Returns the memory of a process and of its descendants. The driver domain is a descendant of the launcher that
/// started it, while that runs.
fn own_memory(root: i32, processes: &Processes) -> Option<u64> {
    processes.get(&root)?;
    let belongs = |pid: i32| {
        let mut at = pid;
        // Longer chains are a loop of reused numbers.
        for _ in 0..64 {
            if at == root {
                return true;
            }
            let Some((parent, _)) = processes.get(&at) else { return false };
            at = *parent;
        }
        false
    };
    Some(processes.iter().filter(|(pid, _)| belongs(**pid)).map(|(_, (_, bytes))| bytes).sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::LentPages;
    use ringfence_sandbox::cgroup::{Limits, Usage};

    fn row() -> Row {
        let guest = Description {
            name: "web".to_owned(),
            switch: None,
            command: vec!["python3".to_owned(), "-m".to_owned(), "x\u{1b}[2J".to_owned()],
            addresses: vec![],
            uplink: vec!["10.0.2.15/24".to_owned()],
            ports: vec!["8080:80".to_owned()],
            disks: vec![],
            pages: LentPages::Small,
            filter: "default".to_owned(),
            policy: Some("3 rules (--allow, agent.toml)".to_owned()),
            since: 100,
            cgroup: None,
            limits: Limits::default(),
            usage: Usage::default(),
        };
        let egress = Some(EgressTotals { pins: 9, ..EgressTotals::default() });
        Row { pid: 7, memory: Some(3 << 20), egress, guest }
    }

    #[test]
    fn table_has_one_aligned_line_for_each_guest() {
        let text = table(&[row()], Duration::from_secs(100 + 7200));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0].find("COMMAND"), lines[1].find("python3"));
        let parts = [
            "web",
            "-",
            "7",
            "2 h",
            "3 MiB",
            "10.0.2.15/24",
            "8080:80",
            "3 rules  ",
            "x\u{fffd}[2J",
        ];
        for part in parts {
            assert!(lines[1].contains(part), "{part}: {}", lines[1]);
        }
    }

    #[test]
    fn memory_is_shown_with_its_limit() {
        assert_eq!(memory_cell(Some(3 << 20), None), "3 MiB");
        assert_eq!(memory_cell(Some(3 << 20), Some(512 << 20)), "3/512 MiB");
        assert_eq!(memory_cell(None, Some(512 << 20)), "-/512 MiB");
        assert_eq!(memory_cell(None, None), "-");
    }

    #[test]
    fn json_has_process_number_and_description_in_one_object() {
        let json = serde_json::to_value(row()).unwrap();
        assert_eq!((json["pid"].as_i64(), json["name"].as_str()), (Some(7), Some("web")));
        assert_eq!(json["ports"][0], "8080:80");
        assert_eq!(json["egress"]["pins"], 9);
    }

    #[test]
    fn memory_is_that_of_process_and_descendants() {
        let processes =
            HashMap::from([(1, (0, 1)), (10, (1, 2)), (11, (10, 4)), (12, (11, 8)), (20, (1, 16))]);
        assert_eq!(own_memory(10, &processes), Some(14));
        assert_eq!(own_memory(99, &processes), None);
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(own_memory(own, &memory_by_process()).unwrap() > 0);
    }
}

//! `ringfence status`: prints the state of a running daemon, or of a guest of `ringfence run`, as a table or as JSON.

mod metrics;

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use ringfence_sandbox::STATUS_FAILED;

use crate::commands::status::{self, Form};
use ringfence_base::json::escape_controls;
use ringfence_driver::xen::config::{Config, PATH_DEFAULT};
use ringfence_driver::xen::status::{Attachment, QueueStatus, Snapshot, VbdStatus, VifStatus, ask};
use ringfence_hostnet::causes::causes;
use ringfence_hostnet::out::{Out, is_closed};
use ringfence_hostnet::text::{byte_count, listed, printable_lines};
use ringfence_pasta::session_status;

const EXAMPLES: &str = "\
Examples:
  The interfaces and disks of guests, one a line:
    ringfence status

  With every counter that is not zero:
    ringfence status --counters

  The addresses of those that are connected:
    ringfence status --json | jq -r '.vifs[] | select(.connected) | .mac'

  A guest of `ringfence run`:
    ringfence status web

  A virtual machine of `ringfence passt --status-socket /run/vm.status`:
    ringfence status --socket /run/vm.status

  The same for the textfile collector of node_exporter:
    ringfence status --socket /run/vm.status --metrics > /var/lib/node_exporter/vm.prom";

/// Show what `ringfence serve` serves, or the state of a guest of `ringfence run`
///
/// Directions are the guest's: what it sent, and what it received. `ringfence ps` lists the guests of `ringfence run`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct StatusArgs {
    /// Name of a guest of `ringfence run`, or PID of its launcher [default: the guests of `ringfence serve`]
    #[arg(value_name = "GUEST", conflicts_with = "socket")]
    pub guest: Option<String>,

    /// Print the complete status as JSON
    #[arg(long)]
    pub json: bool,

    /// Print the counters too
    #[arg(long, conflicts_with = "json")]
    pub counters: bool,

    /// Print the state of the session at `--socket` for Prometheus, in the OpenMetrics text format
    #[arg(long, requires = "socket", conflicts_with_all = ["json", "counters"])]
    pub metrics: bool,

    /// The daemon's socket, or that of `--status-socket` of `pasta`, `passt`, `vhost-user blk`, `pool-proxy` and `shield` [default: as the daemon's configuration says]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// Asks the daemon and prints its status. Returns the exit status.
pub fn main(args: &StatusArgs) -> u8 {
    match print(args) {
        Ok(()) => 0,
        Err(error) if is_closed(&error) => 0,
        Err(error) => {
            eprintln!("ringfence: status: {}", causes(&error));
            STATUS_FAILED
        }
    }
}

fn print(args: &StatusArgs) -> anyhow::Result<()> {
    if let Some(guest) = &args.guest {
        let form = match (args.json, args.counters) {
            (true, _) => Form::Json,
            (false, true) => Form::TableWithCounters,
            (false, false) => Form::Table,
        };
        return status::print(guest, form);
    }
    let socket = match &args.socket {
        Some(socket) => match print_session(socket, args)? {
            true => return Ok(()),
            false if args.metrics => anyhow::bail!(
                "{}: no session has this status socket. (`ringfence serve` exports metrics by `listen` in [metrics] of its \
                 configuration.)",
                socket.display()
            ),
            false => socket.clone(),
        },
        None => Config::load(Path::new(PATH_DEFAULT), true)?.serve.status_socket,
    };
    let snapshot = ask(&socket).map_err(|error| {
        anyhow::anyhow!(
            "{}: {error}. Does `ringfence serve` run (`systemctl status ringfence-serve`), and are you root? \
             (A guest of `ringfence run` is named: `ringfence status GUEST`; `ringfence ps` lists them.)",
            socket.display()
        )
    })?;
    let text = if args.json {
        let mut text = escape_controls(serde_json::to_string_pretty(&snapshot)?);
        text.push('\n');
        text
    } else {
        DaemonTable { snapshot: &snapshot, counters: args.counters }.to_string()
    };
    Ok(Out.write_all(text.as_bytes())?)
}

/// Prints the state of a session with this status socket. Returns `false` if the socket is another program's.
fn print_session(socket: &Path, args: &StatusArgs) -> anyhow::Result<bool> {
    let status = session_status::ask(socket).with_context(|| socket.display().to_string())?;
    let Some(status) = status else { return Ok(false) };
    let text = if args.metrics {
        metrics::render(socket, status)
    } else if args.json {
        format!("{}\n", escape_controls(serde_json::to_string_pretty(&status)?))
    } else {
        printable_lines(&status.to_string())
    };
    Out.write_all(text.as_bytes())?;
    Ok(true)
}

/// Status formatted as a table.
struct DaemonTable<'a> {
    snapshot: &'a Snapshot,
    counters: bool,
}

const HEADS: [&str; 8] =
    ["INTERFACE", "DOMAIN", "STATE", "ATTACHED", "MODE", "QUEUES", "SENT", "RECEIVED"];
const DISK_HEADS: [&str; 9] =
    ["DISK", "DOMAIN", "STATE", "STORAGE", "MODE", "ENGINE", "QUEUES", "READ", "WRITTEN"];

impl fmt::Display for DaemonTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let daemon = &self.snapshot.daemon;
        writeln!(
            f,
            "ringfence {} in domain {}, process {}, up {} s; {} taken over",
            daemon.version, daemon.domain, daemon.pid, daemon.uptime_seconds, daemon.adopted
        )?;
        if let Some(host) = &daemon.host_interface {
            let known = daemon.switch_addresses.unwrap_or(0);
            writeln!(f, "host's leg on the switch: {} ({known} addresses known)", host.name)?;
        }
        let (vifs, disks) = (&self.snapshot.vifs, &self.snapshot.disks);
        if vifs.is_empty() {
            writeln!(f, "no interfaces of guests")?;
        } else {
            table(f, HEADS, vifs.iter().map(row))?;
        }
        if !disks.is_empty() {
            table(f, DISK_HEADS, disks.iter().map(disk_row))?;
        }
        vifs.iter().try_for_each(|vif| self.remarks(f, vif))?;
        disks.iter().try_for_each(|disk| self.remarks_on_disk(f, disk))
    }
}

/// Writes rows under a head, in aligned columns.
fn table<const N: usize>(
    f: &mut fmt::Formatter<'_>,
    heads: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
) -> fmt::Result {
    let mut lines = vec![heads.map(str::to_owned)];
    lines.extend(rows);
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max();
    let widths: [usize; N] = core::array::from_fn(|column| width(column).unwrap_or(0));
    lines.iter().try_for_each(|cells| {
        let mut text = String::new();
        for (cell, width) in cells.iter().zip(widths) {
            write!(text, "{cell:width$}  ")?;
        }
        writeln!(f, "{}", text.trim_end())
    })
}

impl DaemonTable<'_> {
    /// Writes the problems, and on request the counters, of one interface.
    fn remarks(&self, f: &mut fmt::Formatter<'_>, vif: &VifStatus) -> fmt::Result {
        if let Some(problem) = &vif.problem {
            writeln!(f, "{}: {problem}", vif.name)?;
        }
        if vif.is_stalled() {
            let dropped = vif.sum("drop_link_down");
            writeln!(f, "{}: stalled: the guest takes no frames; {dropped} dropped", vif.name)?;
        }
        if vif.queue_drops() > 0 {
            let (name, dropped) = (&vif.name, vif.queue_drops());
            writeln!(f, "{name}: {dropped} frames for it were dropped: the TAP's queue was full")?;
        }
        if !vif.rules.is_empty() {
            writeln!(f, "{}: rules broken: {}", vif.name, listed(&vif.rules))?;
        }
        if self.counters {
            for queue in &vif.queues {
                writeln!(f, "{}: {}", vif.name, listed(&queue.counters))?;
            }
            if vif.staged_pages > 0 {
                writeln!(f, "{}: {} pages staged", vif.name, vif.staged_pages)?;
            }
            if let Some(tap) = &vif.tap {
                writeln!(f, "{} interface: {}", vif.name, listed(tap))?;
            }
        }
        Ok(())
    }
}

impl DaemonTable<'_> {
    /// Writes the problems, and on request the counters, of one disk.
    fn remarks_on_disk(&self, f: &mut fmt::Formatter<'_>, disk: &VbdStatus) -> fmt::Result {
        if let Some(problem) = &disk.problem {
            writeln!(f, "{}: {problem}", disk.name)?;
        }
        if !disk.rules.is_empty() {
            writeln!(f, "{}: rules broken: {}", disk.name, listed(&disk.rules))?;
        }
        if self.counters {
            for (number, queue) in disk.queues.iter().enumerate() {
                writeln!(f, "{} queue {number}: {}", disk.name, listed(&queue.counters))?;
            }
        }
        Ok(())
    }
}

fn row(vif: &VifStatus) -> [String; HEADS.len()] {
    let attached = match &vif.attachment {
        Attachment::Switch => "switch".to_owned(),
        Attachment::Tap { bridge: Some(bridge), .. } => bridge.clone(),
        Attachment::Tap { interface, bridge: None } => interface.clone(),
    };
    [
        vif.name.clone(),
        domain(vif.domain, vif.domain_name.as_ref()),
        ConnectionState {
            connected: vif.connected,
            adopted: vif.adopted,
            backend: &vif.backend_state,
            frontend: &vif.frontend_state,
        }
        .to_string(),
        attached,
        vif.mode.clone(),
        vif.queue_count.to_string(),
        byte_count(vif.sum("rx_bytes")),
        byte_count(vif.sum("tx_bytes")),
    ]
}

fn disk_row(disk: &VbdStatus) -> [String; DISK_HEADS.len()] {
    let name = match &disk.vdev {
        Some(vdev) => format!("{} {vdev}", disk.name),
        None => disk.name.clone(),
    };
    let storage = disk.storage.as_deref().unwrap_or("-");
    // The guest grants other pages each time, so its pages are not kept mapped.
    let falls_back = disk.connected && disk.mode == "persistent" && !disk.persistent;
    [
        name,
        domain(disk.domain, disk.domain_name.as_ref()),
        ConnectionState {
            connected: disk.connected,
            adopted: disk.adopted,
            backend: &disk.backend_state,
            frontend: &disk.frontend_state,
        }
        .to_string(),
        if disk.read_only { format!("{storage} (ro)") } else { storage.to_owned() },
        if falls_back { "map".to_owned() } else { disk.mode.clone() },
        disk.engine.clone().unwrap_or_else(|| "-".to_owned()),
        disk.queues.len().to_string(),
        sum(&disk.queues, "read_bytes"),
        sum(&disk.queues, "written_bytes"),
    ]
}

/// Connection of a device, for a column.
struct ConnectionState<'a> {
    connected: bool,
    adopted: bool,
    /// State names of both ends.
    backend: &'a str,
    frontend: &'a str,
}

impl fmt::Display for ConnectionState<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.connected, self.adopted) {
            (true, true) => f.write_str("connected (taken over)"),
            (true, false) => f.write_str("connected"),
            (false, _) => write!(f, "{} / {}", self.backend, self.frontend),
        }
    }
}

fn domain(number: u16, name: Option<&String>) -> String {
    name.map_or_else(|| number.to_string(), |name| format!("{number} {name}"))
}

fn sum(queues: &[QueueStatus], name: &str) -> String {
    byte_count(queues.iter().filter_map(|queue| queue.counters.get(name)).sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_driver::xen::status::{Counts, DaemonStatus, QUEUE_FULL};

    #[test]
    fn table_has_line_for_each_device_and_lists_problems() {
        let counters = [("rx_bytes", 12_345), ("tx_bytes", 7), ("stalls", 2), ("stall_ends", 1)];
        let dropped = [("drop_link_down", 5)];
        let counters = counters.into_iter().chain(dropped);
        let counters: Counts = counters.map(|(name, count)| (name.to_owned(), count)).collect();
        let connected = VifStatus {
            name: "vif5.0".to_owned(),
            domain: 5,
            domain_name: Some("web".to_owned()),
            connected: true,
            attachment: Attachment::Tap {
                interface: "vif5.0".to_owned(),
                bridge: Some("xenbr0".to_owned()),
            },
            mode: "copy".to_owned(),
            queue_count: 1,
            queues: vec![QueueStatus { counters }],
            tap: Some(Counts::from([(QUEUE_FULL.to_owned(), 6)])),
            ..VifStatus::default()
        };
        let waiting = VifStatus {
            name: "vif16.0".to_owned(),
            domain: 16,
            backend_state: "InitWait".to_owned(),
            frontend_state: "Initialising".to_owned(),
            problem: Some("there is no bridge `br9`".to_owned()),
            rules: Counts::from([("tx_producer_overflow".to_owned(), 1)]),
            ..VifStatus::default()
        };
        let daemon = DaemonStatus { version: "1.2.3".to_owned(), ..DaemonStatus::default() };
        let counters = Counts::from([("read_bytes".to_owned(), 9), ("reads".to_owned(), 1)]);
        let disk = VbdStatus {
            name: "vbd5.51712".to_owned(),
            vdev: Some("xvda".to_owned()),
            domain: 5,
            connected: true,
            storage: Some("/dev/vg/a".to_owned()),
            read_only: true,
            mode: "persistent".to_owned(),
            engine: Some("io_uring".to_owned()),
            queues: vec![QueueStatus { counters }],
            problem: Some("it is slow".to_owned()),
            ..VbdStatus::default()
        };
        let snapshot = Snapshot { daemon, vifs: vec![connected, waiting], disks: vec![disk] };
        let table = |counters| DaemonTable { snapshot: &snapshot, counters }.to_string();
        let text = table(false);
        let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines[1], HEADS);
        assert_eq!(
            lines[2],
            ["vif5.0", "5", "web", "connected", "xenbr0", "copy", "1", "12", "KiB", "7", "B"]
        );
        assert_eq!(lines[3][..5], ["vif16.0", "16", "InitWait", "/", "Initialising"]);
        assert_eq!(lines[4], DISK_HEADS);
        assert_eq!(
            lines[5],
            [
                "vbd5.51712",
                "xvda",
                "5",
                "connected",
                "/dev/vg/a",
                "(ro)",
                "map",
                "io_uring",
                "1",
                "9",
                "B",
                "0",
                "B"
            ]
        );
        assert!(text.contains("vbd5.51712: it is slow\n"));
        assert!(table(true).contains("vbd5.51712 queue 0: read_bytes 9, reads 1\n"));
        assert!(text.contains("vif16.0: there is no bridge `br9`\n"));
        assert!(text.contains("vif16.0: rules broken: tx_producer_overflow 1\n"));
        assert!(!text.contains("rx_bytes"));
        assert!(table(true).contains("vif5.0: drop_link_down 5, rx_bytes 12345, "));
        assert!(text.contains("vif5.0: stalled: the guest takes no frames; 5 dropped\n"));
        assert!(text.contains("vif5.0: 6 frames for it were dropped: the TAP's queue was full\n"));
    }
}

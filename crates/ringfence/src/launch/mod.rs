//! `ringfence run`: the launcher, the process in the user's terminal that starts the others and
//! waits.
//!
//! 1. Begin to start the guest's domain, which takes some milliseconds.
//! 2. Connect to the switch's driver domain, starting it if there is none, and attach a guest
//!    (`rendezvous`, [`ringfence_driver::switchboard`]). A guest without a switch has a driver domain only for its disks.
//! 3. Let the guest's init create `eth0` and `up0`, and start uplink and frontend meanwhile (`starting`).
//! 4. Give these the TAPs' descriptors, and the frontend a connection to the hub. It connects to the backend.
//! 5. Let init start the command.
//! 6. Wait for the first end: of the command, init, the frontend, the uplink or the driver domain.
//!    The rest of this guest ends with it, all at once (`guest_processes`).
//!
//! The launcher is one thread with one `poll`. All processes that it starts, except the driver
//! domain, have a parent death signal, so nothing is left behind when it is killed.

mod announce;
mod asking;
mod cgroup;
mod clients;
mod devices;
pub(crate) mod disk_changes;
mod disks;
mod egress;
mod ends;
mod events;
mod filter;
mod guest_processes;
mod host_names;
mod inherited;
mod last_data;
mod messages;
pub(crate) mod options;
mod presence;
mod presence_changes;
mod process;
mod published_port_changes;
mod published_ports;
pub(crate) mod rendezvous;
pub mod report;
mod requests;
pub(crate) mod served_file;
mod starting;
mod terminal;
mod uplink;
mod view;

pub use filter::FilterArgs;
pub use options::{LinkChoice, Options, Protect, SwitchChoice, TerminalChoice, UplinkChoice};
pub(crate) use rendezvous::parse_shared_switch;
pub use view::{PrivatePlace, ViewOptions};

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use ringfence_sys::numbers::bounded;
use ringfence_sys::tap::Tap;
use rustix::process::{Resource, getrlimit};

use cgroup::OwnCgroup;
use disks::GuestDisks;
use guest_processes::{GuestParts, GuestProcesses};
use rendezvous::Attachment;
use report::Reporter;
use ringfence_hostnet::runtime_dir::RuntimeDir;
use ringfence_hostnet::text::printable;
use terminal::CommandTerminal;
use uplink::Uplink;

use ringfence_driver::switchboard::{AttachRequest, FromDriver, LegConfig, ToDriver, VERSION};
use ringfence_driver::workers::worker_count;
use ringfence_guest::{GuestConfig, NamesConfig, TerminalKind, ViewConfig};
use ringfence_hostnet::address::{Address, list};
use ringfence_hostnet::causes::causes;
use ringfence_hostnet::interface::InterfaceConfig;
use ringfence_sandbox::STATUS_FAILED;
use ringfence_sandbox::command_filter::CommandFilter;
use ringfence_sandbox::limits;
use ringfence_sandbox::signals::{self, Signals};
use ringfence_sandbox::spawn::{DomainKind, DomainProcess, Spawn, SpawnError};

/// Name of a guest's interface to the switch.
const INTERFACE: &str = "eth0";

/// Open files that each process of a guest, and the driver domain of a small switch, may need.
const OPEN_FILES_MIN: u64 = 64;

/// Message for a command with the rights of root.
const AS_ROOT: &str = "you are root, and so is the command: it can change every file of this computer \
                       except devices and kernel settings; --root, --ro, --hide and --private limit that";

/// Returns the arguments of this program for a quiet guest on a switch without an uplink. More
/// options may follow, then `--` and the command.
pub fn guest_on<'a>(switch: &'a str, mode: &'a str) -> [&'a str; 8] {
    ["run", "--quiet", "--uplink", "none", "--switch", switch, "--mode", mode]
}

/// Runs a command as a guest. Returns the exit status.
pub fn run(options: &Options) -> u8 {
    let reporter = Reporter::new(options.loudness);
    reporter.take_log();
    match Launch::prepare(options, reporter).and_then(Launch::run) {
        Ok(status) => status,
        Err(error) => {
            reporter.problem(report::with_remedy(causes(&error)));
            STATUS_FAILED
        }
    }
}

/// State of a launch before its processes run.
struct Launch<'a> {
    options: &'a Options,
    reporter: Reporter,
    signals: Signals,
    blocked: Vec<i32>,
    /// Signals that the command ignores, and this process does not.
    ignored: Vec<i32>,
    terminal: Option<CommandTerminal>,
    inherited: Vec<RawFd>,
    /// Limit of open files that the command gets.
    open_files: Option<u64>,
    command: Vec<OsString>,
    filter: CommandFilter,
}

impl<'a> Launch<'a> {
    fn prepare(options: &'a Options, reporter: Reporter) -> anyhow::Result<Launch<'a>> {
        check_surroundings()?;
        let inherited = inherited::for_command(reporter)?;
        let open_files = limits::raise_open_files().context("RLIMIT_NOFILE")?;
        let terminal = CommandTerminal::plan(options.terminal);
        let (blocked, ignored) = (signals::blocked()?, signals::take_ignored()?);
        let signals = guest_processes::signals(terminal.is_some())?;
        let command = if options.command.is_empty() {
            vec![std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into())]
        } else {
            options.command.clone()
        };
        let is_root = options.ids().is_none();
        let (filter, remarks) = CommandFilter::new(&options.filter, is_root)?;
        remarks.iter().for_each(|remark| reporter.step(remark));
        Ok(Launch {
            options,
            reporter,
            signals,
            blocked,
            ignored,
            terminal,
            inherited,
            open_files,
            command,
            filter,
        })
    }

    fn run(mut self) -> anyhow::Result<u8> {
        let options = self.options;
        let terminal = self.terminal.take();
        let directory = RuntimeDir::open()?;
        if !options.has_switch() && options.host_tap.is_some() {
            bail!("--host-tap is a port of a switch: leave out --switch none");
        }
        let cgroup = OwnCgroup::create(&options.limits, self.reporter)?;
        // The guest's domain starts while the rest is prepared.
        let mut guest = self.begin_guest(&cgroup)?;
        let uplink = Uplink::prepare(options, self.reporter)?;
        guest.map_ids()?;
        let host = view::HostFacts::examine(options);
        if !options.has_switch() && options.disks.is_empty() {
            return self.run_without_driver(cgroup, guest, &directory, uplink, terminal, host);
        }
        let sockets = view::runtime_dir_of_guest(options, &directory);
        let mut disks = GuestDisks::open(&options.disks, &sockets, self.reporter)?;
        let queues = worker_count(options.queues);
        let make = |name| Tap::create_queues(name, queues);
        let mut host_taps = options.host_tap.as_deref().map(make).transpose()?;
        for tap in host_taps.iter_mut().flatten() {
            tap.limit_offloads(ringfence_guest::carried_for_host(options.host_offload))?;
        }
        let request = AttachRequest {
            version: VERSION.to_owned(),
            name: options.name.clone(),
            mac: None,
            addresses: options.addresses.clone(),
            avoid: uplink.iter().flat_map(Uplink::addresses).copied().collect(),
            mtu: options.switch_mtu(),
            mode: options.mode.to_string(),
            queues: options.queues,
            offloads: options.backend_offload.to_string(),
            coalesce: options.coalesce,
            forwarding: options.forwarding,
            advertise: options.advertise,
            host_leg: host_taps.is_some(),
            interface: options.has_switch(),
        };
        let attachment = rendezvous::attach(
            &directory,
            &options.switch,
            disks.rings(&options.switch),
            &request,
            self.reporter,
        )?;
        if let (Some(taps), Some(leg)) = (host_taps, &attachment.attached.host_leg) {
            let name = options.host_tap.as_deref().unwrap_or_default();
            self.connect_host(&taps, leg, &attachment)
                .with_context(|| format!("--host-tap {name}"))?;
        }
        let uplink = self.unless_overlapping(uplink, &attachment.attached.addresses);
        disks.attach(&attachment.driver_channel)?;
        let environment = disks.environment(&sockets);
        let view = view::config(options, &directory, disks.len(), host)?;
        let (reporter, signals) = (self.reporter, &self.signals);
        let parts = GuestParts { attachment: Some(attachment), disks, uplink, cgroup };
        let mut processes = GuestProcesses::new(reporter, signals, &directory, options, parts);
        processes.terminal = terminal;
        Ok(self.supervise(processes, guest, environment, view))
    }

    /// Begins to start the guest's domain. It waits for its orders.
    fn begin_guest(&self, cgroup: &OwnCgroup) -> Result<DomainProcess, SpawnError> {
        let (command, inherit) = (&self.command[..], &self.inherited[..]);
        let (kind, cgroup) = (DomainKind::Guest, cgroup.get());
        DomainProcess::begin(&Spawn { kind, command, inherit, cleanup: None, cgroup })
    }

    /// Drops the uplink if its addresses overlap with the switch's, which a guest could not tell
    /// apart. The driver domain avoids that for the first guest of a switch if it chooses the addresses.
    fn unless_overlapping(&self, uplink: Option<Uplink>, switch: &[Address]) -> Option<Uplink> {
        let (kept, lost): (Vec<_>, Vec<_>) =
            uplink.into_iter().partition(|uplink| !uplink.overlaps_with(switch, self.options));
        if !lost.is_empty() {
            self.reporter.summary(format_args!(
                "no uplink: the host's network has the addresses of the switch; choose others with \
                 --address or --uplink-address"
            ));
        }
        kept.into_iter().next()
    }

    /// Runs a guest without a switch and disks, which needs no driver domain. The guest is dropped before its cgroup.
    fn run_without_driver(
        &self,
        cgroup: OwnCgroup,
        guest: DomainProcess,
        directory: &RuntimeDir,
        uplink: Option<Uplink>,
        terminal: Option<CommandTerminal>,
        host: view::HostFacts,
    ) -> anyhow::Result<u8> {
        let options = self.options;
        let disks = GuestDisks::open(&[], Path::new(""), self.reporter)?;
        let view = view::config(options, directory, disks.len(), host)?;
        let (reporter, signals) = (self.reporter, &self.signals);
        let parts = GuestParts { attachment: None, disks, uplink, cgroup };
        let mut processes = GuestProcesses::new(reporter, signals, directory, options, parts);
        processes.terminal = terminal;
        Ok(self.supervise(processes, guest, Vec::new(), view))
    }

    /// Starts the guest's processes and waits for their end. Returns the exit status.
    fn supervise(
        &self,
        mut processes: GuestProcesses<'_>,
        guest: DomainProcess,
        environment: Vec<(String, String)>,
        view: ViewConfig,
    ) -> u8 {
        if view.is_host_root {
            self.reporter.summary_in_lines(AS_ROOT);
        }
        let config = self.guest_config(&processes, environment, view);
        if let Some(state) = processes.guest.state_mut() {
            state.filter = self.filter.clone();
        }
        let ended = processes.run(&self.command, guest, &config);
        let terminal = processes.terminal.take();
        // In this order: after the processes have ended, the terminal is the shell's again.
        drop(processes);
        if let Some(terminal) = terminal {
            terminal.finish(ended.ending, &self.signals);
        }
        if let Some(problem) = ended.problem {
            report::print(problem);
        }
        ended.status
    }

    fn connect_host(
        &self,
        taps: &[Tap],
        leg: &LegConfig,
        attachment: &Attachment,
    ) -> anyhow::Result<()> {
        /// Time limit for adding a port.
        const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
        let mtu = self.options.switch_mtu();
        let tap = taps.first().context("an interface without queues")?;
        for remark in
            ringfence_guest::configure_leg(&tap.name, leg.mac, mtu.into(), &leg.addresses)?
        {
            self.reporter.step(remark);
        }
        let order = ToDriver::HostLeg { name: tap.name.clone(), offloads: tap.offloads.0, mtu };
        let queues: Vec<_> = taps.iter().map(|tap| tap.fd.as_fd()).collect();
        attachment.driver_channel.send(&order, &queues)?;
        match attachment.driver_channel.receive_within(ANSWER_TIMEOUT)?.0 {
            FromDriver::LegAdded => {}
            FromDriver::Refused(why) => bail!("{}", printable(&why)),
            other => bail!("the driver domain answered {other:?}"),
        }
        self.reporter.summary(format_args!(
            "{} ({}) is the host's leg on switch `{}`",
            tap.name,
            list(&leg.addresses),
            attachment.switch
        ));
        Ok(())
    }

    fn guest_config(
        &self,
        processes: &GuestProcesses<'_>,
        environment: Vec<(String, String)>,
        view: ViewConfig,
    ) -> GuestConfig {
        let options = self.options;
        let terminal =
            processes.terminal.as_ref().map_or(TerminalKind::None, CommandTerminal::kind);
        let has_own_terminal = matches!(terminal, TerminalKind::Own { .. });
        let on_switch = processes.attached().filter(|_| options.has_switch());
        let interface = on_switch.map(|attached| InterfaceConfig {
            name: INTERFACE.to_owned(),
            mac: attached.mac,
            mtu: options.switch_mtu().into(),
            offloads: ringfence_guest::carried(options.offload).0,
            addresses: attached.addresses.clone(),
            queues: bounded(worker_count(options.queues), u32::MAX),
        });
        let names =
            |switch: &str| NamesConfig { switch: switch.to_owned(), own: options.name.clone() };
        GuestConfig {
            host_name: processes.host_name(),
            interface,
            uplink: processes.uplink().map(Uplink::interface),
            names: processes.switch().map(names),
            resolver: processes.uplink().map(Uplink::resolver),
            blocked_signals: self.blocked.clone(),
            ignored_signals: self.ignored.clone(),
            terminal,
            open_files: self.open_files,
            environment,
            removed_variables: view::removed_variables(options, has_own_terminal),
            cgroups: processes.cgroup.config(),
            view,
        }
    }
}

/// Reports an environment in which no process of a guest could start.
fn check_surroundings() -> anyhow::Result<()> {
    if !Path::new("/proc/self/fd").is_dir() {
        bail!("/proc is not mounted, and nothing works without it: mount -t proc proc /proc");
    }
    let limit = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    if limit < OPEN_FILES_MIN {
        bail!(
            "the hard limit of open files is {limit}, and a guest's processes need {OPEN_FILES_MIN}: `ulimit -Hn` (or \
             LimitNOFILE= of the service) must be raised"
        );
    }
    Ok(())
}

/// Duplicates this process's standard input, for the command.
fn standard_input() -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?)
}

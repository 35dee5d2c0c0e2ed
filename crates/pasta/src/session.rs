//! Session: the process that starts the uplink for a guest, and waits for the end of one of them.
//!
//! 1. Plan the network, and open listening sockets, namespaces, log and process id file with the user's rights.
//! 2. Start the process in the namespace ([`super::namespace`]), which returns the queues of the TAP. A virtual machine
//!    has a socket instead ([`super::machine`]).
//! 3. Start the uplink process, in the sandbox that `run` gives it, and hand the queues and the sockets over.
//! 4. Listen for clients of the egress policy, then announce the session and write the process id: a program that waits
//!    for these may call at once. Give up root's rights, and wait.
//!
//! It ends with the namespace, the command or the uplink, or by a signal. It handles no packet.

mod waiting;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use ringfence_sandbox::channel::Channel;
use ringfence_sandbox::ids::is_host_root;
use ringfence_sandbox::signals::{self, Signals};
use ringfence_sandbox::spawn::{Event, Spawn, THIS_PROGRAM};
use ringfence_sandbox::{ChannelError, DomainKind, DomainProcess, Ending, limits};
use ringfence_sys::namespaces;
use ringfence_sys::numbers::usize_from;
use ringfence_sys::poll::wait_hung_up;
use rustix::process::Signal;

use super::api::{ApiServer, PortServer};
use super::args::PastaArgs;
use super::auto::{Auto, Opener};
use super::auto_forwards;
use super::forwards_to_host;
use super::greeting::Greeting;
use super::live_policy::LivePolicy;
use super::machine::{Endpoint, OpenEndpoint};
use super::messages::Messages;
use super::namespace::{NamespaceInterface, Order, Report};
use super::namespace_process::NamespaceProcess;
use super::network::{self, PlannedNetwork};
use super::questions::{self, Questions};
use super::session_files::{Files, write_pid};
use super::session_status::StatusServer;
use super::target::{Existing, Target, Watch};
use super::values::RunAs;
use ringfence_hostnet::causes::causes;
use ringfence_hostnet::file_watch::FileWatch;
use ringfence_hostnet::host::{RESOLV_CONF, resolver_of_host};
use ringfence_hostnet::socket_file::SocketFile;
use ringfence_hostnet::text::{because, last_line, printable};
use ringfence_uplink_process::egress::guest::GuestEgress;
use ringfence_uplink_process::forwarded_ports::ForwardedPorts;
use ringfence_uplink_process::link::LinkOrder;
use ringfence_uplink_process::{FromUplink, UplinkConfig};

/// Time limit for the process in the namespace, and for the uplink.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which a namespace is checked that cannot be watched.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Ends of a session, with the exit status.
enum SessionEnd {
    /// The command has ended, or the namespace is gone.
    Guest(u8),
    /// A signal, the program that waits, or the client of a machine's socket has ended it.
    Other(u8),
}

/// A guest with a running uplink.
pub(crate) struct Session {
    messages: Messages,
    signals: Signals,
    uplink: DomainProcess,
    watch: Option<Watch>,
    /// File of a virtual machine's socket, removed at the end.
    _file: Option<SocketFile>,
    /// Datagram socket of a virtual machine that has not written yet.
    greeting: Option<Greeting>,
    /// Descriptor whose end ends the session.
    stop: Option<OwnedFd>,
    command: Option<(Child, Channel)>,
    status: StatusServer,
    ports: ForwardedPorts,
    port_server: Option<PortServer>,
    auto: Option<Auto>,
    namespace_process: Option<NamespaceProcess>,
    network: PlannedNetwork,
    egress: GuestEgress,
    /// Clients of the egress policy. `None` if the session cannot listen for them.
    live_policy: Option<LivePolicy>,
    questions: Questions,
    /// Watch over the host's name servers. `None` if the system permits none.
    name_servers: Option<FileWatch>,
}

impl Session {
    /// Connects the target. When this returns, its network is usable and the process id is written.
    pub(crate) fn start(args: &PastaArgs, target: &Target) -> anyhow::Result<Session> {
        let mut messages = Messages::new(args, target.program())?;
        // An inherited descriptor must still be inheritable.
        let endpoint = target.endpoint().map(Endpoint::open).transpose()?;
        report_options_without_effect(args, &mut messages);
        let to_host = forwards_to_host::ports(args)?;
        let (egress, questions) = questions::open(args, target)?;
        // Inherited descriptors are not for Ringfence's own processes.
        namespaces::set_inheritable(&namespaces::inheritable_fds()?, false)?;
        let mut network = PlannedNetwork::new(args)?;
        let open_files = limits::raise_open_files().context("the limit of open files")?;
        let mut listeners = network.listen(args)?;
        let files = Files::create(args, target, &network, &listeners)?;
        let (run_as, blocked) = (run_as(args)?, signals::blocked()?);
        let signals = Signals::new(&[Signal::TERM, Signal::INT, Signal::QUIT, Signal::HUP])?;
        let auto = network.auto_forwards(args)?;
        let auto_to_host = auto_forwards::ports_to_host(args);
        let relayed = network::relay(args).is_some() || !auto_to_host.is_empty();
        let (shows_listeners, has_ports_to_host) = (!auto.is_empty(), !to_host.is_empty());
        let mut entry = match endpoint {
            Some(endpoint) => Entry::of_machine(endpoint),
            None => {
                let (interface, configured) = (network.interface(), args.config_net);
                let connection =
                    NamespaceInterface { interface, configured, relayed, to_host, shows_listeners };
                let inherited = InheritedState { blocked, open_files };
                Entry::of_namespace(target, args, run_as, connection, inherited, &mut messages)?
            }
        };
        if let (Some((_, channel)), true) = (&entry.process, has_ports_to_host) {
            forwards_to_host::receive(channel, &mut listeners)?;
        }
        let auto = Auto::new(auto, entry.tables.split_off(0), auto_to_host)?;
        let ports = ForwardedPorts::new(listeners.sockets.len());
        let (link, offloads) = (entry.link.clone(), entry.offloads);
        let config = network.config(args, link, offloads, listeners.forwards, egress.head());
        let fds = entry.sockets.into_iter().chain(files.capture).collect();
        let listeners = network.joined(listeners.sockets);
        let uplink = start_uplink(&config, fds, listeners, &egress, &mut messages)?;
        let channel = entry.process.as_ref().filter(|_| relayed).map(|(_, channel)| channel);
        let start = |of| start_namespace_process(entry.existing.as_ref(), of, uplink.channel());
        let namespace_process = channel.map(start).transpose()?;
        let live_policy = LivePolicy::start(target, &mut messages);
        announce(&network, entry.file.as_ref(), &mut messages);
        write_pid(files.pid)?;
        let command = settle(target, entry.process)?;
        give_up_root(run_as)?;
        Ok(Session {
            messages,
            signals,
            uplink,
            watch: entry.watch,
            _file: entry.file,
            greeting: entry.greeting,
            stop: None,
            command,
            status: files.status,
            ports,
            port_server: files.control.map(PortServer::Control),
            auto,
            namespace_process,
            network,
            egress,
            live_policy,
            questions,
            name_servers: FileWatch::new(&[RESOLV_CONF]).ok(),
        })
    }

    /// Lets clients of this socket add and remove ports from now on.
    pub(crate) fn serve_api(&mut self, api: Option<ApiServer>) {
        if let Some(mut api) = api {
            api.set_addresses(self.network.addresses());
            self.port_server = Some(PortServer::Api(api));
        }
    }

    /// Makes the session end when the other end of `stop` is closed.
    pub(crate) fn stop_with(&mut self, stop: Option<OwnedFd>) {
        self.stop = stop;
    }

    /// Writes messages to the log from now on.
    pub(crate) fn leave_terminal(&mut self) {
        self.messages.leave_terminal();
    }

    /// Waits for the end. Returns the exit status.
    pub(crate) fn wait(mut self) -> u8 {
        let ended = self.wait_for_end();
        if matches!(ended, Ok(SessionEnd::Guest(_))) {
            self.carry_last_data();
        }
        while self.ports.has_messages() {
            self.egress.take(|| self.ports.take_message());
        }
        let (channel, wants_totals) = (self.uplink.channel(), self.egress.has_policy());
        let totals = self.egress.finish(channel, wants_totals);
        self.report_denials();
        if let Some(totals) = totals {
            self.messages.summary(format_args!("egress: {totals}"));
        }
        match ended {
            Ok(SessionEnd::Guest(status) | SessionEnd::Other(status)) => status,
            Err(error) => {
                self.messages.problem(causes(&error));
                crate::program::STATUS_FAILED
            }
        }
    }

    fn wait_for_end(&mut self) -> anyhow::Result<SessionEnd> {
        loop {
            if let Some(arrived) = self.signals.next()? {
                // Signals of the terminal's keys reach the command itself.
                if self.command.is_none() || arrived.by_process {
                    self.messages.step(format_args!("ends by signal {}", arrived.number));
                    let is_asked =
                        arrived.number == Signal::TERM.as_raw() && self.command.is_none();
                    let ending = Ending::Killed(arrived.number);
                    let status = if is_asked { 0 } else { ending.exit_status() };
                    return Ok(SessionEnd::Other(status));
                }
                continue;
            }
            if let Some(status) = self.command_ended()? {
                return Ok(SessionEnd::Guest(status));
            }
            if self.watch.as_ref().is_some_and(Watch::is_over) {
                self.messages.step("the namespace is gone");
                return Ok(SessionEnd::Guest(0));
            }
            let is_stopped = |fd| wait_hung_up(fd, Duration::ZERO).unwrap_or(true);
            if self.stop.as_ref().is_some_and(is_stopped) {
                return Ok(SessionEnd::Other(0));
            }
            if self.check_uplink()? {
                self.messages.step("the client of the socket is gone");
                return Ok(SessionEnd::Other(0));
            }
            if let Some(greeting) = &self.greeting
                && greeting.answer().context("the socket of the machine")?
            {
                self.messages.step("a machine uses the socket");
                self.greeting = None;
            }
            self.questions.serve(self.uplink.channel(), &mut self.messages);
            self.status.serve(Some(self.uplink.channel()));
            if let Some(live) = &mut self.live_policy {
                live.serve(&mut self.egress, self.uplink.channel());
            }
            if let Some(server) = &mut self.port_server {
                server.serve(self.uplink.channel(), &mut self.ports)?;
            }
            if let Some(auto) = &mut self.auto {
                auto.run(Opener {
                    channel: self.uplink.channel(),
                    ports: &mut self.ports,
                    namespace_process: self.namespace_process.as_ref(),
                    messages: &mut self.messages,
                })?;
            }
            self.follow_name_servers()?;
            self.follow_links();
            // These make no descriptor readable.
            if !self.ports.has_messages() {
                self.sleep()?;
            }
        }
    }

    /// Passes new name servers of the host on to the uplink.
    fn follow_name_servers(&mut self) -> anyhow::Result<()> {
        let Some(watch) = self.name_servers.as_ref().filter(|watch| watch.may_have_changed())
        else {
            return Ok(());
        };
        watch.renew();
        let servers = resolver_of_host().name_servers;
        if let Some(order) = self.network.follow_name_servers(&servers) {
            self.messages.step("follows the host's name servers");
            self.uplink.channel().send_now(&order, &[])?;
        }
        Ok(())
    }

    /// Joins multicast groups on the links that the host has now.
    fn follow_links(&mut self) {
        let Some(memberships) = &mut self.network.memberships else { return };
        match memberships.follow(self.uplink.channel()) {
            Ok(None) => {}
            Ok(Some(change)) => self.messages.step(change),
            Err(error) => self.messages.step(causes(&error)),
        }
    }

    /// Logs new denials, and sends verdicts to the clients that watch them.
    fn report_denials(&mut self) {
        for sentence in self.egress.take_sentences() {
            self.messages.summary(sentence);
        }
        if let Some(live) = &mut self.live_policy {
            live.send_verdicts(&mut self.egress, self.uplink.channel());
        }
    }

    fn command_ended(&mut self) -> anyhow::Result<Option<u8>> {
        let Some((child, channel)) = &mut self.command else { return Ok(None) };
        match channel.try_receive::<Report>() {
            Ok(None) => Ok(None),
            Ok(Some((Report::Ended(ending), _))) => Ok(Some(ending.exit_status())),
            Ok(Some((Report::Failed(why), _))) => bail!("{}", printable(&why)),
            Ok(Some(_)) | Err(_) => {
                let status = child.wait()?;
                bail!("the process that started the command is gone ({status})")
            }
        }
    }

    /// Handles messages and events of the uplink. Returns `true` if it ended because its guest has gone.
    fn check_uplink(&mut self) -> anyhow::Result<bool> {
        let channel = self.uplink.channel();
        let message = self.egress.take(|| self.ports.try_receive(channel));
        let message = self.questions.take(message);
        if self.egress.has_reports() {
            self.report_denials();
        }
        let channel = self.uplink.channel();
        match message {
            Some(FromUplink::Failed(why)) => bail!("the uplink failed: {}", printable(&why)),
            Some(FromUplink::Sockets) => {
                if let Some(namespace_process) = &self.namespace_process
                    && let Err(error) = namespace_process.refill(channel)
                {
                    self.messages.step(format_args!("no more relays: {}", causes(&error)));
                }
            }
            Some(FromUplink::Machine(state)) => {
                self.status.take(state).into_iter().for_each(|text| self.messages.summary(text));
            }
            Some(FromUplink::Totals(totals)) => self.status.take_totals(*totals),
            Some(FromUplink::Policy { error }) => {
                if let Some(live) = &mut self.live_policy {
                    live.policy_is_set(error, &mut self.egress);
                }
            }
            _ => {}
        }
        while let Some(event) = self.uplink.next_event() {
            match event {
                Event::Stderr(text) => {
                    for line in text.lines() {
                        self.messages.summary(format_args!("uplink: {}", printable(line)));
                    }
                }
                Event::Ended(ended) if ended.ending == Ending::Exited(0) => return Ok(true),
                Event::Ended(ended) => {
                    let why = because(last_line(&ended.stderr_tail).as_deref());
                    bail!("the uplink {}{why}", ended.ending);
                }
            }
        }
        Ok(false)
    }
}

/// Way to the guest: its link, and the process and the files that belong to it.
struct Entry {
    /// Queues of the TAP, or socket of a virtual machine.
    sockets: Vec<OwnedFd>,
    link: LinkOrder,
    offloads: u32,
    /// Files of the namespace's listeners.
    tables: Vec<OwnedFd>,
    existing: Option<Existing>,
    watch: Option<Watch>,
    /// Process in the namespace.
    process: Option<(Child, Channel)>,
    file: Option<SocketFile>,
    greeting: Option<Greeting>,
}

/// State of this process at its start, which a command gets back.
struct InheritedState {
    /// Blocked signals.
    blocked: Vec<i32>,
    /// Limit of open files.
    open_files: Option<u64>,
}

impl Entry {
    fn of_machine(endpoint: OpenEndpoint) -> Entry {
        let OpenEndpoint { socket, link, file, greeting } = endpoint;
        let (sockets, (tables, existing, watch, process)) = (vec![socket], Default::default());
        Entry { sockets, link, offloads: 0, tables, existing, watch, process, file, greeting }
    }

    /// Makes the interface in the namespaces. A command gets `inherited` back.
    fn of_namespace(
        target: &Target,
        args: &PastaArgs,
        run_as: Option<RunAs>,
        connection: NamespaceInterface,
        inherited: InheritedState,
        messages: &mut Messages,
    ) -> anyhow::Result<Entry> {
        let (mut existing, mut watch) = (None, None);
        if let Target::Existing { netns, userns } = target {
            existing = Some(Existing::open(netns, userns.as_deref())?);
            watch = (!args.no_netns_quit).then(|| Watch::new(netns)).transpose()?;
        }
        let (child, channel) = start_in_namespace(target, run_as)?;
        let queues = usize_from(connection.interface.interface.queues);
        match &existing {
            Some(existing) => channel.send(&Order::Join(connection), &existing.fds())?,
            None => {
                let own_pids = !args.no_pidns;
                let InheritedState { blocked, open_files } = inherited;
                let order = Order::Create { connection, own_pids, blocked, open_files };
                channel.send(&order, &[rustix::stdio::stdin()])?;
            }
        }
        let (sockets, tables, offloads) = receive_tap(&channel, queues, messages)?;
        let (link, process) = (LinkOrder::Tap, Some((child, channel)));
        let (file, greeting) = (None, None);
        Ok(Entry { sockets, link, offloads, tables, existing, watch, process, file, greeting })
    }
}

/// Starts the process that creates sockets in the namespace, and passes the first ones to the uplink, which discards them
/// without relays.
fn start_namespace_process(
    existing: Option<&Existing>,
    channel: &Channel,
    uplink: &Channel,
) -> anyhow::Result<NamespaceProcess> {
    let namespace_process = match existing {
        Some(existing) => NamespaceProcess::start(&existing.fds())?,
        None => match channel.receive_within::<Report>(START_TIMEOUT)? {
            (Report::Namespaces, fds) => {
                let fds = fds.into_vec();
                NamespaceProcess::start(&fds.iter().map(AsFd::as_fd).collect::<Vec<_>>())?
            }
            (Report::Failed(why), _) => bail!("{}", printable(&why)),
            _ => bail!("the process in the namespace did not report its namespaces"),
        },
    };
    namespace_process.refill(uplink)?;
    Ok(namespace_process)
}

/// Returns the user that replaces root, if root of the host runs this.
fn run_as(args: &PastaArgs) -> anyhow::Result<Option<RunAs>> {
    let is_root = is_host_root().context("the user ids")?;
    match args.runas {
        Some(_) if !rustix::process::geteuid().is_root() => {
            bail!("--runas: only root can change to another user")
        }
        Some(user) => Ok(Some(user)),
        None => Ok(is_root.then(RunAs::nobody)),
    }
}

/// Starts the process in the namespace. It waits for its order.
fn start_in_namespace(target: &Target, run_as: Option<RunAs>) -> anyhow::Result<(Child, Channel)> {
    let (channel, inner) = Channel::pair()?;
    let mut command = Command::new(THIS_PROGRAM);
    command.arg0("ringfence").args(["internal", "pasta-namespace", "--"]);
    command.stdin(Stdio::from(inner.into_fd()));
    match target {
        Target::Command(words) => {
            command.args(words);
            if let Some(RunAs { uid, gid }) = run_as {
                command.uid(uid).gid(gid);
            }
        }
        Target::Existing { .. } | Target::Machine(_) => {
            command.env_clear().stdout(Stdio::null()).stderr(Stdio::null());
        }
    }
    let child = command.spawn().context("starting the process in the namespace")?;
    Ok((child, channel))
}

/// Receives the queues of the TAP, the files of the namespace's listeners, and the offloads.
fn receive_tap(
    channel: &Channel,
    queues: usize,
    messages: &mut Messages,
) -> anyhow::Result<(Vec<OwnedFd>, Vec<OwnedFd>, u32)> {
    let received = channel.receive_within::<Report>(START_TIMEOUT);
    let (report, fds) = received.context("the process in the namespace")?;
    match report {
        Report::Ready { offloads, remarks } => {
            for remark in remarks {
                messages.step(printable(&remark));
            }
            let mut taps = fds.into_vec();
            ensure!(taps.len() >= queues, "the process in the namespace sent no TAP");
            let tables = taps.split_off(queues);
            Ok((taps, tables, offloads))
        }
        Report::Failed(why) => bail!("{}", printable(&why)),
        Report::Ended(ending) => bail!("the process in the namespace {ending}"),
        other => bail!("the process in the namespace reported {other:?} in place of its start"),
    }
}

/// Reports what is ready: the network, and the socket of a virtual machine.
fn announce(network: &PlannedNetwork, file: Option<&SocketFile>, messages: &mut Messages) {
    messages.summary(network.summary());
    if let Some(file) = file {
        messages.summary(format_args!("listens at {}", file.path().display()));
    }
}

fn report_options_without_effect(args: &PastaArgs, messages: &mut Messages) {
    for (name, why) in &args.others.without_effect {
        messages.step(format_args!("--{name} changes nothing: {why}"));
    }
}

fn start_uplink(
    config: &UplinkConfig,
    link: Vec<OwnedFd>,
    listeners: Vec<OwnedFd>,
    egress: &GuestEgress,
    messages: &mut Messages,
) -> anyhow::Result<DomainProcess> {
    let spawn =
        Spawn { kind: DomainKind::Uplink, command: &[], inherit: &[], cleanup: None, cgroup: None };
    let domain = DomainProcess::start(&spawn)?;
    let sent = network::hand_over(domain.channel(), config, &link, listeners)
        .and_then(|()| Ok(egress.send_rules(domain.channel())?));
    drop(link);
    match domain.channel().receive_within::<FromUplink>(START_TIMEOUT) {
        Ok((FromUplink::Up { link, remarks }, _)) => {
            messages.step(format_args!("the uplink runs over {}", printable(&link)));
            for remark in remarks {
                messages.step(format_args!("uplink: {}", printable(&remark)));
            }
            sent.map(|()| domain)
        }
        Ok((FromUplink::Failed(why), _)) => bail!("the uplink failed: {}", printable(&why)),
        Ok((other, _)) => bail!("the uplink reported {other:?} instead of its start"),
        Err(ChannelError::Closed) => {
            let ended = domain.wait_ended(Duration::from_secs(1));
            let why = ended.and_then(|ended| last_line(&ended.stderr_tail));
            bail!("the uplink ended{}", because(why.as_deref()))
        }
        Err(error) => Err(error).context("the uplink"),
    }
}

/// Lets the command start, or reaps the process in an existing namespace, whose work is done.
fn settle(
    target: &Target,
    process: Option<(Child, Channel)>,
) -> anyhow::Result<Option<(Child, Channel)>> {
    let Some((mut child, channel)) = process else { return Ok(None) };
    if let Target::Command(_) = target {
        channel.send(&Order::Start, &[])?;
        return Ok(Some((child, channel)));
    }
    child.wait().context("the process in the namespace")?;
    Ok(None)
}

/// Changes to another user for good. Nothing that follows needs root's rights.
fn give_up_root(run_as: Option<RunAs>) -> anyhow::Result<()> {
    use rustix::thread::{Gid, Uid};
    let Some(RunAs { uid, gid }) = run_as else { return Ok(()) };
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    rustix::thread::set_thread_groups(&[]).context("--runas: the groups")?;
    rustix::thread::set_thread_res_gid(gid, gid, gid).context("--runas: the group")?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).context("--runas: the user")
}

//! Uplink process: owns the queues of the guest's TAP, the sockets of forwarded ports, and the
//! right to open sockets in the host's network. It parses packets of the guest, so it has no other
//! right.
//!
//! It receives its configuration and all descriptors, enters the sandbox, and carries packets until
//! the launcher is gone.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use ringfence_frame::{Fault, Port};
use ringfence_link::vhost_user::ClientReport;
use ringfence_platform::Counters;
use ringfence_policy::policy::PolicyError;
use ringfence_policy::{Policy, PolicySource};
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_sandbox::isolation::{Isolation, SandboxError};
use ringfence_sandbox::{DomainKind, STATUS_FAILED};
use ringfence_sys::clock::Clock;
use ringfence_sys::prerequisite::{PING, with_doctor};
use ringfence_sys::tap::TapOffloads;
use ringfence_uplink::access::IpPrefix;
use ringfence_uplink::config::LeftOut;
use ringfence_uplink::egress::{AskLimits, Note, PolicyInForce, Recording};
use ringfence_uplink::guest::GuestNetwork;
use ringfence_uplink::host::real::{self, OwnAddresses, RealHost};
use ringfence_uplink::relay::{self, RelayTarget};
use ringfence_uplink::runner::{Runner, RunnerEnd};
use ringfence_uplink::share::{Share, UdpForwards};
use ringfence_uplink::team::{self, Member};
use ringfence_uplink::udp::multicast::QUESTIONS_MAX;
use ringfence_uplink::upstream::UpstreamProxy;
use ringfence_uplink::{Access, Config, Egress, GuestLink, Uplink, UplinkCounters};
use rustix::event::PollFlags;
use rustix::io::Errno;

use crate::config::{Outbound, PolicyHead, RelayTo, UplinkConfig};
use crate::forward::ForwardProtocol;
use crate::forwarded_ports::{self, ForwardedPortTable};
use crate::link::{LinkError, Made, QueueLink};
use crate::messages::{FromUplink, UplinkRules, UplinkSockets};
use crate::orders::{self, Orders, Served};
use crate::recorder::{self, Queue, RecorderOfGuest};
use crate::totals::TotalsSource;
use ringfence_sandbox::limits::raise_descriptor_limit;

/// Maximum time to busy-poll before the process sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// Number of descriptors not used by flows: links, threads, files open for a short time.
const OWN_DESCRIPTORS: usize = 128;
/// Part of the descriptors that is kept for ports that are added later, and for relays: one of so many each.
const LATER_PORTS_PART: usize = 32;
/// Part of the descriptors that is kept for clients of TCP ports that may be added later: one of so many.
const LATER_CLIENTS_PART: usize = 16;
/// Number of connections below which the launcher is warned.
const CONNECTIONS_EXPECTED: usize = 10_000;

/// Errors that end an uplink.
#[derive(Debug, thiserror::Error)]
enum UplinkFailure {
    #[error("orders: {0}")]
    Channel(#[from] ChannelError),
    #[error("orders: there is no TAP")]
    NoTap,
    #[error("orders: a policy without its rules")]
    NoRules,
    #[error("orders: packets of this link cannot be captured")]
    NoCapture,
    #[error(transparent)]
    Policy(#[from] PolicyError),
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("sockets: {0}")]
    Sockets(#[from] Errno),
    #[error("the host's own addresses cannot be read: {0}")]
    OwnAddresses(#[source] Errno),
    #[error(transparent)]
    RunnerEnd(#[from] RunnerEnd),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Main function of an uplink's inner process. Returns the exit status.
pub fn main() -> u8 {
    Channel::serve_stdin(
        |channel| start(channel).map(|()| 0),
        |error| (STATUS_FAILED, FromUplink::Failed(error.to_string())),
    )
}

fn start(channel: &Channel) -> Result<(), UplinkFailure> {
    let (config, taps) = channel.receive::<UplinkConfig>()?;
    let mut taps = taps.into_vec();
    let mut sockets = Vec::new();
    while sockets.len() < config.forwards.len() + config.multicast.joined.len() {
        let (UplinkSockets, more) = channel.receive()?;
        if more.is_empty() {
            return Err(UplinkFailure::NoTap);
        }
        sockets.extend(more.into_vec());
    }
    let egress = receive_policy(channel, config.policy.as_ref())?;
    let descriptors = raise_descriptor_limit()?;
    let mut expected = vec![channel.as_fd().as_raw_fd()];
    expected.extend(taps.iter().chain(&sockets).map(AsRawFd::as_raw_fd));
    let isolation = Isolation::enter(DomainKind::Uplink, &expected)?;
    ringfence_hostnet::log::to_stderr(config.verbose);
    let capture = if config.captures { taps.pop() } else { None };
    let mut made = make_links(channel, &config, taps)?;
    if let (Some(file), Some(first)) = (capture, made.first_mut())
        && !first.link.capture(file)
    {
        return Err(UplinkFailure::NoCapture);
    }
    // The links use sockets of a kind that cannot be opened later.
    let follow = |_| OwnAddresses::follow().map_err(UplinkFailure::OwnAddresses);
    let own = made.iter().map(follow).collect::<Result<Vec<_>, _>>()?;
    isolation.lock()?;
    let descriptors = descriptors.saturating_sub(OWN_DESCRIPTORS);
    serve(channel, &config, egress, made, own, sockets, descriptors)
}

/// Receives the rules of the egress policy, if there is one.
fn receive_policy(
    channel: &Channel,
    head: Option<&PolicyHead>,
) -> Result<Option<Guarded>, UplinkFailure> {
    let Some(head) = head else { return Ok(None) };
    let mut rules = Vec::new();
    while rules.len() < head.rules {
        let (UplinkRules(more), _) = channel.receive()?;
        if more.is_empty() {
            return Err(UplinkFailure::NoRules);
        }
        rules.extend(more);
    }
    let (default, strict_sni) = (head.default, head.strict_sni);
    let policy = Policy::new(PolicySource { rules, default, strict_sni })?;
    let (queue, notes) = recorder::queue();
    let record = head.recorded_as.clone().map(|guest| (guest, queue.clone(), notes));
    let limits = head.asks.map(|asks| AskLimits {
        within: Duration::from_millis(asks.within),
        at_a_time: asks.at_a_time,
    });
    let queue = record.is_some().then_some(queue);
    let egress = Arc::new(Egress::with_questions(policy, queue, head.learns, limits));
    if !head.records_all {
        egress.record(Recording::Denials);
    }
    Ok(Some(Guarded { egress, record }))
}

/// Egress policy in force, and the name and the queue of the recorder that is to be started.
struct Guarded {
    egress: Arc<Egress>,
    record: Option<(String, Queue, Receiver<Option<Note>>)>,
}

/// Creates the links from the first descriptors. This needs system calls that are denied later, and
/// happens before the process reads anything from the guest.
fn make_links(
    channel: &Channel,
    config: &UplinkConfig,
    mut taps: Vec<OwnedFd>,
) -> Result<Vec<Made>, UplinkFailure> {
    let mut devices = Vec::new();
    if config.link.has_devices() {
        devices = taps.split_off(taps.len() / 2);
    }
    let mut devices = devices.into_iter();
    let offloads = TapOffloads(config.offloads);
    let system = Arc::<Counters>::default();
    let mut make = |tap| {
        let reports = channel.try_clone()?;
        let report = move |state: ClientReport| {
            reports.send_or_drop(&FromUplink::Machine(state.into()));
        };
        let (link, mtu) = (&config.link, config.mtu);
        Ok::<_, UplinkFailure>(
            match QueueLink::of_machine(link, tap, mtu, &system, Box::new(report))? {
                Ok(made) => made,
                Err(tap) => QueueLink::make(link, tap, devices.next(), offloads, mtu, &system)?,
            },
        )
    };
    let made = taps.into_iter().map(&mut make).collect::<Result<Vec<_>, _>>()?;
    if made.is_empty() { Err(UplinkFailure::NoTap) } else { Ok(made) }
}

/// Carries packets, with one thread for each link.
fn serve(
    channel: &Channel,
    config: &UplinkConfig,
    egress: Option<Guarded>,
    mut made: Vec<Made>,
    own: Vec<OwnAddresses>,
    mut sockets: Vec<OwnedFd>,
    descriptors: usize,
) -> Result<(), UplinkFailure> {
    let mut remarks = remarks(config);
    remarks.extend(made.iter_mut().find_map(|made| made.remark.take()));
    let mut ports = ForwardedPortTable::new(&config.addresses);
    let mut limits = limits(config, made.len(), descriptors.saturating_sub(sockets.len()));
    let groups = sockets.split_off(config.forwards.len().min(sockets.len()));
    let recorder = RecorderOfGuest::default();
    if let Some(Guarded { egress, record }) = egress {
        limits.policy = PolicyInForce::new(Some(egress));
        if let Some((guest, queue, notes)) = record {
            recorder.start(channel, guest, queue, notes)?;
        }
    }
    remarks.extend(few_connections(&limits, made.len()));
    let counters: Vec<_> = own.iter().map(|_| Arc::<UplinkCounters>::default()).collect();
    let mut engines = engines(&limits, own, &counters, &outbound(config))?;
    let totals = TotalsSource { counters, policy: Arc::clone(&limits.policy) };
    // The first thread receives connections and datagrams from outside.
    if let Some(first) = engines.first_mut() {
        for (joined, socket) in config.multicast.joined.iter().zip(groups) {
            first.join(socket, joined.group())?;
        }
        ports.open_first(&config.forwards, sockets, first)?;
        relay(first, config, channel)?;
    }
    let link = made.first().map_or("none", |made| made.link.name()).to_owned();
    channel.send(&FromUplink::Up { link, remarks }, &[])?;
    ringfence_sys::code::unmap();
    let orders = Orders { ports, totals: totals.clone(), recorder: recorder.clone() };
    let ended = carry_all(made, engines, channel, orders)?;
    recorder.finish();
    let totals = totals.read();
    if totals.egress.is_some() {
        // A launcher that is gone, or that does not read any more, needs none.
        let _ = channel.send_now(&FromUplink::Totals(Box::new(totals)), &[]);
    }
    match ended {
        RunnerEnd::Stopped => Ok(()),
        // The last client of a socket has gone.
        RunnerEnd::Link(Fault::Gone) if config.link.is_machine() => Ok(()),
        ended => Err(ended.into()),
    }
}

/// Runs one thread for each link. Returns when one of them has ended: a guest without one of its
/// queues has no usable network. The first one also carries out orders.
fn carry_all(
    mut made: Vec<Made>,
    mut engines: Vec<Uplink>,
    channel: &Channel,
    orders: Orders,
) -> Result<RunnerEnd, UplinkFailure> {
    if made.len() == 1 {
        let (made, uplink) = made.pop().zip(engines.pop()).ok_or(UplinkFailure::NoTap)?;
        return carry(made.link, uplink, None, channel, Some(orders));
    }
    let mut orders = Some(orders);
    let (tell, ended) = std::sync::mpsc::channel();
    let members = team::team(made.len())?;
    for (number, ((made, uplink), member)) in made.into_iter().zip(engines).zip(members).enumerate()
    {
        let (channel, tell) = (channel.try_clone()?, tell.clone());
        let orders = orders.take();
        std::thread::Builder::new().name(format!("uplink-{number}")).spawn(move || {
            // The receiver is gone if another thread has ended first.
            let _ = tell.send(carry(made.link, uplink, Some(member), &channel, orders));
        })?;
    }
    drop(tell);
    // A thread that panicked sends nothing.
    ended.recv().map_err(|_| io::Error::other("its threads are gone"))?
}

fn carry(
    link: QueueLink,
    uplink: Uplink,
    member: Option<Member>,
    channel: &Channel,
    orders: Option<Orders>,
) -> Result<RunnerEnd, UplinkFailure> {
    let clock = Clock::default();
    match link {
        QueueLink::Stream(link) => {
            run(Runner::new(uplink, link, clock, SPIN), member, channel, orders)
        }
        QueueLink::Datagram(link) => {
            run(Runner::new(uplink, link, clock, SPIN), member, channel, orders)
        }
        QueueLink::VhostUser(link) => {
            run(Runner::new(uplink, *link, clock, SPIN), member, channel, orders)
        }
        QueueLink::Tap(link) => {
            run(Runner::new(uplink, link, clock, SPIN), member, channel, orders)
        }
        QueueLink::Vhost(link) => {
            run(Runner::new(uplink, *link, clock, SPIN), member, channel, orders)
        }
    }
}

/// Runs until the other end of the channel is closed or the link fails. With `orders`, it carries them out.
fn run<L: Port + GuestLink>(
    runner: Runner<L>,
    member: Option<Member>,
    channel: &Channel,
    orders: Option<Orders>,
) -> Result<RunnerEnd, UplinkFailure> {
    let mut runner = match member {
        Some(member) => runner.with_others(member),
        None => runner,
    };
    let Some(mut orders) = orders else {
        return Ok(runner.run_until(channel.as_fd(), PollFlags::empty()));
    };
    loop {
        match runner.run_until(channel.as_fd(), PollFlags::IN) {
            RunnerEnd::Stopped => {}
            ended => return Ok(ended),
        }
        match orders.serve(channel, runner.uplink()) {
            Ok(Served::All) => {}
            Ok(Served::Drain) => {
                if let Err(ended) = runner.drain() {
                    return Ok(ended);
                }
                // A launcher that is gone, or that does not read any more, needs no answer.
                let _ = channel.send_now(&FromUplink::Drained, &[]);
            }
            Err(ChannelError::Closed) => return Ok(RunnerEnd::Stopped),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns the configuration of each of `queues` engines. Together their sockets use at most
/// `descriptors`.
fn limits(config: &UplinkConfig, queues: usize, descriptors: usize) -> Config {
    let mut limits = engine_config(config);
    let has_tcp = config.forwards.iter().any(|forward| forward.protocol == ForwardProtocol::Tcp);
    if !has_tcp {
        // A guest that publishes nothing keeps nearly all of its own connections.
        let kept = if config.more_ports { descriptors / LATER_CLIENTS_PART } else { 0 };
        limits.tcp.inbound_max = limits.tcp.inbound_max.min(kept);
    }
    let part = |is_used: bool| if is_used { descriptors / LATER_PORTS_PART } else { 0 };
    let later = part(config.more_ports).min(forwarded_ports::SOCKETS_MAX);
    let has_to_host = config.more_to_host || config.forwards.iter().any(|forward| forward.to_host);
    let relays = part(config.relay.is_some() || has_to_host) / relay::DESCRIPTORS;
    limits.relays_max = limits.relays_max.min(relays);
    let has_datagrams = config.relay == Some(RelayTo::Loopback) || has_to_host;
    limits.datagram_relays_max = limits.datagram_relays_max.min(part(has_datagrams));
    let relays = limits.relays_max * relay::DESCRIPTORS + limits.datagram_relays_max;
    let questions = if config.multicast.services.is_empty() { 0 } else { QUESTIONS_MAX };
    limits.fit((descriptors - later - relays).saturating_sub(questions), queues);
    limits
}

/// Returns a warning if fewer connections than expected are possible.
fn few_connections(limits: &Config, queues: usize) -> Option<String> {
    let connections = limits.tcp.flows_max * queues;
    (connections < CONNECTIONS_EXPECTED).then(|| {
        format!(
            "at most {connections} connections at a time, of which the longest idle makes room for a new \
             one: more need a higher limit of open files (`ulimit -Hn`)"
        )
    })
}

/// Creates an engine for each queue, with its counters.
fn engines(
    limits: &Config,
    own: Vec<OwnAddresses>,
    counters: &[Arc<UplinkCounters>],
    outbound: &real::Outbound,
) -> Result<Vec<Uplink>, UplinkFailure> {
    let queues = own.len();
    let udp_forwards = Arc::<UdpForwards>::default();
    own.into_iter()
        .zip(counters)
        .enumerate()
        .map(|(index, (own, counters))| {
            let mut host = RealHost::new(Arc::clone(counters))?.with_own(own)?;
            host.set_outbound(outbound.clone());
            let mut config = limits.clone();
            config.share = Share::new(index, queues, Arc::clone(&udp_forwards));
            Ok(Uplink::new(config, Box::new(host), Arc::clone(counters)))
        })
        .collect()
}

/// Returns the sources of sockets to other hosts.
fn outbound(config: &UplinkConfig) -> real::Outbound {
    let [v4, v6] = config.outbound.clone().map(|source| {
        let Outbound { address, interface } = source;
        real::Source { address, interface }
    });
    real::Outbound { v4, v6 }
}

/// Returns remarks on functions that this system does not permit.
fn remarks(config: &UplinkConfig) -> Vec<String> {
    let has = |v4| config.addresses.iter().any(|address| address.ip().is_ipv4() == v4);
    let mut remarks = Vec::new();
    if let Some(true) = has(true).then(ringfence_uplink::host::real::echo_is_denied) {
        remarks.push(with_doctor(&format!(
            "the host lets this user send no echo requests, so `ping` reaches the router alone: {}",
            PING.enable
        )));
    }
    if config.multicast.joins_nothing() {
        remarks.push(crate::multicast::NO_LINK.to_owned());
    }
    remarks
}

fn engine_config(config: &UplinkConfig) -> Config {
    let addresses: Vec<(IpAddr, u8)> =
        config.addresses.iter().map(|address| (address.ip(), address.prefix())).collect();
    let families = [true, false].map(|v4| addresses.iter().any(|(ip, _)| ip.is_ipv4() == v4));
    let upstream = config.upstream.clone().map(|proxy| UpstreamProxy::new(proxy, families));
    Config {
        mac: config.mac,
        mtu: config.mtu,
        access: Access {
            guest: addresses.iter().map(|(ip, _)| *ip).collect(),
            guest_prefixes: if config.chooses_address { chosen_from(&addresses) } else { vec![] },
            host_loopback: config.loopback.iter().map(|alias| alias.guest).collect(),
            aliases: orders::pairs(&config.aliases),
            resolvers: orders::pairs(&config.resolvers),
            name_servers: [&config.name_servers[..], &config.unoffered].concat(),
            allow_local: config.allow_local.iter().map(|local| local.0).collect(),
        },
        guest: GuestNetwork {
            mac: config.guest_mac,
            learns: config.guest_mac.is_none() || config.chooses_address,
            seen: None,
            addresses,
            gateways: config.gateways.clone(),
            own: config.own.clone(),
            name_servers: config.name_servers.clone(),
            search: config.search.clone(),
        },
        multicast: config.multicast.services.clone(),
        left_out: LeftOut(config.left_out),
        upstream,
        ..Config::default()
    }
}

/// Returns the prefixes of which a guest can choose addresses itself. Hosts choose 64 bits (RFC 4862, 5.5.3).
fn chosen_from(addresses: &[(IpAddr, u8)]) -> Vec<IpPrefix> {
    let prefix = |address: &(IpAddr, u8)| match *address {
        (ip @ IpAddr::V6(_), 64) => Some(IpPrefix::new(ip, 64).masked()),
        _ => None,
    };
    let mut found: Vec<_> = addresses.iter().filter_map(prefix).collect();
    found.dedup();
    found
}

/// Switches relays on, if they are wanted.
fn relay(
    uplink: &mut Uplink,
    config: &UplinkConfig,
    channel: &Channel,
) -> Result<(), UplinkFailure> {
    let target = match config.relay {
        Some(RelayTo::Own) => RelayTarget::Own,
        Some(RelayTo::Loopback) => RelayTarget::Loopback,
        None => return Ok(()),
    };
    let channel = channel.try_clone()?;
    uplink.relay(target, Box::new(move || channel.send_or_drop(&FromUplink::Sockets)));
    Ok(())
}

//! The process of an uplink: it has the queues of the guest's TAP, the sockets of forwarded ports, and
//! the right to open sockets in the host's network. It parses what the guest sends, so it has no other.
//!
//! It hears its orders, takes in all descriptors, enters the sandbox, and carries packets until the
//! launcher is gone.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ringfence_net::clock::Clock;
use ringfence_platform::Counters;
use ringfence_platform::tap::TapOffloads;
use ringfence_uplink::guest::GuestNetwork;
use ringfence_uplink::host::real::RealHost;
use ringfence_uplink::runner::{Ended, Runner};
use ringfence_uplink::{Access, Config, Uplink, UplinkCounters};
use rustix::io::Errno;

use super::forward::Protocol;
use super::link::{Link, LinkError, Made};
use super::{FromUplink, UplinkConfig, UplinkSockets};
use crate::driver::raise_descriptor_limit;
use crate::sys::channel::{Channel, ChannelError};
use crate::sys::sandbox::{Isolation, SandboxError};
use crate::sys::{DomainKind, STATUS_FAILED};

/// How long it looks for work before it sleeps.
const SPIN: Duration = Duration::from_micros(20);

/// Why an uplink ends before its time.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("orders: {0}")]
    Channel(#[from] ChannelError),
    #[error("orders: there is no TAP")]
    NoTap,
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("sockets: {0}")]
    Sockets(#[from] Errno),
    #[error(transparent)]
    Ended(#[from] Ended),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// The inner process of an uplink. Returns its exit status.
pub fn main() -> u8 {
    let channel = match Channel::from_stdin() {
        Ok(channel) => channel,
        Err(error) => {
            eprintln!("ringfence: {error}");
            return STATUS_FAILED;
        }
    };
    match live(&channel) {
        Ok(()) => 0,
        Err(error) => {
            // If nobody hears it the guest is gone, and so is the user's interest.
            let _ = channel.send(&FromUplink::Failed(error.to_string()), &[]);
            STATUS_FAILED
        }
    }
}

fn live(channel: &Channel) -> Result<(), Failure> {
    let (config, taps) = channel.receive::<UplinkConfig>()?;
    let mut sockets = Vec::new();
    while sockets.len() < config.forwards.len() {
        let (UplinkSockets, more) = channel.receive()?;
        if more.is_empty() {
            return Err(Failure::NoTap);
        }
        sockets.extend(more);
    }
    raise_descriptor_limit()?;
    let mut expected = vec![channel.as_fd().as_raw_fd()];
    expected.extend(taps.iter().chain(&sockets).map(AsRawFd::as_raw_fd));
    let isolation = Isolation::enter(DomainKind::Uplink, &expected)?;
    crate::sys::log::to_stderr(config.verbose);
    let made = make_link(&config, taps)?;
    isolation.lock()?;
    serve(channel, &config, made, sockets)
}

/// The link, of the first descriptors that came along. It is made of calls that are not to be made
/// later, and before anything is read of what the guest has sent.
fn make_link(config: &UplinkConfig, mut fds: Vec<OwnedFd>) -> Result<Made, Failure> {
    let device = if config.link.has_devices() { fds.pop() } else { None };
    let tap = fds.into_iter().next().ok_or(Failure::NoTap)?;
    let offloads = TapOffloads(config.offloads);
    let system = Arc::<Counters>::default();
    Ok(Link::make(&config.link, tap, device, offloads, config.mtu, &system)?)
}

fn serve(
    channel: &Channel,
    config: &UplinkConfig,
    Made { link, remark }: Made,
    sockets: Vec<OwnedFd>,
) -> Result<(), Failure> {
    let mut remarks = remarks(config);
    remarks.extend(remark);
    let counters = Arc::<UplinkCounters>::default();
    let host = RealHost::new(Arc::clone(&counters))?;
    let mut uplink = Uplink::new(engine_config(config), Box::new(host), counters);
    forward(&mut uplink, config, sockets)?;
    channel.send(&FromUplink::Up { link: link.name().to_owned(), remarks }, &[])?;
    // The launcher says nothing more: its channel is readable when it is gone.
    let ended = match link {
        Link::Tap(link) => Runner::new(uplink, link, Clock::default(), SPIN).run(channel),
        Link::Vhost(link) => Runner::new(uplink, *link, Clock::default(), SPIN).run(channel),
    };
    match ended {
        Ended::Stopped => Ok(()),
        ended => Err(ended.into()),
    }
}

/// What this system does not allow.
fn remarks(config: &UplinkConfig) -> Vec<String> {
    let has = |v4| config.addresses.iter().any(|address| address.ip().is_ipv4() == v4);
    let mut remarks = Vec::new();
    if let Some(true) = has(true).then(ringfence_uplink::host::real::echo_is_denied) {
        remarks.push(
            "the host lets this user send no echo requests, so `ping` reaches the router alone: see \
             sysctl net.ipv4.ping_group_range"
                .to_owned(),
        );
    }
    remarks
}

fn engine_config(config: &UplinkConfig) -> Config {
    let addresses: Vec<(IpAddr, u8)> =
        config.addresses.iter().map(|address| (address.ip(), address.prefix())).collect();
    Config {
        mac: config.mac,
        mtu: config.mtu,
        access: Access {
            guest: addresses.iter().map(|(ip, _)| *ip).collect(),
            host_loopback: config.loopback.iter().map(|alias| alias.guest).collect(),
            resolvers: config.resolvers.iter().map(|alias| (alias.guest, alias.host)).collect(),
        },
        guest: GuestNetwork {
            mac: Some(config.guest_mac),
            addresses,
            gateways: config.gateways.clone(),
            own: config.own.clone(),
            name_servers: config.name_servers.clone(),
            search: config.search.clone(),
        },
        ..Config::default()
    }
}

fn forward(
    uplink: &mut Uplink,
    config: &UplinkConfig,
    sockets: Vec<OwnedFd>,
) -> Result<(), Failure> {
    for (forward, socket) in config.forwards.iter().zip(sockets) {
        let own = config.addresses.iter().find(|own| own.ip().is_ipv6() == forward.ipv6);
        let Some(own) = own else { continue };
        let guest = SocketAddr::new(own.ip(), forward.guest_port);
        match forward.protocol {
            Protocol::Tcp => uplink.forward_tcp(socket, guest)?,
            Protocol::Udp => uplink.forward_udp(socket, guest)?,
        }
    }
    Ok(())
}

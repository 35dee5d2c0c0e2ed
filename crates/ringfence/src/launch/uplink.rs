//! The uplink of a guest, as its launcher sees it: what is wanted, what the host has, the sockets of
//! forwarded ports, and the orders for the process that carries packets.

use std::fmt;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, bail};

use super::options::{Link, Options, Protect, UplinkChoice};
use super::report::Reporter;
use crate::guest::{self, Address, ResolverConfig, UplinkInterface};
use crate::uplink::forward::{self, Forward, PORTS_MAX};
use crate::uplink::host::{HostNetwork, Resolver};
use crate::uplink::link::LinkOrder;
use crate::uplink::local::LocalPrefix;
use crate::uplink::plan::{Plan, PlanError, Wishes};
use crate::uplink::{BATCH, UplinkConfig, UplinkSockets};
use crate::workers::worker_count;
use ringfence_net::features::OffloadKeys;
use ringfence_sandbox::channel::{Channel, ChannelError};

/// Queues of the guest's interface, at most: their descriptors go with one message, each with one of a
/// device.
const QUEUES_MAX: usize = BATCH / 2;

/// An uplink that is planned, or up.
pub(super) struct Uplink {
    plan: Plan,
    mtu: u16,
    queues: u32,
    offloads: OffloadKeys,
    allow_local: Vec<LocalPrefix>,
    forwards: Vec<Forward>,
    sockets: Vec<OwnedFd>,
    order: LinkOrder,
    /// Of the link, one for each queue, if it has some.
    devices: Vec<OwnedFd>,
    /// How packets are carried, once they are.
    link: String,
}

impl Uplink {
    /// What the options ask for; `None` where there is to be none.
    pub(super) fn prepare(options: &Options, reporter: Reporter) -> anyhow::Result<Option<Uplink>> {
        if !is_wanted(options)? {
            return Ok(None);
        }
        let host = match HostNetwork::look() {
            Ok(host) => host,
            Err(error) if asks_for_nothing(options) => {
                reporter.summary(format_args!(
                    "no uplink: the host's network cannot be looked at ({error})"
                ));
                return Ok(None);
            }
            Err(error) => return Err(error).context("looking at the host's network"),
        };
        let wishes = Wishes {
            addresses: options.uplink_addresses.clone(),
            gateways: options.uplink_gateways.clone(),
            name_servers: options.name_servers.clone(),
            loopback: options.host_loopback.clone(),
        };
        let plan = match Plan::new(host, Resolver::of_host(), &wishes) {
            Ok(plan) => plan,
            // Nobody asked for it.
            Err(error @ PlanError::NoNetwork) if asks_for_nothing(options) => {
                reporter.summary(format_args!("no uplink: {error}"));
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let (forwards, sockets) = listen(options, &plan, reporter)?;
        let queues = worker_count(options.queues).min(QUEUES_MAX);
        let queues = u32::try_from(queues).unwrap_or(1);
        let (order, devices) = match options.link {
            Link::Vhost => {
                let (order, devices) = LinkOrder::choose(queues, true).context("--link vhost")?;
                let fine = options.protect == Protect::Fine;
                (if fine { LinkOrder::VhostFine } else { order }, devices)
            }
            // Not vhost-net by itself yet: bulk transfers to guests were not measured over it.
            Link::Auto | Link::Tap | Link::Netif => (LinkOrder::Tap, Vec::new()),
        };
        Ok(Some(Uplink {
            plan,
            mtu: options.uplink_mtu(),
            queues,
            offloads: options.offload,
            allow_local: options.allow_local.clone(),
            forwards,
            sockets,
            order,
            devices,
            link: String::new(),
        }))
    }

    /// Whether the guest could not tell the switch from the host's network: then it has the switch
    /// alone, unless an uplink was asked for.
    pub(super) fn gives_way_to(&self, switch: &[Address], options: &Options) -> bool {
        let meets = |own: &Address| self.plan.addresses.iter().any(|host| own.overlaps(*host));
        asks_for_nothing(options) && switch.iter().any(meets)
    }

    /// What the guest's init is to make.
    pub(super) fn interface(&self) -> UplinkInterface {
        let offloads = guest::carried_for_host(self.offloads).0;
        self.plan.interface(self.mtu, offloads, self.queues)
    }

    /// Whom the guest asks for names.
    pub(super) fn resolver(&self) -> ResolverConfig {
        self.plan.resolver()
    }

    /// The orders for its process.
    pub(super) fn config(&self, offloads: u32, verbose: bool) -> UplinkConfig {
        let (mac, guest_mac) = Plan::macs();
        UplinkConfig {
            mtu: self.mtu,
            offloads,
            link: self.order.clone(),
            mac,
            guest_mac,
            addresses: self.plan.addresses.clone(),
            gateways: self.plan.gateways.clone(),
            own: self.plan.own(),
            resolvers: self.plan.resolvers.clone(),
            name_servers: self.plan.name_servers.clone(),
            search: self.plan.search.clone(),
            loopback: self.plan.loopback.clone(),
            allow_local: self.allow_local.clone(),
            forwards: self.forwards.clone(),
            verbose,
        }
    }

    /// Gives its process the orders and all descriptors, which nobody else keeps.
    pub(super) fn hand_over(
        &mut self,
        channel: &Channel,
        config: &UplinkConfig,
        queues: Vec<OwnedFd>,
    ) -> Result<(), ChannelError> {
        let devices = std::mem::take(&mut self.devices);
        let fds: Vec<_> = queues.iter().chain(&devices).map(AsFd::as_fd).collect();
        channel.send(config, &fds)?;
        let sockets = std::mem::take(&mut self.sockets);
        for batch in sockets.chunks(BATCH) {
            let fds: Vec<_> = batch.iter().map(AsFd::as_fd).collect();
            channel.send(&UplinkSockets, &fds)?;
        }
        Ok(())
    }

    /// It carries packets.
    pub(super) fn is_up_over(&mut self, link: String) {
        self.link = link;
    }
}

impl fmt::Display for Uplink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Uplink { plan, link, mtu, .. } = self;
        write!(f, "{} ({}), {link}, MTU {mtu}", super::list(&plan.addresses), plan.origin)
    }
}

/// Whether options that speak of an uplink agree that there is to be one.
fn is_wanted(options: &Options) -> anyhow::Result<bool> {
    if options.protect == Protect::Fine && options.link != Link::Vhost {
        bail!("--protect fine is about the worker of vhost-net: say --link vhost as well");
    }
    let wanted = match (options.uplink, options.link) {
        (Some(UplinkChoice::Host), Link::Netif) => {
            bail!("--link netif leads to the switch, not to the host: choose auto, vhost or tap")
        }
        (Some(UplinkChoice::None), link @ (Link::Vhost | Link::Tap)) => {
            bail!("--link {link:?} leads to the host, and --uplink none says not to go there")
        }
        (Some(UplinkChoice::None), _) | (None, Link::Netif) => false,
        (Some(UplinkChoice::Host), _) | (None, _) => true,
    };
    if wanted {
        return Ok(true);
    }
    if options.switch.is_none() {
        bail!("neither a switch nor an uplink: leave out --switch none, or say --uplink host");
    }
    if asks_for_details(options) {
        bail!(
            "-p, --dns, --host-loopback, --allow-local and --uplink-… are of an uplink, and there is to be none"
        );
    }
    Ok(false)
}

/// An address that a port listens at, for people.
fn place(ip: IpAddr) -> String {
    let family = if ip.is_ipv4() { "IPv4" } else { "IPv6" };
    match ip {
        _ if ip.is_unspecified() => format!("every {family} address of the host ({ip})"),
        _ => ip.to_string(),
    }
}

fn asks_for_details(options: &Options) -> bool {
    !options.forwards.is_empty()
        || !options.host_loopback.is_empty()
        || !options.uplink_addresses.is_empty()
        || !options.uplink_gateways.is_empty()
        || !options.name_servers.is_empty()
        || !options.allow_local.is_empty()
}

fn asks_for_nothing(options: &Options) -> bool {
    options.uplink.is_none()
        && options.link == Link::Auto
        && options.switch.is_some()
        && !asks_for_details(options)
}

fn listen(
    options: &Options,
    plan: &Plan,
    reporter: Reporter,
) -> anyhow::Result<(Vec<Forward>, Vec<OwnedFd>)> {
    if options.forwards.is_empty() && !options.publish_default.is_empty() {
        bail!("--publish-default says where -p listens, and there is no -p");
    }
    let mut made = Vec::new();
    for spec in &options.forwards {
        let families = plan.families();
        let addresses = forward::addresses(spec, families, &options.publish_default);
        let has = |ip: &IpAddr| if ip.is_ipv4() { families.0 } else { families.1 };
        if addresses.is_empty() || !addresses.iter().all(has) {
            bail!("-p {spec}: the guest has no address of that family");
        }
        let places: Vec<String> = addresses.iter().map(|ip| place(*ip)).collect();
        reporter.step(format_args!("-p {spec}: listens at {}", places.join(" and ")));
        made.extend(forward::listen(spec, families, &options.publish_default)?);
        if made.len() > 2 * PORTS_MAX {
            bail!("more than {PORTS_MAX} ports cannot be forwarded to one guest");
        }
    }
    Ok(made.into_iter().unzip())
}

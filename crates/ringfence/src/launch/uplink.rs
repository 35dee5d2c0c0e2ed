//! Uplink of a guest in its launcher: options, plan, sockets of forwarded ports, configuration of
//! the uplink process.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, bail};

use super::options::{LinkChoice, Options, Protect, UplinkChoice};
use super::published_ports::PublishedPorts;
use super::report::Reporter;
use ringfence_hostnet::address::Address;
use ringfence_hostnet::causes::causes;
use ringfence_hostnet::host::{HostNetwork, Resolver, resolver_of_host};
use ringfence_hostnet::interface::{ResolverConfig, UplinkInterface};
use ringfence_net::features::OffloadKeys;
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_uplink::upstream::ProxySettings;
use ringfence_uplink_process::asking::Asker;
use ringfence_uplink_process::egress::guest::GuestEgress;
use ringfence_uplink_process::forward::{Families, Forward};
use ringfence_uplink_process::link::LinkOrder;
use ringfence_uplink_process::local::LocalPrefix;
use ringfence_uplink_process::multicast::Memberships;
use ringfence_uplink_process::multicast_groups::MulticastConfig;
use ringfence_uplink_process::network_plan::{NetworkPlan, Wishes};
use ringfence_uplink_process::orders::UplinkOrder;
use ringfence_uplink_process::queues::queues_of_uplink;
use ringfence_uplink_process::{BATCH, RelayTo, UplinkConfig, UplinkSockets};

/// An uplink that is planned or running.
pub(super) struct Uplink {
    plan: NetworkPlan,
    mtu: u16,
    queues: u32,
    offloads: OffloadKeys,
    allow_local: Vec<LocalPrefix>,
    multicast: MulticastConfig,
    /// Memberships that follow the host's links.
    memberships: Option<Memberships>,
    pub(super) egress: GuestEgress,
    /// Party that answers questions about destinations that no rule covers.
    pub(super) asker: Option<Asker>,
    /// Time limit of answers in seconds. Queries wait for them.
    asked_within: Option<u16>,
    /// Set if the options name the name servers, or a proxy takes their place.
    servers_are_given: bool,
    /// Proxy that carries connections to other hosts.
    upstream: Option<ProxySettings>,
    pub(super) ports: PublishedPorts,
    forwards: Vec<Forward>,
    sockets: Vec<OwnedFd>,
    link_choice: LinkOrder,
    /// Devices of the link, one for each queue, if it needs them.
    devices: Vec<OwnedFd>,
    /// Name of the link, once the uplink process has reported it.
    link: String,
}

impl Uplink {
    /// Plans the uplink that the options request. Returns `None` if there is none.
    pub(super) fn prepare(options: &Options, reporter: Reporter) -> anyhow::Result<Option<Uplink>> {
        // A wrong rule is reported before options that contradict each other.
        let policy = options.ask.apply(options.egress.source()?, &options.egress)?;
        options.check_questions()?;
        if !is_wanted(options)? {
            return Ok(None);
        }
        let name = options.name.clone().unwrap_or_else(|| "guest".to_owned());
        let asker = Asker::new(&options.ask, &options.egress.policy, name.clone())?;
        let egress = GuestEgress::open(policy, &options.egress, name)?
            .with_denials()
            .with_questions(options.ask.limits());
        let upstream = upstream_of(options)?;
        let host = match HostNetwork::read() {
            Ok(host) => host,
            Err(error) if asks_for_nothing(options) => {
                reporter.summary(format_args!(
                    "no uplink: the host's network cannot be looked at ({error})"
                ));
                return Ok(None);
            }
            Err(error) => return Err(error).context("looking at the host's network"),
        };
        let requested = Wishes {
            addresses: options.uplink_addresses.clone(),
            private: options.uplink_is_private,
            gateways: options.uplink_gateways.clone(),
            name_servers: options.name_servers.clone(),
            loopback: options.host_loopback.clone(),
            proxied: upstream.is_some(),
        };
        let plan = NetworkPlan::new(host, resolver_of_host(), &requested)?;
        let (families, defaults) = (plan.families(), &options.publish_default);
        let (memberships, multicast, groups) =
            Memberships::start(&options.multicast, [None, None], families)?;
        let (ports, forwards, mut sockets) =
            PublishedPorts::listen(&options.forwards, families, defaults, reporter)?;
        sockets.extend(groups);
        let queues = queues_of_uplink(options.queues);
        let (link_choice, devices) = match options.link {
            LinkChoice::Vhost => {
                let (link_choice, devices) =
                    LinkOrder::choose(queues, true).context("--link vhost")?;
                let fine = options.protect == Protect::Fine;
                (if fine { LinkOrder::VhostFine } else { link_choice }, devices)
            }
            // Not vhost-net by default yet: bulk transfers to guests were not measured over it.
            LinkChoice::Auto | LinkChoice::Tap | LinkChoice::Netif => (LinkOrder::Tap, Vec::new()),
        };
        Ok(Some(Uplink {
            plan,
            mtu: options.uplink_mtu(),
            queues,
            offloads: options.offload,
            allow_local: options.allow_local.clone(),
            multicast,
            memberships,
            egress,
            asker,
            asked_within: options.ask.ask.as_ref().map(|_| options.ask.ask_within),
            servers_are_given: !options.name_servers.is_empty() || upstream.is_some(),
            upstream,
            ports,
            forwards,
            sockets,
            link_choice,
            devices,
            link: String::new(),
        }))
    }

    /// Returns the guest's addresses on the host's network.
    pub(super) fn addresses(&self) -> &[Address] {
        &self.plan.addresses
    }

    /// Returns the families of the guest's addresses.
    pub(super) fn families(&self) -> Families {
        self.plan.families()
    }

    /// Returns `true` if the uplink must be left out: its addresses overlap with the switch's, and
    /// the options do not request it.
    pub(super) fn overlaps_with(&self, switch: &[Address], options: &Options) -> bool {
        let meets = |own: &Address| self.plan.addresses.iter().any(|host| own.overlaps(*host));
        asks_for_nothing(options) && switch.iter().any(meets)
    }

    /// Returns the configuration of the guest's interface.
    pub(super) fn interface(&self) -> UplinkInterface {
        let offloads = ringfence_guest::carried_for_host(self.offloads).0;
        self.plan.interface(self.mtu, offloads, self.queues)
    }

    /// Returns the guest's name servers.
    pub(super) fn resolver(&self) -> ResolverConfig {
        self.with_patience(self.plan.resolver())
    }

    /// Has programs wait for the answer to a query as long as a person may take to approve it.
    fn with_patience(&self, mut resolver: ResolverConfig) -> ResolverConfig {
        /// Maximum of the C library (`RES_MAXRETRANS` of resolv.h), in seconds.
        const TIMEOUT_MAX: u16 = 30;
        if let Some(within) = self.asked_within {
            // The last option of a kind is in force.
            resolver.options.push(format!("timeout:{}", within.saturating_add(1).min(TIMEOUT_MAX)));
        }
        resolver
    }

    /// Follows the name servers that the host has now, unless the options name others. The uplink process opens the way
    /// to them before the guest knows them.
    pub(super) fn follow_name_servers(
        &mut self,
        channel: &Channel,
        host: &Resolver,
    ) -> Result<(), ChannelError> {
        if self.servers_are_given || !self.plan.follow_name_servers(&host.name_servers) {
            return Ok(());
        }
        let (resolvers, offered) = (self.plan.resolvers.clone(), self.plan.name_servers.clone());
        channel
            .send_now(&UplinkOrder::NameServers { resolvers, offered, unoffered: Vec::new() }, &[])
    }

    /// Returns the memberships of `--multicast`, for their descriptor and deadline.
    pub(super) fn memberships(&self) -> Option<&Memberships> {
        self.memberships.as_ref()
    }

    /// Joins multicast groups on the links that the host has now.
    pub(super) fn follow_links(&mut self, channel: &Channel, reporter: Reporter) {
        let Some(memberships) = &mut self.memberships else { return };
        match memberships.follow(channel) {
            Ok(None) => {}
            Ok(Some(change)) => reporter.step(format_args!("{change}")),
            Err(error) => reporter.step(format_args!("{}", causes(&error))),
        }
    }

    /// Returns the resolver configuration for a guest of a host that has this one now.
    pub(super) fn resolver_for(&self, host: Resolver) -> ResolverConfig {
        let name_servers = self.plan.name_servers.clone();
        let search = if self.upstream.is_some() { Vec::new() } else { host.search };
        let resolver = ResolverConfig { name_servers, search, options: host.options };
        self.with_patience(resolver)
    }

    /// Returns the configuration of the uplink process.
    pub(super) fn config(&self, offloads: u32, verbose: bool) -> UplinkConfig {
        let (mac, guest_mac) = NetworkPlan::macs();
        UplinkConfig {
            mtu: self.mtu,
            offloads,
            link: self.link_choice.clone(),
            mac,
            guest_mac: Some(guest_mac),
            chooses_address: false,
            addresses: self.plan.addresses.clone(),
            gateways: self.plan.gateways.clone(),
            own: self.plan.own(),
            resolvers: self.plan.resolvers.clone(),
            name_servers: self.plan.name_servers.clone(),
            unoffered: Vec::new(),
            search: self.plan.search.clone(),
            loopback: self.plan.loopback.clone(),
            aliases: Vec::new(),
            allow_local: self.allow_local.clone(),
            policy: self.egress.head(),
            upstream: self.upstream.clone(),
            outbound: Default::default(),
            multicast: self.multicast.clone(),
            left_out: 0,
            forwards: self.forwards.clone(),
            more_ports: true,
            more_to_host: false,
            relay: Some(RelayTo::Loopback),
            captures: false,
            verbose,
        }
    }

    /// Sends the configuration and all descriptors to the uplink process, and closes them here.
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
        self.egress.send_rules(channel)
    }

    /// Records the link over which the uplink process carries packets.
    pub(super) fn is_up_over(&mut self, link: String) {
        self.link = link;
    }
}

impl fmt::Display for Uplink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Uplink { plan, link, mtu, .. } = self;
        write!(
            f,
            "{}: {} ({}), {link}, MTU {mtu}",
            self.interface().interface.name,
            ringfence_hostnet::address::list(&plan.addresses),
            plan.origin
        )
    }
}

/// Returns the proxy that the options request.
fn upstream_of(options: &Options) -> anyhow::Result<Option<ProxySettings>> {
    let upstream = options.egress.proxy.resolve()?;
    if upstream.is_some() && !options.name_servers.is_empty() {
        bail!("--dns: behind --upstream-proxy no name server is asked; the proxy looks names up");
    }
    Ok(upstream)
}

/// Returns `true` if there is to be an uplink. Fails if options contradict each other.
fn is_wanted(options: &Options) -> anyhow::Result<bool> {
    if options.protect == Protect::Fine && options.link != LinkChoice::Vhost {
        bail!("--protect fine is about the worker of vhost-net: say --link vhost as well");
    }
    let wanted = match (options.uplink, options.link) {
        (Some(UplinkChoice::Host), LinkChoice::Netif) => {
            bail!("--link netif leads to the switch, not to the host: choose auto, vhost or tap")
        }
        (Some(UplinkChoice::None), link @ (LinkChoice::Vhost | LinkChoice::Tap)) => {
            bail!("--link {link:?} leads to the host, and --uplink none says not to go there")
        }
        (Some(UplinkChoice::None), _) | (None, LinkChoice::Netif) => false,
        (Some(UplinkChoice::Host), _) | (None, _) => true,
    };
    if options.uplink_is_private && !options.uplink_addresses.is_empty() {
        bail!("--uplink-address private has addresses of its own: leave out the others");
    }
    if wanted {
        return Ok(true);
    }
    if asks_for_details(options) {
        bail!(
            "-p, --dns, --host-loopback, --allow-local, --multicast, --uplink-… and the options about egress are of an \
             uplink, and there is to be none"
        );
    }
    Ok(false)
}

fn asks_for_details(options: &Options) -> bool {
    !options.forwards.is_empty()
        || !options.host_loopback.is_empty()
        || !options.uplink_addresses.is_empty()
        || options.uplink_is_private
        || !options.uplink_gateways.is_empty()
        || !options.name_servers.is_empty()
        || !options.allow_local.is_empty()
        || !options.multicast.is_empty()
        || options.egress.are_given()
        || options.ask.ask.is_some()
}

fn asks_for_nothing(options: &Options) -> bool {
    options.uplink.is_none()
        && options.link == LinkChoice::Auto
        && options.has_switch()
        && !asks_for_details(options)
}

//! Uplink engine: dispatches frames of the guest to the protocols, and collects their output.
//!
//! See the [crate] for the order of calls in a round.

use core::net::IpAddr;
use core::time::Duration;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringfence_frame::{Batch, FrameView};
use ringfence_offload::Layers;
use ringfence_offload::meta::Checksum;
use ringfence_offload::packet::{Network, Transport};
use ringfence_sys::numbers::bounded;
use rustix::io::Errno;

use crate::config::{Config, LeftOut};
use crate::context::Context;
use crate::counters::UplinkCounters;
use crate::egress::Egress;
use crate::forward::{Destination, ForwardId, Forwards};
use crate::held::HeldPackets;
use crate::host::{Host, OwnerKind, Ready};
use crate::icmp::Icmp;
use crate::link::{Committed, GuestLink, Slots};
use crate::name_queries::NameQueries;
use crate::name_query::NameQuery;
use crate::ndp::Advertisements;
use crate::packet::Packet;
use crate::reassembly::Reassembly;
use crate::relay::{Refill, RelayTarget, Relays};
use crate::replies::Replies;
use crate::share::{Handoff, Visited};
use crate::tcp::{SegmentRun, Tcp};
use crate::udp::Udp;
use crate::udp::multicast::Multicast;
use crate::udp::multicast::service::Group;
use crate::udp::relay::DatagramRelays;

/// Uplink of one guest: guest packets on one side, host sockets on the other.
pub struct Uplink {
    config: Config,
    /// Egress policy that this engine applies, and its version.
    egress: Option<Arc<Egress>>,
    policy_version: u64,
    /// Version of the name servers that this engine uses.
    servers_version: u64,
    host: Box<dyn Host>,
    replies: Replies,
    /// Queries to name servers that are to be sent over TCP.
    queries: Vec<NameQuery>,
    name_queries: NameQueries,
    /// Packets that wait for the answer to a question of the egress policy.
    held: HeldPackets,
    /// Number of questions that were over when the packets were looked at.
    settled: u64,
    counters: Arc<UplinkCounters>,
    tcp: Tcp,
    udp: Udp,
    icmp: Icmp,
    forwards: Forwards,
    relays: Relays,
    datagram_relays: DatagramRelays,
    multicast: Multicast,
    reassembly: Reassembly,
    advertisements: Advertisements,
    /// Frames and connections for other engines, with the engine's index.
    handoffs: Vec<(usize, Handoff)>,
    /// Engines that do not have the connection of the frame that was handed over. Empty for frames of the link.
    visited: Visited,
    ready: Vec<Ready>,
    /// Set if `ready` has the host's events of now.
    has_events: bool,
}

/// Borrows the engine's parts as a [`Context`].
macro_rules! context {
    ($self:ident, $now:expr) => {
        Context {
            config: &$self.config,
            egress: &$self.egress,
            host: &mut *$self.host,
            replies: &mut $self.replies,
            queries: &mut $self.queries,
            held: &mut $self.held,
            counters: &$self.counters,
            now: $now,
        }
    };
}

mod asking;
mod changes;
mod names;
mod sharing;
mod waiting;

impl Uplink {
    /// Creates an uplink that uses the sockets of `host`.
    pub fn new(config: Config, host: Box<dyn Host>, counters: Arc<UplinkCounters>) -> Uplink {
        let (policy_version, egress) = config.policy.read();
        let tcp = Tcp::new(&config);
        let udp = Udp::new(config.udp_flows_max);
        let icmp = Icmp::new(config.icmp_flows_max);
        let relays = Relays::new(config.relays_max);
        let datagram_relays = DatagramRelays::new(config.datagram_relays_max);
        let mut uplink = Uplink {
            config,
            egress,
            policy_version,
            servers_version: 0,
            host,
            replies: Replies::default(),
            queries: Vec::new(),
            name_queries: NameQueries::default(),
            held: HeldPackets::default(),
            settled: 0,
            counters,
            tcp,
            udp,
            icmp,
            forwards: Forwards::default(),
            relays,
            datagram_relays,
            multicast: Multicast::default(),
            reassembly: Reassembly::default(),
            advertisements: Advertisements::default(),
            handoffs: Vec::new(),
            visited: Visited::default(),
            ready: Vec::new(),
            has_events: false,
        };
        if uplink.config.share.index == 0 && !uplink.config.multicast.is_empty() {
            uplink.publish_udp_ports();
        }
        uplink
    }

    /// Returns the uplink's counters.
    pub fn counters(&self) -> &Arc<UplinkCounters> {
        &self.counters
    }

    /// Returns the uplink's configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the number of TCP connections, in any state.
    pub fn tcp_flows(&self) -> usize {
        self.tcp.len()
    }

    /// Returns the number of UDP associations.
    pub fn udp_flows(&self) -> usize {
        self.udp.len()
    }

    /// Forwards connections of a listening socket. For a destination in the guest, its hardware address must be known
    /// ([`crate::guest::GuestNetwork::mac`]).
    ///
    /// # Errors
    ///
    /// Returns the host's error if it does not accept the socket.
    pub fn forward_tcp(&mut self, socket: OwnedFd, to: Destination) -> Result<ForwardId, Errno> {
        self.forwards.add(socket, to, &mut context!(self, Duration::ZERO))
    }

    /// Forwards datagrams of a bound socket.
    ///
    /// # Errors
    ///
    /// Returns the host's error if it does not accept the socket.
    pub fn forward_udp(&mut self, socket: OwnedFd, to: Destination) -> Result<ForwardId, Errno> {
        let guest = match to {
            Destination::Guest(guest) => guest,
            Destination::Host(to) => {
                let context = &mut context!(self, Duration::ZERO);
                return self.datagram_relays.listen(socket, to, context);
            }
        };
        let id = self.udp.listen(socket, guest, &mut context!(self, Duration::ZERO))?;
        self.publish_udp_ports();
        Ok(id)
    }

    /// Publishes the guest's ports whose datagrams this engine alone can send.
    fn publish_udp_ports(&mut self) {
        let mut ports = self.udp.forwarded_ports();
        ports.extend(self.config.multicast.iter().map(|service| service.port()));
        self.config.share.set_udp_forwards(ports);
    }

    /// Carries the datagrams of a multicast group, for a service of [`Config::multicast`]. The socket has joined the
    /// group, and is bound to its address and restricted to its interface.
    ///
    /// # Errors
    ///
    /// Returns the host's error if it does not accept the socket.
    pub fn join(&mut self, socket: OwnedFd, group: Group) -> Result<(), Errno> {
        self.multicast.join(socket, group, &mut context!(self, Duration::ZERO))
    }

    /// Closes the sockets of all multicast groups, and of questions that may still be answered.
    pub fn leave_groups(&mut self) {
        self.multicast.leave();
    }

    /// Closes the socket of a forwarded port. TCP connections that it has accepted stay. UDP associations of
    /// its clients end, because their answers left by that socket.
    pub fn remove_forward(&mut self, id: ForwardId) {
        match id.0.kind {
            OwnerKind::TcpListener => return self.forwards.remove(id),
            OwnerKind::RelayListener => return self.datagram_relays.unlisten(id),
            _ => {}
        }
        self.datagram_relays.unforward(id);
        self.udp.unlisten(id, &mut context!(self, Duration::ZERO));
        self.publish_udp_ports();
    }

    /// Relays connections from the host's loopback to forwarded ports, and datagrams if they lead to the guest's loopback.
    /// `refill` asks for sockets of the guest's
    /// network, which arrive by [`add_relay_sockets`](Self::add_relay_sockets). The first ones come unasked.
    pub fn relay(&mut self, target: RelayTarget, refill: Refill) {
        self.relays.enable(target, refill);
        if target == RelayTarget::Loopback {
            self.datagram_relays.enable();
        }
    }

    /// Adds sockets of the guest's network. None at all switches relays off.
    pub fn add_relay_sockets(&mut self, sockets: Vec<OwnedFd>) {
        let streams = self.datagram_relays.take_sockets(sockets);
        self.relays.add_sockets(streams);
    }

    /// Handles the frames at the given indices of a batch. Nothing refers to the batch after the return.
    pub fn input(&mut self, batch: &Batch, frames: &[u32], now: Duration) {
        self.follow_changes(now);
        self.config.share.refresh();
        let mut run = SegmentRun::default();
        for frame in batch.select(frames) {
            self.counters.frames_in.add(1);
            self.frame(frame, &mut run, now);
        }
        self.tcp.finish_input(&mut run, &mut context!(self, now));
        self.udp.finish_input(&mut context!(self, now));
        self.carry_name_queries(now);
    }

    fn frame<'a>(&mut self, frame: FrameView<'a>, run: &mut SegmentRun<'a>, now: Duration) {
        let counters = &self.counters;
        let len = bounded(frame.len(), u32::MAX);
        let Ok(layers) = Layers::parse(frame.header(), len) else {
            return counters.drop_malformed.add(1);
        };
        let to = frame.header().first_chunk::<6>().copied().unwrap_or_default();
        let is_group = to[0] & 1 != 0;
        if to != self.config.mac && !is_group {
            return counters.drop_not_for_us.add(1);
        }
        if layers.network() == Network::Arp {
            return crate::arp::input(frame.header(), &mut context!(self, now));
        }
        let Some(packet) = Packet::read(frame, layers) else {
            return counters.drop_unknown.add(1);
        };
        let is_link_protocol = self.is_link_protocol(&packet);
        if self.is_left_out(&packet, is_link_protocol) {
            return self.counters.drop_left_out.add(1);
        }
        if is_link_protocol {
            return self.link_protocol(&packet, now);
        }
        self.packet(&packet, run, now);
    }

    fn packet<'a>(&mut self, packet: &Packet<'a>, run: &mut SegmentRun<'a>, now: Duration) {
        if Multicast::concerns(packet, &self.config) {
            if self.config.share.index != 0 {
                return self.hand_over(0, packet, Visited::default());
            }
            if !has_valid_checksum(packet) {
                return self.counters.drop_checksum.add(1);
            }
            if self.multicast.input(packet, &mut context!(self, now)) {
                return;
            }
        }
        let counters = &self.counters;
        if !self.config.access.source_is_allowed(packet.source) {
            return counters.drop_forged_source.add(1);
        }
        if self.config.guest.learns {
            self.learn(packet.mac, packet.source);
        }
        let counters = &self.counters;
        if matches!(packet.layers.network(), Network::Ipv4(ip) if ip.header_len > 20) {
            return counters.drop_options.add(1);
        }
        if packet.destination.is_multicast() || packet.destination == IpAddr::from([255; 4]) {
            return counters.drop_multicast.add(1);
        }
        if matches!(packet.layers.network(), Network::Ipv6(ip) if ip.routed) {
            return counters.drop_routed.add(1);
        }
        let share = &self.config.share;
        if packet.layers.is_fragment() {
            if share.index != 0 {
                return self.hand_over(0, packet, Visited::default());
            }
            return self.fragment(packet, run, now);
        }
        if !has_valid_checksum(packet) {
            return counters.drop_checksum.add(1);
        }
        if share.of > 1
            && let Some((engine, visited)) = self.other_owner(packet)
        {
            return self.hand_over(engine, packet, visited);
        }
        match packet.layers.transport() {
            Transport::Tcp(_) => self.tcp.input(packet, run, &mut context!(self, now)),
            Transport::Udp(_) => self.udp.input(packet, &mut context!(self, now)),
            Transport::Icmp(_) | Transport::Icmpv6(_) => {
                self.icmp.input(packet, &mut context!(self, now));
            }
            _ => counters.drop_unknown.add(1),
        }
    }

    /// Handles a fragment, and the whole datagram once no fragment is missing.
    fn fragment(&mut self, packet: &Packet<'_>, run: &mut SegmentRun<'_>, now: Duration) {
        let Some(whole) = self.reassembly.take(packet, &context!(self, now)) else { return };
        // Earlier segments are sent first.
        self.tcp.finish_input(run, &mut context!(self, now));
        let mut run = SegmentRun::default();
        // The joined packet is no fragment, so the recursion ends here.
        whole.iter().for_each(|frame| self.frame(frame, &mut run, now));
        self.tcp.finish_input(&mut run, &mut context!(self, now));
    }

    /// Returns `true` for neighbour discovery and DHCP, which may use source addresses that other packets
    /// may not.
    fn is_link_protocol(&self, packet: &Packet<'_>) -> bool {
        let port = packet.transport().get(2..4).map(|port| u16::from_be_bytes([port[0], port[1]]));
        match packet.layers.transport() {
            _ if packet.layers.is_fragment() => false,
            Transport::Icmpv6(icmp) => crate::ndp::is_neighbour_discovery(icmp.kind),
            Transport::Udp(_) if packet.source.is_ipv4() => port == Some(crate::dhcp::SERVER),
            Transport::Udp(_) => {
                port == Some(crate::dhcpv6::SERVER)
                    && packet.destination == IpAddr::V6(crate::dhcpv6::SERVERS)
            }
            _ => false,
        }
    }

    /// Returns `true` for a packet of a protocol that this uplink leaves out.
    fn is_left_out(&self, packet: &Packet<'_>, is_link_protocol: bool) -> bool {
        let left_out = self.config.left_out;
        if left_out == LeftOut::default() {
            return false;
        }
        let protocol = match packet.layers.transport() {
            Transport::Icmpv6(icmp)
                if is_link_protocol && crate::ndp::asks_for_router(icmp.kind) =>
            {
                return left_out.contains(LeftOut::NDP)
                    || left_out.contains(LeftOut::ROUTER_ADVERTISEMENTS);
            }
            Transport::Icmpv6(_) if is_link_protocol => LeftOut::NDP,
            _ if is_link_protocol && packet.source.is_ipv4() => LeftOut::DHCP,
            _ if is_link_protocol => LeftOut::DHCPV6,
            Transport::Tcp(_) => LeftOut::TCP,
            Transport::Udp(_) => LeftOut::UDP,
            Transport::Icmp(_) | Transport::Icmpv6(_) => LeftOut::ICMP,
            _ => return false,
        };
        left_out.contains(protocol)
    }

    fn link_protocol(&mut self, packet: &Packet<'_>, now: Duration) {
        if !has_valid_checksum(packet) {
            return self.counters.drop_checksum.add(1);
        }
        let context = &mut context!(self, now);
        match packet.layers.transport() {
            Transport::Icmpv6(_) => crate::ndp::input(packet, context),
            _ if packet.source.is_ipv4() => crate::dhcp::input(packet, context),
            _ => crate::dhcpv6::input(packet, context),
        }
    }

    /// Handles the events of host sockets. Returns their number.
    ///
    /// # Errors
    ///
    /// Returns the host's error, after which the host cannot be used.
    pub fn poll_host(&mut self, now: Duration) -> Result<usize, Errno> {
        self.follow_changes(now);
        if !core::mem::take(&mut self.has_events) {
            self.host.poll(&mut self.ready, Some(Duration::ZERO))?;
        }
        let mut events = core::mem::take(&mut self.ready);
        let count = events.len();
        for ready in events.drain(..) {
            match ready.owner.kind {
                OwnerKind::Tcp => self.tcp.ready(ready, &mut context!(self, now)),
                OwnerKind::Udp | OwnerKind::UdpListener => {
                    self.udp.ready(ready, &mut context!(self, now));
                }
                OwnerKind::Icmp => self.icmp.ready(ready, &mut context!(self, now)),
                OwnerKind::TcpListener => self.forwards.ready(ready),
                OwnerKind::Addresses => {
                    self.close_forbidden(now);
                    self.udp.close_without_source(&mut context!(self, now));
                    self.icmp.close_without_source(&mut context!(self, now));
                }
                OwnerKind::Relay | OwnerKind::RelayOuter => self.relays.ready(ready),
                OwnerKind::RelayListener | OwnerKind::RelayClient => {
                    self.datagram_relays.ready(ready);
                }
                OwnerKind::MulticastGroup | OwnerKind::MulticastQuestion => {
                    self.multicast.ready(ready);
                }
                OwnerKind::Dns => self.name_queries.ready(ready, &mut context!(self, now)),
                // Only a runner that waits by `wait_host` adds files, and it takes their events.
                OwnerKind::Runner => {}
            }
        }
        self.ready = events;
        let (more, refused) = self.relays.run(&mut context!(self, now));
        for accepted in refused {
            let context = &mut context!(self, now);
            crate::forward::open(accepted, &mut self.tcp, &mut self.handoffs, context);
        }
        let more = more + self.datagram_relays.run(&mut self.udp, &mut context!(self, now));
        let more = more + self.multicast.run(&mut context!(self, now));
        self.carry_name_queries(now);
        Ok(count + more)
    }

    /// Closes flows of the guest that may not stay: to addresses that became the host's own, or that a new egress
    /// policy denies.
    fn close_forbidden(&mut self, now: Duration) {
        self.tcp.close_forbidden(&mut context!(self, now));
        self.udp.close_forbidden(&mut context!(self, now));
        self.icmp.close_forbidden(&mut context!(self, now));
    }

    /// Handles all timers that are due.
    pub fn run_timers(&mut self, now: Duration) {
        self.tcp.run_timers(&mut context!(self, now));
        self.forwards.run_timers(now);
        self.name_queries.run_timers(&mut context!(self, now));
        self.held.run_timers(now);
        self.follow_answers(now);
        self.carry_name_queries(now);
        self.udp.run_timers(&mut context!(self, now));
        self.datagram_relays.run_timers(&mut context!(self, now));
        self.multicast.run_timers(&context!(self, now));
        self.icmp.run_timers(&mut context!(self, now));
        self.reassembly.forget(&context!(self, now));
        self.advertisements.run_timers(&mut context!(self, now));
    }

    /// Returns the time at which [`run_timers`](Self::run_timers) must be called next.
    pub fn deadline(&self) -> Option<Duration> {
        let all = [
            self.tcp.deadline(),
            self.forwards.deadline(),
            self.name_queries.deadline(),
            self.held.deadline(),
            self.udp.deadline(),
            self.datagram_relays.deadline(),
            self.multicast.deadline(),
            self.icmp.deadline(),
            self.reassembly.deadline(),
            self.advertisements.deadline(),
        ];
        all.into_iter().flatten().min()
    }

    /// Sends replies, and data from sockets, until the link has no room or the round's limits are reached.
    /// Returns `true` if more can be sent.
    pub fn output(&mut self, link: &mut dyn GuestLink, now: Duration) -> bool {
        let mut more = !self.send_replies(link);
        if !more {
            more = self.forwards.accept(
                &mut self.tcp,
                &mut self.relays,
                &mut self.handoffs,
                &mut context!(self, now),
            );
            let relays = &mut self.datagram_relays;
            more |= self.udp.output(link, relays, &mut context!(self, now));
            if relays.take_need_of_sockets() {
                self.relays.request_sockets();
            }
            more |= self.icmp.output(link, &mut context!(self, now));
            more |= self.tcp.output(link, &mut context!(self, now));
            // Flows that ended during output left resets.
            more |= !self.send_replies(link);
            // A datagram of a name server may have been incomplete.
            more |= self.carry_name_queries(now);
        }
        link.flush();
        more
    }

    /// Sends queued replies. Returns `false` if the link has no room for all of them.
    fn send_replies(&mut self, link: &mut dyn GuestLink) -> bool {
        self.counters.drop_reply.add(self.replies.take_dropped());
        while let Some((frame, meta)) = self.replies.front() {
            let mut slots = Slots::new();
            link.reserve(1, frame.len(), &mut slots);
            let Some(room) = slots.first_mut().and_then(|slot| slot.get_mut(..frame.len())) else {
                return false;
            };
            room.copy_from_slice(frame);
            let done = Committed { len: frame.len(), meta };
            drop(slots);
            link.commit(&[done]);
            self.counters.frames_out.add(1);
            self.replies.pop();
        }
        true
    }

    /// Prepares resources for the next round. Called after output.
    pub fn prepare(&mut self) {
        self.host.prepare();
    }

    /// Returns a descriptor that is readable when [`poll_host`](Self::poll_host) has events.
    pub fn wait_fd(&self) -> BorrowedFd<'_> {
        self.host.wait_fd()
    }
}

/// Returns `true` if the transport checksum is valid. A packet that never left memory needs no check.
fn has_valid_checksum(packet: &Packet<'_>) -> bool {
    match packet.frame.meta().checksum {
        Checksum::Partial { .. } | Checksum::Verified => true,
        Checksum::None => crate::packet::has_valid_checksum(packet),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::NameServers;
    use crate::emit::Ends;
    use crate::host::scripted::ScriptedHost;
    use ringfence_offload::OffloadMeta;
    use ringfence_offload::packet::protocol;

    const NOW: Duration = Duration::from_secs(1);

    /// Sends an empty datagram to port 53.
    fn query(uplink: &mut Uplink, to: IpAddr) {
        let (from, to_mac) = (IpAddr::from([10, 0, 0, 2]), uplink.config().mac);
        let ends = Ends { from_mac: [2, 0, 0, 0, 0, 2], to_mac, from, to };
        let mut frame = vec![0; ends.header_len()];
        for field in [4000_u16, 53, 8, 0] {
            frame.extend_from_slice(&field.to_be_bytes());
        }
        ends.write(&mut frame, protocol::UDP, 8, 1).unwrap();
        let meta = OffloadMeta { checksum: Checksum::Verified, gso: None };
        uplink.frame_alone(&frame, meta, NOW);
    }

    #[test]
    fn association_whose_source_address_the_host_has_lost_is_opened_again() {
        let host = ScriptedHost::new(8).unwrap();
        let set_addresses = host.addresses();
        let (old, new) = (IpAddr::from([203, 0, 113, 2]), IpAddr::from([203, 0, 113, 3]));
        set_addresses(vec![old, new]);
        let mut uplink = Uplink::new(Config::default(), Box::new(host), Arc::default());
        let peer = IpAddr::from([198, 51, 100, 1]);
        query(&mut uplink, peer);
        uplink.poll_host(NOW).unwrap();
        assert_eq!(uplink.udp_flows(), 1, "the address stayed");
        set_addresses(vec![new]);
        uplink.poll_host(NOW).unwrap();
        assert_eq!(uplink.udp_flows(), 0);
        query(&mut uplink, peer);
        set_addresses(vec![new, old]);
        uplink.poll_host(NOW).unwrap();
        assert_eq!((uplink.udp_flows(), uplink.counters().udp_opened.get()), (1, 2));
    }

    #[test]
    fn association_with_a_replaced_name_server_ends() {
        let stand_in = IpAddr::from([169, 254, 53, 1]);
        let servers = |host: [u8; 4]| NameServers {
            resolvers: vec![(stand_in, host.into())],
            offered: vec![stand_in],
            unoffered: vec![[192, 0, 2, 60].into()],
        };
        let mut config = Config::default();
        config.access.resolvers = servers([192, 0, 2, 53]).resolvers;
        let host = ScriptedHost::new(8).unwrap();
        let mut uplink = Uplink::new(config, Box::new(host), Arc::default());
        query(&mut uplink, stand_in);
        assert_eq!(uplink.udp_flows(), 1);
        uplink.set_name_servers(servers([192, 0, 2, 53]), NOW);
        assert_eq!(uplink.udp_flows(), 1);
        uplink.set_name_servers(servers([192, 0, 2, 54]), NOW);
        assert_eq!(uplink.udp_flows(), 0);
        query(&mut uplink, stand_in);
        assert_eq!(uplink.udp_flows(), 1);
        assert_eq!(uplink.config().guest.name_servers, [stand_in]);
        assert!(uplink.config().access.is_name_server(([192, 0, 2, 60], 53).into()));
        uplink.set_name_servers(NameServers::default(), NOW);
        assert_eq!(uplink.udp_flows(), 0, "an address that stands for nothing is refused");
        assert!(uplink.config().guest.name_servers.is_empty());
    }
}

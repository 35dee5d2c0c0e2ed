//! Counters of an uplink. One thread writes, any thread may read.

use ringfence_sys::counters::Counter;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        /// Running totals of an uplink.
        #[derive(Debug, Default)]
        pub struct UplinkCounters { $($(#[$doc])* pub $name: Counter,)* }

        impl UplinkCounters {
            /// Iterates over all counters with their names.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name.get()),)*].into_iter()
            }
        }
    };
}

impl UplinkCounters {
    /// Returns the payload bytes in both directions.
    pub(crate) fn bytes(&self) -> u64 {
        let all = [
            &self.tcp_bytes_in,
            &self.tcp_bytes_out,
            &self.udp_bytes_in,
            &self.udp_bytes_out,
            &self.relay_bytes,
        ];
        all.into_iter().fold(0, |sum, bytes| sum.wrapping_add(bytes.get()))
    }
}

counters! {
    /// Frames received from the guest.
    frames_in;
    /// Frames sent to the guest.
    frames_out;
    /// System calls on sockets.
    syscalls;
    /// Times that the thread slept until there was work.
    sleeps;
    /// Frames dropped: headers are inconsistent or truncated.
    drop_malformed;
    /// Frames dropped: unknown protocol.
    drop_unknown;
    /// Packets dropped: protocol left out by configuration.
    drop_left_out;
    /// Frames dropped: other hardware address.
    drop_not_for_us;
    /// Packets dropped: source address not permitted.
    drop_forged_source;
    /// Packets dropped: destination without meaning outside the guest.
    drop_unreachable;
    /// Packets dropped: destination is the host's own or link-local, and not permitted.
    drop_local;
    /// Packets dropped: no TCP, so the upstream proxy does not carry them.
    drop_not_proxied;
    /// Flows that the egress policy allowed.
    egress_allowed;
    /// Flows that the egress policy denied.
    egress_denied;
    /// Connections that the egress policy ended because of their first bytes.
    egress_hellos_denied;
    /// Allowed connections and associations that ended because their bytes reached the limit of a rule.
    egress_limits;
    /// Datagrams dropped under the egress policy: QUIC that no key opens, or too many before the verdict.
    egress_datagrams_lost;
    /// Packets lost that should have waited for the answer to a question.
    egress_packets_unheld;
    /// DNS queries that the egress policy allowed.
    egress_queries;
    /// DNS queries that the egress policy refused.
    egress_queries_refused;
    /// DNS answers refused: a private address for a public name.
    egress_rebinding;
    /// Datagrams, echo replies and error reports dropped: not of the socket's peer.
    drop_stranger;
    /// Fragments received from the guest.
    fragments_in;
    /// Datagrams joined from fragments.
    fragments_joined;
    /// Fragments dropped: inconsistent with others, or too many gaps.
    drop_fragment;
    /// Incomplete datagrams dropped: expired or evicted.
    drop_incomplete;
    /// Packets dropped: IPv6 routing header.
    drop_routed;
    /// Packets dropped: wrong checksum.
    drop_checksum;
    /// Frames and connections handed over to another engine.
    handed_over;
    /// Frames and connections dropped: the other engine's queue is full.
    drop_handed;
    /// Replies dropped: reply queue is full.
    drop_reply;

    /// UDP associations opened by the guest.
    udp_opened;
    /// UDP associations opened from outside.
    udp_accepted;
    /// UDP associations that could not be opened, and datagrams that the host refused.
    udp_refused;
    /// UDP associations evicted by others.
    udp_evicted;
    /// UDP associations closed after their idle time.
    udp_aged;
    /// Datagrams dropped: socket or link is full.
    udp_full;
    /// UDP datagrams received from the guest.
    udp_datagrams_in;
    /// UDP datagrams sent to the guest.
    udp_datagrams_out;
    /// Payload bytes of UDP datagrams from the guest.
    udp_bytes_in;
    /// Payload bytes of UDP datagrams to the guest.
    udp_bytes_out;
    /// Echo flows opened by the guest.
    icmp_opened;
    /// Echo flows that the host refused.
    icmp_refused;
    /// Echo flows evicted by others.
    icmp_evicted;
    /// Echo requests sent to the host.
    icmp_requests;
    /// Echo replies sent to the guest.
    icmp_answers;
    /// ICMP messages ignored: no socket can use them.
    icmp_ignored;
    /// ICMP errors sent to the guest.
    icmp_errors;
    /// ARP replies sent to the guest.
    arp_answers;
    /// Neighbour and router advertisements sent to the guest.
    ndp_answers;
    /// DHCP replies sent to the guest.
    dhcp_answers;
    /// DHCPv6 replies sent to the guest.
    dhcpv6_answers;
    /// Datagrams of the guest sent to multicast groups, or to hosts that have asked there.
    multicast_in;
    /// Datagrams of multicast groups sent to the guest, and answers to its questions.
    multicast_out;
    /// Datagrams of multicast groups dropped: rate, length, a full queue, or the host refused them.
    multicast_dropped;
    /// Packets dropped: multicast or broadcast destination.
    drop_multicast;
    /// Packets dropped: IPv4 options.
    drop_options;

    /// TCP connections opened by the guest.
    tcp_opened;
    /// TCP connections opened from outside.
    tcp_accepted;
    /// Attempts to accept a connection that failed, such as for lack of descriptors.
    accept_failed;
    /// TCP connections closed for any reason.
    tcp_closed;
    /// TCP connections that were refused or failed.
    tcp_refused;
    /// TCP connections that the upstream proxy has opened.
    tcp_proxied;
    /// TCP connections that the upstream proxy has refused, or that could not reach it.
    tcp_proxy_failed;
    /// TCP connections evicted by others.
    tcp_evicted;
    /// TCP segments that belong to no connection.
    tcp_stray;
    /// TCP segments outside the receive window.
    tcp_out_of_window;
    /// TCP segments beyond a gap.
    tcp_out_of_order;
    /// Payload bytes that a socket refused although the offered window covered them.
    tcp_overcommitted;
    /// Payload bytes of these that were kept until the socket had room.
    tcp_backlog_in;
    /// Kept payload bytes that the socket took, or that were dropped with their connection.
    tcp_backlog_out;
    /// TCP segments retransmitted to the guest.
    tcp_retransmitted;
    /// TCP retransmission timeouts that expired.
    tcp_timeouts;
    /// TCP payload bytes from the guest.
    tcp_bytes_in;
    /// TCP payload bytes to the guest, retransmissions included.
    tcp_bytes_out;
    /// Connections between the host's loopback and the guest's that bypass the link.
    relays_opened;
    /// Payload bytes of these connections, in both directions.
    relay_bytes;
}

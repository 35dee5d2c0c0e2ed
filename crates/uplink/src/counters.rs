//! What an uplink counts. One thread writes, any thread may read.

use ringfence_sys::counters::Counter;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        /// Running totals of an uplink.
        #[derive(Debug, Default)]
        pub struct UplinkCounters { $($(#[$doc])* pub $name: Counter,)* }

        impl UplinkCounters {
            /// Each counter by its name.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name.get()),)*].into_iter()
            }
        }
    };
}

impl UplinkCounters {
    /// Octets of payload, both ways.
    pub(crate) fn octets(&self) -> u64 {
        let all =
            [&self.tcp_bytes_in, &self.tcp_bytes_out, &self.udp_bytes_in, &self.udp_bytes_out];
        all.into_iter().fold(0, |sum, octets| sum.wrapping_add(octets.get()))
    }
}

counters! {
    /// Frames from the guest.
    frames_in;
    /// Frames to the guest.
    frames_out;
    /// System calls on sockets.
    syscalls;
    /// Frames whose headers contradict themselves or end too early.
    drop_malformed;
    /// Frames of a protocol that is not known.
    drop_unknown;
    /// Frames to another hardware address.
    drop_not_for_us;
    /// Packets with an address that the guest may not send from.
    drop_forged_source;
    /// Packets to an address that stands for nothing.
    drop_unreachable;
    /// Packets to an address of the host itself, or of its link, that the guest may not reach.
    drop_local;
    /// Datagrams, echo replies and reports at a connected socket that are not of its peer.
    drop_stranger;
    /// Fragments.
    fragments_in;
    /// Datagrams that were put together of fragments.
    fragments_joined;
    /// Fragments that contradict others, and what had come of their datagram.
    drop_fragment;
    /// Datagrams of which some fragments did not come, or not in time.
    drop_incomplete;
    /// Packets that ask for a route of their own.
    drop_routed;
    /// Packets with a wrong checksum.
    drop_checksum;
    /// Frames and connections that were another engine's.
    handed_over;
    /// The same, where that one had no room for them.
    drop_handed;
    /// Answers for which there was no room.
    drop_reply;

    /// UDP conversations that the guest began.
    udp_opened;
    /// UDP conversations that began outside.
    udp_accepted;
    /// UDP conversations that did not come about, and datagrams that the host refused.
    udp_refused;
    /// UDP conversations that made room for others.
    udp_evicted;
    /// UDP conversations that ended because nothing was said.
    udp_aged;
    /// Datagrams for which a socket, or the link, had no room.
    udp_full;
    /// Datagrams from the guest.
    udp_datagrams_in;
    /// Datagrams to the guest.
    udp_datagrams_out;
    /// Octets of datagrams from the guest.
    udp_bytes_in;
    /// Octets of datagrams to the guest.
    udp_bytes_out;
    /// Echo conversations.
    icmp_opened;
    /// Echo conversations that the host did not allow.
    icmp_refused;
    /// Echo conversations that made room for others.
    icmp_evicted;
    /// Echo requests that went out.
    icmp_requests;
    /// Answers to them.
    icmp_answers;
    /// Messages that are of no use to anybody.
    icmp_ignored;
    /// Errors that the guest was told.
    icmp_errors;
    /// Answers to ARP requests.
    arp_answers;
    /// Answers to neighbour and router solicitations.
    ndp_answers;
    /// Answers to DHCP clients.
    dhcp_answers;
    /// Answers to DHCPv6 clients.
    dhcpv6_answers;
    /// Datagrams to many: nobody is there to hear them.
    drop_multicast;
    /// Packets with IP options.
    drop_options;

    /// TCP connections that the guest began.
    tcp_opened;
    /// TCP connections that came from outside.
    tcp_accepted;
    /// TCP connections that ended, whatever the way.
    tcp_closed;
    /// TCP connections that were refused, or did not come about.
    tcp_refused;
    /// TCP connections that made room for others.
    tcp_evicted;
    /// TCP segments that belong to no connection.
    tcp_stray;
    /// TCP segments that are old, or beyond the window.
    tcp_out_of_window;
    /// TCP segments with something before them missing.
    tcp_out_of_order;
    /// Octets that a socket did not take although its window had promised so.
    tcp_overcommitted;
    /// Frames that were sent to the guest once more.
    tcp_retransmitted;
    /// Retransmissions because of a time-out.
    tcp_timeouts;
    /// Octets from the guest.
    tcp_bytes_in;
    /// Octets to the guest, those that were sent once more included.
    tcp_bytes_out;
}

//! The state of one TCP connection.

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use super::rto::Rto;
use super::seq::Seq;
use crate::emit::Ends;
use crate::host::{Close, Socket};

/// Where a conversation stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// The guest's SYN has come, the host's connection is being made. Nothing is sent to the guest.
    Connecting,
    /// The host's connection is made, the guest was sent SYN and ACK. It may be sent them again.
    SynReceived,
    /// A connection came from outside, the guest was sent a SYN. It may be sent it again.
    SynSent,
    /// Both ends know of the connection. Data goes both ways until the FINs; who has sent one is in
    /// `guest_fin` and `fin`.
    Open,
    /// Both FINs are acknowledged, ours came first. There is no socket any more; the guest may ask for
    /// the last acknowledgement once more.
    TimeWait,
}

/// What becomes of a conversation after an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    /// It goes on.
    Lives,
    /// It is over: its socket, if any, is closed like this.
    Ends(Close),
}

/// The urgent mark of what the host has for the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Urgent {
    /// There is none.
    None,
    /// There may be one. Reads end at the mark, and only the front of the queue can be asked whether it
    /// is there: so each read is sent, and acknowledged, before the next one.
    Ahead,
}

/// Things that are owed to the guest, and things known of the socket.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Flags {
    /// A segment with an acknowledgement is to be sent now, if nothing else is.
    pub(super) ack_due: bool,
    /// A SYN (and ACK) is to be sent.
    pub(super) syn_due: bool,
    /// The first octets that are not acknowledged are to be sent once more, one segment.
    pub(super) repeat_due: bool,
    /// A segment that asks for an answer is to be sent.
    pub(super) probe_due: bool,
    /// There may be something to read.
    pub(super) readable: bool,
    /// The socket's stream has ended, maybe behind octets that were not read yet.
    pub(super) read_closed: bool,
    /// The socket failed, or both its directions are closed.
    pub(super) failed: bool,
    /// An event is expected when the send queue has room.
    pub(super) awaiting_room: bool,
    /// The socket did not take all it was promised to: the guest is to send it once more.
    pub(super) refused: bool,
    /// The guest has sent its FIN, and all before it.
    pub(super) guest_fin: bool,
    /// Our FIN was sent before the guest's came.
    pub(super) closed_first: bool,
    /// Our FIN is acknowledged.
    pub(super) fin_acked: bool,
    /// It is in the queue of those that are to be served.
    pub(super) queued: bool,
    /// The last acknowledgement that waited for company went alone.
    pub(super) waited_in_vain: bool,
}

/// One connection. Sequence numbers: `rcv_*` are the guest's, `snd_*` ours.
#[derive(Debug)]
pub(super) struct TcpConnection {
    pub(super) phase: Phase,
    pub(super) socket: Option<Socket>,
    pub(super) ends: Ends,
    /// Ours (the other end's), the guest's.
    pub(super) ports: (u16, u16),
    pub(super) flags: Flags,
    pub(super) urgent: Urgent,

    /// The next octet that is expected of the guest.
    pub(super) rcv_nxt: Seq,
    /// The end of the window that the guest was offered.
    pub(super) rcv_edge: Seq,
    /// The window when it was last looked at.
    pub(super) offered: u32,
    /// By how many bits our windows are shifted.
    pub(super) rcv_scale: u8,
    /// Up to where the guest was told that everything has come.
    pub(super) told: Seq,
    /// When it is told of the rest, if nothing goes there before that it can be told with.
    pub(super) ack_at: Option<Duration>,
    /// Acknowledgements beyond the first that tell the guest of something missing.
    pub(super) duplicates_due: u8,

    /// The first octet that the guest has not acknowledged.
    pub(super) snd_una: Seq,
    /// The next one to be sent.
    pub(super) snd_nxt: Seq,
    /// The first one that was never sent.
    pub(super) snd_max: Seq,
    /// Octets before `snd_una` that are still at the front of the socket's queue.
    pub(super) undiscarded: u32,
    /// Place of our FIN, once the end of the stream was read.
    pub(super) fin: Option<Seq>,
    /// Octets the guest takes from `snd_una` on, and the segment that said so last.
    pub(super) snd_wnd: u32,
    pub(super) snd_scale: u8,
    pub(super) window_from: (Seq, Seq),
    /// Octets of payload in a segment, at most.
    pub(super) mss: u16,
    /// Acknowledgements in a row that say the same.
    pub(super) same_acks: u8,
    /// Something was lost: until everything up to here is acknowledged it is repaired.
    pub(super) recover: Option<Seq>,
    /// Octets under way, at most: falls with losses, and rises again.
    pub(super) congestion: u32,

    pub(super) rto: Rto,
    pub(super) retransmit_at: Option<Duration>,
    pub(super) probe_at: Option<Duration>,
    pub(super) probes: u8,
    /// When the guest was last heard of.
    pub(super) heard: Duration,
    /// Questions in a row whether the guest is there.
    pub(super) asked: u8,
    /// When a connection that is not yet made, or is over, is forgotten.
    pub(super) ends_at: Option<Duration>,
    /// IPv4's identification of the next packet.
    pub(super) ip_id: u16,
}

/// The congestion limit of a connection that has lost nothing.
pub(super) const UNCONGESTED: u32 = 1 << 24;

/// The least that the congestion limit falls to: two frames.
pub(super) const CONGESTION_MIN: u32 = 128 << 10;

impl TcpConnection {
    /// A conversation in which nothing was said. `iss` is our initial sequence number.
    pub(super) fn new(
        phase: Phase,
        ends: Ends,
        ports: (u16, u16),
        iss: Seq,
        now: Duration,
    ) -> Self {
        TcpConnection {
            phase,
            socket: None,
            ends,
            ports,
            flags: Flags::default(),
            urgent: Urgent::None,
            rcv_nxt: Seq(0),
            rcv_edge: Seq(0),
            offered: 0,
            rcv_scale: 0,
            told: Seq(0),
            ack_at: None,
            duplicates_due: 0,
            snd_una: iss,
            snd_nxt: iss,
            snd_max: iss,
            undiscarded: 0,
            fin: None,
            snd_wnd: 0,
            snd_scale: 0,
            window_from: (Seq(0), Seq(0)),
            mss: MSS_DEFAULT,
            same_acks: 0,
            recover: None,
            congestion: UNCONGESTED,
            rto: Rto::default(),
            retransmit_at: None,
            probe_at: None,
            probes: 0,
            heard: now,
            asked: 0,
            ends_at: None,
            ip_id: 1,
        }
    }

    /// Whether the connection is not yet made.
    pub(super) fn is_half_open(&self) -> bool {
        matches!(self.phase, Phase::Connecting | Phase::SynReceived | Phase::SynSent)
    }

    /// Octets (and FIN) under way to the guest.
    pub(super) fn in_flight(&self) -> u32 {
        self.snd_nxt.since(self.snd_una).unwrap_or(0)
    }

    /// The longest segment that the guest is told it may send, and the longest for it.
    pub(super) fn mss_of(mtu: u16, remote: IpAddr) -> u16 {
        mtu.saturating_sub(if remote.is_ipv4() { 40 } else { 60 })
    }

    /// Both directions are closed and everything was acknowledged.
    pub(super) fn is_over(&self) -> bool {
        self.flags.guest_fin && self.flags.fin_acked
    }

    /// The conversation's next date with the clock.
    pub(super) fn deadline(&self, config: &super::TcpConfig) -> Option<Duration> {
        let keep_alive = match self.phase {
            Phase::Open => {
                let asked = u32::from(self.asked);
                Some(self.heard + config.keep_alive_after + config.keep_alive_every * asked)
            }
            _ => None,
        };
        let own = [self.retransmit_at, self.probe_at, self.ends_at, self.ack_at];
        own.into_iter().chain([keep_alive]).flatten().min()
    }
}

/// What a guest takes that does not say (RFC 9293, 3.7.1).
pub(super) const MSS_DEFAULT: u16 = 536;

/// A socket address of the guest's family as address and port.
pub(super) fn split(address: SocketAddr) -> (IpAddr, u16) {
    (address.ip(), address.port())
}

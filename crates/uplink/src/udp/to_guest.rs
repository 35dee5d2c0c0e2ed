//! UDP datagrams from host sockets to the guest.
//!
//! One call reads many datagrams of a socket into the receive buffer. Datagrams of equal length leave as one
//! super-packet (USO) if the link accepts those; datagrams longer than the MTU leave in fragments.

use core::net::SocketAddr;

use ringfence_frame::PortCapabilities;
use ringfence_offload::packet::protocol;
use ringfence_offload::{Checksum, Gso, GsoKind, OffloadMeta};
use ringfence_policy::Protocol;
use ringfence_policy::gate::QueryEnds;
use ringfence_sys::numbers::bounded;
use rustix::io::Errno;

use super::relay::{DatagramRelays, ForwardedPort};
use super::{Flow, Route, Source, Udp};
use crate::context::Context;
use crate::egress::Answered;
use crate::emit::{ETHERNET_LEN, Ends, UdpEnds};
use crate::flow::{FlowId, FlowKey, Origin};
use crate::fragment::{self, Fields};
use crate::host::OwnerKind;
use crate::host::datagrams::{DatagramRun, ReceiveBuffer, SEGMENTS_MAX, Via};
use crate::link::{Committed, GuestLink, Slots};
use crate::name_query::{NameQuery, QueryClient};
use crate::packet::{self, HOPS_DEFAULT, Mac, Marks};

/// Maximum of receive calls in one round.
const READS: usize = 8;
/// Length of a UDP header, in bytes.
pub(super) const UDP_LEN: usize = 8;
/// Length of the longest IP packet, in bytes.
const IP_MAX: usize = 65_535;

/// Payload of one datagram for the guest.
#[derive(Clone, Copy)]
struct Payload<'a> {
    bytes: &'a [u8],
    /// Type of service or traffic class.
    class: u8,
}

impl UdpEnds {
    fn new(key: &FlowKey, mac: Mac, context: &Context<'_>) -> UdpEnds {
        let ends = Ends {
            from_mac: context.config.mac,
            to_mac: mac,
            from: key.remote.ip(),
            to: key.guest.ip(),
        };
        UdpEnds { ends, from: key.remote.port(), to: key.guest.port() }
    }

    /// Returns the length of the longest payload that a packet of at most `mtu` bytes has room for.
    fn payload_max(&self, mtu: u16) -> usize {
        usize::from(mtu).saturating_sub(self.ends.header_len() + UDP_LEN - ETHERNET_LEN)
    }
}

impl Udp {
    /// Sends datagrams from sockets to the guest, until the link has no room or the round's limit is reached.
    /// Returns `true` if more may be waiting.
    /// Datagrams of the host's loopback may leave by `relays` instead.
    pub(crate) fn output(
        &mut self,
        link: &mut dyn GuestLink,
        relays: &mut DatagramRelays,
        context: &mut Context<'_>,
    ) -> bool {
        self.send_queued_answers(link, context);
        for _ in 0..READS {
            let Some(&source) = self.waiting.front() else { return false };
            if !has_room(link) {
                return true;
            }
            self.waiting.pop_front();
            let mut buffer = core::mem::take(&mut self.buffer);
            if self.read(source, &mut buffer, context) {
                match source {
                    Source::Flow(id) => self.deliver(id, &buffer, link, context),
                    Source::Listener(index) => {
                        self.deliver_to(index, &buffer, link, relays, context);
                    }
                }
            }
            self.buffer = buffer;
        }
        !self.waiting.is_empty()
    }

    /// Receives once. Returns `false` if nothing came. A socket that may have more is queued again.
    fn read(
        &mut self,
        source: Source,
        buffer: &mut ReceiveBuffer,
        context: &mut Context<'_>,
    ) -> bool {
        let (socket, queued) = match source {
            Source::Flow(id) => match self.flows.get_mut(id) {
                Some(flow) => match &mut flow.route {
                    Route::Socket(socket) => (socket, &mut flow.queued),
                    _ => return false,
                },
                None => return false,
            },
            Source::Listener(index) => match self.listeners.get_mut(index) {
                Some(listener) => (&mut listener.socket, &mut listener.queued),
                None => return false,
            },
        };
        *queued = false;
        match socket.receive(buffer) {
            Ok(drained) => {
                if !drained {
                    *queued = true;
                    self.waiting.push_back(source);
                }
                !buffer.datagrams().is_empty()
            }
            Err(Errno::AGAIN) => false,
            Err(_) => {
                // The kernel reports the error once; later datagrams are still in the queue.
                match source {
                    Source::Flow(id) => {
                        self.report(id, context);
                    }
                    Source::Listener(index) => {
                        self.report_listener(index, context);
                    }
                }
                self.queue(source);
                false
            }
        }
    }

    fn deliver(
        &mut self,
        id: FlowId,
        buffer: &ReceiveBuffer,
        link: &mut dyn GuestLink,
        context: &mut Context<'_>,
    ) {
        let (Some(key), Some(flow)) = (self.flows.key(id), self.flows.get_mut(id)) else { return };
        flow.answered = true;
        let udp_ends = UdpEnds::new(&key, flow.mac, context);
        self.flows.touch(id);
        self.extend_deadline(id, context.now);
        let run = DatagramRun::all(buffer);
        if self.is_within_limits(id, || run.bytes(), context) {
            self.emit_answers(&key, &udp_ends, run, link, context);
        }
    }

    /// Sends the guest datagrams of a host that it has addressed: from a name server, as the egress policy has them.
    fn emit_answers(
        &mut self,
        key: &FlowKey,
        udp_ends: &UdpEnds,
        run: DatagramRun<'_>,
        link: &mut dyn GuestLink,
        context: &mut Context<'_>,
    ) {
        let Some(egress) = super::admission::policy_of(key.remote, context) else {
            return self.emit(udp_ends, run, link, context);
        };
        for (datagram, bytes) in run.iter() {
            for piece in bytes.chunks(datagram.segment.map_or(bytes.len(), usize::from).max(1)) {
                let ends = QueryEnds { guest: key.guest, server: key.remote, over: Protocol::Udp };
                match egress.answer(ends, piece.to_vec(), context.now, context.counters) {
                    Answered::Send(answer) => {
                        let answer = Payload { bytes: &answer, class: datagram.class };
                        self.send_answer(udp_ends, answer, link, context);
                    }
                    Answered::AskOverTcp(query) => {
                        let client = QueryClient::Datagram(udp_ends.ends.to_mac);
                        let server = context.outward_to(key.remote);
                        context.queries.extend(server.map(|server| NameQuery {
                            ends,
                            server,
                            query,
                            client,
                        }));
                    }
                    Answered::Nothing => {}
                }
            }
        }
    }

    /// Sends the answers that came over TCP.
    fn send_queued_answers(&mut self, link: &mut dyn GuestLink, context: &mut Context<'_>) {
        for (key, mac, answer) in core::mem::take(&mut self.answers) {
            let ends = UdpEnds::new(&key, mac, context);
            self.send_answer(&ends, Payload { bytes: &answer, class: 0 }, link, context);
        }
    }

    fn send_answer(
        &mut self,
        udp_ends: &UdpEnds,
        answer: Payload<'_>,
        link: &mut dyn GuestLink,
        context: &mut Context<'_>,
    ) {
        let takes = link.capabilities();
        context.counters.udp_datagrams_out.add(1);
        context.counters.udp_bytes_out.add(answer.bytes.len() as u64);
        self.send_whole(udp_ends, answer, &takes, link, context);
    }

    /// Sends the guest datagrams of a forwarded port or a shared socket. Each client has an association of its own.
    fn deliver_to(
        &mut self,
        index: usize,
        buffer: &ReceiveBuffer,
        link: &mut dyn GuestLink,
        relays: &mut DatagramRelays,
        context: &mut Context<'_>,
    ) {
        let port = self.listeners.id_of(OwnerKind::UdpListener, index);
        let listener = self.listeners.get(index).filter(|listener| listener.users.is_none());
        let port = port.zip(listener).map(|(id, of)| ForwardedPort { id, guest: of.guest });
        for run in DatagramRun::by_ends(buffer) {
            let Some(client) = run.first().and_then(|datagram| datagram.from) else { continue };
            let via = Via { to: client, from: run.first().and_then(|datagram| datagram.to) };
            if port.is_some_and(|port| relays.carry_in(port, via, run, context)) {
                continue;
            }
            let known = self.flow_at(index, client, context);
            if known.is_none() && port.is_none() {
                context.counters.drop_stranger.add(run.len() as u64);
                continue;
            }
            let Some(id) = known.or_else(|| self.client(index, client, via, context)) else {
                context.counters.udp_refused.add(run.len() as u64);
                continue;
            };
            let (Some(key), Some(flow)) = (self.flows.key(id), self.flows.get_mut(id)) else {
                continue;
            };
            flow.answered = true;
            let udp_ends = UdpEnds::new(&key, flow.mac, context);
            self.flows.touch(id);
            self.extend_deadline(id, context.now);
            match self.flows.origin(id) {
                Some(Origin::Guest) if self.is_within_limits(id, || run.bytes(), context) => {
                    self.emit_answers(&key, &udp_ends, run, link, context);
                }
                Some(Origin::Guest) => {}
                _ => self.emit(&udp_ends, run, link, context),
            }
        }
    }

    /// Opens the association of a new client of a forwarded port.
    fn client(
        &mut self,
        index: usize,
        client: SocketAddr,
        via: Via,
        context: &mut Context<'_>,
    ) -> Option<FlowId> {
        let guest = context.config.guest.reached_at(self.listeners.get(index)?.guest);
        let key = FlowKey { guest, remote: context.config.inward(client) };
        let mac = context.config.guest.mac?;
        let flow = Flow::new(Route::Listener(index, via), client, mac);
        let id = self.insert(key, flow, Origin::Outside, context)?;
        context.counters.udp_accepted.add(1);
        Some(id)
    }

    /// Builds frames from datagrams, as few as the link allows.
    fn emit(
        &mut self,
        udp_ends: &UdpEnds,
        run: DatagramRun<'_>,
        link: &mut dyn GuestLink,
        context: &mut Context<'_>,
    ) {
        let takes = link.capabilities();
        let ip_and_udp = udp_ends.ends.header_len() + UDP_LEN - ETHERNET_LEN;
        let longest = udp_ends.payload_max(takes.mtu);
        let mut group = Group::default();
        for (datagram, bytes) in run.iter() {
            let segment = datagram.segment.map_or(bytes.len(), usize::from).max(1);
            let mut rest = bytes;
            loop {
                let (piece, after) = rest.split_at(segment.min(rest.len()));
                rest = after;
                context.counters.udp_datagrams_out.add(1);
                context.counters.udp_bytes_out.add(piece.len() as u64);
                if piece.is_empty() || piece.len() > longest {
                    self.close(&mut group, udp_ends, &takes, link, context);
                    let payload = Payload { bytes: piece, class: datagram.class };
                    self.send_whole(udp_ends, payload, &takes, link, context);
                } else {
                    let joins = takes.gso.udp && group.class == datagram.class;
                    if !group.takes(piece, joins, ip_and_udp) {
                        self.close(&mut group, udp_ends, &takes, link, context);
                    }
                    group.add(piece, datagram.class);
                }
                if rest.is_empty() {
                    break;
                }
            }
        }
        self.close(&mut group, udp_ends, &takes, link, context);
    }

    /// Sends a group as one frame and empties it.
    fn close(
        &mut self,
        group: &mut Group<'_>,
        udp_ends: &UdpEnds,
        takes: &PortCapabilities,
        link: &mut dyn GuestLink,
        context: &mut Context<'_>,
    ) {
        if group.pieces.is_empty() {
            return;
        }
        let header = udp_ends.ends.header_len() + UDP_LEN;
        let len = header + group.len;
        self.ip_id = self.ip_id.wrapping_add(bounded(group.pieces.len(), u16::MAX));
        let mut slots = Slots::new();
        link.reserve(1, len, &mut slots);
        let Some(frame) = slots.first_mut().and_then(|slot| slot.get_mut(..len)) else {
            context.counters.udp_full.add(group.pieces.len() as u64);
            return group.clear();
        };
        let mut at = header;
        for piece in &group.pieces {
            frame[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        }
        let size = u16::try_from(group.segment).ok().filter(|_| group.pieces.len() > 1);
        let mut meta = write_headers(udp_ends, frame, self.ip_id, size, takes);
        if group.class != 0 {
            let ip = &mut frame[ETHERNET_LEN..];
            meta = meta.filter(|_| packet::set_marks(ip, HOPS_DEFAULT, group.class).is_some());
        }
        drop(slots);
        if let Some(meta) = meta {
            link.commit(&[Committed { len, meta }]);
            context.counters.frames_out.add(1);
        }
        group.clear();
    }

    /// Sends one datagram, in fragments if it is longer than the link's MTU.
    fn send_whole(
        &mut self,
        udp_ends: &UdpEnds,
        payload: Payload<'_>,
        takes: &PortCapabilities,
        link: &mut dyn GuestLink,
        context: &mut Context<'_>,
    ) {
        let Payload { bytes, class } = payload;
        if bytes.len() <= udp_ends.payload_max(takes.mtu) {
            let mut group = Group::default();
            group.add(bytes, class);
            return self.close(&mut group, udp_ends, takes, link, context);
        }
        self.ip_id = self.ip_id.wrapping_add(1);
        let marks = Marks { class, ..Marks::default() };
        let fields = Fields { id: self.ip_id, marks, mtu: takes.mtu.into() };
        let sent = fragment::send_udp(udp_ends, bytes, fields, link);
        context.counters.frames_out.add(sent as u64);
    }
}

/// Datagrams of equal length for one frame; the last one may be shorter.
#[derive(Default)]
struct Group<'a> {
    pieces: arrayvec::ArrayVec<&'a [u8], SEGMENTS_MAX>,
    segment: usize,
    len: usize,
    /// Type of service or traffic class of all.
    class: u8,
}

impl<'a> Group<'a> {
    fn takes(&self, piece: &[u8], joins: bool, headers: usize) -> bool {
        self.pieces.is_empty()
            || joins
                && !self.pieces.is_full()
                && piece.len() <= self.segment
                && self.pieces.last().is_some_and(|last| last.len() == self.segment)
                && self.len + piece.len() + headers <= IP_MAX
    }

    fn add(&mut self, piece: &'a [u8], class: u8) {
        if self.pieces.is_empty() {
            (self.segment, self.class) = (piece.len(), class);
        }
        self.len += piece.len();
        // `takes` has checked that there is room.
        let _ = self.pieces.try_push(piece);
    }

    fn clear(&mut self) {
        self.pieces.clear();
        (self.segment, self.len) = (0, 0);
    }
}

/// Writes all headers of a frame whose payload is in place.
pub(super) fn write_headers(
    udp_ends: &UdpEnds,
    frame: &mut [u8],
    id: u16,
    segment: Option<u16>,
    takes: &PortCapabilities,
) -> Option<OffloadMeta> {
    let ip_end = udp_ends.ends.header_len();
    let length = frame.len() - ip_end;
    udp_ends.ends.write(frame, protocol::UDP, length, id)?;
    let udp = frame.get_mut(ip_end..ip_end + UDP_LEN)?;
    udp[..2].copy_from_slice(&udp_ends.from.to_be_bytes());
    udp[2..4].copy_from_slice(&udp_ends.to.to_be_bytes());
    udp[4..6].copy_from_slice(&u16::try_from(length).ok()?.to_be_bytes());
    let seed = udp_ends.ends.pseudo_header(protocol::UDP, length);
    udp[6..8].copy_from_slice(&seed.to_be_bytes());
    let start = u16::try_from(ip_end).ok()?;
    let checksum = Checksum::Partial { start, offset: 6 };
    let gso = segment.map(|size| Gso { kind: GsoKind::Udp, ecn: false, size });
    if gso.is_none() && !crate::emit::takes_blank(takes, udp_ends.ends.to.is_ipv4()) {
        let place = checksum.place()?;
        ringfence_offload::checksum::complete_partial(frame, place).ok()?;
        return Some(OffloadMeta::PLAIN);
    }
    Some(OffloadMeta { checksum, gso })
}

/// Returns `true` if the link accepts a frame.
fn has_room(link: &mut dyn GuestLink) -> bool {
    let mut slots = Slots::new();
    link.reserve(1, 64, &mut slots);
    !slots.is_empty()
}

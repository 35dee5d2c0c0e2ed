//! Multicast of services that the configuration names ([`Service`]), in both directions. Off by default.
//!
//! ```text
//! guest                                     uplink                                     link of the host
//!   port of the service   ── group ──>   socket of the group, port of the service  ── group ──>
//!                         <── group ──                                             <── group ──
//!   another port          ── group ──>   socket of the question, any port          ── group ──>
//!                         <─ unicast ─   for ANSWERS after the last question       <─ unicast ─
//!   port of the service   ─ unicast ─>   socket of the group                       ─ unicast ─>  asked just now
//! ```
//!
//! Sockets of groups come from outside (`Multicast::join`): each has joined one group on one interface, is
//! restricted to that interface, and is bound to the group's address. So it receives nothing that was sent to the host
//! alone, and other programs on the host keep theirs. The first engine of a guest has all of them.
//!
//! The guest reaches the groups of its services and no other one. The source on the link is the host's address, so the
//! guest chooses none. An egress policy does not apply to these datagrams. It applies to the hosts that an answer
//! names, as to all others.
//!
//! # Limits
//!
//! Each direction has a rate (`TO_LINK`, `TO_GUEST`). A guest has [`QUESTIONS_MAX`] sockets of questions, and
//! `ASKERS_MAX` hosts are known that have asked. The guest's own datagrams come back from the host's kernel, and
//! are dropped by their hash; `OWN_MAX` are kept.

pub mod service;
#[cfg(test)]
mod tests;

use core::hash::{BuildHasher, BuildHasherDefault};
use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use core::time::Duration;
use std::collections::VecDeque;
use std::hash::DefaultHasher;
use std::os::fd::OwnedFd;

use ringfence_frame::PortCapabilities;
use ringfence_offload::packet::Transport;
use rustix::io::Errno;

use super::payload_len;
use super::to_guest::{UDP_LEN, write_headers};
use super::to_host::append;
use crate::config::Config;
use crate::context::Context;
use crate::emit::{ETHERNET_LEN, Ends, UdpEnds};
use crate::forward::{ForwardId, Reused};
use crate::host::datagrams::{DatagramSocket, ReceiveBuffer, Via};
use crate::host::{OwnerKind, Ready};
use crate::packet::{self, Mac, Packet};
use crate::replies::WAITING_MAX;

use service::{Group, Service};

/// Time after a question for which answers to it are accepted, and for which its sender may be answered.
pub const ANSWERS: Duration = Duration::from_secs(10);
/// Maximum of sockets of questions; beyond it the one that ends first is closed.
pub const QUESTIONS_MAX: usize = 32;
/// Maximum of hosts on the link that may be answered; beyond it the one that ends first is forgotten.
const ASKERS_MAX: usize = 64;
/// Maximum of datagrams that are recognised when they come back.
const OWN_MAX: usize = 64;
/// Time for which they are recognised.
const OWN_FOR: Duration = Duration::from_secs(1);
/// Maximum length of a payload in each direction, in bytes.
const PAYLOAD_MAX: usize = 1900;
/// Datagrams per second to the link, and the number that may be sent at once.
const TO_LINK: Rate = Rate { per_second: 100, burst: 200 };
/// Datagrams per second to the guest, and the number that may be sent at once.
const TO_GUEST: Rate = Rate { per_second: 200, burst: 200 };
/// Maximum of receive calls in one round.
const READS: usize = 4;
/// Maximum of error reports read from one socket in a row.
const REPORTS: usize = 16;
/// Hop limit of an answer to a guest.
const HOPS_UNICAST: u8 = 255;

/// Socket that has joined a group.
struct Member {
    group: Group,
    socket: Box<dyn DatagramSocket>,
}

/// Socket of the guest's questions from one port.
struct Question {
    service: Service,
    guest: SocketAddr,
    mac: Mac,
    until: Duration,
    socket: Box<dyn DatagramSocket>,
}

/// Host on the link that has asked.
struct Asker {
    /// Its address as the guest sees it.
    seen: SocketAddr,
    real: SocketAddr,
    /// Index of the group's socket.
    member: usize,
    until: Duration,
}

/// Datagram of this guest that comes back.
struct Own {
    member: usize,
    hash: u64,
    until: Duration,
}

/// Multicast of one guest.
#[derive(Default)]
pub(crate) struct Multicast {
    members: Reused<Member>,
    questions: Reused<Question>,
    askers: Vec<Asker>,
    own: VecDeque<Own>,
    /// Sockets with datagrams for the guest.
    waiting: VecDeque<ForwardId>,
    to_link: Bucket,
    to_guest: Bucket,
    buffer: ReceiveBuffer,
    payload: Vec<u8>,
    ip_id: u16,
}

impl Multicast {
    /// Returns `true` for a packet that only the first engine can handle: to a group of a service that `config` names,
    /// or from the port of one.
    pub(crate) fn concerns(packet: &Packet<'_>, config: &Config) -> bool {
        if config.multicast.is_empty() || packet.layers.is_fragment() {
            return false;
        }
        let Some((from, to)) = ports(packet) else { return false };
        config.multicast.iter().any(|service| match packet.destination.is_multicast() {
            true => to == service.port() && service.groups().contains(&packet.destination),
            false => from == service.port(),
        })
    }

    /// Adds a socket that has joined `group`.
    pub(crate) fn join(
        &mut self,
        socket: OwnedFd,
        group: Group,
        context: &mut Context<'_>,
    ) -> Result<(), Errno> {
        let joined = self.members.insert(OwnerKind::MulticastGroup, |owner| {
            Ok(Member { group, socket: context.host.adopt_udp(owner, socket)? })
        });
        joined.map(drop)
    }

    /// Closes all sockets, and forgets the hosts that asked by them.
    pub(crate) fn leave(&mut self) {
        self.members.clear();
        self.questions.clear();
        self.askers.clear();
        self.own.clear();
    }

    /// Handles a datagram of the guest that [`concerns`](Self::concerns) this. Returns `false` for one to a host that
    /// has not asked, which is as any other.
    pub(crate) fn input(&mut self, packet: &Packet<'_>, context: &mut Context<'_>) -> bool {
        let Some((from, to)) = ports(packet) else { return false };
        let to = SocketAddr::new(packet.destination, to);
        let asker = match to.ip().is_multicast() {
            true => None,
            false => match self.asker(to, from, context.now) {
                Some(asker) => Some(asker),
                None => return false,
            },
        };
        let counters = context.counters;
        if !may_send_from(packet.source, context.config) {
            counters.drop_forged_source.add(1);
            return true;
        }
        let len = payload_len(packet);
        if packet.frame.meta().gso.is_some() || len > PAYLOAD_MAX {
            counters.multicast_dropped.add(1);
            return true;
        }
        if !self.to_link.take(TO_LINK, context.now) {
            counters.multicast_dropped.add(1);
            return true;
        }
        let mut payload = core::mem::take(&mut self.payload);
        payload.clear();
        append(packet, len, &mut payload);
        let sent = match asker {
            Some((member, real)) => self.answer(member, real, &payload),
            None => self.ask(packet, from, to, &payload, context),
        };
        self.payload = payload;
        let counter = match sent {
            Ok(()) => &counters.multicast_in,
            Err(_) => &counters.multicast_dropped,
        };
        counter.add(1);
        true
    }

    /// Returns the host that has asked at `to`, and the socket from which `from` of the guest answers it.
    fn asker(&self, to: SocketAddr, from: u16, now: Duration) -> Option<(usize, SocketAddr)> {
        let asker = self.askers.iter().find(|asker| asker.seen == to && asker.until > now)?;
        let member = self.members.get(asker.member)?;
        (member.group.service.port() == from).then_some((asker.member, asker.real))
    }

    fn answer(&mut self, member: usize, to: SocketAddr, bytes: &[u8]) -> Result<(), Errno> {
        let member = self.members.get_mut(member).ok_or(Errno::BADF)?;
        member.socket.send(bytes, None, Some(Via { to, from: None }))
    }

    /// Sends a datagram to a group. From another port than the service's, it is a question with a socket of its own.
    fn ask(
        &mut self,
        packet: &Packet<'_>,
        from: u16,
        to: SocketAddr,
        bytes: &[u8],
        context: &mut Context<'_>,
    ) -> Result<(), Errno> {
        let members = self.members.indices();
        let of_group = |&index: &usize| {
            self.members.get(index).is_some_and(|member| member.group.address == to.ip())
        };
        let index = members.into_iter().find(of_group).ok_or(Errno::NETUNREACH)?;
        self.remember(index, bytes, context.now);
        let via = Some(Via { to, from: None });
        let member = self.members.get_mut(index).ok_or(Errno::BADF)?;
        if from == to.port() {
            return member.socket.send(bytes, None, via);
        }
        let group = member.group.clone();
        let question = self.question((packet.source, from).into(), packet.mac, &group, context)?;
        question.socket.send(bytes, None, via)
    }

    /// Returns the socket of questions from one port of the guest, and lets it accept answers from now on.
    fn question(
        &mut self,
        guest: SocketAddr,
        mac: Mac,
        group: &Group,
        context: &mut Context<'_>,
    ) -> Result<&mut Question, Errno> {
        let until = context.now + ANSWERS;
        let same =
            |question: &Question| question.guest == guest && question.service == group.service;
        let all = self.questions.indices();
        let known = all.iter().copied().find(|&at| self.questions.get(at).is_some_and(same));
        let index = match known {
            Some(index) => index,
            None => {
                if all.len() >= QUESTIONS_MAX {
                    self.close_first();
                }
                let id = self.questions.insert(OwnerKind::MulticastQuestion, |owner| {
                    let socket = context.host.open_question(owner, guest.port(), group)?;
                    Ok(Question { service: group.service, guest, mac, until, socket })
                })?;
                self.questions.index_of(id.0).ok_or(Errno::BADF)?
            }
        };
        let question = self.questions.get_mut(index).ok_or(Errno::BADF)?;
        (question.until, question.mac) = (until, mac);
        Ok(question)
    }

    /// Closes the socket of questions that ends first.
    fn close_first(&mut self) {
        let until = |at: &usize| self.questions.get(*at).map(|question| question.until);
        let first = self.questions.indices().into_iter().min_by_key(until);
        if let Some(at) = first {
            self.close(at);
        }
    }

    fn close(&mut self, index: usize) {
        if let Some(id) = self.questions.id_of(OwnerKind::MulticastQuestion, index) {
            self.questions.remove(id);
        }
    }

    /// Remembers a datagram that the host's kernel will deliver to the socket of the group.
    fn remember(&mut self, member: usize, bytes: &[u8], now: Duration) {
        if self.own.len() >= OWN_MAX {
            self.own.pop_front();
        }
        self.own.push_back(Own { member, hash: hash(bytes), until: now + OWN_FOR });
    }

    /// Returns `true` for a datagram that this guest has sent, once for each time it was sent.
    fn is_own(&mut self, member: usize, bytes: &[u8], now: Duration) -> bool {
        let hash = hash(bytes);
        let same = |own: &Own| own.member == member && own.hash == hash && own.until > now;
        let at = self.own.iter().position(same);
        at.and_then(|at| self.own.remove(at)).is_some()
    }

    /// Handles an event of a socket.
    pub(crate) fn ready(&mut self, ready: Ready) {
        let id = ForwardId(ready.owner);
        if !self.waiting.contains(&id) {
            self.waiting.push_back(id);
        }
    }

    /// Delivers datagrams of the sockets to the guest. Returns the number of sockets that may have more.
    pub(crate) fn run(&mut self, context: &mut Context<'_>) -> usize {
        let mut buffer = core::mem::take(&mut self.buffer);
        for _ in 0..READS {
            let Some(id) = self.waiting.pop_front() else { break };
            let members = id.0.kind == OwnerKind::MulticastGroup;
            let index = match members {
                true => self.members.index_of(id.0),
                false => self.questions.index_of(id.0),
            };
            // A question may be over.
            let Some(index) = index else { continue };
            let socket = match members {
                true => self.members.get_mut(index).map(|member| &mut member.socket),
                false => self.questions.get_mut(index).map(|question| &mut question.socket),
            };
            let Some(socket) = socket else { continue };
            match socket.receive(&mut buffer) {
                Ok(drained) => {
                    if !drained {
                        self.waiting.push_back(id);
                    }
                    self.deliver(members, index, &buffer, context);
                }
                Err(Errno::AGAIN) => {}
                Err(_) => {
                    // An earlier datagram was not delivered; later ones are still in the queue.
                    let mut bytes = [0; 64];
                    let mut reports = 0;
                    while reports < REPORTS && socket.error(&mut bytes).is_some() {
                        reports += 1;
                    }
                    self.waiting.push_back(id);
                }
            }
        }
        self.buffer = buffer;
        self.waiting.len()
    }

    fn deliver(
        &mut self,
        members: bool,
        index: usize,
        buffer: &ReceiveBuffer,
        context: &mut Context<'_>,
    ) {
        for datagram in buffer.datagrams() {
            let Some(from) = datagram.from else { continue };
            let bytes = buffer.bytes(datagram);
            let each = datagram.segment.map_or(bytes.len(), usize::from).max(1);
            for piece in bytes.chunks(each) {
                match members {
                    true => self.deliver_to_group(index, from, piece, context),
                    false => self.deliver_answer(index, from, piece, context),
                }
            }
        }
    }

    fn deliver_to_group(
        &mut self,
        index: usize,
        from: SocketAddr,
        bytes: &[u8],
        context: &mut Context<'_>,
    ) {
        let Some(Member { group, .. }) = self.members.get(index) else { return };
        let (service, address) = (group.service, group.address);
        if context.host.is_own(from.ip()) && self.is_own(index, bytes, context.now) {
            return;
        }
        let seen = context.config.inward(from);
        if service.asks(bytes) && may_be_answered(from.ip(), context) {
            self.note_asker(Asker {
                seen,
                real: from,
                member: index,
                until: context.now + ANSWERS,
            });
        }
        let ends = Ends {
            from_mac: context.config.mac,
            to_mac: group_mac(address),
            from: seen.ip(),
            to: address,
        };
        let ends = UdpEnds { ends, from: seen.port(), to: service.port() };
        self.emit(ends, service.hops(), bytes, context);
    }

    fn deliver_answer(
        &mut self,
        index: usize,
        from: SocketAddr,
        bytes: &[u8],
        context: &mut Context<'_>,
    ) {
        let Some(question) = self.questions.get(index) else { return };
        if question.until <= context.now || !question.service.answers_from(from.port()) {
            return context.counters.drop_stranger.add(1);
        }
        let seen = context.config.inward(from);
        let (from_mac, to_mac) = (context.config.mac, question.mac);
        let ends = Ends { from_mac, to_mac, from: seen.ip(), to: question.guest.ip() };
        let ends = UdpEnds { ends, from: seen.port(), to: question.guest.port() };
        self.emit(ends, HOPS_UNICAST, bytes, context);
    }

    fn note_asker(&mut self, asker: Asker) {
        self.askers.retain(|known| known.seen != asker.seen || known.member != asker.member);
        if self.askers.len() >= ASKERS_MAX {
            // The list is in the order of `until`.
            self.askers.remove(0);
        }
        self.askers.push(asker);
    }

    /// Sends the guest a datagram, or counts that it is lost.
    fn emit(&mut self, udp_ends: UdpEnds, hops: u8, bytes: &[u8], context: &mut Context<'_>) {
        let ends = udp_ends.ends;
        let header = ends.header_len() + UDP_LEN;
        let longest = (usize::from(context.config.mtu) + ETHERNET_LEN - header).min(PAYLOAD_MAX);
        // Half of the queue is for the other replies.
        let has_room = context.replies.len() < WAITING_MAX / 2;
        if bytes.len() > longest || !has_room || !self.to_guest.take(TO_GUEST, context.now) {
            return context.counters.multicast_dropped.add(1);
        }
        self.ip_id = self.ip_id.wrapping_add(1);
        let id = self.ip_id;
        let plain = PortCapabilities::plain(context.config.mtu);
        context.replies.push(|frame| {
            frame.resize(header, 0);
            frame.extend_from_slice(bytes);
            write_headers(&udp_ends, frame, id, None, &plain)?;
            packet::set_marks(frame.get_mut(ETHERNET_LEN..)?, hops, 0)
        });
        context.counters.multicast_out.add(1);
    }

    /// Closes the sockets of questions whose time is over.
    pub(crate) fn run_timers(&mut self, context: &Context<'_>) {
        for index in self.questions.indices() {
            let question = self.questions.get(index);
            if question.is_some_and(|question| question.until <= context.now) {
                self.close(index);
            }
        }
        self.askers.retain(|asker| asker.until > context.now);
    }

    /// Returns the time at which [`run_timers`](Self::run_timers) must be called next.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.questions.values().map(|question| question.until).min()
    }
}

/// Rate of datagrams, and their number that may be sent at once.
#[derive(Clone, Copy)]
struct Rate {
    per_second: u32,
    burst: u32,
}

/// Datagrams that a [`Rate`] leaves. It begins full.
#[derive(Default)]
struct Bucket {
    used: u32,
    /// Time up to which returned datagrams are counted.
    since: Duration,
}

impl Bucket {
    /// Takes one datagram. Returns `false` if none is left.
    fn take(&mut self, rate: Rate, now: Duration) -> bool {
        let each = Duration::from_secs(1) / rate.per_second.max(1);
        let passed = now.saturating_sub(self.since).as_nanos() / each.as_nanos().max(1);
        let returned = u32::try_from(passed).unwrap_or(u32::MAX);
        self.used = self.used.saturating_sub(returned);
        // What is left of the time counts later, unless the bucket is full.
        self.since = match self.used {
            0 => now,
            _ => self.since + each * returned,
        };
        let has_one = self.used < rate.burst;
        self.used += u32::from(has_one);
        has_one
    }
}

/// Returns the ports of a UDP datagram.
fn ports(packet: &Packet<'_>) -> Option<(u16, u16)> {
    let Transport::Udp(_) = packet.layers.transport() else { return None };
    let &[s0, s1, d0, d1] = packet.transport().first_chunk()?;
    Some((u16::from_be_bytes([s0, s1]), u16::from_be_bytes([d0, d1])))
}

/// Returns `true` if the guest may send to a group from this address: its own, or a link-local one of IPv6, which is
/// what hosts use towards groups of their link.
fn may_send_from(source: IpAddr, config: &Config) -> bool {
    let is_of_link = matches!(source, IpAddr::V6(ip) if ip.is_unicast_link_local());
    is_of_link || config.access.source_is_allowed(source)
}

/// Returns `true` for a host that can be on the link. The kernel sends IPv4 from the group's socket to hosts of the
/// link only, IPv6 anywhere.
fn may_be_answered(ip: IpAddr, context: &Context<'_>) -> bool {
    match ip {
        IpAddr::V4(_) => true,
        IpAddr::V6(v6) => v6.is_unicast_link_local() || context.host.is_own(ip),
    }
}

fn hash(bytes: &[u8]) -> u64 {
    // A collision costs the guest a datagram of the host.
    BuildHasherDefault::<DefaultHasher>::default().hash_one(bytes)
}

/// Returns the Ethernet address of a group (RFC 1112, section 6.4; RFC 2464, section 7).
fn group_mac(group: IpAddr) -> Mac {
    match group {
        IpAddr::V4(ip) => {
            let [_, b, c, d] = ip.octets();
            [0x01, 0x00, 0x5e, b & 0x7f, c, d]
        }
        IpAddr::V6(ip) => {
            let [.., a, b, c, d] = Ipv6Addr::octets(&ip);
            [0x33, 0x33, a, b, c, d]
        }
    }
}

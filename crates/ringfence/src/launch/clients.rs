//! Clients of a launcher: `ringfence ps`, `exec`, `logs` and others ([`crate::commands`]).
//!
//! The launcher never waits for a client: it reads what has arrived, and a client that does not read its answers is
//! disconnected.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{SystemTime, UNIX_EPOCH};

use ringfence_sandbox::channel::Channel;
use ringfence_sys::descriptors::Descriptors;
use ringfence_sys::socket::{peer_is_in_own_user_namespace, peer_user};
use rustix::net::SocketFlags;

use super::messages;
use crate::commands::{Reply, Request};
use ringfence_driver::switchboard::FrontendLevels;
use ringfence_hostnet::guest_sockets::{GuestSocket, ListenerKind};
use ringfence_hostnet::runtime_dir::{RuntimeDir, RuntimeDirError};
use ringfence_sandbox::STATUS_FAILED;
use ringfence_uplink_process::egress::live::{ClientId, PolicyClients};
use ringfence_uplink_process::totals::UplinkTotals;

/// Maximum number of clients at a time. A guest has up to 256 commands of `ringfence exec`, each with a client.
const CLIENTS_MAX: usize = 320;
/// Maximum number of clients that are accepted at a time, so that a flood of them does not keep the launcher from its guest.
const ACCEPTED_MAX: usize = 16;

pub(super) enum ClientEvent {
    Request(ClientId, Request, Descriptors),
    /// A client that started a command is gone.
    Gone(ClientId),
}

/// Progress of a client that reads messages.
#[derive(Clone, Copy)]
struct MessageReader {
    /// Number of the last message that it has.
    after: u64,
    /// Set while it waits for the next one.
    waits: bool,
}

/// Listening socket of a launcher, and its clients.
pub(super) struct Clients {
    listener: GuestSocket,
    list: Vec<(ClientId, Channel)>,
    /// Clients that started a command in the guest.
    executing: BTreeSet<ClientId>,
    /// Clients that read messages.
    readers: BTreeMap<ClientId, MessageReader>,
    next: ClientId,
    /// Clients of the egress policy.
    pub(super) policy: PolicyClients,
    /// Clients that wait for the driver domain's counters.
    pub(super) counters: Vec<ClientId>,
    /// Clients that wait for the totals of the uplink.
    totals: Vec<ClientId>,
    /// Clients that wait for the levels of the memory that the guest lends.
    levels: Vec<ClientId>,
    /// Time of [`Clients::listen`] in seconds since 1970.
    since: u64,
}

impl Clients {
    /// Listens for the clients of one runtime directory.
    pub(super) fn listen(directory: &RuntimeDir) -> Result<Clients, RuntimeDirError> {
        let listener = directory.listen_for_clients(ListenerKind::Launcher)?;
        Ok(Clients {
            listener,
            list: Vec::new(),
            executing: BTreeSet::new(),
            readers: BTreeMap::new(),
            next: 1,
            policy: PolicyClients::default(),
            counters: Vec::new(),
            totals: Vec::new(),
            levels: Vec::new(),
            since: now(),
        })
    }

    /// Returns the start of the command in seconds since 1970.
    pub(super) fn since(&self) -> u64 {
        self.since
    }

    /// Iterates over the descriptors to poll.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let clients = self.list.iter().map(|(_, channel)| channel.as_fd());
        std::iter::once(self.listener.as_fd()).chain(clients)
    }

    /// Returns an event that has happened already.
    pub(super) fn look(&mut self) -> Option<ClientEvent> {
        self.accept();
        for at in 0..self.list.len() {
            let (id, channel) = &self.list[at];
            let id = *id;
            match channel.try_receive() {
                Ok(None) => {}
                Ok(Some((request, fds))) => {
                    if matches!(request, Request::Exec { .. }) {
                        self.executing.insert(id);
                    }
                    return Some(ClientEvent::Request(id, request, fds));
                }
                Err(_) => {
                    self.list.remove(at);
                    self.readers.remove(&id);
                    self.policy.forget(id);
                    // The guest's init has nothing to end for another client. A message that it does not read any
                    // more would reset the connection, and with it the report of the command's end.
                    return self.executing.remove(&id).then_some(ClientEvent::Gone(id));
                }
            }
        }
        None
    }

    /// Accepts clients of this user. Those beyond the limit get the reason as their answer.
    fn accept(&mut self) {
        for _ in 0..ACCEPTED_MAX {
            let Ok(socket) = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC) else {
                return;
            };
            // Only this user enters the directory of the socket. Its mode may have been changed.
            let own = rustix::process::geteuid().as_raw();
            if peer_user(&socket).is_ok_and(|user| user == own) {
                self.admit(socket);
            }
        }
    }

    /// Adds a client, or answers with the reason why it is not served.
    fn admit(&mut self, socket: OwnedFd) {
        // A guest's command has this user's id, too, and sees a runtime directory that was made after the guest.
        let why = if !peer_is_in_own_user_namespace(&socket) {
            "it serves processes of its own user namespace only".to_owned()
        } else if self.list.len() >= CLIENTS_MAX {
            format!("it serves {CLIENTS_MAX} clients already")
        } else {
            self.list.push((self.next, Channel::from_fd(socket)));
            self.next += 1;
            return;
        };
        Channel::from_fd(socket).send_or_drop(&Reply::Failed { status: STATUS_FAILED, why });
    }

    /// Returns `true` if the socket still has its name.
    pub(super) fn is_named(&self) -> bool {
        self.listener.is_named()
    }

    /// Listens in the runtime directory anew, if the socket has lost its name. Clients that are connected stay.
    pub(super) fn follow(&mut self, directory: &RuntimeDir) -> Result<(), RuntimeDirError> {
        if !self.listener.is_named() {
            self.listener = directory.listen_for_clients(ListenerKind::Launcher)?;
        }
        Ok(())
    }

    /// Answers a client that reads messages, now or when there is one.
    pub(super) fn read_messages(&mut self, id: ClientId, after: u64, wait: bool) {
        self.readers.insert(id, MessageReader { after, waits: true });
        if wait {
            self.send_messages();
        } else {
            self.send_messages_to(id);
        }
    }

    /// Sends new messages to the clients that wait for one.
    pub(super) fn send_messages(&mut self) {
        let newest = if self.readers.is_empty() { 0 } else { messages::kept().newest() };
        let waiting =
            self.readers.iter().filter(|(_, reader)| reader.waits && reader.after < newest);
        for id in waiting.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.send_messages_to(id);
        }
    }

    /// Sends the last messages to all clients that read messages.
    pub(super) fn send_last_messages(&mut self) {
        for reader in self.readers.values_mut() {
            reader.waits = true;
        }
        self.send_messages();
    }

    fn send_messages_to(&mut self, id: ClientId) {
        let Some(reader) = self.readers.get_mut(&id) else { return };
        let messages = messages::kept().after(reader.after);
        reader.after = messages.last().map_or(reader.after, |last| last.number);
        reader.waits = false;
        self.reply(id, &Reply::Messages(messages));
    }

    /// Adds a client that waits for the totals of the uplink. Returns `true` if others wait already: the uplink has been
    /// asked.
    pub(super) fn wait_for_totals(&mut self, id: ClientId) -> bool {
        wait_with(&mut self.totals, &self.list, id)
    }

    /// Adds a client that waits for the levels of lent memory. Returns `true` if others wait already.
    pub(super) fn wait_for_levels(&mut self, id: ClientId) -> bool {
        wait_with(&mut self.levels, &self.list, id)
    }

    /// Answers the clients that wait for the levels of lent memory.
    pub(super) fn tell_levels(&mut self, levels: FrontendLevels) {
        for id in std::mem::take(&mut self.levels) {
            self.reply(id, &Reply::Levels(levels));
        }
    }

    /// Answers the clients that wait for the totals of the uplink.
    pub(super) fn tell_totals(&mut self, totals: Option<&UplinkTotals>) {
        for id in std::mem::take(&mut self.totals) {
            self.reply(id, &Reply::UplinkTotals(totals.cloned().map(Box::new)));
        }
    }

    /// Answers a client. Disconnects it if it does not read.
    pub(super) fn reply(&mut self, to: ClientId, reply: &Reply) {
        self.reply_with(to, reply, &Descriptors::default());
    }

    /// Answers a client, and passes descriptors to it. Disconnects it if it does not read.
    pub(super) fn reply_with(&mut self, to: ClientId, reply: &Reply, fds: &Descriptors) {
        let fds: Vec<_> = fds.each().collect();
        let failed = |(id, channel): &(ClientId, Channel)| {
            *id == to && channel.send_now(reply, &fds).is_err()
        };
        if let Some(at) = self.list.iter().position(failed) {
            self.list.remove(at).1.dispose();
            self.readers.remove(&to);
            self.policy.forget(to);
        }
    }
}

/// Adds a client to those that wait for the same answer. Returns `true` if others wait already.
fn wait_with(waiting: &mut Vec<ClientId>, known: &[(ClientId, Channel)], id: ClientId) -> bool {
    let was_asked = !waiting.is_empty();
    // A client that asks again has one answer, so the list is as short as that of the clients.
    waiting.retain(|own| known.iter().any(|(id, _)| id == own));
    if !waiting.contains(&id) {
        waiting.push(id);
    }
    was_asked
}

/// Returns the time in seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

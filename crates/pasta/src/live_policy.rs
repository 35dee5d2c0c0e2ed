//! Clients of a session's egress policy: `ringfence policy set`, `why` and `watch`. A session without a policy has them, too: it may
//! get one.
//!
//! The session listens in the runtime directory of the user that starts it
//! ([`guest_sockets`](ringfence_hostnet::guest_sockets)). No other user enters the directory. A guest's process may have the same
//! user id and see the directory. So a client must be in the session's PID namespace, in which no container is, and in its user
//! namespace or the initial one:
//!
//! * Podman starts the session of a user's container in a user namespace, and the user's shell is in the initial one.
//! * A command of `pasta` with `--no-pidns` is in another user namespace, which has one user id.
//! * A session that root started gives up root's rights. It cannot examine namespaces of root's processes, but read their maps of
//!   user ids.
//!
//! Nothing blocks: the session reads what has arrived, and disconnects a client that does not read its answers.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::messages::Messages;
use super::target::Target;
use ringfence_hostnet::causes::causes;
use ringfence_hostnet::guest_sockets::{GuestSocket, ListenerKind};
use ringfence_hostnet::runtime_dir::RuntimeDir;
use ringfence_sandbox::channel::Channel;
use ringfence_sys::descriptors::Descriptors;
use ringfence_sys::socket::{peer_is_in_no_container, peer_user};
use ringfence_uplink_process::egress::guest::GuestEgress;
use ringfence_uplink_process::egress::live::{
    ClientId, PolicyClients, PolicyReply, PolicyRequest, describe,
};
use rustix::net::SocketFlags;
use serde::{Deserialize, Serialize};

/// Maximum number of clients at a time.
const CLIENTS_MAX: usize = 32;
/// Maximum number of clients and requests that are handled in a row.
const IN_A_ROW: usize = 64;

/// Request of a client of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionRequest {
    /// Describes the session.
    Describe,
    /// Concerns the egress policy.
    Policy(PolicyRequest),
}

/// Answer to a client of a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum SessionReply {
    Session(SessionDescription),
    Policy(PolicyReply),
}

/// Description of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionDescription {
    /// Name of the guest, as in records of egress.
    pub name: String,
    /// `pasta` or `passt`.
    pub program: String,
    /// Rules of its egress policy, and the places where they are written. `None` without a policy.
    pub policy: Option<String>,
}

/// Listening socket of a session, and its clients.
#[derive(Debug)]
pub(crate) struct LivePolicy {
    listener: GuestSocket,
    /// User that started the session, as this user namespace has it.
    user: u32,
    name: String,
    program: &'static str,
    list: Vec<(ClientId, Channel)>,
    next: ClientId,
    clients: PolicyClients,
}

impl LivePolicy {
    /// Listens for clients. A session that cannot goes on without them.
    pub(crate) fn start(target: &Target, messages: &mut Messages) -> Option<LivePolicy> {
        let directory = RuntimeDir::open().map_err(anyhow::Error::from);
        let listens = directory.and_then(|directory| {
            LivePolicy::listen(&directory, target.record_name(), target.program())
        });
        let tell = |error: &anyhow::Error| {
            messages.step(format_args!("`ringfence policy` does not reach it: {}", causes(error)));
        };
        listens.inspect_err(tell).ok()
    }

    /// Listens in a runtime directory, with the rights of the user that starts the session.
    fn listen(
        directory: &RuntimeDir,
        name: String,
        program: &'static str,
    ) -> anyhow::Result<LivePolicy> {
        // A session that has given up root's rights cannot remove its own.
        directory.remove_left_behind(ListenerKind::Session);
        let listener = directory.listen_for_clients(ListenerKind::Session)?;
        let user = rustix::process::geteuid().as_raw();
        let (list, clients) = Default::default();
        Ok(LivePolicy { listener, user, name, program, list, next: 1, clients })
    }

    /// Iterates over the descriptors to poll.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let clients = self.list.iter().map(|(_, channel)| channel.as_fd());
        std::iter::once(self.listener.as_fd()).chain(clients)
    }

    /// Accepts clients, and handles the requests that have arrived. `uplink` is the channel to the uplink's process.
    pub(crate) fn serve(&mut self, egress: &mut GuestEgress, uplink: &Channel) {
        self.accept();
        for _ in 0..IN_A_ROW {
            let Some((id, request, fds)) = self.next_request() else { return };
            let reply = match request {
                SessionRequest::Describe => Some(SessionReply::Session(SessionDescription {
                    name: self.name.clone(),
                    program: self.program.to_owned(),
                    policy: egress.policy().and_then(describe),
                })),
                SessionRequest::Policy(request) => {
                    let reply = self.clients.serve(id, request, fds, Some((egress, uplink)));
                    reply.map(SessionReply::Policy)
                }
            };
            reply.iter().for_each(|reply| self.reply(id, reply));
        }
    }

    /// Takes the uplink's answer to a policy, and answers the client that sent it.
    pub(crate) fn policy_is_set(&mut self, error: Option<String>, egress: &mut GuestEgress) {
        if let Some((id, reply)) = self.clients.policy_is_set(error, egress) {
            self.reply(id, &SessionReply::Policy(reply));
        }
    }

    /// Sends new verdicts to the clients that watch them.
    pub(crate) fn send_verdicts(&mut self, egress: &mut GuestEgress, uplink: &Channel) {
        let (watching, verdicts) = self.clients.take_verdicts(egress, uplink);
        for reply in verdicts.into_iter().map(SessionReply::Policy) {
            watching.iter().for_each(|id| self.reply(*id, &reply));
        }
    }

    fn accept(&mut self) {
        for _ in 0..IN_A_ROW {
            let Ok(socket) = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC) else {
                return;
            };
            self.admit(socket);
        }
    }

    fn admit(&mut self, socket: OwnedFd) {
        // The mode of the directory may have been changed.
        let is_own = peer_user(&socket).is_ok_and(|user| user == self.user);
        if is_own && self.list.len() < CLIENTS_MAX && peer_is_in_no_container(&socket) {
            self.list.push((self.next, Channel::from_fd(socket)));
            self.next += 1;
        }
    }

    /// Receives the next request. Removes clients that are gone.
    fn next_request(&mut self) -> Option<(ClientId, SessionRequest, Descriptors)> {
        let mut at = 0;
        while let Some((id, channel)) = self.list.get(at) {
            match channel.try_receive() {
                Ok(None) => at += 1,
                Ok(Some((request, fds))) => return Some((*id, request, fds)),
                Err(_) => self.remove(at),
            }
        }
        None
    }

    /// Answers a client. Disconnects it if it does not read.
    fn reply(&mut self, to: ClientId, reply: &SessionReply) {
        let failed = |(id, channel): &(ClientId, Channel)| {
            *id == to && channel.send_now(reply, &[]).is_err()
        };
        if let Some(at) = self.list.iter().position(failed) {
            self.remove(at);
        }
    }

    fn remove(&mut self, at: usize) {
        let (id, channel) = self.list.remove(at);
        channel.dispose();
        self.clients.forget(id);
    }
}

#[cfg(test)]
mod tests {
    use ringfence_uplink_process::egress::EgressArgs;

    use super::*;

    struct Fixture {
        _outer: tempfile::TempDir,
        directory: RuntimeDir,
        live: LivePolicy,
        egress: GuestEgress,
        uplink: Channel,
        _far: Channel,
    }

    fn fixture() -> Fixture {
        let outer = tempfile::tempdir().unwrap();
        let directory = RuntimeDir::open_at(outer.path().join("r")).unwrap();
        let live = LivePolicy::listen(&directory, "web".to_owned(), "pasta").unwrap();
        let options = EgressArgs { deny: vec!["a.org".to_owned()], ..EgressArgs::default() };
        let policy = options.source().unwrap();
        let egress = GuestEgress::open(policy, &options, "web".to_owned()).unwrap().with_denials();
        let (uplink, far) = Channel::pair().unwrap();
        Fixture { _outer: outer, directory, live, egress, uplink, _far: far }
    }

    impl Fixture {
        fn connect(&self) -> Channel {
            let mut found = self.directory.listeners(ListenerKind::Session, None).unwrap();
            Channel::from_fd(found.remove(0).connection.unwrap())
        }

        fn serve(&mut self) {
            self.live.serve(&mut self.egress, &self.uplink);
        }
    }

    #[test]
    fn client_is_told_the_name_and_the_policy_of_the_session() {
        let mut fixture = fixture();
        let client = fixture.connect();
        client.send(&SessionRequest::Describe, &[]).unwrap();
        client.send(&SessionRequest::Policy(PolicyRequest::Denials { after: 0 }), &[]).unwrap();
        fixture.serve();
        let description = SessionDescription {
            name: "web".to_owned(),
            program: "pasta".to_owned(),
            policy: Some("1 rule (--deny)".to_owned()),
        };
        let reply = client.receive::<SessionReply>().unwrap().0;
        assert_eq!(reply, SessionReply::Session(description));
        let reply = client.receive::<SessionReply>().unwrap().0;
        assert_eq!(reply, SessionReply::Policy(PolicyReply::Denials(Vec::new())));
    }

    #[test]
    fn client_of_another_user_is_disconnected() {
        let mut fixture = fixture();
        fixture.live.user += 1;
        let client = fixture.connect();
        fixture.serve();
        assert!(client.receive::<SessionReply>().is_err());
        assert!(fixture.live.list.is_empty());
    }

    #[test]
    fn clients_that_end_send_nonsense_or_exceed_the_limit_are_removed() {
        let mut fixture = fixture();
        let mut clients: Vec<_> = (0..=CLIENTS_MAX).map(|_| fixture.connect()).collect();
        fixture.serve();
        assert_eq!(fixture.live.list.len(), CLIENTS_MAX);
        clients[0].send(&"nonsense", &[]).unwrap();
        clients.truncate(CLIENTS_MAX - 3);
        fixture.serve();
        assert_eq!(fixture.live.list.len(), CLIENTS_MAX - 4);
    }
}

//! Tests of the server through requests and events, without sockets.

mod advisories;
mod hostile_server;
mod operations;
mod oracle;
mod sessions;
mod transactions;
mod watches;

use super::server::{ConnectionId, StoreServer};
use super::{Limits, fuzz_store_session};
use proptest::prelude::*;
use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::{
    ErrorName, Header, MessageReader, MessageType, Path, PermissionList, Reply, StoreRequest,
    WatchEvent, WatchPath, parse_permissions, parse_transaction_id,
};
use std::collections::BTreeMap;

proptest! {
    #[test]
    fn arbitrary_sessions_keep_accounts_and_limits(bytes in prop::collection::vec(any::<u8>(), 0..1500)) {
        fuzz_store_session(&bytes);
    }
}

#[test]
fn arbitrary_sessions_reach_every_limit() {
    // xorshift: the same sessions every time.
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut byte = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for _ in 0..300 {
        let session: Vec<u8> = (0..1500).map(|_| byte()).collect();
        let counters = super::fuzz::run(&session);
        let others = [
            ("conflicts", counters.conflicts),
            ("denied", counters.denied),
            ("malformed", counters.malformed),
            ("merged", counters.events_merged),
            ("paused", counters.output_paused),
            ("overrun", counters.output_overrun),
        ];
        for (name, count) in counters.refused.iter().chain(others) {
            *counts.entry(name).or_default() += count;
        }
    }
    let missed: Vec<_> = counts.iter().filter(|(_, count)| **count == 0).collect();
    assert!(missed.is_empty(), "never reached: {missed:?} of {counts:?}");
}

/// Server without sockets, whose clients read all output at once.
struct TestStore {
    server: StoreServer,
    /// Events that a connection received and no test has taken yet.
    events: BTreeMap<ConnectionId, Vec<(String, String)>>,
}

type Answer = Result<Vec<u8>, ErrorName>;

impl TestStore {
    fn new() -> TestStore {
        TestStore::with(Limits::default())
    }

    fn with(limits: Limits) -> TestStore {
        TestStore { server: StoreServer::new(limits), events: BTreeMap::new() }
    }

    fn toolstack(&mut self) -> ConnectionId {
        self.server.connect(DomId(0), true).unwrap()
    }

    fn guest(&mut self, domain: u16) -> ConnectionId {
        self.server.connect(DomId(domain), false).unwrap()
    }

    /// Creates the directory `data` in the home of `domain` and makes the domain its owner. The toolstack
    /// keeps the home.
    fn home(&mut self, toolstack: ConnectionId, domain: u16) {
        let data = format!("/local/domain/{domain}/data");
        self.mkdir(toolstack, &data).unwrap();
        self.set_perms(toolstack, &data, &format!("n{domain}")).unwrap();
    }

    /// Handles a request without reading the reply.
    fn send(&mut self, id: ConnectionId, tx_id: u32, request: &StoreRequest<'_>) {
        let mut message = Vec::new();
        request.emit(77, tx_id, &mut message).unwrap();
        let decoded = ringfence_wire::xenstore::decode(&message).unwrap().unwrap();
        self.server.handle(id, &decoded.header, decoded.payload);
    }

    /// Reads all output of `id`. Returns the replies and stores the events.
    fn receive(&mut self, id: ConnectionId) -> Vec<(Header, Vec<u8>)> {
        let mut reader = MessageReader::new();
        let mut replies = Vec::new();
        let Some(output) = self.server.output(id) else {
            return replies;
        };
        while !output.is_empty() {
            let filled = output.peek(reader.spare());
            output.advance(filled);
            reader.commit(filled);
            while let Some((header, payload)) = reader.next().unwrap() {
                if header.kind == MessageType::WatchEvent {
                    let event = WatchEvent::parse(payload).unwrap();
                    let token = String::from_utf8(event.token.to_vec()).unwrap();
                    let events = self.events.entry(id).or_default();
                    events.push((event.path.as_str().to_owned(), token));
                } else {
                    replies.push((header, payload.to_vec()));
                }
            }
        }
        assert_eq!(reader.pending(), 0, "only whole messages are sent");
        replies
    }

    fn ask(&mut self, id: ConnectionId, tx_id: u32, request: &StoreRequest<'_>) -> Answer {
        self.send(id, tx_id, request);
        let replies = self.receive(id);
        let [(header, payload)] = &replies[..] else {
            panic!("one request, one reply: {replies:?}");
        };
        assert_eq!((header.req_id, header.tx_id), (77, tx_id));
        match Reply::parse(request.kind(), header, payload).unwrap() {
            Reply::Success(payload) => Ok(payload.to_vec()),
            Reply::Failure(error) => Err(error),
        }
    }

    /// Handles a request of any type and payload, and returns the reply.
    fn ask_raw(&mut self, id: ConnectionId, kind: MessageType, payload: &[u8]) -> Answer {
        let len = u32::try_from(payload.len()).unwrap();
        self.server.handle(id, &Header { kind, req_id: 5, tx_id: 0, len }, payload);
        let replies = self.receive(id);
        let [(header, payload)] = &replies[..] else {
            panic!("one request, one reply: {replies:?}");
        };
        match Reply::parse(kind, header, payload).unwrap() {
            Reply::Success(payload) => Ok(payload.to_vec()),
            Reply::Failure(error) => Err(error),
        }
    }

    /// Returns the events of `id` since the last call.
    fn events(&mut self, id: ConnectionId) -> Vec<(String, String)> {
        assert!(self.receive(id).is_empty(), "a reply without a request");
        self.events.remove(&id).unwrap_or_default()
    }

    /// Returns the paths of the events since the last call.
    fn event_paths(&mut self, id: ConnectionId) -> Vec<String> {
        self.events(id).into_iter().map(|(path, _)| path).collect()
    }

    fn read(&mut self, id: ConnectionId, path: &str) -> Answer {
        self.ask(id, 0, &StoreRequest::Read { path: at(path) })
    }

    fn write(&mut self, id: ConnectionId, path: &str, value: &str) -> Result<(), ErrorName> {
        self.write_in(id, 0, path, value)
    }

    fn write_in(
        &mut self,
        id: ConnectionId,
        tx: u32,
        path: &str,
        value: &str,
    ) -> Result<(), ErrorName> {
        let request = StoreRequest::Write { path: at(path), value: value.as_bytes() };
        self.ask(id, tx, &request).map(|reply| assert_eq!(reply, b"OK\0"))
    }

    fn mkdir(&mut self, id: ConnectionId, path: &str) -> Result<(), ErrorName> {
        self.ask(id, 0, &StoreRequest::Mkdir { path: at(path) })
            .map(|reply| assert_eq!(reply, b"OK\0"))
    }

    fn rm(&mut self, id: ConnectionId, path: &str) -> Result<(), ErrorName> {
        self.ask(id, 0, &StoreRequest::Rm { path: at(path) })
            .map(|reply| assert_eq!(reply, b"OK\0"))
    }

    fn directory(&mut self, id: ConnectionId, path: &str) -> Result<Vec<String>, ErrorName> {
        let listing = self.ask(id, 0, &StoreRequest::Directory { path: at(path) })?;
        Ok(strings(&listing))
    }

    /// Sets the permissions in `list`, such as `n0 r5`.
    fn set_perms(&mut self, id: ConnectionId, path: &str, list: &str) -> Result<(), ErrorName> {
        let permissions = permissions(list);
        self.ask(id, 0, &StoreRequest::SetPerms { path: at(path), permissions })
            .map(|reply| assert_eq!(reply, b"OK\0"))
    }

    fn get_perms(&mut self, id: ConnectionId, path: &str) -> Result<String, ErrorName> {
        let list = self.ask(id, 0, &StoreRequest::GetPerms { path: at(path) })?;
        Ok(strings(&list).join(" "))
    }

    fn watch(&mut self, id: ConnectionId, path: &str, token: &str) -> Result<(), ErrorName> {
        self.watch_depth(id, path, token, None)
    }

    fn watch_depth(
        &mut self,
        id: ConnectionId,
        path: &str,
        token: &str,
        depth: Option<u32>,
    ) -> Result<(), ErrorName> {
        let path = WatchPath::parse(path.as_bytes()).unwrap();
        self.ask(id, 0, &StoreRequest::Watch { path, token: token.as_bytes(), depth })
            .map(|reply| assert_eq!(reply, b"OK\0"))
    }

    fn unwatch(&mut self, id: ConnectionId, path: &str, token: &str) -> Result<(), ErrorName> {
        let path = WatchPath::parse(path.as_bytes()).unwrap();
        self.ask(id, 0, &StoreRequest::Unwatch { path, token: token.as_bytes() }).map(drop)
    }

    fn start(&mut self, id: ConnectionId) -> Result<u32, ErrorName> {
        let reply = self.ask(id, 0, &StoreRequest::TransactionStart)?;
        Ok(parse_transaction_id(&reply).unwrap())
    }

    fn end(&mut self, id: ConnectionId, tx: u32, commit: bool) -> Result<(), ErrorName> {
        self.ask(id, tx, &StoreRequest::TransactionEnd { commit }).map(drop)
    }
}

fn at(path: &str) -> Path<'_> {
    Path::parse(path.as_bytes()).unwrap()
}

fn permissions(list: &str) -> PermissionList {
    let list: String = list.split(' ').flat_map(|entry| [entry, "\0"]).collect();
    parse_permissions(list.as_bytes()).unwrap()
}

fn strings(list: &[u8]) -> Vec<String> {
    let parsed = ringfence_wire::xenstore::parse_strings(list).unwrap();
    parsed.map(|text| String::from_utf8(text.to_vec()).unwrap()).collect()
}

//! Sessions of hostile clients, made from arbitrary bytes. They are the body of a fuzz target and of a
//! property test.

use ringfence_sys::numbers::bounded;
use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::{
    Header, MessageReader, MessageType, PAYLOAD_MAX, StoreRequest, WatchEvent, parse_permissions,
    parse_transaction_id,
};

use super::server::{ConnectionId, Leftovers, StoreServer};
use super::{Limits, StoreCounters};

/// Returns limits so small that a short session reaches each.
fn limits() -> Limits {
    Limits {
        nodes: 5,
        node_bytes: 150,
        value_bytes: 64,
        permissions: 2,
        depth: 6,
        watches: 3,
        transactions: 2,
        transaction_nodes: 4,
        transaction_bytes: 450,
        connections: 2,
        output_soft: 250,
        output_hard: 600,
        output_hard_privileged: 64 << 10,
    }
}

const PATHS: [&str; 20] = [
    "/",
    "/local/domain/1",
    "/local/domain/1/data",
    "/local/domain/1/data/a",
    "/local/domain/2/data",
    "/local/domain/2/data/a/b/c",
    "data",
    "data/a",
    "data/a/b/c/d/e/f",
    "data/b",
    "data/c",
    "data/d",
    "data/e",
    "data/a/b",
    "data/c/d",
    "data",
    "/local/domain/",
    "@releaseDomain",
    "@introduceDomain",
    "",
];

const PERMISSIONS: [&[u8]; 7] =
    [b"n1\0", b"r1\0b2\0", b"b2\0", b"n0\0r1\0w2\0", b"n1\0r2\0r3\0", b"n2\0r1\0r3\0", b"x1\0"];

/// Request types of a session, selected by one byte.
const KINDS: [MessageType; 16] = [
    MessageType::Write,
    MessageType::Write,
    MessageType::Mkdir,
    MessageType::Rm,
    MessageType::SetPerms,
    MessageType::Read,
    MessageType::Directory,
    MessageType::DirectoryPart,
    MessageType::GetPerms,
    MessageType::Watch,
    MessageType::Watch,
    MessageType::Unwatch,
    MessageType::TransactionStart,
    MessageType::TransactionEnd,
    MessageType::ResetWatches,
    MessageType::IsDomainIntroduced,
];

struct Client {
    id: ConnectionId,
    domain: DomId,
    privileged: bool,
    /// Set if the client reads its output only in steps of their own.
    reads_late: bool,
    /// Transactions that the server opened for it and that it has not ended.
    open: Vec<u32>,
    /// Reader of the server's output, which must consist of valid messages.
    reader: MessageReader,
}

struct Session<'a> {
    bytes: &'a [u8],
    server: StoreServer,
    clients: Vec<Client>,
}

/// Runs the session that `bytes` describe. Checks all limits after each step, and at the end that nothing is
/// left of the clients.
///
/// # Panics
/// Panics if the server violates a limit or sends an invalid message.
pub fn fuzz_store_session(bytes: &[u8]) {
    run(bytes);
}

/// Runs the session and returns the server's counters.
pub(super) fn run(bytes: &[u8]) -> StoreCounters {
    let mut session = Session { bytes, server: StoreServer::new(limits()), clients: Vec::new() };
    for (domain, privileged) in [(0, true), (1, false), (2, false), (2, false)] {
        session.connect(DomId(domain), privileged);
    }
    session.set_up_guests();
    while let Some(step) = session.byte() {
        session.step(step);
        session.server.audit().expect("accounts and limits hold");
    }
    session.finish()
}

impl Session<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.bytes.split_first()?;
        self.bytes = rest;
        Some(*first)
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        let choice = usize::from(self.byte().unwrap_or_default());
        from[choice % from.len()]
    }

    fn connect(&mut self, domain: DomId, privileged: bool) {
        self.server.introduce(domain);
        if let Ok(id) = self.server.connect(domain, privileged) {
            let reader = MessageReader::new();
            let open = Vec::new();
            self.clients.push(Client { id, domain, privileged, reads_late: false, open, reader });
        }
    }

    /// Creates the nodes and the watch of a toolstack with two guests.
    fn set_up_guests(&mut self) {
        let Some(toolstack) = self.clients.iter().position(|client| client.privileged) else {
            return;
        };
        for domain in [1u16, 2] {
            let path = format!("/local/domain/{domain}/data");
            self.send(toolstack, MessageType::Mkdir, 0, format!("{path}\0").as_bytes());
            let permissions = format!("{path}\0n{domain}\0");
            self.send(toolstack, MessageType::SetPerms, 0, permissions.as_bytes());
        }
        self.send(toolstack, MessageType::Watch, 0, b"/\0all\0");
    }

    fn step(&mut self, step: u8) {
        let client = usize::from(self.byte().unwrap_or_default()) % self.clients.len().max(1);
        match step {
            0..4 => self.connect(DomId(u16::from(step % 3)), step.is_multiple_of(3)),
            4..8 => {
                let domain = DomId(u16::from(step % 3));
                let leftovers = if step < 6 { Leftovers::Remove } else { Leftovers::Keep };
                self.server.release(domain, leftovers);
                self.remove_dropped();
                self.connect(domain, domain == DomId(0));
                self.set_up_guests();
            }
            _ if self.clients.is_empty() => return,
            8..12 => self.reconnect(client),
            12..20 => {
                let count = usize::from(self.byte().unwrap_or_default()) * 16;
                self.drain(client, count);
            }
            20..28 => self.clients[client].reads_late ^= true,
            28..36 => {
                let kind = MessageType::from_raw(u32::from(self.byte().unwrap_or_default()));
                let len = self.bytes.len().min(usize::from(step));
                let (payload, rest) = self.bytes.split_at(len);
                self.bytes = rest;
                self.send(client, kind, 0, payload);
            }
            _ => self.request(client),
        }
        self.remove_dropped();
    }

    fn reconnect(&mut self, client: usize) {
        let Client { id, domain, privileged, .. } = self.clients.remove(client);
        self.server.disconnect(id);
        self.connect(domain, privileged);
    }

    fn request(&mut self, client: usize) {
        let kind = self.pick(&KINDS);
        let path = self.pick(&PATHS);
        let choice = self.byte().unwrap_or_default();
        let open = &self.clients[client].open;
        let tx = match open.get(usize::from(choice % 4)) {
            Some(tx) if kind != MessageType::TransactionStart => *tx,
            _ => 0,
        };
        let mut payload = match kind {
            MessageType::TransactionStart | MessageType::ResetWatches => Vec::new(),
            MessageType::TransactionEnd => vec![b'T'],
            MessageType::IsDomainIntroduced => vec![b'1'],
            _ => path.as_bytes().to_vec(),
        };
        payload.push(0);
        match kind {
            MessageType::Write => payload.resize(payload.len() + usize::from(choice / 3), b'x'),
            MessageType::SetPerms => payload.extend_from_slice(self.pick(&PERMISSIONS)),
            MessageType::Watch | MessageType::Unwatch => {
                let token: &[u8] = if choice < 128 { b"t\0" } else { b"u\0" };
                payload.extend_from_slice(token);
                if choice.is_multiple_of(16) && kind == MessageType::Watch {
                    payload.extend_from_slice(b"1\0");
                }
            }
            MessageType::DirectoryPart => payload.extend_from_slice(b"3\0"),
            _ => {}
        }
        self.send(client, kind, tx, &payload);
        if kind == MessageType::TransactionEnd {
            self.clients[client].open.retain(|open| *open != tx);
        }
    }

    /// Sends a request if the server accepts one, as a pump does.
    fn send(&mut self, client: usize, kind: MessageType, tx_id: u32, payload: &[u8]) {
        let Client { id, domain, privileged, reads_late, .. } = self.clients[client];
        if !self.server.may_read(id) {
            return;
        }
        let used = (self.server.nodes_of(domain), self.server.bytes_of(domain));
        let len = bounded(payload.len(), PAYLOAD_MAX);
        self.server.handle(id, &Header { kind, req_id: 1, tx_id, len }, payload);
        if !privileged {
            // A privileged writer may exceed the quota of a domain, but the domain itself may add nothing then.
            let bound = self.server.limits();
            assert!(self.server.nodes_of(domain) <= used.0.max(bound.nodes), "nodes");
            assert!(self.server.bytes_of(domain) <= used.1.max(bound.node_bytes), "bytes");
        }
        if !reads_late {
            self.drain(client, usize::MAX);
        }
    }

    /// Reads up to `count` bytes of a client's output.
    fn drain(&mut self, client: usize, mut count: usize) {
        let client = &mut self.clients[client];
        let Some(output) = self.server.output(client.id) else {
            return;
        };
        while count > 0 && !output.is_empty() {
            let space = client.reader.spare();
            let len = space.len().min(count);
            let filled = output.peek(&mut space[..len]);
            output.advance(filled);
            client.reader.commit(filled);
            count -= filled;
            while let Some((header, payload)) = client.reader.next().expect("messages are framed") {
                check_decodable(&header, payload);
                if header.kind == MessageType::TransactionStart {
                    client.open.extend(parse_transaction_id(payload));
                }
            }
        }
    }

    fn remove_dropped(&mut self) {
        while self.server.take_ready().is_some() {}
        let server = &self.server;
        self.clients.retain(|client| server.is_connected(client.id));
    }

    fn finish(mut self) -> StoreCounters {
        for client in 0..self.clients.len() {
            self.drain(client, usize::MAX);
        }
        for client in &self.clients {
            self.server.disconnect(client.id);
        }
        for domain in [DomId(1), DomId(2)] {
            self.server.release(domain, Leftovers::Remove);
            assert_eq!(self.server.nodes_of(domain), 0, "a released domain owns nothing");
        }
        self.server.audit().expect("accounts and limits hold");
        assert!(self.server.is_idle(), "a disconnected client leaves nothing behind");
        *self.server.counters()
    }
}

/// Checks that a client can decode a message of the server.
fn check_decodable(header: &Header, payload: &[u8]) {
    match header.kind {
        MessageType::WatchEvent => {
            assert_eq!((header.req_id, header.tx_id), (0, 0));
            WatchEvent::parse(payload).expect("an event has a path and a token");
        }
        MessageType::Error => assert!(payload.ends_with(b"\0"), "an error is a terminated name"),
        MessageType::GetPerms => {
            parse_permissions(payload).expect("permissions are a list");
        }
        kind => {
            let known = !matches!(StoreRequest::parse(kind, b""), Err(error)
                if matches!(error, ringfence_wire::xenstore::RequestError::Unsupported { .. }));
            assert!(known, "{kind:?} succeeded");
        }
    }
}

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{Name, RecordType};

use super::*;

type Table = Arc<Mutex<HashMap<String, Vec<IpAddr>>>>;

/// Names in a table, with a pipe that signals changes.
struct Names {
    table: Table,
    changes: OwnedFd,
}

impl NameSource for Names {
    fn lookup(&mut self, name: &str) -> io::Result<Vec<IpAddr>> {
        Ok(self.table.lock().unwrap().get(name).cloned().unwrap_or_default())
    }

    fn reverse(&mut self, address: IpAddr) -> io::Result<Option<String>> {
        let table = self.table.lock().unwrap();
        Ok(table.iter().find(|(_, all)| all.contains(&address)).map(|(name, _)| name.clone()))
    }

    fn names(&mut self) -> io::Result<Vec<String>> {
        Ok(self.table.lock().unwrap().keys().cloned().collect())
    }

    fn announce(&mut self, name: &str, addresses: &[IpAddr]) -> io::Result<()> {
        self.table.lock().unwrap().insert(name.into(), addresses.into());
        Ok(())
    }

    fn changes(&self) -> Option<BorrowedFd<'_>> {
        Some(self.changes.as_fd())
    }

    fn acknowledge(&mut self) -> io::Result<()> {
        rustix::io::read(&self.changes, &mut [0; 16])?;
        Ok(())
    }
}

struct World {
    table: Table,
    change: OwnedFd,
    server: SocketAddr,
}

impl World {
    /// Starts a stub on a free port. Its thread ends with the test process.
    fn new(own: Option<Own>) -> World {
        World::with_server(own, None)
    }

    /// Starts a stub with a name server, and with the search domain `corp.example`.
    fn with_server(own: Option<Own>, server: Option<SocketAddr>) -> World {
        let table = Table::default();
        let (changes, change) = rustix::pipe::pipe().unwrap();
        // A port that is free for UDP may be in use for TCP.
        let bound =
            (0..100).find_map(|_| Stub::bind_at("127.0.0.1:0".parse().unwrap()).ok()).unwrap();
        let sockets = vec![bound];
        let forwarder = DnsForwarder::new(server.into_iter().collect());
        let server = sockets[0].0.local_addr().unwrap();
        let stub = Stub {
            source: Box::new(Names { table: table.clone(), changes }),
            switch: "lab".into(),
            own,
            announce_by: None,
            sockets,
            connections: Vec::new(),
            waiting: Vec::new(),
            next_waiting: 0,
            forwarder,
            search: vec!["corp.example".into()],
            files: None,
            version: 0,
        };
        stub.run_in_background().unwrap();
        World { table, change, server }
    }

    fn announce(&self, name: &str, address: &str) {
        self.table.lock().unwrap().insert(name.into(), vec![address.parse().unwrap()]);
        rustix::io::write(&self.change, b"!").unwrap();
    }

    fn ask(&self, name: &str) -> UdpSocket {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(self.server).unwrap();
        socket.send(&query(name, RecordType::A)).unwrap();
        socket
    }
}

fn query(name: &str, kind: RecordType) -> Vec<u8> {
    let mut message = Message::new(1, MessageType::Query, OpCode::Query);
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
    message.to_vec().unwrap()
}

fn heard(socket: &UdpSocket, within: Duration) -> Option<(ResponseCode, Vec<String>)> {
    let mut buffer = [0; 512];
    socket.set_read_timeout(Some(within)).unwrap();
    let length = socket.recv(&mut buffer).ok()?;
    Some(read(&buffer[..length]))
}

fn read(bytes: &[u8]) -> (ResponseCode, Vec<String>) {
    let message = Message::from_vec(bytes).unwrap();
    let answers = message.answers.iter().map(|record| record.data.to_string()).collect();
    (message.metadata.response_code, answers)
}

const SOON: Duration = Duration::from_secs(60);

#[test]
fn announced_name_is_answered_at_once() {
    let world = World::new(None);
    world.announce("web", "10.0.0.2");
    let answer = heard(&world.ask("web.lab."), SOON);
    assert_eq!(answer, Some((ResponseCode::NoError, vec!["10.0.0.2".into()])));
    let foreign = heard(&world.ask("example.org."), SOON);
    assert_eq!(foreign, Some((ResponseCode::NXDomain, vec![])));
}

#[test]
fn query_for_unknown_name_is_held_back_without_delaying_others() {
    let world = World::new(None);
    let early = world.ask("web.");
    assert_eq!(heard(&early, Duration::from_millis(300)), None);
    world.announce("db", "10.0.0.3");
    assert!(heard(&world.ask("db."), SOON).is_some());
    world.announce("web", "10.0.0.2");
    assert_eq!(heard(&early, SOON), Some((ResponseCode::NoError, vec!["10.0.0.2".into()])));
}

#[test]
fn own_name_is_answered_before_it_is_announced() {
    let own = Own { name: "me".into(), addresses: vec!["10.0.0.9".parse().unwrap()] };
    let world = World::new(Some(own));
    let answer = heard(&world.ask("me."), SOON);
    assert_eq!(answer, Some((ResponseCode::NoError, vec!["10.0.0.9".into()])));
    let deadline = Instant::now() + ANNOUNCE_AFTER + SOON;
    while world.table.lock().unwrap().is_empty() {
        assert!(Instant::now() < deadline, "never announced");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(world.table.lock().unwrap()["me"], ["10.0.0.9".parse::<IpAddr>().unwrap()]);
}

/// Answers queries that arrive at a socket: `nas.` has an address, no other name exists.
fn name_server() -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 512];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let query = Message::from_vec(&buffer[..length]).unwrap();
            let name = query.queries[0].name.clone();
            let mut reply = Message::response(query.metadata.id, OpCode::Query);
            reply.add_query(query.queries[0].clone());
            if name.to_string() == "nas." {
                let data = hickory_proto::rr::RData::A(Ipv4Addr::new(192, 0, 2, 7).into());
                reply.add_answer(hickory_proto::rr::Record::from_rdata(name, 1, data));
            } else {
                reply.metadata.response_code = ResponseCode::NXDomain;
            }
            socket.send_to(&reply.to_vec().unwrap(), from).unwrap();
        }
    });
    address
}

#[test]
fn short_name_that_name_servers_know_is_answered_unless_a_guest_has_it() {
    let world = World::with_server(None, Some(name_server()));
    let answer = heard(&world.ask("nas."), SOON);
    assert_eq!(answer, Some((ResponseCode::NoError, vec!["192.0.2.7".into()])));
    world.announce("nas", "10.0.0.2");
    let answer = heard(&world.ask("nas."), SOON);
    assert_eq!(answer, Some((ResponseCode::NoError, vec!["10.0.0.2".into()])));
}

#[test]
fn short_name_that_name_servers_do_not_know_waits_for_a_guest() {
    let world = World::with_server(None, Some(name_server()));
    let early = world.ask("web.");
    assert_eq!(heard(&early, Duration::from_millis(300)), None);
    world.announce("web", "10.0.0.2");
    assert_eq!(heard(&early, SOON), Some((ResponseCode::NoError, vec!["10.0.0.2".into()])));
}

/// Number of queries that the server of the next test leaves without an answer at a time.
const BULK: usize = 400;

#[test]
fn queries_in_bulk_are_all_answered_by_a_server_that_waits_for_the_last_one() {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    let (heard_by_server, heard_count) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 512];
        let mut queries = Vec::new();
        while queries.len() < BULK {
            let (length, from) = server.recv_from(&mut buffer).unwrap();
            queries.push((buffer[..length].to_vec(), from));
            heard_by_server.send(()).unwrap();
        }
        for (mut query, from) in queries {
            query[2] |= 0x80;
            server.send_to(&query, from).unwrap();
        }
    });
    let world = World::with_server(None, Some(address));
    // No receive buffer overflows: each query is with the server before the next ones are sent.
    let clients: Vec<UdpSocket> = (0..BULK)
        .map(|number| {
            let client = world.ask(&format!("name{number}.example."));
            heard_count.recv_timeout(SOON).unwrap();
            client
        })
        .collect();
    for client in clients {
        assert_eq!(heard(&client, SOON), Some((ResponseCode::NoError, vec![])));
    }
}

#[test]
fn guest_is_found_below_a_search_domain_of_the_host() {
    let world = World::with_server(None, Some(name_server()));
    let ask = || heard(&world.ask("web.corp.example."), SOON);
    assert_eq!(ask(), Some((ResponseCode::NXDomain, vec![])));
    world.announce("web", "10.0.0.2");
    assert_eq!(ask(), Some((ResponseCode::NoError, vec!["10.0.0.2".into()])));
}

#[test]
fn tcp_queries_in_pieces_and_in_sequence_are_answered() {
    let world = World::new(None);
    world.announce("web", "10.0.0.2");
    let mut stream = TcpStream::connect(world.server).unwrap();
    let query = query("web.", RecordType::A);
    let one = [&u16::try_from(query.len()).unwrap().to_be_bytes()[..], &query].concat();
    let two = one.repeat(2);
    stream.write_all(&two[..7]).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    stream.write_all(&two[7..]).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    for _ in 0..2 {
        let mut length = [0; 2];
        stream.read_exact(&mut length).unwrap();
        let mut reply = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(read(&reply), (ResponseCode::NoError, vec!["10.0.0.2".into()]));
    }
}

#[test]
fn tcp_length_beyond_any_query_closes_the_connection() {
    let world = World::new(None);
    let mut stream = TcpStream::connect(world.server).unwrap();
    stream.write_all(&[0xff, 0xff, 0, 0]).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn address_query_returns_the_announced_name() {
    let world = World::new(None);
    world.announce("web", "10.0.0.2");
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect(world.server).unwrap();
    socket.send(&query("2.0.0.10.in-addr.arpa.", RecordType::PTR)).unwrap();
    let answer = heard(&socket, SOON);
    assert_eq!(answer, Some((ResponseCode::NoError, vec!["web.ringfence.".into()])));
}

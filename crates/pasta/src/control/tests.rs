use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU16, Ordering};

use crate::forward_rules::{parse_tables, write_updates};

use super::*;
use ringfence_uplink_process::FromUplink;
use ringfence_uplink_process::forwarded_ports::ForwardedPortOrder;
use ringfence_uplink_process::orders::UplinkOrder;

const OWN: &str = "10.0.0.2";

fn server(capabilities: u32) -> (tempfile::TempDir, ControlServer) {
    let place = tempfile::tempdir().unwrap();
    let listener = listen("--conf-path", &place.path().join("control")).unwrap();
    let (client, rules, open) = Default::default();
    let addresses = vec![OWN.parse().unwrap()];
    (place, ControlServer { listener, client, rules, open, addresses, capabilities })
}

fn rule(address: &str, (first, last, to): (u16, u16, u16)) -> Rule {
    Rule {
        is_udp: false,
        address: Some(address.parse().unwrap()),
        target: None,
        interface: None,
        first,
        last,
        to,
        is_optional: false,
        follows_listeners: false,
    }
}

/// Uplink that confirms every order, and notes them.
fn uplink(far: Channel) -> std::thread::JoinHandle<Vec<ForwardedPortOrder>> {
    std::thread::spawn(move || {
        let mut orders = Vec::new();
        while let Ok((UplinkOrder::Port(order), sockets)) = far.receive::<UplinkOrder>() {
            orders.push(order);
            // Their ports are free before the answer, as those that the uplink closes are.
            sockets.close_internet_sockets();
            let (ForwardedPortOrder::Open { id, .. } | ForwardedPortOrder::Close { id }) = order
            else {
                continue;
            };
            far.send(&FromUplink::Port { id, error: None }, &[]).unwrap();
        }
        orders
    })
}

/// Lets the server serve a client that sends `rules`. Returns what it answers, and the orders to the uplink.
fn ask(
    server: &mut ControlServer,
    place: &Path,
    rules: &[Rule],
) -> (String, Vec<ForwardedPortOrder>) {
    let mut client = UnixStream::connect(place.join("control")).unwrap();
    let update = Update { number: INBOUND.0, rules: rules.to_vec() };
    client.write_all(&write_updates(&[update])).unwrap();
    let (channel, far) = Channel::pair().unwrap();
    let uplink = uplink(far);
    server.serve(&channel, &mut ForwardedPorts::default()).unwrap();
    drop(channel);
    let mut bytes = Vec::new();
    client.read_to_end(&mut bytes).unwrap();
    let tables = (0..=bytes.len()).find(|len| matches!(parse_tables(&bytes[..*len]), Ok(Some(_))));
    (String::from_utf8_lossy(&bytes[tables.unwrap()..]).into_owned(), uplink.join().unwrap())
}

/// Address of the loopback that only this process uses: others may run these tests at the same time.
fn here() -> String {
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    format!("127.{}.{middle}.{low}", high.saturating_add(1))
}

/// Returns a port of [`here`] that nobody uses, outside the range from which the kernel gives ports to others.
fn free_port() -> u16 {
    static TRIED: AtomicU16 = AtomicU16::new(12_000);
    loop {
        let port = TRIED.fetch_add(1, Ordering::Relaxed);
        if std::net::TcpListener::bind((here(), port)).is_ok() {
            return port;
        }
    }
}

#[test]
fn rules_of_a_client_replace_those_before() {
    let (place, mut server) = server(capabilities::IPV4 | capabilities::TCP);
    let (one, other) = (free_port(), free_port());
    let first = [rule(&here(), (one, one, 80))];
    let (answer, orders) = ask(&mut server, place.path(), &first);
    assert_eq!((answer.as_str(), orders.len(), server.rules.len()), ("", 1, 1));
    // One stays, another one comes.
    let both = [first[0].clone(), rule(&here(), (other, other, 81))];
    let (answer, orders) = ask(&mut server, place.path(), &both);
    assert_eq!(answer, "");
    assert!(
        matches!(orders[..], [ForwardedPortOrder::Open { forward, .. }] if forward.guest_port == 81)
    );
    // Without rules, both are closed.
    let (answer, orders) = ask(&mut server, place.path(), &[]);
    assert_eq!((answer.as_str(), server.open.len()), ("", 0));
    assert!(
        matches!(orders[..], [ForwardedPortOrder::Close { .. }, ForwardedPortOrder::Close { .. }]),
        "{orders:?}"
    );
}

#[test]
fn update_with_a_port_that_is_taken_changes_nothing() {
    let (place, mut server) = server(capabilities::IPV4 | capabilities::TCP);
    let one = free_port();
    let first = [rule(&here(), (one, one, 80))];
    assert_eq!(ask(&mut server, place.path(), &first).0, "");
    // Ports are opened in ascending order: the new one before the one that is taken.
    let (other, taken) = (free_port(), free_port());
    let _holder = std::net::TcpListener::bind((here(), taken)).unwrap();
    let new = [rule(&here(), (other, other, 80)), rule(&here(), (taken, taken, 81))];
    let (answer, orders) = ask(&mut server, place.path(), &new);
    assert!(answer.contains(&format!("cannot listen at {}:{taken}/tcp", here())), "{answer}");
    // The first port is closed, and so is the new one; then the first port is opened again.
    use ForwardedPortOrder::{Close, Open};
    assert!(
        matches!(orders[..], [Close { .. }, Open { .. }, Close { .. }, Open { .. }]),
        "{orders:?}"
    );
    assert_eq!(server.rules, first);
    let ports: Vec<u16> = server.open.keys().map(|(_, at)| at.port()).collect();
    assert_eq!(ports, [one]);
}

#[test]
fn rules_that_pasta_cannot_have_are_refused() {
    let (place, mut server) = server(capabilities::IPV4 | capabilities::TCP);
    let port = free_port();
    let plain = rule(&here(), (port, port, 80));
    for (wrong, reason) in [
        (Rule { is_udp: true, ..plain.clone() }, "protocol is switched off"),
        (Rule { address: None, ..plain.clone() }, "no address of this family"),
        (rule("::1", (port, port, 80)), "no address of this family"),
        (Rule { interface: Some("lo".to_owned()), ..plain.clone() }, "not at an interface"),
        (Rule { follows_listeners: true, ..plain.clone() }, "not `auto`"),
        (Rule { target: Some("10.0.0.3".parse().unwrap()), ..plain.clone() }, "own address only"),
        (rule(&here(), (2, 2000, 2)), "at most 1024 ports"),
    ] {
        let (answer, orders) = ask(&mut server, place.path(), &[wrong]);
        assert!(answer.contains(reason), "{answer} for {reason}");
        assert_eq!((orders.len(), server.rules.len()), (0, 0));
    }
    let twice = [plain.clone(), plain.clone()];
    assert!(ask(&mut server, place.path(), &twice).0.contains("another rule has port"));
    let own = Rule { target: Some(OWN.parse().unwrap()), ..plain };
    assert_eq!(ask(&mut server, place.path(), &[own]).0, "");
}

#[test]
fn clients_are_served_one_after_the_other() {
    let (place, mut server) = server(capabilities::IPV4 | capabilities::TCP);
    let connect = || UnixStream::connect(place.path().join("control")).unwrap();
    let (first, second) = (connect(), connect());
    let (channel, _far) = Channel::pair().unwrap();
    server.serve(&channel, &mut ForwardedPorts::default()).unwrap();
    second.set_nonblocking(true).unwrap();
    assert_eq!((&second).read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    // The first one goes, and its time is not waited for.
    drop(first);
    server.serve(&channel, &mut ForwardedPorts::default()).unwrap();
    let mut bytes = [0; 8];
    (&second).read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"basil:s\0");
    // The time of the second one is over.
    server.client.as_mut().unwrap().until = Instant::now();
    server.serve(&channel, &mut ForwardedPorts::default()).unwrap();
    assert!(server.client.is_none());
}

use std::net::{Ipv4Addr, UdpSocket};
use std::time::{Duration, Instant};

use super::*;

fn pair(ip: IpAddr) -> (UdpSocket, UdpSocket) {
    let receiver = UdpSocket::bind((ip, 0)).unwrap();
    let sender = UdpSocket::bind((ip, 0)).unwrap();
    (sender, receiver)
}

fn take(socket: &UdpSocket) -> Vec<(Vec<u8>, Received)> {
    let mut rooms = [[0; 4096]; 4];
    let mut found = Vec::new();
    let buffers = rooms.iter_mut().map(|room| &mut room[..]);
    // A limit on the wait for the first datagram; then only those that are there.
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let count = receive(socket, buffers, Wait::ForOne, |at, one| found.push((at, one))).unwrap();
    assert_eq!(count, found.len());
    found.into_iter().map(|(at, one)| (rooms[at][..one.len].to_vec(), one)).collect()
}

/// Sends to a port that was closed until its report comes. A process that another test starts has the socket, too, until it
/// executes its program.
fn report_of_closed_port(sender: &UdpSocket, to: SocketAddr, bytes: &mut [u8]) -> QueuedError {
    let begun = Instant::now();
    loop {
        send(sender, b"lost", &SendOptions { to: Some(to), ..SendOptions::default() }).unwrap();
        // The kernel queues the report before the send over the loopback interface returns.
        match receive_error(sender, bytes) {
            Ok(report) => return report.unwrap(),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "no report");
        std::thread::yield_now();
    }
}

#[test]
fn datagram_arrives_with_both_addresses() {
    for ip in ["127.0.0.1", "::1"].map(|text| text.parse::<IpAddr>().unwrap()) {
        let (sender, receiver) = pair(ip);
        report_destinations(&receiver, ip.is_ipv6()).unwrap();
        let to = receiver.local_addr().unwrap();
        send(&sender, b"hello", &SendOptions { to: Some(to), ..SendOptions::default() }).unwrap();
        let expected = Received {
            len: 5,
            from: Some(sender.local_addr().unwrap()),
            to: Some(ip),
            segment: None,
            class: 0,
            hops: None,
        };
        assert_eq!(take(&receiver), [(b"hello".to_vec(), expected)]);
    }
}

#[test]
fn fixed_source_address_is_used() {
    let (_, receiver) = pair(Ipv4Addr::LOCALHOST.into());
    let sender = UdpSocket::bind("0.0.0.0:0").unwrap();
    let from: IpAddr = "127.0.0.9".parse().unwrap();
    let to = Some(receiver.local_addr().unwrap());
    send(&sender, b"x", &SendOptions { to, from: Some(from), segment: None }).unwrap();
    assert_eq!(take(&receiver)[0].1.from.unwrap().ip(), from);
}

#[test]
fn block_is_cut_into_segments_and_joined_again() {
    let (sender, receiver) = pair(Ipv4Addr::LOCALHOST.into());
    let to = Some(receiver.local_addr().unwrap());
    let options = SendOptions { to, from: None, segment: Some(1000) };
    send(&sender, &[1; 2500], &options).unwrap();
    let lengths: Vec<usize> = std::iter::from_fn(|| Some(take(&receiver)))
        .flatten()
        .map(|(_, one)| one.len)
        .take(3)
        .collect();
    assert_eq!(lengths, [1000, 1000, 500]);
    join_received(&receiver).unwrap();
    segment_sent(&sender, 600).unwrap();
    send(&sender, &[2; 1500], &SendOptions { segment: None, ..options }).unwrap();
    let (bytes, one) = take(&receiver).remove(0);
    assert_eq!((bytes, one.segment), (vec![2; 1500], Some(600)));
}

#[test]
fn error_of_closed_port_is_queued_with_its_reporter() {
    for ip in ["127.0.0.1", "::1"].map(|text| text.parse::<IpAddr>().unwrap()) {
        let (sender, receiver) = pair(ip);
        let to = receiver.local_addr().unwrap();
        drop(receiver);
        queue_errors(&sender, ip.is_ipv6()).unwrap();
        let mut bytes = [0; 64];
        let empty = receive_error(&sender, &mut bytes).unwrap_err();
        assert_eq!(empty.kind(), io::ErrorKind::WouldBlock);
        let report = report_of_closed_port(&sender, to, &mut bytes);
        assert_eq!((report.reporter, report.to, report.len), (Some(ip), Some(to), 4));
        let expected = if ip.is_ipv4() { (3, 3) } else { (1, 4) };
        assert_eq!((report.kind, report.code), expected);
        assert_eq!(&bytes[..4], b"lost");
    }
}

#[test]
fn destination_of_wrong_family_is_refused() {
    let (sender, _receiver) = pair(Ipv4Addr::LOCALHOST.into());
    let to = Some("[::1]:9".parse().unwrap());
    assert!(send(&sender, b"x", &SendOptions { to, ..SendOptions::default() }).is_err());
}

#[test]
fn datagram_arrives_with_its_traffic_class_and_hop_limit() {
    for ip in ["127.0.0.1", "::1"].map(|text| text.parse::<IpAddr>().unwrap()) {
        let (sender, receiver) = pair(ip);
        report_destinations(&receiver, ip.is_ipv6()).unwrap();
        report_class(&receiver, ip.is_ipv6()).unwrap();
        report_hops(&receiver, ip.is_ipv6()).unwrap();
        join_received(&receiver).unwrap();
        if ip.is_ipv6() {
            set_int(&sender, libc::IPPROTO_IPV6, libc::IPV6_TCLASS, 0xb9).unwrap();
            set_int(&sender, libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, 33).unwrap();
        } else {
            set_int(&sender, libc::IPPROTO_IP, libc::IP_TOS, 0xb9).unwrap();
            set_int(&sender, libc::IPPROTO_IP, libc::IP_TTL, 33).unwrap();
        }
        let to = Some(receiver.local_addr().unwrap());
        let options = SendOptions { to, segment: Some(100), ..SendOptions::default() };
        send(&sender, &[1; 250], &options).unwrap();
        let (bytes, one) = take(&receiver).remove(0);
        assert_eq!((bytes.len(), one.segment, one.to), (250, Some(100), Some(ip)));
        assert_eq!((one.class, one.hops), (0xb9, Some(33)));
    }
}

#[test]
fn report_fits_beside_the_fields_of_a_datagram() {
    let ip: IpAddr = "::1".parse().unwrap();
    let (sender, receiver) = pair(ip);
    let to = receiver.local_addr().unwrap();
    drop(receiver);
    queue_errors(&sender, true).unwrap();
    report_destinations(&sender, true).unwrap();
    report_class(&sender, true).unwrap();
    report_hops(&sender, true).unwrap();
    let report = report_of_closed_port(&sender, to, &mut [0; 64]);
    assert_eq!((report.kind, report.code, report.reporter), (1, 4, Some(ip)));
}

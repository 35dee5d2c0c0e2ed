//! Concurrent connections, datagrams of many lengths, and streams that break off: each compares the received
//! data with the data sent.

use std::io::{Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::{CHUNK, chunks, connect, listen, set_timeouts};

/// Time after which a datagram without a reply counts as lost.
const LOST: Duration = Duration::from_millis(1500);

/// Opens many connections to an `echo` at the same time, sends another pattern on each, and compares the
/// echoes.
pub(super) fn many(
    address: &str,
    port: u16,
    connections: usize,
    kibibytes: usize,
) -> anyhow::Result<String> {
    let mut open = Vec::with_capacity(connections);
    for number in 0..connections {
        open.push((number, connect(address, port).with_context(|| format!("of {number}"))?));
    }
    // All data is in flight at once, and small enough to fit into the buffers on the way.
    let sent = |number: usize| -> Vec<u8> {
        (0..kibibytes << 10).map(|at| (at ^ number ^ at >> 8).to_le_bytes()[0]).collect()
    };
    for (number, stream) in &mut open {
        stream.write_all(&sent(*number)).with_context(|| format!("sending on {number}"))?;
    }
    for (number, stream) in &mut open {
        let mut received = vec![0; kibibytes << 10];
        stream.read_exact(&mut received).with_context(|| format!("the echo on {number}"))?;
        ensure!(received == sent(*number), "connection {number} returned wrong data");
    }
    Ok(format!("{connections} connections"))
}

/// Sends datagrams of many lengths up to the maximum, one after the other. Repeats a lost one, at most twice.
pub(super) fn datagrams(address: &str, port: u16, count: u32) -> anyhow::Result<String> {
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    socket.connect((address, port))?;
    socket.set_read_timeout(Some(LOST))?;
    let mut received = vec![0; 65_536];
    let mut lost = 0;
    for number in 0..count {
        // A prime step alternates between short and long datagrams.
        let len = 4 + usize::try_from(number)? * 7919 % 65_400;
        let mut sent: Vec<u8> = (0..len).map(|at| at.to_le_bytes()[0]).collect();
        sent[..4].copy_from_slice(&number.to_le_bytes());
        let mut tries = 0;
        loop {
            socket.send(&sent).with_context(|| format!("{len} bytes"))?;
            match socket.recv(&mut received) {
                Ok(got) => {
                    ensure!(
                        received[..got] == sent,
                        "datagram {number} of {len} bytes returned with {got}"
                    );
                    break;
                }
                Err(_) if tries < 2 => (tries, lost) = (tries + 1, lost + 1),
                Err(error) => {
                    return Err(error).with_context(|| format!("number {number}, {len} bytes"));
                }
            }
        }
    }
    Ok(format!("{count} datagrams, {lost} sent again"))
}

/// Returns each datagram to its sender.
pub(super) fn return_datagrams(port: u16) -> anyhow::Result<String> {
    let socket = UdpSocket::bind(("0.0.0.0", port)).with_context(|| format!("port {port}"))?;
    let mut buffer = vec![0; 65_536];
    loop {
        let (len, from) = socket.recv_from(&mut buffer)?;
        // A sender that has exited needs no reply.
        let _ = socket.send_to(&buffer[..len], from);
    }
}

/// Receives one stream up to its end or its break, and compares it with the stream of `send`. Returns the
/// number of correct bytes.
pub(super) fn beginning(port: u16) -> anyhow::Result<String> {
    take_beginning(&listen(port)?)
}

fn take_beginning(listener: &TcpListener) -> anyhow::Result<String> {
    let (mut stream, _) = listener.accept()?;
    set_timeouts(&stream)?;
    let mut length = 0;
    // Longer than every stream of the scenarios.
    for chunk in chunks(1 << 20) {
        let mut received = vec![0; CHUNK];
        let mut filled = 0;
        let begun = Instant::now();
        while filled < CHUNK {
            let got = match stream.read(&mut received[filled..]) {
                Ok(0) | Err(_) => break,
                Ok(got) => got,
            };
            filled += got;
        }
        ensure!(
            received[..filled] == chunk[..filled],
            "wrong bytes between {length} and {}",
            length + filled
        );
        length += filled;
        if filled < CHUNK {
            return Ok(format!(
                "{length} right, then {} ms of nothing",
                begun.elapsed().as_millis()
            ));
        }
    }
    Ok(format!("{length} right"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Shutdown;

    fn free_port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    #[test]
    fn concurrent_connections_return_their_own_data() {
        let port = free_port();
        std::thread::spawn(move || crate::echo(port));
        let begun = Instant::now();
        while many("127.0.0.1", port, 20, 8).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(30));
        }
    }

    #[test]
    fn datagrams_of_many_lengths_return_unchanged() {
        let port = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        std::thread::spawn(move || return_datagrams(port));
        let begun = Instant::now();
        while datagrams("127.0.0.1", port, 50).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(30));
        }
    }

    #[test]
    fn truncated_stream_is_compared_up_to_its_end() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let taking = std::thread::spawn(move || take_beginning(&listener).unwrap());
        let mut stream = connect("127.0.0.1", port).unwrap();
        let first = chunks(1).next().unwrap();
        stream.write_all(&first).unwrap();
        stream.write_all(&chunks(1).nth(1).unwrap()[..1000]).unwrap();
        stream.shutdown(Shutdown::Both).unwrap();
        let sent = taking.join().unwrap();
        assert!(sent.starts_with("66536 right"), "{sent}");
    }
}

//! Many connections at a time, datagrams of every length, and streams that are cut off: what comes is
//! compared with what was sent.

use std::io::{Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::{CHUNK, chunks, connect, listen, settle};

/// How long an answer to a datagram may take until it counts as lost.
const LOST: Duration = Duration::from_millis(1500);

/// So many connections to an `echo` at the same time, each with a pattern of its own; every octet comes back.
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
    // Everything is under way at once, and little enough of it to fit into the buffers on the way.
    let said = |number: usize| -> Vec<u8> {
        (0..kibibytes << 10).map(|at| (at ^ number ^ at >> 8).to_le_bytes()[0]).collect()
    };
    for (number, stream) in &mut open {
        stream.write_all(&said(*number)).with_context(|| format!("sending on {number}"))?;
    }
    for (number, stream) in &mut open {
        let mut heard = vec![0; kibibytes << 10];
        stream.read_exact(&mut heard).with_context(|| format!("the echo on {number}"))?;
        ensure!(heard == said(*number), "connection {number} does not say what it was told");
    }
    Ok(format!("{connections} connections"))
}

/// Sends datagrams of every length up to the longest there is, each once it was answered; one that is lost
/// is sent again, twice.
pub(super) fn datagrams(address: &str, port: u16, count: u32) -> anyhow::Result<String> {
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    socket.connect((address, port))?;
    socket.set_read_timeout(Some(LOST))?;
    let mut heard = vec![0; 65_536];
    let mut lost = 0;
    for number in 0..count {
        // A prime step visits short and long ones in turn.
        let len = 4 + usize::try_from(number)? * 7919 % 65_400;
        let mut said: Vec<u8> = (0..len).map(|at| at.to_le_bytes()[0]).collect();
        said[..4].copy_from_slice(&number.to_le_bytes());
        let mut tries = 0;
        loop {
            socket.send(&said).with_context(|| format!("{len} octets"))?;
            match socket.recv(&mut heard) {
                Ok(got) => {
                    ensure!(
                        heard[..got] == said,
                        "datagram {number} of {len} octets came back as {got}"
                    );
                    break;
                }
                Err(_) if tries < 2 => (tries, lost) = (tries + 1, lost + 1),
                Err(error) => {
                    return Err(error).with_context(|| format!("number {number}, {len} octets"));
                }
            }
        }
    }
    Ok(format!("{count} datagrams, {lost} sent again"))
}

/// Returns datagrams to whom they came from.
pub(super) fn return_datagrams(port: u16) -> anyhow::Result<String> {
    let socket = UdpSocket::bind(("0.0.0.0", port)).with_context(|| format!("port {port}"))?;
    let mut octets = vec![0; 65_536];
    loop {
        let (len, from) = socket.recv_from(&mut octets)?;
        // Whoever is gone does not want it any more.
        let _ = socket.send_to(&octets[..len], from);
    }
}

/// Takes one stream however it ends, and compares it with what `send` sends; how much of it came.
pub(super) fn beginning(port: u16) -> anyhow::Result<String> {
    take_beginning(&listen(port)?)
}

fn take_beginning(listener: &TcpListener) -> anyhow::Result<String> {
    let (mut stream, _) = listener.accept()?;
    settle(&stream)?;
    let mut length = 0;
    // More than anybody sends.
    for chunk in chunks(1 << 20) {
        let mut heard = vec![0; CHUNK];
        let mut filled = 0;
        let begun = Instant::now();
        while filled < CHUNK {
            let got = match stream.read(&mut heard[filled..]) {
                Ok(0) | Err(_) => break,
                Ok(got) => got,
            };
            filled += got;
        }
        ensure!(
            heard[..filled] == chunk[..filled],
            "wrong octets between {length} and {}",
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
    fn connections_say_what_they_were_told() {
        let port = free_port();
        std::thread::spawn(move || crate::echo(port));
        let begun = Instant::now();
        while many("127.0.0.1", port, 20, 8).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(30));
        }
    }

    #[test]
    fn datagrams_come_back_whole() {
        let port = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        std::thread::spawn(move || return_datagrams(port));
        let begun = Instant::now();
        while datagrams("127.0.0.1", port, 50).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(30));
        }
    }

    #[test]
    fn a_stream_that_is_cut_off_is_compared_as_far_as_it_came() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let taking = std::thread::spawn(move || take_beginning(&listener).unwrap());
        let mut stream = connect("127.0.0.1", port).unwrap();
        let first = chunks(1).next().unwrap();
        stream.write_all(&first).unwrap();
        stream.write_all(&chunks(1).nth(1).unwrap()[..1000]).unwrap();
        stream.shutdown(Shutdown::Both).unwrap();
        let said = taking.join().unwrap();
        assert!(said.starts_with("66536 right"), "{said}");
    }
}

//! Soak test of TCP connections, opened and closed between two guests.
//!
//! The server closes first. So the server keeps the TIME-WAIT state of a closed connection (RFC 9293, section
//! 3.6), and a new connection with the same addresses and ports replaces it. Otherwise the client would run
//! out of ports for a minute after the first 28,000 connections.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Instant;

use anyhow::Context as _;

use super::series::{Series, print_and_check};
use super::testbed::Testbed;

const PORT: u16 = 7000;
/// Number of threads of the server, and of the client.
const THREADS: u32 = 4;
/// Maximum number of samples.
const SAMPLES: u32 = 100;
/// Bytes that the server sends on each connection.
const GREETING: &[u8] = b"flow";

pub(super) fn run(testbed: &Testbed, times: u32) -> anyhow::Result<bool> {
    println!("soak flows: {times} connections; {}", testbed.describe());
    let this = std::env::current_exe()?;
    let this = this.to_str().context("the path of this program is no text")?;
    let mut server = testbed.start(&["--name", "server"], &[this, "flow-peer", "serve"])?;
    let driver = server.process("driver")?;
    let count = times.to_string();
    let mut client =
        testbed.start(&["--name", "client"], &[this, "flow-peer", "connect", "server", &count])?;
    let mut series = [
        Series::new("driver domain", driver),
        Series::new("server's frontend", server.process("frontend")?),
        Series::new("client's frontend", client.process("frontend")?),
    ];
    let start = Instant::now();
    let output = client.launcher.stdout.take().context("the client has no output")?;
    let mut done = 0;
    // The client prints the number of its connections while it runs.
    for line in BufReader::new(output).lines() {
        done = line?.parse().context("what the client says is no number")?;
        for series in series.iter_mut().filter(|_| done < times) {
            series.sample(done)?;
        }
    }
    let status = client.launcher.wait()?;
    println!("{done} connections in {:.1?}; the client: {status}", start.elapsed());
    let constant = print_and_check(&series);
    server.end()?;
    Ok(constant && status.success() && done == times)
}

/// Accepts connections without end, sends the greeting on each and closes it.
pub(super) fn serve() -> anyhow::Result<bool> {
    let listener = TcpListener::bind(("::", PORT))?;
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for connection in listener.incoming().flatten() {
                    // The client detects a missing greeting.
                    let _ = (&connection).write_all(GREETING);
                }
            });
        }
    });
    Ok(false)
}

/// Opens `times` connections, reads the greeting of each, and prints the number of connections regularly.
pub(super) fn connect(host: &str, times: u32) -> anyhow::Result<bool> {
    let address = (host, PORT).to_socket_addrs()?.next().context("the server has no address")?;
    let every = (times / SAMPLES).max(1);
    let (sender, outcomes) = mpsc::channel();
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let own = times / THREADS + u32::from(number < times % THREADS);
            let sender = sender.clone();
            scope.spawn(move || {
                for outcome in (0..own).map(|_| connect_once(address)) {
                    let failed = outcome.is_err();
                    // The receiver is dropped after the first failure of another thread.
                    if sender.send(outcome).is_err() || failed {
                        return;
                    }
                }
            });
        }
        drop(sender);
        for (done, outcome) in (1..).zip(outcomes) {
            outcome.with_context(|| format!("connection {done}"))?;
            if done % every == 0 || done == times {
                println!("{done}");
            }
        }
        Ok(true)
    })
}

/// Opens one connection and checks the greeting.
fn connect_once(address: SocketAddr) -> anyhow::Result<()> {
    let mut received = Vec::new();
    TcpStream::connect(address)?.read_to_end(&mut received)?;
    anyhow::ensure!(received == GREETING, "the server said {received:?}");
    Ok(())
}

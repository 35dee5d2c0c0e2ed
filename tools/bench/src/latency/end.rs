//! Client and server of the latency benchmark: processes in two guests.
//!
//! The server sends back every request, by UDP and by TCP. The client reads orders from standard
//! input, lines of JSON, and writes the latencies to standard output.

use std::io::{self, BufRead, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::ValueEnum;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::gso::end::interface_addresses;
use crate::messages::{self, say};

/// Time after which an answer counts as lost.
const LOST_AFTER: Duration = Duration::from_secs(1);
/// Maximum bytes of a request.
pub(super) const SIZE_MAX: usize = 1400;
/// Maximum recorded latency in nanoseconds; a longer one counts as this.
const LONGEST: u64 = 60_000_000_000;

/// Role of an end process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Subcommand)]
pub enum LatencyRole {
    /// Send back every request
    Answer,
    /// Send requests, one at a time
    Ask,
}

/// Transport protocol of the requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LatencyProtocol {
    /// One datagram each way
    Udp,
    /// One connection, with TCP_NODELAY
    Tcp,
}

impl LatencyProtocol {
    pub(super) fn name(self) -> &'static str {
        match self {
            LatencyProtocol::Udp => "udp",
            LatencyProtocol::Tcp => "tcp",
        }
    }
}

/// Order to the client: one slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SliceSpec {
    pub(super) protocol: LatencyProtocol,
    pub(super) to: SocketAddr,
    pub(super) size: usize,
    pub(super) length: Duration,
}

/// Message of an end to the benchmark.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum LatencyMessage {
    /// The server listens at these addresses, on the same port for both protocols.
    Listening {
        addresses: Vec<IpAddr>,
        port: u16,
    },
    /// The client accepts orders.
    Ready,
    /// Pairs of nanoseconds and count, and the number of lost answers.
    Asked {
        counts: Vec<(u64, u64)>,
        lost: u64,
    },
    Failed(String),
}

/// Returns an empty histogram of nanoseconds with three significant digits.
pub(crate) fn histogram() -> anyhow::Result<Histogram<u64>> {
    Histogram::new_with_bounds(1, LONGEST, 3).context("a histogram")
}

/// Runs one end. Returns the exit status.
pub(crate) fn main(role: LatencyRole) -> u8 {
    let outcome = match role {
        LatencyRole::Answer => answer(),
        LatencyRole::Ask => ask(),
    };
    messages::exit_status(outcome, LatencyMessage::Failed)
}

fn answer() -> anyhow::Result<()> {
    let tcp = TcpListener::bind(("0.0.0.0", 0)).context("listening")?;
    let port = tcp.local_addr()?.port();
    let udp = UdpSocket::bind(("0.0.0.0", port)).context("the same port by UDP")?;
    std::thread::Builder::new().name("udp".to_owned()).spawn(move || -> io::Result<()> {
        let mut bytes = [0; SIZE_MAX];
        loop {
            let (n, from) = udp.recv_from(&mut bytes)?;
            udp.send_to(&bytes[..n], from)?;
        }
    })?;
    say(&LatencyMessage::Listening { addresses: interface_addresses(None)?, port })?;
    loop {
        let (stream, _) = tcp.accept().context("accepting")?;
        // The client may end its connection at any time.
        let _ = echo(stream);
    }
}

fn echo(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut bytes = [0; SIZE_MAX];
    loop {
        match stream.read(&mut bytes)? {
            0 => return Ok(()),
            n => stream.write_all(&bytes[..n])?,
        }
    }
}

fn ask() -> anyhow::Result<()> {
    say(&LatencyMessage::Ready)?;
    for line in io::stdin().lock().lines() {
        let order: SliceSpec = serde_json::from_str(&line?).context("an order")?;
        ensure!((1..=SIZE_MAX).contains(&order.size), "a request of {} bytes", order.size);
        let (times, lost) = match order.protocol {
            LatencyProtocol::Udp => by_udp(&order)?,
            LatencyProtocol::Tcp => by_tcp(&order)?,
        };
        let counts = times.iter_recorded().map(|at| (at.value_iterated_to(), at.count_at_value()));
        say(&LatencyMessage::Asked { counts: counts.collect(), lost })?;
    }
    Ok(())
}

fn nanos(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(LONGEST)
}

fn by_udp(order: &SliceSpec) -> anyhow::Result<(Histogram<u64>, u64)> {
    let socket = UdpSocket::bind(("0.0.0.0", 0)).context("a socket")?;
    socket.connect(order.to)?;
    socket.set_read_timeout(Some(LOST_AFTER))?;
    let (mut request, mut answer) = (vec![0; order.size], [0; SIZE_MAX]);
    let (mut times, mut lost, mut number) = (histogram()?, 0, 0u8);
    let began = Instant::now();
    while began.elapsed() < order.length {
        number = number.wrapping_add(1);
        request[0] = number;
        let sent = Instant::now();
        socket.send(&request).context("asking")?;
        loop {
            match socket.recv(&mut answer) {
                // A late answer to a request that was counted as lost.
                Ok(_) if answer[0] != number => {}
                Ok(_) => break times.saturating_record(nanos(sent)),
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                    ) =>
                {
                    lost += 1;
                    break;
                }
                Err(error) => return Err(error).context("hearing the answer"),
            }
        }
    }
    Ok((times, lost))
}

fn by_tcp(order: &SliceSpec) -> anyhow::Result<(Histogram<u64>, u64)> {
    let mut stream = TcpStream::connect(order.to).context("connecting")?;
    stream.set_nodelay(true)?;
    let mut bytes = vec![0; order.size];
    let mut times = histogram()?;
    let began = Instant::now();
    while began.elapsed() < order.length {
        let sent = Instant::now();
        stream.write_all(&bytes).context("asking")?;
        stream.read_exact(&mut bytes).context("hearing the answer")?;
        times.saturating_record(nanos(sent));
    }
    Ok((times, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_timed_over_udp_and_tcp() {
        let tcp = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let to = tcp.local_addr().unwrap();
        let udp = UdpSocket::bind(to).unwrap();
        std::thread::spawn(move || echo(tcp.accept().unwrap().0));
        std::thread::spawn(move || {
            let mut bytes = [0; 64];
            while let Ok((n, from)) = udp.recv_from(&mut bytes) {
                udp.send_to(&bytes[..n], from).unwrap();
            }
        });
        let length = Duration::from_millis(30);
        for protocol in [LatencyProtocol::Udp, LatencyProtocol::Tcp] {
            let order = SliceSpec { protocol, to, size: 64, length };
            let asked =
                if protocol == LatencyProtocol::Udp { by_udp(&order) } else { by_tcp(&order) };
            let (times, lost) = asked.unwrap();
            assert!(!times.is_empty() && times.max() < 1_000_000_000, "{protocol:?}");
            assert_eq!(lost, 0);
        }
    }
}

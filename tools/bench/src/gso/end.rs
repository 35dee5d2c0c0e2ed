//! Receiver and sender of the TCP stream: a process in a guest, or beside the switch.
//!
//! An end reads lines on standard input and writes lines of JSON on standard output, which
//! `ringfence run` passes through. A receiver listens, reports its addresses, and reports the number
//! of received bytes whenever it reads `HOW_MUCH`. A sender reads the receiver's address, connects,
//! reports that, and sends until it reads `ENOUGH` or its process is ended.
//!
//! The stream repeats a pattern. The receiver compares only the first bytes of each piece with the
//! pattern. That detects lost, repeated and reordered data at a negligible cost.

use std::io::{self, BufRead, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, mpsc};

use anyhow::{Context, ensure};
use netlink_packet_route::address::AddressAttribute;
use ringfence_hostnet::causes::causes;
use ringfence_hostnet::netlink::{LinkChange, Netlink};
use ringfence_sys::counters::Counter;
use rustix::io::Errno;
use rustix::time::ClockId;
use serde::{Deserialize, Serialize};

use super::super::messages::{self, say};
use super::super::usage::clock;

/// Bytes of one write or read, the size that other tools use.
const BUFFER: usize = 128 << 10;
/// Period of the stream in bytes; a prime, so that its phase differs in every buffer.
const PERIOD: usize = 65_521;
/// Congestion control of the sender: available on every kernel without privilege, and without pacing.
/// A fixed choice makes figures comparable across machines with different defaults.
const CONGESTION: &str = "reno";
/// Bytes of each piece that the receiver compares.
const LOOKED_AT: usize = 64;

/// Role of an end process.
#[derive(Clone, Debug, PartialEq, Eq, clap::Subcommand)]
pub enum StreamRole {
    /// Receive one stream over TCP
    Receive,
    /// Send one stream over TCP
    Send,
    /// Both ends, over the loopback interface
    Loopback {
        /// MTU of the interface
        mtu: u16,
        /// Leave super-packets whole
        #[arg(long)]
        whole: bool,
    },
}

/// Message of an end to the benchmark.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum StreamMessage {
    /// The receiver listens on this port of these addresses.
    Listening {
        /// Addresses that others can reach.
        addresses: Vec<IpAddr>,
        port: u16,
    },
    /// The sender waits for the receiver's address.
    Ready,
    Connected,
    /// Answer to [`HOW_MUCH`].
    Arrived(Arrived),
    Failed(String),
}

/// Progress of a receiver at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Arrived {
    pub(super) bytes: u64,
    /// Monotonic clock in nanoseconds; all processes share it.
    pub(super) at: u64,
}

/// Query for a receiver's progress, the only line that a receiver accepts.
pub(super) const HOW_MUCH: &str = "how much?";
/// Order to a connected sender to send no more, and to keep the connection.
pub(super) const ENOUGH: &str = "enough";

/// Runs one end; returns the exit status.
pub(crate) fn main(role: &StreamRole) -> u8 {
    let outcome = match role {
        StreamRole::Receive => receive(),
        StreamRole::Send => send_as_ordered(),
        StreamRole::Loopback { mtu, whole } => loopback(*mtu, *whole),
    };
    messages::exit_status(outcome, StreamMessage::Failed)
}

/// Reads the next line from standard input.
fn hear() -> anyhow::Result<String> {
    let mut line = String::new();
    let n = io::stdin().lock().read_line(&mut line)?;
    ensure!(n > 0, "nobody gives orders any more");
    Ok(line.trim_end().to_owned())
}

/// Returns one period of the stream plus [`BUFFER`] bytes, so that any piece is one slice of it.
fn pattern() -> Vec<u8> {
    let mut state = 0x9E37_79B9_u32;
    let one: Vec<u8> = (0..PERIOD)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state.to_le_bytes()[1]
        })
        .collect();
    one.iter().copied().cycle().take(PERIOD + BUFFER).collect()
}

fn send_as_ordered() -> anyhow::Result<()> {
    say(&StreamMessage::Ready)?;
    let to = hear()?.parse()?;
    let (tell, enough) = mpsc::channel();
    std::thread::Builder::new().name("orders".to_owned()).spawn(move || {
        if hear().is_ok_and(|order| order == ENOUGH) {
            // A sender that has failed needs no order.
            let _ = tell.send(());
        }
    })?;
    // The end of the connection would be one more packet.
    let _connection = send(to, &enough)?;
    loop {
        std::thread::park();
    }
}

/// Sends the stream until a message arrives at `enough`. Returns the connection.
fn send(to: SocketAddr, enough: &mpsc::Receiver<()>) -> anyhow::Result<TcpStream> {
    let mut stream = TcpStream::connect(to).with_context(|| format!("connecting to {to}"))?;
    rustix::net::sockopt::set_tcp_congestion(&stream, CONGESTION)
        .with_context(|| format!("choosing TCP {CONGESTION}"))?;
    say(&StreamMessage::Connected)?;
    let pattern = pattern();
    let mut at = 0;
    while enough.try_recv().is_err() {
        let n = stream.write(&pattern[at..at + BUFFER]).context("sending")?;
        at = (at + n) % PERIOD;
    }
    Ok(stream)
}

fn receive() -> anyhow::Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", 0)).context("listening")?;
    let port = listener.local_addr()?.port();
    let bytes = Arc::new(Counter::default());
    let counted = Arc::clone(&bytes);
    let own = own_addresses()?;
    std::thread::Builder::new().name("receive".to_owned()).spawn(move || {
        let outcome = listener.accept().context("accepting").and_then(|(s, _)| take(s, &counted));
        if let Err(error) = outcome {
            let _ = say(&StreamMessage::Failed(causes(&error)));
        }
    })?;
    say(&StreamMessage::Listening { addresses: own, port })?;
    answer(&bytes)
}

/// Reports the number of received bytes for each query.
fn answer(bytes: &Counter) -> anyhow::Result<()> {
    loop {
        let order = hear()?;
        ensure!(order == HOW_MUCH, "an order that is none: {order:?}");
        say(&StreamMessage::Arrived(Arrived {
            bytes: bytes.get(),
            at: clock(ClockId::Monotonic),
        }))?;
    }
}

/// Receives a stream to its end and verifies it.
fn take(mut stream: TcpStream, bytes: &Counter) -> anyhow::Result<()> {
    let pattern = pattern();
    let mut buffer = vec![0; BUFFER];
    let mut at = 0;
    loop {
        let n = match stream.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            // The sender's process is killed, so its connection may be reset.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
            Err(error) => return Err(error).context("receiving"),
        };
        let looked_at = n.min(LOOKED_AT);
        ensure!(
            buffer[..looked_at] == pattern[at..at + looked_at],
            "the stream is damaged near byte {}",
            bytes.get()
        );
        at = (at + n) % PERIOD;
        bytes.add(n as u64);
    }
}

/// Returns the IPv4 addresses by which others reach this end.
fn own_addresses() -> anyhow::Result<Vec<IpAddr>> {
    Ok(interface_addresses(None)?)
}

/// Returns the IPv4 addresses of an interface, or of all but the loopback interface.
pub(crate) fn interface_addresses(interface: Option<&str>) -> io::Result<Vec<IpAddr>> {
    let mut netlink = Netlink::open()?;
    let index = match interface.map(|name| netlink.index_of(name)).transpose() {
        // An interface that does not exist has no address.
        Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => {
            return Ok(Vec::new());
        }
        index => index?,
    };
    let addresses = netlink.addresses()?.into_iter();
    let of_interface =
        addresses.filter(|entry| index.is_none_or(|index| index == entry.header.index));
    // `Local` is the own address; `Address` is the peer's on a point-to-point interface.
    let own =
        of_interface.flat_map(|entry| entry.attributes).filter_map(|attribute| match attribute {
            AddressAttribute::Local(ip) => Some(ip),
            _ => None,
        });
    Ok(own.filter(|ip| ip.is_ipv4() && !ip.is_loopback()).collect())
}

fn loopback(mtu: u16, whole: bool) -> anyhow::Result<()> {
    let mut netlink = Netlink::open().context("netlink")?;
    let index = netlink.index_of("lo").context("the loopback interface")?;
    // Without segmentation offload TCP sends at most one segment a packet.
    let segments = (!whole).then_some(1);
    let change =
        LinkChange { mtu: Some(mtu.into()), gso_max_segments: segments, ..LinkChange::default() };
    netlink.change_link(index, &change).context("setting the loopback interface")?;
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("listening")?;
    let to = listener.local_addr()?;
    let bytes = Arc::new(Counter::default());
    let counted = Arc::clone(&bytes);
    // On other paths sender and receiver are processes of their own; here they are threads.
    std::thread::Builder::new().name("receive".to_owned()).spawn(move || {
        let outcome = listener.accept().context("accepting").and_then(|(s, _)| take(s, &counted));
        if let Err(error) = outcome {
            let _ = say(&StreamMessage::Failed(causes(&error)));
        }
    })?;
    std::thread::Builder::new().name("send".to_owned()).spawn(move || {
        if let Err(error) = send(to, &mpsc::channel().1) {
            let _ = say(&StreamMessage::Failed(causes(&error)));
        }
    })?;
    answer(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrives(bytes: Vec<u8>) -> (anyhow::Result<()>, u64) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut out = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let sender = std::thread::spawn(move || {
            // The receiver may close before it has read everything.
            let _ = out.write_all(&bytes);
        });
        let bytes = Counter::default();
        let outcome = take(listener.accept().unwrap().0, &bytes);
        sender.join().unwrap();
        (outcome, bytes.get())
    }

    #[test]
    fn stream_with_a_gap_is_reported_as_damaged() {
        let pattern = pattern();
        let mut stream: Vec<u8> =
            pattern[..PERIOD].iter().copied().cycle().take(40 * PERIOD).collect();
        let (whole, bytes) = arrives(stream.clone());
        whole.unwrap();
        assert_eq!(bytes, 40 * PERIOD as u64);
        stream.drain(1_000_000..1_001_448);
        let (lacking, _) = arrives(stream);
        assert!(lacking.unwrap_err().to_string().contains("damaged"));
    }

    #[test]
    fn messages_encode_to_one_line_and_back() {
        for said in [
            StreamMessage::Listening { addresses: vec![IpAddr::from([10, 0, 0, 1])], port: 7 },
            StreamMessage::Failed("two\nlines".to_owned()),
        ] {
            let line = serde_json::to_string(&said).unwrap();
            assert!(!line.contains('\n'));
            assert_eq!(serde_json::from_str::<StreamMessage>(&line).unwrap(), said);
        }
    }
}

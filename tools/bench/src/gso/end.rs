//! One end of the stream: a process in a guest, or beside the switch.
//!
//! It hears lines on standard input and says lines of JSON on standard output, which `ringfence run`
//! passes through. A receiver listens, says where, and then how much has arrived whenever it is asked.
//! A sender hears where to, connects, says so, and sends until it is ended.
//!
//! The stream repeats a pattern. Of each piece that arrives the receiver compares the first octets with
//! what belongs there: enough to find anything lost, repeated or mixed up, and too little to be what is
//! measured.

use std::io::{self, BufRead, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use anyhow::{Context, ensure};
use ringfence::causes::causes;
use ringfence::netlink::{LinkChange, Netlink};
use ringfence_sys::counters::Counter;
use rustix::time::ClockId;
use serde::{Deserialize, Serialize};

use super::super::said::{self, say};
use super::super::usage::clock;

/// What is written at a time, as other tools do.
const BUFFER: usize = 128 << 10;
/// The stream repeats so many octets; a prime, so that it falls differently into every buffer.
const PERIOD: usize = 65_521;
/// How the sender meets congestion: what every kernel has and anybody may choose, so that figures of
/// machines with other defaults can be compared. Some of these pace what they send.
const CONGESTION: &str = "reno";
/// Octets of each piece that are compared.
const LOOKED_AT: usize = 64;

/// Which end.
#[derive(Clone, Debug, PartialEq, Eq, clap::Subcommand)]
pub enum Role {
    /// Take one stream
    Receive,
    /// Send one stream
    Send,
    /// Both ends, over the loopback interface
    Loopback {
        /// The interface's MTU
        mtu: u16,
        /// Whether super-packets stay whole
        #[arg(long)]
        whole: bool,
    },
}

/// What an end says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Said {
    /// A receiver waits at this port of these addresses.
    Listening {
        /// Its addresses that others can reach.
        addresses: Vec<IpAddr>,
        /// TCP.
        port: u16,
    },
    /// A sender can be told where to.
    Ready,
    /// The stream begins.
    Connected,
    /// So much has arrived.
    Arrived(Arrived),
    /// It cannot go on.
    Failed(String),
}

/// What has arrived at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Arrived {
    /// Octets.
    pub(super) octets: u64,
    /// Nanoseconds, by the clock that all processes share.
    pub(super) at: u64,
}

/// What an end hears; a sender hears an address instead.
pub(super) const HOW_MUCH: &str = "how much?";

/// Runs one end; returns the exit status.
pub(crate) fn main(role: &Role) -> u8 {
    let outcome = match role {
        Role::Receive => receive(),
        Role::Send => say(&Said::Ready).and_then(|()| send(hear()?.parse()?)),
        Role::Loopback { mtu, whole } => loopback(*mtu, *whole),
    };
    said::exit_status(outcome, Said::Failed)
}

/// The next line.
fn hear() -> anyhow::Result<String> {
    let mut line = String::new();
    let n = io::stdin().lock().read_line(&mut line)?;
    ensure!(n > 0, "nobody gives orders any more");
    Ok(line.trim_end().to_owned())
}

/// The stream's content: any piece of [`BUFFER`] octets starts somewhere in here.
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

fn send(to: SocketAddr) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect(to).with_context(|| format!("connecting to {to}"))?;
    rustix::net::sockopt::set_tcp_congestion(&stream, CONGESTION)
        .with_context(|| format!("choosing TCP {CONGESTION}"))?;
    say(&Said::Connected)?;
    let pattern = pattern();
    let mut at = 0;
    // Until this process is ended, or the receiver.
    loop {
        let n = stream.write(&pattern[at..at + BUFFER]).context("sending")?;
        at = (at + n) % PERIOD;
    }
}

fn receive() -> anyhow::Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", 0)).context("listening")?;
    let port = listener.local_addr()?.port();
    let octets = Arc::new(Counter::default());
    let counted = Arc::clone(&octets);
    let own = own_addresses()?;
    std::thread::Builder::new().name("receive".to_owned()).spawn(move || {
        let outcome = listener.accept().context("accepting").and_then(|(s, _)| take(s, &counted));
        if let Err(error) = outcome {
            let _ = say(&Said::Failed(causes(&error)));
        }
    })?;
    say(&Said::Listening { addresses: own, port })?;
    answer(&octets)
}

/// Says how much has arrived, whenever somebody asks.
fn answer(octets: &Counter) -> anyhow::Result<()> {
    loop {
        let order = hear()?;
        ensure!(order == HOW_MUCH, "an order that is none: {order:?}");
        say(&Said::Arrived(Arrived { octets: octets.get(), at: clock(ClockId::Monotonic) }))?;
    }
}

/// Takes a stream to its end.
fn take(mut stream: TcpStream, octets: &Counter) -> anyhow::Result<()> {
    let pattern = pattern();
    let mut buffer = vec![0; BUFFER];
    let mut at = 0;
    loop {
        let n = match stream.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            // The sender is ended rather than told to stop.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
            Err(error) => return Err(error).context("receiving"),
        };
        let looked_at = n.min(LOOKED_AT);
        ensure!(
            buffer[..looked_at] == pattern[at..at + looked_at],
            "the stream is damaged near octet {}",
            octets.get()
        );
        at = (at + n) % PERIOD;
        octets.add(n as u64);
    }
}

/// IPv4 addresses by which others reach this end.
fn own_addresses() -> anyhow::Result<Vec<IpAddr>> {
    Ok(interface_addresses(None)?)
}

/// IPv4 addresses of an interface, or of all but the loopback interface.
pub(crate) fn interface_addresses(interface: Option<&str>) -> io::Result<Vec<IpAddr>> {
    let mut found = Vec::new();
    for entry in nix::ifaddrs::getifaddrs()? {
        let wanted = interface.is_none_or(|name| name == entry.interface_name);
        let address = entry.address.as_ref().and_then(|a| a.as_sockaddr_in()).map(|a| a.ip());
        found.extend(address.filter(|ip| wanted && !ip.is_loopback()).map(IpAddr::V4));
    }
    Ok(found)
}

fn loopback(mtu: u16, whole: bool) -> anyhow::Result<()> {
    let mut netlink = Netlink::open().context("netlink")?;
    let index = netlink.index_of("lo").context("the loopback interface")?;
    // One segment a packet is as much as TCP can do without segmentation offload.
    let segments = (!whole).then_some(1);
    let change =
        LinkChange { mtu: Some(mtu.into()), gso_max_segments: segments, ..LinkChange::default() };
    netlink.change_link(index, &change).context("setting the loopback interface")?;
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("listening")?;
    let to = listener.local_addr()?;
    let octets = Arc::new(Counter::default());
    let counted = Arc::clone(&octets);
    // Sender and receiver are processes of their own on other paths; here they are threads.
    std::thread::Builder::new().name("receive".to_owned()).spawn(move || {
        let outcome = listener.accept().context("accepting").and_then(|(s, _)| take(s, &counted));
        if let Err(error) = outcome {
            let _ = say(&Said::Failed(causes(&error)));
        }
    })?;
    std::thread::Builder::new().name("send".to_owned()).spawn(move || {
        if let Err(error) = send(to) {
            let _ = say(&Said::Failed(causes(&error)));
        }
    })?;
    answer(&octets)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrives(bytes: Vec<u8>) -> (anyhow::Result<()>, u64) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut out = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let sender = std::thread::spawn(move || {
            // The receiver may have seen enough before it has seen all.
            let _ = out.write_all(&bytes);
        });
        let octets = Counter::default();
        let outcome = take(listener.accept().unwrap().0, &octets);
        sender.join().unwrap();
        (outcome, octets.get())
    }

    #[test]
    fn a_stream_that_lacks_something_is_found_out() {
        let pattern = pattern();
        let mut stream: Vec<u8> =
            pattern[..PERIOD].iter().copied().cycle().take(40 * PERIOD).collect();
        let (whole, octets) = arrives(stream.clone());
        whole.unwrap();
        assert_eq!(octets, 40 * PERIOD as u64);
        stream.drain(1_000_000..1_001_448);
        let (lacking, _) = arrives(stream);
        assert!(lacking.unwrap_err().to_string().contains("damaged"));
    }

    #[test]
    fn what_is_said_is_one_line() {
        for said in [
            Said::Listening { addresses: vec![IpAddr::from([10, 0, 0, 1])], port: 7 },
            Said::Failed("two\nlines".to_owned()),
        ] {
            let line = serde_json::to_string(&said).unwrap();
            assert!(!line.contains('\n'));
            assert_eq!(serde_json::from_str::<Said>(&line).unwrap(), said);
        }
    }
}

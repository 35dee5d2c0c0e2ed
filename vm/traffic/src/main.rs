#![forbid(unsafe_code)]
//! TCP and UDP traffic inside the emulated machines of `cargo xtask vm`, where busybox's nc is too slow (it
//! moves a kilobyte a system call, which is dear under emulation) and cannot tell how long a
//! connection stood still; and load on disks.
//!
//! A stream is pseudo-random, the same every time, so that its SHA-256 is known beforehand: a damaged,
//! lost, doubled or misplaced byte shows.

mod exchange;
mod load;

use std::io::{self, Read, Write};
use std::net::{Ipv6Addr, Shutdown, TcpListener, TcpStream, ToSocketAddrs};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Parser;
use sha2::{Digest, Sha256};

/// How much is read or written at a time.
const CHUNK: usize = 64 * 1024;
/// How long an end waits for the other one to say anything.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Parser)]
#[command(name = "traffic", about = "TCP and UDP traffic, and load on disks for scenarios")]
enum Command {
    /// Take one stream, and print its length and its SHA-256
    Receive {
        /// Where to listen, on every address
        port: u16,
    },
    /// Send a stream, and wait until the other end has taken it
    Send {
        /// The receiver's
        address: String,
        /// The receiver's
        port: u16,
        /// The stream's length
        mebibytes: u64,
    },
    /// Print the length and the SHA-256 that a stream has to have
    Sum {
        /// The stream's length
        mebibytes: u64,
    },
    /// Return whatever comes, on every connection
    Echo {
        /// Where to listen, on every address
        port: u16,
    },
    /// Say something and wait for its echo, again and again; print how often, and the longest time
    /// from one echo to the next
    Pulse {
        /// That of `echo`
        address: String,
        /// That of `echo`
        port: u16,
        /// For how long
        seconds: u64,
    },
    /// Open so many connections to an `echo`, use all of them at once, and compare
    Many {
        /// That of `echo`
        address: String,
        /// That of `echo`
        port: u16,
        /// How many
        connections: usize,
        /// How much each one says
        kibibytes: usize,
    },
    /// Send datagrams of every length to a `return`, and compare what comes back
    Datagrams {
        /// That of `return`
        address: String,
        /// That of `return`
        port: u16,
        /// How many
        count: u32,
    },
    /// Return datagrams to whom they came from
    Return {
        /// Where to listen
        port: u16,
    },
    /// Take one stream of `send`, to wherever it is cut off, and compare; print how much was right
    Beginning {
        /// Where to listen, on every address
        port: u16,
    },
    /// Write and read a disk at random places, several requests at a time, and compare; print how many
    /// reads and writes, and the longest time that one took in ms
    Load(load::LoadArgs),
}

fn main() -> ExitCode {
    let done = match Command::parse() {
        Command::Receive { port } => receive(port),
        Command::Send { address, port, mebibytes } => send(&address, port, mebibytes),
        Command::Sum { mebibytes } => sum(mebibytes),
        Command::Echo { port } => echo(port),
        Command::Pulse { address, port, seconds } => pulse(&address, port, seconds),
        Command::Many { address, port, connections, kibibytes } => {
            exchange::many(&address, port, connections, kibibytes)
        }
        Command::Datagrams { address, port, count } => exchange::datagrams(&address, port, count),
        Command::Return { port } => exchange::return_datagrams(port),
        Command::Beginning { port } => exchange::beginning(port),
        Command::Load(args) => load::load(&args),
    };
    match done {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("traffic: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn listen(port: u16) -> anyhow::Result<TcpListener> {
    // Linux takes IPv4 on this one too.
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).with_context(|| format!("port {port}"))
}

fn connect(address: &str, port: u16) -> anyhow::Result<TcpStream> {
    let target = (address, port).to_socket_addrs()?.next().context("no address")?;
    let stream = TcpStream::connect_timeout(&target, PATIENCE / 4)
        .with_context(|| format!("connecting to {target}"))?;
    settle(&stream)?;
    Ok(stream)
}

fn settle(stream: &TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))
}

fn receive(port: u16) -> anyhow::Result<String> {
    let (mut stream, _) = listen(port)?.accept()?;
    settle(&stream)?;
    let mut hash = Sha256::new();
    let mut length = 0;
    let mut chunk = vec![0; CHUNK];
    loop {
        let count = stream.read(&mut chunk).context("receiving")?;
        if count == 0 {
            break;
        }
        hash.update(&chunk[..count]);
        length += count;
    }
    Ok(format!("{length} {:x}", hash.finalize()))
}

fn send(address: &str, port: u16, mebibytes: u64) -> anyhow::Result<String> {
    let mut stream = connect(address, port)?;
    let start = Instant::now();
    for chunk in chunks(mebibytes) {
        stream.write_all(&chunk).context("sending")?;
    }
    stream.shutdown(Shutdown::Write)?;
    // The receiver closes when it has everything.
    io::copy(&mut stream, &mut io::sink()).context("waiting for the receiver")?;
    Ok(format!("{:.1} s", start.elapsed().as_secs_f64()))
}

fn sum(mebibytes: u64) -> anyhow::Result<String> {
    let mut hash = Sha256::new();
    chunks(mebibytes).for_each(|chunk| hash.update(chunk));
    Ok(format!("{} {:x}", mebibytes << 20, hash.finalize()))
}

/// The stream, in chunks (xorshift64, Marsaglia).
fn chunks(mebibytes: u64) -> impl Iterator<Item = Vec<u8>> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    (0..mebibytes << 4).map(move |_| {
        let mut chunk = Vec::with_capacity(CHUNK);
        while chunk.len() < CHUNK {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            chunk.extend_from_slice(&state.to_le_bytes());
        }
        chunk
    })
}

fn echo(port: u16) -> anyhow::Result<String> {
    let listener = listen(port)?;
    loop {
        let (stream, _) = listener.accept()?;
        std::thread::spawn(move || -> io::Result<u64> {
            stream.set_nodelay(true)?;
            io::copy(&mut &stream, &mut &stream)
        });
    }
}

fn pulse(address: &str, port: u16, seconds: u64) -> anyhow::Result<String> {
    let mut stream = connect(address, port)?;
    stream.set_nodelay(true)?;
    let end = Instant::now() + Duration::from_secs(seconds);
    let (mut count, mut longest, mut last) = (0_u64, Duration::ZERO, Instant::now());
    while last < end {
        // Of every length up to a little more than a packet.
        let length = usize::try_from(count % 2000)? + 8;
        let message: Vec<u8> = count.to_le_bytes().into_iter().cycle().take(length).collect();
        stream.write_all(&message).context("saying something")?;
        let mut answer = vec![0; length];
        stream.read_exact(&mut answer).context("waiting for the echo")?;
        anyhow::ensure!(answer == message, "echo {count} is not what was said");
        count += 1;
        longest = longest.max(last.elapsed());
        last = Instant::now();
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(format!("{count} {}", longest.as_millis()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_arrives_with_its_sum() {
        let port =
            TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).unwrap().local_addr().unwrap().port();
        let receiver = std::thread::spawn(move || receive(port).unwrap());
        let start = Instant::now();
        while send("127.0.0.1", port, 3).is_err() {
            assert!(start.elapsed() < PATIENCE);
        }
        assert_eq!(receiver.join().unwrap(), sum(3).unwrap());
        assert!(sum(3).unwrap().starts_with("3145728 "));
    }
}

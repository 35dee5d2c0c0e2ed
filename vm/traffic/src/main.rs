#![forbid(unsafe_code)]
//! Test traffic inside the emulated machines of `cargo xtask vm`: TCP, UDP, and load on disks.
//!
//! busybox's nc is too slow there: it moves one kilobyte in each system call, and system calls are
//! expensive under emulation. It also cannot measure how long a connection stood still.
//!
//! Each stream is pseudorandom with a fixed seed, so its SHA-256 is known beforehand. A damaged, lost,
//! duplicated or misplaced byte changes it.

mod exchange;
mod load;

use std::io::{self, Read, Write};
use std::net::{Ipv6Addr, Shutdown, TcpListener, TcpStream, ToSocketAddrs};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Parser;
use sha2::{Digest, Sha256};

/// Size of each read and write in bytes.
const CHUNK: usize = 64 * 1024;
/// Time limit of each wait for the other end.
const TIME_LIMIT: Duration = Duration::from_secs(120);

#[derive(Parser)]
#[command(name = "traffic", about = "TCP and UDP traffic, and load on disks for scenarios")]
enum Command {
    /// Receive one stream; print its length in bytes and its SHA-256
    Receive {
        /// Port to listen on, on every address
        port: u16,
        /// Print the length alone: under emulation the SHA-256 costs many times what the packets do
        #[arg(long)]
        length: bool,
    },
    /// Send a stream, and wait until the receiver has read all of it
    Send {
        /// Address of the receiver
        address: String,
        /// Port of the receiver
        port: u16,
        /// Length of the stream in MiB
        mebibytes: u64,
    },
    /// Print the length in bytes and the SHA-256 of a stream
    Sum {
        /// Length of the stream in MiB
        mebibytes: u64,
    },
    /// Return all received data, on every connection
    Echo {
        /// Port to listen on, on every address
        port: u16,
    },
    /// Send a message and wait for its echo, repeatedly; print the number of echoes, and the longest time
    /// between two echoes in ms
    Pulse {
        /// Address of `echo`
        address: String,
        /// Port of `echo`
        port: u16,
        /// Duration in seconds
        seconds: u64,
    },
    /// Open many connections to an `echo`, use all of them at the same time, and compare the data
    Many {
        /// Address of `echo`
        address: String,
        /// Port of `echo`
        port: u16,
        /// Number of connections
        connections: usize,
        /// Data sent on each connection in KiB
        kibibytes: usize,
    },
    /// Send datagrams of many lengths to a `return`, and compare the replies
    Datagrams {
        /// Address of `return`
        address: String,
        /// Port of `return`
        port: u16,
        /// Number of datagrams
        count: u32,
    },
    /// Return each datagram to its sender
    Return {
        /// Port to listen on
        port: u16,
    },
    /// Receive one stream of `send`, up to its end or its break; compare it; print the number of correct bytes
    Beginning {
        /// Port to listen on, on every address
        port: u16,
    },
    /// Write and read a disk at random positions with several threads, and compare; print the number of reads,
    /// the number of writes, and the longest request in ms
    Load(load::LoadArgs),
}

fn main() -> ExitCode {
    let done = match Command::parse() {
        Command::Receive { port, length } => receive(port, length),
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
    // Linux accepts IPv4 on this socket too.
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).with_context(|| format!("port {port}"))
}

fn connect(address: &str, port: u16) -> anyhow::Result<TcpStream> {
    let target = (address, port).to_socket_addrs()?.next().context("no address")?;
    let stream = TcpStream::connect_timeout(&target, TIME_LIMIT / 4)
        .with_context(|| format!("connecting to {target}"))?;
    set_timeouts(&stream)?;
    Ok(stream)
}

fn set_timeouts(stream: &TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(TIME_LIMIT))?;
    stream.set_write_timeout(Some(TIME_LIMIT))
}

fn receive(port: u16, only_length: bool) -> anyhow::Result<String> {
    let (mut stream, _) = listen(port)?.accept()?;
    set_timeouts(&stream)?;
    let mut hash = Sha256::new();
    let mut length = 0;
    let mut chunk = vec![0; CHUNK];
    loop {
        let count = stream.read(&mut chunk).context("receiving")?;
        if count == 0 {
            break;
        }
        if !only_length {
            hash.update(&chunk[..count]);
        }
        length += count;
    }
    Ok(if only_length { length.to_string() } else { format!("{length} {:x}", hash.finalize()) })
}

fn send(address: &str, port: u16, mebibytes: u64) -> anyhow::Result<String> {
    let mut stream = connect(address, port)?;
    let start = Instant::now();
    for chunk in chunks(mebibytes) {
        stream.write_all(&chunk).context("sending")?;
    }
    stream.shutdown(Shutdown::Write)?;
    // The receiver closes after it has read everything.
    io::copy(&mut stream, &mut io::sink()).context("waiting for the receiver")?;
    Ok(format!("{:.1} s", start.elapsed().as_secs_f64()))
}

fn sum(mebibytes: u64) -> anyhow::Result<String> {
    let mut hash = Sha256::new();
    chunks(mebibytes).for_each(|chunk| hash.update(chunk));
    Ok(format!("{} {:x}", mebibytes << 20, hash.finalize()))
}

/// Returns the stream in chunks (xorshift64, Marsaglia).
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
        // Message lengths from 8 bytes to a little more than a packet.
        let length = usize::try_from(count % 2000)? + 8;
        let message: Vec<u8> = count.to_le_bytes().into_iter().cycle().take(length).collect();
        stream.write_all(&message).context("sending")?;
        let mut answer = vec![0; length];
        stream.read_exact(&mut answer).context("waiting for the echo")?;
        anyhow::ensure!(answer == message, "echo {count} differs from its message");
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

    /// Sends 3 MiB to a receiver. Returns what it prints.
    fn received(only_length: bool) -> String {
        let port =
            TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).unwrap().local_addr().unwrap().port();
        let receiver = std::thread::spawn(move || receive(port, only_length).unwrap());
        let start = Instant::now();
        while send("127.0.0.1", port, 3).is_err() {
            assert!(start.elapsed() < TIME_LIMIT);
        }
        receiver.join().unwrap()
    }

    #[test]
    fn stream_received_has_predicted_sum() {
        assert_eq!(received(false), sum(3).unwrap());
        assert!(sum(3).unwrap().starts_with("3145728 "));
    }

    #[test]
    fn stream_received_without_sum_has_its_length() {
        assert_eq!(received(true), "3145728");
    }
}

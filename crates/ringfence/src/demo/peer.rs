//! Peers of the demonstration's transfer: plain TCP sockets in two guests.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use ringfence_sys::numbers::usize_from;
use serde::{Deserialize, Serialize};

use ringfence_sandbox::STATUS_FAILED;

const PORT: u16 = 5201;
/// Time limit for the other peer.
const IO_TIMEOUT: Duration = Duration::from_secs(20);
/// First line that a receiver prints.
pub const LISTENING: &str = "listening";
const BUFFER: usize = 128 * 1024;
/// Period of the stream in bytes. It is prime, so that it starts at a different position in every
/// buffer.
const PERIOD: usize = 65_521;

/// Amount and duration of a demonstration's transfer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transfer {
    /// Number of bytes received, all with the expected content.
    pub bytes: u64,
    /// Time from the first to the last byte.
    pub seconds: f64,
}

impl Transfer {
    /// Returns the throughput of the transfer.
    pub fn gigabits_per_second(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let bits = self.bytes as f64 * 8.0;
        bits / self.seconds / 1e9
    }
}

/// Returns the stream's content. Any piece of `BUFFER` bytes starts within the first period.
fn pattern() -> Vec<u8> {
    let mut state = 0x2545_F491_u32;
    let one: Vec<u8> = (0..PERIOD)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state.to_le_bytes()[2]
        })
        .collect();
    one.iter().copied().cycle().take(PERIOD + BUFFER).collect()
}

/// Runs one peer and prints its report. Returns the exit status.
pub fn main(role: &Role) -> u8 {
    let outcome = match role {
        Role::Receive => receive().and_then(|report| {
            println!("{report}");
            stay()
        }),
        Role::Send { host, seconds } => send(host, Duration::from_secs(*seconds)),
    };
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("ringfence: demo: {error}");
            STATUS_FAILED
        }
    }
}

/// Role of a peer in the transfer.
#[derive(Clone, Debug, PartialEq, Eq, clap::Subcommand)]
pub enum Role {
    /// Take one stream, check it, report it, and stay until standard input is closed
    Receive,
    /// Send one stream
    Send {
        /// Host name of the receiver.
        host: String,
        /// Duration of the transfer.
        seconds: u64,
    },
}

/// Blocks until standard input is closed. The driver domain stays as long as this guest.
fn stay() -> io::Result<()> {
    io::copy(&mut io::stdin(), &mut io::sink()).map(drop)
}

fn receive() -> io::Result<String> {
    let listener = TcpListener::bind(("::", PORT))?;
    println!("{LISTENING}");
    let mut stream = accept(&listener)?;
    stream.set_read_timeout(Some(IO_TIMEOUT))?;
    let pattern = pattern();
    let mut buffer = vec![0; BUFFER];
    let mut bytes = 0u64;
    let begun = Instant::now();
    let period = PERIOD as u64;
    loop {
        let n = stream.read(&mut buffer)?;
        if n == 0 {
            break;
        }
        let at = usize_from(bytes % period);
        if buffer[..n] != pattern[at..at + n] {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("damaged data near byte {bytes}"),
            ));
        }
        bytes += n as u64;
    }
    let transfer = Transfer { bytes, seconds: begun.elapsed().as_secs_f64() };
    Ok(serde_json::to_string(&transfer)?)
}

/// Accepts the sender's connection, within the time limit.
fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    listener.set_nonblocking(true)?;
    let until = Instant::now() + IO_TIMEOUT;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() != io::ErrorKind::WouldBlock || Instant::now() >= until => {
                return Err(error);
            }
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn send(host: &str, duration: Duration) -> io::Result<()> {
    let mut stream = TcpStream::connect((host, PORT))?;
    let pattern = pattern();
    let (begun, mut at) = (Instant::now(), 0);
    while begun.elapsed() < duration {
        let n = stream.write(&pattern[at..at + BUFFER.min(pattern.len() - at)])?;
        at = (at + n) % PERIOD;
    }
    // Wait until the receiver has all data: it closes its end then.
    stream.shutdown(Shutdown::Write)?;
    stream.set_read_timeout(Some(IO_TIMEOUT))?;
    stream.read_to_end(&mut Vec::new())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_of_the_stream_is_in_the_pattern() {
        let pattern = pattern();
        assert_eq!(pattern.len(), PERIOD + BUFFER);
        assert_eq!(pattern[..BUFFER], pattern[PERIOD..PERIOD + BUFFER]);
    }
}

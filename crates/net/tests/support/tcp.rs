//! TCP in both directions at once: random bytes, compared by hash.

use std::io::{Read, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use sha2::{Digest, Sha256};

/// TCP port of [`serve`].
pub const PORT: u16 = 5001;

/// Maximum time without progress of a connection.
const LIMIT: Duration = Duration::from_secs(60);

/// Returns `len` pseudo-random bytes for a seed.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Serves connections over both address families on threads of its own; calls `ended` after each.
pub fn serve(ended: fn()) {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, PORT)).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            std::thread::spawn(move || {
                answer(&stream);
                drop(stream);
                ended();
            });
        }
    });
}

fn answer(mut stream: &TcpStream) {
    let mut order = [0; 16];
    stream.read_exact(&mut order).unwrap();
    let number = |at: usize| u64::from_le_bytes(order[at..at + 8].try_into().unwrap());
    let (seed, len) = (number(0), usize::try_from(number(8)).unwrap());
    let received = exchange(stream, &noise(!seed, len));
    stream.write_all(&received).unwrap();
    // Wait until the other end has closed.
    let _ = stream.read(&mut [0]);
}

/// Connects, sends and receives `len` bytes at the same time, and closes the connection completely.
///
/// # Panics
///
/// Panics if bytes are missing or damaged.
pub fn both_ways(to: SocketAddr, seed: u64, len: usize) {
    let mut stream = TcpStream::connect_timeout(&to, LIMIT).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    let mut order = seed.to_le_bytes().to_vec();
    order.extend_from_slice(&(len as u64).to_le_bytes());
    stream.write_all(&order).unwrap();
    let sent = noise(seed, len);
    let received = exchange(&stream, &sent);
    let mut theirs = [0; 32];
    stream.read_exact(&mut theirs).unwrap();
    let hash = |bytes: &[u8]| -> [u8; 32] { Sha256::digest(bytes).into() };
    assert!(received == hash(&noise(!seed, len)), "{to}: damaged on the way here");
    assert!(theirs == hash(&sent), "{to}: damaged on the way there");
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
}

/// Sends `bytes` and receives as many; returns the hash of the received bytes.
fn exchange(mut stream: &TcpStream, bytes: &[u8]) -> [u8; 32] {
    std::thread::scope(|scope| {
        scope.spawn(|| (&mut &*stream).write_all(bytes).unwrap());
        let mut received = vec![0; bytes.len()];
        stream.read_exact(&mut received).unwrap();
        Sha256::digest(&received).into()
    })
}

//! Attacker of the control socket: a process of the same user, outside of guests.
//!
//! It is a process of its own because its sockets linger for an hour. In the program that runs the attack, a child
//! between `fork` and `exec` could hold the last reference to one, and would block in the close. A process that exits
//! does not linger.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use ringfence_hostnet::runtime_dir::RuntimeDir;
use ringfence_sys::descriptors::testing::send_raw;

use crate::support::Noise;

/// Maximum number of lingering sockets in a round, each with a thread.
const SOCKETS_MAX: usize = 2000;

/// Sends random messages with lingering descriptors to the control socket of the switch `s` until it is killed.
pub(crate) fn main(directory: &str, seed: u64) -> std::process::ExitCode {
    let mut noise = Noise::from_seed(seed);
    let mut held = Vec::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let messages: [&[u8]; 5] = [br#""Stats""#, b"{", b"", br#"{"Attach":{}}"#, &[0xff; 30_000]];
    for _ in 0..SOCKETS_MAX {
        let directory = RuntimeDir::open_at(PathBuf::from(directory)).unwrap();
        let Ok(Some(socket)) = directory.connect("s") else { continue };
        let linger = lingering(&listener);
        for _ in 0..[1, 10, 2000][usize::try_from(noise.below(3)).unwrap()] {
            let message = messages[usize::try_from(noise.below(5)).unwrap()];
            let fds: Vec<_> = linger.iter().filter(|_| noise.below(50) == 0).collect();
            let fds: Vec<_> = fds.into_iter().map(AsFd::as_fd).collect();
            let _ = send_raw(&socket, message, &fds);
        }
        held.push(socket);
        if held.len() > usize::try_from(noise.below(30)).unwrap() {
            held.clear();
        }
        // Descriptors that were not sent, or that the receiver has closed, are closed here, which takes an hour.
        std::thread::spawn(move || drop(linger));
        std::thread::sleep(Duration::from_millis(noise.below(100)));
    }
    std::process::ExitCode::SUCCESS
}

/// Creates a TCP socket with a full window, whose last close blocks for an hour.
fn lingering(listener: &TcpListener) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(listener.local_addr().ok()?).ok()?;
    let (peer, _) = listener.accept().ok()?;
    stream.set_nonblocking(true).ok()?;
    while stream.write(&[0; 65536]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(3600))).ok()?;
    // The peer must exist longer than the stream, so that the window stays full.
    std::mem::forget(peer);
    Some(stream)
}

//! Correct guest: exchanges TCP streams with the other correct guest, pings it, and uses a disk. It verifies every
//! byte.
//!
//! Standard output is the report. A `TICK` line each second has the sums since the start. A `FINDING` line reports
//! lost, damaged or refused data.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use ringfence_block::storage::Disk;
use ringfence_block::storage::testing::{Driver, checker::Checker, workload::Workload};
use ringfence_nbd::client::{NbdAddress, NbdDisk, NbdOptions};

use crate::support::{Noise, eventually};

const PORT: u16 = 7000;
const STREAM: u64 = 2 << 20;
const WITHIN: Duration = Duration::from_secs(60);

/// Sums since the start, and maximum times since the last tick.
struct Figures {
    bytes: AtomicU64,
    pings: AtomicU64,
    worst_ping: AtomicU64,
    requests: AtomicU64,
    worst_disk: AtomicU64,
}

static FIGURES: Figures = Figures {
    bytes: AtomicU64::new(0),
    pings: AtomicU64::new(0),
    worst_ping: AtomicU64::new(0),
    requests: AtomicU64::new(0),
    worst_disk: AtomicU64::new(0),
};

fn say(line: &str) {
    // One write for each line, so that lines of different threads do not mix.
    let _ = io::stdout().write_all(format!("{line}\n").as_bytes());
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// Runs until the guest ends.
pub(crate) fn main(peer: &str, seed: u64) -> ExitCode {
    let listener = TcpListener::bind(("::", PORT)).unwrap();
    std::thread::spawn(move || serve(&listener));
    let (mut address, mut old) = (None, None);
    let found = eventually(WITHIN, || {
        let all: Vec<_> = (peer, PORT).to_socket_addrs().into_iter().flatten().collect();
        // Streams use the preferred address family and pings the other one, because each is attacked.
        address = all.first().copied();
        old = all.iter().copied().find(std::net::SocketAddr::is_ipv4).or(address);
        address.is_some_and(|address| TcpStream::connect(address).is_ok())
    });
    let (true, Some(address), Some(old)) = (found, address, old) else {
        say(&format!("FINDING no connection to {peer} within {WITHIN:?}"));
        return ExitCode::FAILURE;
    };
    std::thread::spawn(move || again("stream", || stream(address, seed)));
    std::thread::spawn(move || again("ping", || ping(old)));
    std::thread::spawn(move || again("disk", || disk(seed)));
    for second in 1_u64.. {
        std::thread::sleep(Duration::from_secs(1));
        let all = [&FIGURES.bytes, &FIGURES.pings, &FIGURES.requests].map(|sum| sum.load(Relaxed));
        let worst = [&FIGURES.worst_ping, &FIGURES.worst_disk].map(|worst| worst.swap(0, Relaxed));
        let [bytes, pings, requests] = all;
        say(&format!("TICK {second} {bytes} {pings} {requests} {} {}", worst[0], worst[1]));
    }
    ExitCode::SUCCESS
}

/// Repeats a task that should never end. Each end is a finding.
fn again(name: &str, mut task: impl FnMut() -> io::Result<()>) {
    loop {
        let error = task().err().map_or_else(|| "it ended".to_owned(), |error| error.to_string());
        say(&format!("FINDING {name}: {error}"));
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn serve(listener: &TcpListener) {
    for connection in listener.incoming().flatten() {
        std::thread::spawn(move || {
            // The client reports missing data.
            let _ = answer(connection);
        });
    }
}

fn answer(mut connection: TcpStream) -> io::Result<()> {
    connection.set_nodelay(true)?;
    loop {
        let mut request = [0; 9];
        connection.read_exact(&mut request)?;
        let number = u64::from_le_bytes(request[1..].try_into().expect("eight bytes"));
        if request[0] == b'p' {
            connection.write_all(&number.to_le_bytes())?;
        } else {
            send_noise(&mut connection, number)?;
            let verdict = receive_noise(&mut connection, !number);
            connection.write_all(&[u8::from(verdict.is_ok())])?;
        }
    }
}

fn chunk(noise: &mut Noise) -> Vec<u8> {
    (0..2048).flat_map(|_| noise.next().to_le_bytes()).collect()
}

fn send_noise(to: &mut impl Write, seed: u64) -> io::Result<()> {
    let mut noise = Noise::from_seed(seed);
    for _ in 0..STREAM / (2048 * 8) {
        to.write_all(&chunk(&mut noise))?;
    }
    Ok(())
}

fn receive_noise(from: &mut impl Read, seed: u64) -> io::Result<()> {
    let mut noise = Noise::from_seed(seed);
    for at in 0..STREAM / (2048 * 8) {
        let mut found = vec![0; 2048 * 8];
        from.read_exact(&mut found)?;
        if found != chunk(&mut noise) {
            return Err(io::Error::other(format!("DAMAGED bytes in chunk {at}")));
        }
    }
    Ok(())
}

fn connect(address: std::net::SocketAddr) -> io::Result<TcpStream> {
    let connection = TcpStream::connect_timeout(&address, WITHIN)?;
    connection.set_nodelay(true)?;
    connection.set_read_timeout(Some(WITHIN))?;
    connection.set_write_timeout(Some(WITHIN))?;
    Ok(connection)
}

fn request(kind: u8, number: u64) -> [u8; 9] {
    let mut request = [kind; 9];
    request[1..].copy_from_slice(&number.to_le_bytes());
    request
}

fn stream(address: std::net::SocketAddr, seed: u64) -> io::Result<()> {
    let mut noise = Noise::from_seed(seed);
    let mut connection = connect(address)?;
    loop {
        // A new connection from time to time, because attacks also hit the handshake.
        if noise.below(8) == 0 {
            connection = connect(address)?;
        }
        let number = noise.next();
        connection.write_all(&request(b's', number))?;
        receive_noise(&mut connection, number)?;
        send_noise(&mut connection, !number)?;
        let mut verdict = [0];
        connection.read_exact(&mut verdict)?;
        if verdict[0] != 1 {
            return Err(io::Error::other("the other guest received DAMAGED bytes"));
        }
        FIGURES.bytes.fetch_add(2 * STREAM, Relaxed);
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn ping(address: std::net::SocketAddr) -> io::Result<()> {
    let mut connection = connect(address)?;
    for number in 0_u64.. {
        let start = Instant::now();
        connection.write_all(&request(b'p', number))?;
        let mut answer = [0; 8];
        connection.read_exact(&mut answer)?;
        if u64::from_le_bytes(answer) != number {
            return Err(io::Error::other("a wrong answer to a ping"));
        }
        FIGURES.worst_ping.fetch_max(micros(start), Relaxed);
        FIGURES.pings.fetch_add(1, Relaxed);
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn disk(seed: u64) -> io::Result<()> {
    let path = std::env::var_os("RINGFENCE_DISK0").ok_or_else(|| io::Error::other("no disk"))?;
    let address = NbdAddress::Unix { path: PathBuf::from(path), name: String::new(), tls: None };
    let options = NbdOptions { give_up: WITHIN, journal: 0, ..NbdOptions::default() };
    let disk = NbdDisk::open(&address, &options)?;
    let workload = Workload { depth: 4, ..Workload::new(seed) };
    let mut checker = Checker::new();
    let mut driver = Driver::new(disk.queue(4)?).with_timeout(WITHIN);
    let mut running = workload.start(&disk);
    loop {
        let start = Instant::now();
        let done = running.steps(&mut driver, &mut checker, 8);
        let done = done.and_then(|()| running.finish(&mut driver, &mut checker));
        done.map_err(|failure| io::Error::other(format!("{failure:?}")))?;
        FIGURES.worst_disk.fetch_max(micros(start), Relaxed);
        FIGURES.requests.fetch_add(8, Relaxed);
        std::thread::sleep(Duration::from_millis(20));
    }
}

//! Random attacks of a compromised frontend: on its connections to hub, store and launcher, on its event channels,
//! and on its granted memory.
//!
//! A sandboxed process can open nothing. The program therefore creates descriptors of other kinds before it enters the
//! sandbox. They reach the sandbox in the queue of a socket that takes the place of standard output.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ringfence_sys::descriptors::testing::send_raw;
use ringfence_testkit::attack;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::soak::Plan;
use crate::support::Noise;

/// Time in seconds for which the close of a lingering socket blocks.
const LINGER: Duration = Duration::from_secs(3600);
/// Maximum number of descriptors in one message.
const FDS_MAX: u64 = 60;
/// Number of lingering sockets for one life of an attacker.
const LINGERING: u32 = 24;

/// Runs a frontend as the program does, with a thread that attacks.
pub(crate) fn main() -> u8 {
    let plan = Plan::of_this_program();
    let wants = |family: &str| plan.families.iter().any(|other| other == family);
    if !wants("frontend") {
        return ringfence_frontend::process::main();
    }
    let luggage = pack();
    rustix::stdio::dup2_stdout(&luggage).unwrap();
    drop(luggage);
    ringfence_frontend::process::main_taken_over(move || attack(plan.seed))
}

/// Creates a TCP socket whose close blocks, and its peer, which never reads.
fn lingering() -> std::io::Result<[OwnedFd; 2]> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut sender = TcpStream::connect(listener.local_addr()?)?;
    let (peer, _) = listener.accept()?;
    rustix::net::sockopt::set_socket_linger(&sender, Some(LINGER))?;
    sender.set_nonblocking(true)?;
    while sender.write(&[0; 65536]).is_ok() {}
    Ok([sender.into(), peer.into()])
}

fn full_pipe() -> std::io::Result<[OwnedFd; 2]> {
    let (reader, writer) = std::io::pipe()?;
    let writer: OwnedFd = writer.into();
    rustix::io::ioctl_fionbio(&writer, true)?;
    while rustix::io::write(&writer, &[0; 65536]).is_ok() {}
    Ok([writer, reader.into()])
}

fn memory_files() -> std::io::Result<Vec<OwnedFd>> {
    let sets = [SealFlags::empty(), SealFlags::SHRINK, SealFlags::SHRINK | SealFlags::GROW];
    let make = |seals: &SealFlags| -> std::io::Result<OwnedFd> {
        let file = rustix::fs::memfd_create("arena", MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, 1 << 20)?;
        rustix::fs::fcntl_add_seals(&file, *seals)?;
        Ok(file)
    };
    sets.iter().map(make).collect()
}

/// Creates descriptors of all kinds that the process may create and whose close does not block.
fn descriptors() -> Vec<OwnedFd> {
    let mut found: Vec<OwnedFd> = Vec::new();
    found.extend(full_pipe().into_iter().flatten());
    found.extend(memory_files().unwrap_or_default());
    let paths =
        ["/", "/dev/null", "/dev/zero", "/dev/full", "/dev/net/tun", "/dev/fuse", "/dev/ptmx"];
    let paths =
        paths.iter().chain(&["/proc/self/ns/user", "/proc/self/ns/net", "/proc/self/fdinfo"]);
    for path in paths {
        for flags in [OFlags::RDONLY, OFlags::RDWR, OFlags::PATH] {
            let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
            found.extend(rustix::fs::open(*path, flags, Mode::empty()));
        }
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    for kind in [SocketType::STREAM, SocketType::DGRAM, SocketType::SEQPACKET] {
        let pair = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None);
        found.extend(pair.into_iter().flat_map(|(a, b)| [a, b]));
        found.extend(rustix::net::socket_with(AddressFamily::INET, kind, flags, None));
    }
    found.extend(rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None));
    found.extend(rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC));
    found.extend(rustix::event::eventfd(u32::MAX, rustix::event::EventfdFlags::CLOEXEC));
    let own = rustix::process::getpid();
    found.extend(rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty()));
    found
}

/// Creates a socket with the descriptors in its queue: the peers of the lingering sockets, then each lingering
/// socket, then the others.
fn pack() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let (inside, outside) = pair.unwrap();
    let send = |few: &[OwnedFd]| {
        let few: Vec<BorrowedFd<'_>> = few.iter().map(AsFd::as_fd).collect();
        send_raw(&outside, b"luggage", &few).unwrap();
    };
    let (senders, peers): (Vec<_>, Vec<_>) =
        (0..LINGERING).filter_map(|_| lingering().ok()).map(|[a, b]| (a, b)).unzip();
    send(&peers);
    send(&senders);
    descriptors().chunks(32).for_each(send);
    inside
}

/// Descriptors of the attacker in its sandbox.
struct Descriptors {
    /// Peers of the lingering sockets. While they are open and do not read, a close blocks.
    _peers: Vec<OwnedFd>,
    /// Lingering sockets. Each is sent once, and only its receiver has it then.
    lingering: Vec<OwnedFd>,
    kinds: Vec<OwnedFd>,
}

/// Takes the descriptors out of the queue of standard output.
fn unpack() -> Descriptors {
    let luggage = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3).unwrap();
    let mut messages = attack::messages(luggage.as_fd()).into_iter();
    Descriptors {
        _peers: messages.next().unwrap_or_default(),
        lingering: messages.next().unwrap_or_default(),
        kinds: messages.flatten().collect(),
    }
}

/// Attacks until the process ends.
fn attack(seed: u64) {
    let mut noise = Noise::from_seed(seed);
    // In most lives the rings are connected first, because an attacker without a device reaches less.
    std::thread::sleep(Duration::from_millis(noise.below(1500)));
    // Before the descriptors are unpacked: a second handle would keep the receiver's close from being the last.
    let targets = attack::sockets();
    let mut luggage = unpack();
    // Half of the lives attack only one socket, because garbage at another one ends the process soon.
    let is_single = noise.below(2) == 0;
    let single = 1 << noise.below((targets.len() as u64).clamp(1, 64));
    let favourites = if is_single { single } else { noise.next() };
    let files = if noise.below(4) == 0 { attack::sealed_files() } else { Vec::new() };
    let calm = Duration::from_micros(noise.below(2000));
    let started = Instant::now();
    let mut last = 0;
    let mut sent = 0_u64;
    loop {
        let at = noise.below(targets.len().max(1) as u64);
        let Some(target) = targets.get(usize::try_from(at).unwrap_or(0)) else { return };
        let is_favourite = favourites >> (at % 64) & 1 == 1;
        if is_favourite || (!is_single && noise.below(500) == 0) {
            for _ in 0..[1, 1, 1, 8, 1000][usize::try_from(noise.below(5)).unwrap_or(0)] {
                let message = message(&mut noise);
                if noise.below(4) == 0
                    && let Some(lingering) = luggage.lingering.pop()
                {
                    sent += u64::from(send_raw(target, &message, &[lingering.as_fd()]).is_ok());
                    // If the receiver has closed its copy already, this close blocks instead.
                    let _ = std::thread::Builder::new().spawn(move || drop(lingering));
                    continue;
                }
                let fds = pick(&luggage.kinds, &mut noise);
                sent += u64::from(send_raw(target, &message, &fds).is_ok());
            }
        }
        for file in &files {
            if noise.below(5000) > 0 {
                continue;
            }
            let at = noise.below(1 << 20) & !3;
            let _ = rustix::io::pwrite(file, &noise.next().to_ne_bytes(), at);
        }
        std::thread::sleep(calm);
        let second = started.elapsed().as_secs();
        if second > last {
            last = second;
            eprintln!("[random: {sent} messages to {} sockets]", targets.len());
        }
    }
}

fn pick<'a>(kinds: &'a [OwnedFd], noise: &mut Noise) -> Vec<BorrowedFd<'a>> {
    let count = [0, 0, 1, 1, 2, 4, noise.below(FDS_MAX)];
    let count = count[usize::try_from(noise.below(7)).unwrap_or(0)];
    let one = |noise: &mut Noise| {
        let at = noise.below(kinds.len().max(1) as u64);
        kinds.get(usize::try_from(at).unwrap_or(0)).map(AsFd::as_fd)
    };
    (0..count).filter_map(|_| one(noise)).collect()
}

/// Returns bytes that resemble a request to the hub, a request to the store or a launcher's message, or random ones.
fn message(noise: &mut Noise) -> Vec<u8> {
    let words = |words: &[u64]| -> Vec<u8> {
        let small = |word: &u64| u32::try_from(word & 0xffff_ffff).unwrap_or(0).to_le_bytes();
        words.iter().flat_map(small).collect()
    };
    match noise.below(6) {
        0 => (0..noise.below(300)).map(|_| noise.next().to_le_bytes()[0]).collect(),
        1 => vec![1],
        2 => {
            let mut all = vec![noise.below(9), noise.next()];
            all.extend(
                (0..6).map(|_| if noise.below(2) == 0 { noise.below(16) } else { noise.next() }),
            );
            words(&all)
        }
        3 | 4 => {
            let paths = ["/", "/local/domain/0", "data", "device/vif/0/state", "@releaseDomain"];
            let path = paths[usize::try_from(noise.below(5)).unwrap_or(0)];
            let mut body = path.as_bytes().to_vec();
            body.push(0);
            body.extend((0..noise.below(64)).map(|_| noise.next().to_le_bytes()[0]));
            let length = if noise.below(8) == 0 { noise.next() } else { body.len() as u64 };
            let mut all = words(&[noise.below(26), noise.next(), noise.below(4), length]);
            all.extend(body);
            all
        }
        _ => br#"{"Down":"no"}"#.to_vec(),
    }
}

//! `ringfence hub`: the hub without a driver domain, for domains that are started by other means.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use clap::Args;
use ringfence_platform::local::hub::{Hub, HubLimits};
use rustix::event::{PollFd, PollFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Signal;

use ringfence_sandbox::STATUS_FAILED;
use ringfence_sandbox::signals::{Signals, name};
use ringfence_sys::poll::wait_any;

/// Run the hub alone: domain numbers, lent memory and event channels passed on, the store
///
/// Domains connect to its socket (a Unix socket of sequenced packets; the protocol is in
/// docs/local-platform.md). `ringfence run` needs no such hub: the driver domain of a switch has
/// its own. Ends at SIGINT or SIGTERM.
#[derive(Debug, Args)]
pub struct HubArgs {
    /// The socket to make; it must not be there yet
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,

    /// Most bytes that one domain may set aside for lending, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 64,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub arena_mib: u16,
}

/// Serves until SIGINT or SIGTERM. Returns the exit status.
pub fn main(args: &HubArgs) -> u8 {
    ringfence_hostnet::log::to_stderr(true);
    match serve(args) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("ringfence: hub: {error}");
            STATUS_FAILED
        }
    }
}

/// Socket file that is removed when the hub ends.
struct SocketFile<'a>(&'a Path);

impl Drop for SocketFile<'_> {
    fn drop(&mut self) {
        // The file may have been removed by another process.
        let _ = std::fs::remove_file(self.0);
    }
}

fn serve(args: &HubArgs) -> io::Result<()> {
    let signals = Signals::new(&[Signal::INT, Signal::TERM])?;
    let limits =
        HubLimits { arena_bytes: usize::from(args.arena_mib) << 20, ..HubLimits::default() };
    let (mut hub, handle) = Hub::new(limits)?;
    let listener = listen(&args.socket)?;
    let _file = SocketFile(&args.socket);
    hub.listen(listener)?;
    let thread = std::thread::Builder::new().name("hub".to_owned()).spawn(move || hub.run())?;
    eprintln!("ringfence: the hub listens at {}", args.socket.display());
    let signal = loop {
        let mut fds = [PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN)];
        wait_any(&mut fds, None)?;
        if let Some(arrived) = signals.next()? {
            break arrived.number;
        }
    };
    eprintln!("ringfence: the hub ends ({})", name(signal).unwrap_or("signal"));
    handle.stop();
    for (fault, count) in handle.faults() {
        eprintln!("ringfence: {fault}: {count}");
    }
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the hub's thread panicked")))
}

fn listen(path: &Path) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let address = SocketAddrUnix::new(path)?;
    rustix::net::bind(&socket, &address).map_err(|errno| match errno {
        rustix::io::Errno::ADDRINUSE => io::Error::new(
            io::ErrorKind::AlreadyExists,
            format!(
                "{} is there already; remove it if no hub uses it, or give another --socket",
                path.display()
            ),
        ),
        other => {
            io::Error::new(io::Error::from(other).kind(), format!("{}: {other}", path.display()))
        }
    })?;
    // Only this user may connect, because a connection of the hub's own user can become domain 0.
    rustix::fs::chmod(path, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
    rustix::net::listen(&socket, 64)?;
    Ok(socket)
}

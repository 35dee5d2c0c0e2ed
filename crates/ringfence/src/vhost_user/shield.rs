//! `ringfence shield`: the session that starts the shield process, and connects it to the backend.
//!
//! A hypervisor can end the shield process in one way: it shrinks the file of its memory under it. The session counts that
//! hypervisor, and starts the next process on the same socket.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use ringfence_driver::shield::{FromShield, LOG_FILES, ShieldConfig, ToShield};
use ringfence_pasta::program::SHIELD;
use ringfence_pasta::session_status::SessionNames;
use ringfence_pasta::values::PoolArg;
use ringfence_sandbox::DomainKind;
use ringfence_sandbox::channel::Channel;
use ringfence_vhost_user::PoolRule;
use ringfence_vhost_user::shield::POOL_MIN;
use rustix::fs::{MemfdFlags, SealFlags};

use super::common::{dial, listen, log_file, say};
use super::session::{DeviceReport, DeviceSession, Outcome, Report, SessionPart, exit_status};

/// The length of a pool is a multiple of this many bytes.
const POOL_UNIT: u64 = 1 << 20;

const EXAMPLES: &str = "\
Examples:
  A disk of qemu-storage-daemon, for any machine:
    qemu-storage-daemon --blockdev driver=file,node-name=f,filename=disk.img \\
      --export vhost-user-blk,id=e,node-name=f,writable=on,addr.type=unix,addr.path=/run/vm.backend
    ringfence shield --listen /run/vm.disk --backend /run/vm.backend --reconnect

  QEMU's options for it (before QEMU 9.2 reconnect=1):
    -object memory-backend-memfd,id=m,size=4G,share=on -machine memory-backend=m
    -chardev socket,id=d,path=/run/vm.disk,reconnect-ms=1000 -device vhost-user-blk-pci,chardev=d";

/// Keep the memory of a virtual machine from a vhost-user backend of another program
///
/// The shield stands between a hypervisor (QEMU) and an unmodified backend, such as qemu-storage-daemon. Guest, firmware and
/// hypervisor are unmodified, too. The shield alone maps the machine's memory. The backend gets a pool of the shield, and
/// requests and data are copied between both. It runs in a sandbox until a signal ends it.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ShieldArgs {
    /// Socket to create, to which the hypervisor connects
    #[arg(long, short, value_name = "PATH")]
    pub listen: PathBuf,

    /// Socket at which the backend listens
    #[arg(long, short, value_name = "PATH")]
    pub backend: PathBuf,

    /// Memory that the backend gets for requests and data, at least 1 MiB. Requests wait while it is full
    #[arg(long, short, value_name = "SIZE", default_value = "64M", value_parser = parse_size)]
    pub pool: u64,

    /// Keep the hypervisor's connection when the backend ends, and give the next one the requests in flight
    #[arg(long, short)]
    pub reconnect: bool,

    /// Socket at which `ringfence status --socket PATH` reads the state
    #[arg(long, value_name = "PATH")]
    pub status_socket: Option<PathBuf>,

    /// Explain each step
    #[arg(long, short)]
    pub verbose: bool,
}

fn parse_size(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(PoolArg(PoolRule::AtMost(bytes))) if bytes >= POOL_MIN => {
            let whole = bytes.checked_next_multiple_of(POOL_UNIT);
            whole.ok_or_else(|| "is too much".to_owned())
        }
        _ => Err("must be a size of at least 1M, such as 64M".to_owned()),
    }
}

/// Messages of the shield process.
impl DeviceReport for FromShield {
    const ASK: Option<fn(&Channel) -> bool> =
        Some(|shield| shield.send_now(&ToShield::Traffic, &[]).is_ok());

    fn sort(self) -> Report<FromShield> {
        match self {
            FromShield::Ready => Report::Ready,
            FromShield::Machine(state) => Report::Machine(state),
            FromShield::Traffic(traffic) => Report::Traffic(traffic),
            FromShield::Failed(why) => Report::Failed(why),
            asks @ (FromShield::Connect | FromShield::LogFile) => Report::Own(asks),
        }
    }
}

/// Serves hypervisors until a signal ends it. Returns the exit status.
///
/// # Errors
///
/// Returns an error if the socket cannot be created, or the shield process fails.
pub(super) fn serve(args: &ShieldArgs) -> anyhow::Result<u8> {
    let names = SessionNames {
        program: SHIELD,
        guest: String::new(),
        process: "the backend",
        link: "vhost-user",
    };
    let status = args.status_socket.as_deref();
    let mut session = DeviceSession::new(DomainKind::Shield, status, names, args.verbose)?;
    let named = || format!("--listen {}", args.listen.display());
    let (listener, _file) = listen(&args.listen).with_context(named)?;
    let config = ShieldConfig { reconnect: args.reconnect, verbose: args.verbose };
    loop {
        let logs = (0..LOG_FILES).map(|_| log_file()).collect::<Result<Vec<_>, _>>()?;
        let fds: Vec<_> = [&listener].into_iter().chain(&logs).map(AsFd::as_fd).collect();
        let domain = session.start::<FromShield>(&config, &fds)?;
        say(format_args!("{} leads to {}", args.listen.display(), args.backend.display()));
        match session.wait(&domain, &mut Supply(args))? {
            Outcome::Signal(number) => return Ok(exit_status(number)),
            Outcome::Truncated => session.prepare_restart(),
        }
    }
}

/// Part of the session that opens for the shield process what its sandbox keeps from it: connections, pools and logs.
struct Supply<'a>(&'a ShieldArgs);

impl Supply<'_> {
    /// Connects to the backend, and creates the pool and the pair of sockets for it.
    fn connection(&self) -> Result<[OwnedFd; 4], String> {
        let Supply(args) = self;
        let failed = |error| format!("{}: {error}", args.backend.display());
        let socket = dial(&args.backend).map_err(failed)?;
        let pool = pool(args.pool).map_err(|error| format!("a pool: {error}"))?;
        let (own, theirs) = UnixStream::pair().map_err(|error| format!("a channel: {error}"))?;
        Ok([socket, pool, own.into(), theirs.into()])
    }
}

impl SessionPart<FromShield> for Supply<'_> {
    fn take(&mut self, message: FromShield, shield: &Channel) -> anyhow::Result<()> {
        // The process asks for one thing at a time, and reads before it asks again.
        let _ = match message {
            FromShield::LogFile => shield.send_now(&ToShield::LogFile, &[log_file()?.as_fd()]),
            _ => match self.connection() {
                Ok(files) => {
                    let fds = files.each_ref().map(AsFd::as_fd);
                    shield.send_now(&ToShield::Connected { problem: None }, &fds)
                }
                Err(problem) => {
                    shield.send_now(&ToShield::Connected { problem: Some(problem) }, &[])
                }
            },
        };
        Ok(())
    }
}

/// Creates a pool. Nobody can change its size, or make it read-only.
fn pool(bytes: u64) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("ringfence-shield", flags)?;
    rustix::fs::ftruncate(&file, bytes)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_is_a_size_of_whole_mebibytes() {
        assert_eq!(parse_size("64M"), Ok(64 << 20));
        assert_eq!(parse_size("1025K"), Ok(2 << 20));
        for text in ["", "auto", "1", "1023K", "-1M", "99999999999G"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }
}

//! `ringfence shield`: the session that starts the shield process, and connects it to the backend.
//!
//! A hypervisor can end the shield process in one way: it shrinks the file of its memory under it. The session counts that
//! hypervisor, and starts the next process on the same socket.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use ringfence_driver::shield::{FromShield, LOG_FILES, ShieldConfig, ToShield};
use ringfence_hostnet::log;
use ringfence_hostnet::text::{because, last_line, printable};
use ringfence_pasta::session_status::{SessionNames, StatusServer};
use ringfence_pasta::values::PoolArg;
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_sandbox::signals::Signals;
use ringfence_sandbox::spawn::{Event, Spawn};
use ringfence_sandbox::{DomainKind, DomainProcess, Ending};
use ringfence_sys::namespaces;
use ringfence_sys::poll::wait_any;
use ringfence_vhost_user::PoolRule;
use ringfence_vhost_user::shield::POOL_MIN;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::process::Signal;

use super::common::{dial, listen, log_file, say};

/// Time limit for the start of the shield process.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum time between two starts of the shield process.
const START_INTERVAL: Duration = Duration::from_millis(500);
/// The length of a pool is a multiple of this many bytes.
const POOL_UNIT: u64 = 1 << 20;

const EXAMPLES: &str = "\
Examples:
  A disk of qemu-storage-daemon, for any machine:
    qemu-storage-daemon --blockdev driver=file,node-name=f,filename=disk.img \\
      --export vhost-user-blk,id=e,node-name=f,writable=on,addr.type=unix,addr.path=/run/vm.backend
    ringfence shield --listen /run/vm.disk --backend /run/vm.backend --reconnect

  QEMU's options for it:
    -object memory-backend-memfd,id=m,size=4G,share=on -machine memory-backend=m
    -chardev socket,id=d,path=/run/vm.disk,reconnect=1 -device vhost-user-blk-pci,chardev=d";

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

/// Session of one shield.
struct ShieldSession<'a> {
    args: &'a ShieldArgs,
    listener: OwnedFd,
    status: StatusServer,
    signals: Signals,
}

/// Outcome of the shield process.
enum Outcome {
    /// This signal ends the session.
    Signal(i32),
    /// A hypervisor ended the process.
    Restart,
}

/// Serves hypervisors until a signal ends it. Returns the exit status.
///
/// # Errors
///
/// Returns an error if the socket cannot be created, or the shield process fails.
pub(super) fn serve(args: &ShieldArgs) -> anyhow::Result<u8> {
    log::to_lines_at(tracing::Level::WARN, |line| say(line));
    // Inherited descriptors are not for Ringfence's own processes.
    namespaces::set_inheritable(&namespaces::inheritable_fds()?, false)?;
    let named = || format!("--listen {}", args.listen.display());
    let (listener, _file) = listen(&args.listen).with_context(named)?;
    let names = SessionNames {
        program: "shield",
        guest: String::new(),
        process: "the backend",
        link: "vhost-user",
    };
    let status = StatusServer::new(args.status_socket.as_deref(), names)?;
    let signals = Signals::new(&[Signal::TERM, Signal::INT, Signal::QUIT, Signal::HUP])?;
    let mut session = ShieldSession { args, listener, status, signals };
    loop {
        let started = Instant::now();
        let domain = session.start()?;
        say(format_args!("{} leads to {}", args.listen.display(), args.backend.display()));
        match session.wait(&domain)? {
            Outcome::Signal(number) if number == Signal::TERM.as_raw() => return Ok(0),
            Outcome::Signal(number) => return Ok(Ending::Killed(number).exit_status()),
            Outcome::Restart => {
                session.status.restart();
                say("a client has truncated the file of its memory: the shield starts again");
                std::thread::sleep(START_INTERVAL.saturating_sub(started.elapsed()));
            }
        }
    }
}

impl ShieldSession<'_> {
    /// Starts the shield process.
    fn start(&self) -> anyhow::Result<DomainProcess> {
        let logs = (0..LOG_FILES).map(|_| log_file()).collect::<Result<Vec<_>, _>>()?;
        let spawn = Spawn {
            kind: DomainKind::Shield,
            command: &[],
            inherit: &[],
            cleanup: None,
            cgroup: None,
        };
        let domain = DomainProcess::start(&spawn)?;
        let config = ShieldConfig { reconnect: self.args.reconnect, verbose: self.args.verbose };
        let fds: Vec<_> = [&self.listener].into_iter().chain(&logs).map(AsFd::as_fd).collect();
        domain.channel().send(&config, &fds)?;
        match domain.channel().receive_within::<FromShield>(START_TIMEOUT) {
            Ok((FromShield::Ready, _)) => Ok(domain),
            Ok((FromShield::Failed(why), _)) => bail!("the shield failed: {}", printable(&why)),
            Ok((other, _)) => bail!("the shield process reported {other:?} instead of its start"),
            Err(ChannelError::Closed) => {
                let ended = domain.wait_ended(Duration::from_secs(1));
                let why = ended.and_then(|ended| last_line(&ended.stderr_tail));
                bail!("the shield process ended{}", because(why.as_deref()))
            }
            Err(error) => Err(error).context("the shield process"),
        }
    }

    /// Serves the shield process until it or the session ends.
    fn wait(&mut self, domain: &DomainProcess) -> anyhow::Result<Outcome> {
        loop {
            if let Some(arrived) = self.signals.next()? {
                return Ok(Outcome::Signal(arrived.number));
            }
            while let Some((message, _)) = domain.channel().try_receive().ok().flatten() {
                self.take(domain.channel(), message)?;
            }
            self.status.serve(None);
            while let Some(event) = domain.next_event() {
                match event {
                    Event::Stderr(text) => text
                        .lines()
                        .for_each(|line| say(format_args!("shield: {}", printable(line)))),
                    Event::Ended(ended) if ended.ending == Ending::Killed(Signal::BUS.as_raw()) => {
                        return Ok(Outcome::Restart);
                    }
                    Event::Ended(ended) => {
                        let why = because(last_line(&ended.stderr_tail).as_deref());
                        bail!("the shield process {}{why}", ended.ending);
                    }
                }
            }
            let mut fds = vec![
                PollFd::new(&self.signals, PollFlags::IN),
                PollFd::from_borrowed_fd(domain.events(), PollFlags::IN),
                PollFd::new(domain.channel(), PollFlags::IN),
            ];
            fds.extend(self.status.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            wait_any(&mut fds, None)?;
        }
    }

    /// Handles a message of the shield process.
    fn take(&mut self, channel: &Channel, message: FromShield) -> anyhow::Result<()> {
        // The process asks for one thing at a time, and reads before it asks again.
        match message {
            FromShield::Machine(state) => self.status.take(state).into_iter().for_each(say),
            FromShield::Connect => {
                let made = dial(&self.args.backend)
                    .map_err(|error| format!("{}: {error}", self.args.backend.display()))
                    .and_then(|socket| {
                        let pool = pool(self.args.pool);
                        pool.map(|pool| (socket, pool)).map_err(|error| format!("a pool: {error}"))
                    });
                let problem = made.as_ref().err().cloned();
                let fds = match &made {
                    Ok((socket, pool)) => vec![socket.as_fd(), pool.as_fd()],
                    Err(_) => Vec::new(),
                };
                let _ = channel.send_now(&ToShield::Connected { problem }, &fds);
            }
            FromShield::LogFile => {
                let file = log_file()?;
                let _ = channel.send_now(&ToShield::LogFile, &[file.as_fd()]);
            }
            FromShield::Failed(why) => bail!("the shield failed: {}", printable(&why)),
            FromShield::Ready => {}
        }
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

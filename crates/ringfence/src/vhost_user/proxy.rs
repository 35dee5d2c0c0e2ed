//! `ringfence pool-proxy`: the session that starts the proxy process, and connects it to the backend.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use ringfence_driver::pool_proxy::{FromProxy, ProxyConfig, ToProxy};
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
use ringfence_vhost_user::proxy::PoolChoice;
use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;

use super::common::dial;
use super::{listen, say};

/// Time limit for the start of the proxy process.
const START_TIMEOUT: Duration = Duration::from_secs(10);

const EXAMPLES: &str = "\
Examples:
  A disk of qemu-storage-daemon, for a QEMU that lends a pool of 64 MiB:
    qemu-storage-daemon --blockdev driver=file,node-name=f,filename=disk.img \\
      --export vhost-user-blk,id=e,node-name=f,writable=on,addr.type=unix,addr.path=/run/vm.backend
    ringfence pool-proxy --listen /run/vm.disk --backend /run/vm.backend --pool 64M

  QEMU's options for it:
    -chardev socket,id=d,path=/run/vm.disk,reconnect=1
    -device vhost-user-blk-pci,chardev=d,disable-legacy=on,iommu_platform=on";

/// Show a vhost-user backend of another program the pool of its device, and no other memory of the machine
///
/// The proxy stands between a hypervisor (QEMU) and an unmodified backend, such as qemu-storage-daemon, DPDK or SPDK. Only
/// control messages pass through it. It removes all memory but the pool from them, and adds what QEMU needs for
/// iommu_platform=on. Messages that could hand over other memory are refused. It runs in a sandbox until a signal ends it.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct PoolProxyArgs {
    /// Socket to create, to which the hypervisor connects
    #[arg(long, short, value_name = "PATH")]
    pub listen: PathBuf,

    /// Socket at which the backend listens
    #[arg(long, short, value_name = "PATH")]
    pub backend: PathBuf,

    /// Pool of the device: the only file of that size, with `auto` the only file with the mark of a pool, else the file
    /// with the mark and that name
    ///
    /// The mark of a pool is its first bytes: `ringfence-pool 1`. A name follows behind a space, up to a byte 0 or the end
    /// of the line. Machines with several pools need names.
    #[arg(long, short, value_name = "SIZE|auto|NAME", default_value = "auto", value_parser = parse_pool)]
    pub pool: PoolChoice,

    /// Socket at which `ringfence status --socket PATH` reads the state
    #[arg(long, value_name = "PATH")]
    pub status_socket: Option<PathBuf>,

    /// Explain each step
    #[arg(long, short)]
    pub verbose: bool,
}

fn parse_pool(text: &str) -> Result<PoolChoice, String> {
    match text.parse() {
        Ok(PoolArg(PoolRule::AtMost(bytes))) => Ok(PoolChoice::Size(bytes)),
        Ok(PoolArg(_)) => Ok(PoolChoice::Marked),
        Err(_) => PoolChoice::named(text).ok_or_else(|| {
            "must be `auto`, a size such as 64M, or a name: a letter, then at most 30 letters, digits, `.`, `_`, `-`"
                .to_owned()
        }),
    }
}

/// Serves hypervisors until a signal ends it. Returns the exit status.
///
/// # Errors
///
/// Returns an error if the socket cannot be created, or the proxy process fails.
pub(super) fn serve(args: &PoolProxyArgs) -> anyhow::Result<u8> {
    log::to_lines_at(tracing::Level::WARN, |line| say(line));
    // Inherited descriptors are not for Ringfence's own processes.
    namespaces::set_inheritable(&namespaces::inheritable_fds()?, false)?;
    let named = || format!("--listen {}", args.listen.display());
    let (listener, _file) = listen(&args.listen).with_context(named)?;
    let names = SessionNames {
        program: "pool-proxy",
        guest: String::new(),
        process: "the backend",
        link: "vhost-user",
    };
    let mut status = StatusServer::new(args.status_socket.as_deref(), names)?;
    let mut signals = Signals::new(&[Signal::TERM, Signal::INT, Signal::QUIT, Signal::HUP])?;
    let domain = start(args, &listener)?;
    say(format_args!("{} leads to {}", args.listen.display(), args.backend.display()));
    let number = wait(args, &domain, &mut status, &mut signals)?;
    if number == Signal::TERM.as_raw() {
        return Ok(0);
    }
    Ok(Ending::Killed(number).exit_status())
}

/// Starts the proxy process.
fn start(args: &PoolProxyArgs, listener: &OwnedFd) -> anyhow::Result<DomainProcess> {
    let spawn =
        Spawn { kind: DomainKind::Proxy, command: &[], inherit: &[], cleanup: None, cgroup: None };
    let domain = DomainProcess::start(&spawn)?;
    let config = ProxyConfig { pool: args.pool.clone(), verbose: args.verbose };
    domain.channel().send(&config, &[listener.as_fd()])?;
    match domain.channel().receive_within::<FromProxy>(START_TIMEOUT) {
        Ok((FromProxy::Ready, _)) => Ok(domain),
        Ok((FromProxy::Failed(why), _)) => bail!("the proxy failed: {}", printable(&why)),
        Ok((other, _)) => bail!("the proxy process reported {other:?} instead of its start"),
        Err(ChannelError::Closed) => {
            let ended = domain.wait_ended(Duration::from_secs(1));
            let why = ended.and_then(|ended| last_line(&ended.stderr_tail));
            bail!("the proxy process ended{}", because(why.as_deref()))
        }
        Err(error) => Err(error).context("the proxy process"),
    }
}

/// Serves the proxy process until a signal ends the session. Returns the number of the signal.
fn wait(
    args: &PoolProxyArgs,
    domain: &DomainProcess,
    status: &mut StatusServer,
    signals: &mut Signals,
) -> anyhow::Result<i32> {
    loop {
        if let Some(arrived) = signals.next()? {
            return Ok(arrived.number);
        }
        while let Some((message, _)) = domain.channel().try_receive().ok().flatten() {
            match message {
                FromProxy::Machine(state) => status.take(state).into_iter().for_each(say),
                FromProxy::Connect => connect(&args.backend, domain.channel()),
                FromProxy::Failed(why) => bail!("the proxy failed: {}", printable(&why)),
                FromProxy::Ready => {}
            }
        }
        status.serve(None);
        while let Some(event) = domain.next_event() {
            match event {
                Event::Stderr(text) => {
                    text.lines().for_each(|line| say(format_args!("proxy: {}", printable(line))));
                }
                Event::Ended(ended) => {
                    let why = because(last_line(&ended.stderr_tail).as_deref());
                    bail!("the proxy process {}{why}", ended.ending);
                }
            }
        }
        let mut fds = vec![
            PollFd::new(&*signals, PollFlags::IN),
            PollFd::from_borrowed_fd(domain.events(), PollFlags::IN),
            PollFd::new(domain.channel(), PollFlags::IN),
        ];
        fds.extend(status.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        wait_any(&mut fds, None)?;
    }
}

/// Connects to the backend, and passes the connection to the proxy process with a pair of sockets for a channel.
fn connect(backend: &Path, channel: &Channel) {
    let made = dial(backend).and_then(|socket| Ok((socket, UnixStream::pair()?)));
    let problem = made.as_ref().err().map(|error| format!("{}: {error}", backend.display()));
    let fds = match &made {
        Ok((socket, (own, spare))) => vec![socket.as_fd(), own.as_fd(), spare.as_fd()],
        Err(_) => Vec::new(),
    };
    // The process asks for one connection at a time, and reads before it asks again.
    let _ = channel.send_now(&ToProxy::Connected { problem }, &fds);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_is_a_size_auto_or_a_name() {
        let named = |name: &str| PoolChoice::Named(name.to_owned());
        assert_eq!(parse_pool("auto"), Ok(PoolChoice::Marked));
        assert_eq!(parse_pool("64M"), Ok(PoolChoice::Size(64 << 20)));
        assert_eq!(parse_pool("disk-1"), Ok(named("disk-1")));
        for text in ["", "0", "-1", "64Q", "a b", "a/b", &"x".repeat(32)] {
            assert!(parse_pool(text).unwrap_err().contains("a letter"), "{text}");
        }
    }
}

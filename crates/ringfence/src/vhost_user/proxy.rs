//! `ringfence pool-proxy`: the session that starts the proxy process, and connects it to the backend.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use ringfence_driver::pool_proxy::{FromProxy, ProxyConfig, ToProxy};
use ringfence_pasta::session_status::SessionNames;
use ringfence_pasta::values::PoolArg;
use ringfence_sandbox::DomainKind;
use ringfence_sandbox::channel::Channel;
use ringfence_vhost_user::PoolRule;
use ringfence_vhost_user::proxy::PoolChoice;

use super::common::{dial, listen, say};
use super::session::{DeviceReport, DeviceSession, Outcome, Report, SessionPart, exit_status};

const EXAMPLES: &str = "\
Examples:
  A disk of qemu-storage-daemon, for a QEMU that lends a pool of 64 MiB:
    qemu-storage-daemon --blockdev driver=file,node-name=f,filename=disk.img \\
      --export vhost-user-blk,id=e,node-name=f,writable=on,addr.type=unix,addr.path=/run/vm.backend
    ringfence pool-proxy --listen /run/vm.disk --backend /run/vm.backend --pool 64M

  QEMU's options for it (before QEMU 9.2 reconnect=1):
    -chardev socket,id=d,path=/run/vm.disk,reconnect-ms=1000
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

/// Messages of a proxy process.
impl DeviceReport for FromProxy {
    fn sort(self) -> Report<FromProxy> {
        match self {
            FromProxy::Ready => Report::Ready,
            FromProxy::Failed(why) => Report::Failed(why),
            FromProxy::Machine(state) => Report::Machine(state),
            FromProxy::Connect => Report::Own(FromProxy::Connect),
        }
    }
}

/// Serves hypervisors until a signal ends it. Returns the exit status.
///
/// # Errors
///
/// Returns an error if the socket cannot be created, or the proxy process fails.
pub(super) fn serve(args: &PoolProxyArgs) -> anyhow::Result<u8> {
    let names = SessionNames {
        program: "pool-proxy",
        guest: String::new(),
        process: "the backend",
        link: "vhost-user",
    };
    let status = args.status_socket.as_deref();
    let mut session = DeviceSession::new(DomainKind::Proxy, status, names, args.verbose)?;
    let named = || format!("--listen {}", args.listen.display());
    let (listener, _file) = listen(&args.listen).with_context(named)?;
    let config = ProxyConfig { pool: args.pool.clone(), verbose: args.verbose };
    loop {
        let domain = session.start::<FromProxy>(&config, &[listener.as_fd()])?;
        say(format_args!("{} leads to {}", args.listen.display(), args.backend.display()));
        match session.wait(&domain, &mut BackendDialer(&args.backend))? {
            Outcome::Signal(number) => return Ok(exit_status(number)),
            Outcome::Truncated => session.prepare_restart(),
        }
    }
}

/// Part of the session that connects to the backend at this path.
struct BackendDialer<'a>(&'a Path);

impl SessionPart<FromProxy> for BackendDialer<'_> {
    fn take(&mut self, _: FromProxy, device: &Channel) -> anyhow::Result<()> {
        connect(self.0, device);
        Ok(())
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

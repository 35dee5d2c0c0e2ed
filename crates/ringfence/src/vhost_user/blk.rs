//! `ringfence vhost-user blk`: the session that starts the process of a disk, and waits for its end.
//!
//! A client can end the disk's process in one way: it shrinks the file of its memory under it. The session counts that
//! client, and starts the next process on the same socket.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use ringfence_access::Mode;
use ringfence_driver::machine::{DiskConfig, FromDisk, LOG_FILES, ToDisk};
use ringfence_hostnet::log;
use ringfence_hostnet::text::{because, last_line, printable};
use ringfence_nbd::client::NbdConnector;
use ringfence_pasta::session_status::{SessionNames, StatusServer};
use ringfence_pasta::values::PoolArg;
use ringfence_sandbox::channel::ChannelError;
use ringfence_sandbox::signals::Signals;
use ringfence_sandbox::spawn::{Event, Spawn};
use ringfence_sandbox::{DomainKind, DomainProcess, Ending};
use ringfence_sys::namespaces;
use ringfence_sys::poll::wait_any;
use ringfence_vhost_user::PoolRule;
use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;

use super::common::log_file;
use super::{listen, say};
use crate::disk::{DiskSpec, dial};

/// Time limit for the start of the disk's process. A file stays locked until the last I/O of an earlier one has ended.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum time between two starts of the disk's process.
const START_INTERVAL: Duration = Duration::from_millis(500);

const EXAMPLES: &str = "\
Examples:
  A disk in a file, for a QEMU that lends a pool of 64 MiB:
    ringfence vhost-user blk --socket /run/vm.disk --disk disk.img --require-pool 64M

  QEMU's options for it:
    -chardev socket,id=d,path=/run/vm.disk,reconnect=1
    -device vhost-user-blk-pci,chardev=d,disable-legacy=on,iommu_platform=on";

/// Serve a disk to virtual machines: virtio-blk over vhost-user
///
/// One hypervisor at a time is served. It keeps a log of the requests in flight, so this program can be killed and started
/// again at any moment: the next one serves exactly the requests that were not answered.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct BlkArgs {
    /// Socket to create, to which the hypervisor connects
    #[arg(long, short, value_name = "PATH")]
    pub socket: PathBuf,

    /// File, block device or NBD address, and options, as those of `run --disk` without `mode=`
    #[arg(long, short, value_name = "PATH|URI[,OPTIONS]", value_parser = OsStringValueParser::new().try_map(|text| parse_disk(&text)))]
    pub disk: DiskSpec,

    /// Refuse a hypervisor that hands over more than this much memory, or with `auto` other memory than marked pools
    #[arg(long, value_name = "SIZE|auto")]
    pub require_pool: Option<PoolArg>,

    /// Socket at which `ringfence status --socket PATH` reads the state
    #[arg(long, value_name = "PATH")]
    pub status_socket: Option<PathBuf>,

    /// Explain each step
    #[arg(long, short)]
    pub verbose: bool,
}

fn parse_disk(text: &OsStr) -> Result<DiskSpec, String> {
    let spec = DiskSpec::parse(text)?;
    match spec.mode {
        // The default of `run`.
        Mode::Persistent => Ok(spec),
        _ => {
            Err("`mode=` is about pages of a guest of `run`; a virtual machine has none".to_owned())
        }
    }
}

/// Session of one disk.
struct BlkSession<'a> {
    args: &'a BlkArgs,
    listener: OwnedFd,
    status: StatusServer,
    signals: Signals,
    connector: Option<NbdConnector>,
}

/// Outcome of the disk's process.
enum Outcome {
    /// This signal ends the session.
    Signal(i32),
    /// A client ended the process.
    Restart,
}

/// Serves the disk until a signal ends it. Returns the exit status.
///
/// # Errors
///
/// Returns an error if the disk or a socket cannot be opened, or the process of the disk fails.
pub(super) fn serve(args: &BlkArgs) -> anyhow::Result<u8> {
    log::to_lines_at(tracing::Level::WARN, |line| say(line));
    // Inherited descriptors are not for Ringfence's own processes.
    namespaces::set_inheritable(&namespaces::inheritable_fds()?, false)?;
    let named = || format!("--socket {}", args.socket.display());
    let (listener, _file) = listen(&args.socket).with_context(named)?;
    let names = SessionNames {
        program: "vhost-user blk",
        guest: String::new(),
        process: "the disk's process",
        link: "vhost-user",
    };
    let status = StatusServer::new(args.status_socket.as_deref(), names)?;
    let signals = Signals::new(&[Signal::TERM, Signal::INT, Signal::QUIT, Signal::HUP])?;
    let mut session = BlkSession { args, listener, status, signals, connector: None };
    loop {
        let started = Instant::now();
        let domain = session.start()?;
        say(format_args!("{} serves {}", args.socket.display(), args.disk.source));
        match session.wait(domain)? {
            Outcome::Signal(number) if number == Signal::TERM.as_raw() => return Ok(0),
            Outcome::Signal(number) => return Ok(Ending::Killed(number).exit_status()),
            Outcome::Restart => {
                session.status.restart();
                say(
                    "a client has truncated the file of its memory: the disk's process starts again",
                );
                std::thread::sleep(START_INTERVAL.saturating_sub(started.elapsed()));
            }
        }
    }
}

impl BlkSession<'_> {
    fn step(&self, text: impl std::fmt::Display) {
        if self.args.verbose {
            say(text);
        }
    }

    /// Opens the storage, and starts the process of the disk.
    fn start(&mut self) -> anyhow::Result<DomainProcess> {
        let opened = self.args.disk.source.open(&|text| say(text))?;
        self.connector = opened.connector;
        let pool = self.args.require_pool.map_or(PoolRule::Any, |PoolArg(rule)| rule);
        let config = DiskConfig { medium: opened.medium, pool, verbose: self.args.verbose };
        let logs = (0..LOG_FILES).map(|_| log_file()).collect::<Result<Vec<_>, _>>()?;
        let spawn = Spawn {
            kind: DomainKind::Disk,
            command: &[],
            inherit: &[],
            cleanup: None,
            cgroup: None,
        };
        let domain = DomainProcess::start(&spawn)?;
        let fds: Vec<_> = [&self.listener]
            .into_iter()
            .chain(&logs)
            .chain(&opened.files)
            .map(AsFd::as_fd)
            .collect();
        domain.channel().send(&config, &fds)?;
        match domain.channel().receive_within::<FromDisk>(START_TIMEOUT) {
            Ok((FromDisk::Ready, _)) => Ok(domain),
            Ok((FromDisk::Failed(why), _)) => bail!("the disk failed: {}", printable(&why)),
            Ok((other, _)) => bail!("the disk's process reported {other:?} instead of its start"),
            Err(ChannelError::Closed) => {
                let ended = domain.wait_ended(Duration::from_secs(1));
                let why = ended.and_then(|ended| last_line(&ended.stderr_tail));
                bail!("the disk's process ended{}", because(why.as_deref()))
            }
            Err(error) => Err(error).context("the disk's process"),
        }
    }

    /// Serves the process of the disk until it or the session ends.
    fn wait(&mut self, domain: DomainProcess) -> anyhow::Result<Outcome> {
        loop {
            if let Some(arrived) = self.signals.next()? {
                self.step(format_args!("ends by signal {}", arrived.number));
                return Ok(Outcome::Signal(arrived.number));
            }
            while let Some((message, _)) = domain.channel().try_receive().ok().flatten() {
                self.take(&domain, message)?;
            }
            self.status.serve(None);
            while let Some(event) = domain.next_event() {
                match event {
                    Event::Stderr(text) => {
                        text.lines()
                            .for_each(|line| say(format_args!("disk: {}", printable(line))));
                    }
                    Event::Ended(ended) if ended.ending == Ending::Killed(Signal::BUS.as_raw()) => {
                        return Ok(Outcome::Restart);
                    }
                    Event::Ended(ended) => {
                        let why = because(last_line(&ended.stderr_tail).as_deref());
                        bail!("the disk's process {}{why}", ended.ending);
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

    /// Handles a message of the disk's process.
    fn take(&mut self, domain: &DomainProcess, message: FromDisk) -> anyhow::Result<()> {
        match message {
            FromDisk::Machine(state) => {
                self.status.take(state).into_iter().for_each(say);
            }
            FromDisk::Dial => {
                if let Some(connector) = &self.connector {
                    dial(connector, domain.channel(), |problem| ToDisk::Dialled { problem });
                }
            }
            FromDisk::LogFile => {
                let file = log_file()?;
                // The process asks for no more than it has room for.
                let _ = domain.channel().send_now(&ToDisk::LogFile, &[file.as_fd()]);
            }
            FromDisk::Failed(why) => bail!("the disk failed: {}", printable(&why)),
            FromDisk::Ready => {}
        }
        Ok(())
    }
}

//! `ringfence vhost-user blk`: the session that starts the process of a disk, and waits for its end.
//!
//! A client can end the disk's process in one way: it shrinks the file of its memory under it. The session counts that
//! client, and starts the next process on the same socket.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use ringfence_access::Mode;
use ringfence_driver::machine::{DiskConfig, FromDisk, LOG_FILES, ToDisk};
use ringfence_nbd::client::NbdConnector;
use ringfence_pasta::session_status::SessionNames;
use ringfence_pasta::values::PoolArg;
use ringfence_sandbox::channel::Channel;
use ringfence_sandbox::{DomainKind, DomainProcess};
use ringfence_vhost_user::PoolRule;

use super::common::{listen, log_file, say};
use super::control::ControlServer;
use super::session::{DeviceReport, DeviceSession, Outcome, Report, SessionPart, exit_status};
use crate::disk::{DiskSpec, dial};
use crate::launch::served_file::Storage;

const EXAMPLES: &str = "\
Examples:
  A disk in a file, for a QEMU that lends a pool of 64 MiB:
    ringfence vhost-user blk --socket /run/vm.disk --disk disk.img --require-pool 64M

  QEMU's options for it (before QEMU 9.2 reconnect=1):
    -chardev socket,id=d,path=/run/vm.disk,reconnect-ms=1000
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

    /// Socket at which `ringfence disk resize PATH` lets the machine have a disk that was enlarged
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,

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

/// Messages of a disk's process.
impl DeviceReport for FromDisk {
    fn sort(self) -> Report<FromDisk> {
        match self {
            FromDisk::Ready => Report::Ready,
            FromDisk::Failed(why) => Report::Failed(why),
            FromDisk::Machine(state) => Report::Machine(state),
            own @ (FromDisk::Dial | FromDisk::LogFile | FromDisk::Resized { .. }) => {
                Report::Own(own)
            }
        }
    }
}

/// Serves the disk until a signal ends it. Returns the exit status.
///
/// # Errors
///
/// Returns an error if the disk or a socket cannot be opened, or the process of the disk fails.
pub(super) fn serve(args: &BlkArgs) -> anyhow::Result<u8> {
    let names = SessionNames {
        program: "vhost-user blk",
        guest: String::new(),
        process: "the disk's process",
        link: "vhost-user",
    };
    let status = args.status_socket.as_deref();
    let mut session = DeviceSession::new(DomainKind::Disk, status, names, args.verbose)?;
    let named = || format!("--socket {}", args.socket.display());
    let (listener, _file) = listen(&args.socket).with_context(named)?;
    let mut control = args.control.as_deref().map(ControlServer::new).transpose()?;
    loop {
        let (domain, mut part) = start(args, &mut session, &listener, control.take())?;
        say(format_args!("{} serves {}", args.socket.display(), args.disk.source));
        match session.wait(&domain, &mut part)? {
            Outcome::Signal(number) => return Ok(exit_status(number)),
            Outcome::Truncated => session.prepare_restart(),
        }
        control = part.control;
        control.iter_mut().for_each(ControlServer::abandon);
    }
}

/// Opens the storage, and starts the process of the disk.
fn start(
    args: &BlkArgs,
    session: &mut DeviceSession,
    listener: &OwnedFd,
    control: Option<ControlServer>,
) -> anyhow::Result<(DomainProcess, DiskPart)> {
    let opened = args.disk.source.open(&|text| say(text))?;
    let storage = Storage::of(&args.disk.source, &opened.medium, &opened.files)?;
    let pool = args.require_pool.map_or(PoolRule::Any, |PoolArg(rule)| rule);
    let config = DiskConfig { medium: opened.medium, pool, verbose: args.verbose };
    let logs = (0..LOG_FILES).map(|_| log_file()).collect::<Result<Vec<_>, _>>()?;
    let fds: Vec<_> =
        [listener].into_iter().chain(&logs).chain(&opened.files).map(AsFd::as_fd).collect();
    let domain = session.start::<FromDisk>(&config, &fds)?;
    Ok((domain, DiskPart { connector: opened.connector, storage, control }))
}

/// Part of the session that only a disk has.
struct DiskPart {
    /// Connects to the server of the disk, if it is on one.
    connector: Option<NbdConnector>,
    storage: Storage,
    control: Option<ControlServer>,
}

impl SessionPart<FromDisk> for DiskPart {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.control.iter().flat_map(ControlServer::fds).collect()
    }

    fn serve(&mut self, device: &Channel) -> anyhow::Result<()> {
        if let Some(control) = &mut self.control {
            control.serve(&mut self.storage, device);
        }
        Ok(())
    }

    fn take(&mut self, message: FromDisk, device: &Channel) -> anyhow::Result<()> {
        match (message, &self.connector) {
            (FromDisk::Dial, Some(connector)) => {
                dial(connector, device, |problem| ToDisk::Dialled { problem });
            }
            (FromDisk::LogFile, _) => {
                let file = log_file()?;
                // The process asks for no more than it has room for.
                let _ = device.send_now(&ToDisk::LogFile, &[file.as_fd()]);
            }
            (FromDisk::Resized { problem }, _) => {
                if let Some(control) = &mut self.control {
                    control.finish(&mut self.storage, problem);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

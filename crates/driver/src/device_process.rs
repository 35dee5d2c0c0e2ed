//! Parts of the processes that serve hypervisors: their start, their failures, and the acceptance of clients.

// #syscall proxy,shield accept4: hypervisors connect

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use ringfence_frame::Fault;
use ringfence_hostnet::log;
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_sandbox::isolation::{Isolation, SandboxError};
use ringfence_sandbox::limits::raise_descriptor_limit;
use ringfence_sandbox::{DomainKind, STATUS_FAILED};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use serde::Serialize;

/// Failures of such a process.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProcessError {
    #[error("{0}")]
    Channel(#[from] ChannelError),
    #[error("{0}")]
    Sandbox(#[from] SandboxError),
    #[error("{0}")]
    System(#[from] io::Error),
    #[error("{0}")]
    Storage(String),
    #[error("{0}")]
    Socket(#[from] Fault),
    #[error("a new hypervisor: {0}")]
    Client(#[from] Errno),
    #[error("the session connects to a backend without being asked")]
    NotAsked,
}

/// Runs a process with the session's channel on standard input. `name` begins its error message, and `failed` makes the
/// session's. Returns the exit status.
pub(crate) fn serve_session<M: Serialize>(
    name: &str,
    run: impl FnOnce(&Channel) -> Result<(), ProcessError>,
    failed: impl FnOnce(String) -> M,
) -> u8 {
    Channel::serve_stdin(
        |channel| run(channel).map(|()| 0),
        |error| {
            eprintln!("ringfence: {name}: {error}");
            (STATUS_FAILED, failed(error.to_string()))
        },
    )
}

/// Enters the sandbox, which is open until it is locked. Only `files` and the channel stay open.
pub(crate) fn enter_sandbox(
    kind: DomainKind,
    channel: &Channel,
    files: &[OwnedFd],
    verbose: bool,
) -> Result<Isolation, ProcessError> {
    raise_descriptor_limit()?;
    let own = [channel.as_fd().as_raw_fd()];
    let expected: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).chain(own).collect();
    let isolation = Isolation::enter(kind, &expected)?;
    log::to_stderr(verbose);
    Ok(isolation)
}

/// Accepts a hypervisor. Returns `None` if none waits.
pub(crate) fn accept(listener: &OwnedFd) -> Result<Option<OwnedFd>, ProcessError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    match rustix::net::accept_with(listener, flags) {
        Ok(client) => Ok(Some(client)),
        // The connection may have ended before it was accepted.
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

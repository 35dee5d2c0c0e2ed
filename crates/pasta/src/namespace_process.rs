//! Sockets of the namespace: a process that stays there creates them, and the session passes them to the uplink. With `-T
//! auto` and `-U auto`, listening ones are among them.
//!
//! The uplink asks for them ([`ringfence_guest::relay_sockets`]). The process reads nothing but orders of the session, and cannot be traced by the namespace's root: it is not dumpable.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use ringfence_sandbox::channel::{Channel, ChannelError, expect_fds};
use ringfence_sandbox::spawn::THIS_PROGRAM;

use super::namespace::{Order, Report};
use ringfence_guest::relay_sockets;
use ringfence_hostnet::text::printable;
use ringfence_uplink_process::forward::{self, ForwardProtocol};
use ringfence_uplink_process::forwarded_ports;

/// Time limit for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Answers orders until the session is gone.
pub(super) fn serve(channel: &Channel) -> Result<(), ChannelError> {
    loop {
        match channel.receive::<Order>() {
            Ok((Order::Sockets, _)) => {
                relay_sockets::report(channel, &Report::Sockets)?;
            }
            Ok((Order::Listen(protocol, at), _)) => match forward::bind(protocol, at) {
                Ok(socket) => channel.send(&Report::Sockets, &[socket.as_fd()])?,
                Err(error) => channel.send(&Report::Failed(error.to_string()), &[])?,
            },
            Ok(_) | Err(ChannelError::Closed) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// Process in the namespace that creates sockets, seen from the session. It ends when the channel is closed. The
/// session may have no right to kill it any more, after it has given up root's.
#[derive(Debug)]
pub(super) struct NamespaceProcess {
    // Dropped before the child, which is then waited for.
    channel: Channel,
    _child: Reaped,
}

impl NamespaceProcess {
    /// Starts the process for namespaces that exist.
    pub(super) fn start(
        namespaces: &[std::os::fd::BorrowedFd<'_>],
    ) -> anyhow::Result<NamespaceProcess> {
        let (channel, inner) = Channel::pair()?;
        let mut command = Command::new(THIS_PROGRAM);
        command.arg0("ringfence").args(["internal", "pasta-namespace", "--"]);
        command.stdin(Stdio::from(inner.into_fd()));
        command.env_clear().stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().context("starting the process in the namespace")?;
        channel.send(&Order::Serve, namespaces)?;
        Ok(NamespaceProcess { channel, _child: Reaped(child) })
    }

    /// Passes new sockets of the namespace to the uplink. A process that fails passes none, which ends relays.
    pub(super) fn refill(&self, uplink: &Channel) -> anyhow::Result<()> {
        let sockets = self.sockets();
        let fds = sockets.iter().flatten().map(AsFd::as_fd).collect::<Vec<_>>();
        forwarded_ports::send_sockets(uplink, &fds)?;
        sockets.map(drop)
    }

    /// Returns a socket that listens at an address of the namespace, or the reason why there is none.
    ///
    /// # Errors
    ///
    /// Returns an error if the process does not answer as it must.
    pub(super) fn listen(
        &self,
        protocol: ForwardProtocol,
        at: SocketAddr,
    ) -> anyhow::Result<Result<OwnedFd, String>> {
        self.channel.send_now(&Order::Listen(protocol, at), &[])?;
        match self.channel.receive_within::<Report>(TIMEOUT)? {
            (Report::Sockets, fds) => {
                let [socket] = expect_fds(fds)?;
                Ok(Ok(socket))
            }
            (Report::Failed(why), _) => Ok(Err(printable(&why))),
            _ => bail!("the process in the namespace sent no listening socket"),
        }
    }

    fn sockets(&self) -> anyhow::Result<Vec<OwnedFd>> {
        self.channel.send_now(&Order::Sockets, &[])?;
        match self.channel.receive_within::<Report>(TIMEOUT)? {
            (Report::Sockets, fds) => Ok(fds.into_vec()),
            (Report::Failed(why), _) => bail!("{}", printable(&why)),
            _ => bail!("the process in the namespace sent no sockets"),
        }
    }
}

/// Child that is waited for when it is dropped.
#[derive(Debug)]
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        // A child that cannot be waited for is left to init.
        let _ = self.0.wait();
    }
}

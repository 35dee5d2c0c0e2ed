//! Connection to the upstream proxy, until the proxy has opened the one to its target.
//!
//! The proxy's answer is read from the socket's queue up to its end; the server's bytes behind it stay there.

use core::net::SocketAddr;
use std::io::IoSliceMut;

use ringfence_policy::HostName;
use rustix::io::Errno;

use crate::context::Context;
use crate::host::{Readiness, Socket};
use crate::upstream::{Destination, Dialogue, ProxyFault};

/// Maximum number of bytes of a proxy that are read at once.
const READ: usize = 2048;

/// Connection to a proxy.
#[derive(Debug)]
pub(super) struct Proxied {
    destination: Destination,
    /// Number of the proxy's addresses that were tried.
    tried: usize,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// The connection to the proxy is in progress.
    Connecting,
    /// The dialogue with the proxy has begun.
    Asking(Dialogue),
    /// The proxy has opened the connection.
    Done,
}

impl Proxied {
    pub(super) fn new(destination: Destination) -> Box<Proxied> {
        Box::new(Proxied { destination, tried: 0, stage: Stage::Connecting })
    }

    /// Returns `true` while the proxy has not opened the connection.
    pub(super) fn waits(&self) -> bool {
        !matches!(self.stage, Stage::Done)
    }

    /// Returns the name of the target, if it has one.
    pub(super) fn name(&self) -> Option<&HostName> {
        self.destination.name()
    }

    /// Returns the next address of the proxy to be tried.
    pub(super) fn next_address(&mut self) -> Option<SocketAddr> {
        self.tried += 1;
        self.destination.proxy().address(self.tried - 1)
    }

    /// Returns the fault if the address that is tried cannot be reached.
    pub(super) fn unreachable(&self, errno: Errno) -> Option<ProxyFault> {
        let is_connecting = matches!(self.stage, Stage::Connecting);
        let address = self.destination.proxy().address(self.tried.checked_sub(1)?)?;
        is_connecting.then_some(ProxyFault::Unreachable(address, errno))
    }

    /// Starts the dialogue if the connection to the proxy is established, and reads the proxy's answer. Returns `true` once the
    /// proxy has opened the connection.
    pub(super) fn advance(
        &mut self,
        socket: &Socket,
        what: Readiness,
        context: &mut Context<'_>,
    ) -> Result<bool, ProxyFault> {
        if matches!(self.stage, Stage::Connecting) && what.writable {
            let (dialogue, first) = self.destination.start();
            self.stage = Stage::Asking(dialogue);
            send(socket, &first, context)?;
        }
        loop {
            let Stage::Asking(dialogue) = &mut self.stage else { return Ok(false) };
            let mut buffer = [0; READ];
            let read = context.host.peek(socket, 0, &mut [IoSliceMut::new(&mut buffer)]);
            let bytes = match read {
                Ok(0) => return Err(ProxyFault::Closed),
                Ok(count) => buffer.get(..count).unwrap_or_default(),
                Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
                Err(_) => return Err(ProxyFault::Closed),
            };
            let step = dialogue.read(bytes)?;
            context.host.discard(socket, step.consumed).map_err(|_| ProxyFault::Closed)?;
            if step.is_done {
                self.stage = Stage::Done;
                return Ok(true);
            }
            if !step.send.is_empty() {
                send(socket, &step.send, context)?;
            }
        }
    }
}

/// Sends a message of the dialogue. The socket's queue has room for all of it.
fn send(socket: &Socket, bytes: &[u8], context: &mut Context<'_>) -> Result<(), ProxyFault> {
    match context.host.send_bytes(socket, bytes) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        _ => Err(ProxyFault::Closed),
    }
}

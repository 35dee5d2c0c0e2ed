//! Forwarded TCP ports: accepts connections of the host's listening sockets and opens them at the guest.
//!
//! The guest sees the client's real address. Forwarded UDP ports are part of [`crate::udp`].

use core::net::SocketAddr;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use crate::context::Context;
use crate::host::listen::Listener;
use crate::host::{Owner, OwnerKind, Ready};
use crate::share::Handoff;
use crate::tcp::Tcp;

/// Maximum of connections accepted in one round.
const ACCEPTS: usize = 64;

/// Forwarded port: a listening socket of the host and the guest's address.
struct ForwardedPort {
    listener: Box<dyn Listener>,
    guest: SocketAddr,
    queued: bool,
}

/// All forwarded TCP ports.
#[derive(Default)]
pub(crate) struct Forwards {
    ports: Vec<ForwardedPort>,
    waiting: VecDeque<usize>,
}

impl Forwards {
    /// Forwards connections of a listening socket to `guest`.
    pub(crate) fn add(
        &mut self,
        socket: OwnedFd,
        guest: SocketAddr,
        context: &mut Context<'_>,
    ) -> Result<(), Errno> {
        let index = u32::try_from(self.ports.len()).map_err(|_| Errno::MFILE)?;
        let owner = Owner { kind: OwnerKind::TcpListener, index, generation: 0 };
        let listener = context.host.listen(owner, socket)?;
        self.ports.push(ForwardedPort { listener, guest, queued: false });
        Ok(())
    }

    /// Handles an event of a listening socket.
    pub(crate) fn ready(&mut self, ready: Ready) {
        let Ok(index) = usize::try_from(ready.owner.index) else { return };
        if let Some(port) = self.ports.get_mut(index)
            && !port.queued
        {
            port.queued = true;
            self.waiting.push_back(index);
        }
    }

    /// Accepts connections. Those of another engine are appended to `handoffs`. Returns `true` if more may be
    /// waiting.
    pub(crate) fn accept(
        &mut self,
        tcp: &mut Tcp,
        handoffs: &mut Vec<(usize, Handoff)>,
        context: &mut Context<'_>,
    ) -> bool {
        let Some(mac) = context.config.guest.mac else { return false };
        for _ in 0..ACCEPTS {
            let Some(&index) = self.waiting.front() else { return false };
            let Some(port) = self.ports.get_mut(index) else { return false };
            match port.listener.accept() {
                Ok((file, client)) => {
                    let (client, guest) = (context.config.inward(client), port.guest);
                    match context.config.share.of_flow(guest, client) {
                        own if own == context.config.share.index => {
                            tcp.accept(file, client, guest, mac, context);
                        }
                        engine => {
                            handoffs.push((engine, Handoff::Connection { file, client, guest }))
                        }
                    }
                }
                // The connection was aborted before it was accepted.
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                // None left, or no descriptor: the next connection raises the next event.
                Err(_) => {
                    port.queued = false;
                    self.waiting.pop_front();
                }
            }
        }
        !self.waiting.is_empty()
    }
}

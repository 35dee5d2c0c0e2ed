//! Ports of the host that lead to the guest, TCP: connections are taken one by one and become flows,
//! with the address of the client that is real. (UDP: [`crate::udp`].)

use core::net::SocketAddr;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use crate::context::Context;
use crate::host::listen::Listener;
use crate::host::{Owner, OwnerKind, Ready};
use crate::share::Handed;
use crate::tcp::Tcp;

/// Connections taken in one turn; then others have theirs.
const ACCEPTS: usize = 64;

struct Port {
    listener: Box<dyn Listener>,
    guest: SocketAddr,
    queued: bool,
}

/// Forwarded ports.
#[derive(Default)]
pub(crate) struct Forwards {
    ports: Vec<Port>,
    waiting: VecDeque<usize>,
}

impl Forwards {
    /// Lets connections of a listening socket lead to `guest`.
    pub(crate) fn add(
        &mut self,
        socket: OwnedFd,
        guest: SocketAddr,
        context: &mut Context<'_>,
    ) -> Result<(), Errno> {
        let index = u32::try_from(self.ports.len()).map_err(|_| Errno::MFILE)?;
        let owner = Owner { kind: OwnerKind::TcpListener, index, generation: 0 };
        let listener = context.host.listen(owner, socket)?;
        self.ports.push(Port { listener, guest, queued: false });
        Ok(())
    }

    /// Somebody may have come.
    pub(crate) fn ready(&mut self, ready: Ready) {
        let Ok(index) = usize::try_from(ready.owner.index) else { return };
        if let Some(port) = self.ports.get_mut(index)
            && !port.queued
        {
            port.queued = true;
            self.waiting.push_back(index);
        }
    }

    /// Takes who has come; what is another engine's is left in `handed`. Returns whether there may be more.
    pub(crate) fn accept(
        &mut self,
        tcp: &mut Tcp,
        handed: &mut Vec<(usize, Handed)>,
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
                        whose => handed.push((whose, Handed::Connection { file, client, guest })),
                    }
                }
                // Gone before it was taken.
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                // Nobody, or no descriptors: then the next event comes with the next connection.
                Err(_) => {
                    port.queued = false;
                    self.waiting.pop_front();
                }
            }
        }
        !self.waiting.is_empty()
    }
}

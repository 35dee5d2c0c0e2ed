//! Connections of the guest through the upstream proxy: from the SYN until the proxy has opened them.
//!
//! Such a connection stays in [`Phase::Connecting`], so the guest has sent no payload, and a failure resets it at once.

use core::net::SocketAddr;
use core::time::Duration;

use rustix::io::Errno;

use super::Tcp;
use super::connection::{Phase, TcpConnection};
use super::proxied::Proxied;
use crate::context::{Context, Way};
use crate::flow::FlowId;
use crate::host::{Close, Readiness};
use crate::upstream::ProxyFault;

impl TcpConnection {
    /// Sets the way of a connection that the guest opens, and its time limit. Returns the address of a direct one.
    pub(super) fn set_way(&mut self, way: Way, context: &Context<'_>) -> Option<SocketAddr> {
        let limits = &context.config.tcp;
        let (to, within) = match way {
            Way::Direct(to) => (Some(to), limits.connect_within),
            Way::Proxied(destination) => {
                self.proxied = Some(Proxied::new(destination));
                (None, limits.proxy_within)
            }
        };
        self.ends_at = Some(context.now + within);
        to
    }

    /// Returns `true` while the proxy has not opened the connection.
    fn waits_for_proxy(&self) -> bool {
        self.phase == Phase::Connecting && self.proxied.as_ref().is_some_and(|it| it.waits())
    }

    /// Returns `true` if the proxy's time is over.
    pub(super) fn is_late_at_proxy(&self, now: Duration) -> bool {
        self.waits_for_proxy() && self.ends_at.is_some_and(|at| at <= now)
    }
}

impl Tcp {
    /// Connects to the next address of the proxy, or ends the connection if there is none. `fault` is that of the address
    /// before.
    pub(super) fn connect_to_proxy(
        &mut self,
        id: FlowId,
        mut fault: ProxyFault,
        context: &mut Context<'_>,
    ) {
        loop {
            let proxied = self.flows.get_mut(id).and_then(|flow| flow.proxied.as_mut());
            let Some(address) = proxied.and_then(|proxied| proxied.next_address()) else {
                return self.fail_at_proxy(id, fault, context);
            };
            match self.connect(id, address, context) {
                Ok(()) => return,
                Err(errno) => fault = ProxyFault::Unreachable(address, errno),
            }
        }
    }

    /// Handles an event of a connection that waits for the proxy. Returns `true` once the proxy has opened it; `None` if the
    /// connection does not wait for a proxy.
    pub(super) fn advance_at_proxy(
        &mut self,
        id: FlowId,
        what: Readiness,
        context: &mut Context<'_>,
    ) -> Option<bool> {
        let flow = self.flows.get_mut(id).filter(|flow| flow.waits_for_proxy())?;
        let (socket, proxied) = (flow.socket.as_ref()?, flow.proxied.as_mut()?);
        if what.failed
            && let Some(errno) = context.host.error(socket)
            && let Some(fault) = proxied.unreachable(errno)
        {
            if let Some(socket) = flow.socket.take() {
                context.host.close(socket, Close::Reset);
            }
            self.connect_to_proxy(id, fault, context);
            return Some(false);
        }
        match proxied.advance(socket, what, context) {
            Ok(is_open) => {
                context.counters.tcp_proxied.add(u64::from(is_open));
                // The server's first bytes may have come with the answer.
                flow.flags.readable |= is_open;
                Some(is_open)
            }
            Err(fault) => {
                self.fail_at_proxy(id, fault, context);
                Some(false)
            }
        }
    }

    /// Ends a connection that the proxy does not carry: the guest's is refused, and the reason is in the egress record.
    pub(super) fn fail_at_proxy(
        &mut self,
        id: FlowId,
        fault: ProxyFault,
        context: &mut Context<'_>,
    ) {
        context.counters.tcp_proxy_failed.add(1);
        let key = self.flows.key(id);
        let proxied = self.flows.get(id).and_then(|flow| flow.proxied.as_ref());
        if let (Some(key), Some(proxied), Some(egress)) = (key, proxied, context.egress) {
            egress.fail_at_proxy(key.remote, proxied.name(), fault);
        }
        self.refuse(id, Errno::CONNREFUSED, context);
    }
}

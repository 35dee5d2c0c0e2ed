//! TCP: connections of the guest, each by a connection of the host's.

pub mod config;
mod reset;
pub mod segment;
pub mod seq;

use core::net::SocketAddr;
use core::time::Duration;
use std::os::fd::OwnedFd;

pub use config::TcpConfig;
use segment::Segment;

use crate::config::Config;
use crate::context::Context;
use crate::flow::Table;
use crate::host::Ready;
use crate::link::GuestSide;
use crate::packet::{Mac, Packet};

/// All TCP conversations.
#[derive(Debug)]
pub struct Tcp {
    flows: Table<()>,
}

impl Tcp {
    /// No conversations, within the limits of `config`.
    pub fn new(config: &Config) -> Tcp {
        Tcp { flows: Table::new(config.tcp.flows_max) }
    }

    /// Conversations, whatever their state.
    pub fn len(&self) -> usize {
        self.flows.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    /// A packet of the guest. Its checksum is right and its source is allowed.
    pub fn input(&mut self, packet: &Packet<'_>, context: &mut Context<'_>) {
        if let Some((segment, _)) = Segment::read(packet) {
            context.counters.tcp_stray.add(1);
            reset::refuse(packet, &segment, context);
        }
    }

    /// All packets of a batch have been put in.
    pub fn input_ends(&mut self, context: &mut Context<'_>) {
        let _ = context;
    }

    /// A connection from outside, already accepted. It begins with a SYN to the guest, which comes from
    /// `client`.
    pub fn accept(
        &mut self,
        file: OwnedFd,
        client: SocketAddr,
        guest: SocketAddr,
        mac: Mac,
        context: &mut Context<'_>,
    ) {
        let _ = (file, client, guest, mac, context);
    }

    /// An event of a socket.
    pub fn ready(&mut self, ready: Ready, context: &mut Context<'_>) {
        let _ = (ready, context);
    }

    /// Does what is due by the clock.
    pub fn run_timers(&mut self, context: &mut Context<'_>) {
        let _ = context;
    }

    /// When [`run_timers`](Self::run_timers) is to be called next.
    pub fn deadline(&self) -> Option<Duration> {
        self.flows.next_look()
    }

    /// Sends what is owed and what sockets have. Returns whether there is more.
    pub fn output(&mut self, link: &mut dyn GuestSide, context: &mut Context<'_>) -> bool {
        let _ = (link, context);
        false
    }
}

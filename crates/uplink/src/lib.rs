#![forbid(unsafe_code)]
//! The uplink: guest packets on one side, sockets of the host on the other.
//!
//! A guest sees a router. There is none: each of its flows is a socket of the process that
//! runs this crate, opened, used and closed as the packets say. Nothing of it needs a privilege, a
//! NAT table or an interface on the host.
//!
//! # Theory of operation
//!
//! [`Uplink`] is the engine. It owns no thread, no clock and no link; whoever runs it goes *turns*:
//!
//! 1. [`Uplink::input`]: frames from the guest, in a [`Batch`](ringfence_frame::Batch), wherever that
//!    came from. Payload goes from the frames straight into sockets. Nothing is emitted: what the
//!    guest is owed (an acknowledgement, a reset, an ARP reply) is remembered.
//! 2. [`Uplink::poll_host`]: which sockets have become readable, writable or useless.
//! 3. [`Uplink::run_timers`]: what is due by the clock.
//! 4. [`Uplink::output`]: everything that is owed, and what sockets have for the guest, goes into
//!    frames that the link lends ([`GuestLink`]), payload straight from the socket.
//!
//! Between turns it sleeps until a frame comes, [`Uplink::wait_fd`] is readable, or
//! [`Uplink::deadline`] has come. [`runner::Runner`] is a thread that does that.
//!
//! # The seams
//!
//! * [`link::GuestLink`]: the way to the guest. A TAP, a vhost ring, a batch of the data plane.
//! * [`host::Host`]: the sockets. Real ones, or scripted ones in conformance tests.
//! * [`context::Context`]: what a protocol is handed: configuration, host, replies, counters, time.
//! * [`guest::GuestNetwork`]: what the guest is told by ARP, NDP, DHCP and DHCPv6.
//! * [`share::Share`]: several engines for one guest, and which flow is whose.
//! * [`flow::Table`]: flows by their addresses, bounded, the longest idle one makes room.

pub mod access;
mod arp;
pub mod config;
pub mod context;
pub mod counters;
mod dhcp;
mod dhcpv6;
pub mod emit;
pub mod engine;
pub mod flow;
mod forward;
mod fragment;
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing;
pub mod guest;
pub mod host;
pub mod icmp;
pub mod link;
mod ndp;
pub mod packet;
mod reassembly;
pub mod replies;
pub mod runner;
pub mod share;
pub mod tcp;
pub mod team;
#[cfg(any(test, feature = "test-utils"))]
pub mod testing;
pub mod udp;

pub use access::Access;
pub use config::Config;
pub use context::Context;
pub use counters::UplinkCounters;
pub use engine::Uplink;
pub use host::Host;
pub use link::GuestLink;

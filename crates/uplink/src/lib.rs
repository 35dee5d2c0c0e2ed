#![forbid(unsafe_code)]
//! User-space uplink: connects a guest to the host's network by ordinary sockets.
//!
//! The guest sees a router. In fact each of its TCP connections, UDP associations and echo flows is a socket
//! of the process that runs this crate. No privilege, NAT rule or host interface is needed.
//!
//! # Rounds
//!
//! [`Uplink`] is the engine of one guest. It owns no thread, clock or link. Its caller runs *rounds*:
//!
//! ```text
//!                 input                 send
//! link (guest) ----------->  Uplink  ----------->  Host (sockets)
//!              <-----------          <-----------
//!                 output                peek
//! ```
//!
//! 1. [`Uplink::input`] handles a [`Batch`](ringfence_frame::Batch) of frames. Payload goes straight into
//!    sockets. Acknowledgements, resets and ARP replies are recorded.
//! 2. [`Uplink::poll_host`] reads socket events.
//! 3. [`Uplink::run_timers`] handles timers.
//! 4. [`Uplink::output`] writes due segments and socket data into buffers of the link ([`GuestLink`]).
//!
//! Between rounds the caller sleeps until a frame arrives, [`Uplink::wait_fd`] is readable, or
//! [`Uplink::deadline`] is reached. [`runner::Runner`] is a thread that does all of this.
//!
//! # Main types
//!
//! * [`link::GuestLink`]: a link to the guest. Links by TAP, vhost-net and sockets are in `ringfence-link`.
//! * [`port_link::PortLink`]: a link over any port, such as a TAP. `examples/tap.rs` uses it.
//! * [`host::Host`]: sockets, of Linux or scripted for tests.
//! * [`context::Context`]: the engine's parts that protocols use.
//! * [`guest::GuestNetwork`]: the settings offered by ARP, NDP, DHCP and DHCPv6.
//! * [`share::Share`]: the distribution of flows over several engines.
//! * [`upstream::UpstreamProxy`]: a proxy that carries the guest's connections to other hosts.
//! * [`flow::FlowTable`]: a bounded table of flows with eviction.

pub mod access;
mod arp;
pub mod config;
pub mod context;
pub mod counters;
mod dhcp;
mod dhcpv6;
pub mod egress;
pub mod emit;
pub mod engine;
pub mod flow;
pub mod forward;
mod fragment;
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing;
pub mod guest;
mod held;
pub mod host;
pub mod icmp;
pub mod link;
pub mod name_queries;
pub mod name_query;
mod ndp;
pub mod packet;
pub mod port_link;
mod reassembly;
pub mod relay;
pub mod replies;
pub mod runner;
pub mod share;
pub mod tcp;
pub mod team;
#[cfg(any(test, feature = "test-utils"))]
pub mod testing;
pub mod udp;
pub mod upstream;

pub use access::Access;
pub use config::Config;
pub use context::Context;
pub use counters::UplinkCounters;
pub use egress::Egress;
pub use engine::Uplink;
pub use host::Host;
pub use link::GuestLink;
// Crates whose types are in this crate's interface, for programs that depend on this crate alone.
pub use {ringfence_frame as frame, ringfence_offload as offload, ringfence_sys as sys};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

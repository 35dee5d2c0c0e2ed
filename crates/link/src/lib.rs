#![forbid(unsafe_code)]
//! Links between a guest and the uplink engine.
//!
//! A link is a [`Port`](ringfence_frame::Port), by which frames come from the guest, and a
//! [`GuestLink`](ringfence_uplink::GuestLink), by which the engine writes frames for it.
//!
//! ```text
//! guest <-> TAP, vhost-net, socket, virtqueues <-> link <-> ringfence-uplink <-> host sockets
//! ```
//!
//! * [`tap`]: a TAP interface; one system call per frame.
//! * [`vhost_net`]: kernel vhost-net; virtqueues in shared memory.
//! * [`vhost_user`]: virtqueues in the memory of a virtual machine.
//! * [`stream`]: a Unix stream socket of a virtual machine; many frames per system call.
//! * [`datagram`]: a Unix datagram socket of a virtual machine; one frame each.
//! * [`clients`]: the virtual machines that connect to a socket, one at a time.
//! * [`ring_link`]: the interface to the engine of all links but vhost-net.
//! * [`frame_ring`]: the ring in which frames for the guest are assembled.
//! * [`capture`]: frames of a link, written to a file.
//!
//! # Example
//!
//! ```no_run
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use ringfence_link::frame_ring::FrameShape;
//! use ringfence_link::tap::TapLink;
//! use ringfence_platform::Counters;
//! use ringfence_sys::{clock::Clock, tap::Tap};
//! use ringfence_uplink::host::real::RealHost;
//! use ringfence_uplink::runner::Runner;
//! use ringfence_uplink::{Config, Uplink, UplinkCounters};
//!
//! let tap = Tap::create("up%d")?;
//! let config = Config::default();
//! let shape = FrameShape::default();
//! let link = TapLink::new(tap.fd, tap.offloads, config.mtu, shape, Arc::new(Counters::default()))?;
//! let counters = Arc::<UplinkCounters>::default();
//! let host = RealHost::new(Arc::clone(&counters))?;
//! let uplink = Uplink::new(config, Box::new(host), counters);
//! let (stop, _keep) = std::os::unix::net::UnixStream::pair()?;
//! let end = Runner::new(uplink, link, Clock::default(), Duration::ZERO).run(stop);
//! println!("{end}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod capture;
pub mod datagram;
pub mod frame_ring;
pub mod ring_link;
pub mod stream;
pub mod tap;
pub mod vhost_net;
pub mod vhost_user;

pub use ringfence_vhost_user::clients;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

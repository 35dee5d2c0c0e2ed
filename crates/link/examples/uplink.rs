//! Uplink on a TAP interface: `uplink INTERFACE`.
//!
//! The program makes the interface and carries its packets by sockets of its own network namespace. Move the interface
//! into the namespace that is to be connected, and give it the address that the uplink expects there:
//!
//! ```text
//! ip netns add guest
//! cargo run -p ringfence-uplink --example uplink -- up0 &
//! ip link set up0 netns guest
//! ip -n guest address add 10.0.2.15/24 dev up0
//! ip -n guest link set up0 up
//! ip -n guest route add default via 10.0.2.2
//! ip netns exec guest ping -c 1 10.0.2.2
//! ```
//!
//! Only root may make interfaces. The interface is removed when the program ends.

use std::error::Error;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use ringfence_link::frame_ring::FrameShape;
use ringfence_link::tap::TapLink;
use ringfence_platform::Counters;
use ringfence_sys::{clock::Clock, tap::Tap};
use ringfence_uplink::guest::GuestNetwork;
use ringfence_uplink::host::real::RealHost;
use ringfence_uplink::runner::Runner;
use ringfence_uplink::{Config, Uplink, UplinkCounters};

fn main() -> Result<(), Box<dyn Error>> {
    let name = std::env::args().nth(1).ok_or("usage: uplink INTERFACE")?;
    let tap = Tap::create(&name)?;
    let gateway = IpAddr::from([10, 0, 2, 2]);
    let guest = GuestNetwork {
        addresses: vec![(IpAddr::from([10, 0, 2, 15]), 24)],
        gateways: vec![gateway],
        own: vec![gateway],
        ..GuestNetwork::default()
    };
    let config = Config { guest, ..Config::default() };
    let shape = FrameShape::default();
    let link =
        TapLink::new(tap.fd, tap.offloads, config.mtu, shape, Arc::new(Counters::default()))?;

    let counters = Arc::<UplinkCounters>::default();
    let host = RealHost::new(Arc::clone(&counters))?;
    let uplink = Uplink::new(config, Box::new(host), counters);
    // The runner stops when the other end of this socket is closed.
    let (stop, _keep) = UnixStream::pair()?;
    let end = Runner::new(uplink, link, Clock::default(), Duration::ZERO).run(stop);
    println!("{end}");
    Ok(())
}

//! Uplink on a TAP interface, with this crate alone: `tap INTERFACE`.
//!
//! As root, `cargo run -p ringfence-uplink --example tap -- up0` carries the packets of `up0`, which has 10.0.2.15/24
//! and the gateway 10.0.2.2, by sockets. `cargo run -p ringfence-link --example uplink` does it without a copy.

use std::error::Error;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use ringfence_uplink::frame::tap::TapPort;
use ringfence_uplink::guest::GuestNetwork;
use ringfence_uplink::host::real::RealHost;
use ringfence_uplink::port_link::PortLink;
use ringfence_uplink::runner::Runner;
use ringfence_uplink::sys::{clock::Clock, tap::Tap};
use ringfence_uplink::{Config, Uplink, UplinkCounters};

fn main() -> Result<(), Box<dyn Error>> {
    let name = std::env::args().nth(1).ok_or("usage: tap INTERFACE")?;
    let (own, gateway) = (IpAddr::from([10, 0, 2, 15]), IpAddr::from([10, 0, 2, 2]));
    let mut guest = GuestNetwork { addresses: vec![(own, 24)], ..GuestNetwork::default() };
    (guest.gateways, guest.own) = (vec![gateway], vec![gateway]);
    let config = Config { guest, ..Config::default() };

    let tap = Tap::create(&name)?;
    let link = PortLink::new(TapPort::new(tap.fd, tap.offloads, config.mtu, Arc::default()));
    let counters = Arc::<UplinkCounters>::default();
    let host = RealHost::new(Arc::clone(&counters))?;
    let uplink = Uplink::new(config, Box::new(host), counters);
    // The runner stops when the other end of this socket is closed.
    let (stop, _keep) = UnixStream::pair()?;
    println!("{}", Runner::new(uplink, link, Clock::default(), Duration::ZERO).run(stop));
    Ok(())
}

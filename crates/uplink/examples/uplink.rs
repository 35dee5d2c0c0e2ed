//! Uplink of one guest over a TAP interface: `uplink [INTERFACE]`.
//!
//! The program creates the interface (default `up0`) and answers ARP, neighbour discovery, DHCP and DHCPv6 on
//! it. It carries TCP connections, UDP associations and echo flows by sockets of this process, until its
//! standard input is closed.
//!
//! An ordinary user can try it in a network namespace of its own, which has no host network:
//!
//! ```sh
//! cargo build -p ringfence-uplink --example uplink
//! unshare --user --map-root-user --net target/debug/examples/uplink
//! ```

use std::error::Error;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use ringfence_platform::Counters;
use ringfence_sys::clock::Clock;
use ringfence_sys::tap::Tap;
use ringfence_uplink::host::real::RealHost;
use ringfence_uplink::link::tap::TapLink;
use ringfence_uplink::link::vhost_net::frames::FrameShape;
use ringfence_uplink::runner::Runner;
use ringfence_uplink::{Config, Uplink, UplinkCounters};

fn main() -> Result<(), Box<dyn Error>> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "up0".to_owned());
    let tap = Tap::create(&name)?;
    println!("the guest's interface is {}", tap.name);
    let config = Config::default();
    let (shape, calls) = (FrameShape::default(), Arc::new(Counters::default()));
    let link = TapLink::new(tap.fd, tap.offloads, config.mtu, shape, calls)?;
    let counters = Arc::<UplinkCounters>::default();
    let host = RealHost::new(Arc::clone(&counters))?;
    let uplink = Uplink::new(config, Box::new(host), counters);

    // The runner ends when the other end of `stop` is closed.
    let (stop, keep) = UnixStream::pair()?;
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        drop(keep);
    });
    let end = Runner::new(uplink, link, Clock::default(), Duration::ZERO).run(stop);
    println!("{end}");
    Ok(())
}

#![forbid(unsafe_code)]
//! An uplink by a TAP interface in a network namespace: `tap NAMESPACE-FILE MTU ADDRESS-OF-LOOPBACK`.
//!
//! The interface is called `eth0`; whoever runs this configures it. It ends when its input does.

use std::sync::Arc;

use anyhow::{Context, Result};
use ringfence_net::clock::Clock;
use ringfence_platform::tap::Tap;
use ringfence_uplink::host::real::RealHost;
use ringfence_uplink::runner::{Runner, TapBoth};
use ringfence_uplink::{Config, Uplink, UplinkCounters};

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let namespace = args.next().context("which network namespace?")?;
    let mtu: u16 = args.next().context("which MTU?")?.parse()?;
    let tap = std::thread::spawn(move || -> Result<Tap> {
        let file = std::fs::File::open(namespace)?;
        let network = Some(rustix::thread::LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&file), network)?;
        Ok(Tap::create("eth0")?)
    });
    let tap = tap.join().ok().context("no interface")??;
    let mut config = Config { mtu, ..Config::default() };
    for address in args {
        config.access.host_loopback.push(address.parse()?);
    }
    let counters = Arc::<UplinkCounters>::default();
    let host = RealHost::new(Arc::clone(&counters))?;
    let uplink = Uplink::new(config, Box::new(host), Arc::clone(&counters));
    let link = TapBoth::new(tap.fd, tap.offloads, mtu)?;
    let mut runner = Runner::new(uplink, link, Clock::default());
    runner.run(std::io::stdin())?;
    for (name, value) in counters.each() {
        if value > 0 {
            println!("{name} {value}");
        }
    }
    println!("{:?}", runner.link().link().written());
    Ok(())
}

//! Trial of kernel vhost-net with a descriptor outside its memory table: the worker must read nothing and
//! signal the error eventfd.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ringfence_memory::{DeviceAccess, LentSlice, Mapping};
use ringfence_platform::vhost::{self, QueueName, VhostEvents, VhostNet, VhostSetup};
use ringfence_sys::tap::Tap;

const PATIENCE: Duration = Duration::from_secs(10);

/// Returns `true` if the worker signals an error for that frame and for none before.
pub(super) fn run() -> anyhow::Result<bool> {
    let tap = Tap::create("engines0")?;
    let memory = || Mapping::private(4096).map(|mapping| mapping.lent()).context("memory");
    let (known, strange) = (memory()?, memory()?);
    let regions = vec![known.device_region()];
    let setup = VhostSetup { sizes: [8, 8], regions, in_order: false };
    let (device, [_receive, mut transmit]) =
        VhostNet::start(vhost::open()?, tap.fd.as_fd(), setup)?;
    let mut say = |from: &LentSlice, until: fn(VhostEvents) -> bool| {
        transmit.push(&[from.device_range(0, 100, DeviceAccess::Read)?], 0)?;
        let kick = transmit.publish();
        transmit.arm(1)?;
        if kick {
            device.kick(QueueName::Transmit)?;
        }
        let begun = Instant::now();
        let mut events = device.take_events()?;
        while !until(events) && begun.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
            events = device.take_events()?;
        }
        anyhow::Ok(events)
    };
    let sent = say(&known, |events| events.called)?;
    let refused = say(&strange, |events| events.failed.is_some())?;
    println!("in known memory: {sent:?}; in strange memory: {refused:?}");
    Ok(sent.called && sent.failed.is_none() && refused.failed == Some(QueueName::Transmit))
}

//! Network interface between two domains of one process, over the local platform.
//!
//! A hub stands for the hypervisor. The driver domain serves a vif in mode `copy`, the guest connects to it and sends
//! a frame, and the driver domain receives it. A real backend gives its port to a worker of `ringfence-switch`, which
//! moves frames between many ports.
//!
//! Run: `cargo run -p ringfence-net --example vif`

use std::error::Error;

use ringfence_access::Mode;
use ringfence_frame::{Batch, Port};
use ringfence_net::vif::PortHost;
use ringfence_net::vif::backend::{BackendOptions, VifBackend};
use ringfence_net::vif::frontend::VifFrontend;
use ringfence_net::vif::toolstack::{self, VifConfig};
use ringfence_offload::OffloadMeta;
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::local::hub::{Hub, HubLimits};
use ringfence_platform::{DomId, Platform};
use ringfence_wire::xenbus::{DeviceId, DeviceKind};

/// Receiver of the port of a connected vif.
#[derive(Default)]
struct Host(Option<Box<dyn Port>>);

impl PortHost for Host {
    fn attach(&mut self, _: &DeviceId, port: Box<dyn Port>) {
        self.0 = Some(port);
    }

    fn detach(&mut self, _: &DeviceId) {
        self.0 = None;
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    const MTU: u16 = 1500;
    let driver_domain = DomId(0);
    let (hub_thread, hub) = Hub::new(HubLimits::default())?;
    let running = std::thread::spawn(move || hub_thread.run());

    // Each side connects to the hub by a socket of its own. The arena, whose pages the guest lends, is made by the guest.
    let driver = LocalPlatform::connect(hub.admit(Some(driver_domain), true)?.1)?;
    let guest = LocalPlatform::connect(hub.admit(None, false)?.1)?;
    let (mut driver_store, mut guest_store) = (driver.store()?, guest.store()?);

    // The toolstack writes the keys of the new device into the store.
    let device = DeviceId {
        kind: DeviceKind::Vif,
        frontend: guest.domid(),
        backend: driver_domain,
        handle: 0,
    };
    let config = VifConfig { mac: [2, 0, 0, 0, 0, 1], mtu: MTU };
    toolstack::create(&mut driver_store, &device, config)?;

    // Both ends react to changes of the store until the frontend is connected.
    let mut back = VifBackend::new(device, BackendOptions { mode: Mode::Copy, mtu: MTU });
    let mut front = VifFrontend::new(&guest, device, MTU)?;
    let (mut back_host, mut front_host) = (Host::default(), Host::default());
    while !front.is_up() {
        back.look(&driver, &mut driver_store, &mut back_host)?;
        front.look(&guest, &mut guest_store, &mut front_host)?;
    }
    let (Some(back_port), Some(front_port)) = (&mut back_host.0, &mut front_host.0) else {
        return Err("the vif is connected without ports".into());
    };

    // The guest sends a frame: Ethernet addresses, EtherType, text.
    let mut frame = [[0xff; 6], config.mac].concat();
    frame.extend([0x88, 0xb5]);
    frame.extend(b"hello from a lent page, padded to the minimum of Ethernet");
    let mut out = Batch::default();
    let at = out.reserve(frame.len()).ok_or("the batch is full")?;
    out.scratch_mut(at..at + frame.len())?.copy_from_slice(&frame);
    out.push_contiguous(at, frame.len(), OffloadMeta::PLAIN)?;
    front_port.transmit(&out, &[0])?;
    front_port.flush()?;

    // The driver domain receives it. Its pages belong to the guest again after `complete`.
    let mut received = Batch::default();
    back_port.receive(&mut received, 64)?;
    for frame in received.iter() {
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(&mut bytes);
        println!("{} bytes: {}", bytes.len(), String::from_utf8_lossy(&bytes[14..]));
    }
    received.clear();
    back_port.complete()?;

    hub.stop();
    running.join().map_err(|_| "the hub panicked")??;
    Ok(())
}

//! Virtual network interface between two domains of one process, over the local platform.
//!
//! The program starts a hub, a driver domain and a guest. It creates a vif, lets both ends connect over the
//! store, and sends one frame from the guest's netfront to the driver domain's netback.
//!
//! Run it with `cargo run -p ringfence-net --example vif`. It needs no privilege.

use std::error::Error;

use ringfence_access::Mode;
use ringfence_frame::commands::{PortCommand, PortReply};
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

/// Owner of the port of one end. A real owner hands the port to a datapath worker.
#[derive(Default)]
struct Host(Option<Box<dyn Port>>);

impl PortHost for Host {
    fn attach(&mut self, _: &DeviceId, port: Box<dyn Port>) {
        self.0 = Some(port);
    }
    fn detach(&mut self, _: &DeviceId) {
        self.0 = None;
    }
    fn execute(&mut self, _: &DeviceId, queue: u16, command: PortCommand) -> Option<PortReply> {
        self.0.as_mut().map(|port| port.execute(queue, command))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let (hub, handle) = Hub::new(HubLimits::default())?;
    let hub = std::thread::spawn(move || hub.run());
    let driver = LocalPlatform::connect(handle.admit(Some(DomId(0)), true)?.1)?;
    let guest = LocalPlatform::connect(handle.admit(None, false)?.1)?;

    // The toolstack creates the device; both ends then look at the store in turn.
    let device = DeviceId {
        kind: DeviceKind::Vif,
        frontend: guest.domid(),
        backend: driver.domid(),
        handle: 0,
    };
    let (mut driver_store, mut guest_store) = (driver.store()?, guest.store()?);
    let config = VifConfig { mac: [2, 0, 0, 0, 0, 1], mtu: 1500 };
    toolstack::create(&mut driver_store, &device, config)?;
    let mut back = VifBackend::new(device, BackendOptions { mode: Mode::Copy, mtu: 1500 });
    let mut front = VifFrontend::new(&guest, device, 1500)?;
    let (mut back_host, mut front_host) = (Host::default(), Host::default());
    while !front.is_up() {
        back.look(&driver, &mut driver_store, &mut back_host)?;
        front.look(&guest, &mut guest_store, &mut front_host)?;
    }
    let netback = back_host.0.as_mut().ok_or("the backend has no port")?;
    let netfront = front_host.0.as_mut().ok_or("the frontend has no port")?;

    // One round of each end.
    let mut frame = [0; 60];
    frame[..6].fill(0xFF); // broadcast
    let mut batch = Batch::default();
    let at = batch.reserve(frame.len()).ok_or("the batch is full")?;
    batch.scratch_mut(at..at + frame.len())?.copy_from_slice(&frame);
    let index = batch.push_contiguous(at, frame.len(), OffloadMeta::PLAIN)?;
    let sent = netfront.transmit(&batch, &[index])?.sent;
    netfront.flush()?;

    let mut received = Batch::default();
    netback.receive(&mut received, 64)?;
    let lengths: Vec<usize> = received.iter().map(|frame| frame.len()).collect();
    received.clear();
    netback.complete()?;
    println!("sent {sent} frame, received frames of {lengths:?} bytes");
    assert_eq!(lengths, [60]);

    handle.stop();
    hub.join().map_err(|_| "the hub panicked")??;
    Ok(())
}

//! Trial `refused`: links of two guests, one of which accesses an ungranted page.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ringfence_access::iommu::RegionShape;
use ringfence_frame::{Batch, Fault, Port as _};
use ringfence_link::frame_ring::FrameShape;
use ringfence_link::vhost_net::{Protection, VhostLink};
use ringfence_memory::FIRST_IO_ADDRESS;
use ringfence_platform::vhost;
use ringfence_platform::{Gref, WindowShape};
use ringfence_sys::tap::Tap;

use super::rig::interface;

const RULE: &str = "virtqueue_miss_refused";
const PATIENCE: Duration = Duration::from_secs(30);

struct IotlbGuest {
    _tap: Tap,
    link: VhostLink,
    socket: UdpSocket,
    inward: SocketAddr,
}

impl IotlbGuest {
    fn new(number: u8) -> anyhow::Result<IotlbGuest> {
        let (tap, host) = interface(number)?;
        let socket = UdpSocket::bind((host, 7000))?;
        let link = VhostLink::start_protected(
            vhost::open()?,
            &tap.fd,
            tap.offloads,
            1500,
            FrameShape::default(),
            Arc::default(),
            Protection::Fine,
        )?;
        let inward = SocketAddr::from((Ipv4Addr::new(10, 79, number, 2), 7001));
        Ok(IotlbGuest { _tap: tap, link, socket, inward })
    }

    /// Receives this many packets through the link, or returns the link's fault.
    fn carry(&mut self, packets: usize) -> anyhow::Result<Result<(), Fault>> {
        let (mut batch, end) = (Batch::default(), Instant::now() + PATIENCE);
        let mut came = 0;
        for n in 0..packets {
            self.socket.send_to(&n.to_ne_bytes(), self.inward)?;
            while came <= n {
                anyhow::ensure!(Instant::now() < end, "packet {n} is lost");
                let received =
                    self.link.clear_events().and_then(|()| self.link.receive(&mut batch, 64));
                match received {
                    Ok(received) => came += received.frames,
                    Err(fault) => return Ok(Err(fault)),
                }
                batch.clear();
                if let Err(fault) = self.link.complete() {
                    return Ok(Err(fault));
                }
            }
        }
        Ok(Ok(()))
    }
}

pub(super) fn run() -> anyhow::Result<()> {
    let (mut bad, mut good) = (IotlbGuest::new(0)?, IotlbGuest::new(1)?);
    for guest in [&mut bad, &mut good] {
        guest.carry(10)?.context("before anything is taken away")?;
    }
    // A second table, unknown to the link, lets its worker address a page that is not granted.
    let window = WindowShape { writable: 256, read_only: 0, entries: 256 };
    let region = RegionShape { base: FIRST_IO_ADDRESS, window, page: 16 << 10 };
    let space = bad.link.device().space().context("no address space")?;
    for gref in window.grefs().map(|gref| Gref(gref.0)) {
        let address = region.address(gref).context("no address")?;
        space.unmap(address).context("a receive buffer")?;
    }
    let Err(fault) = bad.carry(10)? else { anyhow::bail!("it goes on without its buffers") };
    println!("{fault}");
    anyhow::ensure!(bad.link.rules().get(RULE) == 1, "it is not counted: {:?}", bad.link.rules());
    good.carry(200)?.context("beside a link that ended")?;
    anyhow::ensure!(good.link.rules().all().is_empty(), "something is counted for the other link");
    drop(bad);
    good.carry(200)?.context("after the other link is gone")?;
    println!("{RULE} 1 for that link; the other carried 410 packets");
    Ok(())
}

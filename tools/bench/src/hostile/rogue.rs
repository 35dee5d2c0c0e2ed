//! A guest that breaks rules: what it has, and how it comes back.
//!
//! Its means are those of every guest: a connection to the hub, the store, an arena, event channels,
//! and rings of which it can write every word. It uses them in the ways of [`super::attacks`].

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::{Access, Channel as _, Granter, Gref, Lease, Platform, PlatformError};
use ringfence_ring::{NETIF_RX, NETIF_TX, RingLayout};
use ringfence_wire::netif::{RxRequest, TxFlags, TxRequest, TxResponse, keys};
use ringfence_wire::xenbus::{DeviceId, STATE, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::control::Control;
use super::launcher::Seat;
use super::orders::{Entrance, SINK_MAC};

/// Offsets in a ring's page: the front's producer index, the back's, and the index at which the
/// front wants to be told of responses.
const REQ_PROD: usize = 0;
pub(super) const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;

/// A reference that is never granted, within the table.
pub(super) const UNGRANTED: Gref = Gref(1000);

/// Pages for packets.
const TX_PAGES: usize = 64;
/// Buffers for packets to this guest: a full ring.
const RX_PAGES: usize = 256;
/// How long one step of the handshake may take before it begins again.
pub(super) const STEP_WITHIN: Duration = Duration::from_secs(2);
/// Pauses between two looks at the backend's state.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A ring of which every word can be written.
pub(super) struct RogueRing {
    page: LentSlice,
    layout: RingLayout,
    produced: u32,
}

impl RogueRing {
    pub(super) fn new(lease: &Lease, layout: RingLayout) -> anyhow::Result<RogueRing> {
        let ring = RogueRing { page: lease.memory().clone(), layout, produced: 0 };
        ring.page.zero(0, PAGE_SIZE)?;
        // It never asks for events: it looks.
        ring.page.store_u32(RSP_EVENT, u32::MAX / 2, Release)?;
        Ok(ring)
    }

    /// The page.
    pub(super) fn page(&self) -> &LentSlice {
        &self.page
    }

    /// The index behind the last slot that was written.
    pub(super) fn produced(&self) -> u32 {
        self.produced
    }

    /// The answer to a packet, of a tx ring.
    pub(super) fn response(&self, index: u32) -> anyhow::Result<TxResponse> {
        let bytes = self.page.fetch(self.layout.offset(index))?;
        Ok(TxResponse::from_bytes(bytes.into_unchecked()))
    }

    /// Slots that were answered.
    pub(super) fn free(&self) -> anyhow::Result<u32> {
        let answered = self.page.load_u32(RSP_PROD, Acquire)?;
        Ok(self.layout.count().saturating_sub(self.produced.wrapping_sub(answered)))
    }

    /// Writes a slot, whether or not there is one.
    pub(super) fn put(&mut self, slot: &[u8]) -> anyhow::Result<()> {
        self.page.copy_from(self.layout.offset(self.produced), slot)?;
        self.produced = self.produced.wrapping_add(1);
        Ok(())
    }

    /// Says that so many more slots than were written are there.
    pub(super) fn publish(&self, more: u32) -> anyhow::Result<()> {
        Ok(self.page.store_u32(REQ_PROD, self.produced.wrapping_add(more), Release)?)
    }
}

/// How fast it goes on.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// How long one step of the handshake may take before it begins again.
    pub(super) step_within: Duration,
    /// What it does between two looks at the backend's state.
    pub(super) pause: fn(),
}

/// The guest.
pub(super) struct Rogue<P: Platform> {
    /// Its launcher's hold on the place, if it has one; before the platform, which ends with it.
    _seat: Option<Seat>,
    pub(super) platform: P,
    pub(super) store: StoreClient,
    /// A second descriptor of its connection to the hub, where there is one.
    hub: Option<OwnedFd>,
    open_store: fn(&P) -> Result<OwnedFd, PlatformError>,
    /// Whether the store takes one message at a time.
    pub(super) one_message_a_write: bool,
    pace: Pace,
    mac: [u8; 6],
    pub(super) device: DeviceId,
    pub(super) granter: P::Granter,
    pub(super) tx_pages: Vec<Lease>,
    rx_pages: Vec<Lease>,
    ring_pages: [Lease; 2],
    /// For the control ring, and for lists.
    control_pages: [Lease; 2],
    control: Option<Control<P::Channel>>,
    pub(super) tx: RogueRing,
    pub(super) rx: RogueRing,
    channels: Vec<P::Channel>,
    hung_up: bool,
    looked: Instant,
}

impl Rogue<LocalPlatform> {
    /// Takes a place at the switch, as many times as the driver domain wants.
    pub(super) fn join(entrance: &Entrance) -> anyhow::Result<Rogue<LocalPlatform>> {
        let seat = Seat::take(entrance)?;
        let hub = seat.hub.try_clone()?;
        let platform = LocalPlatform::connect(seat.hub.try_clone()?)?;
        let pace = Pace { step_within: STEP_WITHIN, pause: std::thread::yield_now };
        let (device, mac) = (seat.place.device(), seat.place.mac);
        let open_store = LocalPlatform::store_connection;
        let rogue = Rogue::new(platform, device, mac, open_store, pace)?;
        Ok(Rogue { _seat: Some(seat), hub: Some(hub), one_message_a_write: false, ..rogue })
    }
}

impl<P: Platform> Rogue<P> {
    /// A guest with a device, and with its pages lent.
    pub(super) fn new(
        platform: P,
        device: DeviceId,
        mac: [u8; 6],
        open_store: fn(&P) -> Result<OwnedFd, PlatformError>,
        pace: Pace,
    ) -> anyhow::Result<Rogue<P>> {
        let store = platform.store()?;
        let mut granter = platform.granter(device.backend)?;
        let mut lend = |access, count: usize| -> anyhow::Result<Vec<Lease>> {
            Ok((0..count).map(|_| granter.lend(access)).collect::<Result<_, _>>()?)
        };
        let mut two = || -> anyhow::Result<[Lease; 2]> {
            lend(Access::ReadWrite, 2)?.try_into().ok().context("two pages")
        };
        let (ring_pages, control_pages) = (two()?, two()?);
        let rx_pages = lend(Access::ReadWrite, RX_PAGES)?;
        let tx_pages = lend(Access::ReadOnly, TX_PAGES)?;
        let tx = RogueRing::new(&ring_pages[0], NETIF_TX)?;
        let rx = RogueRing::new(&ring_pages[1], NETIF_RX)?;
        Ok(Rogue {
            _seat: None,
            platform,
            store,
            hub: None,
            open_store,
            one_message_a_write: true,
            pace,
            mac,
            device,
            granter,
            tx_pages,
            rx_pages,
            ring_pages,
            control_pages,
            control: None,
            tx,
            rx,
            channels: Vec::new(),
            hung_up: false,
            looked: Instant::now(),
        })
    }

    /// How fast it goes on.
    pub(super) fn pace(&self) -> Pace {
        self.pace
    }

    /// Its control ring, and pages that it can have staged for reading and writing.
    pub(super) fn control(&mut self) -> anyhow::Result<(&mut Control<P::Channel>, &[Lease])> {
        Ok((self.control.as_mut().context("no control ring")?, &self.rx_pages))
    }

    /// As [`Rogue::control`], with the pages that packets are sent from.
    pub(super) fn control_to_send(
        &mut self,
    ) -> anyhow::Result<(&mut Control<P::Channel>, &[Lease])> {
        Ok((self.control.as_mut().context("no control ring")?, &self.tx_pages))
    }

    /// Its Ethernet address.
    pub(super) fn mac(&self) -> [u8; 6] {
        self.mac
    }

    /// Sets its state.
    pub(super) fn enter(&mut self, state: XenbusState) -> anyhow::Result<()> {
        let path = format!("{}/{STATE}", self.device.frontend_path());
        Ok(self.store.write(&path, state.to_string())?)
    }

    /// The backend's state.
    pub(super) fn backend_state(&mut self) -> anyhow::Result<XenbusState> {
        let path = format!("{}/{STATE}", self.device.backend_path());
        let text = self.store.read(&path)?;
        Ok(XenbusState::parse(&text).unwrap_or(XenbusState::Missing))
    }

    fn wait_for(&mut self, state: XenbusState) -> anyhow::Result<()> {
        let begin = Instant::now();
        while self.backend_state()? != state {
            if begin.elapsed() > self.pace.step_within {
                bail!("the backend did not become {state}");
            }
            (self.pace.pause)();
        }
        Ok(())
    }

    /// Goes through the handshake from its beginning.
    pub(super) fn connect(&mut self) -> anyhow::Result<()> {
        self.begin()?;
        let keys = self.keys();
        self.publish(&keys)?;
        self.wait_for(XenbusState::Connected)?;
        (self.looked, self.hung_up) = (Instant::now(), false);
        Ok(())
    }

    /// Has the backend wait for a frontend; makes rings and channels for it.
    pub(super) fn begin(&mut self) -> anyhow::Result<()> {
        if self.backend_state()? != XenbusState::InitWait {
            self.enter(XenbusState::Closing)?;
            self.enter(XenbusState::Closed)?;
            self.enter(XenbusState::Initialising)?;
            self.wait_for(XenbusState::InitWait)?;
        }
        self.tx = RogueRing::new(&self.ring_pages[0], NETIF_TX)?;
        self.rx = RogueRing::new(&self.ring_pages[1], NETIF_RX)?;
        self.channels.clear();
        for _ in 0..2 {
            self.channels.push(self.platform.alloc_unbound(self.device.backend)?);
        }
        self.control = None;
        let channel = self.platform.alloc_unbound(self.device.backend)?;
        self.control = Some(Control::new(&self.control_pages, channel)?);
        Ok(())
    }

    /// What an honest frontend would publish.
    pub(super) fn keys(&self) -> BTreeMap<&'static str, String> {
        let mut keys = BTreeMap::new();
        let [tx_ref, rx_ref] = self.ring_pages.each_ref().map(|lease| lease.gref().to_string());
        keys.insert(keys::TX_RING_REF, tx_ref);
        keys.insert(keys::RX_RING_REF, rx_ref);
        for (key, channel) in
            [keys::EVENT_CHANNEL_TX, keys::EVENT_CHANNEL_RX].iter().zip(&self.channels)
        {
            keys.insert(key, channel.port().0.to_string());
        }
        if let Some(control) = &self.control {
            keys.insert(keys::CTRL_RING_REF, self.control_pages[0].gref().to_string());
            keys.insert(keys::EVENT_CHANNEL_CTRL, control.port());
        }
        for key in [keys::REQUEST_RX_COPY, keys::FEATURE_RX_NOTIFY, keys::FEATURE_SG] {
            keys.insert(key, "1".to_owned());
        }
        keys
    }

    /// Writes these keys, and that it is connected.
    pub(super) fn publish(&mut self, keys: &BTreeMap<&'static str, String>) -> anyhow::Result<()> {
        let front = self.device.frontend_path();
        let connected = XenbusState::Connected.to_string();
        Ok(self.store.transaction(|t| {
            for (key, value) in keys {
                t.write(&format!("{front}/{key}"), value)?;
            }
            t.write(&format!("{front}/{STATE}"), &connected)
        })?)
    }

    /// Removes one of its keys.
    pub(super) fn forget(&mut self, key: &str) -> anyhow::Result<()> {
        Ok(self.store.rm(&format!("{}/{key}", self.device.frontend_path()))?)
    }

    /// Whether the device was closed. Looks now and then only.
    pub(super) fn was_closed(&mut self) -> anyhow::Result<bool> {
        if self.hung_up {
            return Ok(true);
        }
        if self.looked.elapsed() < LOOK_EVERY {
            return Ok(false);
        }
        self.looked = Instant::now();
        Ok(self.backend_state()? != XenbusState::Connected)
    }

    /// Posts every receive buffer.
    pub(super) fn post_buffers(&mut self) -> anyhow::Result<()> {
        for (id, page) in (0u16..).zip(&self.rx_pages) {
            self.rx.put(&RxRequest { id, gref: page.gref() }.to_bytes())?;
        }
        self.rx.publish(0)
    }

    /// Posts the receive buffers that are not posted, and takes what came in them that way.
    pub(super) fn take_packets(&mut self) -> anyhow::Result<()> {
        let free = self.rx.free()?;
        for _ in 0..free {
            let place = usize::try_from(self.rx.produced)? % RX_PAGES;
            let request =
                RxRequest { id: u16::try_from(place)?, gref: self.rx_pages[place].gref() };
            self.rx.put(&request.to_bytes())?;
        }
        if free > 0 {
            self.rx.publish(0)?;
            self.hung_up |= self.channels.last().context("no channel")?.notify().is_err();
        }
        Ok(())
    }

    /// Tells the backend that there is something on tx.
    pub(super) fn notify(&mut self) -> anyhow::Result<()> {
        // A backend that does not listen any more has closed the device.
        self.hung_up |= self.channels.first().context("no channel")?.notify().is_err();
        Ok(())
    }

    /// Puts an Ethernet header on a page for sending.
    pub(super) fn address(
        &self,
        page: usize,
        destination: [u8; 6],
        source: [u8; 6],
    ) -> anyhow::Result<()> {
        let mut header = [0; 14];
        header[..6].copy_from_slice(&destination);
        header[6..12].copy_from_slice(&source);
        header[12..].copy_from_slice(&[0x88, 0xb5]);
        Ok(self.tx_pages[page].memory().copy_from(0, &header)?)
    }

    /// Addresses every page to the verifying port.
    pub(super) fn address_all(&self) -> anyhow::Result<()> {
        (0..self.tx_pages.len()).try_for_each(|page| self.address(page, SINK_MAC, self.mac()))
    }

    /// A well-formed slot for the first octets of a page.
    pub(super) fn slot(&self, page: usize, size: u16) -> TxRequest {
        let page = page % self.tx_pages.len();
        let gref = self.tx_pages[page].gref();
        TxRequest { gref, offset: 0, flags: TxFlags::NONE, id: 0, size }
    }

    /// Posts packets, each a number of slots, for as long as there is room; how many went in.
    pub(super) fn post(&mut self, packet: &[TxRequest]) -> anyhow::Result<u32> {
        let slots = u32::try_from(packet.len())?;
        let count = self.tx.free()? / slots.max(1);
        for _ in 0..count {
            for slot in packet {
                self.tx.put(&slot.to_bytes())?;
            }
        }
        if count > 0 {
            self.tx.publish(0)?;
            self.notify()?;
        }
        Ok(count)
    }

    /// The raw store: a stream that speaks its protocol.
    pub(super) fn store_stream(&self) -> anyhow::Result<OwnedFd> {
        Ok((self.open_store)(&self.platform)?)
    }

    /// Sends bytes over its connection to the hub.
    pub(super) fn send_to_hub(&self, bytes: &[u8]) -> anyhow::Result<()> {
        use rustix::net::SendFlags;
        let hub = self.hub.as_ref().context("there is no hub")?;
        Ok(rustix::net::send(hub.as_fd(), bytes, SendFlags::NOSIGNAL).map(drop)?)
    }
}

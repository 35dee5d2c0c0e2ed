//! Adversary guest on a vif: its resources, its handshake and its raw ring access.
//!
//! It has the means of every guest: a connection to the hub, the store, an arena, event channels, and
//! rings of which it can write every word. [`super::attacks`] uses them to break rules. After the
//! driver domain has closed the device, the adversary runs the handshake again.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Release};

use anyhow::Context;
use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_platform::{Access, Channel as _, Granter, Gref, Lease, Platform, PlatformError};
use ringfence_ring::{NETIF_RX, NETIF_TX, RingLayout};
use ringfence_wire::netif::{RxRequest, TxFlags, TxRequest, TxResponse, keys};
use ringfence_wire::xenbus::{DeviceId, STATE, XenbusState};
use ringfence_xenstore::StoreAccess;

use super::control::Control;
use super::handshake::{Handshake, Pace};

/// Offsets in a ring's page: the front's producer index, the back's, and the response index at which
/// the front requests an event.
const REQ_PROD: usize = 0;
pub const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;

/// Reference within the grant table that is never granted.
pub const UNGRANTED: Gref = Gref(1000);

/// Locally administered address of the port that packets are sent to.
pub const SINK_MAC: [u8; 6] = [0x0a, 0, 0, 0, 0, 1];

/// Number of pages that packets are sent from.
const TX_PAGES: usize = 64;
/// Receive buffers: a full ring.
const RX_PAGES: usize = 256;
/// Ring page whose every word the adversary can write.
pub struct RawRing {
    page: LentSlice,
    layout: RingLayout,
    produced: u32,
}

impl RawRing {
    pub fn new(lease: &Lease, layout: RingLayout) -> anyhow::Result<RawRing> {
        let ring = RawRing { page: lease.memory().clone(), layout, produced: 0 };
        ring.page.zero(0, PAGE_SIZE)?;
        // No events are requested: the adversary polls.
        ring.page.store_u32(RSP_EVENT, u32::MAX / 2, Release)?;
        Ok(ring)
    }

    /// Returns the ring's page.
    pub fn page(&self) -> &LentSlice {
        &self.page
    }

    /// Returns the index after the last slot that was written.
    pub fn produced(&self) -> u32 {
        self.produced
    }

    /// Returns the response in a slot of a TX ring.
    pub fn response(&self, index: u32) -> anyhow::Result<TxResponse> {
        let bytes = self.page.fetch(self.layout.offset(index))?;
        Ok(TxResponse::from_bytes(bytes.into_unchecked()))
    }

    /// Returns the number of slots whose response has been published.
    pub fn free(&self) -> anyhow::Result<u32> {
        let answered = self.page.load_u32(RSP_PROD, Acquire)?;
        Ok(self.layout.count().saturating_sub(self.produced.wrapping_sub(answered)))
    }

    /// Writes a slot, even if the ring is full.
    pub fn put(&mut self, slot: &[u8]) -> anyhow::Result<()> {
        self.page.copy_from(self.layout.offset(self.produced), slot)?;
        self.produced = self.produced.wrapping_add(1);
        Ok(())
    }

    /// Publishes a producer index `more` slots beyond those written.
    pub fn publish(&self, more: u32) -> anyhow::Result<()> {
        Ok(self.page.store_u32(REQ_PROD, self.produced.wrapping_add(more), Release)?)
    }
}

/// Adversary guest with one vif.
pub struct VifAdversary<P: Platform> {
    pub platform: P,
    /// Second descriptor of its connection to the hub, if there is a hub.
    hub: Option<OwnedFd>,
    open_store: fn(&P) -> Result<OwnedFd, PlatformError>,
    /// Set if the store accepts one message a write.
    pub one_message_a_write: bool,
    pub handshake: Handshake,
    mac: [u8; 6],
    pub granter: P::Granter,
    pub tx_pages: Vec<Lease>,
    rx_pages: Vec<Lease>,
    ring_pages: [Lease; 2],
    /// Control ring page, and page for lists.
    control_pages: [Lease; 2],
    control: Option<Control<P::Channel>>,
    pub tx: RawRing,
    pub rx: RawRing,
    channels: Vec<P::Channel>,
}

impl<P: Platform> VifAdversary<P> {
    /// Creates a guest for a device and lends all its pages.
    pub fn new(
        platform: P,
        device: DeviceId,
        mac: [u8; 6],
        open_store: fn(&P) -> Result<OwnedFd, PlatformError>,
        pace: Pace,
    ) -> anyhow::Result<VifAdversary<P>> {
        let handshake = Handshake::new(&platform, device, pace)?;
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
        let tx = RawRing::new(&ring_pages[0], NETIF_TX)?;
        let rx = RawRing::new(&ring_pages[1], NETIF_RX)?;
        Ok(VifAdversary {
            platform,
            hub: None,
            open_store,
            one_message_a_write: true,
            handshake,
            mac,
            granter,
            tx_pages,
            rx_pages,
            ring_pages,
            control_pages,
            control: None,
            tx,
            rx,
            channels: Vec::new(),
        })
    }

    /// Uses a connection to a hub, whose store accepts many messages a write.
    #[must_use]
    pub fn with_hub(self, hub: OwnedFd) -> VifAdversary<P> {
        VifAdversary { hub: Some(hub), one_message_a_write: false, ..self }
    }

    /// Returns its control ring, and pages that can be staged for reading and writing.
    pub fn control(&mut self) -> anyhow::Result<(&mut Control<P::Channel>, &[Lease])> {
        Ok((self.control.as_mut().context("no control ring")?, &self.rx_pages))
    }

    /// Returns its control ring, and the pages that packets are sent from.
    pub fn control_to_send(&mut self) -> anyhow::Result<(&mut Control<P::Channel>, &[Lease])> {
        Ok((self.control.as_mut().context("no control ring")?, &self.tx_pages))
    }

    /// Returns its Ethernet address.
    pub fn mac(&self) -> [u8; 6] {
        self.mac
    }

    /// Runs the handshake from its beginning.
    pub fn connect(&mut self) -> anyhow::Result<()> {
        self.begin()?;
        let keys = self.keys();
        self.publish(&keys)?;
        self.handshake.wait_for_connection()
    }

    /// Brings the backend to `InitWait`, then makes new rings and channels.
    pub fn begin(&mut self) -> anyhow::Result<()> {
        self.handshake.restart()?;
        let backend = self.handshake.device.backend;
        self.tx = RawRing::new(&self.ring_pages[0], NETIF_TX)?;
        self.rx = RawRing::new(&self.ring_pages[1], NETIF_RX)?;
        self.channels.clear();
        for _ in 0..2 {
            self.channels.push(self.platform.alloc_unbound(backend)?);
        }
        self.control = None;
        let channel = self.platform.alloc_unbound(backend)?;
        self.control = Some(Control::new(&self.control_pages, channel)?);
        Ok(())
    }

    /// Returns the keys that a correct frontend publishes.
    pub fn keys(&self) -> BTreeMap<&'static str, String> {
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

    /// Writes these keys and the state `Connected` in one transaction.
    pub fn publish(&mut self, keys: &BTreeMap<&'static str, String>) -> anyhow::Result<()> {
        let front = self.handshake.device.frontend_path();
        let connected = XenbusState::Connected.to_string();
        Ok(self.handshake.store.transaction(|t| {
            for (key, value) in keys {
                t.write(&format!("{front}/{key}"), value)?;
            }
            t.write(&format!("{front}/{STATE}"), &connected)
        })?)
    }

    /// Removes one of its keys.
    pub fn forget(&mut self, key: &str) -> anyhow::Result<()> {
        let path = format!("{}/{key}", self.handshake.device.frontend_path());
        Ok(self.handshake.store.rm(&path)?)
    }

    /// Posts every receive buffer.
    pub fn post_buffers(&mut self) -> anyhow::Result<()> {
        for (id, page) in (0u16..).zip(&self.rx_pages) {
            self.rx.put(&RxRequest { id, gref: page.gref() }.to_bytes())?;
        }
        self.rx.publish(0)
    }

    /// Posts the free receive buffers again and so discards the packets in them.
    pub fn take_packets(&mut self) -> anyhow::Result<()> {
        let free = self.rx.free()?;
        for _ in 0..free {
            let place = usize::try_from(self.rx.produced)? % RX_PAGES;
            let request =
                RxRequest { id: u16::try_from(place)?, gref: self.rx_pages[place].gref() };
            self.rx.put(&request.to_bytes())?;
        }
        if free > 0 {
            self.rx.publish(0)?;
            self.handshake.notified(self.channels.last().context("no channel")?.notify());
        }
        Ok(())
    }

    /// Notifies the backend of requests on the TX ring.
    pub fn notify(&mut self) -> anyhow::Result<()> {
        self.handshake.notified(self.channels.first().context("no channel")?.notify());
        Ok(())
    }

    /// Writes an Ethernet header to a page that packets are sent from.
    pub fn address(
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
    pub fn address_all(&self) -> anyhow::Result<()> {
        (0..self.tx_pages.len()).try_for_each(|page| self.address(page, SINK_MAC, self.mac()))
    }

    /// Returns a well-formed slot for the first `size` bytes of a page.
    pub fn slot(&self, page: usize, size: u16) -> TxRequest {
        let page = page % self.tx_pages.len();
        let gref = self.tx_pages[page].gref();
        TxRequest { gref, offset: 0, flags: TxFlags::NONE, id: 0, size }
    }

    /// Posts as many packets of these slots as the ring has room for. Returns their number.
    pub fn post(&mut self, packet: &[TxRequest]) -> anyhow::Result<u32> {
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

    /// Opens a raw connection to the store that carries its wire protocol.
    pub fn store_stream(&self) -> anyhow::Result<OwnedFd> {
        Ok((self.open_store)(&self.platform)?)
    }

    /// Sends bytes over its connection to the hub.
    pub fn send_to_hub(&self, bytes: &[u8]) -> anyhow::Result<()> {
        use rustix::net::SendFlags;
        let hub = self.hub.as_ref().context("there is no hub")?;
        Ok(rustix::net::send(hub.as_fd(), bytes, SendFlags::NOSIGNAL).map(drop)?)
    }
}

//! Adversary guest of a vif: a test writes its rings, pages, grant table, keys and channels.

use std::collections::BTreeMap;

use ringfence_platform::DomId;
use ringfence_platform::local::ArenaShape;
use ringfence_platform::local::raw::{RawArena, RawChannel, RawDomain};
use ringfence_ring::{NETIF_RX, NETIF_TX};
use ringfence_wire::grant::Gref;
use ringfence_wire::netif::{RxRequest, RxResponse, Status, TxFlags, TxRequest, TxResponse, keys};
use ringfence_wire::xenbus::{DeviceId, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::ring::RawRing;
use super::stage::Stage;

/// Shape of the guest's arena.
pub const SHAPE: ArenaShape = ArenaShape { writable: 320, read_only: 64, references: 1024 };

/// Grant reference under which the adversary lends its TX ring.
pub const TX_RING: u32 = 8;
/// Grant reference under which the adversary lends its RX ring.
pub const RX_RING: u32 = 9;
/// First of 256 consecutive references of rx buffers.
pub const RX_BUFFERS: u32 = 16;
/// First of the consecutive references of tx pages, one for each read-only page.
pub const TX_PAGES: u32 = 512;

/// Frontend of which everything can be set word by word.
pub struct HostileFrontend {
    /// Connection to the hub, of which the adversary writes every byte.
    pub domain: RawDomain,
    pub store: StoreClient,
    pub arena: RawArena,
    pub device: DeviceId,
    /// Index of the vif in the stage's list.
    pub vif: usize,
    /// Ring of packets to the backend.
    pub tx: RawRing,
    /// Ring of packets from the backend.
    pub rx: RawRing,
    /// Event channels of tx and rx, after the handshake.
    pub channels: Vec<RawChannel>,
    next_id: u16,
}

impl HostileFrontend {
    /// Creates a domain with a vif and an arena that is not passed to the hub yet.
    pub fn join(stage: &mut Stage) -> HostileFrontend {
        let (_, socket) = stage.hub.admit(None, false).unwrap();
        let mut domain = RawDomain::join(socket).unwrap();
        let vif = stage.add_vif(domain.domid);
        let arena = RawArena::new(SHAPE).unwrap();
        let mut this = HostileFrontend {
            store: domain.store().unwrap(),
            device: *stage.vifs[vif].backend.device(),
            tx: RawRing::new(arena.writable(0).unwrap(), NETIF_TX),
            rx: RawRing::new(arena.writable(1).unwrap(), NETIF_RX),
            domain,
            arena,
            vif,
            channels: Vec::new(),
            next_id: 0,
        };
        this.grant_all();
        this.reset();
        this
    }

    /// Creates a domain with a connected vif.
    pub fn connected(stage: &mut Stage) -> HostileFrontend {
        let mut this = HostileFrontend::join(stage);
        this.domain.lend(DomId(0), &this.arena).unwrap();
        this.connect(stage, |_| {});
        assert_eq!(stage.state(this.vif), XenbusState::Connected);
        this
    }

    /// Fills the grant table as a correct frontend does.
    pub fn grant_all(&self) {
        self.arena.grant(TX_RING, DomId(0), 0, false);
        self.arena.grant(RX_RING, DomId(0), 1, false);
        for i in 0..256 {
            self.arena.grant(RX_BUFFERS + i, DomId(0), 2 + i, false);
        }
        for i in 0..SHAPE.read_only {
            self.arena.grant(TX_PAGES + i, DomId(0), i, true);
        }
    }

    /// Resets both rings to empty ones.
    pub fn reset(&mut self) {
        self.tx.reset();
        self.rx.reset();
    }

    /// Writes a key of the frontend.
    pub fn write(&mut self, key: &str, value: impl AsRef<[u8]>) {
        let path = format!("{}/{key}", self.device.frontend_path());
        self.store.write(&path, value).unwrap();
    }

    /// Writes the frontend's state.
    pub fn enter(&mut self, state: XenbusState) {
        self.write("state", state.to_string());
    }

    /// Completes the handshake with reset rings and new channels. `change` may break the keys.
    pub fn connect(
        &mut self,
        stage: &mut Stage,
        change: impl FnOnce(&mut BTreeMap<&'static str, String>),
    ) {
        self.enter(XenbusState::Initialising);
        stage.look(self.vif);
        self.reset();
        for channel in self.channels.drain(..) {
            let _ = self.domain.call(7, &[channel.port], &[]);
        }
        self.channels = (0..2).map(|_| self.domain.alloc(DomId(0)).unwrap()).collect();
        let mut wanted = BTreeMap::from([
            (keys::TX_RING_REF, TX_RING.to_string()),
            (keys::RX_RING_REF, RX_RING.to_string()),
            (keys::EVENT_CHANNEL_TX, self.channels[0].port.to_string()),
            (keys::EVENT_CHANNEL_RX, self.channels[1].port.to_string()),
            (keys::REQUEST_RX_COPY, "1".to_owned()),
            (keys::FEATURE_RX_NOTIFY, "1".to_owned()),
            (keys::FEATURE_SG, "1".to_owned()),
            (keys::FEATURE_NO_CSUM_OFFLOAD, "0".to_owned()),
            (keys::FEATURE_IPV6_CSUM_OFFLOAD, "1".to_owned()),
        ]);
        let dir = self.device.frontend_path();
        let others = [
            keys::MULTI_QUEUE_NUM_QUEUES,
            keys::EVENT_CHANNEL,
            keys::RINGFENCE_TX_WINDOW,
            keys::RINGFENCE_RX_WINDOW,
            keys::RINGFENCE_TX_WINDOW_REFERENCES,
            keys::RINGFENCE_RX_WINDOW_REFERENCES,
        ];
        for key in wanted.keys().copied().chain(others) {
            self.store.rm(&format!("{dir}/{key}")).unwrap();
        }
        change(&mut wanted);
        for (key, value) in wanted {
            self.write(key, value);
        }
        self.enter(XenbusState::Connected);
        stage.look(self.vif);
    }

    /// Writes bytes into a tx page.
    pub fn write_page(&self, page: u32, offset: usize, bytes: &[u8]) {
        self.arena.read_only(page).unwrap().copy_from(offset, bytes).unwrap();
    }

    /// Returns the bytes of an rx buffer.
    pub fn read_buffer(&self, buffer: u32, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.arena.writable(2 + buffer).unwrap().copy_to(0, &mut bytes).unwrap();
        bytes
    }

    /// Stores a frame in pages from `page` on, in pieces of the given lengths, one page each. Returns
    /// well-formed requests for it. The last piece takes all remaining bytes.
    pub fn packet(&mut self, page: u32, bytes: &[u8], pieces: &[usize]) -> Vec<TxRequest> {
        let mut rest = bytes;
        let mut slots = Vec::new();
        for (n, want) in (0u32..).zip(pieces) {
            let last = n as usize + 1 == pieces.len();
            let (piece, after) = rest.split_at(if last { rest.len() } else { *want });
            rest = after;
            self.write_page(page + n, 0, piece);
            let total = n == 0;
            self.next_id = self.next_id.wrapping_add(1);
            slots.push(TxRequest {
                gref: Gref(TX_PAGES + page + n),
                offset: 0,
                flags: if last { TxFlags::NONE } else { TxFlags::MORE_DATA },
                id: self.next_id,
                size: u16::try_from(if total { bytes.len() } else { piece.len() }).unwrap(),
            });
        }
        slots
    }

    /// Writes tx requests and publishes them.
    pub fn post(&mut self, slots: &[TxRequest]) {
        for slot in slots {
            self.tx.put(&slot.to_bytes());
        }
        self.tx.set_req_prod(self.tx.produced);
    }

    /// Takes the published tx responses.
    pub fn responses(&mut self) -> Vec<TxResponse> {
        self.tx.take_responses().into_iter().map(TxResponse::from_bytes).collect()
    }

    /// Takes the published tx responses and returns their statuses.
    pub fn statuses(&mut self) -> Vec<Status> {
        self.responses().into_iter().map(|response| response.status).collect()
    }

    /// Posts rx buffers, by their references.
    pub fn post_buffers(&mut self, references: impl IntoIterator<Item = u32>) {
        for gref in references {
            let id = u16::try_from(self.rx.produced & 255).unwrap();
            self.rx.put(&RxRequest { id, gref: Gref(gref) }.to_bytes());
        }
        self.rx.set_req_prod(self.rx.produced);
    }

    /// Takes the published rx responses.
    pub fn rx_responses(&mut self) -> Vec<RxResponse> {
        self.rx.take_responses().into_iter().map(RxResponse::from_bytes).collect()
    }
}

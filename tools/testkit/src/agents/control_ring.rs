//! `ringfence-bench internal control-ring`: sends each control ring message to a vif's backend, for tests.
//!
//! The program is a frontend of its own that carries no packets. It prints the responses and fails at
//! the first that differs from netif.h and `docs/staging-grants.md`. With `--hold` it pauses while
//! pages are mapped, so that a test can inspect the backend, and continues when a file appears.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Args;
use ringfence_memory::PAGE_SIZE;
use ringfence_platform::{Access, Channel, Granter, Gref, Lease, Platform};
use ringfence_ring::{FrontRing, NETIF_CTRL, NETIF_RX, NETIF_TX, RingPages};
use ringfence_wire::netif::ctrl::{
    CtrlMessage, CtrlRequest, CtrlResponse, CtrlStatus, CtrlType, GREF_LIST_MAX, GrefEntry,
    GrefList, HashTypes,
};
use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::{DeviceId, STATE, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient};
use rustix::event::{PollFd, PollFlags};

use ringfence_sys::poll::wait_any;

/// Time limit of a response or a step of the handshake, long enough for emulation.
const WITHIN: Duration = Duration::from_secs(40);
/// Time limit of a pause for inspection.
const HOLD: Duration = Duration::from_secs(240);
const PAUSE: Duration = Duration::from_millis(20);

/// Sends every message of the control ring to a backend
#[derive(Debug, Args)]
pub struct ControlRingArgs {
    /// Number of pages to stage
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(2..=512))]
    pub pages: u16,

    /// Wait for the files `1`, while pages are staged, and `2`, when they no longer are, in this folder
    #[arg(long, value_name = "DIR")]
    pub hold: Option<PathBuf>,
}

/// Vif whose backend is asked. Its frontend's driver has released it.
#[derive(Clone, Debug)]
pub struct ControlRingTarget {
    pub device: DeviceId,
    /// Path of the backend's directory in the store.
    pub backend: String,
}

/// Sends all messages, and closes the device.
///
/// # Errors
///
/// Returns an error at the first response that differs from the specification, or if the backend did not connect or
/// did not let go.
pub fn run<P: Platform>(
    platform: &P,
    target: ControlRingTarget,
    args: &ControlRingArgs,
) -> anyhow::Result<()> {
    let mut dialogue = Dialogue::connect(platform, target, args)?;
    let hashed = dialogue.hashing();
    let asked = hashed.and_then(|()| dialogue.staging());
    // The backend must release the pages before this process exits with them, even after a failure.
    let left = dialogue.leave();
    asked?;
    left?;
    let kinds = dialogue.kinds.len();
    ensure!(kinds == 10, "only {kinds} kinds of messages were asked");
    println!("all 10 kinds of messages answered as they have to be");
    Ok(())
}

/// Status and data of a response.
type Answer = (CtrlStatus, u32);

/// Connected frontend with a control ring.
struct Dialogue<'a, P: Platform> {
    args: &'a ControlRingArgs,
    store: StoreClient,
    device: DeviceId,
    backend: String,
    ring: FrontRing<RingPages>,
    channel: P::Channel,
    _traffic: (Vec<Lease>, Vec<P::Channel>),
    list: Lease,
    pages: Vec<Lease>,
    id: u16,
    kinds: BTreeSet<u16>,
}

impl<'a, P: Platform> Dialogue<'a, P> {
    fn connect(
        platform: &P,
        target: ControlRingTarget,
        args: &'a ControlRingArgs,
    ) -> anyhow::Result<Self> {
        let store = platform.store()?;
        let ControlRingTarget { device, backend } = target;
        let mut granter = platform.granter(device.backend)?;
        let mut lend = |access, count: u16| -> anyhow::Result<Vec<Lease>> {
            Ok((0..count).map(|_| granter.lend(access)).collect::<Result<_, _>>()?)
        };
        let rings = lend(Access::ReadWrite, 3)?;
        let list = lend(Access::ReadWrite, 1)?.pop().context("a page")?;
        // Half of them are read-only.
        let mut pages = lend(Access::ReadWrite, args.pages / 2)?;
        pages.extend(lend(Access::ReadOnly, args.pages - args.pages / 2)?);
        let ring = |place: usize, layout| -> anyhow::Result<_> {
            rings[place].memory().zero(0, PAGE_SIZE)?;
            Ok(FrontRing::init(RingPages::new(rings[place].memory().clone(), PAGE_SIZE)?, layout))
        };
        // The TX and RX rings stay empty.
        ring(0, NETIF_TX)?;
        ring(1, NETIF_RX)?;
        let ctrl = ring(2, NETIF_CTRL)?;
        let channels = (0..2).map(|_| platform.alloc_unbound(device.backend));
        let channels: Vec<P::Channel> = channels.collect::<Result<_, _>>()?;
        let channel = platform.alloc_unbound(device.backend)?;
        let port = |channel: &P::Channel| channel.port().0.to_string();
        let entries = [
            (keys::TX_RING_REF, rings[0].gref().to_string()),
            (keys::RX_RING_REF, rings[1].gref().to_string()),
            (keys::CTRL_RING_REF, rings[2].gref().to_string()),
            (keys::EVENT_CHANNEL_TX, port(&channels[0])),
            (keys::EVENT_CHANNEL_RX, port(&channels[1])),
            (keys::EVENT_CHANNEL_CTRL, port(&channel)),
            (keys::REQUEST_RX_COPY, "1".to_owned()),
            (STATE, XenbusState::Connected.to_string()),
        ];
        let mut this = Dialogue {
            args,
            store,
            device,
            backend,
            ring: ctrl,
            channel,
            _traffic: (rings, channels),
            list,
            pages,
            id: 0,
            kinds: BTreeSet::new(),
        };
        this.wait_for(XenbusState::InitWait)?;
        let front = device.frontend_path();
        this.store.transaction(|t| {
            entries.iter().try_for_each(|(key, value)| t.write(&format!("{front}/{key}"), value))
        })?;
        this.wait_for(XenbusState::Connected)?;
        Ok(this)
    }

    fn wait_for(&mut self, state: XenbusState) -> anyhow::Result<()> {
        let path = format!("{}/{STATE}", self.backend);
        let until = Instant::now() + WITHIN;
        loop {
            let there =
                XenbusState::parse(&self.store.read(&path)?).unwrap_or(XenbusState::Missing);
            if there == state {
                return Ok(());
            }
            ensure!(Instant::now() < until, "the backend is {there}, not {state}");
            std::thread::sleep(PAUSE);
        }
    }

    /// Waits until the backend uses neither rings nor channels.
    fn await_release(&mut self) -> anyhow::Result<()> {
        let in_use = [XenbusState::Initialised, XenbusState::Connected, XenbusState::Reconfiguring];
        let path = format!("{}/{STATE}", self.backend);
        let until = Instant::now() + WITHIN;
        loop {
            let state = self.store.read_opt(&path)?;
            let state = state.and_then(|state| XenbusState::parse(&state).ok());
            if !state.is_some_and(|state| in_use.contains(&state)) {
                return Ok(());
            }
            ensure!(Instant::now() < until, "the backend did not let go");
            std::thread::sleep(PAUSE);
        }
    }

    fn ask(&mut self, message: CtrlMessage) -> anyhow::Result<Answer> {
        let kind = message.request(0).kind.to_raw();
        self.kinds.insert(kind);
        self.ask_raw(kind, message.request(0).data)
    }

    fn ask_raw(&mut self, kind: u16, data: [u32; 3]) -> anyhow::Result<Answer> {
        self.id = self.id.wrapping_add(1);
        let request = CtrlRequest { id: self.id, kind: CtrlType::from_raw(kind), data };
        ensure!(self.ring.request(&request.to_bytes()), "the control ring is full");
        if self.ring.publish() {
            self.channel.notify()?;
        }
        let until = Instant::now() + WITHIN;
        while !self.ring.final_check()? {
            ensure!(Instant::now() < until, "no answer to message {kind}");
            let mut fds = [PollFd::from_borrowed_fd(self.channel.as_fd(), PollFlags::IN)];
            wait_any(&mut fds, Some(until))?;
            self.channel.clear()?;
        }
        let response = CtrlResponse::from_bytes(self.ring.response(0).into_unchecked());
        self.ring.consume(1);
        let names = (response.id, response.kind.to_raw());
        ensure!(names == (self.id, kind), "an answer to {names:?} instead of message {kind}");
        Ok((response.status, response.data))
    }

    fn expect(&mut self, message: CtrlMessage, wanted: Answer) -> anyhow::Result<()> {
        let got = self.ask(message)?;
        println!("{message:?}: {got:?}");
        ensure!(got == wanted, "{message:?} was answered {got:?} instead of {wanted:?}");
        Ok(())
    }

    /// Sends the seven messages about hashing.
    fn hashing(&mut self) -> anyhow::Result<()> {
        use CtrlStatus::{BufferOverflow, InvalidParameter, NotSupported, Success};
        let page = self.list.gref();
        self.expect(CtrlMessage::GetHashFlags, (NotSupported, 0))?;
        self.expect(CtrlMessage::SetHashAlgorithm(9), (InvalidParameter, 0))?;
        self.expect(CtrlMessage::SetHashAlgorithm(1), (Success, 0))?;
        self.expect(CtrlMessage::GetHashFlags, (Success, HashTypes::ALL.mask()))?;
        self.expect(CtrlMessage::SetHashFlags(HashTypes::ALL), (Success, 0))?;
        let (status, entries) = self.ask(CtrlMessage::GetHashMappingSize)?;
        ensure!(status == Success && entries >= 128, "a table of {entries}: {status:?}");
        self.expect(CtrlMessage::SetHashMappingSize { entries: 128 }, (Success, 0))?;
        self.list.memory().zero(0, PAGE_SIZE)?;
        self.expect(CtrlMessage::SetHashMapping { page, entries: 128, first: 0 }, (Success, 0))?;
        let beyond = CtrlMessage::SetHashMapping { page, entries: 128, first: 1 };
        // The header allows both; Linux's netback and ours answer the first.
        let got = self.ask(beyond)?;
        println!("{beyond:?}: {got:?}");
        ensure!(
            [(InvalidParameter, 0), (BufferOverflow, 0)].contains(&got),
            "{beyond:?} was answered {got:?}"
        );
        self.expect(CtrlMessage::SetHashKey { page, bytes: 40 }, (Success, 0))?;
        self.expect(CtrlMessage::SetHashAlgorithm(0), (Success, 0))
    }

    /// Sends the three messages about staged pages.
    fn staging(&mut self) -> anyhow::Result<()> {
        use CtrlStatus::{InvalidParameter, Success};
        let (status, most) = self.ask(CtrlMessage::GetGrefMappingSize(0))?;
        println!("GetGrefMappingSize(0): {status:?}, {most}");
        ensure!(status == Success && most >= self.args.pages.into(), "room for {most} pages");
        let pages = self.pages.iter().map(|lease| (lease.gref(), lease.access()));
        let pages: Vec<(Gref, Access)> = pages.collect();
        let all = self.write_list(&pages)?;
        self.expect(CtrlMessage::AddGrefMapping(all), (Success, 0))?;
        self.expect(CtrlMessage::AddGrefMapping(all), (InvalidParameter, 0))?;
        // The list contains a reference that is not granted: no entry of it is staged.
        let foreign = self.write_list(&[
            (self.list.gref(), Access::ReadWrite),
            (Gref(900_000), Access::ReadWrite),
        ])?;
        self.expect(CtrlMessage::AddGrefMapping(foreign), (InvalidParameter, 0))?;
        let too_long = GrefList { entries: 513, ..all };
        self.expect(CtrlMessage::AddGrefMapping(too_long), (InvalidParameter, 0))?;
        self.hold("1", &format!("{} pages are staged", pages.len()))?;
        let all = self.write_list(&pages)?;
        let count = u32::from(all.entries);
        self.expect(CtrlMessage::DelGrefMapping(all), (Success, count))?;
        ensure!(self.statuses(all.entries)?.iter().all(|s| *s == 0), "not each page was taken out");
        self.expect(CtrlMessage::DelGrefMapping(all), (Success, 0))?;
        self.hold("2", "no page is staged")
    }

    fn write_list(&self, pages: &[(Gref, Access)]) -> anyhow::Result<GrefList> {
        let entry = |(gref, access): &(Gref, Access)| {
            GrefEntry::new(*gref, *access == Access::ReadOnly).to_bytes()
        };
        let bytes: Vec<u8> = pages.iter().flat_map(entry).collect();
        self.list.memory().copy_from(0, &bytes)?;
        ensure!(pages.len() <= GREF_LIST_MAX as usize, "a list has room for {GREF_LIST_MAX} pages");
        Ok(GrefList { queue: 0, page: self.list.gref(), entries: u16::try_from(pages.len())? })
    }

    /// Returns the status of each entry of the list, as the backend wrote it.
    fn statuses(&self, entries: u16) -> anyhow::Result<Vec<u16>> {
        let status = |number: u16| {
            let bytes = self.list.memory().fetch(usize::from(number) * GrefEntry::SIZE)?;
            Ok(GrefEntry::from_bytes(bytes.into_unchecked()).status)
        };
        (0..entries).map(status).collect()
    }

    /// Pauses until the test has created the file `name`.
    fn hold(&self, name: &str, what: &str) -> anyhow::Result<()> {
        println!("{what}");
        std::io::stdout().flush()?;
        let Some(folder) = &self.args.hold else { return Ok(()) };
        let until = Instant::now() + HOLD;
        while !folder.join(name).exists() {
            if Instant::now() > until {
                bail!("nobody made {}", folder.join(name).display());
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn leave(&mut self) -> anyhow::Result<()> {
        let path = format!("{}/{STATE}", self.device.frontend_path());
        self.store.write(&path, XenbusState::Closing.to_string())?;
        self.await_release()?;
        let front = self.device.frontend_path();
        for key in [keys::CTRL_RING_REF, keys::EVENT_CHANNEL_CTRL] {
            self.store.rm(&format!("{front}/{key}"))?;
        }
        Ok(self.store.write(&path, XenbusState::Closed.to_string())?)
    }
}

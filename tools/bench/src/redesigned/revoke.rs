//! Time to revoke the grant of a page: by handshake with the peer, and one-sided.
//!
//! The peer is a thread that has mapped the granted pages. In the handshake the granter requests the
//! removal over the vif's control ring, as for a staged page. The peer removes the page from its table,
//! unmaps it and responds; only then can the grant be revoked. A stopped peer does not serve its ring.

use std::convert::Infallible;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use ringfence_access::staging::{StagingLimits, StagingTable};
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_memory::PAGE_SIZE;
use ringfence_net::commands::{VifCommand, VifReply};
use ringfence_net::ctrl::backend::{ControlRing, CtrlBackend, CtrlOptions};
use ringfence_platform::local::{LocalChannel, LocalGranter, LocalPlatform};
use ringfence_platform::{
    Access, Channel, DomId, Grantee, Granter, Gref, Lease, PageId, Platform, WindowShape,
};
use ringfence_ring::{FrontRing, NETIF_CTRL, RingPages};
use ringfence_wire::netif::ctrl::{CtrlMessage, CtrlResponse, CtrlStatus, GrefEntry, GrefList};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::hub::RunningHub;

/// Pages revoked in each row.
const PAGES: u32 = 200;
/// Time limit for the response of a peer.
const PATIENCE: Duration = Duration::from_millis(500);
/// Interval at which an idle peer checks for the end of the row.
const STEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// Delay of a slow peer.
const SLOW: Duration = Duration::from_millis(2);

/// Reaction time of the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RevokingPeer {
    Quick,
    Slow,
    Stopped,
}

const PEERS: [(RevokingPeer, &str); 3] = [
    (RevokingPeer::Quick, "quick"),
    (RevokingPeer::Slow, "slow"),
    (RevokingPeer::Stopped, "stopped"),
];

/// Row of the table: the median time of a page in microseconds; `None` if the peer did not respond.
pub(super) struct Revoke {
    pub(super) peer: &'static str,
    pub(super) handshake_us: Option<f64>,
    pub(super) one_sided_us: f64,
    /// Revoked by force, while the peer claims to use the page.
    pub(super) forced_us: f64,
}

pub(super) fn measure() -> anyhow::Result<Vec<Revoke>> {
    let row = |(peer, name): (RevokingPeer, &'static str)| {
        Ok(Revoke {
            peer: name,
            handshake_us: handshake(peer)?,
            one_sided_us: one_sided(false)?,
            forced_us: one_sided(true)?,
        })
    };
    PEERS.into_iter().map(row).collect()
}

/// Returns the median of the times in microseconds.
fn per_page(took: &[Duration]) -> f64 {
    crate::harness::median(took.iter().map(|took| took.as_secs_f64() * 1e6))
}

/// Waits for an event. Returns `false` at the time limit.
fn wait(channel: &LocalChannel, patience: Duration) -> anyhow::Result<bool> {
    let mut fds = [PollFd::from_borrowed_fd(channel.as_fd(), PollFlags::IN)];
    let limit = Timespec::try_from(patience).context("a time to wait")?;
    let came = rustix::event::poll(&mut fds, Some(&limit))? > 0;
    if came {
        channel.clear()?;
    }
    Ok(came)
}

/// Two domains with an event channel between them.
struct Domains {
    granter: LocalPlatform,
    grantee: LocalPlatform,
    ours: LocalChannel,
    theirs: LocalChannel,
    _hub: RunningHub,
}

impl Domains {
    fn new() -> anyhow::Result<Domains> {
        let hub = RunningHub::start()?;
        let grantee = LocalPlatform::connect(hub.0.admit(Some(DomId(0)), true)?.1)?;
        let granter = LocalPlatform::connect(hub.0.admit(None, false)?.1)?;
        let ours = granter.alloc_unbound(DomId(0))?;
        let theirs = grantee.bind_interdomain(granter.domid(), ours.port())?;
        Ok(Domains { granter, grantee, ours, theirs, _hub: hub })
    }
}

/// Carries out the port orders of this benchmark.
fn obey(table: &mut StagingTable, order: VifCommand) -> PortReply {
    match order {
        VifCommand::Stage(pages) => match table.add(pages) {
            Ok(()) => VifReply::Staged.into(),
            Err((pages, why)) => VifReply::NotStaged(pages, why).into(),
        },
        VifCommand::Unstage(grefs) => {
            let taken = grefs.into_iter().filter_map(|gref| table.take(gref));
            VifReply::Unstaged(taken.collect()).into()
        }
        _ => PortReply::Unsupported,
    }
}

/// Serves the control ring in the peer's thread. It stages without delay and delays only the removal.
fn serve(
    peer: RevokingPeer,
    mut ring: impl ControlRing,
    staged: &Receiver<Infallible>,
) -> anyhow::Result<()> {
    let mut table = StagingTable::new();
    loop {
        if matches!(staged.try_recv(), Err(TryRecvError::Disconnected)) {
            return Ok(());
        }
        let mut fds = [PollFd::from_borrowed_fd(ring.wait_fd(), PollFlags::IN)];
        if rustix::event::poll(&mut fds, Some(&STEP))? == 0 {
            continue;
        }
        let mut carry_out = |_: u16, order: PortCommand| {
            let Some(order) = VifCommand::of(order) else { return Some(PortReply::Unsupported) };
            match peer {
                RevokingPeer::Slow if matches!(order, VifCommand::Unstage(_)) => {
                    std::thread::sleep(SLOW)
                }
                // Blocks until the granter has ended the row.
                RevokingPeer::Stopped if matches!(order, VifCommand::Unstage(_)) => {
                    let _ = staged.recv();
                }
                RevokingPeer::Quick | RevokingPeer::Slow | RevokingPeer::Stopped => {}
            }
            Some(obey(&mut table, order))
        };
        let fault = |fault| anyhow::anyhow!("the control ring: {fault:?}");
        while ring.serve(&mut carry_out).map_err(fault)? {}
    }
}

/// Granter's end of a control ring.
struct Asking<'a> {
    ring: FrontRing<RingPages>,
    ring_page: Lease,
    list: Lease,
    channel: &'a LocalChannel,
}

impl<'a> Asking<'a> {
    fn new(granter: &mut LocalGranter, channel: &'a LocalChannel) -> anyhow::Result<Asking<'a>> {
        let mut lend = || granter.lend(Access::ReadWrite).context("a page to lend");
        let (ring_page, list) = (lend()?, lend()?);
        ring_page.memory().zero(0, PAGE_SIZE)?;
        let pages = RingPages::new(ring_page.memory().clone(), PAGE_SIZE)?;
        let ring = FrontRing::init(pages, NETIF_CTRL);
        Ok(Asking { ring, ring_page, list, channel })
    }

    /// Sends a request about one page. Returns `true` on success, and `None` if there is no response.
    fn ask(
        &mut self,
        message: fn(GrefList) -> CtrlMessage,
        gref: Gref,
    ) -> anyhow::Result<Option<bool>> {
        let entry = GrefEntry::new(gref, false);
        self.list.memory().copy_from(0, &entry.to_bytes())?;
        let list = GrefList { queue: 0, page: self.list.gref(), entries: 1 };
        let request = message(list).request(0);
        ensure!(self.ring.request(&request.to_bytes()), "the control ring is full");
        if self.ring.publish() {
            self.channel.notify()?;
        }
        while !self.ring.final_check()? {
            if !wait(self.channel, PATIENCE)? {
                return Ok(None);
            }
        }
        let slot: [u8; 16] = self.ring.response(0).into_unchecked();
        self.ring.consume(1);
        let answer = slot.first_chunk().map(|bytes| CtrlResponse::from_bytes(*bytes));
        Ok(answer.map(|answer| answer.status == CtrlStatus::Success))
    }
}

/// Measures DEL_GREF_MAPPING, its response, and the revocation of the grant.
fn handshake(peer: RevokingPeer) -> anyhow::Result<Option<f64>> {
    let Domains { granter: platform, grantee, ours, theirs, _hub } = Domains::new()?;
    let mut granter = platform.granter(DomId(0))?;
    let mut asking = Asking::new(&mut granter, &ours)?;
    let mut pages = grantee.grantee(platform.domid())?;
    let mut mapped = Vec::new();
    pages.map(&[(asking.ring_page.gref(), Access::ReadWrite)], &mut mapped);
    let ring = mapped.pop().context("no ring")?;
    let ring = ring.map_err(|status| anyhow::anyhow!("the ring is not mapped: {status}"))?;
    let options = CtrlOptions { queues: 1, staging: Some(StagingLimits::default()) };
    let ring = RingPages::new(ring, PAGE_SIZE)?;
    let ring = CtrlBackend::new(ring, theirs, pages, options, &Arc::default());
    let (going_on, staged) = channel::<Infallible>();
    std::thread::scope(|scope| {
        let served = scope.spawn(move || serve(peer, ring, &staged));
        let mut asked = || -> anyhow::Result<Option<f64>> {
            let mut took = Vec::new();
            for _ in 0..PAGES {
                let lease = granter.lend(Access::ReadWrite).context("a page to lend")?;
                let added = asking.ask(CtrlMessage::AddGrefMapping, lease.gref())?;
                ensure!(added == Some(true), "a page was not staged");
                let began = Instant::now();
                let Some(gone) = asking.ask(CtrlMessage::DelGrefMapping, lease.gref())? else {
                    return Ok(None);
                };
                let left = ringfence_platform::take_back(&mut granter, vec![lease]);
                took.push(began.elapsed());
                ensure!(gone && left.is_empty(), "the peer said that it let go, and did not");
            }
            Ok(Some(per_page(&took)))
        };
        let outcome = asked();
        drop(going_on);
        served.join().map_err(|_| anyhow::anyhow!("the peer panicked"))??;
        outcome
    })
}

/// Measures the one-sided revocation in a grant window, by force if the peer claims to use the page.
/// The peer takes no part, so its reaction time does not matter.
fn one_sided(by_force: bool) -> anyhow::Result<f64> {
    let domains = Domains::new()?;
    let shape = WindowShape { writable: PAGES, read_only: 0, entries: PAGES };
    let mut table = domains.granter.window(DomId(0), shape)?;
    let mut view = domains.grantee.open_window(domains.granter.domid(), table.handle(), PAGES)?;
    let mut took = Vec::new();
    for (page, gref) in shape.pages_for(Access::ReadWrite).zip(shape.grefs()) {
        table.issue(gref, page, Access::ReadWrite)?;
        let mut found = Vec::new();
        view.begin([(gref, Access::ReadWrite)].into_iter(), &mut found);
        let place = found.pop().context("nothing was looked up")?;
        let place = place.map_err(|status| anyhow::anyhow!("not found: {status}"))?;
        let (memory, at) = view.memory(place);
        memory.copy_from(at, &[1])?;
        if !by_force {
            view.end(gref);
        }
        let began = Instant::now();
        if by_force {
            table.revoke_forced(&[gref])?;
        } else {
            let revoked: PageId = table.revoke(gref)?;
            // After this the peer can no longer access the page.
            table.prepare(revoked)?;
        }
        took.push(began.elapsed());
    }
    Ok(per_page(&took))
}

//! What it takes to have a page back: by asking the peer for it, and alone.
//!
//! The peer is a thread that has mapped what it was granted. In the handshake the granter asks over an
//! event channel, the peer unmaps and answers, and only then the grant can be taken back. The peer that
//! is stopped does not look at its channel at all.

use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ringfence_platform::local::{LocalChannel, LocalPlatform};
use ringfence_platform::{
    Access, Channel, DomId, Grantee, Granter, Gref, PageId, Platform, WindowShape,
};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::bench::net::RunningHub;

/// Pages that are had back in each row.
const PAGES: u32 = 200;
/// How long a peer that does not answer is waited for.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long a slow peer takes to look.
const SLOW: Duration = Duration::from_millis(2);

/// How soon a peer looks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Peer {
    Quick,
    Slow,
    Stopped,
}

const PEERS: [(Peer, &str); 3] =
    [(Peer::Quick, "quick"), (Peer::Slow, "slow"), (Peer::Stopped, "stopped")];

/// A row. Microseconds for a page, the median; `None`: never, within the patience.
pub(super) struct Revoke {
    pub(super) peer: &'static str,
    pub(super) handshake_us: Option<f64>,
    pub(super) one_sided_us: f64,
    /// By force, while the peer claims to use the page.
    pub(super) forced_us: f64,
}

pub(super) fn measure() -> anyhow::Result<Vec<Revoke>> {
    let row = |(peer, name): (Peer, &'static str)| {
        Ok(Revoke {
            peer: name,
            handshake_us: handshake(peer)?,
            one_sided_us: one_sided(false)?,
            forced_us: one_sided(true)?,
        })
    };
    PEERS.into_iter().map(row).collect()
}

/// The middle of what single pages took, in microseconds.
fn per_page(took: &[Duration]) -> f64 {
    crate::bench::median(took.iter().map(|took| took.as_secs_f64() * 1e6))
}

/// Whether something came within that time.
fn wait(channel: &LocalChannel, patience: Duration) -> anyhow::Result<bool> {
    let mut fds = [PollFd::from_borrowed_fd(channel.as_fd(), PollFlags::IN)];
    let limit = Timespec::try_from(patience).context("a time to wait")?;
    let came = rustix::event::poll(&mut fds, Some(&limit))? > 0;
    if came {
        channel.clear()?;
    }
    Ok(came)
}

/// Two domains, and a channel between them.
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

/// The peer's thread: maps what it is told, and lets go when it is asked.
fn serve(
    peer: Peer,
    mut pages: impl Grantee,
    channel: &LocalChannel,
    granted: &Receiver<Gref>,
    told: &Sender<()>,
) -> anyhow::Result<()> {
    loop {
        let Ok(gref) = granted.recv() else { return Ok(()) };
        let mut mapped = Vec::new();
        pages.map(&[(gref, Access::ReadWrite)], &mut mapped);
        for page in &mapped {
            let page = page.as_ref().map_err(|status| anyhow::anyhow!("not mapped: {status}"))?;
            page.copy_from(0, &[1])?;
        }
        told.send(())?;
        loop {
            match peer {
                Peer::Quick => {}
                Peer::Slow => std::thread::sleep(SLOW),
                // Until the granter has given up.
                Peer::Stopped => match granted.recv() {
                    Ok(_) => continue,
                    Err(_) => return Ok(()),
                },
            }
            if wait(channel, Duration::from_millis(100))? {
                break;
            }
            if matches!(granted.try_recv(), Err(TryRecvError::Disconnected)) {
                return Ok(());
            }
        }
        drop(mapped);
        channel.notify()?;
    }
}

fn handshake(peer: Peer) -> anyhow::Result<Option<f64>> {
    let domains = Domains::new()?;
    let mut granter = domains.granter.granter(DomId(0))?;
    let first = granter.lend(Access::ReadWrite).context("a page to lend")?;
    let pages = domains.grantee.grantee(domains.granter.domid())?;
    drop(ringfence_platform::take_back(&mut granter, vec![first]));
    let (grant, granted) = channel();
    let (tell, told) = channel();
    let Domains { ours, theirs, .. } = &domains;
    std::thread::scope(|scope| {
        let served = scope.spawn(move || serve(peer, pages, theirs, &granted, &tell));
        let mut asked = || -> anyhow::Result<Option<f64>> {
            let mut took = Vec::new();
            for _ in 0..PAGES {
                let lease = granter.lend(Access::ReadWrite).context("a page to lend")?;
                grant.send(lease.gref())?;
                told.recv().context("the peer is gone")?;
                let began = Instant::now();
                ours.notify()?;
                if !wait(ours, PATIENCE)? {
                    return Ok(None);
                }
                let left = ringfence_platform::take_back(&mut granter, vec![lease]);
                took.push(began.elapsed());
                if !left.is_empty() {
                    bail!("the peer said that it let go, and did not");
                }
            }
            Ok(Some(per_page(&took)))
        };
        let outcome = asked();
        drop(grant);
        served.join().map_err(|_| anyhow::anyhow!("the peer panicked"))??;
        outcome
    })
}

/// By the owner of a window alone: the peer used the page, or, by force, claims to use it still. It is
/// not asked in any case, so that it makes no difference how soon it looks.
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
            // Until nothing of the peer's reaches what is put there.
            table.prepare(revoked)?;
        }
        took.push(began.elapsed());
    }
    Ok(per_page(&took))
}

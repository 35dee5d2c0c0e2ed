//! Trial `canary`: pages are revoked while packets arrive.

use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ringfence_access::iommu::RegionTable;
use ringfence_memory::{DeviceAccess, PAGE_SIZE};
use ringfence_platform::vhost::QueueName;
use ringfence_platform::{Access, Gref, PageId, TranslationTable, WindowShape};

use super::rig::{Came, PAYLOAD_MAX, Rig};
use super::traffic::Dice;
use super::{GUEST, table};

/// Pages that are posted at a time.
const PAGES: u32 = 64;
const SHAPE: WindowShape = WindowShape { writable: PAGES, read_only: 0, entries: PAGES };
const FLOOD: u8 = 0xee;
const CANARY: u8 = 0xc5;

pub(super) fn run(rounds: u32) -> anyhow::Result<()> {
    let (mut rig, counters) = (Rig::new(0)?, Arc::default());
    let mut table = table(&rig, GUEST, SHAPE, &counters)?;
    let (goes_on, ended) = channel::<()>();
    let (socket, to) = (rig.socket.try_clone()?, rig.inward());
    let flood = std::thread::spawn(move || flood(&socket, to, &ended));
    let mut dice = Dice(1);
    let mut written = 0;
    for round in 0..rounds {
        written +=
            one(&mut rig, &mut table, &mut dice).with_context(|| format!("round {round}"))?;
    }
    drop(goes_on);
    let sent = flood.join().map_err(|_| anyhow::anyhow!("the flood ended early"))??;
    anyhow::ensure!(written > u64::from(rounds), "only {written} packets came");
    println!("revoked {rounds} times among {written} packets ({sent} sent): every canary is whole");
    Ok(())
}

/// Sends at the maximum rate until `ended` is set. Returns the number of datagrams.
fn flood(
    socket: &UdpSocket,
    to: std::net::SocketAddr,
    ended: &Receiver<()>,
) -> anyhow::Result<u64> {
    let mut sent = 0;
    while ended.try_recv() == Err(TryRecvError::Empty) {
        match socket.send_to(&[FLOOD; PAYLOAD_MAX], to) {
            Ok(_) => sent += 1,
            // The interface's queue is full, or it has no worker at the moment.
            Err(error) if error.raw_os_error().is_some() => std::thread::yield_now(),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(sent)
}

/// Receives packets and revokes a page that the worker uses next. Returns the number of packets.
fn one(rig: &mut Rig, table: &mut RegionTable, dice: &mut Dice) -> anyhow::Result<u64> {
    let region = table.region();
    let post = |rig: &mut Rig, n: u32| {
        let gref = Gref(Gref::FIRST_FREE.0 + n);
        let bytes = u32::try_from(PAYLOAD_MAX)?;
        let payload = region.range(gref, 0, bytes, DeviceAccess::Write).context("no address")?;
        rig.post(payload, n)
    };
    for n in 0..PAGES {
        let (gref, page) = (Gref(Gref::FIRST_FREE.0 + n), PageId(n));
        table.prepare(page)?;
        table.issue(gref, page, Access::ReadWrite)?;
        post(rig, n)?;
    }
    rig.kick(QueueName::Receive)?;
    // The worker uses buffers in the order in which they are posted.
    let (mut came, mut next) = (0, 0);
    let enough = 8 + dice.below(120);
    while came < enough {
        while let Some(used) = rig.pop(QueueName::Receive)? {
            next = (used.token + 1) % PAGES;
            came += 1;
            post(rig, used.token)?;
        }
        rig.kick(QueueName::Receive)?;
    }
    let ahead = u32::try_from(dice.below(4))?;
    let victim = (next + ahead) % PAGES;
    let page = table.revoke(Gref(Gref::FIRST_FREE.0 + victim))?;
    let memory = table.memory(page).context("no memory")?;
    memory.copy_from(0, &[CANARY; PAGE_SIZE])?;
    let mut missed = false;
    let mut end = Instant::now() + Duration::from_secs(60);
    while Instant::now() < end {
        while let Some(used) = rig.pop(QueueName::Receive)? {
            came += 1;
            if used.token != victim {
                post(rig, used.token)?;
            } else {
                // The page was filled before the revocation, and its completion is consumed, so post it again.
                post(rig, victim)?;
            }
        }
        rig.kick(QueueName::Receive)?;
        if !missed && let Some(Came::Refused(miss)) = rig.refused()? {
            let miss = miss.context("the worker failed")?;
            let at = region.address(Gref(Gref::FIRST_FREE.0 + victim));
            anyhow::ensure!(Some(miss.address) == at, "{miss:x?}, not {at:x?}");
            missed = true;
            end = Instant::now() + Duration::from_millis(20);
        }
    }
    anyhow::ensure!(missed, "the worker never came to the page that was revoked");
    let mut found = [0; PAGE_SIZE];
    memory.copy_to(0, &mut found)?;
    let whole = found.iter().all(|byte| *byte == CANARY);
    anyhow::ensure!(whole, "the page was written after its revocation");
    rig.restart()?;
    let all: Vec<Gref> = SHAPE.grefs().collect();
    table.revoke_forced(&all)?;
    Ok(came)
}

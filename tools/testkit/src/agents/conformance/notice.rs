//! Conformance cases of unmap notification, which only Xen has.
//!
//! An unmapped page clears a byte in itself and sends an event. This holds whether the owner of the
//! mapping unmaps the page or exits. The user's half holds the second mapping in a process of its own,
//! which it kills.

use std::any::Any;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::conformance::{CaseReport, Outcome, Role};
use ringfence_memory::LentSlice;
use ringfence_platform::xen::{UnmapNotice, XenChannel, XenPlatform};
use ringfence_platform::{
    Access, Channel, DomId, EventPort, Granter, Gref, Lease, Platform, PlatformError,
};
use ringfence_wire::xenstore::{NodeAccess, Permission, PermissionList};
use ringfence_xenstore::{StoreAccess, StoreClient};

/// Offset of the notification byte, which is set while the page is mapped.
const BYTE: u16 = 4000;
const MAPPED: u8 = 0xA5;

/// Polling interval of the store.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Line of the child after it has mapped the page.
const HOLDING: &str = "holding";

/// Names of the cases: unmapped by its owner, owner killed.
const CASES: [&str; 2] = ["an_unmapped_page_gives_notice", "a_killed_user_gives_notice"];

/// Runs the cases; each half reports its result.
pub(super) fn run(
    platform: &XenPlatform,
    role: Role,
    peer: DomId,
    patience: Duration,
    report: &mut dyn FnMut(CaseReport),
) {
    for name in CASES {
        let half = match role {
            Role::Lender => lend_and_wait(platform, peer, name, patience),
            Role::User => use_one(platform, peer, name, patience),
        };
        let outcome =
            half.map_or_else(|why| Outcome::Failed(why.to_string()), |()| Outcome::Passed);
        report(CaseReport { name, outcome });
    }
}

/// Offers a page under `name`, or maps the offered page, until this process is killed.
pub(super) fn hold(
    platform: &XenPlatform,
    role: Role,
    peer: DomId,
    name: &str,
    patience: Duration,
) -> anyhow::Result<()> {
    let _held: Box<dyn Any> = match role {
        Role::Lender => Box::new(lend(platform, peer, name)?),
        Role::User => {
            let offer = await_offer(platform, peer, name, patience)?;
            Box::new(take_up(platform, peer, &offer)?)
        }
    };
    println!("{HOLDING}");
    std::io::stdout().flush()?;
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

fn directory(of: DomId) -> String {
    format!("/local/domain/{of}/data/notice")
}

fn lend_and_wait(
    platform: &XenPlatform,
    peer: DomId,
    name: &str,
    patience: Duration,
) -> anyhow::Result<()> {
    let (lease, channel) = lend(platform, peer, name)?;
    let gone = await_notice(lease.memory(), &channel, patience);
    platform.store()?.rm(&format!("{}/{name}", directory(platform.domid())))?;
    platform.granter(peer)?.take_back(lease)?;
    gone
}

/// Grants a page and offers it together with a channel.
fn lend(platform: &XenPlatform, peer: DomId, name: &str) -> anyhow::Result<(Lease, XenChannel)> {
    let lease = platform.granter(peer)?.lend(Access::ReadWrite)?;
    let channel = platform.alloc_unbound(peer)?;
    lease.memory().copy_from(BYTE.into(), &[MAPPED])?;
    offer(&mut platform.store()?, platform.domid(), peer, name, lease.gref(), channel.port())?;
    Ok((lease, channel))
}

fn offer(
    store: &mut StoreClient,
    own: DomId,
    peer: DomId,
    name: &str,
    gref: Gref,
    port: EventPort,
) -> Result<(), PlatformError> {
    let path = format!("{}/{name}", directory(own));
    store.mkdir(&directory(own))?;
    let may = |access, domain| Permission { access, domain };
    // A list always has room for two entries.
    if let Ok(list) =
        PermissionList::new(&[may(NodeAccess::None, own), may(NodeAccess::Read, peer)])
    {
        store.set_perms(&directory(own), &list)?;
    }
    Ok(store.write(&path, format!("{gref} {}", port.0))?)
}

/// Waits for the event; the byte must be cleared by then.
fn await_notice(page: &LentSlice, channel: &XenChannel, patience: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        let event = channel.clear()?;
        let byte = page.fetch::<1>(BYTE.into())?.into_unchecked()[0];
        match (event, byte) {
            (true, 0) => return Ok(()),
            (true, byte) => anyhow::bail!("an event came, and the byte is {byte:#04x}"),
            (false, _) if Instant::now() > deadline => {
                anyhow::bail!("no event within {patience:?}; the byte is {byte:#04x}")
            }
            (false, _) => std::thread::sleep(LOOK_EVERY),
        }
    }
}

/// Waits for an offer that this domain may read.
fn await_offer(
    platform: &XenPlatform,
    peer: DomId,
    name: &str,
    patience: Duration,
) -> anyhow::Result<String> {
    let mut store = platform.store()?;
    let path = format!("{}/{name}", directory(peer));
    let deadline = Instant::now() + patience;
    loop {
        match store.read_text(&path) {
            Ok(offer) => return Ok(offer),
            Err(why) if why.refusal().is_none() || Instant::now() > deadline => {
                return Err(why.into());
            }
            Err(_) => std::thread::sleep(LOOK_EVERY),
        }
    }
}

fn use_one(
    platform: &XenPlatform,
    peer: DomId,
    name: &str,
    patience: Duration,
) -> anyhow::Result<()> {
    let offer = await_offer(platform, peer, name, patience)?;
    if name == CASES[0] {
        return take_up(platform, peer, &offer).map(drop);
    }
    let mut child = Command::new("/proc/self/exe")
        .args(["internal", "conformance", "--role", "user"])
        .args(["--peer", &peer.to_string(), "--hold", name])
        .stdout(Stdio::piped())
        .spawn()?;
    let mut said = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut said)?;
    }
    child.kill()?;
    child.wait()?;
    anyhow::ensure!(said.trim_end() == HOLDING, "the process that was to hold it said {said:?}");
    Ok(())
}

/// Maps the page of an offer. The mapping is dropped before the channel.
fn take_up(
    platform: &XenPlatform,
    peer: DomId,
    offer: &str,
) -> anyhow::Result<(LentSlice, XenChannel)> {
    let (gref, port) =
        offer.split_once(' ').ok_or_else(|| anyhow::anyhow!("{offer:?} is no offer"))?;
    let channel = platform.bind_interdomain(peer, EventPort(port.parse()?))?;
    let notice = UnmapNotice { clear: Some(BYTE), event: Some(&channel) };
    let page = platform.grantee(peer)?.map_with_notice(Gref(gref.parse()?), notice)?;
    let byte = page.fetch::<1>(BYTE.into())?.into_unchecked()[0];
    anyhow::ensure!(byte == MAPPED, "the byte is {byte:#04x} before anything was unmapped");
    Ok((page, channel))
}

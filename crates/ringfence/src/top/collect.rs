//! Collection of samples: asks the launchers of this user's guests, the daemon, and sessions of `pasta` and `passt`.
//!
//! Each launcher is asked for its guest, the counters of the guest's devices, the levels of its memory and the totals of its
//! uplink: what `ringfence ps` and `ringfence status` ask for. All launchers work at the same time and have one time limit.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringfence_driver::switchboard::FrontendLevels;
use ringfence_driver::xen::config::{Config, PATH_DEFAULT};
use ringfence_driver::xen::status::{
    self, Attachment, QUEUE_FULL, QueueStatus, Snapshot, VbdStatus, VifStatus,
};
use ringfence_hostnet::causes::causes;
use ringfence_pasta::session_status::{self, SessionStatus};
use ringfence_sandbox::channel::ChannelError;
use ringfence_sys::poll::wait_any;
use ringfence_uplink_process::totals::{EgressTotals, UplinkTotals};
use rustix::event::{PollFd, PollFlags};

use super::sample::{Counts, Item, Kind, Sample};
use crate::commands::find::{self, Found, Listing};
use crate::commands::{Counters, Reply, Request};

/// Time limit for the answers of all launchers.
const ANSWERS: Duration = Duration::from_secs(1);

/// Sources that a sample is taken from.
pub(super) struct Collector {
    /// Sockets of daemons and sessions that the user named.
    sockets: Vec<PathBuf>,
    /// Socket of the daemon in its configuration, if the user named none.
    daemon: Option<PathBuf>,
}

impl Collector {
    /// Asks the sockets that the user named, or the daemon if it runs and the user may ask it.
    pub(super) fn new(sockets: &[PathBuf]) -> Collector {
        let config = sockets.is_empty().then(|| Config::load(Path::new(PATH_DEFAULT), true));
        let daemon = config.and_then(|config| Some(config.ok()?.serve.status_socket));
        Collector { sockets: sockets.to_vec(), daemon }
    }

    /// Takes a sample of all sources.
    pub(super) fn collect(&self) -> Sample {
        let listing = find::all();
        let (items, remarks) = (Vec::new(), Vec::new());
        let mut sample = Sample { at: Instant::now(), items, remarks };
        match listing {
            Ok(listing) => add_guests(&mut sample, listing),
            Err(error) => sample.remarks.push(causes(&error).to_string()),
        }
        for socket in &self.sockets {
            if let Err(why) = add_socket(&mut sample, socket) {
                sample.remarks.push(format!("{}: {why}", socket.display()));
            }
        }
        if let Some(daemon) = &self.daemon {
            add_daemon_if_allowed(&mut sample, daemon);
        }
        sample
    }
}

/// Adds the daemon or the session that listens at this socket.
fn add_socket(sample: &mut Sample, socket: &Path) -> Result<(), String> {
    match session_status::ask(socket).map_err(|error| error.to_string())? {
        Some(session) => sample.items.push(front(socket, session)),
        None => {
            let snapshot = status::ask(socket).map_err(|error| error.to_string())?;
            add_daemon(sample, socket, snapshot);
        }
    }
    Ok(())
}

/// Adds the daemon of the default configuration. Most users have none, or may not ask it.
fn add_daemon_if_allowed(sample: &mut Sample, socket: &Path) {
    match status::ask(socket) {
        Ok(snapshot) => add_daemon(sample, socket, snapshot),
        Err(ChannelError::Closed) => {}
        Err(ChannelError::System(error))
            if matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::ConnectionRefused
            ) => {}
        Err(error) => sample.remarks.push(format!("{}: {error}", socket.display())),
    }
}

/// Guest whose launcher was asked.
struct Asked {
    found: Found,
    counters: Counters,
    levels: FrontendLevels,
    totals: Option<UplinkTotals>,
    /// Number of answers to come.
    missing: usize,
    /// Reason for which the numbers are not complete.
    problem: Option<String>,
}

impl Asked {
    /// Sends all requests at once. Returns `None` if the guest has ended.
    fn new(found: Found) -> Option<Asked> {
        let mut requests = vec![Request::Counters, Request::Levels];
        if !found.guest.uplink.is_empty() {
            requests.push(Request::UplinkTotals);
        }
        for request in &requests {
            found.channel.send_now(request, &[]).ok()?;
        }
        let (counters, levels) = (Counters::default(), FrontendLevels::default());
        Some(Asked {
            found,
            counters,
            levels,
            totals: None,
            missing: requests.len(),
            problem: None,
        })
    }

    /// Receives the answers that have arrived. Returns `false` if the guest has ended.
    fn receive(&mut self) -> bool {
        while self.missing > 0 {
            match self.found.channel.try_receive::<Reply>() {
                Ok(None) => return true,
                Ok(Some((reply, _))) => {
                    self.missing -= 1;
                    self.take(reply);
                }
                Err(ChannelError::Closed) => return false,
                Err(error) => {
                    self.missing = 0;
                    self.problem = Some(error.to_string());
                }
            }
        }
        true
    }

    fn take(&mut self, reply: Reply) {
        match reply {
            Reply::Counters(counters) => self.counters = *counters,
            Reply::Levels(levels) => self.levels = levels,
            Reply::UplinkTotals(totals) => self.totals = totals.map(|totals| *totals),
            Reply::Failed { why, .. } => self.problem = Some(why),
            _ => self.problem = Some("it is of another version of Ringfence".to_owned()),
        }
    }
}

/// Asks the launchers of guests, and adds the guests with their devices and driver domains.
fn add_guests(sample: &mut Sample, listing: Listing) {
    sample.remarks.extend(listing.silent.iter().map(ToString::to_string));
    let mut asked: Vec<Asked> = listing.found.into_iter().filter_map(Asked::new).collect();
    let deadline = Instant::now() + ANSWERS;
    loop {
        asked.retain_mut(Asked::receive);
        let waiting = asked.iter().filter(|asked| asked.missing > 0);
        let mut fds: Vec<_> =
            waiting.map(|asked| PollFd::new(&asked.found.channel, PollFlags::IN)).collect();
        if fds.is_empty() || !matches!(wait_any(&mut fds, Some(deadline)), Ok(1..)) {
            break;
        }
    }
    let mut drivers = BTreeMap::<String, Item>::new();
    for asked in asked {
        let problem = match asked.missing {
            0 => asked.problem.clone(),
            _ => Some(format!("its processes did not answer within {ANSWERS:?}")),
        };
        let name = &asked.found.guest.name;
        sample.remarks.extend(problem.map(|why| format!("guest {name}: {why}")));
        add_guest(sample, &mut drivers, asked);
    }
    sample.items.extend(drivers.into_values());
}

fn add_guest(sample: &mut Sample, drivers: &mut BTreeMap<String, Item>, asked: Asked) {
    let Asked { found: Found { pid, guest, .. }, mut counters, levels, totals, .. } = asked;
    let owner = pid.to_string();
    let switch = guest.switch.as_deref().unwrap_or_default();
    let part = |kind, name: &str, place: &str| Item {
        guest: guest.name.clone(),
        place: place.to_owned(),
        ..Item::new(kind, name, &owner)
    };
    let mut parts = Vec::new();
    for (name, counts) in counters.ports {
        let mut vif = part(Kind::Vif, &name, switch);
        vif.counters = counts;
        vif.levels = counters.levels.remove(&name).unwrap_or_default();
        vif.rules = counters.rules.remove(&name).unwrap_or_default();
        add_windows(&mut vif, levels);
        parts.push(vif);
    }
    for (name, counts) in counters.disks {
        let number = name.rsplit_once('.').and_then(|(_, number)| number.parse::<usize>().ok());
        let storage = number.and_then(|number| guest.disks.get(number)).map_or("", String::as_str);
        let mut vbd = part(Kind::Vbd, &name, storage);
        vbd.counters = counts;
        vbd.levels = counters.levels.remove(&name).unwrap_or_default();
        vbd.rules = counters.rules.remove(&name).unwrap_or_default();
        parts.push(vbd);
    }
    if let Some(UplinkTotals { egress, traffic, .. }) = totals {
        let address = guest.uplink.first().map_or("", String::as_str);
        let mut uplink = part(Kind::Uplink, &guest.name, address);
        uplink.counters = traffic;
        add_egress(&mut uplink, egress);
        parts.push(uplink);
    }
    if !counters.driver.is_empty() {
        let name = if switch.is_empty() { &guest.name } else { switch };
        let driver = drivers.entry(name.to_owned()).or_insert_with(|| Item {
            counters: counters.driver,
            ..Item::new(Kind::Driver, name, "")
        });
        *driver.levels.entry("guests".to_owned()).or_default() += 1;
    }
    let mut item = Item { place: switch.to_owned(), ..Item::new(Kind::Guest, &guest.name, &owner) };
    let windows = levels.windows.map_or(0, |windows| u64::from(windows.pages));
    item.levels.insert("pages_lent".to_owned(), levels.lent_pages + windows);
    if let Some(memory) = guest.usage.memory {
        item.levels.insert("memory_bytes".to_owned(), memory);
    }
    sample.add_guest(item, parts);
}

fn add_windows(vif: &mut Item, levels: FrontendLevels) {
    let Some(windows) = levels.windows else { return };
    vif.counters.extend(
        [
            ("window_reused", windows.reused),
            ("window_issued", windows.issued),
            ("window_evicted", windows.evicted),
        ]
        .map(|(name, count)| (name.to_owned(), count)),
    );
    vif.levels.extend(
        [("window_pages", windows.pages), ("window_pages_in_use", windows.pages_in_use)]
            .map(|(name, pages)| (name.to_owned(), u64::from(pages))),
    );
}

/// Adds the levels of an egress policy; its counters are among those of the uplink.
fn add_egress(item: &mut Item, egress: Option<EgressTotals>) {
    if let Some(egress) = egress {
        item.levels.insert("pins".to_owned(), egress.pins);
    }
}

/// Returns the item of a session of `pasta` or `passt`.
fn front(socket: &Path, session: SessionStatus) -> Item {
    let mut front = Item {
        place: format!("{} {}", session.program, session.link),
        counters: session.traffic,
        ..Item::new(Kind::Front, &session.guest, &socket.to_string_lossy())
    };
    if let Some(memory) = session.machine.memory {
        front.levels.insert("pages_seen".to_owned(), memory.bytes / 4096);
    }
    front.counters.insert("clients_refused".to_owned(), session.machine.clients_refused);
    add_egress(&mut front, session.egress);
    front
}

/// Adds the devices of a daemon, by guest, and the daemon itself.
fn add_daemon(sample: &mut Sample, socket: &Path, snapshot: Snapshot) {
    let Snapshot { daemon, vifs, disks } = snapshot;
    let mut guests = BTreeMap::<u16, (String, Vec<Item>)>::new();
    let devices = vifs.iter().map(|vif| (vif.domain, &vif.domain_name, vif_item(vif)));
    let disks = disks.iter().map(|disk| (disk.domain, &disk.domain_name, vbd_item(disk)));
    for (domain, name, item) in devices.chain(disks) {
        let (known, parts) = guests.entry(domain).or_default();
        if let Some(name) = name {
            known.clone_from(name);
        }
        parts.push(item);
    }
    let mut driver = Item::new(Kind::Driver, "serve", "");
    driver.counters = daemon.path;
    driver.rules = daemon.gone_rules;
    driver.place = socket.to_string_lossy().into_owned();
    driver.levels.insert("guests".to_owned(), guests.len() as u64);
    for (domain, (name, mut parts)) in guests {
        let name = if name.is_empty() { format!("domain {domain}") } else { name };
        let owner = format!("{domain} of {}", socket.display());
        for part in &mut parts {
            part.guest.clone_from(&name);
            part.owner.clone_from(&owner);
        }
        sample.add_guest(Item::new(Kind::Guest, &name, &owner), parts);
    }
    sample.items.push(driver);
}

fn vif_item(vif: &VifStatus) -> Item {
    let place = match &vif.attachment {
        Attachment::Switch => "switch",
        Attachment::Tap { bridge: Some(bridge), .. } => bridge,
        Attachment::Tap { interface, bridge: None } => interface,
    };
    let mut counters = summed(&vif.queues);
    let tap = vif.tap.iter().flatten();
    // The drops of the TAP's port are the host's, but those of its queue are frames for the guest.
    let prefix = |name: &str| if name == QUEUE_FULL { "" } else { "tap_" };
    counters.extend(tap.map(|(name, count)| (format!("{}{name}", prefix(name)), *count)));
    Item {
        place: place.to_owned(),
        counters,
        levels: vif.levels.clone(),
        rules: vif.rules.clone(),
        ..Item::new(Kind::Vif, &vif.name, "")
    }
}

fn vbd_item(disk: &VbdStatus) -> Item {
    Item {
        place: disk.storage.clone().unwrap_or_default(),
        counters: summed(&disk.queues),
        levels: disk.levels.clone(),
        rules: disk.rules.clone(),
        ..Item::new(Kind::Vbd, &disk.name, "")
    }
}

fn summed(queues: &[QueueStatus]) -> Counts {
    let mut sums = Counts::new();
    for (name, count) in queues.iter().flat_map(|queue| &queue.counters) {
        *sums.entry(name.clone()).or_default() += count;
    }
    sums
}

#[cfg(test)]
mod tests {
    use ringfence_driver::xen::status::DaemonStatus;

    use super::*;

    #[test]
    fn devices_of_a_daemon_are_items_of_their_guests() {
        let queue = |name: &str, n| QueueStatus { counters: Counts::from([(name.to_owned(), n)]) };
        let vif = VifStatus {
            name: "vif5.0".to_owned(),
            domain: 5,
            domain_name: Some("web".to_owned()),
            queues: vec![queue("rx_bytes", 3), queue("rx_bytes", 4)],
            tap: Some(
                [("drop_runt", 1), (QUEUE_FULL, 6)].map(|(name, n)| (name.to_owned(), n)).into(),
            ),
            ..VifStatus::default()
        };
        let disk = VbdStatus {
            name: "vbd6.0".to_owned(),
            domain: 6,
            storage: Some("/dev/vg/a".to_owned()),
            queues: vec![queue("read_bytes", 9)],
            ..VbdStatus::default()
        };
        let path = Counts::from([("grant_maps".to_owned(), 2)]);
        let daemon = DaemonStatus { path, ..DaemonStatus::default() };
        let mut sample = Sample { at: Instant::now(), items: vec![], remarks: vec![] };
        let snapshot = Snapshot { daemon, vifs: vec![vif], disks: vec![disk] };
        add_daemon(&mut sample, Path::new("/s"), snapshot);
        let of = |kind, name: &str| {
            let found = sample.items.iter().find(|item| item.kind == kind && item.name == name);
            found.unwrap_or_else(|| panic!("{name}: {:?}", sample.items))
        };
        assert_eq!(of(Kind::Guest, "web").total(&["sent_bytes"]), 7);
        assert_eq!(of(Kind::Guest, "domain 6").total(&["read_bytes"]), 9);
        let vif = of(Kind::Vif, "vif5.0");
        assert_eq!((vif.guest.as_str(), vif.owner.as_str()), ("web", "5 of /s"));
        assert_eq!((vif.total(&["tap_drop_runt"]), vif.drops()), (1, 6));
        assert_eq!(of(Kind::Vbd, "vbd6.0").place, "/dev/vg/a");
        let driver = of(Kind::Driver, "serve");
        assert_eq!((driver.total(&["grant_maps"]), driver.level(&["guests"])), (2, 2));
    }

    #[test]
    fn socket_without_listener_is_a_remark_and_the_default_one_none() {
        let directory = tempfile::tempdir().unwrap();
        let missing = directory.path().join("none");
        let mut sample = Sample { at: Instant::now(), items: vec![], remarks: vec![] };
        add_daemon_if_allowed(&mut sample, &missing);
        assert_eq!(sample.remarks, Vec::<String>::new());
        assert!(add_socket(&mut sample, &missing).is_err());
    }
}

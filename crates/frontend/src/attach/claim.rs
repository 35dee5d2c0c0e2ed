//! Choice of the device to serve, and its reset after an earlier frontend.

use std::path::Path;
use std::time::{Duration, Instant};

use ringfence_net::vif::values::parse_mac;
use ringfence_platform::DomId;
use ringfence_switch::forwarding::Mac;
use ringfence_wire::decimal;
use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::{self, DeviceId, DeviceKind, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

pub use ringfence_xenbus::end::backend_path;

/// Time for each step of a reset.
const STEP_TIMEOUT: Duration = Duration::from_secs(5);
/// Key of a disk's backend with the disk's name, which libxl writes and `blkif.h` does not name.
const DEV: &str = "dev";
/// Interval between two reads of a state.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Device that the user wants.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Wanted {
    /// Interface of a number, or the only one without a driver.
    Interface(Option<u32>),
    /// Disk by its name in the guest's configuration, such as `xvdb`, or by its number.
    Disk(String),
}

impl Wanted {
    fn kind(&self) -> DeviceKind {
        match self {
            Wanted::Interface(_) => DeviceKind::Vif,
            Wanted::Disk(_) => DeviceKind::Vbd,
        }
    }

    /// Returns the number or the name, unless any interface will do.
    fn word(&self) -> Option<String> {
        match self {
            Wanted::Interface(number) => number.map(|number| number.to_string()),
            Wanted::Disk(name) => Some(name.clone()),
        }
    }
}

/// Reasons for which no device can be served.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    #[error("xenstore: {0}")]
    Store(#[from] StoreError),
    #[error("this domain has no network interface: give it one (`vif = […]` in its configuration)")]
    NoInterface,
    #[error("this domain has no disk: give it one (`disk = […]` in its configuration)")]
    NoDisk,
    /// Domain has devices of the kind, but not the requested one.
    #[error("there is no {} {wanted}; there is: {there}", noun(*kind))]
    NotThere {
        kind: DeviceKind,
        wanted: String,
        /// Devices that exist.
        there: String,
    },
    /// Kernel's driver serves the device.
    #[error(
        "the kernel's driver has {} {name}; have it let go first: `echo {kind}-{number} > \
         /sys/bus/xen/drivers/{kind}/unbind`", noun(*kind), kind = kind.as_str()
    )]
    Bound { kind: DeviceKind, name: String, number: u32 },
    /// Kernel's driver serves all interfaces.
    #[error(
        "the kernel's driver has each of this domain's interfaces ({0}); have it let go of one first, \
         as in `echo vif-0 > /sys/bus/xen/drivers/vif/unbind`"
    )]
    AllBound(String),
    /// Several interfaces have no driver.
    #[error("no driver has interfaces {0}: say which, by --device")]
    Several(String),
    /// Directory lacks a key that every toolstack writes.
    #[error("{0} does not name its backend's domain: it is not as a toolstack makes it")]
    NoBackend(String),
}

/// Returns the word for a kind of device in messages.
fn noun(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Vif => "interface",
        DeviceKind::Vbd => "disk",
    }
}

/// Chosen device with the toolstack's keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Claimed {
    pub device: DeviceId,
    /// Backend's directory.
    pub backend: String,
    pub(super) mac: Option<Mac>,
    pub(super) mtu: Option<u16>,
}

/// Device of a kind that exists.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Present {
    number: u32,
    /// Name in the guest's configuration, or the number.
    name: String,
}

/// Finds the wanted device of a kind, or the only one that has no driver.
pub fn claim(store: &mut StoreClient, own: DomId, wanted: &Wanted) -> Result<Claimed, ClaimError> {
    let kind = wanted.kind();
    let names = store.directory_opt(&xenbus::frontend_root(own, kind))?.unwrap_or_default();
    let mut there = vec![];
    for number in names.iter().filter_map(|name| decimal::parse_u32(name.as_bytes()).ok()) {
        let name = name_of(store, (own, kind, number))?.unwrap_or_else(|| number.to_string());
        there.push(Present { number, name });
    }
    let number = choose(there, wanted, |number| is_bound(kind, number))?;
    let (device, backend) = ends(store, (own, kind, number))?;
    let front = device.frontend_path();
    let mac = store.read_opt(&format!("{front}/{}", keys::MAC))?;
    let mtu = store.read_opt(&format!("{front}/{}", keys::MTU))?;
    Ok(Claimed {
        device,
        backend,
        mac: mac.and_then(|text| parse_mac(&text).ok()),
        mtu: mtu.and_then(|text| decimal::parse_u16(&text).ok()),
    })
}

/// Returns the identity of a device, and its backend's directory.
fn ends(
    store: &mut StoreClient,
    (frontend, kind, handle): (DomId, DeviceKind, u32),
) -> Result<(DeviceId, String), ClaimError> {
    let front = format!("{}/{handle}", xenbus::frontend_root(frontend, kind));
    let backend = store.read_opt(&format!("{front}/{}", xenbus::BACKEND_ID))?;
    let backend = backend.and_then(|text| decimal::parse_u16(&text).ok());
    let backend = DomId(backend.ok_or(ClaimError::NoBackend(front))?);
    let device = DeviceId { kind, frontend, backend, handle };
    let directory = backend_path(store, &device)?;
    Ok((device, directory))
}

/// Returns the name of a disk, if its backend's directory has it. Interfaces have none.
fn name_of(
    store: &mut StoreClient,
    device: (DomId, DeviceKind, u32),
) -> Result<Option<String>, ClaimError> {
    if device.1 != DeviceKind::Vbd {
        return Ok(None);
    }
    let backend = match ends(store, device) {
        Ok((_, backend)) => backend,
        Err(ClaimError::NoBackend(_)) => return Ok(None),
        Err(error) => return Err(error),
    };
    match store.read_opt(&format!("{backend}/{DEV}")) {
        Ok(name) => {
            // The backend's domain may have written anything, and messages quote the name.
            let is_name = |name: &String| name.chars().all(|c| c.is_ascii_alphanumeric());
            Ok(name.and_then(|name| String::from_utf8(name).ok()).filter(is_name))
        }
        Err(StoreError::Refused { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Chooses among the devices `there`.
fn choose(
    mut there: Vec<Present>,
    wanted: &Wanted,
    is_bound: impl Fn(u32) -> bool,
) -> Result<u32, ClaimError> {
    let kind = wanted.kind();
    there.sort_unstable_by_key(|device| device.number);
    if there.is_empty() {
        return Err(match kind {
            DeviceKind::Vif => ClaimError::NoInterface,
            DeviceKind::Vbd => ClaimError::NoDisk,
        });
    }
    if let Some(word) = wanted.word() {
        let is_it = |device: &Present| device.name == word || device.number.to_string() == word;
        return match there.iter().position(is_it).map(|at| there.swap_remove(at)) {
            None => Err(ClaimError::NotThere { kind, wanted: word, there: listed(&there) }),
            Some(Present { name, number }) if is_bound(number) => {
                Err(ClaimError::Bound { kind, name, number })
            }
            Some(Present { number, .. }) => Ok(number),
        };
    }
    let is_free = |device: &&Present| !is_bound(device.number);
    let free: Vec<Present> = there.iter().filter(is_free).cloned().collect();
    match &free[..] {
        [one] => Ok(one.number),
        [] => Err(ClaimError::AllBound(listed(&there))),
        _ => Err(ClaimError::Several(listed(&free))),
    }
}

fn listed(devices: &[Present]) -> String {
    devices.iter().map(|device| device.name.as_str()).collect::<Vec<_>>().join(", ")
}

/// Returns `true` if the kernel's driver serves the device.
fn is_bound(kind: DeviceKind, number: u32) -> bool {
    Path::new(&format!("/sys/bus/xen/devices/{}-{number}/driver", kind.as_str())).exists()
}

/// Resets the states of both ends to the start of the handshake. The backend may still use the rings of an
/// earlier frontend that was killed, so it has to disconnect first. `backend` is the backend's directory.
pub fn reset(store: &mut StoreClient, device: &DeviceId, backend: &str) -> Result<(), ClaimError> {
    if state(store, &device.frontend_path())? == Some(XenbusState::Initialising) {
        return Ok(());
    }
    enter(store, device, XenbusState::Closing)?;
    await_backend_disconnect(store, backend, Instant::now() + STEP_TIMEOUT)?;
    enter(store, device, XenbusState::Closed)?;
    // A backend that is still closing would count the next state as the end of that.
    await_backend_closed(store, backend, Instant::now() + STEP_TIMEOUT)?;
    enter(store, device, XenbusState::Initialising)?;
    // A frontend that finds its backend closed closes as well, and then each would wait for the other.
    let offers = |state| !matches!(state, Some(XenbusState::Closing | XenbusState::Closed));
    await_backend(store, backend, Instant::now() + STEP_TIMEOUT, offers).map(drop)
}

/// Waits until the backend uses no granted page. Returns `false` if it still does at `until`.
pub fn await_backend_disconnect(
    store: &mut StoreClient,
    backend: &str,
    until: Instant,
) -> Result<bool, ClaimError> {
    let in_use = [XenbusState::Initialised, XenbusState::Connected, XenbusState::Reconfiguring];
    await_backend(store, backend, until, |state| {
        !state.is_some_and(|state| in_use.contains(&state))
    })
}

/// Waits until the backend has closed the device, after this end has. Returns `false` if it has not at `until`.
pub fn await_backend_closed(
    store: &mut StoreClient,
    backend: &str,
    until: Instant,
) -> Result<bool, ClaimError> {
    let closed = |state| !matches!(state, Some(XenbusState::Closing | XenbusState::Connected));
    await_backend(store, backend, until, closed)
}

fn await_backend(
    store: &mut StoreClient,
    backend: &str,
    until: Instant,
    reached: impl Fn(Option<XenbusState>) -> bool,
) -> Result<bool, ClaimError> {
    loop {
        if reached(state(store, backend)?) {
            return Ok(true);
        }
        if Instant::now() >= until {
            return Ok(false);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn state(store: &mut StoreClient, directory: &str) -> Result<Option<XenbusState>, ClaimError> {
    let text = match store.read_opt(&format!("{directory}/{}", xenbus::STATE)) {
        Ok(text) => text,
        // Access was withdrawn, so the directory counts as missing.
        Err(StoreError::Refused { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    Ok(text.map(|text| XenbusState::parse(&text).unwrap_or(XenbusState::Missing)))
}

fn enter(store: &mut StoreClient, device: &DeviceId, state: XenbusState) -> Result<(), ClaimError> {
    let path = format!("{}/{}", device.frontend_path(), xenbus::STATE);
    Ok(store.write(&path, state.to_string())?)
}

#[cfg(test)]
mod tests {
    use ringfence_platform::Platform as _;
    use ringfence_platform::local::LocalPlatform;
    use ringfence_platform::local::hub::{Hub, HubLimits};

    use super::*;

    #[test]
    fn reset_waits_until_closed_backend_offers_device_again() {
        let (thread, hub) = Hub::new(HubLimits::default()).unwrap();
        std::thread::spawn(move || thread.run().unwrap());
        let platform = LocalPlatform::connect(hub.admit(Some(DomId(0)), true).unwrap().1).unwrap();
        let (mut store, mut own) = (platform.store().unwrap(), platform.store().unwrap());
        let kind = DeviceKind::Vif;
        let device = DeviceId { kind, frontend: DomId(1), backend: DomId(0), handle: 0 };
        let back = format!("{}/{}", device.backend_path(), xenbus::STATE);
        store.write(&back, XenbusState::Closed.to_string()).unwrap();
        enter(&mut store, &device, XenbusState::Closed).unwrap();
        let slow = std::thread::spawn(move || {
            while state(&mut own, &device.frontend_path()).unwrap()
                != Some(XenbusState::Initialising)
            {
                std::thread::sleep(POLL_INTERVAL);
            }
            std::thread::sleep(POLL_INTERVAL * 5);
            own.write(&back, XenbusState::InitWait.to_string()).unwrap();
        });
        reset(&mut store, &device, &device.backend_path()).unwrap();
        let offered = state(&mut store, &device.backend_path()).unwrap();
        assert_eq!(offered, Some(XenbusState::InitWait));
        slow.join().unwrap();
        hub.stop();
    }

    #[test]
    fn backend_directory_is_that_of_key_unless_it_leaves_backend_domain() {
        let (thread, hub) = Hub::new(HubLimits::default()).unwrap();
        std::thread::spawn(move || thread.run().unwrap());
        let platform = LocalPlatform::connect(hub.admit(Some(DomId(0)), true).unwrap().1).unwrap();
        let mut store = platform.store().unwrap();
        let (kind, own) = (DeviceKind::Vif, DomId(1));
        let device = DeviceId { kind, frontend: own, backend: DomId(0), handle: 0 };
        let front = device.frontend_path();
        store.write(&format!("{front}/{}", xenbus::BACKEND_ID), "0").unwrap();
        let mut found = |key: Option<&str>| {
            if let Some(path) = key {
                store.write(&format!("{front}/{}", xenbus::BACKEND), path).unwrap();
            }
            claim(&mut store, own, &Wanted::Interface(Some(0))).unwrap().backend
        };
        assert_eq!(found(None), device.backend_path());
        let qemu = "/local/domain/0/backend/qnic/1/0";
        assert_eq!(found(Some(qemu)), qemu);
        for other in ["", "/local/domain/2/backend/vif/1/0", "/local/domain/0/device/vif/0"] {
            assert_eq!(found(Some(other)), device.backend_path(), "{other}");
        }
        hub.stop();
    }

    #[test]
    fn disk_is_found_by_name_and_by_number() {
        let (thread, hub) = Hub::new(HubLimits::default()).unwrap();
        std::thread::spawn(move || thread.run().unwrap());
        let platform = LocalPlatform::connect(hub.admit(Some(DomId(0)), true).unwrap().1).unwrap();
        let mut store = platform.store().unwrap();
        let (kind, own) = (DeviceKind::Vbd, DomId(1));
        for (handle, name) in [(51712, Some("xvda")), (51728, None), (51744, Some("\u{1b}[2J"))] {
            let device = DeviceId { kind, frontend: own, backend: DomId(0), handle };
            let front = device.frontend_path();
            store.write(&format!("{front}/{}", xenbus::BACKEND_ID), "0").unwrap();
            if let Some(name) = name {
                store.write(&format!("{}/{DEV}", device.backend_path()), name).unwrap();
            }
        }
        let mut found = |name: &str| {
            let claimed = claim(&mut store, own, &Wanted::Disk(name.to_owned()));
            claimed.map(|claimed| claimed.device.handle).map_err(|error| error.to_string())
        };
        assert_eq!(
            [found("xvda"), found("51712"), found("51728")],
            [Ok(51712), Ok(51712), Ok(51728)]
        );
        assert_eq!(
            found("xvdb"),
            Err("there is no disk xvdb; there is: xvda, 51728, 51744".to_owned())
        );
        hub.stop();
    }

    #[test]
    fn device_without_driver_is_chosen_and_ambiguity_refused() {
        let chosen = |there: &[u32], wanted, bound: &[u32]| {
            let present = |number: &u32| Present { number: *number, name: number.to_string() };
            let there = there.iter().map(present).collect();
            let chosen = choose(there, &Wanted::Interface(wanted), |n| bound.contains(&n));
            chosen.map_err(|error| error.to_string())
        };
        assert_eq!(chosen(&[1, 0, 2], None, &[0, 2]), Ok(1));
        assert_eq!(chosen(&[0, 1], Some(1), &[0]), Ok(1));
        let refused = |there: &[u32], wanted, bound: &[u32], part: &str| {
            let why = chosen(there, wanted, bound).unwrap_err();
            assert!(why.contains(part), "{why}");
        };
        refused(&[], None, &[], "no network interface: give it one (`vif = […]`");
        refused(&[], Some(0), &[], "no network interface");
        refused(&[0], Some(3), &[], "no interface 3; there is: 0");
        refused(&[0], Some(0), &[0], "`echo vif-0 > /sys/bus/xen/drivers/vif/unbind`");
        refused(&[0, 1], None, &[0, 1], "(0, 1)");
        refused(&[0, 1], None, &[], "interfaces 0, 1: say which, by --device");
    }
}

//! Choice of the vif to serve, and its reset after an earlier frontend.

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
/// Interval between two reads of a state.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Reasons for which no vif can be served.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    #[error("xenstore: {0}")]
    Store(#[from] StoreError),
    #[error("this domain has no network interface: give it one (`vif = […]` in its configuration)")]
    NoVif,
    /// Domain has interfaces, but not the requested one.
    #[error("there is no interface {wanted}; there is: {there}")]
    NoSuchVif {
        wanted: u32,
        /// Numbers of the interfaces that exist.
        there: String,
    },
    /// Kernel's driver serves the interface.
    #[error(
        "the kernel's driver has interface {0}; have it let go first: `echo vif-{0} > \
         /sys/bus/xen/drivers/vif/unbind`"
    )]
    Bound(u32),
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

/// Chosen vif with the toolstack's keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Claimed {
    pub device: DeviceId,
    /// Backend's directory.
    pub backend: String,
    pub(super) mac: Option<Mac>,
    pub(super) mtu: Option<u16>,
}

/// Finds the requested vif, or the only one that has no driver.
pub fn claim(
    store: &mut StoreClient,
    own: DomId,
    wanted: Option<u32>,
) -> Result<Claimed, ClaimError> {
    let root = xenbus::frontend_root(own, DeviceKind::Vif);
    let names = store.directory_opt(&root)?.unwrap_or_default();
    let numbers = names.iter().filter_map(|name| decimal::parse_u32(name.as_bytes()).ok());
    let handle = choose(numbers.collect(), wanted, is_bound)?;
    let front = format!("{root}/{handle}");
    let backend = store.read_opt(&format!("{front}/{}", xenbus::BACKEND_ID))?;
    let backend = backend.and_then(|text| decimal::parse_u16(&text).ok());
    let backend = DomId(backend.ok_or_else(|| ClaimError::NoBackend(front.clone()))?);
    let device = DeviceId { kind: DeviceKind::Vif, frontend: own, backend, handle };
    let mac = store.read_opt(&format!("{front}/{}", keys::MAC))?;
    let mtu = store.read_opt(&format!("{front}/{}", keys::MTU))?;
    Ok(Claimed {
        device,
        backend: backend_path(store, &device)?,
        mac: mac.and_then(|text| parse_mac(&text).ok()),
        mtu: mtu.and_then(|text| decimal::parse_u16(&text).ok()),
    })
}

/// Chooses among the vifs `there`.
fn choose(
    mut there: Vec<u32>,
    wanted: Option<u32>,
    is_bound: impl Fn(u32) -> bool,
) -> Result<u32, ClaimError> {
    there.sort_unstable();
    match wanted {
        _ if there.is_empty() => Err(ClaimError::NoVif),
        Some(wanted) if !there.contains(&wanted) => {
            Err(ClaimError::NoSuchVif { wanted, there: listed(&there) })
        }
        Some(wanted) if is_bound(wanted) => Err(ClaimError::Bound(wanted)),
        Some(wanted) => Ok(wanted),
        None => {
            let free: Vec<u32> = there.iter().copied().filter(|n| !is_bound(*n)).collect();
            match free[..] {
                [one] => Ok(one),
                [] => Err(ClaimError::AllBound(listed(&there))),
                _ => Err(ClaimError::Several(listed(&free))),
            }
        }
    }
}

fn listed(numbers: &[u32]) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

/// Returns `true` if the kernel's driver serves the vif.
fn is_bound(handle: u32) -> bool {
    Path::new(&format!("/sys/bus/xen/devices/vif-{handle}/driver")).exists()
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
    let closed = |state| !matches!(state, Some(XenbusState::Closing | XenbusState::Connected));
    await_backend(store, backend, Instant::now() + STEP_TIMEOUT, closed)?;
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
            claim(&mut store, own, Some(0)).unwrap().backend
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
    fn vif_without_driver_is_chosen_and_ambiguity_refused() {
        let chosen = |there: &[u32], wanted, bound: &[u32]| {
            choose(there.to_vec(), wanted, |n| bound.contains(&n)).map_err(|e| e.to_string())
        };
        assert_eq!(chosen(&[1, 0, 2], None, &[0, 2]), Ok(1));
        assert_eq!(chosen(&[0, 1], Some(1), &[0]), Ok(1));
        let refused = |there: &[u32], wanted, bound: &[u32], part: &str| {
            let why = chosen(there, wanted, bound).unwrap_err();
            assert!(why.contains(part), "{why}");
        };
        refused(&[], None, &[], "no network interface");
        refused(&[], Some(0), &[], "no network interface");
        refused(&[0], Some(3), &[], "no interface 3; there is: 0");
        refused(&[0], Some(0), &[0], "echo vif-0 >");
        refused(&[0, 1], None, &[0, 1], "(0, 1)");
        refused(&[0, 1], None, &[], "--device");
    }
}

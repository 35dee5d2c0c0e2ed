//! The kernel's Xen devices: opening them, and errors that say what to do when one is missing.

// #syscall daemon openat: devices of Xen, as guests come
// #syscall daemon socket 0=AF_UNIX: the store
// #syscall daemon connect: the store

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use ringfence_sys::prerequisite::{
    Prerequisite, XEN_EVTCHN, XEN_GNTALLOC, XEN_GNTDEV, XEN_WINDOW, XENSTORE, with_doctor,
};

use crate::error::PlatformError;

/// Xen device that Linux offers to user space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum XenDevice {
    /// Access to pages that other domains grant: for a backend.
    Gntdev,
    /// Granting of pages to other domains: for a frontend.
    Gntalloc,
    Evtchn,
    /// Grant windows, on a hypervisor that has them.
    Window,
}

impl XenDevice {
    /// Returns the device's entry in the table of prerequisites.
    pub fn prerequisite(self) -> &'static Prerequisite {
        match self {
            XenDevice::Gntdev => &XEN_GNTDEV,
            XenDevice::Gntalloc => &XEN_GNTALLOC,
            XenDevice::Evtchn => &XEN_EVTCHN,
            XenDevice::Window => &XEN_WINDOW,
        }
    }

    /// Checks that this process may open the device.
    ///
    /// # Errors
    ///
    /// Returns a [`DeviceError`]; its text says what to do.
    pub fn check(self) -> Result<(), DeviceError> {
        self.open().map(drop)
    }

    /// Opens the device for one use.
    pub(super) fn open(self) -> Result<OwnedFd, DeviceError> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let own = self.prerequisite();
        rustix::fs::open(own.object, flags, Mode::empty())
            .map_err(|errno| DeviceError::of(own.object, Some(own), errno, on_xen()))
    }
}

/// Reasons for which a device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// No hypervisor, or one that is not Xen.
    #[error("{}", with_doctor(&format!(
        "{path} does not exist, and neither does /sys/hypervisor/type say `xen`: this system does \
         not run on Xen. Without a hypervisor there is `ringfence run`"
    )))]
    NotXen {
        /// Device node that was tried first.
        path: &'static str,
    },
    #[error("{}", .0.missing())]
    Missing(&'static Prerequisite),
    #[error("{}", .0.denied())]
    Denied(&'static Prerequisite),
    /// Failure to open the node for another reason.
    #[error("{path} cannot be opened: {source}")]
    Open { path: &'static str, source: io::Error },
    /// Failure of every way to the store.
    #[error("{}", with_doctor(&format!("no way to xenstore: {device}; {socket}. {}", XENSTORE.enable)))]
    NoStore { device: Box<DeviceError>, socket: Box<DeviceError> },
    /// Missing or invalid number of this domain in the store.
    #[error(
        "xenstore does not say which domain this is (the node `domid`): {why}. In dom0, run \
         `xen-init-dom0`"
    )]
    NoDomId {
        /// Error on reading the number.
        why: ringfence_xenstore::StoreError,
    },
}

impl DeviceError {
    fn of(
        path: &'static str,
        entry: Option<&'static Prerequisite>,
        errno: Errno,
        on_xen: bool,
    ) -> DeviceError {
        match (errno, entry) {
            (Errno::NOENT | Errno::NODEV | Errno::NXIO, _) if !on_xen => {
                DeviceError::NotXen { path }
            }
            (Errno::NOENT | Errno::NODEV | Errno::NXIO, Some(entry)) => DeviceError::Missing(entry),
            (Errno::ACCESS | Errno::PERM, Some(entry)) => DeviceError::Denied(entry),
            (other, _) => DeviceError::Open { path, source: other.into() },
        }
    }
}

impl From<DeviceError> for PlatformError {
    fn from(error: DeviceError) -> PlatformError {
        PlatformError::Device(error.into())
    }
}

/// Returns `true` if the kernel reports that it runs on Xen, or if /sys is not mounted. The result only
/// selects between two messages.
fn on_xen() -> bool {
    match std::fs::read_to_string("/sys/hypervisor/type") {
        Ok(kind) => kind.trim_end() == "xen",
        Err(_) => !Path::new("/sys/kernel").exists(),
    }
}

/// Store device of a guest: a byte stream that takes one message at a time.
const XENBUS: &str = XENSTORE.object;

/// Sockets of xenstored in dom0.
const SOCKETS: [&str; 2] = ["/run/xenstored/socket", "/var/run/xenstored/socket"];

/// Files by which a domain connects to xenstored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoreWay {
    /// The kernel's device, in the name of this domain.
    Device,
    /// The daemon's socket; the daemon treats every client as dom0.
    Socket,
}

/// Checks that this process can connect to the store.
///
/// # Errors
///
/// Returns a [`DeviceError`]; its text says what to do.
pub fn check_store() -> Result<(), DeviceError> {
    open_store().map(drop)
}

/// Opens a new connection to the store.
pub(super) fn open_store() -> Result<(OwnedFd, StoreWay), DeviceError> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let device = match rustix::fs::open(XENBUS, flags, Mode::empty()) {
        Ok(fd) => return Ok((fd, StoreWay::Device)),
        Err(errno) => DeviceError::of(XENBUS, None, errno, on_xen()),
    };
    let mut refusal = None;
    for path in SOCKETS {
        match connect(path) {
            Ok(fd) => return Ok((fd, StoreWay::Socket)),
            Err(errno) => {
                refusal.get_or_insert_with(|| DeviceError::of(path, None, errno, true));
            }
        }
    }
    match (device, refusal) {
        (DeviceError::NotXen { path }, _) => Err(DeviceError::NotXen { path }),
        (device, Some(socket)) => {
            Err(DeviceError::NoStore { device: device.into(), socket: socket.into() })
        }
        (device, None) => Err(device),
    }
}

fn connect(path: &str) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_for_missing_device_names_node_and_module() {
        for device in [XenDevice::Gntdev, XenDevice::Gntalloc, XenDevice::Evtchn, XenDevice::Window]
        {
            let own = device.prerequisite();
            let said = DeviceError::of(own.object, Some(own), Errno::NOENT, true).to_string();
            let module = own.object.rsplit('/').next().unwrap();
            assert!(said.contains(own.object) && said.contains(module), "{said}");
            assert!(said.contains("`modprobe "), "{said}");
        }
    }

    #[test]
    fn error_without_xen_says_so_and_names_no_module() {
        let said = DeviceError::of("/dev/xen/gntdev", Some(&XEN_GNTDEV), Errno::NOENT, false);
        let said = said.to_string();
        assert!(said.contains("does not run on Xen") && !said.contains("modprobe"), "{said}");
    }

    #[test]
    fn error_for_denied_device_names_no_module() {
        for errno in [Errno::ACCESS, Errno::PERM] {
            let said = DeviceError::of("/dev/xen/evtchn", Some(&XEN_EVTCHN), errno, true);
            let said = said.to_string();
            assert!(said.contains("permission denied") && !said.contains("modprobe"), "{said}");
        }
    }

    #[test]
    fn error_without_store_names_device_and_socket() {
        let device = DeviceError::of(XENBUS, None, Errno::NOENT, true).into();
        let socket = DeviceError::of(SOCKETS[0], None, Errno::CONNREFUSED, true).into();
        let said = DeviceError::NoStore { device, socket }.to_string();
        assert!(said.contains(XENBUS) && said.contains(SOCKETS[0]), "{said}");
        assert!(said.contains("is xenstored running?"), "{said}");
    }
}

//! Checks of the prerequisites, one function for each.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;

use ringfence_block::storage::file::check_uring;
use ringfence_hostnet::text::byte_count;
use ringfence_platform::vhost::{self, VhostError};
use ringfence_platform::xen::{self, DeviceError, XenDevice};
use ringfence_sandbox::cgroup::Hierarchies;
use ringfence_sandbox::ids::is_host_root;
use ringfence_sandbox::namespace_settings::{self, Obstacle};
use ringfence_sys::nbd::NbdDevice;
use ringfence_sys::prerequisite::{
    CGROUP, GUEST, HUGE_PAGES, IO_URING, LOCKED_MEMORY, LOW_PORTS, NBD, OPEN_FILES, PING,
    Prerequisite, TUN, USER_NAMESPACES, VHOST_NET, XEN_EVTCHN, XEN_GNTALLOC, XEN_GNTDEV,
    XEN_NETBACK, XEN_WINDOW, XENSTORE,
};
use ringfence_sys::tap::{self, TapError};
use rustix::process::{Resource, getrlimit};

use super::{Finding, Row, State, trial};

/// Limit of open files with which a guest has room for a few thousand connections: the kernel's own hard limit.
const OPEN_FILES_ENOUGH: u64 = 4096;
/// Port that only a privileged process may use.
const LOW_PORT: u16 = 1;

/// Check of a prerequisite. It sees the rows before its own.
type Check = fn(&[Row]) -> Finding;

/// The prerequisites with their checks, in the order of the table.
pub(super) const ALL: [(&Prerequisite, Check); 18] = [
    (&USER_NAMESPACES, user_namespaces),
    (&TUN, tun),
    (&GUEST, guest),
    (&PING, ping),
    (&LOW_PORTS, low_ports),
    (&CGROUP, cgroup),
    (&OPEN_FILES, open_files),
    (&LOCKED_MEMORY, locked_memory),
    (&HUGE_PAGES, huge_pages),
    (&IO_URING, io_uring),
    (&NBD, nbd),
    (&VHOST_NET, vhost_net),
    (&XENSTORE, |_| xen_device(xen::check_store())),
    (&XEN_EVTCHN, |_| xen_device(XenDevice::Evtchn.check())),
    (&XEN_GNTDEV, |_| xen_device(XenDevice::Gntdev.check())),
    (&XEN_GNTALLOC, |_| xen_device(XenDevice::Gntalloc.check())),
    (&XEN_WINDOW, |_| xen_device(XenDevice::Window.check())),
    (&XEN_NETBACK, xen_netback),
];

fn user_namespaces(_: &[Row]) -> Finding {
    let restriction = namespace_settings::obstacle();
    match (namespace_settings::attempt(), restriction) {
        (Ok(()), None) => Finding::usable("can be made by this user"),
        // Root, and a program with a profile of AppArmor, are excepted.
        (Ok(()), Some(Obstacle { problem, .. })) => {
            Finding::usable(format!("can be made by this user, although {problem}"))
        }
        (Err(error), _) => {
            let Obstacle { problem, remedy } = Obstacle::of(&error);
            Finding::missing(format!("{problem} ({error})")).with_remedy(remedy)
        }
    }
}

/// Describes a device node that does not exist or may not be opened.
fn device(entry: &Prerequisite, is_denied: bool) -> Finding {
    if is_denied {
        let found = format!("{}: permission denied", entry.object);
        return Finding::missing(found).with_remedy(entry.remedy_of_denial());
    }
    Finding::missing(format!("{} does not exist", entry.object))
}

fn tun(_: &[Row]) -> Finding {
    match tap::check_device() {
        Ok(()) => Finding::usable(TUN.object),
        Err(TapError::Missing) => device(&TUN, false),
        Err(TapError::Denied) => device(&TUN, true),
        Err(error) => Finding::missing(error.to_string()),
    }
}

fn guest(before: &[Row]) -> Finding {
    let lacking = before.iter().find(|row| row.required && row.state != State::Usable);
    match lacking {
        Some(row) => Finding::missing(format!("not tried without this: {}", row.title)),
        None => match trial::start_guest() {
            Ok(()) => Finding::usable("its command ran"),
            Err(why) => Finding::missing(why),
        },
    }
}

fn ping(_: &[Row]) -> Finding {
    match ringfence_uplink::host::real::echo_is_denied() {
        false => Finding::usable("echo requests may be sent"),
        true => Finding::missing(setting(&PING)),
    }
}

fn low_ports(_: &[Row]) -> Finding {
    let bound = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, LOW_PORT));
    match bound.map_err(|error| error.kind()) {
        Err(ErrorKind::PermissionDenied) => Finding::limited(setting(&LOW_PORTS)),
        _ => Finding::usable("may be published"),
    }
}

fn cgroup(_: &[Row]) -> Finding {
    match Hierarchies::read().obstacle() {
        None => Finding::usable("limits of guests can be set"),
        Some(why) => Finding::missing(why),
    }
}

fn open_files(_: &[Row]) -> Finding {
    match getrlimit(Resource::Nofile).maximum {
        Some(limit) if limit < OPEN_FILES_ENOUGH => Finding::limited(format!("{limit} at most")),
        Some(limit) => Finding::usable(limit.to_string()),
        None => Finding::usable("unlimited"),
    }
}

fn locked_memory(_: &[Row]) -> Finding {
    match getrlimit(Resource::Memlock).maximum {
        _ if is_host_root().unwrap_or(false) => Finding::usable("unlimited for root"),
        Some(limit) if limit < xen::LOCKED_MAX => {
            Finding::limited(format!("{} at most", byte_count(limit)))
        }
        Some(limit) => Finding::usable(byte_count(limit)),
        None => Finding::usable("unlimited"),
    }
}

fn huge_pages(_: &[Row]) -> Finding {
    let Ok(text) = std::fs::read_to_string(HUGE_PAGES.object) else {
        return Finding::missing("this kernel has none");
    };
    match selected(&text) {
        Some(value @ ("never" | "deny")) => Finding::missing(format!("shmem_enabled is `{value}`")),
        value => Finding::usable(format!("shmem_enabled is `{}`", value.unwrap_or_default())),
    }
}

/// Returns the selected one of several values: the one in brackets.
fn selected(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(value, _)| value)
}

fn io_uring(_: &[Row]) -> Finding {
    match check_uring() {
        Ok(()) => Finding::usable("a ring can be set up"),
        Err(error) => Finding::missing(format!("{}: {error}", setting(&IO_URING))),
    }
}

fn nbd(_: &[Row]) -> Finding {
    if !NbdDevice::exist() {
        return device(&NBD, false);
    }
    if !rustix::process::geteuid().is_root() {
        return Finding::missing("this user is not root").with_remedy(NBD.permit);
    }
    Finding::usable(NBD.object)
}

fn vhost_net(_: &[Row]) -> Finding {
    match vhost::open() {
        Ok(_) => Finding::usable(VHOST_NET.object),
        Err(VhostError::Missing) => device(&VHOST_NET, false),
        Err(VhostError::Denied) => device(&VHOST_NET, true),
        Err(error) => Finding::missing(error.to_string()),
    }
}

fn xen_device(checked: Result<(), DeviceError>) -> Finding {
    match checked {
        Ok(()) => Finding::usable("can be opened"),
        Err(DeviceError::NotXen { .. }) => {
            Finding::new(State::NotApplicable, "this system does not run on Xen")
        }
        Err(DeviceError::Missing(entry)) => device(entry, false),
        Err(DeviceError::Denied(entry)) => device(entry, true),
        Err(DeviceError::NoStore { device, socket }) => {
            Finding::missing(format!("{device}; {socket}"))
        }
        Err(error) => Finding::missing(error.to_string()),
    }
}

fn xen_netback(_: &[Row]) -> Finding {
    match Path::new(XEN_NETBACK.object).exists() {
        false => Finding::usable("it is not loaded"),
        true => Finding::limited("it is loaded"),
    }
}

/// Describes a setting of sysctl(8) and its value.
fn setting(entry: &Prerequisite) -> String {
    let value = namespace_settings::value(entry.object).unwrap_or_else(|| "unknown".to_owned());
    let value: Vec<&str> = value.split_whitespace().collect();
    format!("{} is {}", entry.object, value.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selected_value_is_the_one_in_brackets() {
        assert_eq!(selected("always [never] deny"), Some("never"));
        assert_eq!(selected("never"), None);
    }

    #[test]
    fn guest_is_not_tried_without_what_it_needs() {
        let row = Row::of(&TUN, device(&TUN, true));
        assert_eq!(row.found, "/dev/net/tun: permission denied");
        assert_eq!(row.enable.as_deref(), Some(TUN.permit));
        assert_eq!(guest(&[row]), Finding::missing("not tried without this: TAP devices"));
    }

    #[test]
    fn device_without_xen_is_not_applicable() {
        let finding = xen_device(Err(DeviceError::NotXen { path: XENSTORE.object }));
        assert_eq!(finding.state, State::NotApplicable);
        let finding = xen_device(Err(DeviceError::Denied(&XEN_GNTDEV)));
        assert_eq!(finding.remedy.as_deref(), Some(XEN_GNTDEV.permit));
    }
}

//! TAP interfaces: Ethernet interfaces of Linux that a process reads and writes as files (`if_tun.h`).
//!
//! An interface is created in the network namespace of the caller. It disappears when the last copy of
//! its descriptor is closed, unless it is kept ([`Tap::keep`]). Every frame read or written is preceded by a virtio-net header of
//! [`VNET_HEADER_LEN`] bytes, little-endian.

// #syscall daemon openat: a TAP for a guest that comes
// #syscall daemon ioctl 1=0x400454ca: TUNSETIFF: a TAP
// #syscall daemon ioctl 1=0x400454cb: TUNSETPERSIST: that it outlives the daemon
// #syscall daemon ioctl 1=0x400454d0: TUNSETOFFLOAD: what is left to the reader
// #syscall daemon ioctl 1=0x400454d4: TUNSETSNDBUF: that nothing is held back
// #syscall daemon ioctl 1=0x400454d8: TUNSETVNETHDRSZ: headers of 12 bytes
// #syscall daemon ioctl 1=0x400454dc: TUNSETVNETLE: little-endian ones

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use ringfence_base::prerequisite::TUN;
use rustix::fs::{Mode, OFlags};

/// Length in bytes of the virtio-net header before each frame (with `num_buffers`, as in virtio 1.x).
pub const VNET_HEADER_LEN: usize = VNET_HEADER_LEN_U8 as usize;
const VNET_HEADER_LEN_U8: u8 = 12;

/// Maximum queues of an interface (`MAX_TAP_QUEUES` of the driver).
pub const QUEUES_MAX: usize = 256;

/// Maximum length of an interface's name in bytes (`IFNAMSIZ` less the final zero).
pub const NAME_MAX: usize = 15;

const PATH: &str = TUN.object;

const IFF_TAP: u16 = 0x0002;
const IFF_MULTI_QUEUE: u16 = 0x0100;
const IFF_NO_PI: u16 = 0x1000;
const IFF_VNET_HDR: u16 = 0x4000;

const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETPERSIST: libc::c_ulong = 0x4004_54cb;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const TUNSETSNDBUF: libc::c_ulong = 0x4004_54d4;
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
const TUNSETVNETLE: libc::c_ulong = 0x4004_54dc;

/// Offloads that the kernel may leave to the reader of a TAP file: checksums and segmentation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TapOffloads(pub u32);

impl TapOffloads {
    /// Checksums may be left to the reader (`TUN_F_CSUM`).
    pub const CSUM: TapOffloads = TapOffloads(0x01);
    /// TCP over IPv4 may be left whole (`TUN_F_TSO4`).
    pub const TSO4: TapOffloads = TapOffloads(0x02);
    /// TCP over IPv6 may be left whole (`TUN_F_TSO6`).
    pub const TSO6: TapOffloads = TapOffloads(0x04);
    /// Whole TCP packets may carry CWR (`TUN_F_TSO_ECN`).
    pub const TSO_ECN: TapOffloads = TapOffloads(0x08);
    /// UDP over IPv4 may be left whole (`TUN_F_USO4`, Linux 6.2; only together with `USO6`).
    pub const USO4: TapOffloads = TapOffloads(0x20);
    /// UDP over IPv6 may be left whole (`TUN_F_USO6`).
    pub const USO6: TapOffloads = TapOffloads(0x40);

    /// Returns `true` if this set contains all of `other`.
    pub const fn contains(self, other: TapOffloads) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the union of both sets.
    #[must_use]
    pub const fn union(self, other: TapOffloads) -> TapOffloads {
        TapOffloads(self.0 | other.0)
    }

    const fn intersection(self, other: TapOffloads) -> TapOffloads {
        TapOffloads(self.0 & other.0)
    }
}

const TCP: TapOffloads =
    TapOffloads::CSUM.union(TapOffloads::TSO4).union(TapOffloads::TSO6).union(TapOffloads::TSO_ECN);

/// Sets to offer to the kernel, the largest first. The kernel refuses a set with an unknown bit.
const ATTEMPTS: [TapOffloads; 5] = [
    TCP.union(TapOffloads::USO4).union(TapOffloads::USO6),
    TCP,
    TapOffloads::CSUM.union(TapOffloads::TSO4).union(TapOffloads::TSO6),
    TapOffloads::CSUM,
    TapOffloads(0),
];

/// One queue of a TAP interface.
#[derive(Debug)]
pub struct Tap {
    /// File from which frames are read and to which they are written; non-blocking.
    pub fd: OwnedFd,
    /// Name of the interface. It differs from the requested name if that ended in `%d`.
    pub name: String,
    /// Offloads that the kernel accepted.
    pub offloads: TapOffloads,
}

/// Errors of opening or configuring a TAP interface.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The device node is missing.
    #[error("{}", TUN.missing())]
    Missing,
    /// The caller has no permission to open the device node.
    #[error("{}", TUN.denied())]
    Denied,
    /// Opening the device node failed for another reason.
    #[error("{PATH} cannot be opened: {0}")]
    Open(#[source] io::Error),
    /// Name that no interface can have.
    #[error("`{name}` cannot name an interface: 1 to {NAME_MAX} bytes, no `/` and no white space")]
    Name { name: String },
    /// Number of queues that no interface can have.
    #[error("an interface has 1 to {QUEUES_MAX} queues, not {queues}")]
    Queues { queues: usize },
    /// An interface of that name exists already.
    #[error("an interface `{name}` exists already, or is not a TAP of yours")]
    Taken { name: String },
    /// The caller lacks `CAP_NET_ADMIN` in the network namespace.
    #[error("interface `{name}` cannot be made: this needs CAP_NET_ADMIN in the network namespace")]
    NotAdmin { name: String },
    /// The kernel refused a setting.
    #[error("{what}: {source}")]
    Setting { what: &'static str, source: io::Error },
}

impl Tap {
    /// Creates an interface `name` in the caller's network namespace.
    ///
    /// # Errors
    ///
    /// Returns a [`TapError`]; its text says what to do.
    pub fn create(name: &str) -> Result<Tap, TapError> {
        check_name(name)?;
        Tap::attach(name, 0)
    }

    /// Creates an interface `name` with several queues in the caller's network namespace. Each queue is a
    /// file of its own. The kernel keeps the packets of one flow on one queue, and returns a flow by the
    /// queue on which it arrived last.
    ///
    /// # Errors
    ///
    /// Returns a [`TapError`]; its text says what to do.
    pub fn create_queues(name: &str, queues: usize) -> Result<Vec<Tap>, TapError> {
        check_name(name)?;
        if !(1..=QUEUES_MAX).contains(&queues) {
            return Err(TapError::Queues { queues });
        }
        let flag = if queues > 1 { IFF_MULTI_QUEUE } else { 0 };
        let mut taps = vec![Tap::attach(name, flag)?];
        while taps.len() < queues {
            // The name as the kernel completed it.
            taps.push(Tap::attach(&taps[0].name, flag)?);
        }
        Ok(taps)
    }

    /// Creates an interface, as [`Tap::create_queues`] does, or attaches to one that was kept
    /// ([`Tap::keep`]). A kept interface with one queue has one file; of one with several queues, up to
    /// `queues` are used. So the number of files may differ from `queues`.
    ///
    /// # Errors
    ///
    /// Returns a [`TapError`]; its text says what to do.
    pub fn take_up_queues(name: &str, queues: usize) -> Result<Vec<Tap>, TapError> {
        match Tap::create_queues(name, queues) {
            // The kernel takes an interface up only as the kind that it is.
            Err(TapError::Taken { .. }) => {
                let other_kind = if queues > 1 { 0 } else { IFF_MULTI_QUEUE };
                Ok(vec![Tap::attach(name, other_kind)?])
            }
            done => done,
        }
    }

    /// Opens one queue of an interface, and creates the interface if it does not exist.
    fn attach(name: &str, flag: u16) -> Result<Tap, TapError> {
        let fd = open()?;
        let name = set_interface(&fd, name, flag)?;
        set_int(&fd, TUNSETVNETHDRSZ, "TUNSETVNETHDRSZ", VNET_HEADER_LEN_U8.into())?;
        set_int(&fd, TUNSETVNETLE, "TUNSETVNETLE", 1)?;
        // Unlimited: a frame that was taken from us is not held back because an earlier one is
        // still queued in a socket of the guest.
        set_int(&fd, TUNSETSNDBUF, "TUNSETSNDBUF", libc::c_int::MAX)?;
        let offloads = probe_offloads(&fd, TapOffloads(u32::MAX))?;
        Ok(Tap { fd, name, offloads })
    }

    /// Keeps the interface in being when its last descriptor is closed, or no longer does. One that was
    /// kept is taken up again by [`Tap::create`] with its name.
    ///
    /// # Errors
    ///
    /// [`TapError::Setting`].
    pub fn keep(&self, keep: bool) -> Result<(), TapError> {
        set_int_by_value(&self.fd, TUNSETPERSIST, "TUNSETPERSIST", keep.into())
    }

    /// Duplicates the descriptor, which stays one of the same open file.
    ///
    /// # Errors
    ///
    /// When no descriptor is free.
    pub fn try_clone(&self) -> io::Result<Tap> {
        let (name, offloads) = (self.name.clone(), self.offloads);
        Ok(Tap { fd: self.fd.try_clone()?, name, offloads })
    }

    /// Leaves no more to the reader than `wanted` and what the kernel knows; the rest the kernel
    /// does before a frame is read.
    ///
    /// # Errors
    ///
    /// Returns [`TapError::Setting`] if the kernel refuses the empty set too.
    pub fn limit_offloads(&mut self, wanted: TapOffloads) -> Result<(), TapError> {
        self.offloads = probe_offloads(&self.fd, wanted)?;
        Ok(())
    }
}

fn check_name(name: &str) -> Result<(), TapError> {
    let valid = (1..=NAME_MAX).contains(&name.len())
        && !matches!(name, "." | "..")
        && !name.bytes().any(|b| b == b'/' || b == b':' || !b.is_ascii_graphic());
    if valid { Ok(()) } else { Err(TapError::Name { name: name.to_owned() }) }
}

/// Checks that this process may open the device of TAP interfaces. Creates no interface.
///
/// # Errors
///
/// Returns a [`TapError`]; its text says what to do.
pub fn check_device() -> Result<(), TapError> {
    open().map(drop)
}

fn open() -> Result<OwnedFd, TapError> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    rustix::fs::open(PATH, flags, Mode::empty()).map_err(|errno| match errno {
        rustix::io::Errno::NOENT | rustix::io::Errno::NODEV | rustix::io::Errno::NXIO => {
            TapError::Missing
        }
        rustix::io::Errno::ACCESS | rustix::io::Errno::PERM => TapError::Denied,
        other => TapError::Open(other.into()),
    })
}

/// `struct ifreq` as `TUNSETIFF` uses it: a name, flags, and room up to its 40 bytes.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; NAME_MAX + 1],
    flags: u16,
    rest: [u8; 22],
}

fn set_interface(fd: &OwnedFd, name: &str, flag: u16) -> Result<String, TapError> {
    let mut request = InterfaceRequest {
        name: [0; NAME_MAX + 1],
        flags: IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | flag,
        rest: [0; 22],
    };
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: TUNSETIFF reads and writes one `struct ifreq` (40 bytes) at the pointer, which is
    // to a live, exclusively borrowed value of that size; `fd` is open for the call.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETIFF, &raw mut request) };
    if done < 0 {
        let source = io::Error::last_os_error();
        let name = name.to_owned();
        return Err(match source.raw_os_error() {
            Some(libc::EPERM) => TapError::NotAdmin { name },
            Some(libc::EBUSY | libc::EINVAL | libc::EEXIST) => TapError::Taken { name },
            _ => TapError::Setting { what: "TUNSETIFF", source },
        });
    }
    let end = request.name.iter().position(|&b| b == 0).unwrap_or(NAME_MAX);
    Ok(String::from_utf8_lossy(&request.name[..end]).into_owned())
}

fn set_int(
    fd: &OwnedFd,
    request: libc::c_ulong,
    what: &'static str,
    value: libc::c_int,
) -> Result<(), TapError> {
    // SAFETY: each request passed here reads one int at the pointer, which is to a live int;
    // `fd` is open for the call.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw const value) };
    if done < 0 {
        return Err(TapError::Setting { what, source: io::Error::last_os_error() });
    }
    Ok(())
}

fn set_int_by_value(
    fd: &OwnedFd,
    request: libc::c_ulong,
    what: &'static str,
    value: libc::c_ulong,
) -> Result<(), TapError> {
    // SAFETY: each request passed here takes its argument by value; `fd` is open for the call.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), request, value) };
    if done < 0 {
        return Err(TapError::Setting { what, source: io::Error::last_os_error() });
    }
    Ok(())
}

fn probe_offloads(fd: &OwnedFd, wanted: TapOffloads) -> Result<TapOffloads, TapError> {
    let mut refusal = io::Error::from(io::ErrorKind::Unsupported);
    for attempt in ATTEMPTS {
        let mut set = attempt.intersection(wanted);
        if !set.contains(TapOffloads::CSUM) {
            // Segments cannot be left whole where checksums may not be left out.
            set = TapOffloads(0);
        }
        // SAFETY: TUNSETOFFLOAD takes its argument by value; `fd` is open for the call.
        let done =
            unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETOFFLOAD, libc::c_ulong::from(set.0)) };
        if done >= 0 {
            return Ok(set);
        }
        refusal = io::Error::last_os_error();
    }
    Err(TapError::Setting { what: "TUNSETOFFLOAD", source: refusal })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_is_as_large_as_ifreq() {
        assert_eq!(size_of::<InterfaceRequest>(), 40);
    }

    #[test]
    fn names_that_no_interface_can_have_are_refused() {
        for name in ["", "sixteen-bytes-xx", "a b", "a/b", ".", "..", "a:1", "é"] {
            assert!(matches!(Tap::create(name), Err(TapError::Name { .. })), "{name}");
        }
    }

    #[test]
    fn numbers_of_queues_that_no_interface_can_have_are_refused() {
        for queues in [0, QUEUES_MAX + 1] {
            assert!(matches!(Tap::create_queues("rf0", queues), Err(TapError::Queues { .. })));
        }
    }

    /// `TUN_F_UFO`: who leaves the fragmenting of datagrams to others decides what they have to
    /// reassemble. Nobody is asked to.
    #[test]
    fn fragmentation_of_datagrams_is_never_offered() {
        assert!(ATTEMPTS.iter().all(|set| set.0 & 0x10 == 0));
    }

    #[test]
    fn attempts_go_from_most_to_least() {
        assert!(ATTEMPTS.windows(2).all(|pair| pair[0].contains(pair[1]) && pair[0] != pair[1]));
    }
}

//! Unix sockets that are bound to a path, as the kernel lists them (sock_diag(7)).
//!
//! The list holds the sockets of one network namespace: that of the calling process. Each entry has the name that the
//! program passed to bind(2), and the identity of the socket's file. The name may be relative, may be that of another
//! root directory, and is not updated when the file is renamed.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

use crate::locations::{DeviceNumber, read_own_proc};

/// Socket that is bound to a path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BoundSocket {
    /// Set if the socket belongs to a user without an id in this process's user namespace.
    pub is_foreign: bool,
    /// Name, without a zero byte.
    pub name: Vec<u8>,
    /// Identity of the file. `None` if the kernel lists only names.
    pub file: Option<SocketFile>,
}

/// Identity of a socket's file, as far as sock_diag(7) has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SocketFile {
    device: DeviceNumber,
    /// Lower 32 bits of the inode number.
    inode: u32,
}

impl SocketFile {
    /// Returns `true` for the identity that statx(2) reports of the same file.
    pub(super) fn is(&self, device: DeviceNumber, inode: u64) -> bool {
        // A file system without a device reports other numbers for parts of itself (btrfs(5)).
        let may_be_same = self.device == device || (self.device.major == 0 && device.major == 0);
        may_be_same && inode & u64::from(u32::MAX) == u64::from(self.inode)
    }
}

/// Lists the sockets of this process's network namespace. A kernel without sock_diag(7) for Unix sockets has the names
/// alone.
pub(super) fn list(own_proc: BorrowedFd<'_>) -> io::Result<Vec<BoundSocket>> {
    let mut sockets = match dump() {
        Ok(sockets) => sockets,
        Err(_) => listed_names(&read_own_proc(own_proc, "net/unix")?),
    };
    // A connection that was accepted has the name of its listener.
    sockets.sort_unstable();
    sockets.dedup();
    Ok(sockets)
}

/// Returns the sockets of a list in the format of `/proc/net/unix`. Names with a line break are cut there.
pub(super) fn listed_names(list: &[u8]) -> Vec<BoundSocket> {
    let names = list.split(|byte| *byte == b'\n').skip(1).filter_map(listed_name);
    let sockets = names.map(|name| BoundSocket { is_foreign: false, name, file: None });
    sockets.collect()
}

/// Returns the path in a line of `/proc/net/unix`. Abstract names begin with `@`.
fn listed_name(line: &[u8]) -> Option<Vec<u8>> {
    /// Column of the path.
    const PATH_COLUMN: usize = 7;
    let mut rest = line;
    for _ in 0..PATH_COLUMN {
        rest = rest.trim_ascii_start();
        let end = rest.iter().position(|byte| *byte == b' ')?;
        rest = rest.get(end..)?;
    }
    let name = rest.get(1..)?;
    (!name.is_empty() && !name.starts_with(b"@")).then(|| name.to_owned())
}

/// Values of `linux/netlink.h`, `linux/sock_diag.h` and `linux/unix_diag.h`.
mod abi {
    pub(super) const HEADER: usize = 16;
    pub(super) const ERROR: u16 = 2;
    pub(super) const DONE: u16 = 3;
    /// Flags `NLM_F_REQUEST` and `NLM_F_DUMP`.
    pub(super) const REQUEST_DUMP: u16 = 0x301;
    pub(super) const SOCK_DIAG_BY_FAMILY: u16 = 20;
    pub(super) const AF_UNIX: u8 = 1;
    /// Length of `struct unix_diag_msg` in bytes.
    pub(super) const MESSAGE: usize = 16;
    /// Attributes asked for: `UDIAG_SHOW_NAME`, `UDIAG_SHOW_VFS` and `UDIAG_SHOW_UID`.
    pub(super) const SHOW: u32 = 0x43;
    pub(super) const NAME: u16 = 0;
    pub(super) const VFS: u16 = 1;
    pub(super) const UID: u16 = 7;
}

/// Requests the list over netlink.
fn dump() -> io::Result<Vec<BoundSocket>> {
    /// Size of the largest message of a dump.
    const BUFFER: usize = 64 << 10;
    let socket = open()?;
    rustix::net::send(&socket, &request(), SendFlags::empty())?;
    let mut sockets = Vec::new();
    let mut buffer = vec![0; BUFFER];
    loop {
        let received = rustix::net::recv(&socket, &mut buffer, RecvFlags::empty());
        let (bytes, _) = match received {
            Err(Errno::INTR) => continue,
            other => other?,
        };
        if parse(buffer.get(..bytes).unwrap_or_default(), &mut sockets)? {
            return Ok(sockets);
        }
    }
}

fn open() -> io::Result<OwnedFd> {
    let protocol = Some(netlink::SOCK_DIAG);
    let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
    Ok(rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, protocol)?)
}

/// Returns the request for all Unix sockets: `struct nlmsghdr`, then `struct unix_diag_req`.
fn request() -> Vec<u8> {
    let mut body = vec![abi::AF_UNIX, 0, 0, 0];
    // States, inode, attributes, and two words of a cookie.
    for word in [u32::MAX, 0, abi::SHOW, u32::MAX, u32::MAX] {
        body.extend(word.to_ne_bytes());
    }
    let length = u32::try_from(abi::HEADER + body.len()).unwrap_or(0);
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(abi::SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    message.extend(abi::REQUEST_DUMP.to_ne_bytes());
    // Sequence number and port.
    message.extend([0; 8]);
    message.extend(body);
    message
}

/// Adds the sockets in a datagram of the kernel. Returns `true` after the last one.
fn parse(mut bytes: &[u8], sockets: &mut Vec<BoundSocket>) -> io::Result<bool> {
    while let (Some(length), Some(kind)) = (word(bytes, 0), half(bytes, 4)) {
        let length = usize::try_from(length).unwrap_or(usize::MAX).max(abi::HEADER);
        let message = bytes.get(..length).ok_or(Errno::BADMSG)?;
        let body = message.get(abi::HEADER..).unwrap_or_default();
        match kind {
            abi::DONE => return Ok(true),
            abi::ERROR => return Err(io::Error::other("the kernel lists no Unix sockets")),
            abi::SOCK_DIAG_BY_FAMILY => {
                sockets.extend(bound(body.get(abi::MESSAGE..).unwrap_or_default()));
            }
            _ => {}
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

/// Returns the socket that attributes describe, if it is bound to a path.
fn bound(mut attributes: &[u8]) -> Option<BoundSocket> {
    let (mut name, mut file, mut is_foreign) = (None, None, false);
    while let (Some(length), Some(kind)) = (half(attributes, 0), half(attributes, 2)) {
        let length = usize::from(length).max(4);
        let value = attributes.get(4..length)?;
        match kind {
            abi::NAME => name = Some(value),
            abi::VFS => {
                let device = word(value, 4)?;
                // The kernel's own format of a device number.
                let device = DeviceNumber { major: device >> 20, minor: device & 0xf_ffff };
                file = Some(SocketFile { device, inode: word(value, 0)? });
            }
            abi::UID => is_foreign = word(value, 0)? == OVERFLOW_ID,
            _ => {}
        }
        attributes = attributes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    let name = name?;
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    let name = name.get(..end).filter(|name| !name.is_empty())?.to_owned();
    file.map(|file| BoundSocket { is_foreign, name, file: Some(file) })
}

/// User id by which the kernel reports users without an id (`/proc/sys/kernel/overflowuid`).
pub(super) const OVERFLOW_ID: u32 = 65534;

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn name_is_the_rest_of_its_line() {
        let line = b"0000000000000000: 00000002 00000000 00010000 0001 01 71 /run/a b/c\xff";
        assert_eq!(listed_name(line).as_deref(), Some(&b"/run/a b/c\xff"[..]));
        let relative = b"0000000000000000: 00000002 00000000 00010000 0001 01 71 c";
        assert_eq!(listed_name(relative).as_deref(), Some(&b"c"[..]));
        for other in [
            "0000000000000000: 00000002 00000000 00010000 0001 01 71 @/tmp/.X11-unix/X0",
            "0000000000000000: 00000002 00000000 00010000 0001 01 71",
            "",
        ] {
            assert_eq!(listed_name(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn dump_has_the_identity_of_a_socket_that_was_renamed() {
        let directory = tempfile::tempdir().unwrap();
        let (bound, moved) = (directory.path().join("a\nb"), directory.path().join("moved"));
        let _listener = UnixListener::bind(&bound).unwrap();
        std::fs::rename(&bound, &moved).unwrap();
        let Ok(sockets) = dump() else {
            // A kernel without unix_diag, as some containers have.
            return;
        };
        let name = bound.as_os_str().as_encoded_bytes();
        let found = sockets.iter().find(|socket| socket.name == name).unwrap();
        let metadata = moved.metadata().unwrap();
        let (major, minor) = (rustix::fs::major(metadata.dev()), rustix::fs::minor(metadata.dev()));
        let device = DeviceNumber { major, minor };
        assert!(found.file.unwrap().is(device, metadata.ino()));
        assert!(!found.file.unwrap().is(device, metadata.ino() + 1));
    }

    #[test]
    fn truncated_or_false_messages_are_no_sockets() {
        let mut sockets = Vec::new();
        for bytes in [&[][..], &[1, 2, 3], &[0; 16], &[255; 64]] {
            let _ = parse(bytes, &mut sockets);
        }
        let attribute = [12u8, 0, 1, 0, 1, 0, 0, 0];
        assert_eq!(bound(&attribute), None);
        assert!(sockets.is_empty());
    }
}

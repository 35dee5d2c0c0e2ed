//! Linux-specific socket calls: peek offsets, discarding without copying, send-queue usage, peer credentials.

// #syscall driver,uplink getsockopt 1=SOL_SOCKET: SO_MEMINFO: room in a socket
// #syscall uplink setsockopt 1=SOL_SOCKET 2=SO_PEEK_OFF: peeking on from where the last peek ended
// #syscall uplink recvfrom: dropping what the guest acknowledged
// #syscall uplink ioctl 1=0x8905: SIOCATMARK: the mark of urgent data
// #syscall uplink ioctl 1=0x5411: SIOCOUTQ: payload in a socket's send queue

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;

use crate::numbers::bounded;

/// Send-queue usage of a socket in bytes, as the kernel accounts for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SendQueue {
    /// Memory in use, overhead included.
    pub used: u32,
    /// Maximum memory; it grows while the connection needs it.
    pub limit: u32,
}

/// Option `SO_MEMINFO` and indices into its array (`linux/sock_diag.h`).
const SO_MEMINFO: libc::c_int = 55;
const MEMINFO_VARS: usize = 9;
const MEMINFO_WMEM_ALLOC: usize = 2;
const MEMINFO_SNDBUF: usize = 3;
const MEMINFO_WMEM_QUEUED: usize = 5;

/// Request number of `linux/sockios.h`, which is `TIOCOUTQ` of `asm-generic/ioctls.h`.
const SIOCOUTQ: libc::c_ulong = 0x5411;
/// Request number of `asm-generic/sockios.h`.
const SIOCATMARK: libc::c_ulong = 0x8905;

/// Returns the usage of a socket's send queue.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn send_queue(socket: impl AsFd) -> io::Result<SendQueue> {
    let vars = memory_info(socket)?;
    Ok(SendQueue { used: vars[MEMINFO_WMEM_QUEUED], limit: vars[MEMINFO_SNDBUF] })
}

/// Returns the memory of the messages that `socket`, a Unix socket, has sent and the peer has not read.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn unread_by_peer(socket: impl AsFd) -> io::Result<u32> {
    Ok(memory_info(socket)?[MEMINFO_WMEM_ALLOC])
}

/// Process that made one end of a Unix socket, as the namespaces of this process have it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Process number. `None` if the process has none in this PID namespace.
    pub pid: Option<i32>,
    /// User id.
    pub user: u32,
}

/// Returns the process that made the other end of `socket`, a Unix socket.
///
/// `rustix` has a call for this, which cannot be used: a process without a number in this PID namespace has the number
/// 0, for which its type for credentials has no room.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn peer(socket: impl AsFd) -> io::Result<Peer> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = bounded(size_of_val(&found), libc::socklen_t::MAX);
    // SAFETY: `found` is live and `len` bytes long, `len` a live length; the kernel writes no more than
    // that, and every bit pattern is three integers.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Peer { pid: Some(found.pid).filter(|pid| *pid != 0), user: found.uid })
}

/// Returns the user that made the other end of `socket`, a Unix socket, as this user namespace has it.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn peer_user(socket: impl AsFd) -> io::Result<u32> {
    Ok(peer(socket)?.user)
}

/// Returns `true` if the process that made the other end of `socket`, a Unix socket, runs and is in the user namespace of
/// this process. A process that cannot be examined is in another one.
///
/// The socket's own reference to the process (`SO_PEERPIDFD`, Linux 6.5) tells it from a later one with its number.
pub fn peer_is_in_own_user_namespace(socket: impl AsFd) -> bool {
    let of_self = std::fs::metadata("/proc/self/ns/user");
    let Ok(of_self) = of_self.map(|found| (found.dev(), found.ino())) else { return false };
    peer_satisfies(socket, |pid| {
        let found = std::fs::metadata(format!("/proc/{pid}/ns/user"));
        found.is_ok_and(|found| (found.dev(), found.ino()) == of_self)
    })
}

/// Returns `true` if a condition holds for the process that made the other end of `socket`, by its number, and the number is
/// still that of the process afterwards.
fn peer_satisfies(socket: impl AsFd, condition: impl FnOnce(i32) -> bool) -> bool {
    let reference = peer_reference(&socket);
    let number = || match &reference {
        Ok(reference) => number_of(reference),
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => peer(&socket).ok()?.pid,
        Err(_) => None,
    };
    number().is_some_and(|pid| condition(pid) && number() == Some(pid))
}

/// Returns `true` if the process that made the other end of `socket`, a Unix socket, runs and is in the PID namespace of this
/// process. Needs no right over that process, and a `/proc` of this PID namespace.
///
/// The socket's own reference to the process (`SO_PEERPIDFD`, Linux 6.5) tells it from a later one with its number.
pub fn peer_is_in_own_pid_namespace(socket: impl AsFd) -> bool {
    let of_peer = match peer_reference(&socket) {
        Ok(reference) => has_one_number(&format!("/proc/self/fdinfo/{}", reference.as_raw_fd())),
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {
            let pid = peer(&socket).ok().and_then(|peer| peer.pid);
            pid.is_some_and(|pid| has_one_number(&format!("/proc/{pid}/status")))
        }
        Err(_) => false,
    };
    of_peer && has_one_number("/proc/self/status")
}

/// Returns `true` if a file of `/proc` about a process says that it has one number: it is in the PID namespace of that `/proc`, and
/// in no nested one.
fn has_one_number(path: &str) -> bool {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let numbers = text.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let mut numbers = numbers.unwrap_or_default().split_ascii_whitespace();
    let outermost = numbers.next().and_then(|number| number.parse::<i32>().ok());
    outermost.is_some_and(|number| number > 0) && numbers.next().is_none()
}

/// Returns `true` if the process that made the other end of `socket`, a Unix socket, runs and is in a user namespace that has all
/// user ids: the initial one, or one that its root made so. Needs no right over that process.
pub fn peer_has_all_user_ids(socket: impl AsFd) -> bool {
    /// Number of ids in the initial user namespace.
    const ALL: &str = "4294967295";
    peer_satisfies(socket, |pid| {
        let map = std::fs::read_to_string(format!("/proc/{pid}/uid_map")).unwrap_or_default();
        map.split_ascii_whitespace().nth(2) == Some(ALL)
    })
}

/// Returns `true` if the process that made the other end of `socket`, a Unix socket, runs and is in no container: in the PID
/// namespace of this process, and in its user namespace or one with all user ids.
///
/// Containers of Podman share the user namespace of the process that connects them; a command may share its PID namespace.
pub fn peer_is_in_no_container(socket: impl AsFd) -> bool {
    let is_outside = || peer_is_in_own_user_namespace(&socket) || peer_has_all_user_ids(&socket);
    peer_is_in_own_pid_namespace(&socket) && is_outside()
}

/// Returns a reference to the process that made the other end of a Unix socket: a pidfd.
fn peer_reference(socket: impl AsFd) -> io::Result<OwnedFd> {
    /// Value of `SO_PEERPIDFD` in `asm-generic/socket.h`.
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut found: RawFd = -1;
    let mut len = bounded(size_of_val(&found), libc::socklen_t::MAX);
    // SAFETY: `found` is live and `len` bytes long, `len` a live length; the kernel writes no more than that.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    if done < 0 || found < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for this call, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(found) })
}

/// Returns the number of the process that a pidfd refers to, if the process runs and has a number in this PID namespace.
fn number_of(reference: &OwnedFd) -> Option<i32> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", reference.as_raw_fd()));
    let text = text.ok()?;
    let number = text.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    number.trim().parse().ok().filter(|pid| *pid > 0)
}

/// Restricts a socket to packets of one interface (`SO_BINDTODEVICE`). Since Linux 5.7 an ordinary user may do
/// so for a socket without an interface.
///
/// # Errors
///
/// Returns the kernel's error: `ENODEV` if there is no interface of that name.
pub fn bind_to_interface(socket: impl AsFd, name: &str) -> io::Result<()> {
    let len = libc::socklen_t::try_from(name.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the kernel reads `len` bytes at the pointer, which is to a live string of that length, and
    // keeps no reference to it.
    let done = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_BINDTODEVICE,
            name.as_ptr().cast(),
            len,
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Leaves the choice of the port to `connect` when a socket is bound to an address only (`IP_BIND_ADDRESS_NO_PORT`).
///
/// # Errors
///
/// Returns the kernel's error.
pub fn set_bind_without_port(socket: impl AsFd) -> io::Result<()> {
    set_int(socket, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1)
}

/// Lets a socket send to hosts on a link of this host only, without a router (`SO_DONTROUTE`). It has no effect on
/// IPv6.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn send_on_link_only(socket: impl AsFd) -> io::Result<()> {
    set_int(socket, libc::SOL_SOCKET, libc::SO_DONTROUTE, 1)
}

fn memory_info(socket: impl AsFd) -> io::Result<[u32; MEMINFO_VARS]> {
    let mut vars = [0u32; MEMINFO_VARS];
    let mut len = bounded(size_of_val(&vars), libc::socklen_t::MAX);
    // SAFETY: `vars` is a live array of `len` bytes, `len` a live length; the kernel writes no more
    // than that and every bit pattern is a u32.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_MEMINFO,
            vars.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(vars)
}

/// Sets the offset of the next read with `MSG_PEEK`, in bytes from the front of the queue (`SO_PEEK_OFF`;
/// for TCP since Linux 6.9). The kernel advances it with every such read, and moves it back when bytes
/// leave the front.
///
/// # Errors
///
/// Returns the kernel's error: `EOPNOTSUPP` if it lacks the option.
pub fn set_peek_offset(socket: impl AsFd, offset: u32) -> io::Result<()> {
    let value = libc::c_int::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    set_int(socket, libc::SOL_SOCKET, libc::SO_PEEK_OFF, value)
}

/// Option number of `linux/netlink.h`.
const NETLINK_GET_STRICT_CHK: libc::c_int = 12;

/// Makes the kernel apply the filters of requests on an rtnetlink socket (`NETLINK_GET_STRICT_CHK`, since
/// Linux 4.20).
///
/// # Errors
///
/// Returns the kernel's error: `ENOPROTOOPT` if it lacks the option.
pub fn set_netlink_strict(socket: impl AsFd) -> io::Result<()> {
    set_int(socket, libc::SOL_NETLINK, NETLINK_GET_STRICT_CHK, 1)
}

/// Sets an option whose value is an `int`.
pub(crate) fn set_int(
    socket: impl AsFd,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let len = bounded(size_of_val(&value), libc::socklen_t::MAX);
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel reads one live int of `len` bytes.
    let done = unsafe { libc::setsockopt(fd, level, option, (&raw const value).cast(), len) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Removes up to `len` bytes from the front of a TCP socket's queue without copying them. Returns their
/// number.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn discard(socket: impl AsFd, len: usize) -> io::Result<usize> {
    let flags = libc::MSG_TRUNC | libc::MSG_DONTWAIT;
    // SAFETY: with MSG_TRUNC a TCP socket writes nothing to the buffer (tcp(7)), so none is needed; a
    // socket of another kind fails with EFAULT.
    let n = unsafe { libc::recv(socket.as_fd().as_raw_fd(), core::ptr::null_mut(), len, flags) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Returns the payload bytes of a TCP socket that the other end has not acknowledged, sent or not.
///
/// # Errors
///
/// Returns the kernel's error: `EINVAL` for a socket that listens.
pub fn unacknowledged(socket: impl AsFd) -> io::Result<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: SIOCOUTQ writes one int, to a live one; the descriptor is open for the call.
    let done = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), SIOCOUTQ, &raw mut bytes) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u32::try_from(bytes).unwrap_or(0))
}

/// Returns `true` if the next byte of a stream is the urgent one.
pub fn at_urgent_mark(socket: impl AsFd) -> bool {
    let mut at_mark: libc::c_int = 0;
    // SAFETY: SIOCATMARK writes one int, to a live one; the descriptor is open for the call.
    let done = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), SIOCATMARK, &raw mut at_mark) };
    done == 0 && at_mark != 0
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    #[test]
    fn discarded_bytes_are_not_read() {
        let (mut near, mut far) = pair();
        near.write_all(b"hello world").unwrap();
        let mut seen = [0; 11];
        while far.peek(&mut seen).unwrap() < 11 {}
        assert_eq!(discard(&far, 6).unwrap(), 6);
        let mut rest = [0; 5];
        far.read_exact(&mut rest).unwrap();
        assert_eq!(&rest, b"world");
    }

    #[test]
    fn peek_offset_advances_with_peeks_and_moves_back_with_reads() {
        let (mut near, mut far) = pair();
        if set_peek_offset(&far, 0).is_err() {
            // Before Linux 6.9, where callers use another way.
            return;
        }
        near.write_all(b"abcdefgh").unwrap();
        let mut two = [0; 2];
        for expected in [b"ab", b"cd"] {
            far.peek(&mut two).unwrap();
            assert_eq!(&two, expected);
        }
        assert_eq!(discard(&far, 3).unwrap(), 3);
        far.peek(&mut two).unwrap();
        assert_eq!(&two, b"ef");
        set_peek_offset(&far, 0).unwrap();
        far.peek(&mut two).unwrap();
        assert_eq!(&two, b"de");
        far.read_exact(&mut two).unwrap();
        assert_eq!(&two, b"de");
    }

    #[test]
    fn full_send_queue_reports_usage_at_its_limit() {
        let (mut near, far) = pair();
        near.set_nonblocking(true).unwrap();
        assert_eq!(send_queue(&near).unwrap().used, 0);
        while near.write(&[0; 65536]).is_ok() {}
        let full = send_queue(&near).unwrap();
        assert!(full.used >= full.limit && full.limit > 0, "{full:?}");
        drop(far);
    }

    #[test]
    fn payload_of_send_queue_is_counted_without_overhead() {
        let (mut near, mut far) = pair();
        near.set_nonblocking(true).unwrap();
        assert_eq!(unacknowledged(&near).unwrap(), 0);
        let mut sent = 0;
        while let Ok(n) = near.write(&[0; 4096]) {
            sent += n;
        }
        let (queued, queue) = (unacknowledged(&near).unwrap(), send_queue(&near).unwrap());
        assert!(
            usize::try_from(queued).unwrap() <= sent && queued <= queue.used,
            "{queued} {queue:?}"
        );
        drop(near);
        assert_eq!(io::copy(&mut far, &mut io::sink()).unwrap(), sent as u64);
    }

    #[test]
    fn urgent_mark_is_reported_at_its_byte() {
        let (near, mut far) = pair();
        rustix::net::sockopt::set_socket_oobinline(&far, true).unwrap();
        let mut writer = &near;
        writer.write_all(b"ab").unwrap();
        rustix::net::send(&near, b"!", rustix::net::SendFlags::OOB).unwrap();
        let mut seen = [0; 2];
        far.read_exact(&mut seen).unwrap();
        assert_eq!(&seen, b"ab");
        assert!(at_urgent_mark(&far));
        far.read_exact(&mut seen[..1]).unwrap();
        assert!(!at_urgent_mark(&far));
    }
}

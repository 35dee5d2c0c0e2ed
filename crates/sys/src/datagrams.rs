//! Datagram sockets: batches, segmentation by the kernel, destination addresses and the error queue.
//!
//! [`send`] passes one datagram or one block of equal segments (`UDP_SEGMENT`). [`receive`] takes a batch
//! (`recvmmsg`) and tells the segment size (`UDP_GRO`) and the destination of each datagram.
//! [`receive_error`] reads the error queue (`IP_RECVERR`).
//!
//! Addresses and control messages are encoded and decoded as bytes in the kernel's layout (module `control`);
//! `unsafe` is needed for the calls only.

// #syscall uplink recvmmsg: datagrams, many at a time
// #syscall uplink recvmsg,sendmsg: errors, and datagrams one at a time
// #syscall uplink setsockopt 1=IPPROTO_UDP: segmentation of datagrams
// #syscall uplink setsockopt 1=IPPROTO_IP: errors and destination of a datagram
// #syscall uplink setsockopt 1=IPPROTO_IPV6: errors and destination of a datagram

use core::net::{IpAddr, SocketAddr};
use core::ptr;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use crate::numbers::{bounded, usize_from};
use crate::socket::set_int;
use control::{
    Control, DATAGRAM_MAX, NAME_MAX, REPORT_MAX, Writer, decode_address, encode_address,
};

mod control;

/// Maximum of datagrams in one call of [`receive`].
pub const BATCH_MAX: usize = 32;

/// Addresses and segmentation of datagrams to send.
#[derive(Clone, Copy, Debug, Default)]
pub struct SendOptions {
    /// Destination; `None` on a connected socket.
    pub to: Option<SocketAddr>,
    /// Source address, if it is fixed.
    pub from: Option<IpAddr>,
    /// Length of each datagram, if the kernel is to cut the bytes into several.
    pub segment: Option<u16>,
}

/// Blocking behaviour of [`receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Fails with `EAGAIN` if no datagram is there.
    Never,
    /// Blocks until one datagram is there or the socket's receive timeout ends.
    ForOne,
}

/// Received datagram, or several of equal length that the kernel joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Number of bytes.
    pub len: usize,
    /// Sender, if known.
    pub from: Option<SocketAddr>,
    /// Destination address, if the socket reports it ([`report_destinations`]).
    pub to: Option<IpAddr>,
    /// Length of each datagram if there are several; the last may be shorter.
    pub segment: Option<u16>,
    /// Type of service or traffic class; 0 if the socket does not report it ([`report_class`]).
    pub class: u8,
    /// TTL or hop limit, if the socket reports it ([`report_hops`]).
    pub hops: Option<u8>,
}

/// Entry of a socket's error queue (`struct sock_extended_err`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuedError {
    /// Error number of the kernel.
    pub error: u32,
    /// Origin of the report (`SO_EE_ORIGIN_*` of `linux/errqueue.h`).
    pub origin: u8,
    /// Type and code of the ICMP or ICMPv6 message.
    pub kind: u8,
    pub code: u8,
    /// Additional value of the message, such as an MTU.
    pub info: u32,
    /// Address of the host that reported the error.
    pub reporter: Option<IpAddr>,
    /// Destination of the datagram that was not delivered.
    pub to: Option<SocketAddr>,
    /// Number of bytes that the report quotes.
    pub len: usize,
}

/// Switches on the option of the socket's family.
fn switch_on(
    socket: impl AsFd,
    is_v6: bool,
    of_v6: libc::c_int,
    of_v4: libc::c_int,
) -> io::Result<()> {
    let (level, option) =
        if is_v6 { (libc::IPPROTO_IPV6, of_v6) } else { (libc::IPPROTO_IP, of_v4) };
    set_int(socket, level, option, 1)
}

/// Makes the kernel queue delivery errors of the socket (`IP_RECVERR`, `IPV6_RECVERR`).
///
/// # Errors
///
/// Returns the kernel's error.
pub fn queue_errors(socket: impl AsFd, is_v6: bool) -> io::Result<()> {
    switch_on(socket, is_v6, libc::IPV6_RECVERR, libc::IP_RECVERR)
}

/// Makes the kernel report the destination address of each received datagram (`IP_PKTINFO`,
/// `IPV6_RECVPKTINFO`).
///
/// # Errors
///
/// Returns the kernel's error.
pub fn report_destinations(socket: impl AsFd, is_v6: bool) -> io::Result<()> {
    switch_on(socket, is_v6, libc::IPV6_RECVPKTINFO, libc::IP_PKTINFO)
}

/// Makes the kernel report the type of service or traffic class of each received datagram (`IP_RECVTOS`,
/// `IPV6_RECVTCLASS`).
///
/// # Errors
///
/// Returns the kernel's error.
pub fn report_class(socket: impl AsFd, is_v6: bool) -> io::Result<()> {
    switch_on(socket, is_v6, libc::IPV6_RECVTCLASS, libc::IP_RECVTOS)
}

/// Makes the kernel report the TTL or hop limit of each received datagram (`IP_RECVTTL`, `IPV6_RECVHOPLIMIT`).
///
/// # Errors
///
/// Returns the kernel's error.
pub fn report_hops(socket: impl AsFd, is_v6: bool) -> io::Result<()> {
    switch_on(socket, is_v6, libc::IPV6_RECVHOPLIMIT, libc::IP_RECVTTL)
}

/// Permits the kernel to join received datagrams of equal length (`UDP_GRO`).
///
/// # Errors
///
/// Returns the kernel's error.
pub fn join_received(socket: impl AsFd) -> io::Result<()> {
    set_int(socket, libc::IPPROTO_UDP, libc::UDP_GRO, 1)
}

/// Makes the kernel cut every later send into datagrams of `size` bytes (`UDP_SEGMENT`).
///
/// # Errors
///
/// Returns the kernel's error.
pub fn segment_sent(socket: impl AsFd, size: u16) -> io::Result<()> {
    set_int(socket, libc::IPPROTO_UDP, libc::UDP_SEGMENT, size.into())
}

/// Sends `bytes` as one datagram, or as several if the options say so. Never blocks.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn send(socket: impl AsFd, bytes: &[u8], options: &SendOptions) -> io::Result<()> {
    let mut control = Control::<DATAGRAM_MAX>::default();
    let mut writer = Writer::new(&mut control);
    if let Some(segment) = options.segment {
        writer.push(libc::IPPROTO_UDP, libc::UDP_SEGMENT, &segment.to_ne_bytes());
    }
    match options.from {
        // `struct in_pktinfo`: interface, source, destination.
        Some(IpAddr::V4(ip)) => {
            let mut info = [0; 12];
            info[4..8].copy_from_slice(&ip.octets());
            writer.push(libc::IPPROTO_IP, libc::IP_PKTINFO, &info);
        }
        // `struct in6_pktinfo`: source, interface.
        Some(IpAddr::V6(ip)) => {
            let mut info = [0; 20];
            info[..16].copy_from_slice(&ip.octets());
            writer.push(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &info);
        }
        None => {}
    }
    let control_len = writer.len();
    let (mut name, name_len) = options.to.map_or(([0; NAME_MAX], 0), encode_address);
    let mut vector =
        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut header = empty_header();
    header.msg_iov = &raw mut vector;
    header.msg_iovlen = 1;
    if name_len > 0 {
        header.msg_name = name.as_mut_ptr().cast();
        header.msg_namelen = socklen(name_len);
    }
    if control_len > 0 {
        header.msg_control = control.bytes_mut().as_mut_ptr().cast();
        header.msg_controllen = control_len as _;
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the header's pointers are live for the call, their lengths are those of the arrays and of
    // `bytes`; the call writes to none of them.
    let sent = unsafe { libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const header, flags) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Receives up to one datagram for each of `buffers`, at most [`BATCH_MAX`]. Calls `each` with the index of
/// the buffer for every datagram, and returns their number. Excess bytes of a datagram are lost.
///
/// # Errors
///
/// Returns the kernel's error: `EAGAIN` if there is no datagram and the call must not block, or the error
/// of an earlier datagram.
pub fn receive<'a>(
    socket: impl AsFd,
    buffers: impl IntoIterator<Item = &'a mut [u8]>,
    wait: Wait,
    mut each: impl FnMut(usize, Received),
) -> io::Result<usize> {
    let mut vectors = [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; BATCH_MAX];
    let mut names = [[0; NAME_MAX]; BATCH_MAX];
    let mut controls = [Control::<DATAGRAM_MAX>::default(); BATCH_MAX];
    let mut headers = [libc::mmsghdr { msg_hdr: empty_header(), msg_len: 0 }; BATCH_MAX];
    let mut count: libc::c_uint = 0;
    let parts = vectors.iter_mut().zip(&mut names).zip(&mut controls).zip(&mut headers);
    for (buffer, (((vector, name), control), header)) in buffers.into_iter().zip(parts) {
        *vector = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        header.msg_hdr.msg_iov = vector;
        header.msg_hdr.msg_iovlen = 1;
        header.msg_hdr.msg_name = name.as_mut_ptr().cast();
        header.msg_hdr.msg_namelen = socklen(NAME_MAX);
        header.msg_hdr.msg_control = control.bytes_mut().as_mut_ptr().cast();
        header.msg_hdr.msg_controllen = DATAGRAM_MAX as _;
        count += 1;
    }
    let flags = match wait {
        Wait::Never => libc::MSG_DONTWAIT,
        Wait::ForOne => libc::MSG_WAITFORONE,
    };
    // SAFETY: the first `count` headers point to a buffer that is borrowed for the whole function, to a name
    // and to a control buffer, all live and of the given lengths. There is no time limit.
    let came = unsafe {
        libc::recvmmsg(
            socket.as_fd().as_raw_fd(),
            headers.as_mut_ptr(),
            count,
            flags as _,
            ptr::null_mut(),
        )
    };
    let came = usize::try_from(came).map_err(|_| io::Error::last_os_error())?;
    let parts = headers.iter().zip(&names).zip(&controls);
    for (index, ((header, name), control)) in parts.enumerate().take(came) {
        #[allow(clippy::unnecessary_cast, reason = "musl's type is another one")]
        let header_len = header.msg_hdr.msg_controllen as usize;
        let mut received = Received {
            len: usize_from(header.msg_len),
            from: decode_address(valid(name, header.msg_hdr.msg_namelen as usize)),
            to: None,
            segment: None,
            class: 0,
            hops: None,
        };
        for (level, kind, data) in control.messages(header_len) {
            read_control(level, kind, data, &mut received);
        }
        each(index, received);
    }
    Ok(came)
}

fn read_control(level: libc::c_int, kind: libc::c_int, data: &[u8], received: &mut Received) {
    match (level, kind) {
        (libc::IPPROTO_UDP, libc::UDP_GRO) => {
            let size = data.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes));
            received.segment =
                size.and_then(|size| u16::try_from(size).ok()).filter(|size| *size > 0);
        }
        (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
            let ip = data.get(4..).and_then(|rest| rest.first_chunk::<4>());
            received.to = ip.map(|ip| IpAddr::from(*ip)).or(received.to);
        }
        (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
            let ip = data.first_chunk::<16>();
            received.to = ip.map(|ip| IpAddr::from(*ip)).or(received.to);
        }
        // The traffic class of IPv4 is a byte, the other fields are ints.
        (libc::IPPROTO_IP, libc::IP_TOS) => received.class = data.first().copied().unwrap_or(0),
        (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => received.class = byte(data).unwrap_or(0),
        (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
            received.hops = byte(data);
        }
        _ => {}
    }
}

/// Returns the value of an int that is a byte's.
fn byte(data: &[u8]) -> Option<u8> {
    u8::try_from(i32::from_ne_bytes(*data.first_chunk()?)).ok()
}

/// Takes the next report from the socket's error queue. `bytes` receives the quoted part of the datagram.
/// Returns `None` for a queued message that is no such report. Never blocks.
///
/// # Errors
///
/// Returns the kernel's error: `EAGAIN` if the queue is empty.
pub fn receive_error(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<Option<QueuedError>> {
    let mut vector = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut name = [0; NAME_MAX];
    let mut control = Control::<REPORT_MAX>::default();
    let mut header = empty_header();
    header.msg_iov = &raw mut vector;
    header.msg_iovlen = 1;
    header.msg_name = name.as_mut_ptr().cast();
    header.msg_namelen = socklen(NAME_MAX);
    header.msg_control = control.bytes_mut().as_mut_ptr().cast();
    header.msg_controllen = REPORT_MAX as _;
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: the header points to `bytes`, a name and a control buffer, all live and of the given lengths.
    let came = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut header, flags) };
    let len = usize::try_from(came).map_err(|_| io::Error::last_os_error())?;
    let to = decode_address(valid(&name, header.msg_namelen as usize));
    #[allow(clippy::unnecessary_cast, reason = "musl's type is another one")]
    let control_len = header.msg_controllen as usize;
    let report = control.messages(control_len).find_map(|(level, kind, data)| {
        let is_report = matches!(
            (level, kind),
            (libc::IPPROTO_IP, libc::IP_RECVERR) | (libc::IPPROTO_IPV6, libc::IPV6_RECVERR)
        );
        is_report.then(|| parse_error(data, to, len)).flatten()
    });
    Ok(report)
}

/// Parses a `struct sock_extended_err` and the address of the reporter behind it.
fn parse_error(data: &[u8], to: Option<SocketAddr>, len: usize) -> Option<QueuedError> {
    let (head, reporter) = data.split_first_chunk::<16>()?;
    let word = |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let reporter = decode_address(reporter).map(|address| address.ip());
    let (origin, kind, code) = (head[4], head[5], head[6]);
    Some(QueuedError { error: word(0), origin, kind, code, info: word(8), reporter, to, len })
}

fn valid(name: &[u8; NAME_MAX], len: usize) -> &[u8] {
    &name[..len.min(NAME_MAX)]
}

#[inline]
fn socklen(len: usize) -> libc::socklen_t {
    bounded(len, libc::socklen_t::MAX)
}

fn empty_header() -> libc::msghdr {
    // SAFETY: null pointers, lengths of 0 and padding are a valid header.
    unsafe { core::mem::zeroed() }
}

#[cfg(test)]
mod tests;

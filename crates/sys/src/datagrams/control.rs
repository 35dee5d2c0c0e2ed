//! Socket addresses and control messages as bytes, in the kernel's layout for 64-bit machines.
//!
//! A control message is a header (`struct cmsghdr`: length with header, level, type) and data, padded to
//! eight bytes. Nothing here is `unsafe`: a malformed message ends the iteration.

// #syscall none: layouts alone; the parent module makes the calls

use core::net::SocketAddr;

use crate::numbers::bounded;

/// Size of the longest address, `struct sockaddr_in6`, in bytes.
pub(super) const NAME_MAX: usize = 28;
/// Size of the control buffer of a datagram, in bytes: segment size, destination, traffic class and hop limit.
pub(super) const DATAGRAM_MAX: usize = 112;
/// Size of the control buffer of an error report, in bytes: the report with an IPv6 address, and those of a datagram without
/// a segment size.
pub(super) const REPORT_MAX: usize = 152;
const HEADER_LEN: usize = 16;
const ALIGN: usize = 8;

/// Control buffer of one message.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct Control<const SIZE: usize = DATAGRAM_MAX>([u8; SIZE]);

impl<const SIZE: usize> Default for Control<SIZE> {
    fn default() -> Self {
        Control([0; SIZE])
    }
}

impl<const SIZE: usize> Control<SIZE> {
    pub(super) fn bytes_mut(&mut self) -> &mut [u8; SIZE] {
        &mut self.0
    }

    /// Returns level, type and data of each message in the first `len` bytes.
    pub(super) fn messages(&self, len: usize) -> impl Iterator<Item = (i32, i32, &[u8])> {
        let mut rest = self.0.get(..len.min(SIZE)).unwrap_or_default();
        core::iter::from_fn(move || {
            let (header, _) = rest.split_first_chunk::<HEADER_LEN>()?;
            let [len @ .., a, b, c, d, e, f, g, h] = *header;
            let len = usize::try_from(u64::from_ne_bytes(len)).ok()?;
            let data = rest.get(HEADER_LEN..len)?;
            rest = rest.get(len.next_multiple_of(ALIGN)..).unwrap_or_default();
            Some((i32::from_ne_bytes([a, b, c, d]), i32::from_ne_bytes([e, f, g, h]), data))
        })
    }
}

/// Writer of control messages into a buffer.
pub(super) struct Writer<'a> {
    control: &'a mut Control,
    len: usize,
}

impl<'a> Writer<'a> {
    pub(super) fn new(control: &'a mut Control) -> Writer<'a> {
        Writer { control, len: 0 }
    }

    /// Appends a message.
    ///
    /// # Panics
    ///
    /// Panics if the buffer is too small; the callers' messages fit.
    pub(super) fn push(&mut self, level: i32, kind: i32, data: &[u8]) {
        let len = HEADER_LEN + data.len();
        let message = &mut self.control.0[self.len..self.len + len];
        message[..8].copy_from_slice(&(len as u64).to_ne_bytes());
        message[8..12].copy_from_slice(&level.to_ne_bytes());
        message[12..16].copy_from_slice(&kind.to_ne_bytes());
        message[HEADER_LEN..].copy_from_slice(data);
        self.len += len.next_multiple_of(ALIGN);
    }

    /// Returns the number of bytes in use.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

/// Encodes an address as `struct sockaddr_in` or `struct sockaddr_in6`; returns its length too.
pub(super) fn encode_address(address: SocketAddr) -> ([u8; NAME_MAX], usize) {
    let mut name = [0; NAME_MAX];
    name[2..4].copy_from_slice(&address.port().to_be_bytes());
    match address {
        SocketAddr::V4(v4) => {
            name[..2].copy_from_slice(&family(libc::AF_INET));
            name[4..8].copy_from_slice(&v4.ip().octets());
            (name, 16)
        }
        SocketAddr::V6(v6) => {
            name[..2].copy_from_slice(&family(libc::AF_INET6));
            name[4..8].copy_from_slice(&v6.flowinfo().to_ne_bytes());
            name[8..24].copy_from_slice(&v6.ip().octets());
            name[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
            (name, 28)
        }
    }
}

/// Decodes an IPv4 or IPv6 address and its port. The scope of an IPv6 address is left out.
pub(super) fn decode_address(name: &[u8]) -> Option<SocketAddr> {
    let (&head, rest) = name.split_first_chunk::<2>()?;
    let (&port, rest) = rest.split_first_chunk::<2>()?;
    let port = u16::from_be_bytes(port);
    if head == family(libc::AF_INET) {
        return Some(SocketAddr::new((*rest.first_chunk::<4>()?).into(), port));
    }
    if head == family(libc::AF_INET6) {
        return Some(SocketAddr::new((*rest.get(4..)?.first_chunk::<16>()?).into(), port));
    }
    None
}

#[inline]
fn family(number: libc::c_int) -> [u8; 2] {
    bounded(number.cast_unsigned(), libc::sa_family_t::MAX).to_ne_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_messages_are_read_back() {
        let mut control = Control::default();
        let mut writer = Writer::new(&mut control);
        writer.push(17, 103, &[1, 2]);
        writer.push(41, 50, &[7; 20]);
        let len = writer.len();
        assert_eq!(len, 24 + 40);
        let read: Vec<_> = control.messages(len).collect();
        assert_eq!(read, [(17, 103, &[1, 2][..]), (41, 50, &[7; 20][..])]);
    }

    #[test]
    fn message_longer_than_the_buffer_or_shorter_than_its_header_ends_iteration() {
        for len in [0u64, 15, 113, u64::MAX] {
            let mut control = Control::<DATAGRAM_MAX>::default();
            control.0[..8].copy_from_slice(&len.to_ne_bytes());
            assert_eq!(control.messages(DATAGRAM_MAX).count(), 0, "{len}");
        }
        let control = Control::<DATAGRAM_MAX>::default();
        assert_eq!(control.messages(usize::MAX).count(), 0);
    }

    #[test]
    fn addresses_are_decoded_as_encoded() {
        for text in ["192.0.2.7:53", "[2001:db8::1]:65535"] {
            let address: SocketAddr = text.parse().unwrap();
            let (name, len) = encode_address(address);
            assert_eq!(decode_address(&name[..len]), Some(address));
            for cut in 0..8 {
                assert_eq!(decode_address(&name[..cut]), None);
            }
        }
        assert_eq!(decode_address(&[0; NAME_MAX]), None);
    }
}

//! Orders and reports between the processes of one launcher.
//!
//! A sequenced-packet socket, one JSON value a packet, descriptors alongside. Both ends are this
//! same program, but an end may be taken over together with its process: so what is received is
//! bounded in size, in descriptors, and in the time that handling it takes. Descriptors that are not
//! taken out of [`Descriptors`] are disposed of: closing them could block.

// #syscall all sendmsg,recvmsg: orders and reports, with descriptors
// #syscall all getsockopt 1=SOL_SOCKET: the type of a channel
// #syscall all fcntl 1=F_DUPFD_CLOEXEC: a second handle

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use ringfence_sys::descriptors::{self, Descriptors, MessageError, receive_message};
use ringfence_sys::poll::wait_readable;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::{Serialize, de::DeserializeOwned};

/// The largest message, in bytes.
pub const MESSAGE_MAX: usize = 32 * 1024;
/// The most descriptors in one message.
pub const FDS_MAX: usize = 64;

/// One end of a channel.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

/// What a channel can fail with.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The other end was closed.
    #[error("the other end of the channel was closed")]
    Closed,
    /// The other end did not answer in time.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// What was sent, or was to be sent, is over the limits.
    #[error(
        "a message of {size} bytes and {fds} descriptors (the limits are {MESSAGE_MAX} and {FDS_MAX})"
    )]
    TooLarge {
        /// Its bytes.
        size: usize,
        /// Its descriptors.
        fds: usize,
    },
    /// The other end does not read what it was sent.
    #[error("the other end does not read what it is sent")]
    Full,
    /// The message was not one that is expected here.
    #[error("a message that cannot be read: {0}")]
    Malformed(#[from] serde_json::Error),
    /// A message came with another number of descriptors than its kind has.
    #[error("a message with {found} descriptors in place of {expected}")]
    Descriptors {
        /// Those that came.
        found: usize,
        /// Those that belong to it.
        expected: usize,
    },
    /// The system refused.
    #[error("channel: {0}")]
    System(#[from] io::Error),
}

impl From<Errno> for ChannelError {
    fn from(errno: Errno) -> ChannelError {
        match errno {
            Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => ChannelError::Closed,
            Errno::AGAIN => ChannelError::Full,
            other => ChannelError::System(other.into()),
        }
    }
}

impl Channel {
    /// A connected pair.
    ///
    /// # Errors
    ///
    /// When no descriptor is free.
    pub fn pair() -> io::Result<(Channel, Channel)> {
        let (a, b) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((Channel { socket: a }, Channel { socket: b }))
    }

    /// The channel whose end this process was started with, on standard input. Standard input
    /// itself reads from `/dev/null` afterwards.
    ///
    /// # Errors
    ///
    /// When standard input is not a sequenced-packet socket: the process was not started by the
    /// launcher.
    pub fn from_stdin() -> io::Result<Channel> {
        let stdin = rustix::stdio::stdin();
        let is_channel = rustix::net::sockopt::socket_type(stdin)
            .is_ok_and(|kind| kind == SocketType::SEQPACKET);
        if !is_channel {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "`ringfence internal` is for Ringfence's own processes; use `ringfence run`",
            ));
        }
        let socket = rustix::io::fcntl_dupfd_cloexec(stdin, 3)?;
        let null = std::fs::File::open("/dev/null")?;
        rustix::stdio::dup2_stdin(&null)?;
        Ok(Channel { socket })
    }

    /// The life of a process that was started with its channel on standard input: does `work`. If that
    /// fails, the other end is told what `failed` makes of it, and the first of the pair is the exit
    /// status. Returns the exit status.
    pub fn serve_stdin<E, M: Serialize>(
        work: impl FnOnce(&Channel) -> Result<u8, E>,
        failed: impl FnOnce(E) -> (u8, M),
    ) -> u8 {
        Channel::with_stdin(|channel| {
            work(channel).unwrap_or_else(|error| {
                let (status, message) = failed(error);
                // If nobody hears it the other end is gone, and so is the user's interest.
                let _ = channel.send(&message, &[]);
                status
            })
        })
    }

    /// The same for who tells of its failures itself.
    pub(super) fn with_stdin(work: impl FnOnce(&Channel) -> u8) -> u8 {
        match Channel::from_stdin() {
            Ok(channel) => work(&channel),
            Err(error) => {
                eprintln!("ringfence: {error}");
                super::STATUS_FAILED
            }
        }
    }

    /// The channel over a connected sequenced-packet socket.
    pub fn from_fd(socket: OwnedFd) -> Channel {
        Channel { socket }
    }

    /// The same channel for another thread.
    ///
    /// # Errors
    ///
    /// When there is no descriptor left.
    pub fn try_clone(&self) -> io::Result<Channel> {
        Ok(Channel { socket: self.socket.try_clone()? })
    }

    /// Takes the socket out, to hand it to another process.
    pub fn into_fd(self) -> OwnedFd {
        self.socket
    }

    /// Sends one message. Waits while the other end's queue is full.
    ///
    /// # Errors
    ///
    /// [`ChannelError::Closed`] when nobody will read it.
    pub fn send<T: Serialize>(
        &self,
        message: &T,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ChannelError> {
        self.send_with(message, fds, SendFlags::NOSIGNAL)
    }

    /// Sends one message without waiting, for a thread that serves others as well.
    ///
    /// # Errors
    ///
    /// [`ChannelError::Full`] when the other end does not read, besides those of [`Channel::send`].
    pub fn send_now<T: Serialize>(
        &self,
        message: &T,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ChannelError> {
        self.send_with(message, fds, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    /// Closes this end without blocking, whatever the other one has sent.
    pub fn dispose(self) {
        descriptors::dispose_socket(self.socket);
    }

    /// Sends one message if there is room for it, else drops it. For remarks that must not hold
    /// up the sender.
    pub fn send_or_drop<T: Serialize>(&self, message: &T) {
        // Dropped also when the other end is gone: then nobody is left to remark to.
        let _ = self.send_with(message, &[], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }

    fn send_with<T: Serialize>(
        &self,
        message: &T,
        fds: &[BorrowedFd<'_>],
        flags: SendFlags,
    ) -> Result<(), ChannelError> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MESSAGE_MAX || fds.len() > FDS_MAX {
            return Err(ChannelError::TooLarge { size: bytes.len(), fds: fds.len() });
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(ChannelError::TooLarge { size: bytes.len(), fds: fds.len() });
        }
        rustix::io::retry_on_intr(|| {
            rustix::net::sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, flags)
        })?;
        Ok(())
    }

    /// Waits for one message and its descriptors.
    ///
    /// # Errors
    ///
    /// [`ChannelError::Closed`] when the other end is gone and every message of it was read.
    pub fn receive<T: DeserializeOwned>(&self) -> Result<(T, Descriptors), ChannelError> {
        loop {
            if let Some(received) = self.try_receive()? {
                return Ok(received);
            }
            wait_readable(self, None)?;
        }
    }

    /// As [`Channel::receive`], but gives up after `timeout`.
    ///
    /// # Errors
    ///
    /// [`ChannelError::TimedOut`] besides those of [`Channel::receive`].
    pub fn receive_within<T: DeserializeOwned>(
        &self,
        timeout: Duration,
    ) -> Result<(T, Descriptors), ChannelError> {
        if wait_readable(self, Some(timeout))? {
            self.receive()
        } else {
            Err(ChannelError::TimedOut(timeout))
        }
    }

    /// As [`Channel::receive`], but `None` when nothing is there to be read now.
    ///
    /// # Errors
    ///
    /// Those of [`Channel::receive`].
    pub fn try_receive<T: DeserializeOwned>(
        &self,
    ) -> Result<Option<(T, Descriptors)>, ChannelError> {
        self.try_receive_with(FDS_MAX)
    }

    /// As [`Channel::try_receive`], of a message that has at most `fds_max` descriptors.
    ///
    /// # Errors
    ///
    /// Those of [`Channel::receive`].
    pub fn try_receive_with<T: DeserializeOwned>(
        &self,
        fds_max: usize,
    ) -> Result<Option<(T, Descriptors)>, ChannelError> {
        let mut bytes = vec![0; MESSAGE_MAX];
        let got = match receive_message(&self.socket, &mut bytes, fds_max) {
            Ok(got) => got,
            Err(MessageError::System(Errno::AGAIN | Errno::INTR)) => return Ok(None),
            Err(MessageError::System(errno)) => return Err(errno.into()),
            Err(MessageError::Descriptors { limit }) => {
                return Err(ChannelError::TooLarge { size: 0, fds: limit + 1 });
            }
            Err(MessageError::Bytes { limit }) => {
                return Err(ChannelError::TooLarge { size: limit + 1, fds: 0 });
            }
        };
        if got.bytes == 0 {
            return Err(ChannelError::Closed);
        }
        Ok(Some((serde_json::from_slice(&bytes[..got.bytes])?, got.descriptors)))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Takes exactly `N` descriptors out of what came with a message.
///
/// # Errors
///
/// [`ChannelError::Descriptors`] for any other number; all of them are disposed of then.
pub fn expect_fds<const N: usize>(fds: Descriptors) -> Result<[OwnedFd; N], ChannelError> {
    fds.exactly().map_err(|found| ChannelError::Descriptors { found, expected: N })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_message_arrives_with_its_descriptors() {
        let (a, b) = Channel::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, b"inside").unwrap();
        a.send(&("hello", 7), &[file.as_fd()]).unwrap();
        let ((text, number), fds): ((String, u32), _) = b.receive().unwrap();
        assert_eq!((text.as_str(), number), ("hello", 7));
        let [fd] = expect_fds(fds).unwrap();
        std::io::Seek::rewind(&mut file).unwrap();
        let mut content = String::new();
        std::fs::File::from(fd).read_to_string(&mut content).unwrap();
        assert_eq!(content, "inside");
    }

    #[test]
    fn the_end_of_the_other_side_is_told_from_silence() {
        let (a, b) = Channel::pair().unwrap();
        assert!(b.try_receive::<u32>().unwrap().is_none());
        let short = Duration::from_millis(5);
        assert!(matches!(b.receive_within::<u32>(short), Err(ChannelError::TimedOut(_))));
        a.send(&1, &[]).unwrap();
        drop(a);
        assert_eq!(b.receive::<u32>().unwrap().0, 1);
        assert!(matches!(b.receive::<u32>(), Err(ChannelError::Closed)));
        assert!(matches!(b.send(&1, &[]), Err(ChannelError::Closed)));
    }

    #[test]
    fn what_is_over_the_limits_is_refused_by_both_sides() {
        let (a, b) = Channel::pair().unwrap();
        let long = "x".repeat(MESSAGE_MAX);
        assert!(matches!(a.send(&long, &[]), Err(ChannelError::TooLarge { .. })));
        rustix::net::send(&a.socket, &vec![b' '; MESSAGE_MAX + 1], SendFlags::empty()).unwrap();
        assert!(matches!(b.receive::<u32>(), Err(ChannelError::TooLarge { .. })));
    }

    #[test]
    fn surplus_descriptors_are_refused_and_closed() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (a, b) = Channel::pair().unwrap();
        a.send(&1, &[writer.as_fd(), writer.as_fd()]).unwrap();
        drop(writer);
        let (_, fds) = b.receive::<u32>().unwrap();
        let refused = expect_fds::<1>(fds);
        assert!(matches!(refused, Err(ChannelError::Descriptors { found: 2, expected: 1 })));
        // Nobody holds the writing end any more.
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]).unwrap(), 0);
    }

    #[test]
    fn words_that_are_no_message_are_refused() {
        let (a, b) = Channel::pair().unwrap();
        rustix::net::send(&a.socket, b"}{", SendFlags::empty()).unwrap();
        assert!(matches!(b.receive::<u32>(), Err(ChannelError::Malformed(_))));
    }
}

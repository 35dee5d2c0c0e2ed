//! Channels between processes: messages with descriptors over a sequenced-packet socket.
//!
//! Each packet is one JSON value, with up to [`FDS_MAX`] descriptors as ancillary data. Both ends
//! run this program, but a hostile guest may take over one of the processes. The receiver therefore
//! bounds a message's size and its number of descriptors.
//!
//! Descriptors that the caller does not take out of [`Descriptors`] are disposed of on another
//! thread, because closing them could block.

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

/// Maximum length of a message in bytes.
pub const MESSAGE_MAX: usize = 32 * 1024;
/// Maximum number of descriptors in one message.
pub const FDS_MAX: usize = 64;

/// One end of a channel. Both ends can send and receive.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

/// Reasons for which no message was sent or received.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The other end is closed.
    #[error("the other end of the channel was closed")]
    Closed,
    /// No message arrived within this time.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The message exceeds a limit; `0` stands for the part that was not counted.
    #[error(
        "a message of {size} bytes and {fds} descriptors (the limits are {MESSAGE_MAX} and {FDS_MAX})"
    )]
    TooLarge {
        /// Length in bytes.
        size: usize,
        fds: usize,
    },
    /// The socket's queue is full: the other end does not read.
    #[error("the other end does not read what it is sent")]
    Full,
    /// The message is not valid JSON or not of the expected type.
    #[error("a message that cannot be read: {0}")]
    Malformed(#[from] serde_json::Error),
    /// The number of descriptors differs from the one that the message's type requires.
    #[error("a message with {found} descriptors in place of {expected}")]
    Descriptors { found: usize, expected: usize },
    /// Too many descriptors that the other end sent are not closed yet.
    #[error("more than {limit} descriptors of this connection are not closed yet")]
    Pending { limit: usize },
    /// A system call failed.
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
    /// Creates a pair of connected ends.
    ///
    /// # Errors
    ///
    /// Fails if no descriptor is free.
    pub fn pair() -> io::Result<(Channel, Channel)> {
        let (a, b) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((Channel { socket: a }, Channel { socket: b }))
    }

    /// Takes over the channel that this process was started with on standard input. Standard input
    /// is `/dev/null` afterwards.
    ///
    /// # Errors
    ///
    /// Fails if standard input is not a sequenced-packet socket: the process was not started by the
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

    /// Runs `work` with the channel on standard input and returns the exit status. If `work` fails,
    /// `failed` converts the error into an exit status and a message, which is sent to the other
    /// end.
    pub fn serve_stdin<E, M: Serialize>(
        work: impl FnOnce(&Channel) -> Result<u8, E>,
        failed: impl FnOnce(E) -> (u8, M),
    ) -> u8 {
        Channel::with_stdin(|channel| {
            work(channel).unwrap_or_else(|error| {
                let (status, message) = failed(error);
                // A failed send means that the other end is closed: there is no process to report
                // to.
                let _ = channel.send(&message, &[]);
                status
            })
        })
    }

    /// Runs `work`, as [`Channel::serve_stdin`] does, for a function that reports its errors
    /// itself.
    pub(super) fn with_stdin(work: impl FnOnce(&Channel) -> u8) -> u8 {
        match Channel::from_stdin() {
            Ok(channel) => work(&channel),
            Err(error) => {
                eprintln!("ringfence: {error}");
                super::ending::STATUS_FAILED
            }
        }
    }

    /// Wraps a connected sequenced-packet socket.
    pub fn from_fd(socket: OwnedFd) -> Channel {
        Channel { socket }
    }

    /// Duplicates the handle, for another thread.
    ///
    /// # Errors
    ///
    /// Fails if no descriptor is free.
    pub fn try_clone(&self) -> io::Result<Channel> {
        Ok(Channel { socket: self.socket.try_clone()? })
    }

    /// Returns the socket, to pass it to another process.
    pub fn into_fd(self) -> OwnedFd {
        self.socket
    }

    /// Sends one message. Blocks while the other end's queue is full.
    ///
    /// # Errors
    ///
    /// Returns [`ChannelError::Closed`] if the other end is closed.
    pub fn send<T: Serialize>(
        &self,
        message: &T,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ChannelError> {
        self.send_with(message, fds, SendFlags::NOSIGNAL)
    }

    /// Sends one message without blocking, for a thread that serves several channels.
    ///
    /// # Errors
    ///
    /// Returns [`ChannelError::Full`] if the queue is full, and the errors of [`Channel::send`].
    pub fn send_now<T: Serialize>(
        &self,
        message: &T,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ChannelError> {
        self.send_with(message, fds, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    /// Closes this end without blocking. Messages that were not received are disposed of.
    pub fn dispose(self) {
        descriptors::dispose_socket(self.socket);
    }

    /// Sends one message if the queue has room, and drops it otherwise. For reports that must not
    /// block the sender.
    pub fn send_or_drop<T: Serialize>(&self, message: &T) {
        // Also dropped if the other end is closed: there is no process to report to.
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

    /// Blocks until a message arrives, and returns it with its descriptors.
    ///
    /// # Errors
    ///
    /// Returns [`ChannelError::Closed`] if the other end is closed and all its messages were
    /// received.
    pub fn receive<T: DeserializeOwned>(&self) -> Result<(T, Descriptors), ChannelError> {
        loop {
            if let Some(received) = self.try_receive()? {
                return Ok(received);
            }
            wait_readable(self, None)?;
        }
    }

    /// Receives a message, as [`Channel::receive`] does, within a time limit.
    ///
    /// # Errors
    ///
    /// Returns [`ChannelError::TimedOut`] after `timeout`, and the errors of [`Channel::receive`].
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

    /// Receives a message without blocking. Returns `None` if the queue is empty.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Channel::receive`].
    pub fn try_receive<T: DeserializeOwned>(
        &self,
    ) -> Result<Option<(T, Descriptors)>, ChannelError> {
        self.try_receive_with(FDS_MAX)
    }

    /// Receives a message of at most `fds_max` descriptors without blocking.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Channel::receive`].
    pub fn try_receive_with<T: DeserializeOwned>(
        &self,
        fds_max: usize,
    ) -> Result<Option<(T, Descriptors)>, ChannelError> {
        let mut bytes = vec![0; MESSAGE_MAX];
        let mut got = receive_message(&self.socket, &mut bytes, fds_max);
        if matches!(got, Err(MessageError::System(Errno::CONNRESET))) {
            // The kernel reports once that the other end was closed with messages unread, ahead of the messages that
            // the other end had sent.
            got = receive_message(&self.socket, &mut bytes, fds_max);
        }
        let got = match got {
            Ok(got) => got,
            Err(MessageError::System(Errno::AGAIN | Errno::INTR)) => return Ok(None),
            Err(MessageError::System(errno)) => return Err(errno.into()),
            Err(MessageError::Descriptors { limit }) => {
                return Err(ChannelError::TooLarge { size: 0, fds: limit + 1 });
            }
            Err(MessageError::Pending { limit }) => return Err(ChannelError::Pending { limit }),
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

/// Takes exactly `N` descriptors out of a message.
///
/// # Errors
///
/// Returns [`ChannelError::Descriptors`] for any other number, and disposes of all of them.
pub fn expect_fds<const N: usize>(fds: Descriptors) -> Result<[OwnedFd; N], ChannelError> {
    fds.exactly().map_err(|found| ChannelError::Descriptors { found, expected: N })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn disposed_channel_with_lingering_descriptor_in_its_queue_does_not_block() {
        let (near, far) = Channel::pair().unwrap();
        let lingering = ringfence_sys::descriptors::testing::Lingering::new();
        far.send_now(&1, &[lingering.fd.as_fd()]).unwrap();
        // The queue holds the last reference.
        let ends = (lingering._listener, lingering._reader);
        drop(lingering.fd);
        let (sender, done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            near.dispose();
            sender.send(())
        });
        done.recv_timeout(std::time::Duration::from_secs(60)).expect("the caller is not blocked");
        drop(ends);
    }

    #[test]
    fn message_arrives_with_its_descriptors() {
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
    fn closed_end_and_timeout_are_different_errors() {
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
    fn message_of_an_end_that_closed_with_messages_unread_is_received() {
        let (a, b) = Channel::pair().unwrap();
        b.send(&"order", &[]).unwrap();
        a.send(&"report", &[]).unwrap();
        drop(a);
        assert_eq!(b.receive::<String>().unwrap().0, "report");
        assert!(matches!(b.receive::<String>(), Err(ChannelError::Closed)));
    }

    #[test]
    fn message_over_the_limit_is_refused_by_sender_and_receiver() {
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
        // No copy of the writing end is open any more.
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]).unwrap(), 0);
    }

    #[test]
    fn malformed_message_is_rejected() {
        let (a, b) = Channel::pair().unwrap();
        rustix::net::send(&a.socket, b"}{", SendFlags::empty()).unwrap();
        assert!(matches!(b.receive::<u32>(), Err(ChannelError::Malformed(_))));
    }
}

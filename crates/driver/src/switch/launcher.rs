//! Connection of a launcher to the driver domain, and its time limits. The launcher's guest
//! is attached as long as the connection is open.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use crate::switchboard::FromDriver;
use ringfence_sandbox::channel::{Channel, ChannelError, FDS_MAX};

/// Time limit for the proof that a connection comes from a launcher.
const PROOF_WITHIN: Duration = Duration::from_secs(5);
/// Time limit for silence of an admitted connection without a guest.
const SILENT_FOR: Duration = Duration::from_secs(120);
/// Time for which the driver domain delays its end for a connection without a guest.
const NEWCOMER_FOR: Duration = Duration::from_secs(2);

/// A launcher's connection with its state.
pub(super) struct LauncherConnection {
    pub(super) channel: Channel,
    /// Set once the connection has been proved to come from a launcher.
    is_admitted: bool,
    /// Set once a message did not fit into the connection's queue.
    is_slow: bool,
    since: Instant,
    heard: Instant,
}

impl LauncherConnection {
    /// Wraps a connection that was accepted now.
    pub(super) fn new(channel: Channel) -> LauncherConnection {
        let now = Instant::now();
        LauncherConnection { channel, is_admitted: false, is_slow: false, since: now, heard: now }
    }

    /// Returns `true` once the connection is admitted.
    pub(super) fn is_admitted(&self) -> bool {
        self.is_admitted
    }

    /// Marks the connection as admitted.
    pub(super) fn admit(&mut self) {
        self.is_admitted = true;
    }

    /// Records that a message was received.
    pub(super) fn touch(&mut self, now: Instant) {
        self.heard = now;
    }

    /// Returns the maximum number of descriptors in the next message. The proof is one.
    pub(super) fn fds_max(&self) -> usize {
        if self.is_admitted { FDS_MAX } else { 1 }
    }

    /// Sends a message without blocking. A full queue marks the connection as slow.
    pub(super) fn send(&mut self, message: &FromDriver, fds: &[BorrowedFd<'_>]) {
        // A closed connection is noticed by the next receive.
        self.is_slow |= matches!(self.channel.send_now(message, fds), Err(ChannelError::Full));
    }

    /// Returns `true` if the launcher does not read its messages. The connection must be closed
    /// then.
    pub(super) fn is_slow(&self) -> bool {
        self.is_slow
    }

    /// Returns the time at which a connection without a guest expires if it stays silent.
    pub(super) fn expires(&self) -> Instant {
        if self.is_admitted { self.heard + SILENT_FOR } else { self.since + PROOF_WITHIN }
    }

    /// Returns the time until which the driver domain delays its end for this connection. `left` is
    /// the time at which the last guest left.
    pub(super) fn newcomer_until(&self, left: Option<Instant>) -> Instant {
        let left = left.filter(|_| self.is_admitted).unwrap_or(self.since);
        self.since.max(left) + NEWCOMER_FOR
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_whose_launcher_does_not_read_becomes_slow_without_blocking() {
        let (near, far) = Channel::pair().unwrap();
        let mut connection = LauncherConnection::new(near);
        let message = FromDriver::Bye("x".repeat(1000));
        for _ in 0..100_000 {
            connection.send(&message, &[]);
            if connection.is_slow() {
                break;
            }
        }
        assert!(connection.is_slow());
        drop(far);
    }

    #[test]
    fn connection_without_proof_expires_first_and_waits_for_no_last_guest() {
        let (near, _far) = Channel::pair().unwrap();
        let mut connection = LauncherConnection::new(near);
        assert_eq!(
            (connection.fds_max(), connection.expires()),
            (1, connection.since + PROOF_WITHIN)
        );
        let left = connection.since + Duration::from_secs(60);
        assert_eq!(connection.newcomer_until(Some(left)), connection.since + NEWCOMER_FOR);
        connection.admit();
        assert_eq!(
            (connection.fds_max(), connection.expires()),
            (FDS_MAX, connection.since + SILENT_FOR)
        );
        assert_eq!(connection.newcomer_until(Some(left)), left + NEWCOMER_FOR);
    }
}

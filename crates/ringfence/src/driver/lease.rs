//! A launcher's connection to the driver domain. The guest that it asked for lives as long as that.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use ringfence_sandbox::channel::{Channel, ChannelError, FDS_MAX};

use crate::switchboard::FromDriver;

/// How long a connection may take to prove that it is a launcher's.
const PROOF_WITHIN: Duration = Duration::from_secs(5);
/// How long an admitted connection without a guest may say nothing.
const SILENT_FOR: Duration = Duration::from_secs(120);
/// How long the end of the driver domain waits for a connection without a guest.
const NEWCOMER_FOR: Duration = Duration::from_secs(2);

/// A connection and its times.
pub(super) struct Lease {
    pub(super) channel: Channel,
    /// It proved to be a launcher's.
    is_admitted: bool,
    /// It does not read what it is sent.
    is_slow: bool,
    since: Instant,
    heard: Instant,
}

impl Lease {
    /// A connection that came now.
    pub(super) fn new(channel: Channel) -> Lease {
        let now = Instant::now();
        Lease { channel, is_admitted: false, is_slow: false, since: now, heard: now }
    }

    /// Returns `true` once it proved to be a launcher's.
    pub(super) fn is_admitted(&self) -> bool {
        self.is_admitted
    }

    /// It proved to be a launcher's.
    pub(super) fn admit(&mut self) {
        self.is_admitted = true;
    }

    /// It said something.
    pub(super) fn touch(&mut self, now: Instant) {
        self.heard = now;
    }

    /// Most descriptors of its next message. The proof is one.
    pub(super) fn fds_max(&self) -> usize {
        if self.is_admitted { FDS_MAX } else { 1 }
    }

    /// Sends a message without waiting. A connection that has no room for it is to end.
    pub(super) fn say(&mut self, message: &FromDriver, fds: &[BorrowedFd<'_>]) {
        // One that is gone is noticed at the next look at it.
        self.is_slow |= matches!(self.channel.send_now(message, fds), Err(ChannelError::Full));
    }

    /// Returns `true` if it does not read what it is sent.
    pub(super) fn is_slow(&self) -> bool {
        self.is_slow
    }

    /// Time at which it ends if it has no guest and says nothing.
    pub(super) fn expires(&self) -> Instant {
        if self.is_admitted { self.heard + SILENT_FOR } else { self.since + PROOF_WITHIN }
    }

    /// Time until which the end of the driver domain, whose last guest left at `left`, waits for it.
    pub(super) fn newcomer_until(&self, left: Option<Instant>) -> Instant {
        let left = left.filter(|_| self.is_admitted).unwrap_or(self.since);
        self.since.max(left) + NEWCOMER_FOR
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_whose_launcher_does_not_read_becomes_slow_without_blocking() {
        let (near, far) = Channel::pair().unwrap();
        let mut lease = Lease::new(near);
        let message = FromDriver::Bye("x".repeat(1000));
        for _ in 0..100_000 {
            lease.say(&message, &[]);
            if lease.is_slow() {
                break;
            }
        }
        assert!(lease.is_slow());
        drop(far);
    }

    #[test]
    fn lease_without_proof_expires_first_and_waits_for_no_last_guest() {
        let (near, _far) = Channel::pair().unwrap();
        let mut lease = Lease::new(near);
        assert_eq!((lease.fds_max(), lease.expires()), (1, lease.since + PROOF_WITHIN));
        let left = lease.since + Duration::from_secs(60);
        assert_eq!(lease.newcomer_until(Some(left)), lease.since + NEWCOMER_FOR);
        lease.admit();
        assert_eq!((lease.fds_max(), lease.expires()), (FDS_MAX, lease.since + SILENT_FOR));
        assert_eq!(lease.newcomer_until(Some(left)), left + NEWCOMER_FOR);
    }
}

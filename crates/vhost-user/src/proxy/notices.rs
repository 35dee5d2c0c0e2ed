//! Requests of a backend, on a channel between it and a proxy or a shield: its configuration space has changed.
//!
//! A request can come at any time, also while an answer is awaited. It is acknowledged at once, if the backend wants that,
//! and the hypervisor gets a notice. Of a backend that floods the channel, [`REQUESTS_MAX`] requests are read in an
//! [`INTERVAL`], and the hypervisor gets one notice in it. The other requests wait in the socket's queue, which fills.

// #syscall proxy,shield ppoll: requests of a backend while an answer is awaited

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use ringfence_sys::descriptors::Descriptors;
use ringfence_wire::vhost_user::{protocol_feature as protocol, reply_word};
use rustix::event::{PollFd, PollFlags};

use super::end::{End, Incoming, Kind, Outgoing};
use super::fault::ProxyFault;
use super::table::{self, CONFIG_CHANGE};

/// Maximum of requests of a backend in one [`INTERVAL`].
pub(crate) const REQUESTS_MAX: u32 = 32;
/// Minimum time between two notices for a hypervisor.
pub(crate) const INTERVAL: Duration = Duration::from_millis(100);

/// Channel of a backend's requests, and the notice for the hypervisor.
#[derive(Debug, Default)]
pub(crate) struct Notices {
    /// Own end of the channel. `None` for a backend without one, or that has closed it.
    end: Option<End>,
    /// The backend can ask for acknowledgements.
    acknowledges: bool,
    /// The backend can have changes of its configuration space.
    has_config: bool,
    /// Start of the interval of now.
    since: Option<Instant>,
    /// Requests that were read in it.
    requests: u32,
    /// The hypervisor was told in it.
    is_told: bool,
    /// The hypervisor is to be told.
    is_due: bool,
}

impl Notices {
    /// Uses an end of a channel with a backend of these protocol features.
    pub(crate) fn new(end: OwnedFd, protocol: u64) -> Notices {
        let [acknowledges, has_config] =
            [protocol::REPLY_ACK, protocol::CONFIG].map(|feature| protocol & feature != 0);
        Notices { end: Some(End::new(end)), acknowledges, has_config, ..Notices::default() }
    }

    /// Notes that the hypervisor is to be told.
    pub(crate) fn note(&mut self) {
        self.is_due = true;
    }

    /// Returns the socket of the channel, if it is open.
    pub(crate) fn socket(&self) -> Option<&End> {
        self.end.as_ref()
    }

    /// Returns the channel with the event at which [`Notices::serve`] has work, while there may be any.
    pub(crate) fn wait(&self) -> Option<PollFd<'_>> {
        let end = self.end.as_ref()?;
        match end.is_full() {
            true => Some(PollFd::new(end, PollFlags::OUT)),
            false => (self.requests < REQUESTS_MAX).then(|| PollFd::new(end, PollFlags::IN)),
        }
    }

    /// Reads the requests that are there, and acknowledges them.
    ///
    /// # Errors
    ///
    /// Returns [`ProxyFault`] for another request, or a part of one that is overdue.
    pub(crate) fn serve(&mut self, now: Instant) -> Result<(), ProxyFault> {
        if self.since.is_some_and(|since| since + INTERVAL <= now) {
            (self.since, self.requests, self.is_told) = (None, 0, false);
        }
        loop {
            let Some(end) = &mut self.end else { return Ok(()) };
            end.check_time(now)?;
            if !end.flush()? {
                self.close();
                return Ok(());
            }
            if end.is_full() || self.requests >= REQUESTS_MAX {
                return Ok(());
            }
            let message = match end.receive(Kind::Request)? {
                Incoming::Message(message) => message,
                Incoming::Nothing => return Ok(()),
                Incoming::Gone => {
                    self.close();
                    return Ok(());
                }
            };
            table::check_channel_request(message.header, self.has_config)?;
            self.since.get_or_insert(now);
            self.requests += 1;
            self.is_due = true;
            if message.header.needs_reply && self.acknowledges {
                let bytes = reply_word(CONFIG_CHANGE, 0).to_vec();
                end.send(Outgoing::new(bytes, Descriptors::default()));
            }
        }
    }

    /// Returns `true` if the hypervisor is to be told now.
    pub(crate) fn is_due(&self) -> bool {
        self.is_due && !self.is_told
    }

    /// Notes that the hypervisor was told, or has no room at present: then it is told in the next interval.
    pub(crate) fn told(&mut self, had_room: bool, now: Instant) {
        self.since.get_or_insert(now);
        self.is_told = true;
        self.is_due = !had_room;
    }

    /// Returns the time at which [`Notices::serve`] is due although nothing happens.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let waits = self.requests >= REQUESTS_MAX || (self.is_due && self.is_told);
        let next = self.since.filter(|_| waits).map(|since| since + INTERVAL);
        let rest = self.end.as_ref().and_then(End::deadline);
        [next, rest].into_iter().flatten().min()
    }

    /// Returns `true` until the backend has closed the channel and the hypervisor got every notice.
    pub(crate) fn is_open(&self) -> bool {
        self.end.is_some() || self.is_due
    }

    /// Closes the channel without waiting. A notice stays due.
    pub(crate) fn close(&mut self) {
        if let Some(end) = self.end.take() {
            end.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::os::unix::net::UnixStream;

    use ringfence_wire::vhost_user::{config_changed, request};

    use super::*;
    use crate::proxy::end::HALF_MAX;

    fn channel(acknowledges: bool) -> (Notices, UnixStream) {
        let (own, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let acknowledges = if acknowledges { protocol::REPLY_ACK } else { 0 };
        (Notices::new(own.into(), protocol::CONFIG | acknowledges), theirs)
    }

    #[test]
    fn flood_is_read_in_parts_and_causes_one_notice_in_an_interval() {
        let (mut notices, mut backend) = channel(false);
        let begun = Instant::now();
        notices.serve(begun).unwrap();
        assert!(!notices.is_due() && notices.deadline().is_none());
        (0..3 * REQUESTS_MAX).for_each(|_| backend.write_all(&config_changed()).unwrap());
        for interval in 0..3 {
            let start = begun + interval * INTERVAL;
            for now in [start, start + INTERVAL / 2] {
                notices.serve(now).unwrap();
                assert_eq!(notices.requests, REQUESTS_MAX);
                assert!(notices.wait().is_none(), "nothing is read before the next interval");
                assert_eq!(notices.deadline(), Some(start + INTERVAL));
                assert_eq!(notices.is_due(), now == start);
                if now == start {
                    notices.told(true, now);
                }
            }
        }
        notices.serve(begun + 3 * INTERVAL).unwrap();
        assert!(!notices.is_due() && notices.deadline().is_none());
        assert!(notices.wait().is_some());
    }

    #[test]
    fn change_behind_a_notice_is_told_in_the_next_interval_and_so_is_one_without_room() {
        for had_room in [true, false] {
            let (mut notices, mut backend) = channel(false);
            let begun = Instant::now();
            backend.write_all(&config_changed()).unwrap();
            notices.serve(begun).unwrap();
            assert!(notices.is_due());
            notices.told(had_room, begun);
            if had_room {
                assert_eq!(notices.deadline(), None);
                backend.write_all(&config_changed()).unwrap();
                notices.serve(begun).unwrap();
            }
            assert!(!notices.is_due());
            assert_eq!(notices.deadline(), Some(begun + INTERVAL));
            notices.serve(begun + INTERVAL).unwrap();
            assert!(notices.is_due());
        }
    }

    #[test]
    fn request_is_acknowledged_where_that_was_negotiated_and_asked_for() {
        for (acknowledges, asks) in [(true, true), (true, false), (false, true)] {
            let (mut notices, mut backend) = channel(acknowledges);
            backend.write_all(&request(CONFIG_CHANGE, asks, &[])).unwrap();
            notices.serve(Instant::now()).unwrap();
            let mut answer = [0; 64];
            match backend.read(&mut answer) {
                Ok(len) if acknowledges && asks => {
                    assert_eq!(answer[..len], reply_word(CONFIG_CHANGE, 0)[..]);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    assert!(!(acknowledges && asks));
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn backend_that_reads_no_acknowledgement_is_not_read() {
        let (mut notices, mut backend) = channel(true);
        let mut now = Instant::now();
        let asking = request(CONFIG_CHANGE, true, &[]);
        let mut sent = 0_u32;
        // Its queue of acknowledgements fills, then that of its requests.
        while notices.socket().is_some_and(|end| !end.is_full()) || backend.write(&asking).is_ok() {
            let _ = backend.write(&asking);
            sent += 1;
            now += INTERVAL;
            notices.serve(now).unwrap();
            assert!(sent < 100_000, "the channel is read on");
        }
        assert!(notices.wait().is_some(), "room for an acknowledgement is awaited");
        backend.set_nonblocking(false).unwrap();
        backend.read_exact(&mut [0; 20]).unwrap();
    }

    #[test]
    fn half_of_a_request_is_a_fault_in_time() {
        let (mut notices, mut backend) = channel(false);
        backend.write_all(&config_changed()[..5]).unwrap();
        notices.serve(Instant::now()).unwrap();
        let due = notices.deadline().expect("the rest is awaited");
        notices.serve(due - HALF_MAX / 2).unwrap();
        let fault = notices.serve(due).unwrap_err();
        assert!(fault.to_string().contains("5 bytes of a message of 12"), "{fault}");
    }

    #[test]
    fn end_of_the_channel_is_no_fault_and_what_was_sent_before_counts() {
        let (mut notices, mut backend) = channel(false);
        backend.write_all(&config_changed()).unwrap();
        drop(backend);
        notices.serve(Instant::now()).unwrap();
        assert!(notices.is_due() && notices.socket().is_none());
    }
}

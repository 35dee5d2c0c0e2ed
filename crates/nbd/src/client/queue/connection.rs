//! Connection state of a queue: connect, loss, reconnect and timeouts.

// #syscall driver,disk,daemon epoll_ctl: waiting for a server and for time
// #syscall driver,disk,daemon timerfd_settime,read: how long a server may take

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringfence_sys::poll::timespec;
use rustix::event::epoll;
use rustix::time::{Itimerspec, TimerfdTimerFlags};

use super::{BACKOFF, BACKOFF_MAX, NbdQueue, Owner, QueueState, Replay};
use crate::client::link::NbdLink;
use crate::protocol::agree::Negotiated;
use crate::protocol::numbers::transmission;

impl NbdQueue {
    pub(super) fn watch(&mut self, link: &NbdLink) -> io::Result<()> {
        self.watches_writing = link.wants_to_write();
        let flags = interest(self.watches_writing);
        epoll::add(&self.epoll, link.stream(), epoll::EventData::new_u64(1), flags)?;
        Ok(())
    }

    pub(super) fn connect(&mut self) {
        if let Some(dialer) = &self.dialer {
            dialer.request();
            self.state = QueueState::Asked(self.attempt_deadline());
            return;
        }
        let link = NbdLink::connect(&self.shared.target);
        self.join(link);
    }

    /// Returns the end of the time limit of a connection attempt.
    fn attempt_deadline(&self) -> Instant {
        Instant::now() + self.shared.options.connect
    }

    fn join(&mut self, link: io::Result<NbdLink>) {
        let watched = link.and_then(|link| self.watch(&link).map(|()| link));
        match watched {
            Ok(link) => self.state = QueueState::Joining(link, self.attempt_deadline()),
            Err(error) => self.lost(&error),
        }
    }

    /// Takes a connection that another process or thread opened on request.
    pub(super) fn take_connection(&mut self) {
        let shared = Arc::clone(&self.shared);
        let Some(connection) = self.dialer.as_ref().and_then(|dialer| dialer.take()) else {
            return;
        };
        if matches!(self.state, QueueState::Asked(_) | QueueState::Down(_)) {
            self.join(connection.and_then(|stream| NbdLink::over(stream, false, &shared.target)));
        }
    }

    pub(super) fn joined(&mut self, settled: &Negotiated) -> io::Result<()> {
        let (was, is) = (&self.shared.settled.offer, &settled.offer);
        let same = is.bytes >= self.shared.geometry.bytes
            && is.block_min <= self.shared.geometry.sector_size
            && is.payload_max >= was.payload_max
            && is.has(was.flags & !transmission::READ_ONLY)
            && (!is.is_read_only() || self.shared.geometry.read_only);
        if !same {
            return Err(io::Error::other("the server offers another disk than before"));
        }
        if self.loss_logged {
            tracing::info!("the NBD server is back");
            self.loss_logged = false;
        }
        self.backoff = BACKOFF;
        self.last_reply = Instant::now();
        let again = Replay { sent: 0, waiting: 0, failed: false };
        self.replay = self.journal.is_some().then_some(again);
        let joining = std::mem::replace(&mut self.state, QueueState::Down(self.last_reply));
        if let QueueState::Joining(link, _) = joining {
            self.state = QueueState::Up(link);
        }
        Ok(())
    }

    /// Handles the loss of the connection. Unanswered commands will be sent again.
    pub(super) fn lost(&mut self, why: &io::Error) {
        if !self.loss_logged {
            tracing::warn!("the NBD server is lost ({why}): trying to connect again");
            self.loss_logged = true;
        }
        let now = Instant::now();
        let was_up = matches!(self.state, QueueState::Up(_));
        if was_up && self.journal.is_none() {
            let mut durability = self.durability();
            durability.suspect |= durability.written > durability.flushed;
        }
        let wait = if was_up { Duration::ZERO } else { self.backoff };
        if !was_up {
            self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
        }
        self.state = QueueState::Down(now + wait);
        self.replay = None;
        self.own_flush = false;
        self.commands.retain(|_, command| matches!(command.owner, Owner::Request(_)));
        self.unsent = self.commands.keys().copied().collect();
    }

    /// Updates the epoll interest and the timer.
    pub(super) fn settle(&mut self) {
        let (QueueState::Joining(link, _) | QueueState::Up(link)) = &self.state else {
            return self.arm();
        };
        let writing = link.wants_to_write();
        if writing != self.watches_writing {
            let data = epoll::EventData::new_u64(1);
            if epoll::modify(&self.epoll, link.stream(), data, interest(writing)).is_ok() {
                self.watches_writing = writing;
            }
        }
        self.arm();
    }

    /// Sets the timer to the next deadline, unless it expires before.
    fn arm(&mut self) {
        let options = &self.shared.options;
        let connection = match &self.state {
            QueueState::Down(again) => Some(*again),
            QueueState::Joining(_, until) | QueueState::Asked(until) => Some(*until),
            QueueState::Up(link) => (link.open() > 0).then(|| self.last_reply + options.stall),
        };
        let oldest = self.requests.first_key_value().map(|(_, oldest)| oldest.since);
        let age = oldest.map(|since| since + options.give_up);
        let Some(next) = connection.into_iter().chain(age).min() else { return };
        if self.armed.is_some_and(|armed| armed <= next) {
            return;
        }
        // Zero would disarm the timer.
        let wait = next.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let setting =
            Itimerspec { it_interval: timespec(Duration::ZERO), it_value: timespec(wait) };
        let flags = TimerfdTimerFlags::empty();
        if rustix::time::timerfd_settime(&self.timer, flags, &setting).is_ok() {
            self.armed = Some(next);
        }
    }

    /// Handles expired time limits of the connection and of requests.
    pub(super) fn expire(&mut self) {
        let now = Instant::now();
        if self.armed.is_some_and(|armed| armed <= now) {
            let _ = rustix::io::read(&self.timer, &mut [0; 8]);
            self.armed = None;
        }
        let (stall, give_up) = (self.shared.options.stall, self.shared.options.give_up);
        let late = match &self.state {
            QueueState::Down(_) => false,
            QueueState::Joining(_, until) | QueueState::Asked(until) => *until <= now,
            QueueState::Up(link) => link.open() > 0 && self.last_reply + stall <= now,
        };
        if late {
            self.lost(&io::ErrorKind::TimedOut.into());
        }
        let mut gave_up = false;
        while let Some((key, oldest)) = self.requests.first_key_value()
            && oldest.since + give_up <= now
        {
            let key = *key;
            self.commands.retain(|_, command| command.owner != Owner::Request(key));
            if let Some(active) = self.requests.remove(&key) {
                self.end(active.request, Err(libc::EIO));
            }
            gave_up = true;
        }
        if gave_up {
            let commands = &self.commands;
            self.unsent.retain(|cookie| commands.contains_key(cookie));
            if matches!(self.state, QueueState::Up(_)) {
                // A late write of this connection must not overwrite a newer one.
                self.lost(&io::Error::other("it answers too late"));
            }
        }
    }
}

fn interest(writing: bool) -> epoll::EventFlags {
    let mut flags = epoll::EventFlags::IN;
    flags.set(epoll::EventFlags::OUT, writing);
    flags
}

//! The connection: made, lost, made again; and what takes too long.

// #syscall driver,daemon epoll_ctl: waiting for a server and for time
// #syscall driver,daemon timerfd_settime,read: how long a server may take

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringfence_sys::poll::timespec;
use rustix::event::epoll;
use rustix::time::{Itimerspec, TimerfdTimerFlags};

use super::{BACKOFF, BACKOFF_MAX, NbdQueue, Owner, Replay, State};
use crate::client::link::{Link, Place};
use crate::protocol::agree::Settled;
use crate::protocol::numbers::transmission;

impl NbdQueue {
    pub(super) fn watch(&mut self, link: &Link) -> io::Result<()> {
        self.watches_writing = link.wants_to_write();
        let flags = interest(self.watches_writing);
        epoll::add(&self.epoll, link.stream(), epoll::EventData::new_u64(1), flags)?;
        Ok(())
    }

    pub(super) fn connect(&mut self) {
        if let Place::Handed(dialer) = &self.shared.target.place {
            dialer.ask();
            self.state = State::Asked(self.until());
            return;
        }
        let link = Link::connect(&self.shared.target);
        self.join(link);
    }

    /// Until when a connection must be there.
    fn until(&self) -> Instant {
        Instant::now() + self.shared.options.connect
    }

    fn join(&mut self, link: io::Result<Link>) {
        let watched = link.and_then(|link| self.watch(&link).map(|()| link));
        match watched {
            Ok(link) => self.state = State::Joining(link, self.until()),
            Err(error) => self.lost(&error),
        }
    }

    /// A connection that was asked for may have come.
    pub(super) fn take_connection(&mut self) {
        let shared = Arc::clone(&self.shared);
        let Place::Handed(dialer) = &shared.target.place else { return };
        let Some(connection) = dialer.take() else { return };
        if matches!(self.state, State::Asked(_) | State::Down(_)) {
            self.join(connection.and_then(|stream| Link::over(stream, false, &shared.target)));
        }
    }

    pub(super) fn joined(&mut self, settled: &Settled) -> io::Result<()> {
        let (was, is) = (&self.shared.settled.offer, &settled.offer);
        let same = is.bytes >= self.shared.geometry.bytes
            && is.block_min <= self.shared.geometry.sector_size
            && is.payload_max >= was.payload_max
            && is.has(was.flags & !transmission::READ_ONLY)
            && (!is.is_read_only() || self.shared.geometry.read_only);
        if !same {
            return Err(io::Error::other("the server offers another disk than before"));
        }
        if self.said {
            tracing::info!("the NBD server is back");
            self.said = false;
        }
        self.backoff = BACKOFF;
        self.heard = Instant::now();
        let again = Replay { sent: 0, waiting: 0, failed: false };
        self.replay = self.journal.is_some().then_some(again);
        let joining = std::mem::replace(&mut self.state, State::Down(self.heard));
        if let State::Joining(link, _) = joining {
            self.state = State::Up(link);
        }
        Ok(())
    }

    /// There is no connection any more. What had no answer will be asked again.
    pub(super) fn lost(&mut self, why: &io::Error) {
        if !self.said {
            tracing::warn!("the NBD server is lost ({why}): trying to connect again");
            self.said = true;
        }
        let now = Instant::now();
        let was_up = matches!(self.state, State::Up(_));
        if was_up && self.journal.is_none() {
            let mut durability = self.durability();
            durability.suspect |= durability.written > durability.flushed;
        }
        let wait = if was_up { Duration::ZERO } else { self.backoff };
        if !was_up {
            self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
        }
        self.state = State::Down(now + wait);
        self.replay = None;
        self.own_flush = false;
        self.commands.retain(|_, command| matches!(command.owner, Owner::Request(_)));
        self.unsent = self.commands.keys().copied().collect();
    }

    /// Tells the kernel what is waited for.
    pub(super) fn settle(&mut self) {
        let (State::Joining(link, _) | State::Up(link)) = &self.state else {
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

    /// Sets the timer for what is due next, if it is not set already.
    fn arm(&mut self) {
        let options = &self.shared.options;
        let connection = match &self.state {
            State::Down(again) => Some(*again),
            State::Joining(_, until) | State::Asked(until) => Some(*until),
            State::Up(link) => (link.open() > 0).then(|| self.heard + options.stall),
        };
        let oldest = self.requests.first_key_value().map(|(_, oldest)| oldest.since);
        let age = oldest.map(|since| since + options.give_up);
        let Some(next) = connection.into_iter().chain(age).min() else { return };
        if self.armed.is_some_and(|armed| armed <= next) {
            return;
        }
        // Never zero, which would mean never.
        let wait = next.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let setting =
            Itimerspec { it_interval: timespec(Duration::ZERO), it_value: timespec(wait) };
        let flags = TimerfdTimerFlags::empty();
        if rustix::time::timerfd_settime(&self.timer, flags, &setting).is_ok() {
            self.armed = Some(next);
        }
    }

    /// Ends what has taken too long.
    pub(super) fn expire(&mut self) {
        let now = Instant::now();
        if self.armed.is_some_and(|armed| armed <= now) {
            let _ = rustix::io::read(&self.timer, &mut [0; 8]);
            self.armed = None;
        }
        let (stall, give_up) = (self.shared.options.stall, self.shared.options.give_up);
        let late = match &self.state {
            State::Down(_) => false,
            State::Joining(_, until) | State::Asked(until) => *until <= now,
            State::Up(link) => link.open() > 0 && self.heard + stall <= now,
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
            if matches!(self.state, State::Up(_)) {
                // What it still may do for them must not hit what is written next.
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

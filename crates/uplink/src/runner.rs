//! A loop that drives an uplink and a link of its own.

use core::time::Duration;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringfence_net::clock::Clock;
use ringfence_net::tap::TapPort;
use ringfence_net::{Batch, Fault, Port};
use ringfence_platform::Counters;
use ringfence_platform::pace::Spin;
use ringfence_platform::tap::TapOffloads;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::engine::Uplink;
use crate::link::GuestSide;
use crate::tap::TapLink;

/// Frames taken from the guest in one turn.
const FRAMES: usize = 64;

/// Octets taken from the guest in one turn: what was read is still in the cache when it is sent.
const OCTETS: usize = 320 << 10;

/// The longest the loop goes on looking for work before it sleeps.
const SPIN_MAX: Duration = Duration::from_micros(50);

/// Where frames of a guest come from, and go to.
pub trait GuestLink {
    /// Puts frames of the guest into a batch, a bounded number; returns how many pieces of work there
    /// were.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the link.
    fn receive(&mut self, batch: &mut Batch) -> Result<usize, Fault>;

    /// The batch was cleared: the buffers of its frames can be used again.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the link.
    fn complete(&mut self) -> Result<(), Fault>;

    /// Before the loop sleeps: asks for an event when there are frames, or room. `true`: there are some
    /// already.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the link.
    fn arm(&mut self) -> Result<bool, Fault>;

    /// What becomes readable when there are frames, or room.
    fn wait_fds(&self) -> Vec<BorrowedFd<'_>>;

    /// The way to the guest.
    fn guest_side(&mut self) -> &mut dyn GuestSide;
}

/// A TAP interface, both ways.
pub struct TapBoth {
    from: TapPort,
    to: TapLink,
}

impl TapBoth {
    /// The interface behind `file`.
    ///
    /// # Errors
    ///
    /// When no descriptor is free.
    pub fn new(file: OwnedFd, offloads: TapOffloads, mtu: u16) -> std::io::Result<TapBoth> {
        let to = TapLink::new(file.try_clone()?, offloads, mtu);
        Ok(TapBoth { from: TapPort::new(file, offloads, mtu, Arc::<Counters>::default()), to })
    }

    /// The sending half.
    pub fn link(&self) -> &TapLink {
        &self.to
    }
}

impl GuestLink for TapBoth {
    fn receive(&mut self, batch: &mut Batch) -> Result<usize, Fault> {
        if self.to.is_gone() {
            return Err(Fault::Gone);
        }
        Ok(self.from.receive(batch, FRAMES)?.work)
    }

    fn complete(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        Ok(false)
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.from.wait_fds()
    }

    fn guest_side(&mut self) -> &mut dyn GuestSide {
        &mut self.to
    }
}

/// An uplink and its link.
pub struct Runner<L> {
    uplink: Uplink,
    link: L,
    clock: Clock,
    batch: Batch,
    indices: Vec<u32>,
    more: bool,
    spin: Spin,
}

impl<L: GuestLink> Runner<L> {
    /// Guests behind `link` reach the network by `uplink`.
    pub fn new(uplink: Uplink, link: L, clock: Clock) -> Runner<L> {
        Runner {
            uplink,
            link,
            clock,
            batch: Batch::with_capacity(FRAMES, OCTETS),
            indices: Vec::with_capacity(FRAMES),
            more: false,
            spin: Spin::new(SPIN_MAX),
        }
    }

    /// The engine.
    pub fn uplink(&self) -> &Uplink {
        &self.uplink
    }

    /// The link.
    pub fn link(&self) -> &L {
        &self.link
    }

    /// One turn. Whether there was anything to do.
    ///
    /// # Errors
    ///
    /// A [`Fault`] of the link, or of the host's sockets.
    pub fn turn(&mut self) -> Result<bool, Fault> {
        let received = self.link.receive(&mut self.batch)?;
        let now = self.clock.now();
        if !self.batch.is_empty() {
            self.indices.clear();
            self.indices.extend((0u32..).take(self.batch.len()));
            self.uplink.input(&self.batch, &self.indices, now);
        }
        self.batch.clear();
        self.link.complete()?;
        let events = self
            .uplink
            .poll_host(now)
            .map_err(|errno| Fault::system("cannot wait for the uplink's sockets", errno))?;
        self.uplink.run_timers(now);
        self.more = self.uplink.output(self.link.guest_side(), now);
        Ok(received > 0 || events > 0 || self.more)
    }

    /// Turns until `stop` is readable.
    ///
    /// # Errors
    ///
    /// A [`Fault`] of the link, or of the host's sockets.
    pub fn run(&mut self, stop: impl AsFd) -> Result<(), Fault> {
        let mut worked_at = self.clock.now();
        loop {
            if self.turn()? {
                worked_at = self.clock.now();
                continue;
            }
            let began = self.clock.now();
            if began.saturating_sub(worked_at) < self.spin.window() {
                std::hint::spin_loop();
                continue;
            }
            if self.sleep(&stop)? {
                return Ok(());
            }
            worked_at = self.clock.now();
            self.spin.slept(worked_at.saturating_sub(began));
        }
    }

    /// Waits for work. `true`: for nothing, `stop` is readable.
    fn sleep(&mut self, stop: impl AsFd) -> Result<bool, Fault> {
        if self.link.arm()? {
            return Ok(false);
        }
        let timeout = self.uplink.deadline().map(|at| {
            let wait = at.saturating_sub(self.clock.now());
            Timespec::try_from(wait).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 })
        });
        let host = self.uplink.wait_fd();
        let mut fds = vec![
            PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(host, PollFlags::IN),
        ];
        let link = self.link.wait_fds();
        fds.extend(link.into_iter().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Fault::system("cannot wait", errno)),
        }
        Ok(!fds[0].revents().is_empty())
    }
}

//! The sockets of this machine, all watched by one epoll.
//!
//! # Theory of operation
//!
//! A socket is entered into the epoll once, for everything, edge-triggered: an event per change and
//! none for what is merely still so. A connection that is closed one way, or whose guest does not
//! read, costs nothing while it waits.
//!
//! Where the kernel remembers how far a socket was peeked (`SO_PEEK_OFF`, for TCP since Linux 6.9),
//! it is told only when the next peek is not to go on where the last one ended, and not at all as long as
//! all of them are at the front: an answer that the guest has acknowledged is gone when the next one comes.
//! Where it does not, what was seen already is peeked again into a page that nobody reads; so that this is
//! not done with ever more octets, [`TcpHost::peek`](super::TcpHost::peek) goes only [`PEEK_AGAIN_MAX`] far
//! then.

// #syscall uplink epoll_create1,epoll_ctl,epoll_pwait,epoll_pwait2: waiting for sockets

mod datagrams;
mod listen;
mod own;
mod tcp;

use core::net::IpAddr;
use core::time::Duration;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use arrayvec::ArrayVec;
use ringfence_sys::poll::timespec;
use rustix::event::epoll;
use rustix::io::Errno;

pub use self::own::OwnAddresses;
use self::tcp::Spares;
use super::{Host, Owner, OwnerKind, Readiness, Ready, Socket};
use crate::counters::UplinkCounters;

/// Whether this process may send no echo requests of IPv4's (`ping_group_range`).
pub fn echo_is_denied() -> bool {
    datagrams::echo_is_denied()
}

/// Octets that are peeked again where the kernel does not remember.
pub const PEEK_AGAIN_MAX: u32 = 512 << 10;

/// Events taken from the kernel at a time.
const EVENTS: usize = 128;

/// A socket, and what is known about it.
#[derive(Debug)]
struct Place {
    file: OwnedFd,
    owner: Owner,
    /// Where the kernel's next peek begins; `None` when it was not told, so at the front.
    peek_at: Option<usize>,
}

/// The sockets of this machine.
#[derive(Debug)]
pub struct RealHost {
    epoll: OwnedFd,
    places: Vec<Option<Place>>,
    free: Vec<u32>,
    /// Whether the kernel remembers how far a TCP socket was peeked.
    remembers: bool,
    /// What is peeked again goes here.
    junk: Vec<u8>,
    spares: Spares,
    own: Option<OwnAddresses>,
    counters: Arc<UplinkCounters>,
}

impl RealHost {
    /// A host without sockets that knows none of its own addresses but loopback ones. System calls are
    /// counted in `counters`.
    ///
    /// # Errors
    ///
    /// When no descriptor is free.
    pub fn new(counters: Arc<UplinkCounters>) -> Result<RealHost, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(RealHost {
            epoll,
            places: Vec::new(),
            free: Vec::new(),
            remembers: tcp::kernel_remembers(),
            junk: Vec::new(),
            spares: Spares::default(),
            own: None,
            counters,
        })
    }

    /// Gives the host its own addresses, which a guest is kept from.
    ///
    /// # Errors
    ///
    /// When the epoll takes no more.
    pub fn with_own(mut self, own: OwnAddresses) -> Result<RealHost, Errno> {
        // Level-triggered: one event may leave notifications behind.
        let data = epoll::EventData::new_u64(Owner::ADDRESSES.to_word());
        epoll::add(&self.epoll, own.wait_fd(), data, epoll::EventFlags::IN)?;
        self.own = Some(own);
        Ok(self)
    }

    /// Reads the own addresses again where they may have changed. Returns `true` if they have.
    fn refresh_own(&mut self, notified: bool) -> bool {
        let Some(own) = &mut self.own else { return false };
        (notified || own.is_stale()) && own.refresh()
    }

    /// Does without what only newer kernels can: for tests.
    #[cfg(any(test, feature = "test-utils"))]
    #[doc(hidden)]
    pub fn forget_peeks(&mut self) {
        self.remembers = false;
    }

    /// Whether the kernel remembers how far a TCP socket was peeked.
    pub fn remembers_peeks(&self) -> bool {
        self.remembers
    }

    fn count(&self) {
        self.counters.syscalls.add(1);
    }

    /// Watches a socket and gives it a handle.
    fn enter(
        &mut self,
        owner: Owner,
        file: OwnedFd,
        flags: epoll::EventFlags,
    ) -> Result<Socket, Errno> {
        self.count();
        epoll::add(
            &self.epoll,
            &file,
            epoll::EventData::new_u64(owner.to_word()),
            flags | epoll::EventFlags::ET,
        )?;
        let place = Some(Place { file, owner, peek_at: None });
        let index = match self.free.pop() {
            Some(index) => {
                if let Some(free) = usize::try_from(index).ok().and_then(|i| self.places.get_mut(i))
                {
                    *free = place;
                }
                index
            }
            None => {
                let index = u32::try_from(self.places.len()).map_err(|_| Errno::NFILE)?;
                self.places.push(place);
                index
            }
        };
        Ok(Socket(index))
    }

    fn place(&mut self, socket: &Socket) -> Result<&mut Place, Errno> {
        let index = usize::try_from(socket.0).map_err(|_| Errno::BADF)?;
        self.places.get_mut(index).and_then(Option::as_mut).ok_or(Errno::BADF)
    }

    fn file(&self, socket: &Socket) -> Result<BorrowedFd<'_>, Errno> {
        let index = usize::try_from(socket.0).map_err(|_| Errno::BADF)?;
        let place = self.places.get(index).and_then(Option::as_ref).ok_or(Errno::BADF)?;
        Ok(place.file.as_fd())
    }

    fn leave(&mut self, socket: Socket) -> Option<Place> {
        let place = usize::try_from(socket.0).ok().and_then(|i| self.places.get_mut(i))?.take();
        if place.is_some() {
            self.free.push(socket.0);
        }
        place
    }
}

impl Host for RealHost {
    fn poll(&mut self, ready: &mut Vec<Ready>) -> Result<(), Errno> {
        let mut events = ArrayVec::<epoll::Event, EVENTS>::new();
        let none =
            epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        while events.try_push(none).is_ok() {}
        self.count();
        let at_once = timespec(Duration::ZERO);
        let count = match epoll::wait(&self.epoll, &mut events[..], Some(&at_once)) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(errno),
        };
        let mut notified = false;
        ready.extend(events.iter().take(count).filter_map(|event| {
            let owner = Owner::from_word(event.data.u64())?;
            notified |= owner.kind == OwnerKind::Addresses;
            let is_sockets = owner.kind != OwnerKind::Addresses;
            is_sockets.then_some(Ready { owner, what: readiness(event.flags) })
        }));
        if self.refresh_own(notified) {
            ready.push(Ready { owner: Owner::ADDRESSES, what: Readiness::default() });
        }
        Ok(())
    }

    fn is_own(&self, ip: IpAddr) -> bool {
        self.own.as_ref().is_some_and(|own| own.contain(ip))
    }

    fn stock_up(&mut self) {
        self.make_spares();
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

fn readiness(flags: epoll::EventFlags) -> Readiness {
    let has = |flag| flags.intersects(flag);
    Readiness {
        readable: has(epoll::EventFlags::IN),
        writable: has(epoll::EventFlags::OUT),
        read_closed: has(epoll::EventFlags::RDHUP | epoll::EventFlags::HUP),
        urgent: has(epoll::EventFlags::PRI),
        failed: has(epoll::EventFlags::ERR),
    }
}

//! Host sockets of Linux, all watched by one epoll.
//!
//! A socket is added to the epoll once, for all events, edge-triggered. So a connection that is half
//! closed, or whose guest does not read, raises no event while nothing changes. Listening sockets are level-triggered.
//!
//! Peeking at an offset uses `SO_PEEK_OFF` (for TCP since Linux 6.9). The kernel advances the offset
//! itself. It is set only when the next peek does not continue where the last one ended.
//!
//! Kernels without it peek from the front of the queue: bytes seen before go into a scratch buffer. To
//! bound this cost, [`TcpHost::peek`](super::TcpHost::peek) then reaches at most [`PEEK_AGAIN_MAX`] bytes.

// #syscall uplink epoll_create1,epoll_ctl,epoll_pwait,epoll_pwait2: waiting for sockets

mod datagrams;
mod errors;
mod listen;
mod outbound;
mod own;
mod relay;
mod tcp;

use core::net::IpAddr;
use core::time::Duration;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use arrayvec::ArrayVec;
use ringfence_sys::poll::timespec;
use rustix::event::epoll;
use rustix::io::Errno;

pub use self::outbound::{Outbound, Source};
pub use self::own::OwnAddresses;
use self::tcp::{NoDelay, Spares};
use super::relay::Pipe;
use super::{Host, Owner, OwnerKind, Readiness, Ready, RunnerFile, Socket};
use crate::counters::UplinkCounters;

/// Returns `true` if this process may not send IPv4 echo requests (`ping_group_range`).
pub fn echo_is_denied() -> bool {
    datagrams::echo_is_denied()
}

/// Maximum of bytes that a peek copies again on kernels without `SO_PEEK_OFF`.
pub const PEEK_AGAIN_MAX: u32 = 512 << 10;

/// Maximum of events in one `epoll_wait` call.
const EVENTS: usize = 128;

/// TCP socket with its owner and peek offset.
#[derive(Debug)]
struct SocketEntry {
    file: OwnedFd,
    owner: Owner,
    /// Offset of the kernel's next peek; `None` if it was never set, which means the front.
    peek_at: Option<usize>,
    no_delay: NoDelay,
}

/// Host implementation with Linux sockets.
#[derive(Debug)]
pub struct RealHost {
    /// Shared with the listening sockets.
    epoll: Arc<OwnedFd>,
    sockets: Vec<Option<SocketEntry>>,
    free: Vec<u32>,
    /// Set if the kernel supports `SO_PEEK_OFF` for TCP.
    has_peek_offset: bool,
    /// Scratch buffer for bytes that are peeked again.
    scratch: Vec<u8>,
    spares: Spares,
    /// Empty pipes of relays that have ended.
    pipes: Vec<Pipe>,
    own: Option<OwnAddresses>,
    outbound: Outbound,
    /// Set by tests whose peers are at the loopback of this host.
    #[cfg(test)]
    loopback_is_elsewhere: bool,
    counters: Arc<UplinkCounters>,
}

impl RealHost {
    /// Creates a host without sockets. Only loopback addresses count as its own. System calls are counted in
    /// `counters`.
    ///
    /// # Errors
    ///
    /// Returns an error if no descriptor is free.
    pub fn new(counters: Arc<UplinkCounters>) -> Result<RealHost, Errno> {
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        Ok(RealHost {
            epoll,
            sockets: Vec::new(),
            free: Vec::new(),
            has_peek_offset: tcp::kernel_has_peek_offset(),
            scratch: Vec::new(),
            spares: Spares::default(),
            pipes: Vec::new(),
            own: None,
            outbound: Outbound::default(),
            #[cfg(test)]
            loopback_is_elsewhere: false,
            counters,
        })
    }

    /// Sets the source of the host's own addresses, which the guest must not reach.
    ///
    /// # Errors
    ///
    /// Returns the error of the epoll.
    pub fn with_own(mut self, own: OwnAddresses) -> Result<RealHost, Errno> {
        // Level-triggered: one event may leave notifications behind.
        let data = epoll::EventData::new_u64(Owner::ADDRESSES.to_word());
        epoll::add(&self.epoll, own.wait_fd(), data, epoll::EventFlags::IN)?;
        self.own = Some(own);
        Ok(self)
    }

    /// Sets the sources of sockets to other hosts.
    pub fn set_outbound(&mut self, outbound: Outbound) {
        self.outbound = outbound;
    }

    /// Returns the source of a socket to `ip`; `None` if that is an address of this host.
    fn source(&self, ip: IpAddr) -> Option<&Source> {
        let is_here = ip.is_loopback() || self.is_own(ip);
        #[cfg(test)]
        let is_here = is_here && !self.loopback_is_elsewhere;
        (!is_here).then(|| self.outbound.to(ip))
    }

    /// Updates the own addresses if they may have changed. Returns `true` if they did.
    fn refresh_own(&mut self, notified: bool) -> bool {
        let Some(own) = &mut self.own else { return false };
        (notified || own.is_stale()) && own.refresh()
    }

    /// Disables `SO_PEEK_OFF`, to test the code for older kernels.
    #[cfg(any(test, feature = "test-utils"))]
    #[doc(hidden)]
    pub fn disable_peek_offset(&mut self) {
        self.has_peek_offset = false;
    }

    /// Returns `true` if the kernel supports `SO_PEEK_OFF` for TCP.
    pub fn has_peek_offset(&self) -> bool {
        self.has_peek_offset
    }

    fn count(&self) {
        self.counters.syscalls.add(1);
    }

    /// Adds a socket to the epoll and returns its handle.
    fn register(
        &mut self,
        owner: Owner,
        file: OwnedFd,
        flags: epoll::EventFlags,
        no_delay: NoDelay,
    ) -> Result<Socket, Errno> {
        self.count();
        epoll::add(
            &self.epoll,
            &file,
            epoll::EventData::new_u64(owner.to_word()),
            flags | epoll::EventFlags::ET,
        )?;
        let entry = Some(SocketEntry { file, owner, peek_at: None, no_delay });
        let index = match self.free.pop() {
            Some(index) => {
                if let Some(free) =
                    usize::try_from(index).ok().and_then(|i| self.sockets.get_mut(i))
                {
                    *free = entry;
                }
                index
            }
            None => {
                let index = u32::try_from(self.sockets.len()).map_err(|_| Errno::NFILE)?;
                self.sockets.push(entry);
                index
            }
        };
        Ok(Socket(index))
    }

    fn entry(&mut self, socket: &Socket) -> Result<&mut SocketEntry, Errno> {
        let index = usize::try_from(socket.0).map_err(|_| Errno::BADF)?;
        self.sockets.get_mut(index).and_then(Option::as_mut).ok_or(Errno::BADF)
    }

    fn file(&self, socket: &Socket) -> Result<BorrowedFd<'_>, Errno> {
        let index = usize::try_from(socket.0).map_err(|_| Errno::BADF)?;
        let entry = self.sockets.get(index).and_then(Option::as_ref).ok_or(Errno::BADF)?;
        Ok(entry.file.as_fd())
    }

    fn unregister(&mut self, socket: Socket) -> Option<SocketEntry> {
        let entry = usize::try_from(socket.0).ok().and_then(|i| self.sockets.get_mut(i))?.take();
        if entry.is_some() {
            self.free.push(socket.0);
        }
        entry
    }
}

impl Host for RealHost {
    fn poll(&mut self, ready: &mut Vec<Ready>, within: Option<Duration>) -> Result<(), Errno> {
        let mut events = ArrayVec::<epoll::Event, EVENTS>::new();
        let none =
            epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        while events.try_push(none).is_ok() {}
        self.count();
        let within = within.map(timespec);
        let count = match epoll::wait(&self.epoll, &mut events[..], within.as_ref()) {
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

    fn watch_runner(
        &mut self,
        file: RunnerFile,
        fd: BorrowedFd<'_>,
        flags: epoll::EventFlags,
    ) -> Result<(), Errno> {
        self.count();
        let data = epoll::EventData::new_u64(file.owner().to_word());
        epoll::add(&self.epoll, fd, data, flags)
    }

    fn is_own(&self, ip: IpAddr) -> bool {
        self.own.as_ref().is_some_and(|own| own.contain(ip))
    }

    fn prepare(&mut self) {
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

//! Clients of a device: the virtual machines that connect to its socket, one at a time.
//!
//! Others are accepted and closed at once. A device with a listening socket waits for the next client; another one ends
//! with its client.

// #syscall uplink,disk,card accept4: clients of a socket
// #syscall uplink,disk,card epoll_create1,epoll_ctl: waiting for clients
// #syscall uplink,disk,card epoll_pwait,epoll_pwait2: kicks and messages of a virtual machine

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ringfence_frame::Fault;
use ringfence_platform::Counters;
use ringfence_sys::descriptors::dispose_socket;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::SocketFlags;

/// Number of misbehaving clients that are logged. A client can connect again at once.
pub const LOGGED_MAX: u32 = 8;

/// Event data of the client's socket.
pub const CLIENT: epoll::EventData = epoll::EventData::new_u64(0);
/// Event data of the listening socket.
pub const LISTENER: epoll::EventData = epoll::EventData::new_u64(1);

/// Origin of the clients of a device.
#[derive(Debug)]
pub enum Clients {
    /// The one client is connected. The device ends with it.
    Connected(OwnedFd),
    /// Clients connect to this non-blocking listening socket.
    Listener {
        socket: OwnedFd,
        /// Set if the device ends with its first client.
        one_off: bool,
    },
}

/// The client of now, and the place from which the next one comes.
#[derive(Debug)]
pub struct ClientSlot {
    client: Option<OwnedFd>,
    listener: Option<OwnedFd>,
    one_off: bool,
    /// Readable when a message of the client, or another client, is there.
    epoll: OwnedFd,
    logged: u32,
}

impl ClientSlot {
    /// Creates the slot.
    ///
    /// # Errors
    ///
    /// Returns an error if descriptors are exhausted.
    pub fn new(clients: Clients) -> io::Result<ClientSlot> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut slot = ClientSlot { client: None, listener: None, one_off: true, epoll, logged: 0 };
        match clients {
            Clients::Connected(socket) => slot.connect(socket)?,
            Clients::Listener { socket, one_off } => {
                epoll::add(&slot.epoll, &socket, LISTENER, epoll::EventFlags::IN)?;
                slot.one_off = one_off;
                slot.listener = Some(socket);
            }
        }
        Ok(slot)
    }

    /// Returns the socket of the client, if one is connected.
    pub fn client(&self) -> Option<&OwnedFd> {
        self.client.as_ref()
    }

    /// Returns the epoll of the slot, to which a device adds files of its own.
    pub fn epoll(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Takes the events of the epoll. Returns `true` if one is of the client's or the listening socket; those of files that
    /// a device has added need nothing else.
    ///
    /// # Errors
    ///
    /// Returns a fault with the system's error.
    pub fn take_events(&self) -> Result<bool, Fault> {
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: CLIENT }; 8];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let found = match epoll::wait(&self.epoll, &mut events[..], Some(&now)) {
            Ok(found) => found,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(Fault::system("cannot hear a hypervisor", errno)),
        };
        let is_own = |event: &epoll::Event| {
            [CLIENT, LISTENER].map(|own| own.u64()).contains(&event.data.u64())
        };
        Ok(events[..found].iter().any(is_own))
    }

    /// Sets whether the epoll reports room in the client's queue, beside what the client sent.
    ///
    /// # Errors
    ///
    /// Returns a fault with the system's error.
    pub fn watch_for_room(&self, client: BorrowedFd<'_>, awaits_room: bool) -> Result<(), Fault> {
        let room = if awaits_room { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
        epoll::modify(&self.epoll, client, CLIENT, epoll::EventFlags::IN | room)
            .map_err(|errno| Fault::system("cannot wait for room", errno))
    }

    /// Returns the number of clients whose end was logged.
    pub fn logged(&self) -> u32 {
        self.logged
    }

    fn connect(&mut self, socket: OwnedFd) -> Result<(), Errno> {
        epoll::add(&self.epoll, &socket, CLIENT, epoll::EventFlags::IN)?;
        self.client = Some(socket);
        if self.one_off {
            // Nobody else is served, so nobody else shall be able to connect.
            if let Some(listener) = self.listener.take() {
                epoll::delete(&self.epoll, &listener)?;
            }
        }
        Ok(())
    }

    /// Accepts the next client, or closes its connection if there is one already. Returns `true` if a client came.
    pub fn accept(&mut self, system: &Counters) -> Result<bool, Fault> {
        let Some(listener) = &self.listener else { return Ok(false) };
        system.syscalls.add(1);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(listener, flags) {
            Ok(_) if self.client.is_some() => Ok(false),
            Ok(client) => {
                let connected = self.connect(client);
                connected.map_err(|errno| Fault::system("cannot wait for it", errno))?;
                Ok(true)
            }
            // The connection may have ended before it was accepted.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(false),
            Err(errno) => Err(Fault::system("cannot accept a client", errno)),
        }
    }

    /// Forgets the client. The device ends if no other client can come.
    pub fn disconnect(&mut self) -> Result<(), Fault> {
        if let Some(client) = self.client.take() {
            // Another process may hold the socket, so closing it does not suffice.
            let removed = epoll::delete(&self.epoll, &client);
            removed.map_err(|errno| Fault::system("cannot forget a client", errno))?;
            // Descriptors may wait in its queue.
            dispose_socket(client);
        }
        if self.listener.is_none() { Err(Fault::Gone) } else { Ok(()) }
    }

    /// Ends the connection of a client that breaks the rules. A device without other clients ends with that error.
    pub fn refuse(
        &mut self,
        error: impl std::error::Error + Send + Sync + 'static,
    ) -> Result<(), Fault> {
        if self.listener.is_none() {
            return Err(Fault::misbehaved(error));
        }
        if self.logged < LOGGED_MAX {
            self.logged += 1;
            tracing::warn!("the client is disconnected: {error}");
        }
        self.disconnect()
    }
}

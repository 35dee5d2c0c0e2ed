//! Connections that somebody else makes, for a process that may not make any.
//!
//! A confined process has no network and no file system: whoever confined it knows the server, and
//! hands over sockets that are connected. What is asked for is only *another one*; where to, the
//! confined process has no say in.

// #syscall driver,daemon eventfd2,read,write: a connection that was made is handed over

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_sys::mailbox::WakeFd;

/// Wakes whoever makes connections.
type Bell = Arc<dyn Fn() + Send + Sync>;

/// Where one queue asks for connections, and where they come.
pub struct Dialer {
    state: Mutex<State>,
    arrived: WakeFd,
    bell: Bell,
}

#[derive(Default)]
struct State {
    /// It was asked for one, and that was not heard yet.
    wanted: bool,
    /// It was heard.
    awaited: bool,
    connection: Option<io::Result<OwnedFd>>,
}

impl Dialer {
    /// `bell` is rung when a connection is wanted.
    ///
    /// # Errors
    ///
    /// When the system has no eventfd.
    pub fn new(bell: Bell) -> io::Result<Dialer> {
        let arrived = WakeFd::new()?;
        Ok(Dialer { state: Mutex::default(), arrived, bell })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a connection was asked for since the last call.
    pub fn is_wanted(&self) -> bool {
        let mut state = self.state();
        let wanted = std::mem::take(&mut state.wanted);
        state.awaited |= wanted;
        wanted
    }

    /// A connection that was wanted, or why there is none. One that nobody waits for is closed.
    pub fn deliver(&self, connection: io::Result<OwnedFd>) {
        let mut state = self.state();
        if !std::mem::take(&mut state.awaited) {
            return;
        }
        state.connection = Some(connection);
        self.arrived.wake();
    }

    /// Asks for a connection, once, until there is an answer.
    pub(super) fn ask(&self) {
        let mut state = self.state();
        if state.wanted || state.awaited || state.connection.is_some() {
            return;
        }
        state.wanted = true;
        drop(state);
        (self.bell)();
    }

    /// What came.
    pub(super) fn take(&self) -> Option<io::Result<OwnedFd>> {
        let mut state = self.state();
        let connection = state.connection.take();
        if connection.is_some() {
            self.arrived.clear();
        }
        connection
    }
}

impl AsFd for Dialer {
    /// Readable when something came.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.arrived.as_fd()
    }
}

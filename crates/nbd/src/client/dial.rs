//! Requests for connections that another process or another thread makes.
//!
//! The I/O of a disk must not block, and a confined process cannot even connect. A confined process has no network and no file system. The other process knows the server and hands
//! over connected sockets. A request says only *another connection*; the confined process cannot choose the
//! address. Where the process may connect, threads of its own do ([`Dialer::to_host`]).

// #syscall driver,disk,daemon eventfd2,read,write: a connection that was made is handed over

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ringfence_sys::mailbox::WakeFd;

use super::host::Host;

/// Callback that wakes the thread that opens connections.
type WakeCallback = Arc<dyn Fn() + Send + Sync>;

/// Connection requests of one queue, and their results.
pub struct Dialer {
    state: Mutex<DialerState>,
    arrived: WakeFd,
    wake: WakeCallback,
}

#[derive(Default)]
struct DialerState {
    /// Set if a connection was requested and [`Dialer::is_wanted`] has not reported it.
    wanted: bool,
    /// Set if the request was reported and has no result yet.
    awaited: bool,
    connection: Option<io::Result<OwnedFd>>,
}

impl Dialer {
    /// Creates a dialer. `wake` is called when a connection is requested.
    ///
    /// # Errors
    ///
    /// Returns the system's error if there is no eventfd.
    pub fn new(wake: WakeCallback) -> io::Result<Dialer> {
        let arrived = WakeFd::new()?;
        Ok(Dialer { state: Mutex::default(), arrived, wake })
    }

    /// Creates a dialer whose connections threads of this process make to `host`, each within `limit`.
    ///
    /// # Errors
    ///
    /// Returns the system's error if there is no eventfd.
    pub(super) fn to_host(host: Host, limit: Duration) -> io::Result<Arc<Dialer>> {
        let arrived = WakeFd::new()?;
        Ok(Arc::new_cyclic(|this: &Weak<Dialer>| {
            let this = this.clone();
            let wake = Arc::new(move || Dialer::connect_aside(&this, &host, limit));
            Dialer { state: Mutex::default(), arrived, wake }
        }))
    }

    /// Connects on a thread, which outlives the dialer by the time limit at most.
    fn connect_aside(this: &Weak<Dialer>, host: &Host, limit: Duration) {
        let Some(dialer) = this.upgrade().filter(|dialer| dialer.is_wanted()) else { return };
        let (this, host) = (Weak::clone(this), host.clone());
        let connect = move || {
            let connection = host.connect(Instant::now() + limit);
            if let Some(dialer) = this.upgrade() {
                dialer.deliver(connection);
            }
        };
        let thread = std::thread::Builder::new().name("nbd dial".to_owned());
        if let Err(error) = thread.spawn(connect) {
            dialer.deliver(Err(error));
        }
    }

    fn state(&self) -> MutexGuard<'_, DialerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns `true` if a connection was requested since the last call.
    pub fn is_wanted(&self) -> bool {
        let mut state = self.state();
        let wanted = std::mem::take(&mut state.wanted);
        state.awaited |= wanted;
        wanted
    }

    /// Delivers the result of a request. A connection that was not requested is closed.
    pub fn deliver(&self, connection: io::Result<OwnedFd>) {
        let mut state = self.state();
        if !std::mem::take(&mut state.awaited) {
            return;
        }
        state.connection = Some(connection);
        self.arrived.wake();
    }

    /// Requests a connection, unless a request or a result is pending.
    pub(super) fn request(&self) {
        let mut state = self.state();
        if state.wanted || state.awaited || state.connection.is_some() {
            return;
        }
        state.wanted = true;
        drop(state);
        (self.wake)();
    }

    /// Takes the result of the request, if there is one.
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
    /// Returns a file that is readable while there is a result.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.arrived.as_fd()
    }
}

//! Disposal threads: they close descriptors whose close may block.
//!
//! [`dispose`] puts a descriptor into a queue and returns. A thread takes it out and closes it. A thread
//! that is blocked in a close does not stop the others: while every thread is busy, the next descriptor
//! starts another one, up to [`THREADS_MAX`]. A thread without work exits after [`IDLE`]. No descriptor is
//! ever closed on the caller's thread, even when no thread can be started; the next call tries again. Sockets that cannot
//! block are the exception ([`Descriptors::close_internet_sockets`]).
//!
//! A disposal thread turns `SO_LINGER` off before it closes a socket. A peer that keeps a copy can
//! turn it on again, but then the close is not the last one. A peer can still block a close: it sends a
//! Unix socket whose own queue holds a lingering connection. Three rules bound what it gains:
//!
//! ```text
//!  add ──peer without an item in the queue──> queue ──> thread ──ended──> the peer's next item
//!    └───peer with one──> that peer's waiting items ──────────────────────────┘
//! ```
//!
//! * One peer's items end one after the other, so a peer blocks one thread. A peer is the socket from
//!   which the descriptors came.
//! * A peer with more than [`PEER_PENDING_MAX`] pending items is refused further descriptors
//!   ([`receive_message`](super::receive_message)) and loses its connection.
//! * A socket is shut down when it is added. Its peer sees the end at once, also while the close waits.

// #syscall all setsockopt 1=SOL_SOCKET 2=SO_LINGER: a socket that a peer sent closes at once
// #syscall all recvmsg: what is left in the queue of a socket that is disposed of
// #syscall all shutdown: the peer of a socket that is disposed of sees the end at once
// #syscall all getsockopt 1=SOL_SOCKET: the cookie of a socket, which identifies the peer

use std::collections::{HashMap, VecDeque};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, Shutdown, sockopt,
};

/// Maximum number of disposal threads of a process.
pub(super) const THREADS_MAX: usize = 32;
/// Maximum number of pending items of a peer that may send further descriptors.
pub(super) const PEER_PENDING_MAX: usize = 64;
/// Time after which a thread without work exits.
const IDLE: Duration = Duration::from_secs(5);
/// Stack size of a disposal thread in bytes. Its calls are not deep.
const STACK_BYTES: usize = 256 << 10;
/// Maximum number of descriptors in a message of a Unix socket (`SCM_MAX_FD`).
pub(super) const MESSAGE_FDS_MAX: usize = 253;
/// Maximum number of messages received from the queue of one socket.
const MESSAGES_MAX: usize = 1024;

static DISPOSAL: OnceLock<Disposal<Item>> = OnceLock::new();

/// Descriptor that a disposal thread closes.
enum Item {
    File(OwnedFd),
    /// Socket that only this process has, so no other process needs the messages in its queue.
    Socket(OwnedFd),
}

/// Identity of a peer: the cookie of the socket over which it sends.
pub(super) type Peer = u64;

/// Returns the peer of a socket; `None` for other files.
pub(super) fn peer_of(socket: impl AsFd) -> Option<Peer> {
    sockopt::socket_cookie(socket).ok()
}

/// Returns the number of items of a peer that are not closed yet.
pub(super) fn pending_of(peer: Peer) -> usize {
    DISPOSAL.get().map_or(0, |disposal| disposal.pending_of(peer))
}

/// Closes `fd`, of no known peer, on a disposal thread. Never blocks.
pub fn dispose(fd: OwnedFd) {
    add(None, Item::File(fd));
}

/// Shuts down a socket that only this process has, and closes it on a disposal thread, with the messages in its
/// queue. Never blocks.
pub fn dispose_socket(socket: OwnedFd) {
    // Fails if the peer is gone.
    let _ = rustix::net::shutdown(&socket, Shutdown::Both);
    add(peer_of(&socket), Item::Socket(socket));
}

fn add(peer: Option<Peer>, item: Item) {
    let disposal = DISPOSAL.get_or_init(|| Disposal::new(THREADS_MAX, close));
    match peer {
        Some(peer) => disposal.add_for(peer, item),
        None => disposal.add(item),
    }
}

/// Descriptors received from a peer. Those that were not moved out are disposed of on drop.
#[derive(Debug, Default)]
pub struct Descriptors {
    fds: Vec<OwnedFd>,
    peer: Option<Peer>,
}

impl Descriptors {
    /// Wraps descriptors received over `socket`.
    pub(super) fn received(fds: Vec<OwnedFd>, socket: impl AsFd) -> Descriptors {
        let peer = if fds.is_empty() { None } else { peer_of(socket) };
        Descriptors { fds, peer }
    }

    /// Returns `true` if too many descriptors of this peer are not closed yet.
    pub(super) fn is_over_allowance(&self) -> bool {
        self.peer.is_some_and(|peer| pending_of(peer) > PEER_PENDING_MAX)
    }

    /// Returns the number of descriptors.
    pub fn len(&self) -> usize {
        self.fds.len()
    }

    /// Returns `true` if there are none.
    pub fn is_empty(&self) -> bool {
        self.fds.is_empty()
    }

    /// Returns a reference to each descriptor.
    pub fn each(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.fds.iter().map(AsFd::as_fd)
    }

    /// Keeps the descriptors whose numbers, from 0, `is_kept` accepts. The others are disposed of.
    pub fn retain(&mut self, is_kept: impl Fn(usize) -> bool) {
        let all = std::mem::take(&mut self.fds).into_iter().enumerate();
        let (kept, others) = all.partition::<Vec<_>, _>(|(number, _)| is_kept(*number));
        self.fds.extend(kept.into_iter().map(|(_, fd)| fd));
        others.into_iter().for_each(|(_, fd)| add(self.peer, Item::File(fd)));
    }

    /// Closes sockets of the internet families on this thread: without `SO_LINGER` their close does not block. The others are
    /// disposed of. For a caller that passes many sockets on: the disposal threads of a busy machine may fall behind, and a
    /// peer with many pending items is refused.
    pub fn close_internet_sockets(mut self) {
        let all = std::mem::take(&mut self.fds).into_iter();
        let (own, others): (Vec<_>, Vec<_>) = all.partition(is_internet_socket);
        self.fds = others;
        own.into_iter().for_each(|socket| close(Item::File(socket)));
    }

    /// Moves all descriptors out.
    pub fn into_vec(mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.fds)
    }

    /// Moves exactly `N` descriptors out.
    ///
    /// # Errors
    ///
    /// Returns the number found if it is not `N`. All of them are disposed of then.
    pub fn exactly<const N: usize>(self) -> Result<[OwnedFd; N], usize> {
        if self.fds.len() != N {
            return Err(self.fds.len());
        }
        let found = self.fds.len();
        <[OwnedFd; N]>::try_from(self.into_vec()).map_err(|_| found)
    }
}

impl From<Vec<OwnedFd>> for Descriptors {
    fn from(fds: Vec<OwnedFd>) -> Descriptors {
        Descriptors { fds, peer: None }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        self.fds.drain(..).for_each(|fd| add(self.peer, Item::File(fd)));
    }
}

fn is_internet_socket(fd: &OwnedFd) -> bool {
    matches!(sockopt::socket_domain(fd), Ok(AddressFamily::INET | AddressFamily::INET6))
}

fn close(item: Item) {
    match item {
        // Fails for what is no socket.
        Item::File(fd) => drop(sockopt::set_socket_linger(&fd, None)),
        Item::Socket(socket) => drain(&socket),
    }
}

/// Takes the descriptors out of a Unix socket's queue, which would be closed with it.
fn drain(socket: &OwnedFd) {
    let mut byte = [0u8; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_FDS_MAX))];
    for _ in 0..MESSAGES_MAX {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut into = [IoSliceMut::new(&mut byte)];
        let Ok(got) = rustix::net::recvmsg(socket, &mut into, &mut control, flags) else { return };
        let mut fds = 0;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                for fd in rights {
                    let _ = sockopt::set_socket_linger(&fd, None);
                    fds += 1;
                }
            }
        }
        if got.bytes == 0 && fds == 0 {
            return;
        }
    }
}

/// Queue of items whose end may block, and the threads that end them.
pub struct Disposal<T> {
    shared: Arc<DisposalShared<T>>,
}

struct DisposalShared<T> {
    state: Mutex<DisposalState<T>>,
    added: Condvar,
    ended: Condvar,
    threads_max: usize,
    end: fn(T),
}

struct DisposalState<T> {
    /// Items that a thread may end now; at most one of each peer.
    queue: VecDeque<(Option<Peer>, T)>,
    /// Items behind the one of their peer that is in `queue` or that a thread ends. A peer without
    /// such an item has no entry.
    waiting: HashMap<Peer, VecDeque<T>>,
    threads: usize,
    idle: usize,
    /// Items that were added and have not ended.
    pending: usize,
}

impl<T: Send + 'static> Disposal<T> {
    /// Creates a disposal that ends each item by `end`, on at most `threads_max` threads. It has none yet.
    pub fn new(threads_max: usize, end: fn(T)) -> Disposal<T> {
        let state = DisposalState {
            queue: VecDeque::new(),
            waiting: HashMap::new(),
            threads: 0,
            idle: 0,
            pending: 0,
        };
        let (state, added, ended) = (Mutex::new(state), Condvar::new(), Condvar::new());
        Disposal { shared: Arc::new(DisposalShared { state, added, ended, threads_max, end }) }
    }

    /// Adds `item`, of no peer, to the queue of the threads. Never blocks.
    pub fn add(&self, item: T) {
        self.start(self.shared.lock(), None, item);
    }

    /// Adds `item` to the queue of the threads once the earlier items of `peer` have ended. Never blocks.
    pub(super) fn add_for(&self, peer: Peer, item: T) {
        let mut state = self.shared.lock();
        if let Some(waiting) = state.waiting.get_mut(&peer) {
            waiting.push_back(item);
            state.pending += 1;
            return;
        }
        state.waiting.insert(peer, VecDeque::new());
        self.start(state, Some(peer), item);
    }

    /// Returns the number of items of `peer` that have not ended.
    fn pending_of(&self, peer: Peer) -> usize {
        self.shared.lock().waiting.get(&peer).map_or(0, |waiting| waiting.len() + 1)
    }

    fn start(&self, mut state: MutexGuard<'_, DisposalState<T>>, peer: Option<Peer>, item: T) {
        state.queue.push_back((peer, item));
        state.pending += 1;
        if state.queue.len() > state.idle && state.threads < self.shared.threads_max {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("dispose".to_owned());
            let started = thread.stack_size(STACK_BYTES).spawn(move || shared.work());
            state.threads += usize::from(started.is_ok());
        }
        drop(state);
        self.shared.added.notify_one();
    }

    /// Waits until every item has ended. Returns `false` if that takes longer than `timeout`.
    pub fn wait_until_done(&self, timeout: Duration) -> bool {
        let state = self.shared.lock();
        let is_busy = |state: &mut DisposalState<T>| state.pending > 0;
        let waited = self.shared.ended.wait_timeout_while(state, timeout, is_busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

impl<T> std::fmt::Debug for Disposal<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let DisposalState { threads, pending, .. } = *self.shared.lock();
        f.debug_struct("Disposal").field("threads", &threads).field("pending", &pending).finish()
    }
}

impl<T> DisposalState<T> {
    /// Puts the next item of a peer, one of whose items has ended, into the queue.
    fn release(&mut self, peer: Peer) {
        match self.waiting.get_mut(&peer).and_then(VecDeque::pop_front) {
            Some(next) => self.queue.push_back((Some(peer), next)),
            None => drop(self.waiting.remove(&peer)),
        }
    }
}

impl<T> DisposalShared<T> {
    fn lock(&self) -> MutexGuard<'_, DisposalState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            if let Some((peer, item)) = state.queue.pop_front() {
                drop(state);
                (self.end)(item);
                state = self.lock();
                state.pending -= 1;
                if let Some(peer) = peer {
                    state.release(peer);
                }
                self.ended.notify_all();
                continue;
            }
            state.idle += 1;
            let (woken, wait) =
                self.added.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if wait.timed_out() && state.queue.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

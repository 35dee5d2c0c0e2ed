//! Relay: hands frames from one worker of a data plane to another.
//!
//! # Theory of operation
//!
//! A device of several queues is split: its part `n` belongs to plane `n` and to nobody else, so that
//! no ring is ever touched by two threads. A plane that finds where a frame goes asks which *part* of
//! that port takes it:
//!
//! * the one of its own plane, if the frame came by a port of as many parts or more. Who sent it chose
//!   the queue by its flow, so all of a flow arrives by one queue, in order. No other thread is
//!   concerned; this is how guests with several queues talk to each other.
//! * the one that the flow's hash says, if the sender has fewer parts (or the frames of a guest with
//!   one queue would all take one queue of the receiver), or if the receiver set up hashing over its
//!   control ring.
//!
//! Where that is another plane's, the frame is copied, once, into a *parcel* of that plane: a batch
//! like any other, from which that plane sends it on, segmenting and joining included. So no plane ever
//! refers to memory that another plane's guest lent.
//!
//! A plane has a few parcels for each other one, and gets them back empty. Who sends to one
//! port alone is held up while there are too few, other frames are dropped and counted. A plane's post box
//! is behind a lock that is held for a few pushes, once a turn; an event is sent only to a plane that
//! sleeps.
//!
//! Each plane has a switch of its own; what one learns from a frame it tells the others ([`News`]). News
//! are bounded too: what is lost costs that a frame goes to everybody, as if the address were new.
//!
//! Parcels are work like a port's: in [`Fairness`](super::share) each other plane counts as one port.

// #syscall driver,frontend,daemon write: another thread of the data plane is woken

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_frame::batch::{Batch, FRAMES_DEFAULT};
use ringfence_frame::counters::{DropReason, PortCounters};
use ringfence_frame::port::{ChecksumOffload, GsoOffload, PortCapabilities};
use ringfence_frame::steer::{SecretSpread, Steering};

use super::handle::PortId;
use super::share::Share;
use crate::forwarding::table::CAPACITY;
use crate::forwarding::{Mac, PortIndex};

/// Parcels under way from one plane to another at a time, where there are few planes.
pub(super) const PARCELS_MAX: usize = 16;

/// Parcels of a plane, for all others, at most (but two for each): 11 MiB.
const PARCELS_OF_PLANE: usize = 32;

/// Octets of a parcel: four frames of the largest size.
const PARCEL_OCTETS: usize = 5 << 16;

/// Frames of a page or part of one that a parcel has room for, whatever else is in it.
const PARCEL_SLOTS: usize = 60;

/// What fits a parcel: any frame as it is.
pub(super) const TAKEN: PortCapabilities = PortCapabilities {
    checksum: ChecksumOffload::Any,
    gso: GsoOffload { tcp_v4: true, tcp_v6: true, ecn: true, udp: true },
    scatter_gather: true,
    mtu: u16::MAX,
};

/// News that wait for a plane at a time: of every address there can be.
const NEWS_MAX: usize = CAPACITY;

/// News that a plane takes in at a time.
const NEWS_AT_ONCE: usize = 64;

/// Not in the open parcel.
const NOWHERE: u32 = u32::MAX;

/// An address is behind that port.
pub(super) type News = (Mac, PortIndex);

/// Frames on their way to another plane.
pub(super) struct Parcel {
    pub(super) batch: Batch,
    /// Which frame goes to which port.
    pub(super) to: Vec<(PortIndex, u32)>,
    pub(super) from: usize,
    towards: usize,
}

/// Where others leave things for a plane.
pub(super) struct Post {
    wake: Arc<OwnedFd>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    inbound: Vec<Parcel>,
    /// Its own parcels, empty.
    returned: Vec<Parcel>,
    news: VecDeque<News>,
    /// It sleeps, and must be woken for parcels.
    asleep: bool,
    /// It must be woken also for parcels of its own.
    wants_parcels: bool,
}

impl Post {
    pub(super) fn new(wake: Arc<OwnedFd>) -> Post {
        Post { wake, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // The counter of an eventfd cannot overflow by ones.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

/// What every plane knows of a port, wherever its parts are.
struct Known {
    id: PortId,
    parts: usize,
    by_guest: Option<Arc<Steering>>,
}

/// What a plane has for another one.
struct Outbound {
    free: Vec<Parcel>,
    made: usize,
    open: Option<Parcel>,
    /// Where the frames of the batch are in the open parcel.
    packed: Vec<u32>,
}

/// What has come from another plane.
#[derive(Default)]
pub(super) struct Inbound {
    parcels: VecDeque<Parcel>,
    pub(super) share: Share,
}

/// One plane's end of all this.
pub(super) struct Relay {
    index: usize,
    posts: Arc<[Post]>,
    known: Vec<Option<Known>>,
    own: SecretSpread,
    outbound: Vec<Outbound>,
    /// Parcels for each other plane.
    parcels_max: usize,
    pub(super) inbound: Vec<Inbound>,
    /// *Sent* is what was handed to other planes, *received* what came from them.
    pub(super) counters: Arc<PortCounters>,
    /// A sender waits for a parcel.
    pub(super) awaited: bool,
}

/// Where the frames of a batch go that are for one port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    To(usize),
    ByFlow,
}

impl Relay {
    pub(super) fn new(index: usize, posts: &Arc<[Post]>) -> Relay {
        let outbound = || Outbound { free: Vec::new(), made: 0, open: None, packed: Vec::new() };
        Relay {
            index,
            posts: Arc::clone(posts),
            known: Vec::new(),
            own: SecretSpread::new(),
            outbound: posts.iter().map(|_| outbound()).collect(),
            parcels_max: (PARCELS_OF_PLANE / posts.len().max(2).saturating_sub(1))
                .clamp(2, PARCELS_MAX),
            inbound: posts.iter().map(|_| Inbound::default()).collect(),
            counters: Arc::default(),
            awaited: false,
        }
    }

    /// Whether anything was ever handed from thread to thread, or ought to have been.
    pub(super) fn is_used(&self) -> bool {
        let PortCounters { rx_frames, tx_frames, .. } = &*self.counters;
        rx_frames.get() > 0 || tx_frames.get() > 0 || self.counters.drops_total() > 0
    }

    /// Whether a port has that place.
    pub(super) fn is_known(&self, place: usize) -> bool {
        self.known.get(place).is_some_and(Option::is_some)
    }

    /// The place of a port.
    pub(super) fn place(&self, id: PortId) -> Option<usize> {
        self.known.iter().position(|known| known.as_ref().is_some_and(|known| known.id == id))
    }

    pub(super) fn note(&mut self, place: usize, id: PortId, parts: usize) {
        if self.known.len() <= place {
            self.known.resize_with(place + 1, || None);
        }
        self.known[place] = Some(Known { id, parts: parts.max(1), by_guest: None });
    }

    pub(super) fn forget(&mut self, place: usize) {
        if let Some(known) = self.known.get_mut(place) {
            *known = None;
        }
    }

    /// The parts of the port at that place.
    pub(super) fn parts(&self, place: usize) -> usize {
        self.known.get(place).and_then(Option::as_ref).map_or(1, |known| known.parts)
    }

    /// The guest wants its packets spread like this.
    pub(super) fn steer(&mut self, id: PortId, steering: Option<Arc<Steering>>) {
        if let Some(known) = self.known.iter_mut().flatten().find(|known| known.id == id) {
            known.by_guest = steering;
        }
    }

    /// Which part takes what comes by `source` and goes to `port`.
    fn way(&self, source: usize, port: PortIndex) -> Way {
        let Some(Some(known)) = self.known.get(usize::from(port.0)) else {
            return Way::To(self.index);
        };
        match known.parts {
            1 => Way::To(0),
            parts if known.by_guest.is_none() && self.parts(source) >= parts => {
                Way::To(self.index % parts)
            }
            _ => Way::ByFlow,
        }
    }

    /// The plane of one frame's flow.
    pub(super) fn by_flow(&self, port: PortIndex, batch: &Batch, frame: u32) -> usize {
        let Some(Some(known)) = self.known.get(usize::from(port.0)) else { return self.index };
        let (header, len) = batch.get(frame).map_or((&[][..], 0), |f| (f.header(), f.len()));
        match &known.by_guest {
            Some(steering) => {
                let hash = steering.hash(header, len);
                // What has no flow takes the first.
                hash.map_or(0, |hash| usize::from(steering.queue(hash.value)) % known.parts)
            }
            None => self.own.queue(header, len, known.parts),
        }
    }

    /// Packs those of `frames`, which came by `source` and go to `port`, that another plane is to send;
    /// the others are left.
    pub(super) fn divert(
        &mut self,
        source: usize,
        port: PortIndex,
        batch: &Batch,
        frames: &mut Vec<u32>,
    ) {
        match self.way(source, port) {
            Way::To(plane) if plane == self.index => {}
            Way::To(plane) => {
                frames.drain(..).for_each(|frame| self.pack(plane, port, batch, frame));
            }
            Way::ByFlow => frames.retain(|&frame| {
                let plane = self.by_flow(port, batch, frame);
                if plane != self.index {
                    self.pack(plane, port, batch, frame);
                }
                plane == self.index
            }),
        }
    }

    /// Free slots, each of a page, in the parcels for other planes that get something of what comes by
    /// `source` and goes to `port`; `None` if none does.
    pub(super) fn slots(&self, source: usize, port: PortIndex) -> Option<usize> {
        let planes = match self.way(source, port) {
            Way::To(plane) => plane..plane + 1,
            Way::ByFlow => 0..self.parts(usize::from(port.0)),
        };
        let others = planes.filter(|plane| *plane != self.index);
        others.map(|plane| self.parcels(plane) * PARCEL_SLOTS).min()
    }

    /// Free parcels for that plane.
    pub(super) fn parcels(&self, plane: usize) -> usize {
        self.outbound
            .get(plane)
            .map_or(0, |o| o.free.len() + self.parcels_max.saturating_sub(o.made))
    }

    fn pack(&mut self, plane: usize, port: PortIndex, batch: &Batch, frame: u32) {
        let Some(view) = batch.get(frame) else { return };
        let at = frame as usize;
        let len = view.len();
        if self.outbound[plane].packed.get(at).is_none_or(|place| *place == NOWHERE) {
            if !self.open(plane, len) {
                return self.counters.dropped(DropReason::RelayFull);
            }
            let outbound = &mut self.outbound[plane];
            let Some(parcel) = &mut outbound.open else { return };
            let copied = parcel.batch.reserve(len.next_multiple_of(64)).and_then(|offset| {
                view.copy_to(parcel.batch.scratch_mut(offset..offset + len).ok()?);
                parcel.batch.push_contiguous(offset, len, view.meta()).ok()
            });
            let Some(copy) = copied else { return self.counters.dropped(DropReason::RelayFull) };
            if outbound.packed.len() <= at {
                outbound.packed.resize(at + 1, NOWHERE);
            }
            outbound.packed[at] = copy;
        }
        let outbound = &mut self.outbound[plane];
        if let (Some(parcel), Some(&copy)) = (&mut outbound.open, outbound.packed.get(at)) {
            parcel.to.push((port, copy));
            self.counters.sent(1, len as u64);
        }
    }

    /// Sees to it that a parcel is open which has room for so many octets.
    fn open(&mut self, plane: usize, len: usize) -> bool {
        let fits = |parcel: &Parcel| {
            parcel.batch.frames_left() > 0
                && len.next_multiple_of(64) <= parcel.batch.scratch_left()
        };
        if self.outbound[plane].open.as_ref().is_some_and(|parcel| !fits(parcel)) {
            self.send(plane);
        }
        let outbound = &mut self.outbound[plane];
        if outbound.open.is_none() {
            outbound.open = outbound.free.pop();
        }
        if outbound.open.is_none() && outbound.made < self.parcels_max {
            outbound.made += 1;
            let batch = Batch::with_capacity(FRAMES_DEFAULT, PARCEL_OCTETS);
            let (from, towards) = (self.index, plane);
            outbound.open = Some(Parcel { batch, to: Vec::new(), from, towards });
        }
        outbound.open.is_some()
    }

    /// Posts what was packed; how many sleepers were woken.
    pub(super) fn send_all(&mut self) -> u64 {
        (0..self.outbound.len()).map(|plane| u64::from(self.send(plane))).sum()
    }

    fn send(&mut self, plane: usize) -> bool {
        let outbound = &mut self.outbound[plane];
        let Some(parcel) = outbound.open.take() else { return false };
        outbound.packed.clear();
        let post = &self.posts[plane];
        let mut state = post.lock();
        state.inbound.push(parcel);
        let wake = core::mem::take(&mut state.asleep);
        drop(state);
        if wake {
            post.wake();
        }
        wake
    }

    /// Tells the others.
    pub(super) fn tell(&self, news: impl Iterator<Item = News> + Clone) {
        if news.clone().next().is_none() {
            return;
        }
        for (plane, post) in self.posts.iter().enumerate() {
            if plane != self.index {
                let mut state = post.lock();
                let room = NEWS_MAX.saturating_sub(state.news.len());
                state.news.extend(news.clone().take(room));
            }
        }
    }

    /// Takes in what others left here.
    pub(super) fn collect(&mut self, mut news: impl FnMut(News)) {
        let mut state = self.posts[self.index].lock();
        for parcel in state.returned.drain(..) {
            self.outbound[parcel.towards].free.push(parcel);
        }
        for parcel in state.inbound.drain(..) {
            self.inbound[parcel.from].parcels.push_back(parcel);
        }
        let heard = state.news.len().min(NEWS_AT_ONCE);
        state.news.drain(..heard).for_each(&mut news);
    }

    /// Whether there is something from that plane.
    pub(super) fn has_from(&self, plane: usize) -> bool {
        self.inbound.get(plane).is_some_and(|inbound| !inbound.parcels.is_empty())
    }

    /// What came from that plane first.
    pub(super) fn next_from(&mut self, plane: usize) -> Option<Parcel> {
        let parcel = self.inbound.get_mut(plane)?.parcels.pop_front()?;
        let octets = parcel.batch.iter().map(|frame| frame.len() as u64).sum();
        self.counters.received(parcel.batch.len() as u64, octets);
        Some(parcel)
    }

    /// Gives a parcel back whose frames were sent.
    pub(super) fn give_back(&self, mut parcel: Parcel) {
        parcel.batch.clear();
        parcel.to.clear();
        let Some(post) = self.posts.get(parcel.from) else { return };
        let mut state = post.lock();
        state.returned.push(parcel);
        let wake = state.asleep && core::mem::take(&mut state.wants_parcels);
        state.asleep &= !wake;
        drop(state);
        if wake {
            post.wake();
        }
    }

    /// Whether this plane may sleep: nothing waits for it, and it is woken when something comes.
    pub(super) fn fall_asleep(&mut self) -> bool {
        if self.inbound.iter().any(|inbound| !inbound.parcels.is_empty()) {
            return false;
        }
        let mut state = self.posts[self.index].lock();
        let due = !state.inbound.is_empty()
            || !state.news.is_empty()
            || (self.awaited && !state.returned.is_empty());
        state.asleep = !due;
        state.wants_parcels = self.awaited;
        !due
    }

    pub(super) fn awake(&self) {
        self.posts[self.index].lock().asleep = false;
    }
}

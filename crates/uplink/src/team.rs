//! Runner team: bounded queues by which the runners of one guest's engines hand over frames and
//! connections to the engine that owns their flow. See [`crate::share`].
//!
//! ```text
//! runner A: Member::hand_over  --queue of runner B, WakeFd-->  runner B: Member::take
//! ```
//!
//! A full queue drops items, as a network would, and counts them.
//!
//! When the guest's programs have ended, one runner has all of the team drain their links (`Member::request_drain`). Each drops
//! its request when it has, and the first one waits until all are dropped.

// #syscall uplink eventfd2,read,write: frames are handed to another thread

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender, SyncSender, TryRecvError, channel, sync_channel};

use ringfence_sys::mailbox::WakeFd;

use crate::counters::UplinkCounters;
use crate::share::Handoff;

/// Maximum of items in a runner's queue: 8 MiB of frames.
const WAITING_MAX: usize = 128;

/// One runner's end of the team: its own queue, and senders to all others.
#[derive(Debug)]
pub struct Member {
    items: Receiver<Handoff>,
    wake: WakeFd,
    others: Vec<(SyncSender<Handoff>, WakeFd)>,
    /// Requests to this runner, and senders of requests to all.
    requests: Receiver<DrainRequest>,
    requesters: Vec<Sender<DrainRequest>>,
}

/// Request to a runner to drain its link. It is dropped when the link is drained.
#[derive(Clone, Debug)]
pub(crate) struct DrainRequest {
    _pending: Sender<()>,
}

/// Progress of a drain of all links of a team.
#[derive(Debug)]
pub(crate) struct TeamDrain(Receiver<()>);

impl TeamDrain {
    /// Returns `true` if all links are drained.
    pub(crate) fn is_complete(&self) -> bool {
        self.0.try_recv() == Err(TryRecvError::Disconnected)
    }
}

/// Creates the ends of a team of `members` runners.
///
/// # Errors
///
/// Returns an error if no descriptor is free.
pub fn team(members: usize) -> io::Result<Vec<Member>> {
    let mut senders = Vec::new();
    let mut receivers = Vec::new();
    for _ in 0..members {
        let (wake, (sender, items)) = (WakeFd::new()?, sync_channel(WAITING_MAX));
        senders.push((sender, wake.clone()));
        receivers.push((items, wake));
    }
    let (requesters, requested): (Vec<_>, Vec<_>) = (0..members).map(|_| channel()).unzip();
    let member = |((items, wake), requests)| Member {
        items,
        wake,
        others: senders.clone(),
        requests,
        requesters: requesters.clone(),
    };
    Ok(receivers.into_iter().zip(requested).map(member).collect())
}

impl Member {
    /// Hands over items to the runner of the given index, and wakes it. Items that do not fit are dropped.
    pub(crate) fn hand_over(
        &self,
        handoffs: impl Iterator<Item = (usize, Handoff)>,
        counters: &UplinkCounters,
    ) {
        let mut woken = vec![false; self.others.len()];
        for (index, item) in handoffs {
            let Some(((sender, _), woken)) = self.others.get(index).zip(woken.get_mut(index))
            else {
                continue;
            };
            *woken = true;
            if sender.try_send(item).is_err() {
                counters.drop_handed.add(1);
            }
        }
        let wakes = self.others.iter().zip(woken).filter(|(_, woken)| *woken);
        for ((_, wake), _) in wakes {
            wake.wake();
        }
    }

    /// Takes at most `budget` items that other runners have handed over.
    pub(crate) fn take(&self, budget: usize) -> impl Iterator<Item = Handoff> + '_ {
        self.items.try_iter().take(budget)
    }

    /// Has all runners of the team drain their links, this one included.
    pub(crate) fn request_drain(&self) -> TeamDrain {
        let (pending, drained) = channel();
        let request = DrainRequest { _pending: pending };
        for (requester, (_, wake)) in self.requesters.iter().zip(&self.others) {
            // A runner that has ended has no link.
            let _ = requester.send(request.clone());
            wake.wake();
        }
        TeamDrain(drained)
    }

    /// Takes the next request to drain this runner's link, if there is one.
    pub(crate) fn take_drain_request(&self) -> Option<DrainRequest> {
        self.requests.try_recv().ok()
    }

    /// Clears the wake-up. Must be called before [`take`](Self::take).
    pub(crate) fn clear(&self) {
        self.wake.clear();
    }

    /// Returns a descriptor that is readable when items may be waiting.
    pub(crate) fn wait_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

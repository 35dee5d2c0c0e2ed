//! Runner team: bounded queues by which the runners of one guest's engines hand over frames and
//! connections to the engine that owns their flow. See [`crate::share`].
//!
//! ```text
//! runner A: Member::hand_over  --queue of runner B, WakeFd-->  runner B: Member::take
//! ```
//!
//! A full queue drops items, as a network would, and counts them.

// #syscall uplink eventfd2,read,write: frames are handed to another thread

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

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
    let member = |(items, wake)| Member { items, wake, others: senders.clone() };
    Ok(receivers.into_iter().map(member).collect())
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

    /// Clears the wake-up. Must be called before [`take`](Self::take).
    pub(crate) fn clear(&self) {
        self.wake.clear();
    }

    /// Returns a descriptor that is readable when items may be waiting.
    pub(crate) fn wait_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

//! What runners of one guest's engines have to do with each other: frames and connections that came to one
//! of them and are another one's go through here. See [`crate::share`].

// #syscall uplink eventfd2,read,write: frames are handed to another thread

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use ringfence_sys::mailbox::WakeFd;

use crate::counters::UplinkCounters;
use crate::share::Handed;

/// What may wait for an engine, at most: 8 MiB of frames.
const WAITING_MAX: usize = 128;

/// One of several runners.
#[derive(Debug)]
pub struct Member {
    inbox: Receiver<Handed>,
    wake: WakeFd,
    others: Vec<(SyncSender<Handed>, WakeFd)>,
}

/// Runners that know of each other, so many.
///
/// # Errors
///
/// When no descriptor is free.
pub fn team(members: usize) -> io::Result<Vec<Member>> {
    let mut doors = Vec::new();
    let mut inboxes = Vec::new();
    for _ in 0..members {
        let (wake, (tell, inbox)) = (WakeFd::new()?, sync_channel(WAITING_MAX));
        doors.push((tell, wake.clone()));
        inboxes.push((inbox, wake));
    }
    let member = |(inbox, wake)| Member { inbox, wake, others: doors.clone() };
    Ok(inboxes.into_iter().map(member).collect())
}

impl Member {
    /// Hands over what is others'. What they have no room for is lost, as on any network.
    pub(crate) fn hand_over(
        &self,
        handed: impl Iterator<Item = (usize, Handed)>,
        counters: &UplinkCounters,
    ) {
        let mut woken = vec![false; self.others.len()];
        for (whose, handed) in handed {
            let Some(((door, _), woken)) = self.others.get(whose).zip(woken.get_mut(whose)) else {
                continue;
            };
            *woken = true;
            if door.try_send(handed).is_err() {
                counters.drop_handed.add(1);
            }
        }
        let wakes = self.others.iter().zip(woken).filter(|(_, woken)| *woken);
        for ((_, wake), _) in wakes {
            wake.wake();
        }
    }

    /// What others have handed over, at most so much.
    pub(crate) fn take(&self, budget: usize) -> impl Iterator<Item = Handed> + '_ {
        self.inbox.try_iter().take(budget)
    }

    /// Takes back the wakes; to be called before [`take`](Self::take).
    pub(crate) fn clear(&self) {
        self.wake.clear();
    }

    /// Readable when something may have been handed over.
    pub(crate) fn wait_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

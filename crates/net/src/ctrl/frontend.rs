//! Frontend of the control ring: stages the pages of its queues.
//!
//! # Theory of operation
//!
//! The sequence of messages is fixed. For each queue, the frontend requests the maximum number of staged
//! pages, then stages lists until all pages are staged or the maximum is reached. One message is in flight at
//! a time, since all lists use one page. A refusal ends the staging of that queue, which continues without
//! it; the frontend logs that once.

use std::collections::VecDeque;
use std::sync::Arc;

use ringfence_frame::port::Fault;
use ringfence_memory::PAGE_SIZE;
use ringfence_platform::{Access, Channel, Gref, Lease};
use ringfence_ring::{FrontRing, NETIF_CTRL, RingPages};
use ringfence_wire::netif::ctrl::{
    CtrlMessage, CtrlResponse, CtrlStatus, GREF_LIST_MAX, GrefEntry, GrefList,
};
use ringfence_wire::numbers::{bounded, usize_from};

use crate::queues::channel_fault;
use crate::rules::RuleCounters;

/// Message in flight for a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum InFlight {
    Size,
    Add { pages: usize },
}

/// Pages of a queue that are not yet staged, the most useful ones first.
struct Queue {
    left: VecDeque<GrefEntry>,
    /// Number of pages that the backend still accepts, once it is known.
    room: Option<usize>,
    staged: usize,
}

/// Progress of staging over all queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StagingProgress {
    /// Number of pages that the backend keeps mapped.
    pub staged: usize,
    /// Number of pages that will not be staged.
    pub refused: usize,
    /// Set if no message is left.
    pub done: bool,
}

/// Control ring of one frontend.
pub struct CtrlFrontend<C> {
    ring: FrontRing<RingPages>,
    channel: C,
    list: Lease,
    queues: Vec<Queue>,
    /// Index of the current queue, and its message in flight.
    at: usize,
    in_flight: Option<InFlight>,
    id: u16,
    refused: usize,
    rules: Arc<RuleCounters>,
}

impl<C: Channel> CtrlFrontend<C> {
    /// Makes a control ring in the page `ring`, with lists in the page `list`; the backend can write both.
    /// `queues` has the pages to stage, by queue.
    ///
    /// # Errors
    ///
    /// Returns a [`Fault`] if the page cannot hold a ring, which no platform causes.
    pub fn new(
        ring: &Lease,
        list: Lease,
        channel: C,
        queues: Vec<Vec<(Gref, Access)>>,
        rules: &Arc<RuleCounters>,
    ) -> Result<CtrlFrontend<C>, Fault> {
        let ring = crate::netfront::ring(ring.memory())?;
        let queue = |pages: Vec<(Gref, Access)>| Queue {
            left: pages
                .into_iter()
                .map(|(gref, access)| GrefEntry::new(gref, access == Access::ReadOnly))
                .collect(),
            room: None,
            staged: 0,
        };
        Ok(CtrlFrontend {
            ring: FrontRing::init(ring, NETIF_CTRL),
            channel,
            list,
            queues: queues.into_iter().map(queue).collect(),
            at: 0,
            in_flight: None,
            id: 0,
            refused: 0,
            rules: Arc::clone(rules),
        })
    }

    /// Returns the event channel to wait for.
    pub fn channel(&self) -> &C {
        &self.channel
    }

    /// Returns the progress of staging.
    pub fn progress(&self) -> StagingProgress {
        StagingProgress {
            staged: self.queues.iter().map(|queue| queue.staged).sum(),
            refused: self.refused,
            done: self.at >= self.queues.len(),
        }
    }

    /// Returns true if all pages of this queue are staged.
    pub fn is_staged(&self, queue: u16) -> bool {
        self.queues.get(usize::from(queue)).is_some_and(|queue| queue.left.is_empty())
    }

    /// Returns the page of the lists.
    pub fn into_list(self) -> Lease {
        self.list
    }

    /// Processes the response, if there is one, and sends the next message. The owner calls it when the backend is
    /// connected, and whenever the channel is readable.
    ///
    /// # Errors
    ///
    /// Returns a [`Fault`] if the backend breaks a rule of the ring.
    pub fn serve(&mut self) -> Result<(), Fault> {
        self.channel.clear().map_err(channel_fault(&self.rules))?;
        loop {
            self.process_responses()?;
            if self.in_flight.is_none() {
                self.send_next()?;
            }
            let overflow = |error| {
                self.rules.count("ctrl_response_overflow");
                Fault::misbehaved(error)
            };
            if !self.ring.final_check().map_err(overflow)? {
                return Ok(());
            }
        }
    }

    fn process_responses(&mut self) -> Result<(), Fault> {
        let waiting = self.ring.unconsumed().map_err(|error| {
            self.rules.count("ctrl_response_overflow");
            Fault::misbehaved(error)
        })?;
        for _ in 0..waiting {
            let bytes: [u8; CtrlResponse::SIZE] = self.ring.response(0).into_unchecked();
            self.ring.consume(1);
            let response = CtrlResponse::from_bytes(bytes);
            // Only one message is in flight: a response with another id is ignored.
            match self.in_flight.take().filter(|_| response.id == self.id) {
                Some(in_flight) => self.process_response(in_flight, response),
                None => drop(self.rules.count("ctrl_unasked_response")),
            }
        }
        Ok(())
    }

    fn process_response(&mut self, in_flight: InFlight, response: CtrlResponse) {
        let Some(queue) = self.queues.get_mut(self.at) else { return };
        match (in_flight, response.status) {
            (InFlight::Size, CtrlStatus::Success) => {
                queue.room = Some(usize_from(response.data));
            }
            (InFlight::Add { pages }, CtrlStatus::Success) => {
                queue.left.drain(..pages.min(queue.left.len()));
                queue.room = queue.room.map(|room| room.saturating_sub(pages));
                queue.staged += pages;
            }
            (_, status) => {
                tracing::info!(
                    queue = self.at,
                    ?status,
                    staged = queue.staged,
                    "the backend stages no more pages; the others are reached as before"
                );
                queue.room = Some(0);
            }
        }
    }

    /// Sends the next message, unless all is done.
    fn send_next(&mut self) -> Result<(), Fault> {
        while let Some(queue) = self.queues.get(self.at) {
            let number = bounded(self.at, u32::MAX);
            let count = match queue.room {
                None => 0,
                Some(room) => room.min(queue.left.len()).min(GREF_LIST_MAX as usize),
            };
            if queue.room.is_some() && count == 0 {
                self.refused += queue.left.len();
                self.at += 1;
                continue;
            }
            let message = if count == 0 {
                self.in_flight = Some(InFlight::Size);
                CtrlMessage::GetGrefMappingSize(number)
            } else {
                self.write_list(count)?;
                self.in_flight = Some(InFlight::Add { pages: count });
                let entries = bounded(count, u16::MAX);
                CtrlMessage::AddGrefMapping(GrefList {
                    queue: number,
                    page: self.list.gref(),
                    entries,
                })
            };
            self.id = self.id.wrapping_add(1);
            let posted = self.ring.request(&message.request(self.id).to_bytes());
            debug_assert!(posted, "one message is under way at a time");
            if self.ring.publish() {
                self.channel.notify().map_err(channel_fault(&self.rules))?;
            }
            return Ok(());
        }
        Ok(())
    }

    fn write_list(&self, count: usize) -> Result<(), Fault> {
        let Some(queue) = self.queues.get(self.at) else { return Ok(()) };
        let mut bytes = Vec::with_capacity(PAGE_SIZE);
        queue.left.iter().take(count).for_each(|entry| bytes.extend(entry.to_bytes()));
        let written = self.list.memory().copy_from(0, &bytes);
        written.map_err(|e| Fault::system("the page of a list", std::io::Error::other(e)))
    }
}

//! The frontend's end of the control ring: stages the pages of its queues.
//!
//! # Theory of operation
//!
//! The messages of a connection are known in advance: for each queue, how many pages may be staged,
//! and then lists of them until all are, or as many as may be. One message is under way at a time,
//! since they share the page that a list lies in. A refusal ends staging of that queue: it goes on
//! without, and says so once.

use std::collections::VecDeque;
use std::sync::Arc;

use ringfence_frame::port::Fault;
use ringfence_memory::PAGE_SIZE;
use ringfence_platform::{Access, Channel, Gref, Lease};
use ringfence_ring::{FrontRing, NETIF_CTRL, RingPages};
use ringfence_wire::netif::ctrl::{
    CtrlMessage, CtrlResponse, CtrlStatus, GREF_LIST_MAX, GrefEntry, GrefList,
};

use crate::netback::channel_fault;
use crate::rules::RuleCounters;

/// What is under way for a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Asked {
    Size,
    Add { pages: usize },
}

/// The pages of a queue that are yet to be staged, the most useful ones first.
struct Queue {
    left: VecDeque<GrefEntry>,
    /// Pages the backend still has room for, once it said so.
    room: Option<usize>,
    staged: usize,
}

/// How far staging has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StagingProgress {
    /// Pages the backend keeps mapped.
    pub staged: usize,
    /// Pages it does not, and will not.
    pub refused: usize,
    /// Nothing more is under way.
    pub done: bool,
}

/// The control ring of one frontend.
pub struct CtrlFrontend<C> {
    ring: FrontRing<RingPages>,
    channel: C,
    list: Lease,
    queues: Vec<Queue>,
    /// The queue being worked on, and what was asked for it.
    at: usize,
    asked: Option<Asked>,
    id: u16,
    refused: usize,
    rules: Arc<RuleCounters>,
}

impl<C: Channel> CtrlFrontend<C> {
    /// Makes a control ring in `ring`, which the backend can write, with lists in `list`, which it
    /// can write too. `queues` are the pages to stage, by queue.
    ///
    /// # Errors
    ///
    /// A [`Fault`] if `ring` cannot hold one, which no platform's page does.
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
            asked: None,
            id: 0,
            refused: 0,
            rules: Arc::clone(rules),
        })
    }

    /// The channel to wait for.
    pub fn channel(&self) -> &C {
        &self.channel
    }

    /// How far it has come.
    pub fn progress(&self) -> StagingProgress {
        StagingProgress {
            staged: self.queues.iter().map(|queue| queue.staged).sum(),
            refused: self.refused,
            done: self.at >= self.queues.len(),
        }
    }

    /// Whether all pages of that queue that were to be staged are.
    pub fn is_staged(&self, queue: u16) -> bool {
        self.queues.get(usize::from(queue)).is_some_and(|queue| queue.left.is_empty())
    }

    /// Gives the page of the lists back.
    pub fn into_list(self) -> Lease {
        self.list
    }

    /// Takes the answer that is there and asks for what is next. To be called once the backend is
    /// connected, and whenever the channel is readable.
    ///
    /// # Errors
    ///
    /// A [`Fault`] if the backend breaks a rule of the ring.
    pub fn serve(&mut self) -> Result<(), Fault> {
        self.channel.clear().map_err(channel_fault(&self.rules))?;
        loop {
            self.take_answers()?;
            if self.asked.is_none() {
                self.ask()?;
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

    fn take_answers(&mut self) -> Result<(), Fault> {
        let waiting = self.ring.unconsumed().map_err(|error| {
            self.rules.count("ctrl_response_overflow");
            Fault::misbehaved(error)
        })?;
        for _ in 0..waiting {
            let bytes: [u8; CtrlResponse::SIZE] = self.ring.response(0).into_unchecked();
            self.ring.consume(1);
            let response = CtrlResponse::from_bytes(bytes);
            // One message is under way: whatever names another one is of no use.
            match self.asked.take().filter(|_| response.id == self.id) {
                Some(asked) => self.answered(asked, response),
                None => drop(self.rules.count("ctrl_unasked_response")),
            }
        }
        Ok(())
    }

    fn answered(&mut self, asked: Asked, response: CtrlResponse) {
        let Some(queue) = self.queues.get_mut(self.at) else { return };
        match (asked, response.status) {
            (Asked::Size, CtrlStatus::Success) => {
                queue.room = Some(usize::try_from(response.data).unwrap_or(usize::MAX));
            }
            (Asked::Add { pages }, CtrlStatus::Success) => {
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

    /// Asks for what is next; nothing when all is done.
    fn ask(&mut self) -> Result<(), Fault> {
        while let Some(queue) = self.queues.get(self.at) {
            let number = u32::try_from(self.at).unwrap_or(u32::MAX);
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
                self.asked = Some(Asked::Size);
                CtrlMessage::GetGrefMappingSize(number)
            } else {
                self.write_list(count)?;
                self.asked = Some(Asked::Add { pages: count });
                let entries = u16::try_from(count).unwrap_or(0);
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

//! Attacks on the control ring.
//!
//! The guest sends requests that the backend must refuse, and valid ones at inconvenient moments. Each
//! response is compared with the one that `docs/staging-grants.md` specifies. A different response
//! fails the row: then the backend, not the guest, has violated the protocol.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ringfence_memory::LentSlice;
use ringfence_platform::{Access, Channel, Granter, Gref, Lease, Platform};
use ringfence_ring::NETIF_CTRL;
use ringfence_ring::sync::Ordering::Acquire;
use ringfence_wire::netif::ctrl::{
    CtrlMessage, CtrlRequest, CtrlResponse, CtrlStatus, CtrlType, GREF_LIST_MAX, GrefEntry,
    GrefList,
};
use ringfence_wire::netif::{Status, TxResponse};

use super::adversary::{RSP_PROD, RawRing, SINK_MAC, UNGRANTED, VifAdversary};
use super::handshake::Pace;

/// Pairs of messages of a storm in flight at once: several batches of the backend.
const PAIRS: u32 = 8;
/// Time limit for a response of a busy backend.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);
/// Pages of a list of ordinary length.
const SOME: u16 = 32;
/// Number of the only queue.
const QUEUE: u32 = 0;
/// Bytes of a packet in a page that is removed from the table.
const SMALL: u16 = 64;

/// Response that violates the protocol.
#[derive(Debug, thiserror::Error)]
#[error("{what}: the backend answered {found}")]
pub struct WrongAnswer {
    what: &'static str,
    found: String,
}

/// Status and data of a response.
type Answer = (CtrlStatus, u32);

/// Control ring whose every word can be written, with a page for lists.
pub struct Control<C> {
    ring: RawRing,
    list: LentSlice,
    list_ref: Gref,
    channel: C,
    /// Responses consumed so far.
    heard: u32,
    /// Set if the backend supports staging; `None` before the first query.
    stages: Option<bool>,
}

impl<C: Channel> Control<C> {
    /// Creates a ring in the first page; the second one is for lists.
    pub fn new(pages: &[Lease; 2], channel: C) -> anyhow::Result<Control<C>> {
        Ok(Control {
            ring: RawRing::new(&pages[0], NETIF_CTRL)?,
            list: pages[1].memory().clone(),
            list_ref: pages[1].gref(),
            channel,
            heard: 0,
            stages: None,
        })
    }

    pub fn port(&self) -> String {
        self.channel.port().0.to_string()
    }

    fn list(&self, entries: u16) -> GrefList {
        GrefList { queue: QUEUE, page: self.list_ref, entries }
    }

    fn entry(&self, place: usize, gref: Gref, access: Access) -> anyhow::Result<()> {
        let entry = GrefEntry::new(gref, access == Access::ReadOnly);
        Ok(self.list.copy_from(place * GrefEntry::SIZE, &entry.to_bytes())?)
    }

    fn write(&self, pages: &[Lease], access: Access) -> anyhow::Result<()> {
        pages.iter().enumerate().try_for_each(|(n, page)| self.entry(n, page.gref(), access))
    }

    /// Writes requests to the ring, at most as many as it has slots, and notifies the backend.
    fn post(&mut self, requests: impl IntoIterator<Item = CtrlRequest>) -> anyhow::Result<()> {
        for request in requests {
            self.ring.put(&request.to_bytes())?;
        }
        self.ring.publish(0)?;
        Ok(self.channel.notify()?)
    }

    /// Waits for the responses to all requests and repeats `meanwhile` in between.
    fn hear(
        &mut self,
        pace: Pace,
        mut meanwhile: impl FnMut(&Self) -> anyhow::Result<()>,
    ) -> anyhow::Result<Vec<Answer>> {
        let began = Instant::now();
        while self.ring.page().load_u32(RSP_PROD, Acquire)? != self.ring.produced() {
            if began.elapsed() > ANSWER_WITHIN {
                bail!("no answer on the control ring");
            }
            meanwhile(self)?;
            (pace.pause)();
        }
        let mut answers = Vec::new();
        while self.heard != self.ring.produced() {
            let at = NETIF_CTRL.offset(self.heard);
            let bytes = self.ring.page().fetch::<{ CtrlResponse::SIZE }>(at)?.into_unchecked();
            let CtrlResponse { status, data, .. } = CtrlResponse::from_bytes(bytes);
            answers.push((status, data));
            self.heard = self.heard.wrapping_add(1);
        }
        Ok(answers)
    }

    fn ask(&mut self, pace: Pace, message: CtrlMessage) -> anyhow::Result<Answer> {
        self.post([message.request(0)])?;
        self.hear(pace, |_| Ok(()))?.pop().context("an answer")
    }

    /// Sends a request that must be answered by one of `wanted`, or by `NotSupported` without staging.
    fn expect(
        &mut self,
        pace: Pace,
        what: &'static str,
        message: CtrlMessage,
        wanted: &[Answer],
    ) -> anyhow::Result<Answer> {
        let answer = self.ask(pace, message)?;
        self.judge(what, answer, wanted)
    }

    fn judge(
        &self,
        what: &'static str,
        answer: Answer,
        wanted: &[Answer],
    ) -> anyhow::Result<Answer> {
        let not_here = self.stages == Some(false) && answer.0 == CtrlStatus::NotSupported;
        if not_here || wanted.contains(&answer) {
            return Ok(answer);
        }
        Err(WrongAnswer { what, found: format!("{answer:?} in place of one of {wanted:?}") }.into())
    }

    /// Returns `true` if the backend supports staging.
    fn stages(&mut self, pace: Pace) -> anyhow::Result<bool> {
        if let Some(known) = self.stages {
            return Ok(known);
        }
        let stages = match self.ask(pace, CtrlMessage::GetGrefMappingSize(QUEUE))? {
            (CtrlStatus::Success, 1..) => true,
            (CtrlStatus::NotSupported, _) => false,
            found => {
                let found = format!("{found:?}");
                return Err(WrongAnswer { what: "the size of the table", found }.into());
            }
        };
        self.stages = Some(stages);
        Ok(stages)
    }
}

/// Response to a successful ADD, and to a DEL that removed nothing.
const DONE: Answer = (CtrlStatus::Success, 0);
const REFUSED: Answer = (CtrlStatus::InvalidParameter, 0);

/// Returns the response to a DEL that removed all pages of a list.
fn all(pages: u16) -> Answer {
    (CtrlStatus::Success, pages.into())
}

/// Changes a list while the backend reads it; the backend must add the whole list as read, or nothing.
pub fn changing_lists<P: Platform>(adversary: &mut VifAdversary<P>) -> anyhow::Result<()> {
    let pace = adversary.handshake.pace;
    let (control, pages) = adversary.control()?;
    control.stages(pace)?;
    let (some, pages) = (usize::from(SOME), &pages[..usize::from(SOME)]);
    control.write(pages, Access::ReadWrite)?;
    control.post([CtrlMessage::AddGrefMapping(control.list(SOME)).request(0)])?;
    let mut round = 0;
    let answers = control.hear(pace, |control| {
        for _ in 0..4 * some {
            round += 1;
            let (place, bad) = (round * 7 % some, round / some % 2 == 1);
            // Not granted, beyond every table, or already in the list.
            let other = [UNGRANTED, Gref(u32::MAX), pages[(place + 1) % some].gref()][round % 3];
            control.entry(
                place,
                if bad { other } else { pages[place].gref() },
                Access::ReadWrite,
            )?;
        }
        Ok(())
    })?;
    let added = control.judge("ADD of a list that changes", answers[0], &[DONE, REFUSED])?;
    control.write(pages, Access::ReadWrite)?;
    let left = if added == DONE { all(SOME) } else { all(0) };
    let del = CtrlMessage::DelGrefMapping(control.list(SOME));
    control.expect(pace, "DEL of what a list that changed had added", del, &[left])?;
    Ok(())
}

/// Sends lists whose length is zero or exceeds a page.
pub fn long_lists<P: Platform>(adversary: &mut VifAdversary<P>) -> anyhow::Result<()> {
    let pace = adversary.handshake.pace;
    let (control, _) = adversary.control()?;
    let lengths = [GREF_LIST_MAX + 1, u16::MAX.into(), u32::MAX, 0];
    let kinds = [CtrlType::AddGrefMapping, CtrlType::DelGrefMapping];
    let data = lengths.map(|length| [QUEUE, control.list_ref.0, length]);
    let asked = data.iter().flat_map(|data| kinds.map(|kind| (kind, *data)));
    let asked = asked.map(|(kind, data)| CtrlRequest { id: 0, kind, data });
    control.post(asked.collect::<Vec<_>>())?;
    for answer in control.hear(pace, |_| Ok(()))? {
        control.judge("a list of no possible length", answer, &[REFUSED])?;
    }
    Ok(())
}

/// Adds and removes the same pages several times in one batch.
pub fn storm<P: Platform>(adversary: &mut VifAdversary<P>) -> anyhow::Result<()> {
    let pace = adversary.handshake.pace;
    let (control, pages) = adversary.control()?;
    control.stages(pace)?;
    control.write(&pages[..usize::from(SOME)], Access::ReadWrite)?;
    let list = control.list(SOME);
    let both = [CtrlMessage::AddGrefMapping(list), CtrlMessage::DelGrefMapping(list)];
    let requests = (0..PAIRS).flat_map(|_| both.map(|message| message.request(0)));
    control.post(requests)?;
    for pair in control.hear(pace, |_| Ok(()))?.chunks_exact(2) {
        control.judge("ADD in a storm", pair[0], &[DONE])?;
        control.judge("DEL in a storm", pair[1], &[all(SOME)])?;
    }
    Ok(())
}

/// Removes pages from the table while packets in them are in flight. The packets must be completed
/// regardless, and then the grant of a page must be revocable.
pub fn in_flight<P: Platform>(adversary: &mut VifAdversary<P>) -> anyhow::Result<()> {
    let pace = adversary.handshake.pace;
    let list = {
        let (control, _) = adversary.control()?;
        control.stages(pace)?;
        control.list(SOME)
    };
    let from = answered(adversary, pace)?;
    let (control, pages) = adversary.control_to_send()?;
    control.write(&pages[..usize::from(SOME)], Access::ReadOnly)?;
    control.expect(pace, "ADD", CtrlMessage::AddGrefMapping(list), &[DONE])?;
    for page in 0..usize::from(SOME) {
        let slot = adversary.slot(page, SMALL).to_bytes();
        adversary.tx.put(&slot)?;
    }
    adversary.tx.publish(0)?;
    adversary.notify()?;
    let (control, _) = adversary.control()?;
    let del = CtrlMessage::DelGrefMapping(list);
    control.expect(pace, "DEL of pages in flight", del, &[all(SOME)])?;
    let to = answered(adversary, pace)?;
    for n in 0..to.wrapping_sub(from) {
        let TxResponse { status, .. } = adversary.tx.response(from.wrapping_add(n))?;
        if status != Status::Okay {
            let what = "a packet in a page that left the table";
            return Err(WrongAnswer { what, found: format!("{status:?}") }.into());
        }
    }
    // The backend no longer maps the page.
    let lease = adversary.tx_pages.swap_remove(0);
    let (back, taken) = match adversary.granter.take_back(lease) {
        Ok(()) => (adversary.granter.lend(Access::ReadOnly)?, true),
        Err(still) => (still.lease, false),
    };
    adversary.tx_pages.push(back);
    if !taken {
        let what = "a page that left the table is taken back";
        return Err(WrongAnswer { what, found: "by holding on to it".to_owned() }.into());
    }
    adversary.address(adversary.tx_pages.len() - 1, SINK_MAC, adversary.mac())
}

/// Waits until all packets are completed. Returns the index of the next slot.
fn answered<P: Platform>(adversary: &VifAdversary<P>, pace: Pace) -> anyhow::Result<u32> {
    let began = Instant::now();
    while adversary.tx.page().load_u32(RSP_PROD, Acquire)? != adversary.tx.produced() {
        if began.elapsed() > ANSWER_WITHIN {
            bail!("packets were not answered");
        }
        (pace.pause)();
    }
    Ok(adversary.tx.produced())
}

/// Adds one reference in two lists, and twice in one list.
pub fn twice<P: Platform>(adversary: &mut VifAdversary<P>) -> anyhow::Result<()> {
    let pace = adversary.handshake.pace;
    let (control, pages) = adversary.control()?;
    control.stages(pace)?;
    let some = usize::from(SOME);
    let (add, del) = (
        CtrlMessage::AddGrefMapping(control.list(SOME)),
        CtrlMessage::DelGrefMapping(control.list(SOME)),
    );
    control.write(&pages[..some], Access::ReadWrite)?;
    control.entry(some - 1, pages[0].gref(), Access::ReadWrite)?;
    control.expect(pace, "ADD of a list that has a page twice", add, &[REFUSED])?;
    control.write(&pages[..some], Access::ReadWrite)?;
    control.expect(pace, "ADD", add, &[DONE])?;
    // The last page of the first list is the first of this one.
    control.write(&pages[some - 1..2 * some - 1], Access::ReadWrite)?;
    control.expect(pace, "ADD of a page that is in another list", add, &[REFUSED])?;
    control.expect(pace, "DEL of a list of which one was added", del, &[all(1)])?;
    control.write(&pages[..some], Access::ReadWrite)?;
    control.expect(pace, "DEL of a list of which one was taken out", del, &[all(SOME - 1)])?;
    Ok(())
}

/// Sends requests without end and never consumes a response.
pub fn deaf<P: Platform>(adversary: &mut VifAdversary<P>, round: usize) -> anyhow::Result<()> {
    let (control, pages) = adversary.control()?;
    if round == 1 {
        control.write(&pages[..usize::from(SOME)], Access::ReadWrite)?;
    }
    let list = control.list(SOME);
    let messages = [
        CtrlMessage::AddGrefMapping(list),
        CtrlMessage::GetGrefMappingSize(QUEUE),
        CtrlMessage::DelGrefMapping(list),
        CtrlMessage::GetGrefMappingSize(u32::MAX),
    ];
    let free = control.ring.free()?;
    let requests = messages.iter().cycle().take(usize::try_from(free)?);
    control.post(requests.map(|message| message.request(0)).collect::<Vec<_>>())
}

//! Attacks of a hostile guest, one burst at a time.
//!
//! After each burst the guest yields its core once, as an honest guest does whose ring is full. The
//! scheduler alone decides the shares of a core.

use std::fs::File;
use std::io::{Read, Write};
use std::time::Instant;

use anyhow::Context;
use ringfence_platform::{Access, Granter, Platform};
use ringfence_wire::netif::{TxFlags, TxRequest};
use ringfence_wire::xenbus::STATE;
use ringfence_wire::xenstore::{HEADER_LEN, Path, StoreRequest};

use super::adversary::{SINK_MAC, UNGRANTED, VifAdversary};
use super::behaviour::Behaviour;
use super::control;

/// Bytes of a packet whose size is not part of the attack.
const SMALL: u16 = 64;
/// Events in a burst.
const EVENTS: usize = 64;
/// Requests in flight at the store or the hub.
const UNDER_WAY: usize = 64;
/// Request of a type that the hub does not know. Sequence number 0 means that no answer is sent.
const UNKNOWN_REQUEST: [u8; 32] = {
    let mut bytes = [0; 32];
    bytes[0] = 99;
    bytes
};

/// State of an attack between bursts.
pub struct AttackState {
    random: u64,
    round: usize,
    store: Option<File>,
    posted: bool,
    began: Instant,
}

impl Default for AttackState {
    fn default() -> AttackState {
        AttackState {
            random: 0x2545_F491_4F6C_DD1D,
            round: 0,
            store: None,
            posted: false,
            began: Instant::now(),
        }
    }
}

impl AttackState {
    fn random(&mut self) -> u64 {
        next_random(&mut self.random)
    }
}

fn next_random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Runs one burst of a behaviour, as large as the ring permits.
pub fn burst<P: Platform>(
    adversary: &mut VifAdversary<P>,
    behaviour: Behaviour,
    state: &mut AttackState,
) -> anyhow::Result<()> {
    state.round = state.round.wrapping_add(1);
    match behaviour {
        // These rows have no hostile guest.
        Behaviour::Absent | Behaviour::Honest => Ok(()),
        Behaviour::BadSizes => bad_sizes(adversary, state.round),
        Behaviour::Slots19 => adversary.post(&chain(adversary, 19, SMALL, 1)).map(drop),
        Behaviour::BadGrefs => {
            adversary.post(&[TxRequest { gref: UNGRANTED, ..adversary.slot(0, SMALL) }]).map(drop)
        }
        Behaviour::ExtraChains => extra_chain(adversary),
        Behaviour::ZeroFragments => adversary.post(&chain(adversary, 18, SMALL, 0)).map(drop),
        // 15 pages and 4095 bytes.
        Behaviour::LargePackets => adversary.post(&chain(adversary, 16, u16::MAX, 4096)).map(drop),
        Behaviour::Flipping => flip(adversary),
        Behaviour::Broadcast => {
            adversary.address(0, [0xff; 6], adversary.mac())?;
            adversary.post(&[adversary.slot(0, SMALL)]).map(drop)
        }
        Behaviour::MadeUpAddresses => made_up_addresses(adversary, state),
        Behaviour::EventStorm => (0..EVENTS).try_for_each(|_| adversary.notify()),
        Behaviour::Deaf => deaf(adversary, state),
        Behaviour::Hoarder => hoard(adversary, state),
        Behaviour::ProducerOverflow => {
            adversary.tx.publish(1 << 20)?;
            adversary.notify()
        }
        Behaviour::Reattach => Ok(()),
        Behaviour::ChangingLists => control::changing_lists(adversary),
        Behaviour::LongLists => control::long_lists(adversary),
        Behaviour::StagingStorm => control::storm(adversary),
        Behaviour::StagingInFlight => control::in_flight(adversary),
        Behaviour::StagingTwice => control::twice(adversary),
        Behaviour::ControlDeaf => control::deaf(adversary, state.round),
        Behaviour::StateFlood => state_flood(adversary, state),
        Behaviour::HubFlood => (0..UNDER_WAY)
            .try_for_each(|_| adversary.send_to_hub(&UNKNOWN_REQUEST))
            .context("the hub hung up"),
        Behaviour::Rejoin => {
            adversary.send_to_hub(b"this is no message").context("the hub hung up")
        }
    }
}

/// Returns a packet of `slots` slots whose first declares `total` bytes and whose others have `each`
/// bytes.
fn chain<P: Platform>(
    adversary: &VifAdversary<P>,
    slots: usize,
    total: u16,
    each: u16,
) -> Vec<TxRequest> {
    let slot = |n: usize| {
        let flags = if n + 1 < slots { TxFlags::MORE_DATA } else { TxFlags::NONE };
        TxRequest { flags, ..adversary.slot(n, if n == 0 { total } else { each }) }
    };
    (0..slots).map(slot).collect()
}

fn bad_sizes<P: Platform>(adversary: &mut VifAdversary<P>, round: usize) -> anyhow::Result<()> {
    let slot = adversary.slot(0, SMALL);
    let packet = match round % 3 {
        0 => vec![TxRequest { size: 5, ..slot }],
        1 => vec![TxRequest { offset: 4090, ..slot }],
        _ => vec![TxRequest { flags: TxFlags::MORE_DATA, ..slot }, TxRequest { size: 100, ..slot }],
    };
    adversary.post(&packet).map(drop)
}

/// Fills the ring with one packet followed by extra infos of an unknown type.
fn extra_chain<P: Platform>(adversary: &mut VifAdversary<P>) -> anyhow::Result<()> {
    /// Slots of the ring; the packet takes one of them.
    const SLOTS: u32 = 256;
    if adversary.tx.free()? < SLOTS {
        return Ok(());
    }
    let first = TxRequest { flags: TxFlags::EXTRA_INFO, ..adversary.slot(0, SMALL) };
    adversary.tx.put(&first.to_bytes())?;
    for n in 1..SLOTS {
        let more = u8::from(n + 1 < SLOTS);
        adversary.tx.put(&[200, more, 0, 0, 0, 0, 0, 0])?;
    }
    adversary.tx.publish(0)?;
    adversary.notify()
}

/// Posts packets, then revokes and issues again the grants of their pages while they are read.
fn flip<P: Platform>(adversary: &mut VifAdversary<P>) -> anyhow::Result<()> {
    adversary.post(&[adversary.slot(0, SMALL)])?;
    for _ in 0..64 {
        let lease = adversary.tx_pages.swap_remove(0);
        let back = match adversary.granter.take_back(lease) {
            // The free list is last-in, first-out: the same reference is granted again.
            Ok(()) => adversary.granter.lend(Access::ReadOnly)?,
            Err(still) => still.lease,
        };
        adversary.tx_pages.push(back);
        let last = adversary.tx_pages.len() - 1;
        adversary.tx_pages.swap(0, last);
        std::hint::spin_loop();
    }
    adversary.address(0, SINK_MAC, adversary.mac())
}

fn made_up_addresses<P: Platform>(
    adversary: &mut VifAdversary<P>,
    state: &mut AttackState,
) -> anyhow::Result<()> {
    let pages = adversary.tx_pages.len();
    for page in 0..pages.min(adversary.tx.free()? as usize) {
        let [d0, d1, d2, d3, d4, d5, ..] = state.random().to_le_bytes();
        let [s0, s1, s2, s3, s4, s5, ..] = state.random().to_le_bytes();
        // Half of the packets carry the guest's own source address, which the address filter accepts.
        let source = if page % 2 == 0 { adversary.mac() } else { [s0 & 0xfe, s1, s2, s3, s4, s5] };
        adversary.address(page, [d0 & 0xfe, d1, d2, d3, d4, d5], source)?;
        let slot = adversary.slot(page, SMALL).to_bytes();
        adversary.tx.put(&slot)?;
    }
    adversary.tx.publish(0)?;
    adversary.notify()
}

/// Posts the receive buffers once and never consumes a response.
fn deaf<P: Platform>(
    adversary: &mut VifAdversary<P>,
    state: &mut AttackState,
) -> anyhow::Result<()> {
    if !core::mem::replace(&mut state.posted, true) {
        adversary.post_buffers()?;
    }
    adversary.notify()
}

/// Announces its address and alternates: it accepts packets for a while, so that senders wait for it,
/// then accepts none for longer than the backpressure budget.
fn hoard<P: Platform>(
    adversary: &mut VifAdversary<P>,
    state: &mut AttackState,
) -> anyhow::Result<()> {
    const CYCLE: u128 = 50;
    const TAKES: u128 = 10;
    if state.round % 1024 == 1 && adversary.tx.free()? > 0 {
        adversary.address(0, [0xff; 6], adversary.mac())?;
        let slot = adversary.slot(0, SMALL).to_bytes();
        adversary.tx.put(&slot)?;
        adversary.tx.publish(0)?;
        adversary.notify()?;
    }
    if state.began.elapsed().as_millis() % CYCLE < TAKES {
        adversary.take_packets()?;
    }
    Ok(())
}

/// Writes its state many times; sends all requests of a burst before it reads a response.
fn state_flood<P: Platform>(
    adversary: &mut VifAdversary<P>,
    state: &mut AttackState,
) -> anyhow::Result<()> {
    let path = format!("{}/{STATE}", adversary.handshake.device.frontend_path());
    let path = Path::parse(path.as_bytes())?;
    let stream = match &mut state.store {
        Some(stream) => stream,
        none => none.insert(File::from(adversary.store_stream()?)),
    };
    let mut requests = Vec::new();
    for _ in 0..UNDER_WAY {
        let value: &[u8] = match next_random(&mut state.random) % 8 {
            0 => b"1",
            1 => b"3",
            2 => b"4",
            3 => b"5",
            4 => b"6",
            5 => b"-1",
            6 => b"99999999999999999999",
            _ => b"connected, I promise",
        };
        StoreRequest::Write { path, value }.emit(1, 0, &mut requests)?;
        if adversary.one_message_a_write {
            stream.write_all(&requests)?;
            requests.clear();
        }
    }
    stream.write_all(&requests)?;
    // A success is a header and three bytes ("OK", NUL), an error is longer. The server stops reading
    // unless at least this much is consumed.
    let mut answers = [0; UNDER_WAY * (HEADER_LEN + 3)];
    Ok(stream.read_exact(&mut answers)?)
}

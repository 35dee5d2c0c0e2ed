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
use ringfence_wire::xenbus::{STATE, XenbusState};
use ringfence_wire::xenstore::{HEADER_LEN, Path, Request};

use super::args::Behaviour;
use super::control::{self, WrongAnswer};
use super::orders::{Answer, Entrance, SINK_MAC};
use super::rogue::{Rogue, UNGRANTED};
use ringfence_sandbox::channel::Channel;

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

/// Attacks until the parent ends this process.
pub(super) fn serve(
    channel: &Channel,
    entrance: &Entrance,
    behaviour: Behaviour,
) -> anyhow::Result<()> {
    let mut said = false;
    loop {
        let mut rogue = Rogue::join(entrance)?;
        let ended = live(&mut rogue, behaviour, &mut || {
            if !core::mem::replace(&mut said, true) {
                channel.send(&Answer::Ready, &[])?;
            }
            Ok(())
        });
        // The driver domain ends connections in reaction, so reconnect. Only a wrong response is a failure.
        if let Err(why) = ended
            && why.is::<WrongAnswer>()
        {
            return Err(why);
        }
        std::thread::yield_now();
    }
}

/// Attacks from the first handshake to the end of the connection to the hub or the store.
fn live<P: Platform>(
    rogue: &mut Rogue<P>,
    behaviour: Behaviour,
    began: &mut dyn FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut state = State::new();
    loop {
        // The driver domain may refuse the device for a while only.
        if rogue.connect().is_err() {
            std::thread::yield_now();
            rogue.enter(XenbusState::Closed)?;
            continue;
        }
        rogue.address_all()?;
        loop {
            burst(rogue, behaviour, &mut state)?;
            began()?;
            std::thread::yield_now();
            let stays = match behaviour {
                Behaviour::Reattach => false,
                // The guest itself writes the states, so a closed device is no reaction.
                Behaviour::StateFlood => true,
                _ => !rogue.was_closed()?,
            };
            if !stays {
                break;
            }
        }
    }
}

/// State of an attack between bursts.
pub(super) struct State {
    random: u64,
    turn: usize,
    store: Option<File>,
    posted: bool,
    began: Instant,
}

impl State {
    pub(super) fn new() -> State {
        State {
            random: 0x2545_F491_4F6C_DD1D,
            turn: 0,
            store: None,
            posted: false,
            began: Instant::now(),
        }
    }

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
pub(super) fn burst<P: Platform>(
    rogue: &mut Rogue<P>,
    behaviour: Behaviour,
    state: &mut State,
) -> anyhow::Result<()> {
    state.turn = state.turn.wrapping_add(1);
    match behaviour {
        // These rows have no hostile guest.
        Behaviour::Absent | Behaviour::Honest => Ok(()),
        Behaviour::BadSizes => bad_sizes(rogue, state.turn),
        Behaviour::Slots19 => rogue.post(&chain(rogue, 19, SMALL, 1)).map(drop),
        Behaviour::BadGrefs => {
            rogue.post(&[TxRequest { gref: UNGRANTED, ..rogue.slot(0, SMALL) }]).map(drop)
        }
        Behaviour::ExtraChains => extra_chain(rogue),
        Behaviour::ZeroFragments => rogue.post(&chain(rogue, 18, SMALL, 0)).map(drop),
        // 15 pages and 4095 bytes.
        Behaviour::LargePackets => rogue.post(&chain(rogue, 16, u16::MAX, 4096)).map(drop),
        Behaviour::Flipping => flip(rogue),
        Behaviour::Broadcast => {
            rogue.address(0, [0xff; 6], rogue.mac())?;
            rogue.post(&[rogue.slot(0, SMALL)]).map(drop)
        }
        Behaviour::MadeUpAddresses => made_up_addresses(rogue, state),
        Behaviour::EventStorm => (0..EVENTS).try_for_each(|_| rogue.notify()),
        Behaviour::Deaf => deaf(rogue, state),
        Behaviour::Hoarder => hoard(rogue, state),
        Behaviour::ProducerOverflow => {
            rogue.tx.publish(1 << 20)?;
            rogue.notify()
        }
        Behaviour::Reattach => Ok(()),
        Behaviour::ChangingLists => control::changing_lists(rogue),
        Behaviour::LongLists => control::long_lists(rogue),
        Behaviour::StagingStorm => control::storm(rogue),
        Behaviour::StagingInFlight => control::in_flight(rogue),
        Behaviour::StagingTwice => control::twice(rogue),
        Behaviour::ControlDeaf => control::deaf(rogue, state.turn),
        Behaviour::StateFlood => state_flood(rogue, state),
        Behaviour::HubFlood => (0..UNDER_WAY)
            .try_for_each(|_| rogue.send_to_hub(&UNKNOWN_REQUEST))
            .context("the hub hung up"),
        Behaviour::Rejoin => rogue.send_to_hub(b"this is no message").context("the hub hung up"),
    }
}

/// Returns a packet of `slots` slots whose first declares `total` bytes and whose others have `each`
/// bytes.
fn chain<P: Platform>(rogue: &Rogue<P>, slots: usize, total: u16, each: u16) -> Vec<TxRequest> {
    let slot = |n: usize| {
        let flags = if n + 1 < slots { TxFlags::MORE_DATA } else { TxFlags::NONE };
        TxRequest { flags, ..rogue.slot(n, if n == 0 { total } else { each }) }
    };
    (0..slots).map(slot).collect()
}

fn bad_sizes<P: Platform>(rogue: &mut Rogue<P>, turn: usize) -> anyhow::Result<()> {
    let slot = rogue.slot(0, SMALL);
    let packet = match turn % 3 {
        0 => vec![TxRequest { size: 5, ..slot }],
        1 => vec![TxRequest { offset: 4090, ..slot }],
        _ => vec![TxRequest { flags: TxFlags::MORE_DATA, ..slot }, TxRequest { size: 100, ..slot }],
    };
    rogue.post(&packet).map(drop)
}

/// Fills the ring with one packet followed by extra infos of an unknown type.
fn extra_chain<P: Platform>(rogue: &mut Rogue<P>) -> anyhow::Result<()> {
    /// Slots of the ring; the packet takes one of them.
    const SLOTS: u32 = 256;
    if rogue.tx.free()? < SLOTS {
        return Ok(());
    }
    let first = TxRequest { flags: TxFlags::EXTRA_INFO, ..rogue.slot(0, SMALL) };
    rogue.tx.put(&first.to_bytes())?;
    for n in 1..SLOTS {
        let more = u8::from(n + 1 < SLOTS);
        rogue.tx.put(&[200, more, 0, 0, 0, 0, 0, 0])?;
    }
    rogue.tx.publish(0)?;
    rogue.notify()
}

/// Posts packets, then revokes and issues again the grants of their pages while they are read.
fn flip<P: Platform>(rogue: &mut Rogue<P>) -> anyhow::Result<()> {
    rogue.post(&[rogue.slot(0, SMALL)])?;
    for _ in 0..64 {
        let lease = rogue.tx_pages.swap_remove(0);
        let back = match rogue.granter.take_back(lease) {
            // The free list is last-in, first-out: the same reference is granted again.
            Ok(()) => rogue.granter.lend(Access::ReadOnly)?,
            Err(still) => still.lease,
        };
        rogue.tx_pages.push(back);
        let last = rogue.tx_pages.len() - 1;
        rogue.tx_pages.swap(0, last);
        std::hint::spin_loop();
    }
    rogue.address(0, SINK_MAC, rogue.mac())
}

fn made_up_addresses<P: Platform>(rogue: &mut Rogue<P>, state: &mut State) -> anyhow::Result<()> {
    let pages = rogue.tx_pages.len();
    for page in 0..pages.min(rogue.tx.free()? as usize) {
        let [d0, d1, d2, d3, d4, d5, ..] = state.random().to_le_bytes();
        let [s0, s1, s2, s3, s4, s5, ..] = state.random().to_le_bytes();
        // Half of the packets carry the guest's own source address, which the address filter accepts.
        let source = if page % 2 == 0 { rogue.mac() } else { [s0 & 0xfe, s1, s2, s3, s4, s5] };
        rogue.address(page, [d0 & 0xfe, d1, d2, d3, d4, d5], source)?;
        let slot = rogue.slot(page, SMALL).to_bytes();
        rogue.tx.put(&slot)?;
    }
    rogue.tx.publish(0)?;
    rogue.notify()
}

/// Posts the receive buffers once and never consumes a response.
fn deaf<P: Platform>(rogue: &mut Rogue<P>, state: &mut State) -> anyhow::Result<()> {
    if !core::mem::replace(&mut state.posted, true) {
        rogue.post_buffers()?;
    }
    rogue.notify()
}

/// Announces its address and alternates: it accepts packets for a while, so that senders wait for it,
/// then accepts none for longer than the backpressure budget.
fn hoard<P: Platform>(rogue: &mut Rogue<P>, state: &mut State) -> anyhow::Result<()> {
    const CYCLE: u128 = 50;
    const TAKES: u128 = 10;
    if state.turn % 1024 == 1 && rogue.tx.free()? > 0 {
        rogue.address(0, [0xff; 6], rogue.mac())?;
        let slot = rogue.slot(0, SMALL).to_bytes();
        rogue.tx.put(&slot)?;
        rogue.tx.publish(0)?;
        rogue.notify()?;
    }
    if state.began.elapsed().as_millis() % CYCLE < TAKES {
        rogue.take_packets()?;
    }
    Ok(())
}

/// Writes its state many times; sends all requests of a burst before it reads a response.
fn state_flood<P: Platform>(rogue: &mut Rogue<P>, state: &mut State) -> anyhow::Result<()> {
    let path = format!("{}/{STATE}", rogue.device.frontend_path());
    let path = Path::parse(path.as_bytes())?;
    let stream = match &mut state.store {
        Some(stream) => stream,
        none => none.insert(File::from(rogue.store_stream()?)),
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
        Request::Write { path, value }.emit(1, 0, &mut requests)?;
        if rogue.one_message_a_write {
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

//! Fuzz target `pool_proxy`: a hypervisor and a backend that send arbitrary messages with arbitrary files through the
//! filter. A property test runs it, too.

// #syscall none: a hypervisor and a backend of tests

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use ringfence_sys::descriptors::{Descriptors, FileIdentity, identity};
use ringfence_wire::vhost_user::{
    HEADER_LEN, Header, MemoryRegion, PAYLOAD_MAX, PROTOCOL_FEATURES, memory_table, number,
    protocol_feature, request,
};
use rustix::event::{EventfdFlags, eventfd};

use super::end::{Outgoing, ProxyMessage};
use super::notices::Notices;
use super::table::{CONFIG_CHANGE, PASSED};
use super::{Filter, PoolChoice};
use crate::device::LOG_FILE_MAX;
use crate::testing::{memfd, send_with, words};

/// Maximum of steps in one case.
const STEPS_MAX: usize = 200;
/// Bytes of the pool. No log is as long.
const POOL: u64 = LOG_FILE_MAX + 4096;
/// First address of the pool in each address space. Other regions follow.
const BASE: u64 = 1 << 32;

/// Files of a hypervisor.
struct Kit {
    /// The pool of the device, a pool of another one, memory of the machine, an eventfd, a socket, and a small file.
    files: [OwnedFd; 6],
    /// Identities of the files that must not reach the backend.
    secrets: [FileIdentity; 2],
}

impl Kit {
    fn new() -> io::Result<Kit> {
        let marked = |name: &str, bytes: u64| {
            let file = memfd(bytes)?;
            rustix::io::pwrite(&file, format!("ringfence-pool 1 {name}\n").as_bytes(), 0)?;
            io::Result::Ok(file)
        };
        let (socket, _) = UnixStream::pair()?;
        let files = [
            marked("mine", POOL)?,
            marked("other", POOL + 4096)?,
            memfd(POOL + 8192)?,
            eventfd(0, EventfdFlags::CLOEXEC)?,
            socket.into(),
            memfd(4096)?,
        ];
        let secrets = [identity(&files[1])?, identity(&files[2])?];
        Ok(Kit { files, secrets })
    }

    /// Returns duplicates of the files that `choices` names, three bits each, `count` in all.
    fn chosen(&self, choices: u32, count: usize) -> Descriptors {
        let number = |at: usize| (choices >> (3 * at) & 7) as usize;
        let file = |at: usize| self.files.get(number(at))?.try_clone().ok();
        (0..count).filter_map(file).collect::<Vec<_>>().into()
    }

    /// Returns regions of the files that `choices` names.
    fn regions(choices: u32, count: usize, bend: u8) -> Vec<MemoryRegion> {
        let region = |at: usize| {
            let start = BASE << at;
            let len = match choices >> (3 * at) & 7 {
                0 => POOL,
                1 => POOL + 4096,
                2 => POOL + 8192,
                _ => 4096,
            };
            let offset = if bend == 0xff { 4096 } else { 0 };
            MemoryRegion { guest: start, len, user: start, offset }
        };
        (0..count).map(region).collect()
    }

    /// Checks a message to the backend.
    fn check(&self, message: Option<&Outgoing>) {
        let Some(message) = message else { return };
        assert!(message.bytes().len() <= 2 * HEADER_LEN + PAYLOAD_MAX);
        for file in message.files().each() {
            let found = identity(file);
            assert!(found.is_ok_and(|found| !self.secrets.contains(&found)), "memory leaks");
        }
    }
}

/// Creates a message with its header.
fn message(request: u32, needs_reply: bool, payload: Vec<u8>, files: Descriptors) -> ProxyMessage {
    let header = Header { request, needs_reply, len: payload.len() };
    ProxyMessage { header, payload, files }
}

/// Sends a hypervisor's messages and a backend's answers through a filter. No memory but the pool reaches the backend.
///
/// # Panics
///
/// Panics if a rule of the filter is broken.
pub fn pool_proxy(data: &[u8]) {
    let Some((settings, steps)) = data.split_first() else { return };
    let choice = match settings & 3 {
        0 => PoolChoice::Size(POOL),
        // Both pools have the mark, so tables with both are refused.
        1 => PoolChoice::Marked,
        _ => PoolChoice::Named("mine".to_owned()),
    };
    let is_marked = choice == PoolChoice::Marked;
    let (Ok(mut kit), Ok((spare, _own))) = (Kit::new(), UnixStream::pair()) else { return };
    if is_marked {
        // A pool alone is this device's, whatever its name.
        kit.secrets[0] = kit.secrets[1];
    }
    let Ok(mut filter) = Filter::new(choice, spare.into()) else { return };
    if settings & 4 != 0 {
        negotiate(&mut filter);
    }
    for step in steps.chunks_exact(8).take(STEPS_MAX) {
        let [what, number, choices @ .., bend] = step else { return };
        let choices = choices.iter().fold(0, |all, byte| all << 8 | u32::from(*byte));
        if act(&kit, &mut filter, *what, u32::from(*number), choices, *bend).is_none() {
            return;
        }
    }
}

/// Negotiates all features, as a hypervisor and a backend do that follow the rules.
fn negotiate(filter: &mut Filter) {
    for (number, answer) in [
        (number::GET_FEATURES, PROTOCOL_FEATURES | 0xff),
        (number::GET_PROTOCOL_FEATURES, u64::MAX),
    ] {
        let asked = filter.take_request(message(number, false, vec![], Descriptors::default()));
        assert!(asked.is_ok());
        let answer = message(number, false, words(&[answer]), Descriptors::default());
        assert!(filter.take_answer(answer).is_ok());
    }
    let chosen = words(&[PASSED]);
    let chosen = message(number::SET_PROTOCOL_FEATURES, false, chosen, Descriptors::default());
    assert!(filter.take_request(chosen).is_ok());
}

/// Carries out a step. Returns `None` after a broken rule.
fn act(
    kit: &Kit,
    filter: &mut Filter,
    what: u8,
    number: u32,
    choices: u32,
    bend: u8,
) -> Option<()> {
    let count = usize::from(what >> 5);
    let needs_reply = what & 4 != 0;
    // Mostly numbers that exist.
    let number = if number < 0xf0 { number % 46 } else { number };
    match what & 3 {
        0 | 1 if filter.awaits_answer() => {}
        0 | 1 => {
            let payload = request_payload(number, choices, count, bend);
            let files = kit.chosen(choices, count);
            let request = message(number, needs_reply, payload, files);
            let actions = filter.take_request(request).ok()?;
            kit.check(actions.to_backend.as_ref());
            // An answer of the filter's own is an acknowledgement.
            let own = actions.to_frontend;
            assert!(own.is_none_or(|own| !filter.awaits_answer() && own.files().is_empty()));
        }
        2 => {
            let was_awaited = filter.awaits_answer();
            let len = [8, 8, 20, 24, 13, 0, 12, 40][usize::from(bend & 7)];
            let files = kit.chosen(choices, count.min(2));
            let answer = filter.take_answer(message(number, false, vec![bend; len], files));
            assert!(was_awaited || answer.is_err());
            let answer = answer.ok()?;
            assert!(answer.bytes().len() <= HEADER_LEN + PAYLOAD_MAX);
        }
        _ => {
            let (own, backend) = UnixStream::pair().ok()?;
            let (payload, files) = (vec![0; usize::from(bend >> 6)], kit.chosen(choices, count));
            let files: Vec<_> = files.each().collect();
            send_with(&backend, &request(number, needs_reply, &payload), &files).ok()?;
            let chosen = if choices & 1 == 0 { 0 } else { protocol_feature::CONFIG };
            let mut notices = Notices::new(own.into(), chosen);
            let is_change = (number, payload.len(), chosen != 0) == (CONFIG_CHANGE, 0, true);
            assert_eq!(notices.serve(Instant::now()).is_ok(), is_change);
            assert_eq!(notices.is_due(), is_change);
        }
    }
    Some(())
}

/// Returns a payload that often fits the request.
fn request_payload(number: u32, choices: u32, count: usize, bend: u8) -> Vec<u8> {
    let low = u64::from(choices & 1);
    let mut payload = match number {
        number::SET_MEM_TABLE => memory_table(&Kit::regions(choices, count, bend)),
        number::ADD_MEM_REG | number::REM_MEM_REG => memory_table(&Kit::regions(choices, 1, bend)),
        number::SET_VRING_ADDR => {
            let tables = [BASE, BASE + 4096, BASE + POOL - low, 0];
            [words(&[low]), words(&tables)].concat()
        }
        number::SET_PROTOCOL_FEATURES => words(&[PASSED << (bend & 1)]),
        number::SET_FEATURES => words(&[PROTOCOL_FEATURES | u64::from(bend & 1) << 33]),
        number::SET_INFLIGHT_FD | number::GET_INFLIGHT_FD => vec![0; 20],
        number::GET_CONFIG | 25 => {
            [[0_u32, 4, 0].map(u32::to_ne_bytes).concat(), vec![0; 4]].concat()
        }
        8 | 10..=14 | 18..=20 | 23 | 39 => words(&[low]),
        _ => vec![],
    };
    if bend == 0xfe {
        payload.push(bend);
    }
    payload
}

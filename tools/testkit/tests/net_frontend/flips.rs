//! Double fetches: a second thread changes memory while the backend reads it. Each outcome must be
//! consistent with one single state of the memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringfence_access::Mode;
use ringfence_memory::LentSlice;
use ringfence_platform::{DomId, Gref};
use ringfence_testkit::net::frontend::TX_PAGES;
use ringfence_testkit::net::{HostileFrontend, Neighbour, Stage};
use ringfence_wire::grant::{RawGrantEntry, flags};
use ringfence_wire::netif::{Status, TxFlags, TxRequest};

/// Number of packets in each round.
const PACKETS: usize = 32;

/// Sizes in bytes of a valid packet and of one that crosses its page. They differ in one byte: the backend
/// fetches each byte of a slot once, but not all at the same instant.
const SHORT: u16 = 0x0064;
const LONG: u16 = 0x1064;

/// Thread that repeats an action until it is stopped.
struct Repeater {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<u64>>,
}

impl Repeater {
    fn run(mut act: impl FnMut(u64) + Send + 'static) -> Repeater {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut n = 0;
            while !seen.load(Ordering::Relaxed) {
                act(n);
                n += 1;
            }
            n
        });
        Repeater { stop, thread: Some(thread) }
    }

    /// Stops the thread. Returns the number of repetitions.
    fn end(mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

/// Runs rounds for at least 200 ms and until `round` reports that every outcome occurred. A minute is
/// enough on any machine that runs two threads.
fn run_until_seen(mut round: impl FnMut() -> bool) {
    let begun = Instant::now();
    let mut seen = false;
    while begun.elapsed() < Duration::from_millis(200) || !seen {
        assert!(begun.elapsed() < Duration::from_secs(60), "the threads do not race");
        seen = round();
    }
}

struct Scene {
    stage: Stage,
    neighbour: Neighbour,
    guest: HostileFrontend,
}

impl Scene {
    fn new(mode: Mode) -> Scene {
        let mut stage = Stage::new(mode);
        let neighbour = Neighbour::join(&mut stage);
        let guest = HostileFrontend::connected(&mut stage);
        for (page, byte) in [(1, 0xAA), (2, 0xBB)] {
            guest.write_page(page, 0, &[byte; 4096]);
        }
        Scene { stage, neighbour, guest }
    }

    fn slot(page: u32, flags: TxFlags, size: u16) -> TxRequest {
        TxRequest { gref: Gref(TX_PAGES + page), offset: 0, flags, id: 1, size }
    }

    /// Posts slots and serves all guests. Returns the frames that arrived.
    fn post(&mut self, slots: &[TxRequest]) -> Vec<Vec<u8>> {
        self.guest.post(slots);
        self.neighbour.exchange(&mut self.stage);
        self.stage.arrived(self.guest.vif).into_iter().map(|a| a.bytes).collect()
    }

    fn rule(&self, rule: &str) -> u64 {
        self.stage.rules(self.guest.vif).get(rule)
    }
}

fn flip_u16(page: &LentSlice, at: usize, value: u16) {
    page.copy_from(at, &value.to_le_bytes()).unwrap();
}

/// Returns the positions in the TX ring page of a field at `offset` in every `step`-th slot.
fn places(guest: &HostileFrontend, offset: usize, step: usize) -> Vec<usize> {
    (0..256).step_by(step).map(|slot| guest.tx.place(slot) + offset).collect()
}

#[test]
fn xsa_155_size_changed_during_read_is_old_or_new_value() {
    for mode in Mode::NETWORK {
        let mut scene = Scene::new(mode);
        let (page, places) = (scene.guest.tx.page.clone(), places(&scene.guest, 10, 1));
        let flipper = Repeater::run(move |n| {
            let size = if n % 2 == 0 { LONG } else { SHORT };
            places.iter().for_each(|at| flip_u16(&page, *at, size));
        });
        let (mut whole, mut refused) = (0, 0);
        run_until_seen(|| {
            let frames = scene.post(&[Scene::slot(1, TxFlags::NONE, SHORT); PACKETS]);
            assert!(frames.iter().all(|f| *f == [0xAA; SHORT as usize]), "{mode}");
            let statuses = scene.guest.statuses();
            let okay = statuses.iter().filter(|s| **s == Status::Okay).count();
            let error = statuses.iter().filter(|s| **s == Status::Error).count();
            assert_eq!((okay, okay + error), (frames.len(), PACKETS), "{mode}");
            whole += okay;
            refused += error;
            whole > 0 && refused > 0
        });
        flipper.end();
        assert_eq!(scene.rule("tx_crosses_page"), refused as u64, "{mode}");
    }
}

#[test]
fn xsa_155_flag_changed_during_read_yields_one_chain_or_two_packets() {
    for mode in Mode::NETWORK {
        let mut scene = Scene::new(mode);
        let (page, places) = (scene.guest.tx.page.clone(), places(&scene.guest, 6, 2));
        let flipper = Repeater::run(move |n| {
            let flag = if n % 2 == 0 { TxFlags::MORE_DATA.0 } else { 0 };
            places.iter().for_each(|at| flip_u16(&page, *at, flag));
        });
        let joined = [[0xAA; 100], [0xBB; 100]].concat();
        let (mut chains, mut singles) = (0, 0);
        run_until_seen(|| {
            let pair = [Scene::slot(1, TxFlags::NONE, 200), Scene::slot(2, TxFlags::NONE, 100)];
            let frames = scene.post(&pair.repeat(PACKETS / 2));
            let count = |wanted: &[u8]| frames.iter().filter(|f| *f == wanted).count();
            let (both, first, second) = (count(&joined), count(&[0xAA; 200]), count(&[0xBB; 100]));
            assert_eq!(first, second, "{mode}: a packet was cut off");
            assert_eq!((both + first, 2 * first + both), (PACKETS / 2, frames.len()), "{mode}");
            assert_eq!(scene.guest.statuses(), [Status::Okay; PACKETS], "{mode}");
            chains += both;
            singles += first;
            chains > 0 && singles > 0
        });
        flipper.end();
        assert!(scene.stage.rules(scene.guest.vif).all().is_empty(), "{mode}");
    }
}

#[test]
fn xsa_478_gref_changed_during_read_names_one_page() {
    for mode in Mode::NETWORK {
        let mut scene = Scene::new(mode);
        let (page, places) = (scene.guest.tx.page.clone(), places(&scene.guest, 0, 1));
        let flipper = Repeater::run(move |n| {
            // The two references differ in their lowest byte.
            let gref = u8::from(n % 2 == 0) + 1;
            places.iter().for_each(|at| page.copy_from(*at, &[gref]).unwrap());
        });
        let (mut first, mut second) = (0, 0);
        run_until_seen(|| {
            let frames = scene.post(&[Scene::slot(1, TxFlags::NONE, 1000); PACKETS]);
            let count = |byte: u8| frames.iter().filter(|f| **f == [byte; 1000]).count();
            let (a, b) = (count(0xAA), count(0xBB));
            assert_eq!(a + b, PACKETS, "{mode}: a frame of neither page, or of both");
            (first, second) = (first + a, second + b);
            first > 0 && second > 0
        });
        flipper.end();
    }
}

#[test]
fn grant_entry_changed_during_use_names_one_page_or_is_refused() {
    for mode in Mode::NETWORK {
        let mut scene = Scene::new(mode);
        // The second thread has its own view of the table.
        let table = scene.guest.arena.table();
        let permit = flags::PERMIT_ACCESS | flags::READ_ONLY;
        let words = [
            RawGrantEntry::from_fields(permit, 0, 1),
            RawGrantEntry::from_fields(permit, 0, 2),
            RawGrantEntry::from_fields(permit, 77, 1),
            RawGrantEntry::from_fields(permit, 0, 64),
            RawGrantEntry::INVALID,
        ];
        let flipper = Repeater::run(move |n| {
            let word = words[usize::try_from(n % 5).unwrap()];
            let at = (TX_PAGES as usize + 1) * 8;
            table.store_u64(at, word.0.to_le(), Ordering::SeqCst).unwrap();
        });
        let mut refused = 0;
        let (mut first, mut second) = (0, 0);
        run_until_seen(|| {
            let frames = scene.post(&[Scene::slot(1, TxFlags::NONE, 1000); PACKETS]);
            let count = |byte: u8| frames.iter().filter(|f| **f == [byte; 1000]).count();
            let (a, b) = (count(0xAA), count(0xBB));
            assert_eq!(a + b, frames.len(), "{mode}: a frame of neither page, or of both");
            let statuses = scene.guest.statuses();
            let okay = statuses.iter().filter(|s| **s == Status::Okay).count();
            assert_eq!((statuses.len(), okay), (PACKETS, frames.len()), "{mode}");
            (first, second, refused) = (first + a, second + b, refused + PACKETS - okay);
            first > 0 && second > 0 && refused > 0
        });
        flipper.end();
        let rules =
            ["tx_gref_not_granted", "tx_grant_denied", "tx_page_beyond_arena", "tx_grant_revoked"];
        let counted: u64 = rules.iter().map(|rule| scene.rule(rule)).sum();
        assert_eq!(counted, refused as u64, "{mode}: each under a name of its own");
        assert_eq!(scene.guest.arena.status(TX_PAGES + 1), 0, "{mode}: every use ended");
    }
}

#[test]
fn page_punched_during_read_reads_zeros_without_signal() {
    for mode in Mode::NETWORK {
        let mut scene = Scene::new(mode);
        let arena = scene.guest.arena.duplicate().unwrap();
        let puncher = Repeater::run(move |_| {
            arena.punch(true, 1, 1).unwrap();
            arena.read_only(1).unwrap().copy_from(0, &[0xAA; 4096]).unwrap();
        });
        let mut zeros = false;
        run_until_seen(|| {
            let frames = scene.post(&[Scene::slot(1, TxFlags::NONE, 4096); PACKETS]);
            assert_eq!(frames.len(), PACKETS, "{mode}");
            let known = |byte: &u8| *byte == 0xAA || *byte == 0;
            assert!(frames.iter().all(|f| f.len() == 4096 && f.iter().all(known)), "{mode}");
            assert_eq!(scene.guest.statuses(), [Status::Okay; PACKETS], "{mode}");
            zeros |= frames.iter().any(|f| f.contains(&0));
            zeros
        });
        puncher.end();
    }
}

#[test]
fn ring_punched_during_use_closes_that_device_only() {
    for mode in Mode::NETWORK {
        let mut scene = Scene::new(mode);
        let vif = scene.guest.vif;
        let mut lost = 0;
        run_until_seen(|| {
            scene.post(&[Scene::slot(1, TxFlags::NONE, 60); 3]);
            let arena = scene.guest.arena.duplicate().unwrap();
            let puncher = Repeater::run(move |_| arena.punch(false, 0, 2).unwrap());
            for _ in 0..20 {
                scene.stage.round();
                scene.stage.send(vif, &[vec![1; 60]]);
                scene.neighbour.exchange(&mut scene.stage);
            }
            puncher.end();
            lost += u32::from(scene.stage.vifs[vif].host.port.is_none());
            scene.guest.grant_all();
            scene.guest.connect(&mut scene.stage, |_| {});
            lost > 0
        });
        assert_eq!(scene.rule("device_condemned"), u64::from(lost), "{mode}");
        let frames = scene.post(&[Scene::slot(2, TxFlags::NONE, 60)]);
        assert!(frames == [[0xBB; 60]], "{mode}: the device works again");
        assert_eq!(scene.guest.arena.status(8), 1, "{mode}");
        assert_eq!(scene.guest.arena.entry(8).domain(), DomId(0));
    }
}

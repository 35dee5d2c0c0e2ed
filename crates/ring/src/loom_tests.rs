//! Loom models of the index protocol: no entry is read before it is written, and no end sleeps while there is
//! work.

use loom::sync::Arc;
use loom::sync::atomic::AtomicBool;
use loom::thread;

use crate::sync::{AtomicU32, Ordering};
use crate::{BackRing, FrontRing, HEADER_BYTES, NETIF_TX, RingMemory, Word};

/// Modelled ring: the four words, and the first word of each of two slots.
#[derive(Clone)]
struct ModelMemory(Arc<[AtomicU32; 6]>);

impl ModelMemory {
    fn new() -> ModelMemory {
        ModelMemory(Arc::new(core::array::from_fn(|_| AtomicU32::new(0))))
    }

    fn slot(offset: usize) -> usize {
        4 + (offset - HEADER_BYTES) / NETIF_TX.entry_bytes()
    }
}

impl RingMemory for ModelMemory {
    fn load(&self, word: Word, order: Ordering) -> u32 {
        self.0[word as usize / 4].load(order)
    }
    fn store(&self, word: Word, value: u32, order: Ordering) {
        self.0[word as usize / 4].store(value, order);
    }
    fn fetch(&self, offset: usize, into: &mut [u8]) {
        let value = self.0[Self::slot(offset)].load(Ordering::Relaxed);
        into[..4].copy_from_slice(&value.to_le_bytes());
    }
    fn put(&self, offset: usize, bytes: &[u8]) {
        let value = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        self.0[Self::slot(offset)].store(value, Ordering::Relaxed);
    }
}

/// Checks that requests are not lost to a sleeping backend. The backend sleeps after its final check. The
/// frontend publishes two requests one by one and notifies if required. In the end the backend has seen both
/// or has a pending notification.
#[test]
fn loom_request_before_sleep_is_seen_or_notified() {
    loom::model(|| {
        let memory = ModelMemory::new();
        let mut front = FrontRing::init(memory.clone(), NETIF_TX);
        let mut back = BackRing::attach(memory, NETIF_TX);
        let pending = Arc::new(AtomicBool::new(false));
        let raised = Arc::clone(&pending);
        let producer = thread::spawn(move || {
            for value in [1u8, 2] {
                assert!(front.request(&[value; 12]));
                if front.publish() {
                    raised.store(true, Ordering::SeqCst);
                }
            }
        });
        let mut seen = 0u8;
        loop {
            let n = back.unconsumed().expect("an honest frontend");
            for _ in 0..n {
                seen += 1;
                assert_eq!(back.request::<4>(0).into_unchecked(), [seen; 4]);
                back.consume(1);
            }
            if !back.final_check().expect("an honest frontend") {
                break;
            }
        }
        producer.join().expect("the producer ends");
        let left = back.unconsumed().expect("an honest frontend");
        assert_eq!(u32::from(seen) + left, 2);
        assert!(left == 0 || pending.load(Ordering::SeqCst), "work is left and nobody was told");
    });
}

/// Checks that responses are not lost to a sleeping frontend.
#[test]
fn loom_response_before_sleep_is_seen_or_notified() {
    loom::model(|| {
        let memory = ModelMemory::new();
        let mut front = FrontRing::init(memory.clone(), NETIF_TX);
        front.request(&[1; 12]);
        front.request(&[2; 12]);
        front.publish();
        let mut back = BackRing::attach(memory, NETIF_TX);
        let pending = Arc::new(AtomicBool::new(false));
        let raised = Arc::clone(&pending);
        let producer = thread::spawn(move || {
            back.consume(back.unconsumed().expect("an honest frontend"));
            for value in [5u8, 6] {
                assert!(back.respond(&[value; 4]));
                if back.publish() {
                    raised.store(true, Ordering::SeqCst);
                }
            }
        });
        let mut seen = 0u8;
        loop {
            for _ in 0..front.unconsumed().expect("an honest backend") {
                assert_eq!(front.response::<4>(0).into_unchecked(), [5 + seen; 4]);
                seen += 1;
                front.consume(1);
            }
            if !front.final_check().expect("an honest backend") {
                break;
            }
        }
        producer.join().expect("the producer ends");
        let left = front.unconsumed().expect("an honest backend");
        assert_eq!(u32::from(seen) + left, 2);
        assert!(left == 0 || pending.load(Ordering::SeqCst), "work is left and nobody was told");
    });
}

//! Loom models of the index protocol: no buffer is read before it is written, and no end sleeps while there is
//! work.

use ringfence_memory::{DeviceAccess, LentSlice};
use ringfence_wire::virtio::SplitLayout;

use loom::sync::Arc;
use loom::sync::atomic::AtomicBool;
use loom::thread;

use super::device::DeviceQueue;
use super::{DriverQueue, QueueFeatures, QueueMemory, Used};
use crate::sync::{AtomicU16, Ordering};

/// Modelled queue of two entries: indices, flags and events, and the first two bytes of each descriptor,
/// available entry and used element.
#[derive(Clone)]
struct ModelMemory(Arc<[AtomicU16; 12]>);

fn layout() -> SplitLayout {
    SplitLayout::new(2).expect("a power of two")
}

impl ModelMemory {
    fn new() -> ModelMemory {
        ModelMemory(Arc::new(core::array::from_fn(|_| AtomicU16::new(0))))
    }

    fn word(&self, offset: usize) -> &AtomicU16 {
        let layout = layout();
        let words = [
            layout.descriptor(0),
            layout.descriptor(1),
            layout.avail_flags(),
            layout.avail_idx(),
            layout.avail_entry(0),
            layout.avail_entry(1),
            layout.used_event(),
            layout.used_flags(),
            layout.used_idx(),
            layout.used_entry(0),
            layout.used_entry(1),
            layout.avail_event(),
        ];
        let at = words.iter().position(|word| *word == offset).expect("a word of the queue");
        &self.0[at]
    }
}

impl QueueMemory for ModelMemory {
    fn load(&self, offset: usize, order: Ordering) -> u16 {
        self.word(offset).load(order)
    }
    fn store(&self, offset: usize, value: u16, order: Ordering) {
        self.word(offset).store(value, order);
    }
    fn fetch<const N: usize>(&self, offset: usize) -> [u8; N] {
        let mut bytes = [0; N];
        let value = self.word(offset).load(Ordering::Relaxed);
        bytes[..2].copy_from_slice(&value.to_le_bytes());
        bytes
    }
    fn put(&self, offset: usize, bytes: &[u8]) {
        self.word(offset).store(u16::from_le_bytes([bytes[0], bytes[1]]), Ordering::Relaxed);
    }
    fn indirect_address(&self, _: usize) -> u64 {
        0
    }
}

fn queues(event_idx: bool) -> (DriverQueue<ModelMemory>, DeviceQueue<ModelMemory>) {
    let memory = ModelMemory::new();
    let features = QueueFeatures { event_idx, ..QueueFeatures::default() };
    let driver = DriverQueue::new(memory.clone(), layout(), features);
    (driver, DeviceQueue::new(memory, layout(), features))
}

/// Checks that buffers are not lost to a sleeping device. The device sleeps after its last check. The driver
/// makes two buffers available one by one and kicks if required. In the end the device has taken both or has a
/// pending kick.
fn check_kicks(event_idx: bool) {
    loom::model(move || {
        let (mut driver, mut device) = queues(event_idx);
        let lent = LentSlice::anonymous(64);
        let addresses =
            [16, 32].map(|at| lent.device_range(at, 1, DeviceAccess::Read).expect("inside"));
        let kicked = Arc::new(AtomicBool::new(false));
        let kick = Arc::clone(&kicked);
        let producer = thread::spawn(move || {
            for range in addresses {
                driver.push(&[range], 0).expect("two entries");
                if driver.publish() {
                    kick.store(true, Ordering::SeqCst);
                }
            }
        });
        let mut taken = 0;
        loop {
            while let Some(request) = device.take() {
                let low = addresses[taken].address() & 0xffff;
                assert_eq!(request.chain[0].address & 0xffff, low, "before it was written");
                taken += 1;
            }
            if !device.arm() {
                break;
            }
        }
        producer.join().expect("the producer ends");
        let left = usize::from(device.available());
        assert_eq!(taken + left, 2);
        assert!(left == 0 || kicked.load(Ordering::SeqCst), "work is left and nobody was told");
    });
}

#[test]
fn loom_buffer_before_sleep_is_taken_or_kicked_by_index() {
    check_kicks(true);
}

#[test]
fn loom_buffer_before_sleep_is_taken_or_kicked_by_flag() {
    check_kicks(false);
}

/// Checks that used buffers are not lost to a sleeping driver.
fn check_interrupts(event_idx: bool) {
    loom::model(move || {
        let (mut driver, mut device) = queues(event_idx);
        let lent = LentSlice::anonymous(64);
        for token in [7, 8] {
            let range = lent.device_range(0, 1, DeviceAccess::Read).expect("inside");
            driver.push(&[range], token).expect("two entries");
        }
        let _ = driver.publish();
        let raised = Arc::new(AtomicBool::new(false));
        let raise = Arc::clone(&raised);
        let worker = thread::spawn(move || {
            while let Some(request) = device.take() {
                device.finish(request.head, 0);
                if device.publish() {
                    raise.store(true, Ordering::SeqCst);
                }
            }
        });
        let mut popped = 0;
        loop {
            while let Some(used) = driver.pop().expect("an honest device") {
                assert_eq!(used, Used { token: 7 + popped, len: 0 });
                popped += 1;
            }
            if !driver.arm(1).expect("an honest device") {
                break;
            }
            driver.suppress();
        }
        worker.join().expect("the worker ends");
        let left = u32::from(driver.in_flight());
        assert_eq!(popped + left, 2);
        assert!(left == 0 || raised.load(Ordering::SeqCst), "work is left and nobody was told");
    });
}

#[test]
fn loom_used_buffer_before_sleep_is_popped_or_interrupted_by_index() {
    check_interrupts(true);
}

#[test]
fn loom_used_buffer_before_sleep_is_popped_or_interrupted_by_flag() {
    check_interrupts(false);
}

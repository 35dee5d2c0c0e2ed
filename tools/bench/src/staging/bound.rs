//! Upper bound of the rate of long packets: one copy in and one copy out, from core to core.
//!
//! One thread fills buffers from private memory and hands them over; another one copies them out
//! and returns them. All buffers together are as large as the pages of a full ring. There are no
//! grants, look-ups or ring slots, and no verification. A path that copies on both sides cannot be
//! faster than this on the same two cores.

use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::affinity::bind;
use anyhow::{Context, anyhow};

/// Bytes of the pages of a full ring.
const RING: usize = 256 * 4096;
/// Measured time, after a warm-up.
const LENGTH: Duration = Duration::from_millis(300);
const WARM_UP: Duration = Duration::from_millis(50);

/// Returns the rate in Gbit/s of packets of `size` bytes.
pub(super) fn hand_over(size: u32, cores: [usize; 2]) -> anyhow::Result<f64> {
    let size = size as usize;
    let buffers = (RING / size.next_multiple_of(4096)).max(2);
    let (full, filled) = sync_channel::<Vec<u8>>(buffers);
    let (empty, emptied) = sync_channel::<Vec<u8>>(buffers);
    for _ in 0..buffers {
        empty.send(vec![0; size]).context("a new channel has room")?;
    }
    let producer = on_core(cores[1], move || {
        let private = vec![0x5A; size];
        while let Some(mut buffer) = next(&emptied) {
            buffer.copy_from_slice(&private);
            if full.send(buffer).is_err() {
                return;
            }
        }
    })?;
    let consumer = on_core(cores[0], move || {
        let mut private = vec![0; size];
        let mut take = |length: Duration| {
            let (mut count, began) = (0u64, Instant::now());
            while began.elapsed() < length {
                let Some(buffer) = next(&filled) else { break };
                private.copy_from_slice(&buffer);
                count += 1;
                if empty.send(buffer).is_err() {
                    break;
                }
            }
            (count, began.elapsed())
        };
        take(WARM_UP);
        let (count, took) = take(LENGTH);
        // The producer ends when the channels close.
        count as f64 * size as f64 * 8.0 / took.as_secs_f64()
    })?;
    let gone = |_| anyhow!("a thread of the bare hand-over ended");
    let rate = consumer.join().map_err(gone)?;
    producer.join().map_err(gone)?;
    Ok(rate / 1e9)
}

/// Polls for the next buffer; `None` once the other side is gone.
fn next(channel: &Receiver<Vec<u8>>) -> Option<Vec<u8>> {
    loop {
        match channel.try_recv() {
            Ok(buffer) => return Some(buffer),
            Err(TryRecvError::Empty) => std::hint::spin_loop(),
            Err(TryRecvError::Disconnected) => return None,
        }
    }
}

fn on_core<T: Send + 'static>(
    core: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> anyhow::Result<JoinHandle<T>> {
    let thread = std::thread::Builder::new().name("hand-over".to_owned()).spawn(move || {
        // Pinning is optional; on failure the scheduler chooses.
        let _ = bind(core);
        work()
    })?;
    Ok(thread)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hand_over_on_one_core_completes_with_a_rate() {
        // On one core the threads alternate.
        let rate = hand_over(65_000, [0, 0]).unwrap();
        assert!(rate > 0.0 && rate.is_finite(), "{rate}");
    }
}

//! Distance of the two cores that a row runs on, as the time of a cache line's round trip between them.
//!
//! Two virtual processors can be threads of one physical core, or cores with caches of their own, and a
//! hypervisor changes that while a benchmark runs. It changes the rates of packets between them by a factor of
//! three, so each row carries the distance before and after it. Rows compare only at equal distance.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use super::affinity::bind;

/// Round trips before the measured ones, in which both threads start.
const WARM_UP: u32 = 500;
/// Round trips that are measured.
const MEASURED: u32 = 2500;

/// Cache line of its own, so that nothing else moves with the number.
#[repr(align(128))]
struct CacheLine(AtomicU32);

/// Measures the mean round trip of a cache line between two cores, in nanoseconds.
///
/// # Errors
///
/// Fails if a thread cannot be started or bound to its core.
pub(super) fn round_trip_ns([here, there]: [usize; 2]) -> anyhow::Result<f64> {
    let line = CacheLine(AtomicU32::new(0));
    std::thread::scope(|scope| {
        let answers = scope.spawn(|| {
            // An unbound thread answers as well; the caller reports the error.
            let bound = bind(there);
            for round in 0..WARM_UP + MEASURED {
                wait(&line, 2 * round + 1);
                line.0.store(2 * round + 2, Ordering::Release);
            }
            bound
        });
        let asks = scope.spawn(|| {
            let bound = bind(here);
            let mut began = Instant::now();
            for round in 0..WARM_UP + MEASURED {
                if round == WARM_UP {
                    began = Instant::now();
                }
                line.0.store(2 * round + 1, Ordering::Release);
                wait(&line, 2 * round + 2);
            }
            bound.map(|()| began.elapsed())
        });
        let panicked = |_| anyhow::anyhow!("a thread panicked");
        answers.join().map_err(panicked)??;
        let took = asks.join().map_err(panicked)??;
        Ok(took.as_secs_f64() * 1e9 / f64::from(MEASURED))
    })
}

/// Waits until the line has the number. It yields now and then, in case both threads share one core.
fn wait(line: &CacheLine, number: u32) {
    let mut looks = 0_u32;
    while line.0.load(Ordering::Acquire) != number {
        looks = looks.wrapping_add(1);
        if looks.is_multiple_of(1 << 14) {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_on_one_core_ends_and_takes_time() {
        let first = crate::affinity::allowed().unwrap().first().copied().unwrap();
        assert!(round_trip_ns([first, first]).unwrap() > 0.0);
    }

    #[test]
    fn core_that_does_not_exist_is_an_error() {
        let error = round_trip_ns([0, rustix::thread::CpuSet::MAX_CPU - 1]).unwrap_err();
        assert!(error.to_string().contains("binding a thread to core"), "{error}");
    }
}

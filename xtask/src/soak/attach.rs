//! Soak test of guests that start and end: descriptors and memory of the driver domain.

use std::time::{Duration, Instant};

use super::series::{Series, print_and_check};
use super::testbed::Testbed;

/// Maximum number of samples.
const SAMPLES: u32 = 100;
/// Delay between the end of a guest and a sample, for the driver domain to release the guest's resources.
const SETTLE: Duration = Duration::from_millis(100);

pub(super) fn run(testbed: &Testbed, times: u32) -> anyhow::Result<bool> {
    println!("soak attach: {times} guests; {}", testbed.describe());
    let mut stays = testbed.start(&["--name", "stays"], &["sleep", "infinity"])?;
    let mut series = [
        Series::new("driver domain", stays.process("driver")?),
        Series::new("frontend of the guest that stays", stays.process("frontend")?),
    ];
    let start = Instant::now();
    let every = (times / SAMPLES).max(1);
    for round in 1..=times {
        testbed.run(&["--name", &format!("n{round}")], &["true"])?;
        if round % every == 0 {
            std::thread::sleep(SETTLE);
            for series in &mut series {
                series.sample(round)?;
            }
        }
    }
    println!("{times} guests in {:.1?}", start.elapsed());
    let constant = print_and_check(&series);
    stays.end()?;
    Ok(constant)
}

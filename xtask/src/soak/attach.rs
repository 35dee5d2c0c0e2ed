//! Guests that come and go.

use std::time::{Duration, Instant};

use super::series::{Series, judge};
use super::stage::Stage;

/// How many samples are taken, at most.
const SAMPLES: u32 = 100;
/// How long a guest that has left may take to be gone.
const SETTLE: Duration = Duration::from_millis(100);

pub(super) fn run(stage: &Stage, times: u32) -> anyhow::Result<bool> {
    println!("soak attach: {times} guests; {}", stage.describe());
    let mut stays = stage.start(&["--name", "stays"], &["sleep", "infinity"])?;
    let mut series = [
        Series::new("driver domain", stays.process("driver")?),
        Series::new("frontend of the guest that stays", stays.process("frontend")?),
    ];
    let start = Instant::now();
    let every = (times / SAMPLES).max(1);
    for round in 1..=times {
        stage.run(&["--name", &format!("n{round}")], &["true"])?;
        if round % every == 0 {
            std::thread::sleep(SETTLE);
            for series in &mut series {
                series.sample(round)?;
            }
        }
    }
    println!("{times} guests in {:.1?}", start.elapsed());
    let flat = judge(&series);
    stays.end()?;
    Ok(flat)
}

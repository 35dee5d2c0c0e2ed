//! Figures that must not grow.

use super::stage::Process;

/// What an allocator may keep for itself, in KiB.
const NOISE_KIB: u64 = 1024;

/// Descriptors and memory of a process over time.
pub(super) struct Series {
    name: &'static str,
    process: Process,
    samples: Vec<Sample>,
}

#[derive(Clone, Copy)]
struct Sample {
    at: u32,
    descriptors: Option<u64>,
    resident: u64,
    own: u64,
}

impl Series {
    pub(super) fn new(name: &'static str, process: Process) -> Series {
        Series { name, process, samples: Vec::new() }
    }

    /// Notes how it is now, after so many rounds.
    pub(super) fn sample(&mut self, at: u32) -> anyhow::Result<()> {
        let memory = self.process.memory();
        let Some((resident, own)) = memory else { anyhow::bail!("the {} is gone", self.name) };
        self.samples.push(Sample { at, descriptors: self.process.descriptors(), resident, own });
        Ok(())
    }

    /// Prints the first, some and the last samples; false where they grow. The first tenth, in
    /// which buffers reach their sizes, is only printed.
    fn judge(&self) -> bool {
        let warm = self.samples.len() / 10 + 1;
        let (Some(&first), Some(&last)) = (self.samples.get(warm), self.samples.last()) else {
            println!("{}: too few samples", self.name);
            return false;
        };
        let every = (self.samples.len() / 10).max(1);
        for sample in self.samples.iter().step_by(every) {
            println!("  {}", self.line(*sample));
        }
        println!("  {}", self.line(last));
        let opened = last.descriptors.zip(first.descriptors).map(|(last, first)| last > first);
        let grown = last.own.saturating_sub(first.own);
        if opened.is_none() {
            println!("{}: its descriptors cannot be counted (run this as root)", self.name);
        }
        let is_flat = opened != Some(true) && grown <= NOISE_KIB;
        println!(
            "{}: from {} to {} rounds {grown} KiB more of its own: {}",
            self.name,
            first.at,
            last.at,
            if is_flat { "flat" } else { "IT GROWS" }
        );
        is_flat
    }

    fn line(&self, sample: Sample) -> String {
        let descriptors = sample.descriptors.map_or("?".to_owned(), |count| count.to_string());
        format!(
            "{:>9} {}: {descriptors} descriptors, {} KiB resident, {} KiB its own",
            sample.at, self.name, sample.resident, sample.own
        )
    }
}

/// Prints every series; false where one grows.
pub(super) fn judge(series: &[Series]) -> bool {
    // Each is printed, whatever came of those before it.
    let growing = series.iter().filter(|series| !series.judge()).count();
    growing == 0
}

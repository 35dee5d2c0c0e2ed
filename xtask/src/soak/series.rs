//! Series of figures that must not grow: descriptors and memory of a process.

use super::testbed::Process;

/// Growth that the allocator may cause, in KiB.
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
    private: u64,
}

impl Series {
    pub(super) fn new(name: &'static str, process: Process) -> Series {
        Series { name, process, samples: Vec::new() }
    }

    /// Adds a sample of the process after `at` rounds.
    pub(super) fn sample(&mut self, at: u32) -> anyhow::Result<()> {
        let memory = self.process.memory();
        let Some((resident, private)) = memory else { anyhow::bail!("the {} is gone", self.name) };
        self.samples.push(Sample {
            at,
            descriptors: self.process.descriptors(),
            resident,
            private,
        });
        Ok(())
    }

    /// Prints some samples, the first and the last among them. Returns `false` if a figure grows. The growth
    /// is counted after the first tenth of the samples, in which buffers reach their sizes.
    fn print_and_check(&self) -> bool {
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
        let grown = last.private.saturating_sub(first.private);
        if opened.is_none() {
            println!("{}: its descriptors cannot be counted (run this as root)", self.name);
        }
        let is_constant = opened != Some(true) && grown <= NOISE_KIB;
        println!(
            "{}: from {} to {} rounds {grown} KiB more of its own: {}",
            self.name,
            first.at,
            last.at,
            if is_constant { "flat" } else { "IT GROWS" }
        );
        is_constant
    }

    fn line(&self, sample: Sample) -> String {
        let descriptors = sample.descriptors.map_or("?".to_owned(), |count| count.to_string());
        format!(
            "{:>9} {}: {descriptors} descriptors, {} KiB resident, {} KiB its own",
            sample.at, self.name, sample.resident, sample.private
        )
    }
}

/// Prints every series. Returns `false` if one grows.
pub(super) fn print_and_check(series: &[Series]) -> bool {
    // `filter` visits every series, so each is printed.
    let growing = series.iter().filter(|series| !series.print_and_check()).count();
    growing == 0
}

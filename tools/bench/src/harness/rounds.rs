//! Rounds of a benchmark: every case runs once in each round.

use anyhow::Context;
use indicatif::ProgressBar;

/// Case of a benchmark: one combination of its parameters.
pub(crate) trait Case {
    /// Measured value: the result of one run.
    type Measured;

    /// Returns the name, which tells the cases of a benchmark apart.
    fn name(&self) -> String;

    /// Returns the words that introduce an error of this case.
    fn failure(&self) -> String {
        self.name()
    }

    /// Runs the case once.
    ///
    /// # Errors
    ///
    /// Returns an error if the case could not run or its checks failed.
    fn run(&self, attempt: &Attempt<'_>) -> anyhow::Result<Self::Measured>;
}

/// Run that is about to begin.
pub(crate) struct Attempt<'a> {
    /// Number of runs before this one, of all cases.
    pub(crate) number: usize,
    /// Progress bar, to be suspended while a message is written to standard error.
    pub(crate) progress: &'a ProgressBar,
}

struct Run<C: Case> {
    case: C,
    measured: C::Measured,
}

/// Runs of all cases, in the order of their measurement.
pub(crate) struct Runs<C: Case>(Vec<Run<C>>);

impl<C: Case + Clone> Runs<C> {
    /// Runs each case once in each round, and calls `finished` after a case's last run.
    ///
    /// # Errors
    ///
    /// Returns the first error of a run or of `finished`.
    pub(crate) fn measure(
        cases: &[C],
        rounds: u32,
        progress: &ProgressBar,
        mut finished: impl FnMut(&C, &Runs<C>) -> anyhow::Result<()>,
    ) -> anyhow::Result<Runs<C>> {
        let mut runs = Runs(Vec::new());
        for round in 1..=rounds {
            for case in cases {
                progress.set_message(format!("round {round}: {}", case.name()));
                let measured = case.run(&Attempt { number: runs.0.len(), progress });
                let measured = measured.with_context(|| case.failure())?;
                runs.0.push(Run { case: case.clone(), measured });
                progress.inc(1);
                if round == rounds {
                    finished(case, &runs)?;
                }
            }
        }
        progress.finish_and_clear();
        Ok(runs)
    }
}

impl<C: Case> Runs<C> {
    /// Returns the results of the cases that `wanted` accepts, in the order of their rounds.
    pub(crate) fn of(&self, wanted: impl Fn(&C) -> bool) -> impl Iterator<Item = &C::Measured> {
        self.0.iter().filter(move |run| wanted(&run.case)).map(|run| &run.measured)
    }

    /// Returns the results of all cases.
    pub(crate) fn all(&self) -> impl Iterator<Item = &C::Measured> {
        self.of(|_| true)
    }

    /// Summarizes the runs of a case, with those of the cases that `baseline` accepts.
    pub(crate) fn summary(&self, case: &C, baseline: impl Fn(&C) -> bool) -> Summary<C>
    where
        C: Clone,
        C::Measured: Clone,
    {
        let name = case.name();
        Summary {
            case: case.clone(),
            runs: self.of(|other| other.name() == name).cloned().collect(),
            baseline: self.of(baseline).cloned().collect(),
        }
    }
}

/// Runs of one case in all rounds, and those of its baseline in the same rounds.
pub(crate) struct Summary<C: Case> {
    pub(crate) case: C,
    pub(crate) runs: Vec<C::Measured>,
    /// Runs to compare with; empty if nothing is compared.
    pub(crate) baseline: Vec<C::Measured>,
}

impl<C: Case> Summary<C> {
    /// Returns the median of a figure over the rounds.
    pub(crate) fn median(&self, figure: impl Fn(&C::Measured) -> f64) -> f64 {
        median(self.runs.iter().map(figure))
    }

    /// Returns the sum of a count over the rounds.
    pub(crate) fn sum(&self, count: impl Fn(&C::Measured) -> u64) -> u64 {
        self.runs.iter().map(count).sum()
    }

    /// Returns the greatest value of a figure.
    pub(crate) fn greatest(&self, figure: impl Fn(&C::Measured) -> i64) -> i64 {
        self.runs.iter().map(figure).max().unwrap_or_default()
    }

    /// Returns the median of the ratios to the baseline, each of one round. Interference changes more slowly than
    /// a round takes.
    pub(crate) fn ratio(&self, figure: impl Fn(&C::Measured) -> f64) -> f64 {
        let pairs = self.runs.iter().zip(&self.baseline);
        median(pairs.map(|(run, base)| figure(run) / figure(base).max(f64::MIN_POSITIVE)))
    }
}

/// Returns the median, the lower one of two; 0 without values.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[derive(Clone)]
    struct Numbered<'a>(u32, &'a RefCell<Vec<u32>>);

    impl Case for Numbered<'_> {
        type Measured = f64;

        fn name(&self) -> String {
            format!("case {}", self.0)
        }

        fn run(&self, attempt: &Attempt<'_>) -> anyhow::Result<f64> {
            self.1.borrow_mut().push(self.0);
            anyhow::ensure!(self.0 < 9, "refused");
            Ok(f64::from(self.0) * (attempt.number + 1) as f64)
        }
    }

    #[test]
    fn each_round_runs_every_case_and_the_last_one_finishes_them() {
        let order = RefCell::new(Vec::new());
        let cases = [Numbered(1, &order), Numbered(2, &order)];
        let mut ended = Vec::new();
        let runs = Runs::measure(&cases, 3, &ProgressBar::hidden(), |case, runs| {
            ended.push((case.0, runs.all().count()));
            Ok(())
        });
        assert_eq!(*order.borrow(), [1, 2, 1, 2, 1, 2]);
        assert_eq!(ended, [(1, 5), (2, 6)]);
        let summary = runs.unwrap().summary(&cases[1], |case| case.0 == 1);
        assert_eq!(summary.runs, [4.0, 8.0, 12.0]);
        // 4 to 1, 8 to 3, 12 to 5.
        assert_eq!(summary.ratio(|run| *run), 8.0 / 3.0);
        assert_eq!(
            (summary.median(|run| *run), summary.greatest(|run| i64::from(*run > 10.0) * 12)),
            (8.0, 12)
        );
    }

    #[test]
    fn failed_run_is_named_by_its_case() {
        let order = RefCell::new(Vec::new());
        let cases = [Numbered(9, &order)];
        let runs = Runs::measure(&cases, 1, &ProgressBar::hidden(), |_, _| Ok(()));
        assert_eq!(format!("{:#}", runs.err().unwrap()), "case 9: refused");
    }

    #[test]
    fn median_is_the_lower_of_two_middle_values() {
        assert_eq!(median([4.0, 1.0, 3.0, 2.0].into_iter()), 2.0);
        assert_eq!(median(std::iter::empty()), 0.0);
    }
}

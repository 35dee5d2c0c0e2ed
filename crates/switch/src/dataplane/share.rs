//! Equal time for ports that compete.
//!
//! # Theory of operation
//!
//! Packets are no measure of what a port costs: one of 64 KiB, or one that goes to every other port,
//! takes hundreds of times as long as a small one, and a guest may send nothing else. So what is
//! shared out is time, that of receiving, delivering and answering together, and whoever sends pays.
//!
//! * Every port has an account of the time it took. The *floor* is the least account of those that
//!   had work in the last round. A port more than [`SLACK`] above the floor is left out until the
//!   others have caught up.
//! * If nobody else has work, the floor rises to those who were left out: time is not wasted.
//! * A port that had nothing to do starts at the floor: nobody saves up time. Nobody owes more than
//!   [`DEBT_MAX`] either.
//! * While ports compete, a turn is to take no longer than [`QUANTUM`]: a port gets as many packets
//!   as took it that long lately, so that nobody's ring runs full during another's turn.

use core::time::Duration;

/// How long a turn is to take while ports compete: about as long as a budget of small packets.
const QUANTUM: u64 = 32_000;
/// Maximum lead of a port over the others.
const SLACK: u64 = QUANTUM;
/// The longest that is held against a port: beyond it, a turn was interrupted rather than used.
const DEBT_MAX: u64 = 10_000_000;

/// Fairness account of a port, in nanoseconds.
#[derive(Debug, Default)]
pub(super) struct Share {
    used: u64,
    /// What a piece of work costs, on average of late.
    piece: u64,
}

/// What is known of all accounts.
#[derive(Debug, Default)]
pub(super) struct Fairness {
    floor: u64,
    contended: bool,
    workers: u32,
    skipped: u32,
    least_worker: u64,
    least_skipped: u64,
}

impl Fairness {
    /// Whether it is a port's turn in this round.
    pub(super) fn admits(&mut self, share: &Share) -> bool {
        if share.used <= self.floor.saturating_add(SLACK) {
            return true;
        }
        self.least_skipped =
            if self.skipped == 0 { share.used } else { self.least_skipped.min(share.used) };
        self.skipped += 1;
        false
    }

    /// Pieces of work to be taken from a port of which at most `most` may be.
    pub(super) fn budget(&self, share: &Share, most: usize) -> usize {
        if !self.contended || share.piece == 0 {
            return most;
        }
        let fitting = usize::try_from(QUANTUM / share.piece).unwrap_or(most);
        fitting.clamp(1, most.max(1)).min(most)
    }

    /// A port had its turn, with `work` pieces of work.
    pub(super) fn charge(&mut self, share: &mut Share, took: Duration, work: usize) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let piece = took / u64::try_from(work.max(1)).unwrap_or(u64::MAX);
        // Half of what is new: after a few turns what was before does not matter.
        share.piece = if share.piece == 0 { piece } else { share.piece / 2 + piece / 2 };
        let used = share.used.max(self.floor).saturating_add(took);
        share.used = used.min(self.floor.saturating_add(DEBT_MAX));
        self.least_worker =
            if self.workers == 0 { share.used } else { self.least_worker.min(share.used) };
        self.workers += 1;
    }

    /// A round is over. Whether those who were left out are to have a round at once, because nobody
    /// else has work.
    pub(super) fn settle(&mut self) -> bool {
        let (workers, skipped) = (self.workers, self.skipped);
        self.contended = workers + skipped >= 2;
        (self.workers, self.skipped) = (0, 0);
        let again = workers == 0 && skipped > 0;
        if again {
            self.floor = self.floor.max(self.least_skipped);
        } else if workers > 0 {
            self.floor = self.floor.max(self.least_worker);
        }
        again
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const US: Duration = Duration::from_micros(1);

    /// A port whose pieces of work take that long, and how many it has in each round.
    struct Model {
        piece: Duration,
        offers: usize,
        share: Share,
        took: Duration,
        turns: u32,
    }

    fn model(piece: Duration, offers: usize) -> Model {
        Model { piece, offers, share: Share::default(), took: Duration::ZERO, turns: 0 }
    }

    fn pass(fairness: &mut Fairness, ports: &mut [Model]) {
        for port in ports {
            if !fairness.admits(&port.share) {
                continue;
            }
            let work = fairness.budget(&port.share, 64).min(port.offers);
            if work > 0 {
                let took = port.piece * u32::try_from(work).unwrap();
                fairness.charge(&mut port.share, took, work);
                port.took += took;
                port.turns += 1;
            }
        }
    }

    fn rounds(fairness: &mut Fairness, ports: &mut [Model], count: usize) {
        for _ in 0..count {
            pass(fairness, ports);
            let mut passes = 0;
            while fairness.settle() {
                passes += 1;
                assert!(passes <= ports.len(), "each pass lets one more port in");
                pass(fairness, ports);
            }
        }
    }

    /// After a few rounds the costs are known; before that a turn may be longer than any debt.
    fn settled(ports: &mut [Model]) -> Fairness {
        let mut fairness = Fairness::default();
        rounds(&mut fairness, ports, 200);
        ports.iter_mut().for_each(|port| port.took = Duration::ZERO);
        fairness
    }

    fn percent(part: Duration, whole: Duration) -> u128 {
        part.as_nanos() * 100 / whole.as_nanos()
    }

    #[test]
    fn costly_and_cheap_packets_get_the_same_time() {
        for costly in [2, 16, 300, 2000] {
            let mut ports = [model(US * costly, 64), model(US / 2, 64)];
            let mut fairness = settled(&mut ports);
            rounds(&mut fairness, &mut ports, 20_000);
            let share = percent(ports[1].took, ports[0].took + ports[1].took);
            assert!((48..=52).contains(&share), "{costly}: {share} %");
        }
    }

    #[test]
    fn two_costly_ones_are_not_stronger_than_one() {
        let mut ports = [model(US * 300, 64), model(US / 2, 64), model(US * 500, 64)];
        let mut fairness = settled(&mut ports);
        rounds(&mut fairness, &mut ports, 20_000);
        let all = ports.iter().map(|p| p.took).sum();
        for port in &ports {
            let share = percent(port.took, all);
            assert!((32..=35).contains(&share), "{share} %");
        }
    }

    #[test]
    fn who_is_alone_is_served_in_every_round_with_the_whole_budget() {
        let mut fairness = Fairness::default();
        let mut ports = [model(US * 300, 64), model(US, 64)];
        rounds(&mut fairness, &mut ports, 100);
        ports[1].offers = 0;
        rounds(&mut fairness, &mut ports, 2);
        let turns = ports[0].turns;
        rounds(&mut fairness, &mut ports, 100);
        assert_eq!(ports[0].turns - turns, 100);
        assert_eq!(fairness.budget(&ports[0].share, 64), 64);
    }

    #[test]
    fn a_turn_is_short_while_others_wait() {
        let mut fairness = Fairness::default();
        let mut ports = [model(US * 16, 64), model(US / 2, 64)];
        rounds(&mut fairness, &mut ports, 10);
        assert_eq!(fairness.budget(&ports[0].share, 64), 2);
        assert_eq!(fairness.budget(&ports[1].share, 64), 64);
        assert_eq!(fairness.budget(&ports[0].share, 0), 0, "no more than allowed");
    }

    #[test]
    fn time_is_not_saved_up_and_an_interrupted_turn_is_forgiven() {
        let mut fairness = Fairness::default();
        let mut ports = [model(US, 64), model(US, 0)];
        rounds(&mut fairness, &mut ports, 10_000);
        ports[1].offers = 64;
        let before = ports[0].took;
        rounds(&mut fairness, &mut ports, 100);
        let share = percent(ports[0].took - before, ports[0].took - before + ports[1].took);
        assert!((45..=55).contains(&share), "{share} %");
        // A second asleep in the middle of a turn.
        fairness.charge(&mut ports[0].share, Duration::from_secs(1), 1);
        fairness.settle();
        let (turns, took) = (ports[0].turns, ports[1].took);
        rounds(&mut fairness, &mut ports, 1000);
        assert!(ports[0].turns > turns, "it comes back");
        assert!(ports[1].took - took >= Duration::from_millis(10));
    }

    proptest! {
        /// Whatever the others cost, a port that always has work gets its part of the time.
        #[test]
        fn nobody_gets_less_than_its_part(
            costs in proptest::collection::vec((1u32..1_000_000, 0usize..=64), 1..6),
        ) {
            let mut ports: Vec<_> =
                costs.iter().map(|(ns, offers)| model(Duration::from_nanos(1) * *ns, *offers)).collect();
            ports.push(model(US / 2, 64));
            let mut fairness = settled(&mut ports);
            rounds(&mut fairness, &mut ports, 5000);
            let all: Duration = ports.iter().map(|p| p.took).sum();
            let part = ports.last().map(|p| p.took * u32::try_from(ports.len()).unwrap()).unwrap();
            // What the others are ahead of it by at the end: a turn's worth each.
            let ahead = Duration::from_millis(2) * u32::try_from(ports.len()).unwrap();
            prop_assert!(part + ahead >= all * 9 / 10, "{part:?} of {all:?}");
        }
    }
}

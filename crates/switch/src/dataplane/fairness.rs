//! Fairness scheduler: equal time for ports that compete for a worker.
//!
//! # Theory of operation
//!
//! The number of packets does not measure the cost of a port: a packet of 64 KiB, or one that is flooded,
//! takes hundreds of times as long as a small one, and a guest may send nothing else. So the scheduler
//! divides time: the time of receiving, delivering and completing together, charged to the sender.
//!
//! * Each port has an account of the time it used. The *floor* is the lowest account of the ports that
//!   had work in the last pass. A port more than [`LEAD_MAX`] above the floor is skipped until the others
//!   have caught up.
//! * If no other port has work, the floor rises to the skipped ports, so no time is wasted.
//! * A port without work starts at the floor, so it cannot save time. No account is more than
//!   [`DEBT_MAX`] above the floor either.
//! * While ports compete, the budget of a port is as many packets as fit in [`QUANTUM`] at their recent
//!   cost. So no ring runs full while another port is served.

use core::time::Duration;
use ringfence_sys::numbers::u64_from;

/// Time quantum of a port while ports compete, in nanoseconds: about one budget of small packets.
const QUANTUM: u64 = 32_000;
/// Maximum lead of a port over the others, in nanoseconds.
const LEAD_MAX: u64 = QUANTUM;
/// Maximum height of an account above the floor, in nanoseconds. A port that seems to use more was probably
/// interrupted.
const DEBT_MAX: u64 = 10_000_000;

/// Time account of a port, in nanoseconds.
#[derive(Debug, Default)]
pub(super) struct TimeAccount {
    used: u64,
    /// Recent average cost of one unit of work; 0 before the first work.
    unit_cost: u64,
}

/// Fairness scheduler of a worker: the state that all accounts share.
#[derive(Debug, Default)]
pub(super) struct Fairness {
    floor: u64,
    /// Set if at least two ports had work in the last pass, or were skipped.
    contended: bool,
    /// Number of ports that had work in this pass.
    served: u32,
    /// Number of ports that were skipped in this pass.
    skipped: u32,
    least_served: u64,
    least_skipped: u64,
}

impl Fairness {
    /// Returns `true` if the port is to be polled in this pass, and counts it as skipped if not.
    pub(super) fn admits(&mut self, account: &TimeAccount) -> bool {
        if account.used <= self.floor.saturating_add(LEAD_MAX) {
            return true;
        }
        self.least_skipped =
            if self.skipped == 0 { account.used } else { self.least_skipped.min(account.used) };
        self.skipped += 1;
        false
    }

    /// Returns the number of units of work that a port may do, at most `most`.
    pub(super) fn budget(&self, account: &TimeAccount, most: usize) -> usize {
        if !self.contended || account.unit_cost == 0 {
            return most;
        }
        let fitting = usize::try_from(QUANTUM / account.unit_cost).unwrap_or(most);
        fitting.clamp(1, most.max(1)).min(most)
    }

    /// Charges a port for `work` units of work that took the time `took`.
    pub(super) fn charge(&mut self, account: &mut TimeAccount, took: Duration, work: usize) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let cost = took / u64_from(work.max(1));
        // Exponential average with a weight of one half: the cost adapts within a few rounds.
        account.unit_cost =
            if account.unit_cost == 0 { cost } else { account.unit_cost / 2 + cost / 2 };
        let used = account.used.max(self.floor).saturating_add(took);
        account.used = used.min(self.floor.saturating_add(DEBT_MAX));
        self.least_served =
            if self.served == 0 { account.used } else { self.least_served.min(account.used) };
        self.served += 1;
    }

    /// Ends a pass over all ports. Returns `true` if ports were skipped and no other port had work: then
    /// another pass is due at once.
    pub(super) fn end_pass(&mut self) -> bool {
        let (served, skipped) = (self.served, self.skipped);
        self.contended = served + skipped >= 2;
        (self.served, self.skipped) = (0, 0);
        let again = served == 0 && skipped > 0;
        if again {
            self.floor = self.floor.max(self.least_skipped);
        } else if served > 0 {
            self.floor = self.floor.max(self.least_served);
        }
        again
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const US: Duration = Duration::from_micros(1);

    /// Port with `offers` units of work in each pass; each unit takes the time `cost`.
    struct Model {
        cost: Duration,
        offers: usize,
        account: TimeAccount,
        took: Duration,
        times: u32,
    }

    fn model(cost: Duration, offers: usize) -> Model {
        Model { cost, offers, account: TimeAccount::default(), took: Duration::ZERO, times: 0 }
    }

    fn pass(fairness: &mut Fairness, ports: &mut [Model]) {
        for port in ports {
            if !fairness.admits(&port.account) {
                continue;
            }
            let work = fairness.budget(&port.account, 64).min(port.offers);
            if work > 0 {
                let took = port.cost * u32::try_from(work).unwrap();
                fairness.charge(&mut port.account, took, work);
                port.took += took;
                port.times += 1;
            }
        }
    }

    fn rounds(fairness: &mut Fairness, ports: &mut [Model], count: usize) {
        for _ in 0..count {
            pass(fairness, ports);
            let mut passes = 0;
            while fairness.end_pass() {
                passes += 1;
                assert!(passes <= ports.len(), "each pass admits one more port");
                pass(fairness, ports);
            }
        }
    }

    /// Runs rounds until the costs are known. Before that a port may use more time than any debt.
    fn warmed_up(ports: &mut [Model]) -> Fairness {
        let mut fairness = Fairness::default();
        rounds(&mut fairness, ports, 200);
        ports.iter_mut().for_each(|port| port.took = Duration::ZERO);
        fairness
    }

    fn percent(part: Duration, whole: Duration) -> u128 {
        part.as_nanos() * 100 / whole.as_nanos()
    }

    #[test]
    fn ports_with_costly_and_cheap_packets_get_equal_time() {
        for costly in [2, 16, 300, 2000] {
            let mut ports = [model(US * costly, 64), model(US / 2, 64)];
            let mut fairness = warmed_up(&mut ports);
            rounds(&mut fairness, &mut ports, 20_000);
            let share = percent(ports[1].took, ports[0].took + ports[1].took);
            assert!((48..=52).contains(&share), "{costly}: {share} %");
        }
    }

    #[test]
    fn two_costly_ports_leave_third_port_its_share() {
        let mut ports = [model(US * 300, 64), model(US / 2, 64), model(US * 500, 64)];
        let mut fairness = warmed_up(&mut ports);
        rounds(&mut fairness, &mut ports, 20_000);
        let all = ports.iter().map(|p| p.took).sum();
        for port in &ports {
            let share = percent(port.took, all);
            assert!((32..=35).contains(&share), "{share} %");
        }
    }

    #[test]
    fn single_busy_port_is_served_every_round_with_full_budget() {
        let mut fairness = Fairness::default();
        let mut ports = [model(US * 300, 64), model(US, 64)];
        rounds(&mut fairness, &mut ports, 100);
        ports[1].offers = 0;
        rounds(&mut fairness, &mut ports, 2);
        let times = ports[0].times;
        rounds(&mut fairness, &mut ports, 100);
        assert_eq!(ports[0].times - times, 100);
        assert_eq!(fairness.budget(&ports[0].account, 64), 64);
    }

    #[test]
    fn budget_of_costly_port_under_contention_fits_quantum() {
        let mut fairness = Fairness::default();
        let mut ports = [model(US * 16, 64), model(US / 2, 64)];
        rounds(&mut fairness, &mut ports, 10);
        assert_eq!(fairness.budget(&ports[0].account, 64), 2);
        assert_eq!(fairness.budget(&ports[1].account, 64), 64);
        assert_eq!(fairness.budget(&ports[0].account, 0), 0, "the budget stays within its limit");
    }

    #[test]
    fn idle_port_saves_no_time_and_interrupted_port_recovers() {
        let mut fairness = Fairness::default();
        let mut ports = [model(US, 64), model(US, 0)];
        rounds(&mut fairness, &mut ports, 10_000);
        ports[1].offers = 64;
        let before = ports[0].took;
        rounds(&mut fairness, &mut ports, 100);
        let share = percent(ports[0].took - before, ports[0].took - before + ports[1].took);
        assert!((45..=55).contains(&share), "{share} %");
        // The worker is interrupted for one second while it serves the port.
        fairness.charge(&mut ports[0].account, Duration::from_secs(1), 1);
        fairness.end_pass();
        let (times, took) = (ports[0].times, ports[1].took);
        rounds(&mut fairness, &mut ports, 1000);
        assert!(ports[0].times > times, "the interrupted port is served again");
        assert!(ports[1].took - took >= Duration::from_millis(10));
    }

    proptest! {
        /// Checks that a port with constant work gets its share of the time, for any costs of the others.
        #[test]
        fn port_among_any_others_gets_its_share_of_time(
            costs in proptest::collection::vec((1u32..1_000_000, 0usize..=64), 1..6),
        ) {
            let mut ports: Vec<_> =
                costs.iter().map(|(ns, offers)| model(Duration::from_nanos(1) * *ns, *offers)).collect();
            ports.push(model(US / 2, 64));
            let mut fairness = warmed_up(&mut ports);
            rounds(&mut fairness, &mut ports, 5000);
            let all: Duration = ports.iter().map(|p| p.took).sum();
            let part = ports.last().map(|p| p.took * u32::try_from(ports.len()).unwrap()).unwrap();
            // Lead of the others at the end: about one time quantum or one packet each.
            let ahead = Duration::from_millis(2) * u32::try_from(ports.len()).unwrap();
            prop_assert!(part + ahead >= all * 9 / 10, "{part:?} of {all:?}");
        }
    }
}

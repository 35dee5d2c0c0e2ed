//! `ringfence demo`: its table, with a row for each access mode.

use std::time::Duration;

use crate::require;
use crate::support::Lab;
use crate::support::needs::Need;
use ringfence_access::Mode;

/// Time limit beside other tests.
const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn demo_prints_a_row_for_each_mode_and_leaves_nothing() {
    require!(Need::Guests);
    let lab = Lab::new();
    let table = lab.spawn(&[lab.program(), "demo"]).succeed(LIMIT);
    for mode in Mode::NETWORK {
        let row = table.lines().find(|line| line.starts_with(&format!("{mode} ")));
        let row = row.unwrap_or_else(|| panic!("no row of mode {mode}:\n{table}"));
        let figures: Vec<f64> =
            row.split_whitespace().skip(1).take(4).map(|word| word.parse().unwrap()).collect();
        // Gbit/s, packets a second, grant operations a packet, system calls a packet.
        assert!(figures[0] > 0.0 && figures[1] > 0.0 && figures[3] > 0.0, "{row}");
    }
    lab.assert_no_switch();
}

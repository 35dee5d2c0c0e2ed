//! Parameters common to the packet rows and the disk rows.

use std::time::Duration;

use crate::affinity::allowed;

/// Time between the start of all processes and the measurement.
pub(super) const WARM_UP: Duration = Duration::from_millis(300);
/// Minimum MTU of a vif here.
pub(super) const MTU_MIN: u32 = 1500;

/// CPU core of each domain.
#[derive(Clone, Copy)]
pub(super) struct Cores {
    pub(super) driver: Option<usize>,
    pub(super) victim: Option<usize>,
    pub(super) neighbour: Option<usize>,
}

impl Cores {
    pub(super) fn find() -> anyhow::Result<Cores> {
        let mut each = allowed()?.into_iter();
        let [driver, victim, third] = [(); 3].map(|()| each.next());
        if victim.is_none() {
            eprintln!("ringfence: one core only: all domains share it, and take turns");
        }
        Ok(Cores { driver, victim: victim.or(driver), neighbour: third.or(victim).or(driver) })
    }
}

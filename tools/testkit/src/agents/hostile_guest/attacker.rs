//! Adversary of any device, as the agent drives it.

use std::time::Duration;

use crate::hostile::handshake::Pace;

/// Time limit of one step of the handshake, long enough for emulation.
pub(super) const STEP_WITHIN: Duration = Duration::from_secs(10);

/// Interval between two attempts.
pub(super) const PAUSE: Duration = Duration::from_millis(2);

/// Timing of both adversaries.
pub(super) const PACE: Pace =
    Pace { step_within: STEP_WITHIN, pause: || std::thread::sleep(PAUSE) };

/// Adversary that repeats one behaviour.
pub(super) trait Attacker {
    /// Runs the handshake from its beginning.
    fn connect(&mut self) -> anyhow::Result<()>;
    /// Runs one burst of the behaviour.
    fn burst(&mut self) -> anyhow::Result<()>;
    /// Returns `true` if the handshake must run again.
    fn is_over(&mut self) -> bool;
    /// Returns `true` if the failure is one of the backend, which fails the test.
    fn is_fatal(&self, why: &anyhow::Error) -> bool;
}

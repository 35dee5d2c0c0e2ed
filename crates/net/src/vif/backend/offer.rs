//! Offer of grant windows to the frontend.

use ringfence_access::Mode;
use ringfence_platform::{Platform, WindowError};

use super::VifBackend;

impl VifBackend {
    /// Returns the access mode, which differs from the configured one if the platform does not support that.
    pub fn mode(&self) -> Mode {
        self.options.mode
    }

    /// Returns true if grant windows are offered. If the platform has none, it logs that once and uses staging.
    pub(super) fn offers_windows(&mut self, platform: &impl Platform) -> bool {
        let wanted = self.options.mode == Mode::Window;
        if wanted && !platform.has_windows() {
            let instead = Mode::Staging;
            tracing::warn!(device = self.end.back_path(), %instead, "no windows: {}", WindowError::NeedsPeer);
            self.options.mode = instead;
        }
        self.options.mode == Mode::Window
    }
}

//! Whether the frontend may lend in windows.

use ringfence_access::Mode;
use ringfence_platform::{Platform, WindowError};

use super::VifBackend;

impl VifBackend {
    /// How pages are reached where the frontend takes part: not as it was ordered where the platform cannot.
    pub fn mode(&self) -> Mode {
        self.options.mode
    }

    /// Whether windows are opened for the frontend. Where the platform has none, that is said once.
    pub(super) fn offers_windows(&mut self, platform: &impl Platform) -> bool {
        let wanted = self.options.mode == Mode::Window;
        if wanted && !platform.has_windows() {
            let instead = Mode::Staging;
            tracing::warn!(device = %self.back, %instead, "no windows: {}", WindowError::NeedsPeer);
            self.options.mode = instead;
        }
        self.options.mode == Mode::Window
    }
}

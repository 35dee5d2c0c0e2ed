//! Handshake of an adversary frontend, for a vif and for a vbd.
//!
//! It has the store connection of one device and reads and writes the xenbus states of both ends. An
//! adversary that breaks a rule of the handshake writes the states itself through the same methods.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ringfence_platform::Platform;
use ringfence_wire::xenbus::{DeviceId, STATE, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient};

/// Time limit of one step of the handshake; after it the handshake begins again.
pub const STEP_WITHIN: Duration = Duration::from_secs(2);
/// Interval between two polls of the backend's state.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Timing of an adversary.
#[derive(Clone, Copy)]
pub struct Pace {
    /// Time limit of one step of the handshake; after it the handshake begins again.
    pub step_within: Duration,
    /// Action between two polls of the backend's state.
    pub pause: fn(),
}

/// Frontend's end of a device's handshake.
pub struct Handshake {
    pub store: StoreClient,
    pub device: DeviceId,
    pub pace: Pace,
    hung_up: bool,
    looked: Instant,
}

impl Handshake {
    /// Connects to the platform's store on behalf of a device.
    pub fn new<P: Platform>(
        platform: &P,
        device: DeviceId,
        pace: Pace,
    ) -> anyhow::Result<Handshake> {
        let store = platform.store()?;
        Ok(Handshake { store, device, pace, hung_up: false, looked: Instant::now() })
    }

    /// Writes a key of the frontend.
    pub fn set(&mut self, key: &str, value: &str) -> anyhow::Result<()> {
        Ok(self.store.write(&format!("{}/{key}", self.device.frontend_path()), value)?)
    }

    /// Writes the frontend's state.
    pub fn enter(&mut self, state: XenbusState) -> anyhow::Result<()> {
        self.set(STATE, &state.to_string())
    }

    /// Leaves the device: `Closing`, then `Closed`.
    pub fn leave(&mut self) -> anyhow::Result<()> {
        self.enter(XenbusState::Closing)?;
        self.enter(XenbusState::Closed)
    }

    /// Reads a key of the backend.
    pub fn of_backend(&mut self, key: &str) -> anyhow::Result<String> {
        let value = self.store.read(&format!("{}/{key}", self.device.backend_path()))?;
        String::from_utf8(value).with_context(|| format!("the backend's {key} is no text"))
    }

    /// Reads the backend's state.
    pub fn backend_state(&mut self) -> anyhow::Result<XenbusState> {
        let text = self.of_backend(STATE)?;
        Ok(XenbusState::parse(text.as_bytes()).unwrap_or(XenbusState::Missing))
    }

    /// Blocks until the backend has the state, at most for one step.
    pub fn wait_for(&mut self, state: XenbusState) -> anyhow::Result<()> {
        let begin = Instant::now();
        while self.backend_state()? != state {
            if begin.elapsed() > self.pace.step_within {
                bail!("the backend did not become {state}");
            }
            (self.pace.pause)();
        }
        Ok(())
    }

    /// Brings the backend to `InitWait`.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        if self.backend_state()? != XenbusState::InitWait {
            self.leave()?;
            self.enter(XenbusState::Initialising)?;
            self.wait_for(XenbusState::InitWait)?;
        }
        Ok(())
    }

    /// Blocks until the backend is connected and forgets that it closed an earlier device.
    pub fn wait_for_connection(&mut self) -> anyhow::Result<()> {
        self.wait_for(XenbusState::Connected)?;
        (self.looked, self.hung_up) = (Instant::now(), false);
        Ok(())
    }

    /// Records the result of a notification, which fails once the backend has closed the device.
    pub fn notified<E>(&mut self, result: Result<(), E>) {
        self.hung_up |= result.is_err();
    }

    /// Returns `true` if the device was closed. Reads the state at most once in `LOOK_EVERY`.
    pub fn was_closed(&mut self) -> anyhow::Result<bool> {
        if self.hung_up {
            return Ok(true);
        }
        if self.looked.elapsed() < LOOK_EVERY {
            return Ok(false);
        }
        self.looked = Instant::now();
        Ok(self.backend_state()? != XenbusState::Connected)
    }
}

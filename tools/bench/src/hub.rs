//! Hub of a benchmark's domains.

use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};

/// Hub in a thread of its own, ended on drop.
pub(super) struct RunningHub(pub(super) HubHandle);

impl RunningHub {
    pub(super) fn start() -> anyhow::Result<RunningHub> {
        let (hub, handle) = Hub::new(HubLimits::default())?;
        std::thread::Builder::new().name("hub".to_owned()).spawn(move || {
            if let Err(error) = hub.run() {
                eprintln!("ringfence: the hub ended: {error}");
            }
        })?;
        Ok(RunningHub(handle))
    }
}

impl Drop for RunningHub {
    fn drop(&mut self) {
        self.0.stop();
    }
}

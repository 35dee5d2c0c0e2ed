//! Parts that the front-ends of all kinds of devices share: their memory, notifications, and the result of a run.

use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use ringfence_sys::poll::wait_any;
use ringfence_vhost_user::testing::{FrontShape, FrontVring, Frontend, memfd};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::time::ClockId;

use crate::usage::clock;

/// Bytes of the machine's memory beside the buffers, unless it lends a pool alone.
const MACHINE: u64 = 256 << 20;
/// Time limit for an answer of the device.
const PATIENCE: Duration = Duration::from_secs(30);

/// Result of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Worked {
    /// Requests or packets that were completed and checked.
    pub(super) done: u64,
    pub(super) seconds: f64,
    /// CPU time of the front-end in nanoseconds.
    pub(super) front_ns: u64,
    /// Notifications to the device: writes of the front-end to an eventfd.
    pub(super) kicks: u64,
    /// Notifications from the device: writes of the backend, or of the shield, to an eventfd.
    pub(super) calls: u64,
    /// Bytes of data that the front-end copied to a pool or from it.
    pub(super) copied: u64,
}

/// Front-end that is connected to a device.
pub(super) trait FrontEnd {
    /// Works for this time, and waits until nothing is in flight.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails, or its data are not those that were sent or stored.
    fn work(&mut self, length: Duration) -> anyhow::Result<Worked>;
}

/// Clocks of a run.
pub(super) struct Stopwatch {
    begun: Instant,
    cpu: u64,
}

impl Stopwatch {
    pub(super) fn start() -> Stopwatch {
        Stopwatch { begun: Instant::now(), cpu: clock(ClockId::ThreadCPUTime) }
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Returns the result of the run with its times.
    pub(super) fn stop(&self, worked: Worked) -> Worked {
        let seconds = self.elapsed().as_secs_f64();
        let front_ns = clock(ClockId::ThreadCPUTime).saturating_sub(self.cpu);
        Worked { seconds, front_ns, ..worked }
    }
}

/// Connects to a device. A machine without the mark of a pool hands other memory over, too.
///
/// # Errors
///
/// Returns the system's error.
pub(super) fn frontend(socket: &Path, shape: FrontShape) -> anyhow::Result<Frontend> {
    let mut front = Frontend::new(shape)?;
    if !shape.has_mark {
        front.other_files.push(memfd(MACHINE)?);
    }
    let until = Instant::now() + PATIENCE;
    loop {
        match front.connect(socket) {
            Ok(()) => return Ok(front),
            // The file of a socket exists a moment before the server listens.
            Err(error)
                if error.kind() == ErrorKind::ConnectionRefused && Instant::now() < until =>
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => {
                return Err(error).with_context(|| format!("connecting to {}", socket.display()));
            }
        }
    }
}

/// Publishes the chains of a vring, and notifies the device if it wants that.
pub(super) fn kick(vring: &mut FrontVring, worked: &mut Worked) {
    if vring.driver.publish() {
        worked.kicks += 1;
        // A counter that is full has its notification.
        let _ = rustix::io::write(&vring.kick, &1_u64.to_ne_bytes());
    }
}

/// Waits for a notification of one of the vrings, which may have come before.
///
/// # Errors
///
/// Returns an error if none comes within [`PATIENCE`].
pub(super) fn wait(vrings: &[&FrontVring], worked: &mut Worked) -> anyhow::Result<()> {
    let mut fds: Vec<_> =
        vrings.iter().map(|vring| PollFd::new(&vring.call, PollFlags::IN)).collect();
    ensure!(
        wait_any(&mut fds, Some(Instant::now() + PATIENCE))? > 0,
        "no answer within {PATIENCE:?}"
    );
    for vring in vrings {
        let mut count = [0; 8];
        match rustix::io::read(&vring.call, &mut count) {
            Ok(_) => worked.calls += u64::from_ne_bytes(count),
            Err(Errno::AGAIN) => {}
            Err(errno) => return Err(errno).context("reading the notifications"),
        }
    }
    Ok(())
}

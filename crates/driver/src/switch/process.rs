//! Process of a switch's driver domain: configuration, sandbox, threads, end.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ringfence_hostnet::log;
use ringfence_memory::UringPool;
use ringfence_net::vif::backend::QUEUES_MAX;
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::local::hub::{Hub, HubLimits};
use ringfence_platform::{DomId, Platform};
use ringfence_sandbox::channel::{Channel, expect_fds};
use ringfence_sandbox::isolation::Isolation;
use ringfence_sandbox::limits::raise_descriptor_limit;
use ringfence_sandbox::{DomainKind, STATUS_FAILED};
use ringfence_switch::forwarding::{Fabric, Switch};
use ringfence_sys::pressure::PressureMonitor;
use ringfence_sys::signals::ignore_file_size_signal;

use super::admission::Admission;
use super::domain::{Parts, SwitchDomain};
use super::error::DriverError;
use super::nodes;
use crate::domain::Control;
use crate::switchboard::{DriverConfig, DriverReport, FromDriver};
use crate::vbds::rings;
use crate::workers::{EndedPorts, worker_count};

/// Time limit for storage operations in flight at the end.
const TEARDOWN_WITHIN: Duration = Duration::from_secs(5);

/// Main function of a driver domain's inner process. Returns the exit status.
pub fn main() -> u8 {
    inner(|| Ok(()))
}

/// Runs a driver domain, as [`main`] does, for tests of a compromised one. `hook` runs on its own
/// thread from the moment when the sandbox is closed and the hub runs.
#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub fn main_taken_over(hook: impl FnOnce() + Send + 'static) -> u8 {
    inner(|| thread("test hook", hook))
}

/// Runs the process; calls `locked` once the sandbox is closed.
fn inner(locked: impl FnOnce() -> io::Result<()>) -> u8 {
    Channel::serve_stdin(
        |channel| run(channel, locked).map(|()| 0),
        |error| {
            // Standard error reaches the user even if the launcher does not read the report.
            eprintln!("ringfence: driver domain: {error}");
            (STATUS_FAILED, DriverReport::Failed(error.to_string()))
        },
    )
}

fn run(channel: &Channel, locked: impl FnOnce() -> io::Result<()>) -> Result<(), DriverError> {
    let (config, fds) = channel.receive::<DriverConfig>()?;
    let [listener, namespace] = expect_fds(fds)?;
    let admission = Admission::new(channel, &namespace)?;
    drop(namespace);
    // Its files cannot be opened in the sandbox.
    let pressure = PressureMonitor::open();
    let mut expected = vec![channel.as_fd().as_raw_fd(), listener.as_raw_fd()];
    expected.extend(pressure.descriptors());
    raise_descriptor_limit()?;
    ignore_file_size_signal();
    let isolation = Isolation::enter(DomainKind::Driver, &expected)?;
    log::to_stderr(config.verbose);
    if let Some(why) = pressure.errors() {
        tracing::debug!("{why}");
    }
    let rings = rings(usize::from(config.rings));
    isolation.lock()?;
    let control = start(&config, admission, listener, rings, pressure)?;
    locked()?;
    channel.send(&DriverReport::Ready, &[])?;
    serve(control)
}

/// Serves a switch in this process without a sandbox, for measurements. `prepare` may add ports
/// before the first guest attaches.
#[cfg(any(test, feature = "test-utils"))]
pub fn serve_unconfined(
    config: &DriverConfig,
    listener: OwnedFd,
    prepare: impl FnOnce(&ringfence_switch::dataplane::DataplaneHandle) -> io::Result<()>,
) -> Result<(), DriverError> {
    let rings = rings(usize::from(config.rings));
    let pressure = PressureMonitor::without_triggers();
    let control = start(config, Admission::own()?, listener, rings, pressure)?;
    prepare(&control.backends.domain.dataplane)?;
    serve(control)
}

/// Starts the threads of a driver domain that serves no guest yet.
pub(super) fn start(
    config: &DriverConfig,
    admission: Admission,
    listener: OwnedFd,
    rings: UringPool,
    pressure: PressureMonitor,
) -> Result<Control<LocalPlatform, SwitchDomain>, DriverError> {
    rustix::io::ioctl_fionbio(&listener, true).map_err(io::Error::from)?;
    let (hub_thread, hub) = Hub::new(HubLimits::default())?;
    thread("hub", move || {
        if let Err(error) = hub_thread.run() {
            tracing::error!(%error, "the hub ended");
        }
    })?;
    let (_, connection) = hub.admit(Some(DomId(0)), true)?;
    let platform = Arc::new(LocalPlatform::connect(connection)?);
    let mut store = platform.store()?;
    nodes::create_names(&mut store)?;
    let ended = EndedPorts::new()?;
    let fabric = || Fabric::Switch(Switch::new());
    let dataplane = ended.start_workers(worker_count(QUEUES_MAX), fabric, platform.counters())?;
    let parts = Parts { listener, hub, dataplane, admission, rings };
    let domain = SwitchDomain::new(&config.switch, parts);
    let mut control = Control::new(domain, platform, store, ended, pressure)?;
    control.devices.watch_releases(&mut control.store)?;
    Ok(control)
}

/// Serves until the last guest has left. Then ends all threads.
pub(super) fn serve(mut control: Control<LocalPlatform, SwitchDomain>) -> Result<(), DriverError> {
    let served = control.run();
    let domain = &control.backends.domain;
    domain.broadcast(&FromDriver::Bye("the last guest has left".to_owned()));
    domain.dataplane.stop();
    if !control.backends.vbds.teardown.wait_until_done(TEARDOWN_WITHIN) {
        tracing::warn!("requests of disks were still under way at the end");
    }
    domain.hub.stop();
    served
}

fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(run).map(drop)
}

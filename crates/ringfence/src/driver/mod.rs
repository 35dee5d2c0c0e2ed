//! Driver domain of a switch: hub, workers and control thread.
//!
//! | thread | work |
//! |---|---|
//! | hub | stands for the hypervisor and xenstored |
//! | workers (`dataplane`) | poll ports and move frames |
//! | control (main thread) | toolstack: serves launchers, follows the xenbus state of each device |
//!
//! The process starts with one thread. It receives its configuration and the listening socket,
//! enters the sandbox and starts the other threads. Only then it reads from launchers and guests.
//! It ends when the last guest has left.
//!
//! The control thread serves all launchers and must not block on one. A connection that does not
//! read its messages is closed. Disks are torn down on other threads ([`Disposal`]), and
//! [`ringfence_sys::descriptors`] closes descriptors of messages.
//!
//! [`Disposal`]: ringfence_sys::descriptors::Disposal

pub mod addresses;
mod admission;
mod device;
mod disks;
mod guests;
mod lease;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringfence_net::vif::backend::QUEUES_MAX;
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};
use ringfence_platform::{DomId, Platform, PlatformError};
use ringfence_switch::dataplane::DataplaneHandle;
use ringfence_switch::forwarding::{Fabric, Switch};
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenstore::{StoreAccess, StoreClient};
use rustix::event::{PollFd, PollFlags};

use admission::Admission;
use guests::Guests;
use ringfence_driver::switchboard::{DriverConfig, DriverReport, FromDriver};
use ringfence_driver::workers::{EndedPorts, worker_count};
use ringfence_sandbox::channel::{Channel, ChannelError, expect_fds};
use ringfence_sandbox::isolation::{Isolation, SandboxError};
use ringfence_sandbox::{DomainKind, STATUS_FAILED};
use ringfence_sys::poll::wait_any;

/// Time limit for the first guest. Also limits the delay of the end by connections that arrive
/// after the last guest has left.
const GUEST_WITHIN: Duration = Duration::from_secs(10);
/// Time limit for storage operations in flight at the end.
const TEARDOWN_WITHIN: Duration = Duration::from_secs(5);
/// Time from the first guest until the code that only starts a driver domain is unmapped.
const SETTLES_WITHIN: Duration = Duration::from_secs(1);
/// Store directory of the guests' names.
pub const NAMES_ROOT: &str = "/ringfence/names";

/// Errors that end a driver domain.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The configuration did not arrive or is malformed.
    #[error("orders: {0}")]
    Channel(#[from] ChannelError),
    /// The sandbox could not be entered.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The hub or the platform failed.
    #[error(transparent)]
    Platform(#[from] PlatformError),
    /// A store operation failed.
    #[error("store: {0}")]
    Store(#[from] ringfence_xenstore::StoreError),
    /// A system call failed.
    #[error(transparent)]
    System(#[from] io::Error),
}

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
    let expected = [channel.as_fd().as_raw_fd(), listener.as_raw_fd()];
    ringfence_sandbox::limits::raise_descriptor_limit()?;
    let isolation = Isolation::enter(DomainKind::Driver, &expected)?;
    ringfence_hostnet::log::to_stderr(config.verbose);
    isolation.lock()?;
    let mut driver = Driver::start(&config, admission, listener)?;
    locked()?;
    channel.send(&DriverReport::Ready, &[])?;
    driver.serve()
}

/// Serves a switch in this process without a sandbox, for measurements. `prepare` may add ports
/// before the first guest attaches.
#[cfg(any(test, feature = "test-utils"))]
pub fn serve_unconfined(
    config: &DriverConfig,
    listener: OwnedFd,
    prepare: impl FnOnce(&DataplaneHandle) -> io::Result<()>,
) -> Result<(), DriverError> {
    let mut driver = Driver::start(config, Admission::own()?, listener)?;
    prepare(&driver.dataplane)?;
    driver.serve()
}

struct Driver {
    listener: OwnedFd,
    hub: HubHandle,
    platform: Arc<LocalPlatform>,
    store: StoreClient,
    dataplane: DataplaneHandle,
    gone: EndedPorts,
    guests: Guests,
}

impl Driver {
    fn start(
        config: &DriverConfig,
        admission: Admission,
        listener: OwnedFd,
    ) -> Result<Driver, DriverError> {
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
        store.mkdir(NAMES_ROOT)?;
        guests::open_names(&mut store)?;
        store.watch("@releaseDomain", "release")?;
        let gone = EndedPorts::new()?;
        let fabric = || Fabric::Switch(Switch::new());
        let dataplane =
            gone.start_workers(worker_count(QUEUES_MAX), fabric, platform.counters())?;
        let guests = Guests::new(&config.switch, admission)?;
        Ok(Driver { listener, hub, platform, store, dataplane, gone, guests })
    }

    /// Serves until the last guest has left.
    fn serve(&mut self) -> Result<(), DriverError> {
        let mut end = Some(Instant::now() + GUEST_WITHIN);
        let mut had_guests = false;
        let mut settles = None;
        let mut more = false;
        loop {
            let next = [end, settles, self.guests.next_timeout()];
            let until = next.into_iter().flatten().min();
            let controls = self.wait(if more { Some(Instant::now()) } else { until })?;
            self.accept();
            self.serve_launchers();
            self.retire_ended_ports();
            self.update_disks();
            more = self.serve_controls(&controls);
            // Last, because the other steps may read store events while they wait for answers.
            more |= self.follow_store()?;
            if self.guests.any_attached() {
                if !had_guests {
                    settles = Some(Instant::now() + SETTLES_WITHIN);
                }
                if settles.take_if(|at| *at <= Instant::now()).is_some() {
                    ringfence_sys::code::unmap();
                }
                (had_guests, end) = (true, None);
                continue;
            }
            settles = None;
            // A launcher may have connected meanwhile.
            self.accept();
            let now = Instant::now();
            let end = *end.get_or_insert_with(|| now + GUEST_WITHIN);
            if now >= end || (had_guests && !self.guests.any_newcomer(now)) {
                return Ok(());
            }
        }
    }

    /// Blocks until there is work. Returns the devices whose control rings have requests.
    fn wait(&mut self, until: Option<Instant>) -> io::Result<Vec<DeviceId>> {
        let mut fds = vec![
            PollFd::new(&self.listener, PollFlags::IN),
            PollFd::from_borrowed_fd(self.store.fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.gone.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.guests.disk_wake().as_fd(), PollFlags::IN),
        ];
        fds.extend(self.guests.channels().map(|channel| PollFd::new(channel, PollFlags::IN)));
        let first = fds.len();
        let (devices, controls): (Vec<_>, Vec<_>) = self.guests.controls().unzip();
        fds.extend(controls.into_iter().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        wait_any(&mut fds, until)?;
        let ready = devices.into_iter().zip(&fds[first..]);
        Ok(ready.filter(|(_, fd)| !fd.revents().is_empty()).map(|(device, _)| device).collect())
    }

    /// Serves one round for each of these control rings. Returns `true` if work is left.
    fn serve_controls(&mut self, devices: &[DeviceId]) -> bool {
        let (guests, mut scope) = self.guests_and_scope();
        guests.serve_controls(devices, &mut scope)
    }

    /// Splits the domain into its guests and the resources that operations on guests use.
    fn guests_and_scope(&mut self) -> (&mut Guests, guests::Scope<'_>) {
        let scope = guests::Scope {
            hub: &self.hub,
            platform: &self.platform,
            store: &mut self.store,
            dataplane: &self.dataplane,
        };
        (&mut self.guests, scope)
    }

    // #syscall driver accept4: launchers connect
    // #syscall driver getsockopt 1=SOL_SOCKET: the user of a connection
    fn accept(&mut self) {
        use rustix::net::SocketFlags;
        while let Ok(socket) = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC) {
            self.guests.accept(Channel::from_fd(socket));
        }
    }

    fn serve_launchers(&mut self) {
        let (guests, mut scope) = self.guests_and_scope();
        guests.serve_connections(&mut scope);
    }

    fn retire_ended_ports(&mut self) {
        self.gone.clear();
        while let Some(gone) = self.gone.next() {
            let (guests, mut scope) = self.guests_and_scope();
            guests.port_gone(gone, &mut scope);
        }
    }

    /// Updates the disks if one of them has raised the event.
    fn update_disks(&mut self) {
        if !self.guests.disk_wake().clear() {
            return;
        }
        let (guests, mut scope) = self.guests_and_scope();
        guests.look_at_disks(&mut scope);
    }

    /// Handles store events. Returns `true` if more may wait: events that were read already raise
    /// no poll.
    fn follow_store(&mut self) -> Result<bool, DriverError> {
        // Bounded, so that a guest that keeps writing does not delay others.
        for _ in 0..64 {
            let Some(event) = self.store.next_event()? else { return Ok(false) };
            let (guests, mut scope) = self.guests_and_scope();
            guests.store_changed(&event.token, &mut scope);
        }
        Ok(true)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.guests.broadcast(&FromDriver::Bye("the last guest has left".to_owned()));
        self.dataplane.stop();
        if !self.guests.wait_for_disks(TEARDOWN_WITHIN) {
            tracing::warn!("requests of disks were still under way at the end");
        }
        self.hub.stop();
    }
}

fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(run).map(drop)
}

//! The driver domain of a switch.
//!
//! # Theory of operation
//!
//! Three worker_count. The *hub* stands for the hypervisor and xenstored. The *data plane* polls the
//! ports and moves frames. The *control* thread, this one, is the toolstack (it makes and removes
//! devices for launchers) and follows the xenbus state of every device.
//!
//! It begins with one thread, gets its orders and the listening socket, enters the sandbox, starts
//! the other two and only then hears launchers and guests. It ends when the last guest has left.
//!
//! The control thread serves all launchers, so it waits for none of them: what a connection does not
//! read in time costs it the connection, disks are torn down on other worker_count ([`Disposal`]), and what comes
//! with a message is closed by [`ringfence_sys::descriptors`].

pub mod addresses;
mod admission;
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

use crate::switchboard::{DriverConfig, DriverReport, FromDriver};
use crate::workers::{EndedPorts, worker_count};
use admission::Admission;
use guests::Guests;
use ringfence_sandbox::channel::{Channel, ChannelError, expect_fds};
use ringfence_sandbox::isolation::{Isolation, SandboxError};
use ringfence_sandbox::{DomainKind, STATUS_FAILED};
use ringfence_sys::poll::wait_any;

/// How long the first guest may take to come, and how long after the last one has left a
/// connection that comes in may delay the end.
const GUEST_WITHIN: Duration = Duration::from_secs(10);
/// How long the end may wait for requests that disks have under way.
const TEARDOWN_WITHIN: Duration = Duration::from_secs(5);
/// Where names are.
pub const NAMES_ROOT: &str = "/ringfence/names";

/// Why a driver domain ends before its time.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// Orders did not come, or not as they should.
    #[error("orders: {0}")]
    Channel(#[from] ChannelError),
    /// The sandbox did not close.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The hub or the store failed.
    #[error(transparent)]
    Platform(#[from] PlatformError),
    /// The store failed.
    #[error("store: {0}")]
    Store(#[from] ringfence_xenstore::StoreError),
    /// The system refused.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// The inner process of a driver domain. Returns its exit status.
pub fn main() -> u8 {
    inner(None)
}

/// As [`main`], for tests that play a driver domain which was taken over: `deed` is done on a
/// thread of its own as soon as the sandbox is closed and the hub runs, while guests are served.
#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub fn main_taken_over(deed: impl FnOnce() + Send + 'static) -> u8 {
    inner(Some(Box::new(deed)))
}

/// What is done besides the work of a domain, in tests.
type Deed = Box<dyn FnOnce() + Send>;

fn inner(deed: Option<Deed>) -> u8 {
    Channel::serve_stdin(
        |channel| live(channel, deed).map(|()| 0),
        |error| {
            // If nobody hears the report, standard error still does.
            eprintln!("ringfence: driver domain: {error}");
            (STATUS_FAILED, DriverReport::Failed(error.to_string()))
        },
    )
}

fn live(channel: &Channel, deed: Option<Deed>) -> Result<(), DriverError> {
    let (config, fds) = channel.receive::<DriverConfig>()?;
    let [listener, namespace] = expect_fds(fds)?;
    let admission = Admission::new(channel, &namespace)?;
    drop(namespace);
    let expected = [channel.as_fd().as_raw_fd(), listener.as_raw_fd()];
    raise_descriptor_limit()?;
    let isolation = Isolation::enter(DomainKind::Driver, &expected)?;
    crate::log::to_stderr(config.verbose);
    isolation.lock()?;
    let mut driver = Driver::start(&config, admission, listener)?;
    if let Some(deed) = deed {
        thread("deed", deed)?;
    }
    channel.send(&DriverReport::Ready, &[])?;
    driver.serve()
}

/// Serves a switch in this process as it is, without a sandbox: for measuring. `prepare` may add
/// ports before the first guest comes.
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

/// Allows as many descriptors as the system lets us: each guest makes the hub hold some, within
/// its quotas, and one guest must not use up what the others need. Returns how many that is.
pub(crate) fn raise_descriptor_limit() -> io::Result<usize> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
    Ok(maximum.and_then(|maximum| maximum.try_into().ok()).unwrap_or(usize::MAX))
}

/// A running driver domain.
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
        let mut more = false;
        loop {
            let next = [end, self.guests.next_timeout()];
            let until = next.into_iter().flatten().min();
            let controls = self.wait(if more { Some(Instant::now()) } else { until })?;
            self.accept();
            self.hear_launchers();
            self.bury_ports();
            self.ring_disks();
            more = self.serve_controls(&controls);
            // Last: any of the others may have come across events while it asked the store.
            more |= self.follow_store()?;
            if self.guests.any_attached() {
                (had_guests, end) = (true, None);
                continue;
            }
            // Somebody may have come in just now.
            self.accept();
            let now = Instant::now();
            let end = *end.get_or_insert_with(|| now + GUEST_WITHIN);
            if now >= end || (had_guests && !self.guests.any_newcomer(now)) {
                return Ok(());
            }
        }
    }

    /// Waits for work. Returns the devices whose control rings have some.
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

    /// One turn for each of these control rings; true if there is more to do.
    fn serve_controls(&mut self, devices: &[DeviceId]) -> bool {
        let mut scope = guests::Scope {
            hub: &self.hub,
            platform: &self.platform,
            store: &mut self.store,
            dataplane: &self.dataplane,
        };
        self.guests.serve_controls(devices, &mut scope)
    }

    // #syscall driver accept4: launchers connect
    // #syscall driver getsockopt 1=SOL_SOCKET: the user of a connection
    fn accept(&mut self) {
        use rustix::net::SocketFlags;
        while let Ok(socket) = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC) {
            self.guests.come(Channel::from_fd(socket));
        }
    }

    fn hear_launchers(&mut self) {
        let mut scope = guests::Scope {
            hub: &self.hub,
            platform: &self.platform,
            store: &mut self.store,
            dataplane: &self.dataplane,
        };
        self.guests.hear(&mut scope);
    }

    fn bury_ports(&mut self) {
        self.gone.clear();
        while let Some(gone) = self.gone.next() {
            let mut scope = guests::Scope {
                hub: &self.hub,
                platform: &self.platform,
                store: &mut self.store,
                dataplane: &self.dataplane,
            };
            self.guests.port_gone(gone, &mut scope);
        }
    }

    /// Looks at the disks of which one asked for it.
    fn ring_disks(&mut self) {
        if !self.guests.disk_wake().clear() {
            return;
        }
        let mut scope = guests::Scope {
            hub: &self.hub,
            platform: &self.platform,
            store: &mut self.store,
            dataplane: &self.dataplane,
        };
        self.guests.look_at_disks(&mut scope);
    }

    /// True if more events may wait, of which no poll tells: they were read already.
    fn follow_store(&mut self) -> Result<bool, DriverError> {
        // Bounded: a guest that keeps writing has its turn again after the others.
        for _ in 0..64 {
            let Some(event) = self.store.next_event()? else { return Ok(false) };
            let mut scope = guests::Scope {
                hub: &self.hub,
                platform: &self.platform,
                store: &mut self.store,
                dataplane: &self.dataplane,
            };
            self.guests.store_changed(&event.token, &mut scope);
        }
        Ok(true)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.guests.say_to_all(&FromDriver::Bye("the last guest has left".to_owned()));
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

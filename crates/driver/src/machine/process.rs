//! Disk process: configuration, sandbox, and the loop that serves hypervisors.

// #syscall disk ppoll: waiting for hypervisors, the storage and the session

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringfence_block::storage::Disk;
use ringfence_block::vhost_user::{DiskOptions, VhostUserDisk};
use ringfence_memory::UringPool;
use ringfence_nbd::client::Dialer;
use ringfence_sandbox::DomainKind;
use ringfence_sandbox::channel::{Channel, ChannelError, expect_fds};
use ringfence_sys::event_signal::EventSignal;
use ringfence_sys::mailbox::WakeFd;
use ringfence_sys::pace::Spin;
use ringfence_sys::poll::wait_any;
use ringfence_sys::signals::ignore_file_size_signal;
use ringfence_vhost_user::clients::Clients;
use rustix::event::{PollFd, PollFlags};

use super::{DiskConfig, FromDisk, LOG_FILES, ToDisk};
use crate::device_process::{ProcessError, enter_sandbox, serve_session};
use crate::switch::media;
use crate::switchboard::Medium;
use crate::vbds::rings;

/// Maximum time to poll after the last work, where other processors can produce work meanwhile.
const SPIN_MAX: Duration = Duration::from_micros(50);

/// Main function of a disk process. Returns the exit status.
pub fn main() -> u8 {
    inner(|| Ok(()))
}

/// Runs a disk process, as [`main`] does, for tests of a compromised one. `hook` runs on its own thread once the sandbox
/// is closed.
#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub fn main_taken_over(hook: impl FnOnce() + Send + 'static) -> u8 {
    inner(|| std::thread::Builder::new().spawn(hook).map(drop))
}

fn inner(locked: impl FnOnce() -> io::Result<()>) -> u8 {
    serve_session("disk", |channel| run(channel, locked), FromDisk::Failed)
}

fn run(channel: &Channel, locked: impl FnOnce() -> io::Result<()>) -> Result<(), ProcessError> {
    let (config, fds) = channel.receive::<DiskConfig>()?;
    let fds = fds.into_vec();
    ignore_file_size_signal();
    let isolation = enter_sandbox(DomainKind::Disk, channel, &fds, config.verbose)?;
    // The closed sandbox denies the file that this needs.
    let signal = EventSignal::new().map_err(io::Error::from)?;
    // One more for the disk that takes over after a change of the size.
    let rings = Arc::new(rings(2 * usize::from(matches!(config.medium, Medium::File { .. }))));
    isolation.lock()?;
    locked()?;
    let mut server = DiskServer::new(config, fds, signal, &rings, channel)?;
    channel.send(&FromDisk::Ready, &[])?;
    server.serve()
}

/// Disk, and the session's channel.
struct DiskServer<'a> {
    disk: VhostUserDisk,
    /// Storage of the disk, as it is or is about to be served.
    storage: Arc<dyn Disk>,
    channel: &'a Channel,
    dialer: Option<Arc<Dialer>>,
    /// Raised when a connection is wanted.
    wanted: WakeFd,
    /// Files for in-flight logs that were requested.
    requested: usize,
}

impl DiskServer<'_> {
    fn new<'a>(
        config: DiskConfig,
        fds: Vec<OwnedFd>,
        signal: EventSignal,
        rings: &Arc<UringPool>,
        channel: &'a Channel,
    ) -> Result<DiskServer<'a>, ProcessError> {
        let mut fds = fds.into_iter();
        let few = || ProcessError::System(io::ErrorKind::InvalidInput.into());
        let listener = fds.next().ok_or_else(few)?;
        let logs: Vec<_> = fds.by_ref().take(LOG_FILES).collect();
        let wanted = WakeFd::new()?;
        let waker = wanted.clone();
        let wake = Arc::new(move || waker.wake());
        let (storage, dialer) = media::open_storage(&config.medium, fds.collect(), wake, rings)
            .map_err(ProcessError::Storage)?;
        let reports = channel.try_clone()?;
        let report: ringfence_vhost_user::Reporter =
            Box::new(move |state| reports.send_or_drop(&FromDisk::Machine(state.into())));
        let options = DiskOptions { pool: config.pool, report: Some(report), signal: Some(signal) };
        let clients = Clients::Listener { socket: listener, one_off: false };
        let mut disk = VhostUserDisk::new(clients, &*storage, options)?;
        logs.into_iter().for_each(|log| disk.add_log_file(log));
        Ok(DiskServer { disk, storage, channel, dialer, wanted, requested: 0 })
    }

    /// Serves until the session ends.
    fn serve(&mut self) -> Result<(), ProcessError> {
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        let mut spin = Spin::new(if processors == 1 { Duration::ZERO } else { SPIN_MAX });
        let (mut last_work, mut slept) = (Instant::now(), None);
        loop {
            let worked = self.disk.round()?;
            let now = Instant::now();
            if worked {
                if let Some(length) = slept.take() {
                    spin.slept(length);
                }
                last_work = now;
                self.request_log_files();
                self.report_resize()?;
                continue;
            }
            if now.duration_since(last_work) < spin.limit() {
                std::thread::yield_now();
                continue;
            }
            if !self.disk.arm() && !self.sleep()? {
                return Ok(());
            }
            self.disk.clear_events()?;
            slept = Some(now.elapsed());
        }
    }

    /// Blocks until there is work. Returns `false` if the session has ended.
    fn sleep(&mut self) -> Result<bool, ProcessError> {
        let fds = self.disk.wait_fds();
        let mut files: Vec<_> =
            fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        files.push(PollFd::new(self.channel, PollFlags::IN));
        files.push(PollFd::new(&self.wanted, PollFlags::IN));
        wait_any(&mut files, None)?;
        let ready: Vec<_> = files.iter().rev().take(2).map(|f| !f.revents().is_empty()).collect();
        if ready[0] {
            self.wanted.clear();
            if self.dialer.as_ref().is_some_and(|dialer| dialer.is_wanted()) {
                self.channel.send_or_drop(&FromDisk::Dial);
            }
        }
        if !ready[1] {
            return Ok(true);
        }
        match self.channel.try_receive::<ToDisk>() {
            Ok(None) => Ok(true),
            Ok(Some((ToDisk::LogFile, fds))) => {
                let [file] = expect_fds(fds)?;
                self.requested = self.requested.saturating_sub(1);
                self.disk.add_log_file(file);
                Ok(true)
            }
            Ok(Some((ToDisk::Resize { bytes }, _))) => {
                self.resize(bytes)?;
                Ok(true)
            }
            Ok(Some((ToDisk::Dialled { problem }, fds))) => {
                if let Some(dialer) = &self.dialer {
                    dialer.deliver(match (expect_fds(fds), problem) {
                        (Ok([connection]), None) => Ok(connection),
                        (_, problem) => Err(io::Error::other(problem.unwrap_or_default())),
                    });
                }
                Ok(true)
            }
            Err(ChannelError::Closed) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Begins to take the size that the storage has.
    fn resize(&mut self, bytes: u64) -> Result<(), ProcessError> {
        match media::resized(bytes)(&self.storage) {
            Ok(disk) => {
                self.storage = Arc::clone(&disk);
                self.disk.resize(disk);
                Ok(())
            }
            Err(why) => Ok(self.channel.send(&FromDisk::Resized { problem: Some(why) }, &[])?),
        }
    }

    /// Reports the end of a change of the size.
    fn report_resize(&mut self) -> Result<(), ProcessError> {
        let Some(outcome) = self.disk.take_resized() else { return Ok(()) };
        let problem = outcome.err().map(|error| error.to_string());
        Ok(self.channel.send(&FromDisk::Resized { problem }, &[])?)
    }

    /// Requests files for in-flight logs in place of those that clients got.
    fn request_log_files(&mut self) {
        while self.disk.log_files() + self.requested < LOG_FILES {
            if self.channel.send_now(&FromDisk::LogFile, &[]).is_err() {
                return;
            }
            self.requested += 1;
        }
    }
}

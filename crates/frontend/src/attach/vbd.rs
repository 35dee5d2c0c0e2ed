//! Disk of `ringfence attach`: [`VbdFrontend`](ringfence_block::vbd::frontend::VbdFrontend) with an NBD export.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Instant;

use ringfence_block::blkfront::BlkfrontOptions;
use ringfence_block::vbd::frontend::FrontendError;
use ringfence_hostnet::socket_file::listen_at;
use ringfence_platform::Platform;
use ringfence_sandbox::isolation::{Confinement, Sockets};
use ringfence_sandbox::signals::Signals;
use ringfence_sys::descriptors::refuse_descriptors;
use ringfence_sys::pressure::PressureMonitor;
use rustix::event::{PollFd, PollFlags};
use rustix::net::SocketType;
use rustix::thread::CapabilitySet;

use super::claim::{self, Wanted};
use super::{
    AttachArgs, AttachError, CLOSE_TIMEOUT, ConnectionLog, is_told_to_end, levels_line,
    own_signals, view, warn_unless,
};
use crate::disks::{self, DiskError, DiskRequest, Disks};

/// Serves the disk `name` at `socket` until a signal arrives.
pub(super) fn attach<P: Platform>(
    platform: &P,
    args: &AttachArgs,
    name: &str,
    socket: &Path,
) -> Result<(), AttachError> {
    let signals = own_signals()?;
    let mut store = platform.store()?;
    let wanted = Wanted::Disk(name.to_owned());
    let claimed = claim::claim(&mut store, platform.domid(), &wanted)?;
    let fail = |source| AttachError::Socket { path: socket.to_owned(), source };
    let (listener, file) = listen_at(socket, SocketType::STREAM).map_err(fail)?;
    refuse_descriptors(&listener).map_err(|errno| fail(errno.into()))?;
    // Its files cannot be opened any more once the view of the file system is fixed.
    let monitor = PressureMonitor::open();
    // The socket's directory is not in the view, since others' files are there. So the file stays at the end, unless the
    // process may not mount.
    let confinement = Confinement::enter(CapabilitySet::empty(), &view(), Sockets::NONE)?;
    let options = BlkfrontOptions {
        queues: args.queues,
        window: if args.windows { disks::WINDOW } else { 0 },
        ..BlkfrontOptions::default()
    };
    let backend = Some(claimed.backend.clone());
    let request = DiskRequest { device: claimed.device, backend, options, socket: listener };
    let mut disks = Disks::new(platform, vec![request])?;
    claim::reset(&mut store, &claimed.device, &claimed.backend)?;
    disks.start(platform)?;
    confinement.lock()?;
    eprintln!("ringfence: {name} is at nbd+unix:///?socket={}", file.path().display());
    let served = serve(platform, &mut disks, &signals, name, monitor);
    let left = disks.close().map_err(AttachError::from);
    // A backend unmaps the pages only after this end has closed the device.
    let until = Instant::now() + CLOSE_TIMEOUT;
    warn_unless(claim::await_backend_closed(&mut store, &claimed.backend, until)?);
    served.and(left)
}

/// Connects to backends, and reconnects, until a signal arrives or the disk fails.
fn serve<P: Platform>(
    platform: &P,
    disks: &mut Disks<P>,
    signals: &Signals,
    name: &str,
    mut monitor: PressureMonitor,
) -> Result<(), AttachError> {
    let mut connection = ConnectionLog::default();
    loop {
        let more = disks.look(platform).map_err(|error| match error {
            DiskError::Frontend(error @ FrontendError::Lend(_)) => {
                AttachError::NoPages(error.into())
            }
            other => other.into(),
        })?;
        connection.record(name, disks.are_connected());
        let mut fds = vec![PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN)];
        fds.extend(disks.wait_fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let (_, share) = monitor.wait(fds, more.then(Instant::now))?;
        if let Some(share) = share {
            disks.set_share(share);
        }
        let say_levels = || {
            for disk in disks.connected_once() {
                let levels = levels_line(disk.window_levels().map(Into::into));
                eprintln!("ringfence: {name}: lent pages {}, {levels}", disk.lent_pages());
            }
        };
        if is_told_to_end(signals, say_levels)? {
            return Ok(());
        }
    }
}

//! The data-plane thread of a process, and the ports it gives up.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use ringfence_net::dataplane::{Dataplane, DataplaneConfig, DataplaneHandle, PortGone};
use ringfence_net::switch::Fabric;
use ringfence_platform::Counters;
use rustix::event::EventfdFlags;

/// A running data plane.
pub(crate) struct Plane {
    /// To add and remove ports.
    pub(crate) handle: DataplaneHandle,
    /// Ports that it gave up.
    pub(crate) gone: Receiver<PortGone>,
    /// Readable when there are some.
    pub(crate) gone_wake: Arc<OwnedFd>,
}

/// Starts the thread.
pub(crate) fn start(fabric: Fabric, counters: Arc<Counters>) -> io::Result<Plane> {
    let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let gone_wake = Arc::new(wake);
    let (tell, gone) = channel();
    let ring = Arc::clone(&gone_wake);
    let on_gone = move |port: PortGone| {
        // Nobody listens any more only when the whole process ends.
        let _ = tell.send(port);
        let _ = rustix::io::write(&*ring, &1u64.to_ne_bytes());
    };
    let (dataplane, handle) =
        Dataplane::new(fabric, DataplaneConfig::default(), counters, on_gone)?;
    std::thread::Builder::new().name("dataplane".to_owned()).spawn(move || dataplane.run())?;
    Ok(Plane { handle, gone, gone_wake })
}

//! The data-plane threads of a process, and the ports they give up.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use ringfence_net::dataplane::{Dataplane, DataplaneConfig, DataplaneHandle, PortGone};
use ringfence_net::switch::Fabric;
use ringfence_platform::Counters;
use rustix::event::EventfdFlags;

/// Where the data planes of a process leave the ports that ended themselves.
pub(crate) struct Gone {
    tell: Sender<PortGone>,
    ports: Receiver<PortGone>,
    wake: Arc<OwnedFd>,
}

impl Gone {
    pub(crate) fn new() -> io::Result<Gone> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (tell, ports) = channel();
        Ok(Gone { tell, ports, wake: Arc::new(wake) })
    }

    /// Starts a data plane on a thread of its own.
    pub(crate) fn start_plane(
        &self,
        fabric: Fabric,
        counters: Arc<Counters>,
    ) -> io::Result<DataplaneHandle> {
        let (tell, ring) = (self.tell.clone(), Arc::clone(&self.wake));
        let on_gone = move |port: PortGone| {
            // Nobody listens any more only when the whole process ends.
            let _ = tell.send(port);
            let _ = rustix::io::write(&*ring, &1u64.to_ne_bytes());
        };
        let (dataplane, handle) =
            Dataplane::new(fabric, DataplaneConfig::default(), counters, on_gone)?;
        std::thread::Builder::new().name("dataplane".to_owned()).spawn(move || dataplane.run())?;
        Ok(handle)
    }

    /// The next of the ports that are gone.
    pub(crate) fn next(&self) -> Option<PortGone> {
        self.ports.try_recv().ok()
    }

    /// Takes back the events of [`Gone::as_fd`]; to be called before [`Gone::next`].
    pub(crate) fn clear(&self) {
        // Empty when nothing happened.
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
    }
}

/// Readable when there are some.
impl AsFd for Gone {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

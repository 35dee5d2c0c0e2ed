//! The data-plane threads of a process, and the ports they give up.

// #syscall driver,frontend,daemon eventfd2,read,write: a port is gone

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use ringfence_platform::Counters;
use ringfence_switch::dataplane::{
    Dataplane, DataplaneConfig, DataplaneHandle, PLANES_MAX, PortGone,
};
use ringfence_switch::forwarding::Fabric;
use rustix::event::EventfdFlags;

/// Threads of a data plane whose devices have at most `queues` queues, where nobody says how many: one
/// for each queue, but no more than there are processors.
pub(crate) fn threads(queues: u32) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let queues = usize::try_from(queues).unwrap_or(PLANES_MAX);
    queues.min(processors).clamp(1, PLANES_MAX)
}

/// Where the data planes of a process leave the ports that ended themselves.
pub(crate) struct Gone {
    tell: Sender<PortGone>,
    ports: Receiver<PortGone>,
    /// Taken from there already.
    waiting: VecDeque<PortGone>,
    wake: Arc<OwnedFd>,
}

impl Gone {
    pub(crate) fn new() -> io::Result<Gone> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (tell, ports) = channel();
        Ok(Gone { tell, ports, waiting: VecDeque::new(), wake: Arc::new(wake) })
    }

    /// Starts a data plane of so many threads.
    pub(crate) fn start_plane(
        &self,
        threads: usize,
        fabric: fn() -> Fabric,
        counters: &Arc<Counters>,
    ) -> io::Result<DataplaneHandle> {
        let (tell, ring) = (self.tell.clone(), Arc::clone(&self.wake));
        let on_gone = move |port: PortGone| {
            // Nobody listens any more only when the whole process ends.
            let _ = tell.send(port);
            let _ = rustix::io::write(&*ring, &1u64.to_ne_bytes());
        };
        let config = DataplaneConfig::default();
        let (planes, handle) = Dataplane::several(threads, fabric, config, counters, on_gone)?;
        for (index, plane) in planes.into_iter().enumerate() {
            let name = if index == 0 { "dataplane".into() } else { format!("dataplane-{index}") };
            std::thread::Builder::new().name(name).spawn(move || plane.run())?;
        }
        Ok(handle)
    }

    /// The next of the ports that are gone, with all of its parts: nobody uses any of them any more.
    pub(crate) fn next(&mut self) -> Option<PortGone> {
        self.waiting.extend(self.ports.try_iter());
        let mut gone = self.waiting.pop_front()?;
        gone.gather();
        // Parts that ended themselves meanwhile are here by now.
        self.waiting.extend(self.ports.try_iter());
        for mut part in core::mem::take(&mut self.waiting) {
            if gone.is_of_one_port(&part) {
                gone.ports.append(&mut part.ports);
            } else {
                self.waiting.push_back(part);
            }
        }
        Some(gone)
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

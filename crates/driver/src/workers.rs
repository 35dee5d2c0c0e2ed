//! Worker threads of a process, and the ports that ended on them.
//!
//! [`EndedPorts`] starts workers and receives each port that a worker gave up, for the control thread to
//! retire:
//!
//! ```text
//! worker thread                          control thread
//!   port reports a fault                   poll(EndedPorts::as_fd())
//!   mailbox <- PortGone (the port)         EndedPorts::clear()
//!                                          while let Some(port) = EndedPorts::dequeue() { ... }
//! ```
//!
//! A port of several queues ends in parts, one for each worker that polled a queue of it.
//! [`EndedPorts::dequeue`] returns them together, so no part is in use when it returns.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use ringfence_platform::Counters;
use ringfence_switch::dataplane::{
    DataplaneConfig, DataplaneHandle, DataplaneWorker, PortGone, WORKERS_MAX,
};
use ringfence_switch::forwarding::Fabric;
use ringfence_sys::mailbox::{MailSender, Mailbox, mailbox};
use ringfence_sys::numbers::usize_from;

/// Returns the default number of workers for devices of at most `queues` queues: one for each queue, but no
/// more than there are processors.
pub fn worker_count(queues: u32) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    usize_from(queues).min(processors).clamp(1, WORKERS_MAX)
}

/// Ports that ended by themselves, from all workers of the process.
pub struct EndedPorts {
    sender: MailSender<PortGone>,
    ports: Mailbox<PortGone>,
    /// Parts that [`EndedPorts::dequeue`] has dequeued and not returned yet.
    waiting: VecDeque<PortGone>,
}

impl EndedPorts {
    pub fn new() -> io::Result<EndedPorts> {
        let (sender, ports) = mailbox()?;
        Ok(EndedPorts { sender, ports, waiting: VecDeque::new() })
    }

    /// Starts `threads` workers that share one fabric's ports. Their threads end when the handle stops
    /// them.
    pub fn start_workers(
        &self,
        threads: usize,
        fabric: fn() -> Fabric,
        counters: &Arc<Counters>,
    ) -> io::Result<DataplaneHandle> {
        let sender = self.sender.clone();
        let on_gone = move |port: PortGone| {
            // The receiver is dropped only when the whole process ends.
            let _ = sender.send(port);
        };
        let config = DataplaneConfig::default();
        let (workers, handle) = DataplaneWorker::group(threads, fabric, config, counters, on_gone)?;
        for (index, worker) in workers.into_iter().enumerate() {
            let name = if index == 0 { "dataplane".into() } else { format!("dataplane-{index}") };
            std::thread::Builder::new().name(name).spawn(move || worker.run())?;
        }
        Ok(handle)
    }

    /// Returns the next port that ended, with all of its parts. No worker uses any of them any more.
    pub fn dequeue(&mut self) -> Option<PortGone> {
        self.waiting.extend(self.ports.drain());
        let mut gone = self.waiting.pop_front()?;
        gone.collect_parts();
        // Parts that ended by themselves in the meantime have arrived by now.
        self.waiting.extend(self.ports.drain());
        for mut part in core::mem::take(&mut self.waiting) {
            if gone.is_same_port(&part) {
                gone.ports.append(&mut part.ports);
            } else {
                self.waiting.push_back(part);
            }
        }
        Some(gone)
    }

    /// Clears the event of [`EndedPorts::as_fd`]. Call it before [`EndedPorts::dequeue`].
    pub fn clear(&self) {
        self.ports.clear();
    }
}

/// Readable while a port waits in the mailbox.
impl AsFd for EndedPorts {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ports.as_fd()
    }
}

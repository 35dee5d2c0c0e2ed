//! Wake-ups and mailboxes: how one thread hands something to another that sleeps in `poll`.
//!
//! [`WakeFd`] is an eventfd that makes a sleeping thread's `poll` return. [`Mailbox`] is a queue with a
//! [`WakeFd`]: any number of [`MailSender`]s put items into it, one thread takes them out.
//!
//! ```text
//! sender thread                      receiver thread
//!   MailSender::send(item)             poll(mailbox.as_fd(), ...)
//!     queue.push(item)                 mailbox.clear()
//!     eventfd += 1   ───────────────>  while let Some(item) = mailbox.take() { ... }
//! ```
//!
//! A receiver clears the event before it takes items. An item that arrives in between then raises the
//! event again, so no item is left in the queue of a sleeping thread. Several wake-ups before a `clear`
//! merge into one.
//!
//! The queue has no bound of its own. Senders are threads of the same process; a peer's input must be
//! bounded before it becomes an item.

// #syscall all eventfd2,read,write: one thread wakes another

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryIter, channel};

use rustix::event::{EventfdFlags, eventfd};

/// Eventfd that wakes a thread. Clones refer to the same eventfd.
#[derive(Clone, Debug)]
pub struct WakeFd(Arc<OwnedFd>);

impl WakeFd {
    /// Creates an eventfd that is not raised.
    ///
    /// # Errors
    ///
    /// Those of `eventfd`: the process or the system has too many descriptors.
    pub fn new() -> io::Result<WakeFd> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(WakeFd(Arc::new(fd)))
    }

    /// Raises the event. Never blocks.
    pub fn wake(&self) {
        // The only failure is a counter that is full; the event is raised then.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    /// Clears the event. Returns `true` if it was raised since the last call.
    pub fn clear(&self) -> bool {
        rustix::io::read(&*self.0, &mut [0; 8]).is_ok()
    }
}

impl AsFd for WakeFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Receiving end of a mailbox. Readable (`POLLIN`) while the event is raised.
#[derive(Debug)]
pub struct Mailbox<T> {
    items: Receiver<T>,
    wake: WakeFd,
}

/// Sending end of a mailbox.
#[derive(Debug)]
pub struct MailSender<T> {
    items: Sender<T>,
    wake: WakeFd,
}

/// Creates an empty mailbox.
///
/// # Errors
///
/// Those of [`WakeFd::new`].
pub fn mailbox<T>() -> io::Result<(MailSender<T>, Mailbox<T>)> {
    let wake = WakeFd::new()?;
    let (sender, receiver) = channel();
    Ok((MailSender { items: sender, wake: wake.clone() }, Mailbox { items: receiver, wake }))
}

impl<T> MailSender<T> {
    /// Enqueues an item and wakes the receiver. Returns the item if the receiver is gone.
    ///
    /// # Errors
    ///
    /// The item, which nobody will take.
    pub fn send(&self, item: T) -> Result<(), T> {
        self.items.send(item).map_err(|unsent| unsent.0)?;
        self.wake.wake();
        Ok(())
    }

    /// Returns a handle that wakes the receiver without an item.
    pub fn waker(&self) -> WakeFd {
        self.wake.clone()
    }
}

impl<T> Clone for MailSender<T> {
    fn clone(&self) -> MailSender<T> {
        MailSender { items: self.items.clone(), wake: self.wake.clone() }
    }
}

impl<T> Mailbox<T> {
    /// Dequeues the next item, if there is one. Makes no system call. A receiver calls it until it returns `None` before it
    /// sleeps: the event is not raised again for items that are left.
    pub fn take(&self) -> Option<T> {
        self.items.try_recv().ok()
    }

    /// Iterates over the items that are in the queue now. Makes no system call.
    pub fn drain(&self) -> TryIter<'_, T> {
        self.items.try_iter()
    }

    /// Clears the event. Returns `true` if it was raised since the last call.
    pub fn clear(&self) -> bool {
        self.wake.clear()
    }
}

impl<T> AsFd for Mailbox<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn item_sent_before_clear_is_taken_after_it() {
        let (sender, mailbox) = mailbox().unwrap();
        sender.send(1).unwrap();
        sender.clone().send(2).unwrap();
        assert!(mailbox.clear());
        assert_eq!(mailbox.take(), Some(1));
        assert_eq!(mailbox.drain().collect::<Vec<_>>(), [2]);
        assert!(!mailbox.clear());
    }

    #[test]
    fn item_sent_after_clear_raises_the_event_again() {
        let (sender, mailbox) = mailbox().unwrap();
        sender.send(1).unwrap();
        assert!(mailbox.clear());
        sender.send(2).unwrap();
        assert!(mailbox.clear());
        assert_eq!(mailbox.drain().collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn send_to_a_dropped_mailbox_returns_the_item() {
        let (sender, mailbox) = mailbox().unwrap();
        drop(mailbox);
        assert_eq!(sender.send("item"), Err("item"));
    }

    #[test]
    fn waker_raises_the_event_without_an_item() {
        let (sender, mailbox) = mailbox::<u8>().unwrap();
        sender.waker().wake();
        sender.waker().wake();
        assert!(mailbox.clear());
        assert_eq!(mailbox.take(), None);
    }
}

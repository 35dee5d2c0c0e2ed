//! Grant windows of a frontend: buffers that it issues and revokes without the backend.
//!
//! # Theory of operation
//!
//! Each ring has its own grant window with pages of one kind; the backend can only read those of a TX ring.
//! The frontend makes all of them before its sandbox closes ([`QueueStock`]) and lends them to its ports.
//!
//! For an I/O, the port takes a page, grants it, and then fills it, in this order: granting a revoked page
//! again zeroes it. The most recently used pages are used first and stay granted, so most I/O costs only a
//! look-up.

use std::os::fd::RawFd;

use ringfence_access::window::{RingWindow, SourceLevels, SourcePolicy, WindowStock, mark};
use ringfence_memory::LentSlice;
use ringfence_platform::{DomId, Gref, PageId, Platform, WindowError, WindowName, WindowShape};

use ringfence_frame::port::Fault;

/// Sizes of the grant windows of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowSizes {
    /// Number of pages of each ring's grant window. The maximum is 65,000, since ids have 16 bits.
    pub pages: u32,
    /// Number of table entries: pages that are granted at the same time.
    pub entries: u32,
    /// Rules for pages that enter and leave.
    pub policy: SourcePolicy,
}

impl Default for WindowSizes {
    /// Returns one entry per slot of a ring, and four times as many pages.
    fn default() -> WindowSizes {
        WindowSizes { pages: 1024, entries: 256, policy: SourcePolicy::default() }
    }
}

impl WindowSizes {
    /// Returns the sizes for a number of queues. Many queues get fewer pages each, since the grants of a domain
    /// are limited.
    pub fn for_queues(queues: u32) -> WindowSizes {
        let pages = match queues {
            0..=2 => 1024,
            3..=4 => 512,
            _ => 256,
        };
        WindowSizes { pages, ..WindowSizes::default() }
    }
}

/// Maximum number of pages of a grant window: the ids of pages and header buffers have 16 bits.
const PAGES_MAX: u32 = 65_000;

/// Grant windows of the queues of a frontend that no port uses.
pub(crate) struct QueueStock {
    tx: WindowStock,
    rx: WindowStock,
}

impl QueueStock {
    /// Makes the grant windows of `queues` queues.
    ///
    /// # Errors
    ///
    /// Returns the platform's error if it has no grant windows, or too few.
    pub(crate) fn new(
        platform: &impl Platform,
        backend: DomId,
        queues: u32,
        sizes: WindowSizes,
    ) -> Result<QueueStock, WindowError> {
        let WindowSizes { pages, entries, policy } = sizes;
        let pages = pages.clamp(1, PAGES_MAX);
        let make = |writable, read_only| {
            let shape = WindowShape { writable, read_only, entries };
            WindowStock::new(platform, backend, queues, shape, policy)
        };
        Ok(QueueStock { tx: make(0, pages)?, rx: make(pages, 0)? })
    }

    /// Returns the file descriptors of the unused grant windows, for a sandbox that closes all others.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        [&self.tx, &self.rx].into_iter().flat_map(WindowStock::descriptors).collect()
    }

    /// Takes the grant windows of one queue; `None` if there are none left.
    pub(crate) fn take(&mut self) -> Option<QueueWindows> {
        let (tx, rx) = (self.tx.take()?, self.rx.take()?);
        Some(QueueWindows {
            names: (tx.name()?, rx.name()?),
            pages: Some((WindowPages::new(tx), WindowPages::new(rx))),
        })
    }
}

/// Grant windows of a queue: their names, and their pages until a port takes these.
pub(crate) struct QueueWindows {
    pub(crate) names: (WindowName, WindowName),
    pub(super) pages: Option<(WindowPages, WindowPages)>,
}

/// Grant window of one ring, used by a port.
pub(super) struct WindowPages {
    window: RingWindow,
    /// Reference of each page in use, in the ring's form.
    grefs: Vec<Gref>,
}

impl WindowPages {
    fn new(window: RingWindow) -> WindowPages {
        WindowPages { grefs: vec![mark(Gref(0)); window.pages()], window }
    }

    /// Returns the number of pages, free or not.
    pub(super) fn len(&self) -> usize {
        self.grefs.len()
    }

    /// Returns the number of pages that can be taken.
    #[inline]
    pub(super) fn free(&self) -> usize {
        self.window.available()
    }

    /// Takes a page and grants it. The caller may fill it then.
    #[inline]
    pub(super) fn take(&mut self) -> Option<u16> {
        let (page, gref) = self.window.take()?;
        *self.grefs.get_mut(page.0 as usize)? = gref;
        u16::try_from(page.0).ok()
    }

    /// Ends the I/O of a page.
    #[inline]
    pub(super) fn give_back(&mut self, page: u16) {
        self.window.give_back(PageId(page.into()));
    }

    /// Returns the reference of a page in use.
    #[inline]
    pub(super) fn gref(&self, page: u16) -> Gref {
        self.grefs.get(usize::from(page)).copied().unwrap_or(mark(Gref(0)))
    }

    /// Returns the memory of a page.
    #[inline]
    pub(super) fn memory(&self, page: u16) -> Option<&LentSlice> {
        self.window.memory(PageId(page.into()))
    }

    /// Returns true if the backend holds pages.
    #[inline]
    pub(super) fn has_held_pages(&self) -> bool {
        self.window.has_held_pages()
    }

    /// Reclaims held pages, at most once per interval.
    #[inline]
    pub(super) fn reclaim(&mut self) -> Result<(), Fault> {
        self.window.reclaim().map_err(Fault::misbehaved)
    }

    /// Limits the number of pages.
    pub(super) fn resize(&mut self, most: u32) {
        self.window.resize(most);
    }

    pub(super) fn levels(&mut self) -> SourceLevels {
        self.window.levels()
    }
}

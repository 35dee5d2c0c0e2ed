//! Grant windows of a frontend: buffers that it issues and revokes without the backend.
//!
//! # Theory of operation
//!
//! Each ring has its own grant window with pages of one kind; the backend can only read those of a TX ring.
//! On some platforms a grant window can only be made before the sandbox closes. So the frontend makes all of
//! them at once ([`WindowStock`]) and lends them to its ports. A dropped port returns its windows to the
//! stock, from any thread.
//!
//! For an I/O, the port takes a page, grants it, and then fills it, in this order: granting a revoked page
//! again zeroes it. The most recently used pages are used first and stay granted, so most I/O costs only a
//! look-up.

use std::os::fd::RawFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use ringfence_access::window::{PageSource, SourceLevels, SourcePolicy, mark};
use ringfence_memory::LentSlice;
use ringfence_platform::{
    Access, DomId, Gref, PageId, Platform, WindowError, WindowHandle, WindowShape,
};

use ringfence_frame::port::Fault;

/// Interval of the checks for held pages.
pub(super) const RECLAIM_INTERVAL: Duration = Duration::from_millis(20);

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

/// Number of pages in a new pool.
const READY: u32 = 0;

/// Returned grant window, and its kind.
type Returned = (Access, PageSource);

/// Grant windows of a frontend that no port uses.
pub struct WindowStock {
    tx: Vec<PageSource>,
    rx: Vec<PageSource>,
    returns: Sender<Returned>,
    returned: Receiver<Returned>,
}

impl WindowStock {
    /// Makes the grant windows of `queues` queues.
    ///
    /// # Errors
    ///
    /// Returns the platform's error if it has no grant windows, or too few.
    pub fn new(
        platform: &impl Platform,
        backend: DomId,
        queues: u32,
        sizes: WindowSizes,
    ) -> Result<WindowStock, WindowError> {
        let (returns, returned) = channel();
        let mut stock = WindowStock { tx: Vec::new(), rx: Vec::new(), returns, returned };
        let WindowSizes { pages, entries, policy } = sizes;
        let pages = pages.clamp(1, PAGES_MAX);
        for _ in 0..queues {
            let make = |writable, read_only| {
                let table =
                    platform.window(backend, WindowShape { writable, read_only, entries })?;
                Ok::<_, WindowError>(PageSource::new(table, READY, policy))
            };
            stock.tx.push(make(0, pages)?);
            stock.rx.push(make(pages, 0)?);
        }
        // Lower handles are used first.
        stock.tx.reverse();
        stock.rx.reverse();
        Ok(stock)
    }

    /// Returns the file descriptors of the unused grant windows, for a sandbox that closes all others.
    pub fn descriptors(&self) -> Vec<RawFd> {
        self.tx.iter().chain(&self.rx).flat_map(PageSource::descriptors).collect()
    }

    /// Takes the returned grant windows back and revokes their grants, by force if necessary.
    pub(crate) fn collect(&mut self) {
        for (access, mut source) in self.returned.try_iter() {
            source.reset();
            match access {
                Access::ReadOnly => self.tx.push(source),
                Access::ReadWrite => self.rx.push(source),
            }
        }
    }

    /// Takes the grant windows of one queue; `None` if there are none left.
    pub(crate) fn take(&mut self) -> Option<QueueWindows> {
        self.collect();
        let (tx, rx) = (self.tx.pop()?, self.rx.pop()?);
        let lend = |access, source| WindowPages::new(access, source, self.returns.clone());
        Some(QueueWindows {
            handles: (tx.handle(), rx.handle()),
            pages: Some((lend(Access::ReadOnly, tx), lend(Access::ReadWrite, rx))),
        })
    }
}

/// Grant windows of a queue: their handles, and their pages until a port takes these.
pub(crate) struct QueueWindows {
    pub(crate) handles: (WindowHandle, WindowHandle),
    pub(super) pages: Option<(WindowPages, WindowPages)>,
}

/// Grant window of one ring, used by a port and returned to the stock on drop.
pub(super) struct WindowPages {
    access: Access,
    /// Page source, until it is returned.
    source: Option<PageSource>,
    returns: Sender<Returned>,
    /// Reference of each page in use, in the ring's form.
    grefs: Vec<Gref>,
    /// Time of the next check for held pages.
    reclaim_at: Option<Instant>,
}

impl Drop for WindowPages {
    fn drop(&mut self) {
        if let Some(source) = self.source.take() {
            // Without a stock, the window is dropped.
            let _ = self.returns.send((self.access, source));
        }
    }
}

impl WindowPages {
    fn new(access: Access, source: PageSource, returns: Sender<Returned>) -> WindowPages {
        let grefs = vec![mark(Gref(0)); source.pages()];
        WindowPages { access, source: Some(source), returns, grefs, reclaim_at: None }
    }

    /// Returns the number of pages, free or not.
    pub(super) fn len(&self) -> usize {
        self.grefs.len()
    }

    /// Returns the number of pages that can be taken.
    #[inline]
    pub(super) fn free(&self) -> usize {
        self.source.as_ref().map_or(0, |source| source.available(self.access))
    }

    /// Takes a page and grants it. The caller may fill it then.
    #[inline]
    pub(super) fn take(&mut self) -> Option<u16> {
        let source = self.source.as_mut()?;
        let page = source.take(self.access)?;
        match source.lend(page) {
            Ok(gref) => {
                *self.grefs.get_mut(page.0 as usize)? = mark(gref);
                u16::try_from(page.0).ok()
            }
            Err(_) => {
                source.put(page);
                None
            }
        }
    }

    /// Ends the I/O of a page.
    #[inline]
    pub(super) fn give_back(&mut self, page: u16) {
        if let Some(source) = &mut self.source {
            source.give_back(PageId(page.into()));
        }
    }

    /// Returns the reference of a page in use.
    #[inline]
    pub(super) fn gref(&self, page: u16) -> Gref {
        self.grefs.get(usize::from(page)).copied().unwrap_or(mark(Gref(0)))
    }

    /// Returns the memory of a page.
    #[inline]
    pub(super) fn memory(&self, page: u16) -> Option<&LentSlice> {
        self.source.as_ref()?.memory(PageId(page.into()))
    }

    /// Returns true if the backend holds pages.
    #[inline]
    pub(super) fn has_held_pages(&self) -> bool {
        self.source.as_ref().is_some_and(PageSource::has_held_pages)
    }

    /// Reclaims held pages, at most once per interval.
    #[inline]
    pub(super) fn reclaim(&mut self) -> Result<(), Fault> {
        if self.has_held_pages() { self.reclaim_now() } else { Ok(()) }
    }

    #[cold]
    fn reclaim_now(&mut self) -> Result<(), Fault> {
        let now = Instant::now();
        if self.reclaim_at.is_some_and(|at| now < at) {
            return Ok(());
        }
        self.reclaim_at = Some(now + RECLAIM_INTERVAL);
        self.source.as_mut().map_or(Ok(()), PageSource::reclaim).map_err(Fault::misbehaved)
    }

    /// Limits the number of pages.
    pub(super) fn resize(&mut self, most: u32) {
        if let Some(source) = &mut self.source
            && let Err(error) = source.resize(most)
        {
            tracing::warn!(%error, "pages could not be given back to the system");
        }
    }

    pub(super) fn levels(&mut self) -> SourceLevels {
        self.source.as_mut().map(PageSource::levels).unwrap_or_default()
    }
}

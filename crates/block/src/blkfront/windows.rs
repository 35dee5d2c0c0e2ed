//! Grant windows of a frontend's rings: stock, and pages of requests.
//!
//! Each ring has a window of its own; the backend may write all of its pages. On platforms that lend memory
//! with the help of an operating system, a window can be created only before the sandbox closes. A
//! frontend therefore creates all windows at once ([`WindowStock`]). A connection takes one for each ring.
//! A window returns to the stock when it is dropped, on any thread.

use std::os::fd::RawFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use ringfence_access::window::{HeldTooLong, PageSource, SourceLevels, SourcePolicy, mark};
use ringfence_platform::{Access, DomId, Platform, WindowError, WindowHandle, WindowShape};

use super::pool::Page;

/// Interval of checks for pages that the backend holds for too long.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Grant windows of a frontend that no ring uses.
pub(crate) struct WindowStock {
    free: Vec<PageSource>,
    home: Sender<PageSource>,
    arrivals: Receiver<PageSource>,
}

impl WindowStock {
    /// Creates `rings` windows of `pages` pages each.
    ///
    /// # Errors
    ///
    /// Returns the platform's error if it cannot create `rings` windows.
    pub(crate) fn new(
        platform: &impl Platform,
        backend: DomId,
        rings: u32,
        pages: u32,
    ) -> Result<WindowStock, WindowError> {
        let shape = WindowShape { writable: pages, read_only: 0, entries: pages };
        let window = |_| {
            let table = platform.window(backend, shape)?;
            Ok::<_, WindowError>(PageSource::new(table, 0, SourcePolicy::default()))
        };
        let mut free = (0..rings).map(window).collect::<Result<Vec<_>, _>>()?;
        // Low handles are taken first.
        free.reverse();
        let (home, arrivals) = channel();
        Ok(WindowStock { free, home, arrivals })
    }

    /// Returns the files of all windows in the stock, for a sandbox that closes or refuses all others.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        self.free.iter().flat_map(PageSource::descriptors).collect()
    }

    /// Takes a window for a ring, if one is left.
    pub(crate) fn take(&mut self) -> Option<Window> {
        self.free.extend(self.arrivals.try_iter());
        let source = self.free.pop()?;
        let bound = u32::try_from(source.pages()).unwrap_or(u32::MAX);
        Some(Window { source: Some(source), home: self.home.clone(), bound, check_at: None })
    }
}

/// Grant window of one ring. Dropping it returns it to the stock.
pub(crate) struct Window {
    /// `None` only after the window was returned.
    source: Option<PageSource>,
    home: Sender<PageSource>,
    /// Maximum number of pages.
    bound: u32,
    /// Earliest time of the next check for held pages.
    check_at: Option<Instant>,
}

impl Drop for Window {
    fn drop(&mut self) {
        if let Some(mut source) = self.source.take() {
            // Pages that the backend claims to use are revoked as well.
            source.reset();
            // Without a stock the window is closed.
            let _ = self.home.send(source);
        }
    }
}

impl Window {
    /// Returns the handle that names the window to the backend.
    pub(crate) fn handle(&self) -> Option<WindowHandle> {
        self.source.as_ref().map(PageSource::handle)
    }

    /// Takes a page and issues it. The caller may fill it now.
    pub(super) fn take(&mut self) -> Option<Page> {
        let source = self.source.as_mut()?;
        let page = source.take(Access::ReadWrite)?;
        let Ok(gref) = source.lend(page) else {
            source.put(page);
            return None;
        };
        let memory = source.memory(page)?.clone();
        Some(Page::Windowed { page, gref: mark(gref), memory })
    }

    /// Revokes a page after its request.
    pub(super) fn give_back(&mut self, page: ringfence_platform::PageId) {
        if let Some(source) = &mut self.source {
            source.give_back(page);
        }
    }

    /// Returns `true` if the backend holds pages after their requests.
    pub(super) fn is_troubled(&self) -> bool {
        self.source.as_ref().is_some_and(PageSource::has_held_pages)
    }

    /// Checks pages that the backend holds, at most once in [`CHECK_INTERVAL`].
    pub(super) fn tend(&mut self) -> Result<(), HeldTooLong> {
        let now = Instant::now();
        if !self.is_troubled() || self.check_at.is_some_and(|at| now < at) {
            return Ok(());
        }
        self.check_at = Some(now + CHECK_INTERVAL);
        self.source.as_mut().map_or(Ok(()), PageSource::reclaim)
    }

    /// Sets the maximum number of pages.
    pub(super) fn resize(&mut self, most: u32) {
        self.bound = most;
        if let Some(source) = &mut self.source
            && let Err(error) = source.resize(most)
        {
            tracing::warn!(%error, "pages could not be given back to the system");
        }
    }

    /// Frees all idle pages; they may be taken again.
    pub(super) fn release(&mut self) {
        let bound = self.bound;
        self.resize(0);
        self.resize(bound);
    }

    pub(super) fn levels(&mut self) -> SourceLevels {
        self.source.as_mut().map(PageSource::levels).unwrap_or_default()
    }
}

//! Pages of requests in windows: what a frontend issues and takes back alone.
//!
//! Each ring has a window of its own, all of whose pages the backend may write. Where memory is lent
//! with an operating system's help, a window can only be made before the sandbox closes; so a frontend
//! makes all it may need at once ([`WindowStock`]). A connection has one for each of its rings, and they
//! come home when it is given up, whoever does so.

use std::os::fd::RawFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use ringfence_access::window::{HeldTooLong, PageSource, SourceLevels, SourcePolicy, mark};
use ringfence_platform::{Access, DomId, Platform, WindowError, WindowHandle, WindowShape};

use super::pool::Page;

/// How often to look after a backend that holds on to pages.
const TEND: Duration = Duration::from_millis(20);

/// The windows of a frontend that no ring has.
pub(crate) struct WindowStock {
    free: Vec<PageSource>,
    home: Sender<PageSource>,
    arrivals: Receiver<PageSource>,
}

impl WindowStock {
    /// Makes a window of so many pages for each of so many rings.
    ///
    /// # Errors
    ///
    /// When the platform has none, or not for so many rings.
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
        // Low numbers first.
        free.reverse();
        let (home, arrivals) = channel();
        Ok(WindowStock { free, home, arrivals })
    }

    /// The files of those that no ring has, for a sandbox that closes or refuses all others.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        self.free.iter().flat_map(PageSource::descriptors).collect()
    }

    /// A window for a ring, if there is one left.
    pub(crate) fn take(&mut self) -> Option<Window> {
        self.free.extend(self.arrivals.try_iter());
        let source = self.free.pop()?;
        let bound = u32::try_from(source.pages()).unwrap_or(u32::MAX);
        Some(Window { source: Some(source), home: self.home.clone(), bound, tend_at: None })
    }
}

/// The window of a ring. It goes home when it is dropped.
pub(crate) struct Window {
    /// Until it goes home.
    source: Option<PageSource>,
    home: Sender<PageSource>,
    /// Most pages that it may have.
    bound: u32,
    /// When to look after pages that are held.
    tend_at: Option<Instant>,
}

impl Drop for Window {
    fn drop(&mut self) {
        if let Some(mut source) = self.source.take() {
            // Whatever the backend claims to use: it is not asked.
            source.reset();
            // Nobody is at home: everything is given up with it.
            let _ = self.home.send(source);
        }
    }
}

impl Window {
    /// Its name for the backend.
    pub(crate) fn handle(&self) -> Option<WindowHandle> {
        self.source.as_ref().map(PageSource::handle)
    }

    /// Takes a page and grants it. It may be filled now.
    pub(super) fn take(&mut self) -> Option<Page> {
        let source = self.source.as_mut()?;
        let page = source.take(Access::ReadWrite)?;
        let Ok(gref) = source.lend(page) else {
            source.put(page);
            return None;
        };
        let memory = source.memory(page)?.clone();
        Some(Page::Within { page, gref: mark(gref), memory })
    }

    /// The request for which a page was taken is over.
    pub(super) fn give_back(&mut self, page: ringfence_platform::PageId) {
        if let Some(source) = &mut self.source {
            source.give_back(page);
        }
    }

    /// Whether the backend holds on to pages.
    pub(super) fn is_troubled(&self) -> bool {
        self.source.as_ref().is_some_and(PageSource::has_held_pages)
    }

    /// Looks after pages that the backend holds on to, now and then.
    pub(super) fn tend(&mut self) -> Result<(), HeldTooLong> {
        let now = Instant::now();
        if !self.is_troubled() || self.tend_at.is_some_and(|at| now < at) {
            return Ok(());
        }
        self.tend_at = Some(now + TEND);
        self.source.as_mut().map_or(Ok(()), PageSource::reclaim)
    }

    /// Keeps at most so many pages from now on.
    pub(super) fn resize(&mut self, most: u32) {
        self.bound = most;
        if let Some(source) = &mut self.source
            && let Err(error) = source.resize(most)
        {
            tracing::warn!(%error, "pages could not be given back to the system");
        }
    }

    /// Gives back what is not in use; it may be taken again.
    pub(super) fn release(&mut self) {
        let bound = self.bound;
        self.resize(0);
        self.resize(bound);
    }

    pub(super) fn levels(&mut self) -> SourceLevels {
        self.source.as_mut().map(PageSource::levels).unwrap_or_default()
    }
}

//! Window stock: the grant windows of a frontend's rings.
//!
//! Each ring has a grant window of its own, with pages of one kind. On some platforms a window can be made
//! only before the sandbox closes. So a frontend makes all windows at once ([`WindowStock`]), and a
//! connection takes one for each ring ([`RingWindow`]). A dropped ring window revokes its grants and returns
//! to the stock, from any thread. Before its next connection it is renewed: on some platforms the backend has
//! destroyed it.
//!
//! For an I/O, the ring takes a page, which grants it, and then fills it, in this order: granting a revoked
//! page again zeroes it.

use std::os::fd::RawFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use ringfence_memory::LentSlice;
use ringfence_platform::{
    Access, DomId, Gref, PageId, Platform, WindowError, WindowName, WindowShape,
};
use ringfence_sys::numbers::bounded;

use super::{HeldTooLong, PageSource, SourceLevels, SourcePolicy, mark};

/// Interval of the checks for pages that the backend holds.
pub const RECLAIM_INTERVAL: Duration = Duration::from_millis(20);

/// Number of pages that are present in a new window.
const READY: u32 = 0;

/// Grant windows of one shape that no ring of the frontend uses.
pub struct WindowStock {
    free: Vec<PageSource>,
    /// Windows of earlier connections.
    used: Vec<PageSource>,
    access: Access,
    returns: Sender<PageSource>,
    returned: Receiver<PageSource>,
}

impl WindowStock {
    /// Makes `count` grant windows for `backend`. All pages of the shape are of one kind.
    ///
    /// # Errors
    ///
    /// Returns the platform's error if it has no grant windows, or too few.
    pub fn new(
        platform: &impl Platform,
        backend: DomId,
        count: u32,
        shape: WindowShape,
        policy: SourcePolicy,
    ) -> Result<WindowStock, WindowError> {
        let access = if shape.writable > 0 { Access::ReadWrite } else { Access::ReadOnly };
        let window = |_| Ok(PageSource::new(platform.window(backend, shape)?, READY, policy));
        let mut free = (0..count).map(window).collect::<Result<Vec<_>, WindowError>>()?;
        // Lower handles are used first.
        free.reverse();
        let (returns, returned) = channel();
        Ok(WindowStock { free, used: Vec::new(), access, returns, returned })
    }

    /// Returns the file descriptors of the unused windows, for a sandbox that closes all others.
    pub fn descriptors(&self) -> Vec<RawFd> {
        self.free.iter().chain(&self.used).flat_map(PageSource::descriptors).collect()
    }

    /// Takes a window for a ring; `None` if there are none left, or the platform cannot renew a used one.
    pub fn take(&mut self) -> Option<RingWindow> {
        self.used.extend(self.returned.try_iter());
        let source = match self.free.pop() {
            Some(source) => source,
            None => self.renewed()?,
        };
        let bound = bounded(source.pages(), u32::MAX);
        let (access, returns) = (self.access, self.returns.clone());
        Some(RingWindow { access, source: Some(source), returns, bound, reclaim_at: None })
    }
}

impl WindowStock {
    /// Returns a window of an earlier connection, renewed.
    fn renewed(&mut self) -> Option<PageSource> {
        let mut source = self.used.pop()?;
        match source.renew() {
            Ok(()) => Some(source),
            Err(error) => {
                tracing::warn!(%error, "a window of an earlier connection cannot be used again");
                self.used.push(source);
                None
            }
        }
    }
}

/// Grant window of one ring. Dropping it revokes its grants and returns it to the stock.
pub struct RingWindow {
    access: Access,
    /// Page source; `None` only after its return.
    source: Option<PageSource>,
    returns: Sender<PageSource>,
    /// Maximum number of pages.
    bound: u32,
    /// Time of the next check for held pages.
    reclaim_at: Option<Instant>,
}

impl Drop for RingWindow {
    fn drop(&mut self) {
        if let Some(mut source) = self.source.take() {
            // Pages that the backend claims to use are revoked as well.
            source.reset();
            // Without a stock, the window is dropped.
            let _ = self.returns.send(source);
        }
    }
}

impl RingWindow {
    /// Returns the name of the window for the backend.
    pub fn name(&self) -> Option<WindowName> {
        self.source.as_ref().map(PageSource::name)
    }

    /// Returns the number of pages, free or not.
    pub fn pages(&self) -> usize {
        self.source.as_ref().map_or(0, PageSource::pages)
    }

    /// Returns the number of pages that can be taken.
    #[inline]
    pub fn available(&self) -> usize {
        self.source.as_ref().map_or(0, |source| source.available(self.access))
    }

    /// Takes a page and grants it; returns it with its reference in the ring's form. The caller may fill it
    /// then.
    #[inline]
    pub fn take(&mut self) -> Option<(PageId, Gref)> {
        let source = self.source.as_mut()?;
        let page = source.take(self.access)?;
        match source.lend(page) {
            Ok(gref) => Some((page, mark(gref))),
            Err(_) => {
                source.put(page);
                None
            }
        }
    }

    /// Ends the I/O of a page.
    #[inline]
    pub fn give_back(&mut self, page: PageId) {
        if let Some(source) = &mut self.source {
            source.give_back(page);
        }
    }

    /// Returns the memory of a page.
    #[inline]
    pub fn memory(&self, page: PageId) -> Option<&LentSlice> {
        self.source.as_ref()?.memory(page)
    }

    /// Returns `true` if the backend holds pages after their I/O.
    #[inline]
    pub fn has_held_pages(&self) -> bool {
        self.source.as_ref().is_some_and(PageSource::has_held_pages)
    }

    /// Reclaims held pages, at most once in [`RECLAIM_INTERVAL`].
    ///
    /// # Errors
    ///
    /// Returns [`HeldTooLong`] if the backend exceeds the time limit of the policy.
    #[inline]
    pub fn reclaim(&mut self) -> Result<(), HeldTooLong> {
        if self.has_held_pages() { self.reclaim_now() } else { Ok(()) }
    }

    #[cold]
    fn reclaim_now(&mut self) -> Result<(), HeldTooLong> {
        let now = Instant::now();
        if self.reclaim_at.is_some_and(|at| now < at) {
            return Ok(());
        }
        self.reclaim_at = Some(now + RECLAIM_INTERVAL);
        self.source.as_mut().map_or(Ok(()), PageSource::reclaim)
    }

    /// Sets the maximum number of pages.
    pub fn resize(&mut self, most: u32) {
        self.bound = most;
        if let Some(source) = &mut self.source
            && let Err(error) = source.resize(most)
        {
            tracing::warn!(%error, "pages could not be given back to the system");
        }
    }

    /// Frees all idle pages; they may be taken again.
    pub fn release(&mut self) {
        let bound = self.bound;
        self.resize(0);
        self.resize(bound);
    }

    /// Returns the present levels.
    pub fn levels(&mut self) -> SourceLevels {
        self.source.as_mut().map(PageSource::levels).unwrap_or_default()
    }
}

//! Pages lent to the backend, which carry the data of requests.
//!
//! A page comes from the grant window of the ring, if there is one, or from an ordinary grant. Ordinary
//! grants are kept between requests (persistent grants) or made for each request. The number of lent pages
//! is bounded. A persistent page that the backend keeps mapped cannot be revoked, so it carries data again. Other pages that the
//! backend keeps mapped after a revoke are stuck: they are tried again later.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ringfence_access::window::{HeldTooLong, RingWindow, SourceLevels, pages_under_pressure};
use ringfence_memory::LentSlice;
use ringfence_platform::{Access, Granter, Gref, Lease, PageId};
use ringfence_sys::numbers::usize_from;
use ringfence_sys::pressure::Share;

/// Interval of attempts to revoke stuck pages. A backend may keep an idle page mapped for a minute.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Number of lent pages that memory pressure leaves: those of one request.
const KEPT_LEAST: u32 = ringfence_wire::blkif::SEGMENTS_MAX as u32;

/// Page that the backend may access for one request.
pub(super) enum Page {
    /// Page lent by an ordinary grant.
    Lent(Lease),
    /// Page issued in the ring's grant window.
    Windowed {
        page: PageId,
        /// Reference written into the ring.
        gref: Gref,
        memory: LentSlice,
    },
}

impl Page {
    /// Takes a page of the ring's grant window and issues it. The caller may fill it then.
    fn from_window(window: &mut RingWindow) -> Option<Page> {
        let (page, gref) = window.take()?;
        let memory = window.memory(page)?.clone();
        Some(Page::Windowed { page, gref, memory })
    }

    pub(super) fn gref(&self) -> Gref {
        match self {
            Page::Lent(lease) => lease.gref(),
            Page::Windowed { gref, .. } => *gref,
        }
    }

    pub(super) fn memory(&self) -> &LentSlice {
        match self {
            Page::Lent(lease) => lease.memory(),
            Page::Windowed { memory, .. } => memory,
        }
    }

    /// Returns the grant to revoke, or `None` for a page of the window, which revokes its own.
    pub(super) fn into_lease(self) -> Option<Lease> {
        match self {
            Page::Lent(lease) => Some(lease),
            Page::Windowed { .. } => None,
        }
    }
}

/// Pages of one ring.
///
/// Persistent pages are reused last in, first out: few pages stay hot, and the backend finds them mapped. Under memory pressure
/// the one that was used longest ago is revoked for each one that is returned.
/// Other pages are lent for one request and revoked after it. With a grant window, ordinary grants are used
/// only while the backend holds too many pages of the window.
pub(super) struct LentPool<G> {
    granter: G,
    keeps: bool,
    /// Idle pages; the one that was used last is at the end.
    free: VecDeque<Lease>,
    /// Number of pages lent, including those in use.
    lent: usize,
    limit: usize,
    /// Number of lent pages above which an idle one is revoked: at most `limit`, fewer under memory pressure.
    kept_most: usize,
    /// Size of the window without memory pressure, in pages.
    window_pages: u32,
    /// Pages that could not be revoked because the backend keeps them mapped.
    stuck: Vec<Lease>,
    /// Time at which these, and the surplus of idle pages, are tried again.
    retry: Option<Instant>,
    window: Option<RingWindow>,
}

impl<G: Granter> LentPool<G> {
    /// Creates a pool of at most `limit` ordinary pages, kept between requests if `keeps`.
    pub(super) fn new(granter: G, keeps: bool, limit: usize) -> LentPool<G> {
        LentPool {
            granter,
            keeps,
            free: VecDeque::new(),
            lent: 0,
            limit,
            kept_most: limit,
            window_pages: 0,
            stuck: Vec::new(),
            retry: None,
            window: None,
        }
    }

    /// Adds a grant window of `window_pages` pages to the pool.
    pub(super) fn with_window(self, window: Option<RingWindow>, window_pages: u32) -> LentPool<G> {
        LentPool { window, window_pages, ..self }
    }

    /// Returns a page for one request, or `None` if there is none now.
    pub(super) fn take(&mut self, access: Access) -> Option<Page> {
        if let Some(window) = &mut self.window {
            let page = Page::from_window(window);
            if page.is_some() || !window.has_held_pages() {
                return page;
            }
        }
        self.lend(access).map(Page::Lent)
    }

    fn lend(&mut self, access: Access) -> Option<Lease> {
        if let Some(page) = self.free.pop_back() {
            return Some(page);
        }
        // The backend has it mapped, as it may have any persistent page.
        if self.keeps
            && let Some(page) = self.stuck.pop()
        {
            return Some(page);
        }
        if self.lent >= self.limit {
            return None;
        }
        // The backend may write a persistent page in a later request.
        let access = if self.keeps { Access::ReadWrite } else { access };
        match self.granter.lend(access) {
            Ok(page) => {
                self.lent += 1;
                Some(page)
            }
            Err(error) => {
                // The pool has as many pages as could be lent. With none at all, the next request tries again.
                tracing::debug!(%error, lent = self.lent, "no more pages to lend");
                self.limit = self.limit.min(self.lent.max(1));
                None
            }
        }
    }

    /// Returns a page to the pool after its request.
    pub(super) fn give_back(&mut self, page: Page) {
        match (page, &mut self.window) {
            (Page::Windowed { page, .. }, Some(window)) => window.give_back(page),
            (Page::Lent(page), _) if self.keeps => {
                self.free.push_back(page);
                self.revoke_surplus_page();
            }
            (Page::Lent(page), _) => self.take_back(page),
            (Page::Windowed { .. }, None) => debug_assert!(false, "a page of no window"),
        }
    }

    /// Reclaims pages that the backend held: those of the window, and from time to time the stuck ones.
    pub(super) fn reclaim(&mut self) -> Result<(), HeldTooLong> {
        if self.retry.is_some_and(|retry| Instant::now() >= retry) {
            self.retry_stuck();
            self.revoke_surplus();
        }
        self.window.as_mut().map_or(Ok(()), RingWindow::reclaim)
    }

    /// Sets the share of its pages that the pool keeps under memory pressure. Surplus idle pages are revoked now, others after
    /// their use.
    pub(super) fn set_share(&mut self, share: Share) {
        let limit = u32::try_from(self.limit).unwrap_or(u32::MAX);
        self.kept_most = usize_from(share.of(limit, KEPT_LEAST));
        self.revoke_surplus();
        if let Some(window) = &mut self.window {
            window.resize(pages_under_pressure(share, self.window_pages));
        }
    }

    /// Returns the fill levels of the window.
    pub(super) fn window_levels(&mut self) -> Option<SourceLevels> {
        self.window.as_mut().map(RingWindow::levels)
    }

    /// Revokes idle pages above the share that is kept, as far as the backend has not mapped them.
    fn revoke_surplus(&mut self) {
        let surplus = self.lent.saturating_sub(self.kept_most).min(self.free.len());
        (0..surplus).for_each(|_| self.revoke_surplus_page());
        if self.lent > self.kept_most {
            self.retry_later();
        }
    }

    /// Revokes the idle page that was used longest ago if more pages are lent than are kept. A page that the backend keeps
    /// mapped is the next one to be used instead.
    fn revoke_surplus_page(&mut self) {
        if self.lent <= self.kept_most {
            return;
        }
        let Some(page) = self.free.pop_front() else { return };
        match self.granter.take_back(page) {
            Ok(()) => self.lent = self.lent.saturating_sub(1),
            Err(still) => self.free.push_back(still.lease),
        }
    }

    fn retry_later(&mut self) {
        self.retry.get_or_insert_with(|| Instant::now() + RETRY_INTERVAL);
    }

    fn take_back(&mut self, page: Lease) {
        match self.granter.take_back(page) {
            Ok(()) => self.lent = self.lent.saturating_sub(1),
            // The page still counts as lent.
            Err(still) => {
                self.retry_later();
                self.stuck.push(still.lease);
            }
        }
    }

    /// Tries again to revoke stuck pages.
    fn retry_stuck(&mut self) {
        self.retry = None;
        for page in core::mem::take(&mut self.stuck) {
            self.take_back(page);
        }
    }

    /// Revokes all idle pages. Pages that the backend keeps mapped become stuck and are tried again later.
    pub(super) fn release(&mut self) {
        for page in core::mem::take(&mut self.free) {
            self.take_back(page);
        }
        if let Some(window) = &mut self.window {
            window.release();
        }
        self.retry_stuck();
    }

    /// Revokes all pages and `others`, by force where the platform can. Returns the pages that the backend
    /// still holds.
    pub(super) fn close(mut self, others: Vec<Lease>) -> Vec<Lease> {
        let mut busy = Vec::new();
        let (free, stuck) = (core::mem::take(&mut self.free), core::mem::take(&mut self.stuck));
        for page in free.into_iter().chain(stuck).chain(others) {
            if let Err(still) = self.granter.take_back(page) {
                busy.push(still.lease);
            }
        }
        if busy.is_empty() {
            return busy;
        }
        match self.granter.revoke_forced(busy) {
            Ok(()) => Vec::new(),
            Err((left, _)) => left,
        }
    }

    /// Returns the number of pages lent by ordinary grants.
    pub(super) fn lent(&self) -> usize {
        self.lent
    }
}

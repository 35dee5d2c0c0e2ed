//! Pages lent to the backend, for requests to carry bytes in.

use ringfence_access::window::{HeldTooLong, SourceLevels};
use ringfence_memory::LentSlice;
use ringfence_platform::{Access, Granter, Gref, Lease, PageId};

use super::windows::Window;

/// A page that the backend may use for a request.
pub(super) enum Page {
    /// Lent by an ordinary grant.
    Lent(Lease),
    /// Issued in the ring's window.
    Within {
        page: PageId,
        /// As it is written into the ring.
        gref: Gref,
        memory: LentSlice,
    },
}

impl Page {
    pub(super) fn gref(&self) -> Gref {
        match self {
            Page::Lent(lease) => lease.gref(),
            Page::Within { gref, .. } => *gref,
        }
    }

    pub(super) fn memory(&self) -> &LentSlice {
        match self {
            Page::Lent(lease) => lease.memory(),
            Page::Within { memory, .. } => memory,
        }
    }

    /// The grant that is to be taken back; a window takes back its own.
    pub(super) fn into_lease(self) -> Option<Lease> {
        match self {
            Page::Lent(lease) => Some(lease),
            Page::Within { .. } => None,
        }
    }
}

/// Pages of one ring.
///
/// With persistent grants they stay lent and are used last in, first out, so that few are hot and the
/// backend's look-ups find them; else each is lent for its request and taken back behind it. Where there
/// is a window, pages are its, unless the backend holds on to them.
pub(super) struct Pool<G> {
    granter: G,
    keeps: bool,
    free: Vec<Lease>,
    /// Pages lent, those in use included.
    lent: usize,
    limit: usize,
    /// Pages that the backend would not let go of.
    stuck: Vec<Lease>,
    window: Option<Window>,
}

impl<G: Granter> Pool<G> {
    /// At most `limit` pages, kept if `keeps`.
    pub(super) fn new(granter: G, keeps: bool, limit: usize) -> Pool<G> {
        Pool { granter, keeps, free: Vec::new(), lent: 0, limit, stuck: Vec::new(), window: None }
    }

    /// The same, with a window.
    pub(super) fn with_window(self, window: Option<Window>) -> Pool<G> {
        Pool { window, ..self }
    }

    /// A page to be used by the backend in this way.
    pub(super) fn take(&mut self, access: Access) -> Option<Page> {
        if let Some(window) = &mut self.window {
            let page = window.take();
            if page.is_some() || !window.is_troubled() {
                return page;
            }
        }
        self.lend(access).map(Page::Lent)
    }

    fn lend(&mut self, access: Access) -> Option<Lease> {
        if let Some(page) = self.free.pop() {
            return Some(page);
        }
        if self.lent >= self.limit {
            return None;
        }
        // Persistent pages are written to by the backend sooner or later.
        let access = if self.keeps { Access::ReadWrite } else { access };
        match self.granter.lend(access) {
            Ok(page) => {
                self.lent += 1;
                Some(page)
            }
            Err(error) => {
                // That many there are; others come back. With none at all, look again next time.
                tracing::debug!(%error, lent = self.lent, "no more pages to lend");
                self.limit = self.limit.min(self.lent.max(1));
                None
            }
        }
    }

    /// The backend is done with a page.
    pub(super) fn give_back(&mut self, page: Page) {
        match (page, &mut self.window) {
            (Page::Within { page, .. }, Some(window)) => window.give_back(page),
            (Page::Lent(page), _) if self.keeps => self.free.push(page),
            (Page::Lent(page), _) => self.take_back(page),
            (Page::Within { .. }, None) => debug_assert!(false, "a page of no window"),
        }
    }

    /// Looks after a backend that holds on to pages of the window.
    pub(super) fn tend(&mut self) -> Result<(), HeldTooLong> {
        self.window.as_mut().map_or(Ok(()), Window::tend)
    }

    /// The window keeps at most so many pages from now on.
    pub(super) fn resize_window(&mut self, most: u32) {
        if let Some(window) = &mut self.window {
            window.resize(most);
        }
    }

    /// What is in the window.
    pub(super) fn window_levels(&mut self) -> Option<SourceLevels> {
        self.window.as_mut().map(Window::levels)
    }

    fn take_back(&mut self, page: Lease) {
        match self.granter.take_back(page) {
            Ok(()) => self.lent = self.lent.saturating_sub(1),
            // It still counts as lent.
            Err(still) => self.stuck.push(still.lease),
        }
    }

    /// Tries once more to take back what the backend held on to.
    pub(super) fn unstick(&mut self) {
        for page in core::mem::take(&mut self.stuck) {
            self.take_back(page);
        }
    }

    /// Takes back what is not in use. A backend that keeps it mapped is asked no question: what it
    /// holds is tried again later.
    pub(super) fn release(&mut self) {
        for page in core::mem::take(&mut self.free) {
            self.take_back(page);
        }
        if let Some(window) = &mut self.window {
            window.release();
        }
        self.unstick();
    }

    /// Takes everything back, by force where the platform can, `others` too; what is still held comes
    /// back.
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

    /// Pages lent now by ordinary grants.
    pub(super) fn lent(&self) -> usize {
        self.lent
    }
}

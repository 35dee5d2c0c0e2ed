//! Pages lent to the backend, for requests to carry bytes in.

use ringfence_platform::{Access, Granter, Lease};

/// Pages of one ring.
///
/// With persistent grants they stay lent and are used last in, first out, so that few are hot and the
/// backend's look-ups find them; else each is lent for its request and taken back behind it.
pub(super) struct Pool<G> {
    granter: G,
    keeps: bool,
    free: Vec<Lease>,
    /// Pages lent, those in use included.
    lent: usize,
    limit: usize,
    /// Pages that the backend would not let go of.
    stuck: Vec<Lease>,
}

impl<G: Granter> Pool<G> {
    /// At most `limit` pages, kept if `keeps`.
    pub(super) fn new(granter: G, keeps: bool, limit: usize) -> Pool<G> {
        Pool { granter, keeps, free: Vec::new(), lent: 0, limit, stuck: Vec::new() }
    }

    /// A page to be used by the backend in this way.
    pub(super) fn take(&mut self, access: Access) -> Option<Lease> {
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
    pub(super) fn give_back(&mut self, page: Lease) {
        if self.keeps {
            self.free.push(page);
        } else {
            self.take_back(page);
        }
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

    /// Pages lent now.
    pub(super) fn lent(&self) -> usize {
        self.lent
    }
}

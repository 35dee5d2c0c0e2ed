//! Buffers in windows: what a frontend issues and takes back alone.
//!
//! # Theory of operation
//!
//! Each ring has a window of its own, whose pages are of one kind: those of the tx ring can only be read
//! by the backend. Where memory is lent with an operating system's help, a window can only be made before
//! the sandbox closes; so a frontend makes all it may need at once ([`WindowStock`]) and hands them to its
//! ports, from which they come home when the port is dropped, whoever drops it.
//!
//! A page is taken for an I/O, then granted, and then filled, in this order: a page that was granted
//! before and taken back is emptied when it is granted again. Pages that were used last are used next, and
//! stay granted meanwhile, so that hardly an I/O costs more than a look-up.

use std::os::fd::RawFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use ringfence_access::window::{PageSource, SourceLevels, SourcePolicy, mark};
use ringfence_memory::LentSlice;
use ringfence_platform::{
    Access, DomId, Gref, PageId, Platform, WindowError, WindowHandle, WindowShape,
};

use ringfence_frame::port::Fault;

/// How often to look after a peer that holds on to pages.
pub(super) const TEND: Duration = Duration::from_millis(20);

/// Sizes of the windows of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowSizes {
    /// Pages of each ring's window. At most 65,000, as they are named by 16 bits on the ring.
    pub pages: u32,
    /// Entries of its table: pages that can be granted at a time.
    pub entries: u32,
    /// How pages go in and out.
    pub policy: SourcePolicy,
}

impl Default for WindowSizes {
    /// As many entries as a ring has slots, and four times as many pages.
    fn default() -> WindowSizes {
        WindowSizes { pages: 1024, entries: 256, policy: SourcePolicy::default() }
    }
}

impl WindowSizes {
    /// For so many queues: fewer pages each where there are many, as there is a limit to what a domain
    /// lends.
    pub fn for_queues(queues: u32) -> WindowSizes {
        let pages = match queues {
            0..=2 => 1024,
            3..=4 => 512,
            _ => 256,
        };
        WindowSizes { pages, ..WindowSizes::default() }
    }
}

/// Most pages of a window: their numbers, and those of other places, are ids on the ring.
const PAGES_MAX: u32 = 65_000;

/// Pages that are in a pool from the beginning.
const READY: u32 = 0;

/// A window on its way home, and which kind it is.
type Homeward = (Access, PageSource);

/// The windows of a frontend that no port has.
pub struct WindowStock {
    tx: Vec<PageSource>,
    rx: Vec<PageSource>,
    home: Sender<Homeward>,
    arrivals: Receiver<Homeward>,
}

impl WindowStock {
    /// Makes windows for so many queues.
    ///
    /// # Errors
    ///
    /// When the platform has none, or not for so many queues.
    pub fn new(
        platform: &impl Platform,
        backend: DomId,
        queues: u32,
        sizes: WindowSizes,
    ) -> Result<WindowStock, WindowError> {
        let (home, arrivals) = channel();
        let mut stock = WindowStock { tx: Vec::new(), rx: Vec::new(), home, arrivals };
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
        // Low numbers first.
        stock.tx.reverse();
        stock.rx.reverse();
        Ok(stock)
    }

    /// The files of those that no port has, for a sandbox that closes or refuses all others.
    pub fn descriptors(&self) -> Vec<RawFd> {
        self.tx.iter().chain(&self.rx).flat_map(PageSource::descriptors).collect()
    }

    /// Takes in what came home: what was granted is taken back, by force if need be.
    pub(crate) fn collect(&mut self) {
        for (access, mut source) in self.arrivals.try_iter() {
            source.reset();
            match access {
                Access::ReadOnly => self.tx.push(source),
                Access::ReadWrite => self.rx.push(source),
            }
        }
    }

    /// The windows of one queue, if there are any left.
    pub(crate) fn take(&mut self) -> Option<QueueWindows> {
        self.collect();
        let (tx, rx) = (self.tx.pop()?, self.rx.pop()?);
        let lend = |access, source| WindowPages::new(access, source, self.home.clone());
        Some(QueueWindows {
            handles: (tx.handle(), rx.handle()),
            pages: Some((lend(Access::ReadOnly, tx), lend(Access::ReadWrite, rx))),
        })
    }
}

/// The windows of a queue: their names, and their pages until a port has them.
pub(crate) struct QueueWindows {
    pub(crate) handles: (WindowHandle, WindowHandle),
    pub(super) pages: Option<(WindowPages, WindowPages)>,
}

/// The pages of a ring's window in the hands of a port. They go home when it is dropped.
pub(super) struct WindowPages {
    access: Access,
    /// Until it goes home.
    source: Option<PageSource>,
    home: Sender<Homeward>,
    /// By page: the reference of those in use as it is written into the ring.
    grefs: Vec<Gref>,
    /// When to look after pages that are held.
    tend_at: Option<Instant>,
}

impl Drop for WindowPages {
    fn drop(&mut self) {
        if let Some(source) = self.source.take() {
            // Nobody is at home: everything is given up with it.
            let _ = self.home.send((self.access, source));
        }
    }
}

impl WindowPages {
    fn new(access: Access, source: PageSource, home: Sender<Homeward>) -> WindowPages {
        let grefs = vec![mark(Gref(0)); source.pages()];
        WindowPages { access, source: Some(source), home, grefs, tend_at: None }
    }

    /// Pages there are, free or not.
    pub(super) fn len(&self) -> usize {
        self.grefs.len()
    }

    /// Pages that could be taken.
    #[inline]
    pub(super) fn free(&self) -> usize {
        self.source.as_ref().map_or(0, |source| source.available(self.access))
    }

    /// Takes a page and grants it. It may be filled now.
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

    /// The I/O for which a page was taken is over.
    #[inline]
    pub(super) fn give_back(&mut self, page: u16) {
        if let Some(source) = &mut self.source {
            source.give_back(PageId(page.into()));
        }
    }

    /// The reference of a page in use.
    #[inline]
    pub(super) fn gref(&self, page: u16) -> Gref {
        self.grefs.get(usize::from(page)).copied().unwrap_or(mark(Gref(0)))
    }

    /// The bytes of a page.
    #[inline]
    pub(super) fn memory(&self, page: u16) -> Option<&LentSlice> {
        self.source.as_ref()?.memory(PageId(page.into()))
    }

    /// Whether the backend holds on to pages.
    #[inline]
    pub(super) fn is_troubled(&self) -> bool {
        self.source.as_ref().is_some_and(PageSource::is_troubled)
    }

    /// Looks after pages that the backend holds on to, now and then.
    #[inline]
    pub(super) fn tend(&mut self) -> Result<(), Fault> {
        if self.is_troubled() { self.tend_now() } else { Ok(()) }
    }

    #[cold]
    fn tend_now(&mut self) -> Result<(), Fault> {
        let now = Instant::now();
        if self.tend_at.is_some_and(|at| now < at) {
            return Ok(());
        }
        self.tend_at = Some(now + TEND);
        self.source.as_mut().map_or(Ok(()), PageSource::tend).map_err(Fault::misbehaved)
    }

    /// Keeps at most so many pages from now on.
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

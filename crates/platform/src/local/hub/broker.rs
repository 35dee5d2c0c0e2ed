//! Hub state without I/O: domain numbers, arenas in transit and ports, with quotas for each domain.

// #syscall driver fallocate: what is left of a domain that is gone is punched out

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;

use ringfence_memory::PAGE_SIZE;
use ringfence_sys::descriptors::Descriptors;
use ringfence_wire::grant::DomId;
use rustix::fs::FallocateFlags;

use super::protocol::Refusal;
use crate::local::arena::{ArenaFiles, ArenaShape};
use crate::table::STATUS_BYTES;

/// Quotas of one domain at the hub.
#[derive(Clone, Copy, Debug)]
pub struct HubLimits {
    /// Maximum size of all arenas of a domain in bytes.
    pub arena_bytes: usize,
    /// Maximum number of event channel ports of a domain.
    pub ports: usize,
    /// Maximum number of store connections of a domain.
    pub stores: usize,
    /// Maximum number of grant windows of a domain.
    pub windows: usize,
    /// Maximum number of domains.
    pub domains: usize,
}

impl Default for HubLimits {
    fn default() -> HubLimits {
        HubLimits { arena_bytes: 64 << 20, ports: 128, stores: 8, windows: 32, domains: 1024 }
    }
}

/// Arena set in transit to the grantee. It may be fetched again after a device restarts.
struct Lent {
    files: ArenaFiles,
    shape: ArenaShape,
}

impl Lent {
    /// Clears the status words of a grantee that is gone with its mappings. No other party would, and
    /// the granter waits for the words before it grants the pages again.
    fn end_all_uses(&self) {
        // A file that is no memfd could block the hub, for example one of a user-space file system.
        if self.files.verify(self.shape).is_err() {
            return;
        }
        let bytes = (self.shape.references as usize * STATUS_BYTES).next_multiple_of(PAGE_SIZE);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // If the call fails, the granter has fewer pages to grant.
        let _ = rustix::fs::fallocate(&self.files.status, flags, 0, bytes as u64);
    }
}

enum Port {
    /// Allocated; `other_end` waits for `remote` to bind it. The peer may have sent into its queue, so
    /// the socket is disposed of, not closed.
    Unbound { remote: DomId, other_end: Descriptors },
    /// Bound, or the binding end.
    Interdomain,
}

#[derive(Default)]
struct Domain {
    ports: BTreeMap<u32, Port>,
    next_port: u32,
    arena_bytes: usize,
    stores: usize,
    windows: usize,
}

/// State of all domains.
pub(crate) struct Broker {
    limits: HubLimits,
    domains: BTreeMap<DomId, Domain>,
    /// Arenas by granter, grantee and window (0: the arena of ordinary grants).
    lent: HashMap<(DomId, DomId, u32), Lent>,
    next_domain: u16,
}

impl Broker {
    pub(crate) fn new(limits: HubLimits) -> Broker {
        Broker { limits, domains: BTreeMap::new(), lent: HashMap::new(), next_domain: 1 }
    }

    /// Assigns a number: the wanted one if it is free, else the next. A number is reused only after all
    /// others, so that a late message names no domain.
    pub(crate) fn admit(&mut self, wanted: Option<DomId>) -> Result<DomId, Refusal> {
        if self.domains.len() >= self.limits.domains {
            return Err(Refusal::Quota);
        }
        let id = match wanted {
            Some(id) if id >= DomId::FIRST_RESERVED => return Err(Refusal::NotPermitted),
            Some(id) if self.domains.contains_key(&id) => return Err(Refusal::InUse),
            Some(id) => id,
            None => self.next_free(),
        };
        self.domains.insert(id, Domain { next_port: 1, ..Domain::default() });
        Ok(id)
    }

    fn next_free(&mut self) -> DomId {
        loop {
            let id = DomId(self.next_domain);
            self.next_domain = if id.0 + 1 >= DomId::FIRST_RESERVED.0 { 1 } else { id.0 + 1 };
            // `limits.domains` is far below the 32,752 numbers.
            if !self.domains.contains_key(&id) {
                return id;
            }
        }
    }

    /// Removes a domain and everything that it granted or allocated. Arenas granted *to* domain 0 stay
    /// for its restart. Those of other grantees are dropped, because no domain can request their number.
    pub(crate) fn release(&mut self, id: DomId) {
        self.domains.remove(&id);
        let domains = &mut self.domains;
        self.lent.retain(|&(granter, grantee, window), lent| {
            let stays = granter != id && (grantee != id || id == DomId(0));
            if !stays && let Some(granter) = domains.get_mut(&granter) {
                granter.arena_bytes = granter.arena_bytes.saturating_sub(lent.shape.total_bytes());
                granter.windows = granter.windows.saturating_sub(usize::from(window > 0));
            }
            // The granter waits for the words even if no other grantee follows.
            if grantee == id {
                lent.end_all_uses();
            }
            stays
        });
    }

    fn domain(&mut self, id: DomId) -> Result<&mut Domain, Refusal> {
        self.domains.get_mut(&id).ok_or(Refusal::NotFound)
    }

    pub(crate) fn count_store(&mut self, id: DomId) -> Result<(), Refusal> {
        let limit = self.limits.stores;
        let domain = self.domain(id)?;
        if domain.stores >= limit {
            return Err(Refusal::Quota);
        }
        domain.stores += 1;
        Ok(())
    }

    pub(crate) fn store_closed(&mut self, id: DomId) {
        if let Some(domain) = self.domains.get_mut(&id) {
            domain.stores = domain.stores.saturating_sub(1);
        }
    }

    /// Records an arena of `granter` for `grantee`: that of its ordinary grants, or a grant window.
    pub(crate) fn lend(
        &mut self,
        granter: DomId,
        grantee: DomId,
        window: u32,
        shape: ArenaShape,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Refusal> {
        shape.check().map_err(|_| Refusal::Quota)?;
        let files = ArenaFiles::from_vec(fds).ok_or(Refusal::Descriptors)?;
        if !self.domains.contains_key(&grantee) {
            return Err(Refusal::NotFound);
        }
        if self.lent.contains_key(&(granter, grantee, window)) {
            return Err(Refusal::InUse);
        }
        let (limit, windows) = (self.limits.arena_bytes, self.limits.windows);
        let domain = self.domain(granter)?;
        if window > 0 && domain.windows >= windows {
            return Err(Refusal::Quota);
        }
        let total = domain.arena_bytes + shape.total_bytes();
        if total > limit {
            return Err(Refusal::Quota);
        }
        domain.arena_bytes = total;
        domain.windows += usize::from(window > 0);
        self.lent.insert((granter, grantee, window), Lent { files, shape });
        Ok(())
    }

    /// Returns the arena that `granter` made for `grantee`.
    pub(crate) fn fetch(
        &self,
        grantee: DomId,
        granter: DomId,
        window: u32,
    ) -> Result<(ArenaShape, &ArenaFiles), Refusal> {
        let lent = self.lent.get(&(granter, grantee, window)).ok_or(Refusal::NotFound)?;
        Ok((lent.shape, &lent.files))
    }

    fn add_port(&mut self, id: DomId, port: Port) -> Result<u32, Refusal> {
        let limit = self.limits.ports;
        let domain = self.domain(id)?;
        if domain.ports.len() >= limit {
            return Err(Refusal::Quota);
        }
        let number = domain.next_port;
        domain.next_port = number.checked_add(1).ok_or(Refusal::Quota)?;
        domain.ports.insert(number, port);
        Ok(number)
    }

    /// Allocates a port of `owner` that `remote` may bind, and keeps `other_end` until then.
    pub(crate) fn alloc(
        &mut self,
        owner: DomId,
        remote: DomId,
        other_end: OwnedFd,
    ) -> Result<u32, Refusal> {
        self.add_port(owner, Port::Unbound { remote, other_end: vec![other_end].into() })
    }

    /// Binds `remote_port` of `remote` for `owner`.
    pub(crate) fn bind(
        &mut self,
        owner: DomId,
        remote: DomId,
        remote_port: u32,
    ) -> Result<(u32, OwnedFd), Refusal> {
        let port = self.domain(remote)?.ports.get(&remote_port).ok_or(Refusal::NotFound)?;
        match port {
            Port::Interdomain => return Err(Refusal::InUse),
            Port::Unbound { remote, .. } if *remote != owner => return Err(Refusal::NotPermitted),
            Port::Unbound { .. } => {}
        }
        let number = self.add_port(owner, Port::Interdomain)?;
        match self.domain(remote)?.ports.insert(remote_port, Port::Interdomain) {
            Some(Port::Unbound { other_end, .. }) => {
                let [other_end] = other_end.exactly().map_err(|_| Refusal::InUse)?;
                Ok((number, other_end))
            }
            Some(Port::Interdomain) | None => Err(Refusal::InUse),
        }
    }

    /// Removes a port. The socket belongs to the domain, which closes it.
    pub(crate) fn close(&mut self, owner: DomId, port: u32) -> Result<(), Refusal> {
        self.domain(owner)?.ports.remove(&port).map(|_| ()).ok_or(Refusal::NotFound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fd() -> OwnedFd {
        rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
    }

    fn two() -> (Broker, DomId, DomId) {
        let mut broker = Broker::new(HubLimits {
            arena_bytes: 1 << 20,
            ports: 2,
            stores: 1,
            windows: 1,
            domains: 3,
        });
        let a = broker.admit(None).unwrap();
        let b = broker.admit(None).unwrap();
        (broker, a, b)
    }

    #[test]
    fn bind_succeeds_once_and_only_for_named_remote() {
        let (mut broker, a, b) = two();
        let port = broker.alloc(a, b, fd()).unwrap();
        assert_eq!(broker.bind(a, a, port).err(), Some(Refusal::NotPermitted));
        assert_eq!(broker.bind(b, a, 77).err(), Some(Refusal::NotFound));
        assert!(broker.bind(b, a, port).is_ok());
        assert_eq!(broker.bind(b, a, port).err(), Some(Refusal::InUse));
    }

    #[test]
    fn requests_beyond_quota_are_refused() {
        let (mut broker, a, b) = two();
        broker.alloc(a, b, fd()).unwrap();
        broker.alloc(a, b, fd()).unwrap();
        assert_eq!(broker.alloc(a, b, fd()), Err(Refusal::Quota));
        broker.count_store(a).unwrap();
        assert_eq!(broker.count_store(a), Err(Refusal::Quota));
        broker.store_closed(a);
        assert_eq!(broker.count_store(a), Ok(()));
        let four = || (0..4).map(|_| fd()).collect();
        assert_eq!(broker.lend(a, b, 0, ArenaShape::of(4096, 0), four()), Err(Refusal::Quota));
        assert_eq!(broker.lend(a, b, 0, ArenaShape::of(u32::MAX, 0), four()), Err(Refusal::Quota));
        assert_eq!(
            broker.lend(a, b, 0, ArenaShape::of(16, 16), vec![fd()]),
            Err(Refusal::Descriptors)
        );
        assert_eq!(broker.lend(a, b, 0, ArenaShape::of(16, 16), four()), Ok(()));
        assert!(broker.fetch(b, a, 0).is_ok());
        assert_eq!(broker.fetch(a, b, 0).err(), Some(Refusal::NotFound));
        broker.admit(None).unwrap();
        assert_eq!(broker.admit(None), Err(Refusal::Quota));
    }

    #[test]
    fn arena_of_released_grantee_leaves_quota_of_granter() {
        let (mut broker, a, b) = two();
        let four = || (0..4).map(|_| fd()).collect();
        let large_shape = ArenaShape::of(200, 0);
        broker.lend(a, b, 0, large_shape, four()).unwrap();
        let c = broker.admit(None).unwrap();
        assert_eq!(broker.lend(a, c, 0, large_shape, four()), Err(Refusal::Quota));
        broker.release(b);
        assert_eq!(broker.lend(a, c, 0, large_shape, four()), Ok(()));
    }

    #[test]
    fn release_drops_arenas_and_ports_and_delays_reuse_of_number() {
        let (mut broker, a, b) = two();
        broker.lend(a, b, 0, ArenaShape::of(1, 1), (0..4).map(|_| fd()).collect()).unwrap();
        let port = broker.alloc(a, b, fd()).unwrap();
        broker.release(a);
        assert_eq!(broker.fetch(b, a, 0).err(), Some(Refusal::NotFound));
        assert_eq!(broker.bind(b, a, port).err(), Some(Refusal::NotFound));
        assert_ne!(broker.admit(None).unwrap(), a, "numbers are not used again at once");
    }
}

//! Opening of a connection: reads the frontend's keys, each once, then maps the pages and binds the ports.

use std::sync::{Arc, PoisonError};

use ringfence_access::Mode;
use ringfence_platform::{Gref, Platform};
use ringfence_wire::blkif::{Abi, RING_ORDER_MAX, keys};
use ringfence_wire::decimal;
use ringfence_xenbus::connect::{RingName, bind_channel, map_ring};
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::queue_keys::QueueKeys;
use super::rejection::{ConnectError, VbdRejection};
use super::silence::FirstPage;
use super::{Connection, VbdBackend, keeps, windows};
use crate::blkback::{Agreement, Blkback, OnEnd, QueueParts, QueueReports, rules_for};
use crate::storage::{Disk, Geometry};
use crate::vbd::QUEUES_MAX;

/// Parameters of the connection.
struct ConnectionTerms {
    agreement: Agreement,
    /// Set if the frontend was offered grant windows.
    windows: bool,
    queues: u32,
    /// Set if each queue has a directory of its own in the store.
    has_directories: bool,
    ring_pages: u32,
}

/// Parts of a queue, and the first page of its ring.
type OpenQueue<P> = (QueueParts<<P as Platform>::Grantee, <P as Platform>::Channel>, FirstPage);

impl VbdBackend {
    /// Reads the frontend's keys, each once, and opens the rings, channels and windows that they name.
    pub(super) fn open<P: Platform>(
        &self,
        adopting: bool,
        disk: &Arc<dyn Disk>,
        geometry: &Geometry,
        platform: &P,
        store: &mut StoreClient,
    ) -> Result<(Blkback, Connection, FirstPage), ConnectError> {
        let end = &self.end;
        let terms = self.terms(adopting, geometry, store)?;
        let ConnectionTerms { agreement, windows, queues, has_directories, ring_pages } = terms;
        let mut parts = Vec::with_capacity(queues as usize);
        let mut first_page = None;
        for queue in 0..queues {
            let directory = has_directories.then(|| keys::queue_directory(queue));
            let keys = QueueKeys { queue, directory };
            let (mut part, page) = self.open_queue(platform, store, &keys, ring_pages)?;
            if windows {
                part.window = windows::open(end, &keys, platform, store)?;
            }
            parts.push(part);
            first_page.get_or_insert(page);
        }
        let Some(first_page) = first_page else {
            return Err(ConnectError::Queues { wanted: queues, limit: QUEUES_MAX });
        };
        let windows = parts.iter().any(|part| part.window.is_some());
        let (fault, wake) = (Arc::clone(&self.fault), Arc::clone(&self.wake));
        let on_end: OnEnd = Arc::new(move |why| {
            if let Some(why) = why {
                *fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(why.to_string());
            }
            wake();
        });
        let reports = QueueReports {
            rules: Arc::clone(end.rules()),
            system: Arc::clone(platform.counters()),
            on_end,
        };
        let served = Blkback::start(parts, disk, &self.options, &agreement, &reports)
            .map_err(|error| ConnectError::Device(VbdRejection::Start(error)))?;
        let adopted = adopting && !self.has_served;
        let Agreement { abi, persistent, .. } = agreement;
        let connection = Connection { abi, persistent, windows, queues, ring_pages, adopted };
        Ok((served, connection, first_page))
    }

    /// Determines the parameters of the connection from the frontend's keys and the announced features.
    fn terms(
        &self,
        adopting: bool,
        geometry: &Geometry,
        store: &mut StoreClient,
    ) -> Result<ConnectionTerms, ConnectError> {
        let end = &self.end;
        let abi = match store.read_opt(&end.front(keys::PROTOCOL))? {
            None => Abi::NATIVE,
            Some(name) => {
                Abi::from_name(&name).ok_or(ConnectError::Device(VbdRejection::Protocol))?
            }
        };
        // In a takeover the features announced by the earlier backend apply, not those of this process.
        let adopted_features = adopting && !self.announced;
        let offered = match adopted_features {
            true => store.read_flag(&end.back(keys::FEATURE_PERSISTENT))?,
            false => keeps(self.options.mode),
        };
        let windows = match adopted_features {
            true => store.read_flag(&end.back(keys::FEATURE_RINGFENCE_WINDOW))?,
            false => self.options.mode == Mode::Window,
        };
        let persistent = offered && store.read_flag(&end.front(keys::FEATURE_PERSISTENT))?;
        let mut rules = rules_for(geometry, &self.options);
        let (mut most_queues, mut most_order) = (self.options.queues, self.options.ring_order);
        if adopted_features {
            rules.flush = store.read_flag(&end.back(keys::FEATURE_FLUSH_CACHE))?;
            rules.barrier = store.read_flag(&end.back(keys::FEATURE_BARRIER))?;
            rules.discard = store.read_flag(&end.back(keys::FEATURE_DISCARD))?;
            rules.extents = store.read_flag(&end.back(keys::FEATURE_RINGFENCE_EXTENTS))?;
            rules.write_zeroes =
                store.read_flag(&end.back(keys::FEATURE_RINGFENCE_WRITE_ZEROES))?;
            let key = end.back(keys::FEATURE_MAX_INDIRECT_SEGMENTS);
            let indirect = store.read_opt(&key)?.and_then(|text| decimal::parse_u16(&text).ok());
            rules.indirect_segments = indirect.unwrap_or(0);
            (most_queues, most_order) = (QUEUES_MAX, RING_ORDER_MAX);
        }
        let limit = most_queues.clamp(1, QUEUES_MAX);
        let wanted = store.read_u32_opt(&end.front(keys::MULTI_QUEUE_NUM_QUEUES))?;
        let queues = wanted.unwrap_or(1);
        if queues == 0 || queues > limit {
            return Err(ConnectError::Queues { wanted: queues, limit });
        }
        let ring_pages = self.ring_pages(most_order.min(RING_ORDER_MAX), store)?;
        let no_space = store.read_flag(&end.front(keys::RINGFENCE_NO_SPACE))?;
        let agreement = Agreement { abi, persistent, rules, no_space };
        // A key with value 1 still means queue 0 at the top level, as for a frontend without the key.
        let has_directories = wanted.is_some_and(|n| n > 1);
        Ok(ConnectionTerms { agreement, windows, queues, has_directories, ring_pages })
    }

    /// Returns the number of pages of each ring.
    fn ring_pages(&self, most_order: u32, store: &mut StoreClient) -> Result<u32, ConnectError> {
        let limit = 1 << most_order;
        let order = store.read_u32_opt(&self.end.front(keys::RING_PAGE_ORDER))?;
        let wanted = match order {
            Some(order) => 1u32.checked_shl(order).unwrap_or(u32::MAX),
            None => store.read_u32_opt(&self.end.front(keys::NUM_RING_PAGES))?.unwrap_or(1),
        };
        if wanted > limit || !wanted.is_power_of_two() {
            return Err(ConnectError::Device(VbdRejection::RingPages { wanted, limit }));
        }
        Ok(wanted)
    }

    fn open_queue<P: Platform>(
        &self,
        platform: &P,
        store: &mut StoreClient,
        queue: &QueueKeys,
        ring_pages: u32,
    ) -> Result<OpenQueue<P>, ConnectError> {
        let key = |name: &str| queue.path(&self.end, name);
        let count = ring_pages as usize;
        // A missing reference must not be read as 0, which is the console's page.
        let alone = match count {
            1 => store.read_u32_opt(&key(keys::RING_REF))?,
            _ => None,
        };
        let mut grefs = Vec::with_capacity(count);
        let mut first_key = key(&keys::ring_ref(0));
        match alone {
            Some(gref) => {
                first_key = key(keys::RING_REF);
                grefs.push(Gref(gref));
            }
            None => {
                for page in 0..count {
                    grefs.push(Gref(store.read_u32(&key(&keys::ring_ref(page)))?));
                }
            }
        }
        let first = grefs.first().copied().unwrap_or(Gref(0));
        let port = store.read_u32(&key(keys::EVENT_CHANNEL))?;
        let peer = self.end.device().frontend;
        let mut pages = platform.grantee(peer).map_err(ConnectError::Arena)?;
        let ring = map_ring(&mut pages, RingName::OfQueue(queue.queue), &grefs)?;
        let channel = bind_channel(platform, peer, port)?;
        let first_page = FirstPage { key: first_key, gref: first };
        Ok((QueueParts { ring, ring_pages: count, channel, pages, window: None }, first_page))
    }
}

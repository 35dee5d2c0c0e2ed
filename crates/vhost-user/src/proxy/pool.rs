//! Choice of a device's pool among the files of memory that a frontend hands over.
//!
//! A pool is a whole file in memory (a memfd, a file of tmpfs or of huge pages), with the size or the mark that the user has
//! chosen. One file alone can be the pool of a device. The mark is read by the descriptor; nothing is mapped.
//!
//! A read of another kind of file could wait for a file server. So the kind is asked for first: the kernel has seals of
//! files in memory alone.

// #syscall proxy fcntl 1=F_GET_SEALS: kind of a file that a hypervisor hands over
// #syscall proxy pread64: mark of a pool

use std::fmt;
use std::os::fd::AsFd;

use ringfence_sys::descriptors::{Descriptors, FileIdentity, identity};
use ringfence_wire::vhost_user::{MemoryRegion, POOL_HEAD_LEN, is_pool_name, pool_name};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::fault::ProxyFault;
use crate::HandedOver;
use crate::memory::size_of;
use crate::pool::size;

/// Maximum number of regions that are added one by one. QEMU has as many slots.
const ADDED_MAX: usize = 512;

/// Choice of a device's pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PoolChoice {
    /// The only file of exactly this many bytes.
    Size(u64),
    /// The only file that begins with the mark of a pool.
    Marked,
    /// The file that begins with the mark and this name.
    Named(String),
}

impl PoolChoice {
    /// Returns the choice of a pool by its name, if a pool can have that name.
    pub fn named(name: &str) -> Option<PoolChoice> {
        is_pool_name(name).then(|| PoolChoice::Named(name.to_owned()))
    }

    /// Returns `true` if a file in memory, of `size` bytes, is the pool.
    fn accepts(&self, file: impl AsFd, size: u64) -> bool {
        match self {
            PoolChoice::Size(wanted) => size == *wanted,
            PoolChoice::Marked => name_of(file).is_some(),
            PoolChoice::Named(wanted) => name_of(file).as_ref() == Some(wanted),
        }
    }
}

impl fmt::Display for PoolChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PoolChoice::Size(bytes) => write!(f, "a file of {}", size(*bytes)),
            PoolChoice::Marked => f.write_str("a pool with the mark"),
            PoolChoice::Named(name) => write!(f, "the pool {name}"),
        }
    }
}

/// Returns the name of the pool that a file in memory holds: an empty one without a name, `None` without a mark.
fn name_of(file: impl AsFd) -> Option<String> {
    let mut head = [0; POOL_HEAD_LEN];
    // A file that cannot be read has no mark.
    let read = rustix::io::pread(file, &mut head, 0).unwrap_or(0);
    pool_name(&head[..read]).map(str::to_owned)
}

/// Returns `true` for a file in memory: of no other one does the kernel have seals.
pub(super) fn is_in_memory(file: impl AsFd) -> bool {
    rustix::fs::fcntl_get_seals(file).is_ok()
}

/// Region that a frontend has handed over.
#[derive(Clone, Copy, Debug)]
struct HeldRegion {
    region: MemoryRegion,
    file: FileIdentity,
    /// Bytes of the file.
    size: u64,
    /// The backend has it.
    is_lent: bool,
}

/// Memory that a backend does not get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Withheld {
    /// Bytes of the files.
    pub bytes: u64,
}

/// Regions that a frontend has handed over: those of the pool, and those that the backend does not get.
#[derive(Debug, Default)]
pub(super) struct HeldRegions(Vec<HeldRegion>);

impl HeldRegions {
    /// Takes the memory table in place of all regions, one file for each. Returns one mark for each: it is the pool's.
    ///
    /// # Errors
    ///
    /// Returns [`ProxyFault`] if a table with regions has none of the pool, or if two files could be the pool.
    pub(super) fn replace(
        &mut self,
        regions: &[MemoryRegion],
        files: &Descriptors,
        choice: &PoolChoice,
    ) -> Result<Vec<bool>, ProxyFault> {
        let each = regions.iter().zip(files.each());
        let each = each.map(|(region, file)| hold(*region, file, choice));
        let held = HeldRegions(each.collect::<Result<_, _>>()?);
        held.check(choice)?;
        if !regions.is_empty() && held.lent().is_none() {
            let bytes = held.withheld().bytes;
            return Err(ProxyFault::NoPool { bytes, pool: choice.to_string() });
        }
        *self = held;
        Ok(self.0.iter().map(|held| held.is_lent).collect())
    }

    /// Adds a region. Returns `true` if it is the pool's.
    ///
    /// # Errors
    ///
    /// Returns [`ProxyFault`] if two files could be the pool, and for too many regions.
    pub(super) fn add(
        &mut self,
        region: MemoryRegion,
        file: impl AsFd,
        choice: &PoolChoice,
    ) -> Result<bool, ProxyFault> {
        if self.0.len() >= ADDED_MAX {
            return Err(ProxyFault::Regions { limit: ADDED_MAX });
        }
        let held = hold(region, file, choice)?;
        self.0.push(held);
        self.check(choice)?;
        Ok(held.is_lent)
    }

    /// Removes a region. Returns `true` if the backend has it.
    ///
    /// # Errors
    ///
    /// Returns [`ProxyFault::NoRegion`] if it was not added.
    pub(super) fn remove(&mut self, region: &MemoryRegion) -> Result<bool, ProxyFault> {
        let key = |region: &MemoryRegion| (region.guest, region.len, region.user);
        let found = self.0.iter().position(|held| key(&held.region) == key(region));
        let found = found.ok_or(ProxyFault::NoRegion { address: region.guest })?;
        Ok(self.0.remove(found).is_lent)
    }

    /// Returns `true` if an address of the frontend's lies in a region of the pool.
    pub(super) fn lends(&self, address: u64) -> bool {
        let contains = |MemoryRegion { user, len, .. }: MemoryRegion| {
            address.checked_sub(user).is_some_and(|offset| offset < len)
        };
        self.0.iter().any(|held| held.is_lent && contains(held.region))
    }

    /// Returns `true` if a region has this file.
    pub(super) fn has_file(&self, file: FileIdentity) -> bool {
        self.0.iter().any(|held| held.file == file)
    }

    /// Returns the pool, for a report.
    pub(super) fn lent(&self) -> Option<HandedOver> {
        let pool = self.0.iter().find(|held| held.is_lent)?;
        Some(HandedOver { bytes: pool.size, is_pool: true })
    }

    /// Returns the memory that the backend does not get, each file once.
    pub(super) fn withheld(&self) -> Withheld {
        let others = || self.0.iter().enumerate().filter(|(_, held)| !held.is_lent);
        let is_first = |(number, held): &(usize, &HeldRegion)| {
            others().all(|(other, found)| other >= *number || found.file != held.file)
        };
        let sizes = others().filter(is_first).map(|(_, held)| held.size);
        Withheld { bytes: sizes.fold(0, u64::saturating_add) }
    }

    /// Checks that one file alone is the pool.
    fn check(&self, choice: &PoolChoice) -> Result<(), ProxyFault> {
        let mut pools = self.0.iter().filter(|held| held.is_lent).map(|held| held.file);
        let first = pools.next();
        match pools.all(|file| Some(file) == first) {
            true => Ok(()),
            false => Err(ProxyFault::Ambiguous { pool: choice.to_string() }),
        }
    }
}

/// Examines a region and its file.
fn hold(
    region: MemoryRegion,
    file: impl AsFd,
    choice: &PoolChoice,
) -> Result<HeldRegion, ProxyFault> {
    let failed = |source: Errno| ProxyFault::System { what: "a file of memory", source };
    let size = size_of(&file).map_err(failed)?;
    // Whoever has the file can map all of it.
    let is_whole = region.offset == 0 && region.len == size;
    let is_lent = is_whole && is_in_memory(&file) && choice.accepts(&file, size);
    Ok(HeldRegion { region, file: identity(&file).map_err(failed)?, size, is_lent })
}

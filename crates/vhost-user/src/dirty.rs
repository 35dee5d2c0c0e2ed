//! Log of the pages that a device has written, by which a hypervisor migrates a machine that runs (QEMU's interface
//! description "vhost-user", "Migration").
//!
//! ```text
//! SET_LOG_BASE           the file of the log
//! SET_FEATURES           LOG_ALL switches marks on and off
//! SET_VRING_ADDR         LOG_USED: the used ring too, at an address of its own
//! ```

use ringfence_ring::split::pagelog::PageLog;
use ringfence_sys::descriptors::Descriptors;
use ringfence_wire::vhost_user::DirtyArea;

use crate::ClientFault;
use crate::memory::{map_file, only};

/// Maximum length of the log's file in bytes: a bit for each page of 2^48 bytes.
const FILE_MAX: u64 = 1 << (48 - 12 - 3);

/// Log that a hypervisor passed, and the switch.
#[derive(Debug, Default)]
pub struct DirtyLog {
    log: Option<PageLog>,
    is_on: bool,
}

impl DirtyLog {
    /// Returns `true` if written pages must be marked.
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    /// Switches marks on or off.
    pub(crate) fn switch(&mut self, is_on: bool) {
        self.is_on = is_on;
    }

    /// Maps the file of a log, in place of an earlier one. Returns `true` if marks were on without a log: pages that were
    /// written since are in none.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault`] if the log does not lie in the file, or the file can shrink.
    pub(crate) fn map(&mut self, area: DirtyArea, files: Descriptors) -> Result<bool, ClientFault> {
        let bitmap = map_file(&only(files)?, area.offset, area.len, FILE_MAX)?;
        Ok(self.log.replace(PageLog::new(bitmap)).is_none() && self.is_on)
    }

    /// Marks the pages of `len` bytes at an address of a descriptor, which were written before, if marks are on.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault::Unlogged`] if the log has no bit for them.
    pub fn mark(&self, address: u64, len: usize) -> Result<(), ClientFault> {
        match self.log.as_ref().filter(|_| self.is_on) {
            Some(log) => log.mark(address, len).map_err(|_| ClientFault::Unlogged { address, len }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{log_file, memfd};

    #[test]
    fn log_that_can_shrink_or_ends_before_its_place_is_refused() {
        let area = |len, offset| DirtyArea { len, offset };
        let mut log = DirtyLog::default();
        let mut map = |file, area| log.map(area, vec![file].into()).unwrap_err();
        let unsealed = map(memfd(4096).unwrap(), area(4096, 0));
        assert!(matches!(unsealed, ClientFault::Unsealed), "{unsealed}");
        let short = map(log_file(4096).unwrap(), area(4096, 1));
        assert!(matches!(short, ClientFault::Region { .. }), "{short}");
        let empty = map(log_file(4096).unwrap(), area(0, 0));
        assert!(matches!(empty, ClientFault::Region { .. }), "{empty}");
        let none = log.map(area(4096, 0), Descriptors::default()).unwrap_err();
        assert!(matches!(none, ClientFault::Files { count: 0, needed: 1 }), "{none}");
    }

    #[test]
    fn log_with_an_odd_offset_is_a_fault_at_the_first_mark() {
        let mut log = DirtyLog::default();
        let area = DirtyArea { len: 8, offset: 1 };
        assert!(!log.map(area, vec![log_file(4096).unwrap()].into()).unwrap());
        log.mark(0, 1).unwrap();
        log.switch(true);
        let fault = log.mark(0, 1).unwrap_err();
        assert!(matches!(fault, ClientFault::Unlogged { address: 0, len: 1 }), "{fault}");
    }
}

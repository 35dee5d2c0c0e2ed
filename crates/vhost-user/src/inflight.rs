//! Log of the chains in flight, as a hypervisor passes it: the logs of all vrings, one behind the other.

use ringfence_memory::LentSlice;
use ringfence_ring::split::inflight::InflightLog;
use ringfence_sys::descriptors::Descriptors;
use ringfence_sys::numbers::usize_from;
use ringfence_wire::vhost_user::InflightArea;

use crate::ClientFault;
use crate::device::LOG_FILE_MAX;
use crate::memory::{map_file, only};

/// Entries for which a vring's log has room, whatever the hypervisor asks for: the most that QEMU lets a driver choose. With
/// QEMU 10 the firmware uses 256 where QEMU asks for 128.
const ENTRIES: u16 = 1024;

/// Log that a hypervisor passed.
#[derive(Debug)]
pub(crate) struct PassedLog {
    memory: LentSlice,
    queues: u16,
    /// Entries of each vring's log.
    entries: u16,
}

impl PassedLog {
    /// Returns the length of a new log in bytes, for a device with so many vrings.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault::Log`] for more queues or entries than the device can have.
    pub(crate) fn bytes(area: InflightArea, vrings: usize) -> Result<u64, ClientFault> {
        PassedLog::bytes_of(area, area.queue_size.max(ENTRIES), vrings)
    }

    /// Returns the length of a log with so many entries for each vring.
    fn bytes_of(area: InflightArea, entries: u16, vrings: usize) -> Result<u64, ClientFault> {
        let InflightArea { len, queues, queue_size, .. } = area;
        let needed = u64::from(queues) * InflightLog::bytes(entries) as u64;
        let is_possible =
            (1..=vrings).contains(&usize::from(queues)) && queue_size > 0 && needed <= LOG_FILE_MAX;
        is_possible.then_some(needed).ok_or(ClientFault::Log { queues, queue_size, len })
    }

    /// Maps the file of a log. One of another backend has room for as many entries as the hypervisor asked for.
    ///
    /// # Errors
    ///
    /// As [`PassedLog::bytes`], also for a log that is too short. Returns other [`ClientFault`]s if it does not lie in the
    /// file, or the file can shrink.
    pub(crate) fn map(
        area: InflightArea,
        files: Descriptors,
        vrings: usize,
    ) -> Result<PassedLog, ClientFault> {
        let InflightArea { len, offset, queues, queue_size, .. } = area;
        let of =
            |entries| PassedLog::bytes_of(area, entries, vrings).map(|needed| (entries, needed));
        let (entries, needed) = match of(queue_size.max(ENTRIES)) {
            Ok(found) if found.1 <= len => found,
            _ => of(queue_size)?,
        };
        if len < needed {
            return Err(ClientFault::Log { queues, queue_size, len });
        }
        let memory = map_file(&only(files)?, offset, needed, LOG_FILE_MAX)?;
        Ok(PassedLog { memory, queues, entries })
    }

    /// Returns the log of a vring with so many entries: its memory, and the entries for which it has room.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault::Log`] for a vring that the log does not have.
    pub(crate) fn of_vring(&self, index: u32, size: u32) -> Result<(LentSlice, u16), ClientFault> {
        let PassedLog { memory, queues, entries } = self;
        let (queues, entries) = (*queues, *entries);
        let len = memory.len() as u64;
        // A driver can choose fewer entries than the hypervisor offers it.
        if index >= u32::from(queues) || size > u32::from(entries) {
            return Err(ClientFault::Log { queues, queue_size: entries, len });
        }
        let bytes = InflightLog::bytes(entries);
        let log = memory.slice(usize_from(index) * bytes, bytes);
        match log {
            Ok(log) => Ok((log, entries)),
            Err(_) => Err(ClientFault::Log { queues, queue_size: entries, len }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::log_file;

    fn area(len: u64, queue_size: u16) -> InflightArea {
        InflightArea { len, offset: 0, queues: 2, queue_size, is_padded: false }
    }

    #[test]
    fn new_log_has_room_for_more_entries_than_the_hypervisor_asks_for() {
        let asked = area(0, 128);
        let given = area(PassedLog::bytes(asked, 2).unwrap(), 128);
        let log = PassedLog::map(given, vec![log_file(given.len).unwrap()].into(), 2).unwrap();
        for (index, size) in [(0, 8), (1, 128), (1, 256), (1, 1024)] {
            assert_eq!(log.of_vring(index, size).unwrap().1, 1024, "{size}");
        }
        log.of_vring(1, 2048).unwrap_err();
        log.of_vring(2, 8).unwrap_err();
        let many = area(0, 4096);
        assert_eq!(PassedLog::bytes(many, 2).unwrap(), 2 * InflightLog::bytes(4096) as u64);
    }

    #[test]
    fn shorter_log_has_the_entries_that_the_hypervisor_asked_for() {
        let len = 2 * InflightLog::bytes(128) as u64;
        let map = |len| PassedLog::map(area(len, 128), vec![log_file(1 << 20).unwrap()].into(), 2);
        let log = map(len).unwrap();
        assert_eq!(log.of_vring(1, 128).unwrap().1, 128);
        log.of_vring(1, 256).unwrap_err();
        map(len - 1).unwrap_err();
    }
}

//! Log of the chains in flight, as a hypervisor passes it: the logs of all vrings, one behind the other.

use ringfence_memory::LentSlice;
use ringfence_ring::split::inflight::InflightLog;
use ringfence_sys::descriptors::Descriptors;
use ringfence_sys::numbers::usize_from;
use ringfence_wire::vhost_user::InflightArea;

use crate::ClientFault;
use crate::device::LOG_FILE_MAX;
use crate::memory::{map_file, only};

/// Log that a hypervisor passed.
#[derive(Debug)]
pub(crate) struct PassedLog {
    memory: LentSlice,
    queues: u16,
    queue_size: u16,
}

impl PassedLog {
    /// Returns the length of a log in bytes, of a device with so many vrings.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault::Log`] for more queues or entries than the device can have.
    pub(crate) fn bytes(area: InflightArea, vrings: usize) -> Result<u64, ClientFault> {
        let InflightArea { len, queues, queue_size, .. } = area;
        let needed = u64::from(queues) * InflightLog::bytes(queue_size) as u64;
        let is_possible =
            (1..=vrings).contains(&usize::from(queues)) && queue_size > 0 && needed <= LOG_FILE_MAX;
        is_possible.then_some(needed).ok_or(ClientFault::Log { queues, queue_size, len })
    }

    /// Maps the file of a log.
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
        let needed = PassedLog::bytes(area, vrings)?;
        if len < needed {
            return Err(ClientFault::Log { queues, queue_size, len });
        }
        let memory = map_file(&only(files)?, offset, needed, LOG_FILE_MAX)?;
        Ok(PassedLog { memory, queues, queue_size })
    }

    /// Returns the log of a vring with so many entries: its memory, and the entries for which it has room.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault::Log`] for a vring that the log does not have.
    pub(crate) fn of_vring(&self, index: u32, size: u32) -> Result<(LentSlice, u16), ClientFault> {
        let PassedLog { memory, queues, queue_size } = self;
        let (queues, queue_size) = (*queues, *queue_size);
        let len = memory.len() as u64;
        // A driver can choose fewer entries than the hypervisor offers it.
        if index >= u32::from(queues) || size > u32::from(queue_size) {
            return Err(ClientFault::Log { queues, queue_size, len });
        }
        let bytes = InflightLog::bytes(queue_size);
        let log = memory.slice(usize_from(index) * bytes, bytes);
        match log {
            Ok(log) => Ok((log, queue_size)),
            Err(_) => Err(ClientFault::Log { queues, queue_size, len }),
        }
    }
}

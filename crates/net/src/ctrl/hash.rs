//! Hash configuration of a guest, set by messages of the control ring.
//!
//! The module does no I/O: its input is a message with the content of its page, its output a status. The
//! rules are those of netif.h ("Control messages"). Limits that netif leaves to the backend are constants.

use ringfence_frame::steer::Steering;
use ringfence_offload::flow_hash::FlowFieldSet;
use ringfence_wire::netif::ctrl::{CtrlStatus, HashTypes};
use ringfence_wire::netif::extra::HashType;
use ringfence_wire::numbers::{bounded, usize_from};

/// Maximum length of a key in bytes: sufficient for the longest input.
pub const KEY_MAX: u16 = 40;

/// Maximum number of entries of the table from hash to queue.
pub const TABLE_MAX: u32 = 1024;

/// Numbers of the algorithms "none" and "Toeplitz" (`XEN_NETIF_CTRL_HASH_ALGORITHM_*`).
const ALGORITHM_NONE: u32 = 0;
const ALGORITHM_TOEPLITZ: u32 = 1;

/// Hash configuration of one guest.
#[derive(Clone, Debug)]
pub struct HashSetup {
    queues: u16,
    toeplitz: bool,
    types: HashTypes,
    key: Vec<u8>,
    table: Vec<u16>,
}

impl HashSetup {
    /// Makes an empty configuration for a guest with `queues` queues.
    pub fn new(queues: u16) -> HashSetup {
        HashSetup {
            queues,
            toeplitz: false,
            types: HashTypes::default(),
            key: Vec::new(),
            table: Vec::new(),
        }
    }

    /// Encodes algorithm, types, length of the key, key, and table, in little endian, for a crash journal.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![u8::from(self.toeplitz)];
        bytes.extend(self.types.mask().to_le_bytes());
        // At most KEY_MAX.
        bytes.push(bounded(self.key.len(), u8::MAX));
        bytes.extend(&self.key);
        bytes.extend(self.table.iter().flat_map(|queue| queue.to_le_bytes()));
        bytes
    }

    /// Decodes a configuration; `None` if it is invalid for a guest with `queues` queues.
    pub(super) fn from_bytes(queues: u16, bytes: &[u8]) -> Option<HashSetup> {
        let (toeplitz, rest) = bytes.split_first()?;
        let (types, rest) = rest.split_first_chunk::<4>()?;
        let (length, rest) = rest.split_first()?;
        let (key, table) = rest.split_at_checked(usize::from(*length))?;
        let word = |entry: &[u8]| Some(u16::from_le_bytes(entry.try_into().ok()?));
        let table = table.chunks(2).map(word).collect::<Option<Vec<u16>>>()?;
        let types = HashTypes::from_mask(u32::from_le_bytes(*types))?;
        let right = key.len() <= usize::from(KEY_MAX)
            && table.len() <= TABLE_MAX as usize
            && table.iter().all(|queue| *queue < queues);
        let key = key.to_vec();
        right.then_some(HashSetup { queues, toeplitz: *toeplitz != 0, types, key, table })
    }

    /// Returns the configuration for the data path; `None` if packets are not hashed.
    pub fn steering(&self) -> Option<Steering> {
        let on = self.toeplitz && !self.types.is_empty();
        let fields = FlowFieldSet {
            ipv4: self.types.contains(HashType::Ipv4),
            ipv4_tcp: self.types.contains(HashType::Ipv4Tcp),
            ipv6: self.types.contains(HashType::Ipv6),
            ipv6_tcp: self.types.contains(HashType::Ipv6Tcp),
        };
        on.then(|| Steering::new(&self.key, fields, self.table.clone(), self.queues))
    }

    /// Sets the algorithm (`SET_HASH_ALGORITHM`): none or Toeplitz.
    pub fn set_algorithm(&mut self, algorithm: u32) -> CtrlStatus {
        match algorithm {
            ALGORITHM_NONE => self.toeplitz = false,
            ALGORITHM_TOEPLITZ => self.toeplitz = true,
            _ => return CtrlStatus::InvalidParameter,
        }
        CtrlStatus::Success
    }

    /// Executes `GET_HASH_FLAGS`: returns the supported types, once an algorithm is set.
    pub fn types(&self) -> Result<HashTypes, CtrlStatus> {
        if self.toeplitz { Ok(HashTypes::ALL) } else { Err(CtrlStatus::NotSupported) }
    }

    /// Sets the hashed packet types (`SET_HASH_FLAGS`).
    pub fn set_types(&mut self, types: HashTypes) -> CtrlStatus {
        if !self.toeplitz {
            return CtrlStatus::NotSupported;
        }
        self.types = types;
        CtrlStatus::Success
    }

    /// Validates the length of a key, before its page is copied.
    pub fn validate_key(bytes: u16) -> CtrlStatus {
        if bytes > KEY_MAX { CtrlStatus::BufferOverflow } else { CtrlStatus::Success }
    }

    /// Executes `SET_HASH_KEY`: replaces the key. With an empty key every hash is 0.
    pub fn set_key(&mut self, key: &[u8]) -> CtrlStatus {
        if key.len() > usize::from(KEY_MAX) {
            return CtrlStatus::BufferOverflow;
        }
        self.key = key.to_vec();
        CtrlStatus::Success
    }

    /// Executes `SET_HASH_MAPPING_SIZE`: replaces the table by one of zeros.
    pub fn set_table_size(&mut self, entries: u32) -> CtrlStatus {
        if entries > TABLE_MAX {
            return CtrlStatus::InvalidParameter;
        }
        self.table = vec![0; entries as usize];
        CtrlStatus::Success
    }

    /// Validates the range of table entries, before their page is copied.
    pub fn validate_entries(&self, entries: u16, first: u32) -> CtrlStatus {
        let end = first.checked_add(entries.into());
        match end.and_then(|end| usize::try_from(end).ok()) {
            Some(end) if end <= self.table.len() => CtrlStatus::Success,
            // As Linux's netback answers.
            _ => CtrlStatus::InvalidParameter,
        }
    }

    /// Executes `SET_HASH_MAPPING`: sets all of the entries, or none.
    pub fn set_entries(&mut self, entries: &[u32], first: u32) -> CtrlStatus {
        let count = u16::try_from(entries.len()).unwrap_or(u16::MAX);
        let status = self.validate_entries(count, first);
        if status != CtrlStatus::Success {
            return status;
        }
        let queue = |entry: &u32| u16::try_from(*entry).ok().filter(|queue| *queue < self.queues);
        let Some(entries) = entries.iter().map(queue).collect::<Option<Vec<u16>>>() else {
            return CtrlStatus::InvalidParameter;
        };
        // `validate_entries` has checked the range.
        let start = usize_from(first);
        if let Some(places) = self.table.get_mut(start..start.saturating_add(entries.len())) {
            places.copy_from_slice(&entries);
        }
        CtrlStatus::Success
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_flags_without_algorithm_are_refused() {
        let mut setup = HashSetup::new(2);
        assert_eq!(setup.types(), Err(CtrlStatus::NotSupported));
        assert_eq!(setup.set_types(HashTypes::ALL), CtrlStatus::NotSupported);
        assert_eq!(setup.set_algorithm(2), CtrlStatus::InvalidParameter);
        assert_eq!(setup.set_algorithm(1), CtrlStatus::Success);
        assert_eq!(setup.types(), Ok(HashTypes::ALL));
        assert!(setup.steering().is_none(), "no type is hashed yet");
        assert_eq!(setup.set_types(HashTypes::ALL), CtrlStatus::Success);
        assert!(setup.steering().is_some());
        assert_eq!(setup.set_algorithm(0), CtrlStatus::Success);
        assert!(setup.steering().is_none());
    }

    #[test]
    fn encoded_configuration_decodes_to_same() {
        let mut setup = HashSetup::new(2);
        assert_eq!(setup.set_algorithm(1), CtrlStatus::Success);
        assert_eq!(setup.set_types(HashTypes::ALL), CtrlStatus::Success);
        assert_eq!(setup.set_key(&[9; 40]), CtrlStatus::Success);
        assert_eq!(setup.set_table_size(3), CtrlStatus::Success);
        assert_eq!(setup.set_entries(&[1, 1], 1), CtrlStatus::Success);
        let bytes = setup.to_bytes();
        assert_eq!(HashSetup::from_bytes(2, &bytes).unwrap().to_bytes(), bytes);
        assert!(HashSetup::from_bytes(1, &bytes).is_none(), "it has no queue 1");
        for cut in 0..bytes.len() {
            let _ = HashSetup::from_bytes(2, &bytes[..cut]);
        }
    }

    #[test]
    fn key_and_table_beyond_limits_are_refused() {
        let mut setup = HashSetup::new(2);
        assert_eq!(HashSetup::validate_key(41), CtrlStatus::BufferOverflow);
        assert_eq!(setup.set_key(&[1; 41]), CtrlStatus::BufferOverflow);
        assert_eq!(setup.set_key(&[1; 40]), CtrlStatus::Success);
        assert_eq!(setup.set_table_size(TABLE_MAX + 1), CtrlStatus::InvalidParameter);
        assert_eq!(setup.set_table_size(4), CtrlStatus::Success);
        for (entries, first) in [(5, 0), (1, 4), (1, u32::MAX), (u16::MAX, u32::MAX)] {
            assert_eq!(setup.validate_entries(entries, first), CtrlStatus::InvalidParameter);
        }
        assert_eq!(setup.set_entries(&[1, 0, 1], 1), CtrlStatus::Success);
        assert_eq!(setup.table, [0, 1, 0, 1]);
    }

    #[test]
    fn invalid_entry_leaves_table_unchanged() {
        let mut setup = HashSetup::new(2);
        assert_eq!(setup.set_table_size(3), CtrlStatus::Success);
        assert_eq!(setup.set_entries(&[1, 2, 1], 0), CtrlStatus::InvalidParameter);
        assert_eq!(setup.set_entries(&[1, 0x1_0001], 0), CtrlStatus::InvalidParameter);
        assert_eq!(setup.table, [0, 0, 0]);
        assert_eq!(setup.set_entries(&[1], 0), CtrlStatus::Success);
        assert_eq!(setup.set_table_size(3), CtrlStatus::Success);
        assert_eq!(setup.table, [0, 0, 0], "setting the size empties it");
    }
}

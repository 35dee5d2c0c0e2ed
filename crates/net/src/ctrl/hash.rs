//! What a guest set up over the control ring about hashing, message by message.
//!
//! Pure: a message and the content of its page go in, a status comes out. The rules are those of
//! netif.h ("Control messages"); limits that it leaves to the backend are constants here.

use ringfence_wire::netif::ctrl::{CtrlStatus, HashTypes};

use ringfence_frame::steer::Steering;

/// Bytes of the longest key taken: one for the longest input.
pub const KEY_MAX: u16 = 40;

/// Entries of the longest table from hash to queue.
pub const TABLE_MAX: u32 = 1024;

/// The algorithm that is not one, and the one there is (`XEN_NETIF_CTRL_HASH_ALGORITHM_*`).
const ALGORITHM_NONE: u32 = 0;
const ALGORITHM_TOEPLITZ: u32 = 1;

/// The state.
#[derive(Clone, Debug)]
pub struct HashSetup {
    queues: u16,
    toeplitz: bool,
    types: HashTypes,
    key: Vec<u8>,
    table: Vec<u16>,
}

impl HashSetup {
    /// Nothing is set up; the guest has `queues` queues.
    pub fn new(queues: u16) -> HashSetup {
        HashSetup {
            queues,
            toeplitz: false,
            types: HashTypes::default(),
            key: Vec::new(),
            table: Vec::new(),
        }
    }

    /// For a record of it: algorithm, types, length of the key, key, table; little endian.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![u8::from(self.toeplitz)];
        bytes.extend(self.types.mask().to_le_bytes());
        // At most KEY_MAX.
        bytes.push(u8::try_from(self.key.len()).unwrap_or(0));
        bytes.extend(&self.key);
        bytes.extend(self.table.iter().flat_map(|queue| queue.to_le_bytes()));
        bytes
    }

    /// As it was recorded; `None` if a guest of so many queues cannot have set that up.
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

    /// What follows for the data path; `None`: packets are not hashed.
    pub fn steering(&self) -> Option<Steering> {
        let on = self.toeplitz && !self.types.is_empty();
        on.then(|| Steering::new(&self.key, self.types, self.table.clone(), self.queues))
    }

    /// `SET_HASH_ALGORITHM`
    pub fn set_algorithm(&mut self, algorithm: u32) -> CtrlStatus {
        match algorithm {
            ALGORITHM_NONE => self.toeplitz = false,
            ALGORITHM_TOEPLITZ => self.toeplitz = true,
            _ => return CtrlStatus::InvalidParameter,
        }
        CtrlStatus::Success
    }

    /// `GET_HASH_FLAGS`: what can be hashed, once an algorithm was chosen.
    pub fn types(&self) -> Result<HashTypes, CtrlStatus> {
        if self.toeplitz { Ok(HashTypes::ALL) } else { Err(CtrlStatus::NotSupported) }
    }

    /// `SET_HASH_FLAGS`
    pub fn set_types(&mut self, types: HashTypes) -> CtrlStatus {
        if !self.toeplitz {
            return CtrlStatus::NotSupported;
        }
        self.types = types;
        CtrlStatus::Success
    }

    /// Whether a key of so many bytes is taken; to be asked before its page is fetched.
    pub fn judge_key(bytes: u16) -> CtrlStatus {
        if bytes > KEY_MAX { CtrlStatus::BufferOverflow } else { CtrlStatus::Success }
    }

    /// `SET_HASH_KEY`: the old one goes. One of no bytes makes every hash 0.
    pub fn set_key(&mut self, key: &[u8]) -> CtrlStatus {
        if key.len() > usize::from(KEY_MAX) {
            return CtrlStatus::BufferOverflow;
        }
        self.key = key.to_vec();
        CtrlStatus::Success
    }

    /// `SET_HASH_MAPPING_SIZE`: the old table goes; the new one is filled with zeros.
    pub fn set_table_size(&mut self, entries: u32) -> CtrlStatus {
        if entries > TABLE_MAX {
            return CtrlStatus::InvalidParameter;
        }
        self.table = vec![0; entries as usize];
        CtrlStatus::Success
    }

    /// Whether so many entries from `first` on are in the table; to be asked before their page is
    /// fetched.
    pub fn judge_entries(&self, entries: u16, first: u32) -> CtrlStatus {
        let end = first.checked_add(entries.into());
        match end.and_then(|end| usize::try_from(end).ok()) {
            Some(end) if end <= self.table.len() => CtrlStatus::Success,
            _ => CtrlStatus::BufferOverflow,
        }
    }

    /// `SET_HASH_MAPPING`: all of the entries, or none.
    pub fn set_entries(&mut self, entries: &[u32], first: u32) -> CtrlStatus {
        let count = u16::try_from(entries.len()).unwrap_or(u16::MAX);
        let status = self.judge_entries(count, first);
        if status != CtrlStatus::Success {
            return status;
        }
        let queue = |entry: &u32| u16::try_from(*entry).ok().filter(|queue| *queue < self.queues);
        let Some(entries) = entries.iter().map(queue).collect::<Option<Vec<u16>>>() else {
            return CtrlStatus::InvalidParameter;
        };
        // judge_entries() has seen to the range.
        let start = usize::try_from(first).unwrap_or(usize::MAX);
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
    fn flags_come_after_the_algorithm() {
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
    fn what_was_set_up_can_be_recorded() {
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
    fn keys_and_tables_have_bounds() {
        let mut setup = HashSetup::new(2);
        assert_eq!(HashSetup::judge_key(41), CtrlStatus::BufferOverflow);
        assert_eq!(setup.set_key(&[1; 41]), CtrlStatus::BufferOverflow);
        assert_eq!(setup.set_key(&[1; 40]), CtrlStatus::Success);
        assert_eq!(setup.set_table_size(TABLE_MAX + 1), CtrlStatus::InvalidParameter);
        assert_eq!(setup.set_table_size(4), CtrlStatus::Success);
        for (entries, first) in [(5, 0), (1, 4), (1, u32::MAX), (u16::MAX, u32::MAX)] {
            assert_eq!(setup.judge_entries(entries, first), CtrlStatus::BufferOverflow);
        }
        assert_eq!(setup.set_entries(&[1, 0, 1], 1), CtrlStatus::Success);
        assert_eq!(setup.table, [0, 1, 0, 1]);
    }

    #[test]
    fn a_table_is_changed_as_a_whole_or_not_at_all() {
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

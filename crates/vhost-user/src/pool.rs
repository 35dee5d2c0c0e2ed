//! Rule for the memory that a frontend hands over, and the report on it.
//!
//! A frontend that lends a pool hands over files which hold nothing but the pool. So the whole file counts, also where
//! its region is a part of it: whoever has the file can map all of it.
//!
//! The bytes of a pool are those of its files, each counted once. With [`PoolRule::Marked`] every region is a whole file
//! that begins with [`POOL_MARK`].

use ringfence_memory::LentSlice;
use ringfence_sys::descriptors::FileIdentity;
use ringfence_wire::vhost_user::{MemoryRegion, POOL_MARK};
use serde::{Deserialize, Serialize};

/// Rule for the memory that a device accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PoolRule {
    /// Any memory, up to all of the machine's.
    #[default]
    Any,
    /// Files of at most this many bytes in all.
    AtMost(u64),
    /// Whole files that begin with the mark of a pool.
    Marked,
}

/// Memory that a frontend has handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandedOver {
    /// Bytes of the files.
    pub bytes: u64,
    /// Set if they are a pool, by the device's rule or by their marks.
    pub is_pool: bool,
}

/// Memory that a rule does not admit. The message names the options of QEMU that lend a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolFault {
    /// More memory than the rule admits.
    #[error(
        "vhost-user: the hypervisor hands over {} of memory, and --require-pool admits {}; {}",
        size(*bytes), size(*limit), LENDING
    )]
    TooLarge { bytes: u64, limit: u64 },
    /// Memory without a mark.
    #[error(
        "vhost-user: the hypervisor hands over {} of memory, and not all of it is a pool with the mark; {}",
        size(*bytes), LENDING
    )]
    Unmarked { bytes: u64 },
}

/// Advice on the options of QEMU.
pub(crate) const LENDING: &str = "lend the device a pool: no `-machine memory-backend=`, but \
     `-object memory-backend-memfd,id=pool,size=64M,share=on -device ivshmem-plain,memdev=pool`, \
     `iommu_platform=on` at the device, and the module ringfence-lent-pool in the machine (docs/vhost-user.md)";

/// Files of a memory table.
#[derive(Debug, Default)]
pub(super) struct Files {
    /// Each file once, with its size in bytes. Of a file that grows, the largest one counts.
    seen: Vec<(FileIdentity, u64)>,
    /// Set if a region is only a part of its file.
    has_parts: bool,
}

impl Files {
    /// Adds the file of a region, which has `size` bytes.
    pub(super) fn add(&mut self, region: &MemoryRegion, file: FileIdentity, size: u64) {
        self.has_parts |= region.offset != 0 || region.len != size;
        match self.seen.iter_mut().find(|(seen, _)| *seen == file) {
            Some((_, largest)) => *largest = size.max(*largest),
            None => self.seen.push((file, size)),
        }
    }

    /// Returns the bytes of all files.
    fn bytes(&self) -> u64 {
        self.seen.iter().map(|(_, size)| *size).fold(0, u64::saturating_add)
    }

    /// Applies the part of the rule that does not depend on the content of the files.
    ///
    /// # Errors
    ///
    /// Returns [`PoolFault`] if the rule does not admit these files.
    pub(super) fn check(&self, rule: PoolRule) -> Result<(), PoolFault> {
        let bytes = self.bytes();
        match rule {
            PoolRule::AtMost(limit) if bytes > limit => Err(PoolFault::TooLarge { bytes, limit }),
            PoolRule::Marked if self.has_parts => Err(PoolFault::Unmarked { bytes }),
            PoolRule::Any | PoolRule::AtMost(_) | PoolRule::Marked => Ok(()),
        }
    }

    /// Applies the rest of the rule to the mapped regions. Returns the memory for a report, or `None` without any.
    ///
    /// # Errors
    ///
    /// Returns [`PoolFault`] if the rule wants marks, and a region has none.
    pub(super) fn accept<'a>(
        &self,
        rule: PoolRule,
        mut regions: impl Iterator<Item = &'a LentSlice>,
    ) -> Result<Option<HandedOver>, PoolFault> {
        let bytes = self.bytes();
        let is_marked = !self.has_parts && regions.all(has_mark);
        if rule == PoolRule::Marked && !is_marked {
            return Err(PoolFault::Unmarked { bytes });
        }
        let is_pool = is_marked || matches!(rule, PoolRule::AtMost(_));
        Ok((bytes > 0).then_some(HandedOver { bytes, is_pool }))
    }
}

/// Returns `true` if the memory begins with the mark of a pool.
fn has_mark(memory: &LentSlice) -> bool {
    let mut found = [0; POOL_MARK.len()];
    memory.copy_to(0, &mut found).is_ok() && found == POOL_MARK
}

/// Formats a number of bytes in the largest unit that divides it.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut count = bytes;
    while unit + 1 < UNITS.len() && count > 0 && count.is_multiple_of(1024) {
        (unit, count) = (unit + 1, count / 1024);
    }
    format!("{count} {}", UNITS[unit])
}

impl std::fmt::Display for HandedOver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.is_pool {
            true => write!(f, "lent {}", size(self.bytes)),
            false => write!(f, "sees all of the machine's memory ({})", size(self.bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_names_the_size_and_tells_a_pool_from_other_memory() {
        let text = |bytes, is_pool| HandedOver { bytes, is_pool }.to_string();
        assert_eq!(text(64 << 20, true), "lent 64 MiB");
        assert_eq!(text(4 << 30, false), "sees all of the machine's memory (4 GiB)");
        assert_eq!(text(4097, true), "lent 4097 bytes");
    }

    #[test]
    fn fault_names_the_options_of_qemu() {
        let text = PoolFault::TooLarge { bytes: 4 << 30, limit: 64 << 20 }.to_string();
        for word in ["4 GiB", "--require-pool admits 64 MiB", "ivshmem-plain", "iommu_platform=on"]
        {
            assert!(text.contains(word), "{word}: {text}");
        }
    }
}

//! Counters of a shield.

/// Traffic of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PoolTraffic {
    /// Chains that were copied into it.
    pub(super) chains: u64,
    /// Readable bytes of chains.
    pub(super) bytes_in: u64,
    /// Bytes that backends reported as written.
    pub(super) bytes_out: u64,
    /// Chains that waited for room.
    pub(super) waits: u64,
}

impl PoolTraffic {
    /// Adds the traffic of another pool.
    pub(super) fn add(&mut self, other: PoolTraffic) {
        let PoolTraffic { chains, bytes_in, bytes_out, waits } = other;
        self.chains += chains;
        self.bytes_in += bytes_in;
        self.bytes_out += bytes_out;
        self.waits += waits;
    }
}

/// Counters of a shield since its start.
#[derive(Clone, Copy, Debug, Default)]
pub struct ShieldTotals {
    pub(super) traffic: PoolTraffic,
    /// Connections to backends.
    pub(super) backends: u64,
    /// Notices of changes for hypervisors.
    pub(super) notices: u64,
}

impl ShieldTotals {
    /// Returns the counters with their names.
    pub fn named(&self) -> [(&'static str, u64); 6] {
        let PoolTraffic { chains, bytes_in, bytes_out, waits } = self.traffic;
        [
            ("requests", chains),
            ("bytes_to_backend", bytes_in),
            ("bytes_from_backend", bytes_out),
            ("waits_for_pool", waits),
            ("backends", self.backends),
            ("config_changes", self.notices),
        ]
    }
}

//! What one domain may use up, and how often something was refused.
//!
//! A domain that is not privileged pays for what it owns: nodes, watches, transactions, output that
//! it does not read. Privileged connections are exempt, but for two bounds: the depth of a path,
//! which bounds recursion over the tree (XSA-418), and a wide bound on unread output.

use ringfence_wire::xenstore::ErrorName;

/// Paths are never deeper than this, whatever [`Limits::depth`] says: the tree is walked and dropped
/// recursively.
pub const DEPTH_MAX: usize = 64;

/// Most characters of a watch's token: with the longest path it just fits into one event.
pub(super) const TOKEN_MAX: usize = 4096 - 3072 - 2;

/// Bounds for each unprivileged domain, all its connections together where nothing else is said.
/// The defaults are those of xenstored where it has such a bound.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Nodes owned. Default 1000.
    pub nodes: usize,
    /// Bytes of names and values in these nodes. Default 512 KiB.
    pub node_bytes: usize,
    /// Bytes of one value. Default 2048.
    pub value_bytes: usize,
    /// Permission entries of one node. Default 5.
    pub permissions: usize,
    /// Names in a path, for privileged connections as well; at most [`DEPTH_MAX`]. Default 32.
    pub depth: usize,
    /// Watches. Default 128.
    pub watches: usize,
    /// Open transactions. Default 10.
    pub transactions: usize,
    /// Nodes that one transaction looks at. Default 1024.
    pub transaction_nodes: usize,
    /// Bytes of paths and values that one transaction remembers. Default 256 KiB.
    pub transaction_bytes: usize,
    /// Connections. Default 4.
    pub connections: usize,
    /// Unread output of one connection above which its requests are not read. For a privileged
    /// connection: above which no unprivileged domain's requests are read. Default 64 KiB.
    pub output_soft: usize,
    /// Unread output that ends a connection. Default 512 KiB.
    pub output_hard: usize,
    /// The same for a privileged connection. Default 16 MiB.
    pub output_hard_privileged: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            nodes: 1000,
            node_bytes: 512 << 10,
            value_bytes: 2048,
            permissions: 5,
            depth: 32,
            watches: 128,
            transactions: 10,
            transaction_nodes: 1024,
            transaction_bytes: 256 << 10,
            connections: 4,
            output_soft: 64 << 10,
            output_hard: 512 << 10,
            output_hard_privileged: 16 << 20,
        }
    }
}

macro_rules! quotas {
    ($($(#[$doc:meta])* $variant:ident => $field:ident,)*) => {
        /// A bound of [`Limits`] that a request ran into.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(super) enum Quota { $($(#[$doc])* $variant,)* }

        /// How often each bound refused something, since the server was made.
        #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
        pub struct Refusals { $($(#[$doc])* pub $field: u64,)* }

        impl Refusals {
            /// Each count with its name.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field),)*].into_iter()
            }

            pub(super) fn count(&mut self, quota: Quota) {
                match quota { $(Quota::$variant => self.$field += 1,)* }
            }
        }
    };
}

quotas! {
    /// A node more than [`Limits::nodes`].
    Nodes => nodes,
    /// Names and values beyond [`Limits::node_bytes`].
    NodeBytes => node_bytes,
    /// A value longer than [`Limits::value_bytes`].
    ValueBytes => value_bytes,
    /// More entries than [`Limits::permissions`].
    Permissions => permissions,
    /// A path deeper than [`Limits::depth`].
    Depth => depth,
    /// A watch more than [`Limits::watches`].
    Watches => watches,
    /// A transaction more than [`Limits::transactions`].
    Transactions => transactions,
    /// A node more than [`Limits::transaction_nodes`].
    TransactionNodes => transaction_nodes,
    /// Paths and values beyond [`Limits::transaction_bytes`].
    TransactionBytes => transaction_bytes,
    /// A connection more than [`Limits::connections`].
    Connections => connections,
}

/// What the server counts, since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct StoreCounters {
    /// Requests answered, errors included.
    pub requests: u64,
    /// Requests that were malformed (EINVAL) or unknown (ENOSYS).
    pub malformed: u64,
    /// Requests refused for want of permission (EACCES, EPERM).
    pub denied: u64,
    /// Transactions that ended with EAGAIN.
    pub conflicts: u64,
    /// Watch events queued.
    pub events: u64,
    /// Watch events not queued because an equal one was waiting to be read (XSA-349).
    pub events_merged: u64,
    /// Times a connection's unread output went above [`Limits::output_soft`].
    pub output_paused: u64,
    /// Connections ended because their unread output went above [`Limits::output_hard`].
    pub output_overrun: u64,
    /// Refusals by quota.
    pub refused: Refusals,
}

/// Why a request is not done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Refusal {
    /// By the protocol's rules.
    Error(ErrorName),
    /// By a bound; the client is told `ENOSPC`.
    Quota(Quota),
}

impl Refusal {
    pub(super) fn error_name(self) -> ErrorName {
        match self {
            Refusal::Error(error) => error,
            Refusal::Quota(_) => ErrorName::NoSpace,
        }
    }
}

impl From<ErrorName> for Refusal {
    fn from(error: ErrorName) -> Refusal {
        Refusal::Error(error)
    }
}

impl From<Quota> for Refusal {
    fn from(quota: Quota) -> Refusal {
        Refusal::Quota(quota)
    }
}

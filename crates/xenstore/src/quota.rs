//! Quotas: limits of one domain, and counters of the requests that they refused.
//!
//! An unprivileged domain pays for what it owns: nodes, watches, transactions, unread output. Privileged
//! connections are exempt from all limits but two: the depth of a path, which bounds recursion over the
//! tree (XSA-418), and a high limit of unread output.

use ringfence_wire::xenstore::ErrorName;

/// Maximum depth of a path, whatever [`Limits::depth`] says. The tree is walked and dropped recursively.
pub const DEPTH_MAX: usize = 64;

/// Maximum length of a watch's token in bytes. With the longest path it just fits into one event.
pub(super) const TOKEN_MAX: usize = 4096 - 3072 - 2;

/// Limits of each unprivileged domain, over all its connections unless a field says otherwise. Where
/// xenstored has the same limit, the default is xenstored's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Number of owned nodes. Default 1000.
    pub nodes: usize,
    /// Bytes of names and values in owned nodes. Default 512 KiB.
    pub node_bytes: usize,
    /// Length of one value in bytes. Default 2048.
    pub value_bytes: usize,
    /// Number of permission entries of one node. Default 5.
    pub permissions: usize,
    /// Number of names in a path; applies to privileged connections as well. At most [`DEPTH_MAX`]. Default
    /// 32.
    pub depth: usize,
    /// Number of watches. Default 128.
    pub watches: usize,
    /// Number of open transactions. Default 10.
    pub transactions: usize,
    /// Number of nodes in the read set of one transaction. Default 1024.
    pub transaction_nodes: usize,
    /// Bytes of paths and values that one transaction keeps. Default 256 KiB.
    pub transaction_bytes: usize,
    /// Number of connections. Default 4.
    pub connections: usize,
    /// Unread output of one connection above which its requests are not read. For a privileged connection,
    /// all unprivileged domains' requests are not read either. Default 64 KiB.
    pub output_soft: usize,
    /// Unread output above which a connection is dropped. Default 512 KiB.
    pub output_hard: usize,
    /// Unread output above which a privileged connection is dropped. Default 16 MiB.
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
        /// Limit in [`Limits`] that refused a request.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(super) enum Quota { $($(#[$doc])* $variant,)* }

        /// Counters of refusals by each limit.
        #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
        pub struct Refusals { $($(#[$doc])* pub $field: u64,)* }

        impl Refusals {
            /// Returns each counter with its name.
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
    /// Nodes above [`Limits::nodes`].
    Nodes => nodes,
    /// Names and values above [`Limits::node_bytes`].
    NodeBytes => node_bytes,
    /// Values longer than [`Limits::value_bytes`].
    ValueBytes => value_bytes,
    /// Permission lists longer than [`Limits::permissions`].
    Permissions => permissions,
    /// Paths deeper than [`Limits::depth`].
    Depth => depth,
    /// Watches above [`Limits::watches`].
    Watches => watches,
    /// Transactions above [`Limits::transactions`].
    Transactions => transactions,
    /// Nodes above [`Limits::transaction_nodes`].
    TransactionNodes => transaction_nodes,
    /// Paths and values above [`Limits::transaction_bytes`].
    TransactionBytes => transaction_bytes,
    /// Connections above [`Limits::connections`].
    Connections => connections,
}

/// Counters of a server since its creation.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct StoreCounters {
    /// Requests with a reply, errors included.
    pub requests: u64,
    /// Malformed (EINVAL) or unknown (ENOSYS) requests.
    pub malformed: u64,
    /// Requests refused without permission (EACCES, EPERM).
    pub denied: u64,
    /// Transactions refused with EAGAIN.
    pub conflicts: u64,
    /// Queued watch events.
    pub events: u64,
    /// Watch events that were merged with an equal waiting one (XSA-349).
    pub events_merged: u64,
    /// Number of times that a connection's unread output exceeded [`Limits::output_soft`].
    pub output_paused: u64,
    /// Connections dropped because their unread output exceeded the hard limit.
    pub output_overrun: u64,
    pub refused: Refusals,
}

/// Reasons for which a request is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum QuotaRefusal {
    /// Violation of the protocol's rules.
    Error(ErrorName),
    /// Exceeded limit; the error in the reply is `ENOSPC`.
    Quota(Quota),
}

impl QuotaRefusal {
    pub(super) fn error_name(self) -> ErrorName {
        match self {
            QuotaRefusal::Error(error) => error,
            QuotaRefusal::Quota(_) => ErrorName::NoSpace,
        }
    }
}

impl From<ErrorName> for QuotaRefusal {
    fn from(error: ErrorName) -> QuotaRefusal {
        QuotaRefusal::Error(error)
    }
}

impl From<Quota> for QuotaRefusal {
    fn from(quota: Quota) -> QuotaRefusal {
        QuotaRefusal::Quota(quota)
    }
}

//! Message header and message types.

use crate::macros::enum_with_unknown;

/// Bytes of a [`Header`].
pub const HEADER_LEN: usize = 16;

/// Maximum payload bytes of one message in either direction (`XENSTORE_PAYLOAD_MAX`). A message that
/// announces more ends the connection.
pub const PAYLOAD_MAX: u32 = 4096;

enum_with_unknown! {
    /// Type of a message (`xsd_sockmsg_type`). Number 20 was removed and counts as unknown.
    pub enum MessageType(u32) {
        /// `XS_CONTROL`: commands for the daemon itself.
        Control = 0,
        /// `XS_DIRECTORY`: names of the children.
        Directory = 1,
        /// `XS_READ`: value of a node.
        Read = 2,
        /// `XS_GET_PERMS`: permissions of a node.
        GetPerms = 3,
        /// `XS_WATCH`: requests events for changes at and below a path.
        Watch = 4,
        /// `XS_UNWATCH`: removes a watch.
        Unwatch = 5,
        /// `XS_TRANSACTION_START`: opens a transaction.
        TransactionStart = 6,
        /// `XS_TRANSACTION_END`: commits or aborts a transaction.
        TransactionEnd = 7,
        /// `XS_INTRODUCE`, from the toolstack: registers a domain's ring page.
        Introduce = 8,
        /// `XS_RELEASE`, from the toolstack: removes a domain.
        Release = 9,
        /// `XS_GET_DOMAIN_PATH`: home path of a domain.
        GetDomainPath = 10,
        /// `XS_WRITE`: sets a value and creates the node.
        Write = 11,
        /// `XS_MKDIR`: creates an empty node.
        Mkdir = 12,
        /// `XS_RM`: removes a node and all nodes below it.
        Rm = 13,
        /// `XS_SET_PERMS`: sets a node's permissions.
        SetPerms = 14,
        /// `XS_WATCH_EVENT`, from the server only: a watch fired.
        WatchEvent = 15,
        /// `XS_ERROR`, from the server only: a request failed.
        Error = 16,
        /// `XS_IS_DOMAIN_INTRODUCED`: asks if the server knows a domain.
        IsDomainIntroduced = 17,
        /// `XS_RESUME`, from the toolstack: a domain was resumed.
        Resume = 18,
        /// `XS_SET_TARGET`, from the toolstack: one domain acts for another.
        SetTarget = 19,
        /// `XS_RESET_WATCHES`: drops all watches and transactions of this connection.
        ResetWatches = 21,
        /// `XS_DIRECTORY_PART`: names of the children from an offset on.
        DirectoryPart = 22,
        /// `XS_GET_FEATURE`.
        GetFeature = 23,
        /// `XS_SET_FEATURE`.
        SetFeature = 24,
        /// `XS_GET_QUOTA`.
        GetQuota = 25,
        /// `XS_SET_QUOTA`.
        SetQuota = 26,
    }
}

/// Header in front of each payload: four `u32`, little endian.
///
/// Any 16 bytes are a header; [`decode`](super::decode) checks the length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    pub kind: MessageType,
    /// Number chosen by the client and echoed in the reply; 0 in a watch event.
    pub req_id: u32,
    /// Id of the transaction, 0 for none.
    pub tx_id: u32,
    /// Length of the payload in bytes.
    pub len: u32,
}

impl Header {
    /// Decodes a header; accepts any bytes.
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Header {
        let [k0, k1, k2, k3, r0, r1, r2, r3, t0, t1, t2, t3, l0, l1, l2, l3] = *bytes;
        Header {
            kind: MessageType::from_raw(u32::from_le_bytes([k0, k1, k2, k3])),
            req_id: u32::from_le_bytes([r0, r1, r2, r3]),
            tx_id: u32::from_le_bytes([t0, t1, t2, t3]),
            len: u32::from_le_bytes([l0, l1, l2, l3]),
        }
    }

    /// Encodes the header as bytes.
    pub fn emit(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let words = [self.kind.to_raw(), self.req_id, self.tx_id, self.len];
        for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

//! The message header.

use crate::macros::enum_with_unknown;

/// Bytes of a [`Header`].
pub const HEADER_LEN: usize = 16;

/// Most payload bytes in one message, either way (`XENSTORE_PAYLOAD_MAX`). A message that announces
/// more kills the connection.
pub const PAYLOAD_MAX: u32 = 4096;

enum_with_unknown! {
    /// What a message is (`xsd_sockmsg_type`). Number 20 was removed and counts as unknown.
    pub enum MessageType(u32) {
        /// `XS_CONTROL`: commands for the daemon itself.
        Control = 0,
        /// `XS_DIRECTORY`: names of the children.
        Directory = 1,
        /// `XS_READ`: value of a node.
        Read = 2,
        /// `XS_GET_PERMS`: permissions of a node.
        GetPerms = 3,
        /// `XS_WATCH`: tell me of changes at and below a path.
        Watch = 4,
        /// `XS_UNWATCH`: undo a watch.
        Unwatch = 5,
        /// `XS_TRANSACTION_START`: open a transaction.
        TransactionStart = 6,
        /// `XS_TRANSACTION_END`: commit or abort it.
        TransactionEnd = 7,
        /// `XS_INTRODUCE`: toolstack, a domain's ring page exists.
        Introduce = 8,
        /// `XS_RELEASE`: toolstack, forget a domain.
        Release = 9,
        /// `XS_GET_DOMAIN_PATH`: home of a domain.
        GetDomainPath = 10,
        /// `XS_WRITE`: set a value, making the node.
        Write = 11,
        /// `XS_MKDIR`: make a node.
        Mkdir = 12,
        /// `XS_RM`: remove a node and all below.
        Rm = 13,
        /// `XS_SET_PERMS`: set a node's permissions.
        SetPerms = 14,
        /// `XS_WATCH_EVENT`: from the server alone, a watch fired.
        WatchEvent = 15,
        /// `XS_ERROR`: from the server alone, a request failed.
        Error = 16,
        /// `XS_IS_DOMAIN_INTRODUCED`: is the domain known?
        IsDomainIntroduced = 17,
        /// `XS_RESUME`: toolstack, a domain was resumed.
        Resume = 18,
        /// `XS_SET_TARGET`: toolstack, one domain acts for another.
        SetTarget = 19,
        /// `XS_RESET_WATCHES`: drop all watches and transactions of this connection.
        ResetWatches = 21,
        /// `XS_DIRECTORY_PART`: names of the children, from an offset on.
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

/// The header before each payload: four `u32`, little endian.
///
/// Any 16 bytes are a header; [`decode`](super::decode) is what checks the length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// What the message is.
    pub kind: MessageType,
    /// Chosen by the client, echoed in the reply; 0 in a watch event.
    pub req_id: u32,
    /// The transaction, 0 for none.
    pub tx_id: u32,
    /// Payload bytes that follow.
    pub len: u32,
}

impl Header {
    /// The header that `bytes` hold.
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Header {
        let [k0, k1, k2, k3, r0, r1, r2, r3, t0, t1, t2, t3, l0, l1, l2, l3] = *bytes;
        Header {
            kind: MessageType::from_raw(u32::from_le_bytes([k0, k1, k2, k3])),
            req_id: u32::from_le_bytes([r0, r1, r2, r3]),
            tx_id: u32::from_le_bytes([t0, t1, t2, t3]),
            len: u32::from_le_bytes([l0, l1, l2, l3]),
        }
    }

    /// The bytes of this header.
    pub fn emit(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let words = [self.kind.to_raw(), self.req_id, self.tx_id, self.len];
        for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

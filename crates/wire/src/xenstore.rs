//! The xenstore protocol (Xen's `io/xs_wire.h` and `docs/misc/xenstore.txt`): bytes to values and
//! back, for server and client. The tree, watches and transactions are not part of this module.
//!
//! A message is a 16-byte [`Header`] and up to [`PAYLOAD_MAX`] payload bytes.
//!
//! ```text
//!  stream ──[decode / MessageReader]──> (Header, payload)      framing: an error ends the connection
//!  (Header, payload) ──[StoreRequest::parse]──> StoreRequest   server: a bad request is answered EINVAL
//!  (Header, payload) ──[Reply::parse, WatchEvent::parse]──>    client
//! ```
//!
//! There are two kinds of error. A [`FramingError`] means that the stream is out of step, so the
//! connection must be closed. A [`RequestError`] concerns one request: the server answers
//! [`RequestError::error_name`], and the next message is still found.
//!
//! No allocation here is proportional to a number that the peer announces. Payload lengths are bounded
//! before they are awaited, and constants bound all lists.

mod error_name;
mod framing;
mod header;
mod path;
mod permissions;
mod reply;
mod request;
#[cfg(test)]
mod tests;

pub use error_name::ErrorName;
pub use framing::{Decoded, FramingError, MessageReader, decode};
pub use header::{HEADER_LEN, Header, MessageType, PAYLOAD_MAX};
pub use path::{ABSOLUTE_PATH_MAX, Path, PathError, RELATIVE_PATH_MAX, WatchPath, domain_path};
pub use permissions::{
    NodeAccess, PERMISSIONS_MAX, Permission, PermissionError, PermissionList, emit_permissions,
    parse_permissions,
};
pub use reply::{
    EmitError, Reply, ReplyError, WatchEvent, emit_error, emit_event, emit_ok, emit_reply,
    parse_strings, parse_transaction_id,
};
pub use request::{RequestError, StoreRequest};

//! The xenstore protocol (Xen's `io/xs_wire.h` and `docs/misc/xenstore.txt`): bytes to values and
//! back, for the server and for the client. State (the tree, watches, transactions) lives elsewhere.
//!
//! A message is a 16-byte [`Header`] and up to [`PAYLOAD_MAX`] payload bytes.
//!
//! ```text
//!  stream ──[decode / MessageReader]──> (Header, payload)      framing: may kill the connection
//!  (Header, payload) ──[Request::parse]──> Request             server: a bad one is answered EINVAL
//!  (Header, payload) ──[Reply::parse, WatchEvent::parse]──>    client
//! ```
//!
//! Two kinds of fault are kept apart. A [`FramingError`] means that the stream is out of step: the
//! connection has to go. A [`RequestError`] concerns one request, whose answer is
//! [`RequestError::error_name`]; the next message is still found.
//!
//! Nothing here allocates in proportion to a number that the peer announces: a payload is bounded
//! before it is awaited, and lists are bounded by constants.

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
pub use request::{Request, RequestError};

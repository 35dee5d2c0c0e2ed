//! Names of guests on a switch: their source in the store, and the DNS stub that programs query.
//!
//! A guest's name is a node of the store, `/ringfence/names/NAME`, with its addresses. This module
//! reads it through a [`NameSource`]. A thread of the guest's init ([`Stub`]) listens on port 53 of
//! the guest's loopback and answers:
//!
//! | query | answer |
//! |---|---|
//! | `NAME.SWITCH`, `NAME.ringfence` | its addresses; held back while there are none |
//! | `NAME` | likewise; meanwhile the host's name servers are queried, and a name that they know is answered |
//! | `NAME` below a search domain of the host | the addresses of the guest, if it is there |
//! | `localhost` and below | the loopback addresses (RFC 6761, section 6.3) |
//! | the name of an address (PTR) | the name, if a guest announced the address |
//! | anything else | the answer of the host's name servers (`forwarder`); without an uplink "no such name" at once |
//!
//! **Guests may start in any order.** A query for a guest that does not exist yet is held back for
//! [`HOLD_TIME`] before the stub answers "no such name". A guest announces its name once a process
//! in it listens for TCP connections, or [`ANNOUNCE_AFTER`] the start of its command. A client that
//! was started first therefore does not find the address of a server that does not listen yet.

pub mod answer;
mod forwarder;
mod listening;
pub mod name;
pub mod source;
pub mod store;
mod stub;

pub use listening::{listening_ports, something_is_unsent, tcp_sockets};
pub use name::{
    DOMAIN, NAME_MAX, NameError, SWITCH_NAME_MAX, SwitchNameError, parse_name, parse_switch_name,
};
pub use source::{ANNOUNCE_AFTER, HOLD_TIME, NameSource};
pub use stub::{Own, Stub};

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
//! | anything else | the answer of the host's name servers (`relay`); without an uplink "no such name" at once |
//!
//! **Guests may start in any order.** A query for a guest that does not exist yet is held back for
//! [`HOLD_TIME`] before the stub answers "no such name". A guest announces its name once a process
//! in it listens for TCP connections, or [`ANNOUNCE_AFTER`] the start of its command. A client that
//! was started first therefore does not find the address of a server that does not listen yet.

pub mod answer;
mod listening;
mod relay;
pub mod store;
mod stub;

use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::Duration;

pub use listening::{something_is_unsent, tcp_sockets};
pub use stub::{Own, Stub};

/// Time for which a query for an unknown name is held back. The client's own time limit is a little
/// longer (`resolv.conf`, `timeout:10`).
pub const HOLD_TIME: Duration = Duration::from_secs(8);

/// Maximum time from the start of the command to the announcement of the guest's name.
pub const ANNOUNCE_AFTER: Duration = Duration::from_secs(2);

/// Domain under which every name can be queried, besides its switch's.
pub const DOMAIN: &str = "ringfence";

/// Maximum length of a name in bytes (a label: RFC 1035, section 2.3.4).
pub const NAME_MAX: usize = 63;

/// Source of names and addresses. Names are in lower case.
pub trait NameSource: Send {
    /// Returns the addresses announced under a name. Empty if it was not announced.
    ///
    /// # Errors
    ///
    /// Fails if the source is lost.
    fn lookup(&mut self, name: &str) -> io::Result<Vec<IpAddr>>;

    /// Returns the name under which an address was announced.
    ///
    /// # Errors
    ///
    /// Fails if the source is lost.
    fn reverse(&mut self, address: IpAddr) -> io::Result<Option<String>>;

    /// Returns all names under which addresses were announced.
    ///
    /// # Errors
    ///
    /// Fails if the source is lost.
    fn names(&mut self) -> io::Result<Vec<String>>;

    /// Announces addresses under this guest's own name.
    ///
    /// # Errors
    ///
    /// Fails if the source is lost, or the name belongs to another guest.
    fn announce(&mut self, name: &str, addresses: &[IpAddr]) -> io::Result<()>;

    /// Returns a descriptor that is readable when names may have changed. `None` if the source has
    /// none: names are then looked up periodically.
    fn changes(&self) -> Option<BorrowedFd<'_>>;

    /// Clears [`NameSource::changes`]. Call it before the lookups that follow a change.
    ///
    /// # Errors
    ///
    /// Fails if the source is lost.
    fn acknowledge(&mut self) -> io::Result<()>;
}

/// Reasons for which a text cannot be a guest's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The text is empty or too long.
    #[error("a name has 1 to {NAME_MAX} characters; this has {0}")]
    Length(usize),
    /// A character is not a letter, digit or hyphen.
    #[error("`{0}` is not allowed in a name: letters, digits and `-` are")]
    Character(char),
    /// The first or last character is a hyphen.
    #[error("a name starts and ends with a letter or digit")]
    Hyphen,
    /// The name is reserved.
    #[error("`{0}` has a meaning of its own; take another name")]
    Reserved(String),
}

/// Validates a guest's name and converts it to lower case. A name is one label of letters, digits
/// and hyphens, as host names are (RFC 1123, section 2.1).
///
/// # Errors
///
/// Returns [`NameError`] if it is not.
pub fn parse_name(text: &str) -> Result<String, NameError> {
    if !(1..=NAME_MAX).contains(&text.len()) {
        return Err(NameError::Length(text.chars().count()));
    }
    if let Some(other) = text.chars().find(|c| !c.is_ascii_alphanumeric() && *c != '-') {
        return Err(NameError::Character(other));
    }
    if text.starts_with('-') || text.ends_with('-') {
        return Err(NameError::Hyphen);
    }
    let name = text.to_ascii_lowercase();
    let is_number = name.bytes().all(|b| b.is_ascii_digit());
    if name == "localhost" || name == DOMAIN || is_number {
        return Err(NameError::Reserved(name));
    }
    Ok(name)
}

/// Maximum length of a switch's name in bytes. The name is part of a file name and of its guests'
/// names.
pub const SWITCH_NAME_MAX: usize = 32;

/// Error of a text that cannot be a switch's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` cannot name a switch: 1 to {SWITCH_NAME_MAX} of the letters a to z, digits, `-` and `_`, \
     of which the first is a letter or digit"
)]
pub struct SwitchNameError(pub String);

/// Validates the name of a switch.
///
/// # Errors
///
/// Returns [`SwitchNameError`] if it is malformed.
pub fn parse_switch_name(text: &str) -> Result<String, SwitchNameError> {
    let valid = (1..=SWITCH_NAME_MAX).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'));
    if valid { Ok(text.to_owned()) } else { Err(SwitchNameError(text.to_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switch_name_unsafe_in_a_file_name_is_rejected() {
        assert_eq!(parse_switch_name("Lab_1-a").unwrap(), "Lab_1-a");
        for text in ["", "../x", "a/b", ".a", "-a", "a b", "a.b", "é", &"a".repeat(33)] {
            assert!(parse_switch_name(text).is_err(), "{text}");
        }
    }

    #[test]
    fn name_that_is_no_host_label_is_rejected() {
        assert_eq!(parse_name("Web-1").unwrap(), "web-1");
        assert_eq!(parse_name(""), Err(NameError::Length(0)));
        assert_eq!(parse_name(&"a".repeat(64)), Err(NameError::Length(64)));
        assert_eq!(parse_name("a.b"), Err(NameError::Character('.')));
        assert_eq!(parse_name("a_b"), Err(NameError::Character('_')));
        assert_eq!(parse_name("-a"), Err(NameError::Hyphen));
        assert_eq!(parse_name("LOCALHOST"), Err(NameError::Reserved("localhost".into())));
        // The C library parses a number as an address.
        assert_eq!(parse_name("127"), Err(NameError::Reserved("127".into())));
    }
}

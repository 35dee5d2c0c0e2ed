//! Names of guests: where they come from, and the DNS stub that programs ask.
//!
//! # Theory of operation
//!
//! A guest's name is a node of the store, `/ringfence/names/NAME`, holding its addresses; what
//! that is for this module is a [`NameSource`]. A thread of the guest's init ([`Stub`]) listens on
//! port 53 of the guest's own loopback and answers:
//!
//! | asked for | answer |
//! |---|---|
//! | `NAME`, `NAME.SWITCH`, `NAME.ringfence` | its addresses; while there are none, the answer is held back |
//! | `localhost` and below | the loopback addresses (RFC 6761, section 6.3) |
//! | the name of an address (PTR) | the name, if a guest announced the address |
//! | anything else | what the host's name servers say (`relay`); without an uplink no such name, at once: there is no way out of the switch |
//!
//! **Either order of start works.** A query for a guest that is not there yet is held back for
//! [`HOLD_TIME`] before it is answered with "no such name". And a guest announces its name only
//! once something in it listens for TCP connections, or [`ANNOUNCE_AFTER`] its command was
//! started: so a client that was started first does not find the address of a server that is not
//! listening yet.

pub mod answer;
mod listening;
mod relay;
pub mod store;
mod stub;

use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::Duration;

pub(crate) use listening::something_is_unsent;
pub use stub::{Own, Stub};

/// How long a query for a name that is not there is held back. The client's own patience is set
/// a little longer (`resolv.conf`, `timeout:10`).
pub const HOLD_TIME: Duration = Duration::from_secs(8);

/// How long after its command was started a guest is announced at the latest.
pub const ANNOUNCE_AFTER: Duration = Duration::from_secs(2);

/// The domain that every name is also found under, besides its switch's.
pub const DOMAIN: &str = "ringfence";

/// The longest name (a label: RFC 1035, section 2.3.4).
pub const NAME_MAX: usize = 63;

/// Where names are kept. Names are in lower case.
pub trait NameSource: Send {
    /// The addresses announced under a name; none if it was not announced.
    ///
    /// # Errors
    ///
    /// When the source is lost.
    fn lookup(&mut self, name: &str) -> io::Result<Vec<IpAddr>>;

    /// The name that an address was announced under.
    ///
    /// # Errors
    ///
    /// When the source is lost.
    fn reverse(&mut self, address: IpAddr) -> io::Result<Option<String>>;

    /// Announces addresses under this guest's own name.
    ///
    /// # Errors
    ///
    /// When the source is lost, or the name is another's.
    fn announce(&mut self, name: &str, addresses: &[IpAddr]) -> io::Result<()>;

    /// Something that is readable when names may have changed; `None` where that cannot be had,
    /// and they are looked up now and then instead.
    fn changes(&self) -> Option<BorrowedFd<'_>>;

    /// Clears [`NameSource::changes`]. Called before the lookups that follow a change.
    ///
    /// # Errors
    ///
    /// When the source is lost.
    fn acknowledge(&mut self) -> io::Result<()>;
}

/// Why a text cannot be a guest's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// It is too long, or empty.
    #[error("a name has 1 to {NAME_MAX} characters; this has {0}")]
    Length(usize),
    /// A character is not allowed.
    #[error("`{0}` is not allowed in a name: letters, digits and `-` are")]
    Character(char),
    /// The first or last character is a hyphen.
    #[error("a name starts and ends with a letter or digit")]
    Hyphen,
    /// The name has a meaning already.
    #[error("`{0}` has a meaning of its own; take another name")]
    Reserved(String),
}

/// Checks a guest's name and puts it into lower case: one label of letters, digits and hyphens,
/// as host names are (RFC 1123, section 2.1).
///
/// # Errors
///
/// [`NameError`].
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

/// The longest name of a switch: it is part of the name of a file, and of its guests' names.
pub const SWITCH_NAME_MAX: usize = 32;

/// Why a text cannot be the name of a switch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` cannot name a switch: 1 to {SWITCH_NAME_MAX} of the letters a to z, digits, `-` and `_`, \
     of which the first is a letter or digit"
)]
pub struct SwitchNameError(pub String);

/// Checks the name of a switch.
///
/// # Errors
///
/// [`SwitchNameError`].
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
    fn the_name_of_a_switch_is_safe_as_the_name_of_a_file() {
        assert_eq!(parse_switch_name("Lab_1-a").unwrap(), "Lab_1-a");
        for text in ["", "../x", "a/b", ".a", "-a", "a b", "a.b", "é", &"a".repeat(33)] {
            assert!(parse_switch_name(text).is_err(), "{text}");
        }
    }

    #[test]
    fn names_are_labels_of_host_names() {
        assert_eq!(parse_name("Web-1").unwrap(), "web-1");
        assert_eq!(parse_name(""), Err(NameError::Length(0)));
        assert_eq!(parse_name(&"a".repeat(64)), Err(NameError::Length(64)));
        assert_eq!(parse_name("a.b"), Err(NameError::Character('.')));
        assert_eq!(parse_name("a_b"), Err(NameError::Character('_')));
        assert_eq!(parse_name("-a"), Err(NameError::Hyphen));
        assert_eq!(parse_name("LOCALHOST"), Err(NameError::Reserved("localhost".into())));
        // The C library takes a number for an address.
        assert_eq!(parse_name("127"), Err(NameError::Reserved("127".into())));
    }
}

//! Source of names, and the times within which a guest announces its own.

use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Time for which a query for an unknown name is held back. The client's own time limit is a little
/// longer (`resolv.conf`, `timeout:10`).
pub const HOLD_TIME: Duration = Duration::from_secs(8);

/// Maximum time from the start of the command to the announcement of the guest's name.
pub const ANNOUNCE_AFTER: Duration = Duration::from_secs(2);

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

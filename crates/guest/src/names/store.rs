//! Names in the store: `/ringfence/names/NAME` contains addresses separated by spaces.
//!
//! The driver domain creates the node, empty, and gives it to the guest of that name. No other
//! guest may write it. Contents written by others are untrusted: their length is bounded, and
//! malformed addresses are skipped.

use std::io;
use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use super::name::parse_name;
use super::source::NameSource;

/// Store directory of names.
pub const NAMES_ROOT: &str = "/ringfence/names";

/// Maximum number of addresses of a name.
const ADDRESSES_MAX: usize = 8;

/// Maximum number of events read at once. Further events are read in the next round.
const EVENTS_MAX: usize = 64;

/// Time limit for an answer of the store: less than a client waits for a name.
const STORE_TIMEOUT: Duration = Duration::from_secs(5);

/// Source of names over a store connection.
#[derive(Debug)]
pub struct StoreNames {
    store: StoreClient,
}

impl StoreNames {
    /// Starts to watch the names in the store behind `connection`.
    ///
    /// # Errors
    ///
    /// Fails if the store does not answer.
    pub fn open(connection: OwnedFd) -> io::Result<Box<dyn NameSource>> {
        let mut store = StoreClient::new(connection).map_err(io::Error::other)?;
        store.set_timeout(STORE_TIMEOUT);
        store.watch(NAMES_ROOT, "names").map_err(io::Error::other)?;
        Ok(Box::new(StoreNames { store }))
    }

    fn read(&mut self, name: &str) -> Result<Vec<IpAddr>, StoreError> {
        let text = self.store.read_text_opt(&format!("{NAMES_ROOT}/{name}"))?;
        Ok(parse_addresses(&text.unwrap_or_default()))
    }
}

impl NameSource for StoreNames {
    fn lookup(&mut self, name: &str) -> io::Result<Vec<IpAddr>> {
        match self.read(name) {
            // A guest's node is not text, or is not readable for all.
            Err(StoreError::NotText { .. } | StoreError::Refused { .. }) => Ok(Vec::new()),
            other => other.map_err(io::Error::other),
        }
    }

    fn reverse(&mut self, address: IpAddr) -> io::Result<Option<String>> {
        let names = self.store.directory_opt(NAMES_ROOT).map_err(io::Error::other)?;
        for name in names.into_iter().flatten() {
            if parse_name(&name).is_ok() && self.lookup(&name)?.contains(&address) {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }

    fn names(&mut self) -> io::Result<Vec<String>> {
        let names = self.store.directory_opt(NAMES_ROOT).map_err(io::Error::other)?;
        let mut announced = Vec::new();
        for name in names.into_iter().flatten() {
            if parse_name(&name).is_ok() && !self.lookup(&name)?.is_empty() {
                announced.push(name);
            }
        }
        Ok(announced)
    }

    fn announce(&mut self, name: &str, addresses: &[IpAddr]) -> io::Result<()> {
        let text: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
        let path = format!("{NAMES_ROOT}/{name}");
        self.store.write(&path, text.join(" ")).map_err(io::Error::other)
    }

    fn changes(&self) -> Option<BorrowedFd<'_>> {
        Some(self.store.fd())
    }

    fn acknowledge(&mut self) -> io::Result<()> {
        for _ in 0..EVENTS_MAX {
            if self.store.next_event().map_err(io::Error::other)?.is_none() {
                break;
            }
        }
        Ok(())
    }
}

fn parse_addresses(text: &str) -> Vec<IpAddr> {
    let words = text.split_ascii_whitespace().take(ADDRESSES_MAX);
    words.filter_map(|word| word.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_address_is_skipped() {
        let expected: Vec<IpAddr> = vec!["10.0.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
        assert_eq!(parse_addresses("10.0.0.2 web fd00::2 10.0.0.256"), expected);
        assert_eq!(parse_addresses(""), Vec::<IpAddr>::new());
        assert_eq!(parse_addresses(&"10.0.0.2 ".repeat(100)).len(), ADDRESSES_MAX);
    }
}

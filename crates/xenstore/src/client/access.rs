//! What can be done with the store, by itself or inside a transaction.

use ringfence_wire::decimal::{self, NumberError};
use ringfence_wire::xenstore::{
    ErrorName, Path, PermissionList, ReplyError, Request, parse_permissions, parse_strings,
};

use super::error::StoreError;

/// Most bytes of names taken from one listing.
const LISTING_MAX: usize = 1 << 20;

/// How often a listing that changes meanwhile is begun again.
const LISTING_ATTEMPTS: u32 = 8;

/// Reading and writing the store. A [`StoreClient`](super::StoreClient) does each at once; a
/// [`Transaction`](super::Transaction) does all or nothing.
///
/// A path without a leading slash lies below the caller's home, `/local/domain/ID`.
///
/// Every method fails with [`StoreError::Refused`] when the store refuses, with
/// [`StoreError::Path`] for a path that breaks the rules, with [`StoreError::Timeout`], and when
/// the connection breaks.
pub trait StoreAccess {
    /// Sends one request and waits for the answer's payload.
    ///
    /// # Errors
    /// See the trait.
    fn request(&mut self, request: &Request<'_>) -> Result<Vec<u8>, StoreError>;

    /// The value of a node, at most 4096 bytes.
    ///
    /// # Errors
    /// See the trait.
    fn read(&mut self, path: &str) -> Result<Vec<u8>, StoreError> {
        self.request(&Request::Read { path: parse_path(path)? })
    }

    /// The value of a node, or nothing if it is not there.
    ///
    /// # Errors
    /// See the trait.
    fn read_opt(&mut self, path: &str) -> Result<Option<Vec<u8>>, StoreError> {
        if_there(self.read(path))
    }

    /// The value as text.
    ///
    /// # Errors
    /// [`StoreError::NotText`]; see the trait.
    fn read_text(&mut self, path: &str) -> Result<String, StoreError> {
        String::from_utf8(self.read(path)?)
            .map_err(|_| StoreError::NotText { path: path.to_owned() })
    }

    /// The value as text, or nothing if the node is not there.
    ///
    /// # Errors
    /// [`StoreError::NotText`]; see the trait.
    fn read_text_opt(&mut self, path: &str) -> Result<Option<String>, StoreError> {
        if_there(self.read_text(path))
    }

    /// The value as what `parse` makes of it: one of the parsers in [`decimal`], or any like it.
    ///
    /// # Errors
    /// [`StoreError::Number`]; see the trait.
    fn read_parsed<T>(
        &mut self,
        path: &str,
        parse: impl FnOnce(&[u8]) -> Result<T, NumberError>,
    ) -> Result<T, StoreError> {
        parse(&self.read(path)?)
            .map_err(|error| StoreError::Number { path: path.to_owned(), error })
    }

    /// The value as a `u32`.
    ///
    /// # Errors
    /// [`StoreError::Number`]; see the trait.
    fn read_u32(&mut self, path: &str) -> Result<u32, StoreError> {
        self.read_parsed(path, decimal::parse_u32)
    }

    /// The value as a `u32`, or nothing if the node is not there.
    ///
    /// # Errors
    /// [`StoreError::Number`]; see the trait.
    fn read_u32_opt(&mut self, path: &str) -> Result<Option<u32>, StoreError> {
        if_there(self.read_u32(path))
    }

    /// The value as a `u16`.
    ///
    /// # Errors
    /// [`StoreError::Number`]; see the trait.
    fn read_u16(&mut self, path: &str) -> Result<u16, StoreError> {
        self.read_parsed(path, decimal::parse_u16)
    }

    /// A feature key: `1` is yes; `0` and a node that is not there are no.
    ///
    /// # Errors
    /// [`StoreError::Number`]; see the trait.
    fn read_flag(&mut self, path: &str) -> Result<bool, StoreError> {
        Ok(if_there(self.read_parsed(path, decimal::parse_bool))?.unwrap_or(false))
    }

    /// Sets the value of a node; makes it, and those above it, if need be.
    ///
    /// # Errors
    /// See the trait.
    fn write(&mut self, path: &str, value: impl AsRef<[u8]>) -> Result<(), StoreError> {
        let value = value.as_ref();
        self.request(&Request::Write { path: parse_path(path)?, value }).map(drop)
    }

    /// Makes an empty node, and those above it, if it is not there.
    ///
    /// # Errors
    /// See the trait.
    fn mkdir(&mut self, path: &str) -> Result<(), StoreError> {
        self.request(&Request::Mkdir { path: parse_path(path)? }).map(drop)
    }

    /// Removes a node and all below it. Fine if it is not there but the one above it is.
    ///
    /// # Errors
    /// See the trait.
    fn rm(&mut self, path: &str) -> Result<(), StoreError> {
        self.request(&Request::Rm { path: parse_path(path)? }).map(drop)
    }

    /// The names of a node's children, each a legal name.
    ///
    /// # Errors
    /// [`StoreError::ListingTooLong`], [`StoreError::ListingUnstable`]; see the trait.
    fn directory(&mut self, path: &str) -> Result<Vec<String>, StoreError> {
        match self.request(&Request::Directory { path: parse_path(path)? }) {
            Ok(listing) => names_in(&listing),
            Err(error) if error.refusal() == Some(ErrorName::TooBig) => {
                directory_in_parts(self, path)
            }
            Err(error) => Err(error),
        }
    }

    /// The names of a node's children, or nothing if the node is not there.
    ///
    /// # Errors
    /// As [`directory`](Self::directory).
    fn directory_opt(&mut self, path: &str) -> Result<Option<Vec<String>>, StoreError> {
        if_there(self.directory(path))
    }

    /// The permissions of a node.
    ///
    /// # Errors
    /// See the trait.
    fn get_perms(&mut self, path: &str) -> Result<PermissionList, StoreError> {
        let list = self.request(&Request::GetPerms { path: parse_path(path)? })?;
        Ok(parse_permissions(&list)?)
    }

    /// Replaces the permissions of a node.
    ///
    /// # Errors
    /// See the trait.
    fn set_perms(&mut self, path: &str, permissions: &PermissionList) -> Result<(), StoreError> {
        let permissions = permissions.clone();
        self.request(&Request::SetPerms { path: parse_path(path)?, permissions }).map(drop)
    }
}

pub(super) fn parse_path(path: &str) -> Result<Path<'_>, StoreError> {
    Path::parse(path.as_bytes()).map_err(|error| StoreError::Path { path: path.to_owned(), error })
}

/// `None` for the refusal that says there is no such node.
fn if_there<T>(outcome: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.refusal() == Some(ErrorName::NotFound) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The names in a listing, checked: whoever puts one into a path gets the path that it expects.
fn names_in(listing: &[u8]) -> Result<Vec<String>, StoreError> {
    let mut names = Vec::new();
    for name in parse_strings(listing)? {
        let path = Path::parse(name).map_err(ReplyError::Path)?;
        if path.components().count() != 1 || path.is_absolute() {
            return Err(ReplyError::Path(ringfence_wire::xenstore::PathError::Empty).into());
        }
        names.push(path.as_str().to_owned());
    }
    Ok(names)
}

/// Reads a listing that does not fit into one message.
fn directory_in_parts(
    store: &mut (impl StoreAccess + ?Sized),
    path: &str,
) -> Result<Vec<String>, StoreError> {
    for _ in 0..LISTING_ATTEMPTS {
        if let Some(listing) = one_listing(store, path)? {
            return names_in(&listing);
        }
    }
    Err(StoreError::ListingUnstable { path: path.to_owned(), attempts: LISTING_ATTEMPTS })
}

/// The whole listing, or nothing if the node changed while it was read.
fn one_listing(
    store: &mut (impl StoreAccess + ?Sized),
    path: &str,
) -> Result<Option<Vec<u8>>, StoreError> {
    let mut listing = Vec::new();
    let mut generation: Option<Vec<u8>> = None;
    loop {
        // The limit keeps it far below u32::MAX.
        let offset = u32::try_from(listing.len()).unwrap_or(u32::MAX);
        let part = store.request(&Request::DirectoryPart { path: parse_path(path)?, offset })?;
        let end = part.iter().position(|byte| *byte == 0).ok_or(ReplyError::Unterminated)?;
        let (number, names) = (&part[..end], &part[end + 1..]);
        if *generation.get_or_insert_with(|| number.to_vec()) != number {
            return Ok(None);
        }
        // An empty name marks the end, so two NULs in a row or a lone one.
        let (names, done) = match names {
            [0] => (&names[..0], true),
            [names @ .., 0, 0] => (&part[end + 1..end + 2 + names.len()], true),
            _ => (names, false),
        };
        if names.is_empty() && !done {
            return Err(ReplyError::Unterminated.into());
        }
        listing.extend_from_slice(names);
        if listing.len() > LISTING_MAX {
            return Err(StoreError::ListingTooLong { path: path.to_owned(), limit: LISTING_MAX });
        }
        if done {
            return Ok(Some(listing));
        }
    }
}

//! Store operations, alone or inside a transaction: the trait [`StoreAccess`].

use ringfence_sys::numbers::bounded;
use ringfence_wire::decimal::{self, NumberError};
use ringfence_wire::xenstore::{
    ErrorName, Path, PermissionList, ReplyError, StoreRequest, parse_permissions, parse_strings,
};

use super::error::StoreError;

/// Maximum number of bytes that the names of one listing may take.
const LISTING_MAX: usize = 1 << 20;

/// Maximum number of attempts to read a listing that changes meanwhile.
const LISTING_ATTEMPTS: u32 = 8;

/// Operations on the store. A [`StoreClient`](super::StoreClient) does each at once; a
/// [`Transaction`](super::Transaction) does all of them or none.
///
/// A path without a leading slash is relative to the caller's home, `/local/domain/ID`.
///
/// Every method returns [`StoreError::Refused`] if the store refuses the request,
/// [`StoreError::Path`] for a path that breaks the rules, [`StoreError::Timeout`] without a reply in
/// time, and the error that breaks the connection. "The errors of the trait" are these.
pub trait StoreAccess {
    /// Sends one request, waits for the reply and returns its payload.
    ///
    /// # Errors
    /// Returns the errors of the trait.
    fn request(&mut self, request: &StoreRequest<'_>) -> Result<Vec<u8>, StoreError>;

    /// Returns the value of a node, at most 4096 bytes.
    ///
    /// # Errors
    /// Returns the errors of the trait.
    fn read(&mut self, path: &str) -> Result<Vec<u8>, StoreError> {
        self.request(&StoreRequest::Read { path: parse_path(path)? })
    }

    /// Returns the value of a node, or `None` if the node is missing.
    ///
    /// # Errors
    /// Returns the errors of the trait.
    fn read_opt(&mut self, path: &str) -> Result<Option<Vec<u8>>, StoreError> {
        none_if_missing(self.read(path))
    }

    /// Returns the value of a node as text.
    ///
    /// # Errors
    /// Returns [`StoreError::NotText`] for other bytes than UTF-8, and the errors of the trait.
    fn read_text(&mut self, path: &str) -> Result<String, StoreError> {
        String::from_utf8(self.read(path)?)
            .map_err(|_| StoreError::NotText { path: path.to_owned() })
    }

    /// Returns the value of a node as text, or `None` if the node is missing.
    ///
    /// # Errors
    /// Returns [`StoreError::NotText`] for other bytes than UTF-8, and the errors of the trait.
    fn read_text_opt(&mut self, path: &str) -> Result<Option<String>, StoreError> {
        none_if_missing(self.read_text(path))
    }

    /// Returns the value of a node, decoded by `parse`. The parsers in [`decimal`] have this signature.
    ///
    /// # Errors
    /// Returns [`StoreError::Number`] if `parse` fails, and the errors of the trait.
    fn read_parsed<T>(
        &mut self,
        path: &str,
        parse: impl FnOnce(&[u8]) -> Result<T, NumberError>,
    ) -> Result<T, StoreError> {
        parse(&self.read(path)?)
            .map_err(|error| StoreError::Number { path: path.to_owned(), error })
    }

    /// Returns the value of a node as a `u32`.
    ///
    /// # Errors
    /// Returns [`StoreError::Number`] for another value, and the errors of the trait.
    fn read_u32(&mut self, path: &str) -> Result<u32, StoreError> {
        self.read_parsed(path, decimal::parse_u32)
    }

    /// Returns the value of a node as a `u32`, or `None` if the node is missing.
    ///
    /// # Errors
    /// Returns [`StoreError::Number`] for another value, and the errors of the trait.
    fn read_u32_opt(&mut self, path: &str) -> Result<Option<u32>, StoreError> {
        none_if_missing(self.read_u32(path))
    }

    /// Returns the value of a node as a `u16`.
    ///
    /// # Errors
    /// Returns [`StoreError::Number`] for another value, and the errors of the trait.
    fn read_u16(&mut self, path: &str) -> Result<u16, StoreError> {
        self.read_parsed(path, decimal::parse_u16)
    }

    /// Returns the value of a feature key: `true` for `1`, `false` for `0` and for a missing node.
    ///
    /// # Errors
    /// Returns [`StoreError::Number`] for another value, and the errors of the trait.
    fn read_flag(&mut self, path: &str) -> Result<bool, StoreError> {
        Ok(none_if_missing(self.read_parsed(path, decimal::parse_bool))?.unwrap_or(false))
    }

    /// Sets the value of a node. Creates the node and its ancestors if they are missing.
    ///
    /// # Errors
    /// Returns the errors of the trait.
    fn write(&mut self, path: &str, value: impl AsRef<[u8]>) -> Result<(), StoreError> {
        let value = value.as_ref();
        self.request(&StoreRequest::Write { path: parse_path(path)?, value }).map(drop)
    }

    /// Creates an empty node and its ancestors if they are missing.
    ///
    /// # Errors
    /// Returns the errors of the trait.
    fn mkdir(&mut self, path: &str) -> Result<(), StoreError> {
        self.request(&StoreRequest::Mkdir { path: parse_path(path)? }).map(drop)
    }

    /// Removes a node and all nodes below it. Succeeds for a missing node whose parent exists.
    ///
    /// # Errors
    /// Returns the errors of the trait.
    fn rm(&mut self, path: &str) -> Result<(), StoreError> {
        self.request(&StoreRequest::Rm { path: parse_path(path)? }).map(drop)
    }

    /// Returns the names of a node's children. Each is a valid name.
    ///
    /// # Errors
    /// Returns [`StoreError::ListingTooLong`] above 1 MiB, [`StoreError::ListingUnstable`] if the children
    /// keep changing, and the errors of the trait.
    fn directory(&mut self, path: &str) -> Result<Vec<String>, StoreError> {
        match self.request(&StoreRequest::Directory { path: parse_path(path)? }) {
            Ok(listing) => parse_names(&listing),
            Err(error) if error.refusal() == Some(ErrorName::TooBig) => {
                directory_in_parts(self, path)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the names of a node's children, or `None` if the node is missing.
    ///
    /// # Errors
    /// Returns the errors of [`directory`](Self::directory).
    fn directory_opt(&mut self, path: &str) -> Result<Option<Vec<String>>, StoreError> {
        none_if_missing(self.directory(path))
    }

    /// Returns the permissions of a node.
    ///
    /// # Errors
    /// Returns the errors of the trait.
    fn get_perms(&mut self, path: &str) -> Result<PermissionList, StoreError> {
        let list = self.request(&StoreRequest::GetPerms { path: parse_path(path)? })?;
        Ok(parse_permissions(&list)?)
    }

    /// Replaces the permissions of a node.
    ///
    /// # Errors
    /// Returns the errors of the trait.
    fn set_perms(&mut self, path: &str, permissions: &PermissionList) -> Result<(), StoreError> {
        let permissions = permissions.clone();
        self.request(&StoreRequest::SetPerms { path: parse_path(path)?, permissions }).map(drop)
    }
}

pub(super) fn parse_path(path: &str) -> Result<Path<'_>, StoreError> {
    Path::parse(path.as_bytes()).map_err(|error| StoreError::Path { path: path.to_owned(), error })
}

/// Maps the refusal for a missing node to `None`.
fn none_if_missing<T>(outcome: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.refusal() == Some(ErrorName::NotFound) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Decodes the names in a listing and validates each, so that a caller can append it to a path.
fn parse_names(listing: &[u8]) -> Result<Vec<String>, StoreError> {
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

/// Reads a listing that does not fit into one reply.
fn directory_in_parts(
    store: &mut (impl StoreAccess + ?Sized),
    path: &str,
) -> Result<Vec<String>, StoreError> {
    for _ in 0..LISTING_ATTEMPTS {
        if let Some(listing) = read_listing(store, path)? {
            return parse_names(&listing);
        }
    }
    Err(StoreError::ListingUnstable { path: path.to_owned(), attempts: LISTING_ATTEMPTS })
}

/// Reads a whole listing. Returns `None` if the children changed meanwhile.
fn read_listing(
    store: &mut (impl StoreAccess + ?Sized),
    path: &str,
) -> Result<Option<Vec<u8>>, StoreError> {
    let mut listing = Vec::new();
    let mut generation: Option<Vec<u8>> = None;
    loop {
        // `LISTING_MAX` keeps the length far below `u32::MAX`.
        let offset = bounded(listing.len(), u32::MAX);
        let part =
            store.request(&StoreRequest::DirectoryPart { path: parse_path(path)?, offset })?;
        let end = part.iter().position(|byte| *byte == 0).ok_or(ReplyError::Unterminated)?;
        let (number, names) = (&part[..end], &part[end + 1..]);
        if *generation.get_or_insert_with(|| number.to_vec()) != number {
            return Ok(None);
        }
        // An empty name marks the end: two NULs in a row, or a single NUL.
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

//! Paths of nodes, and names that a client may watch.

use crate::grant::DomId;
use thiserror::Error;

/// Maximum characters of an absolute path (`XENSTORE_ABS_PATH_MAX`).
pub const ABSOLUTE_PATH_MAX: usize = 3072;

/// Maximum characters of a relative path (`XENSTORE_REL_PATH_MAX`).
pub const RELATIVE_PATH_MAX: usize = 2048;

/// Reasons for which a text names no node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum PathError {
    #[error("the path is empty")]
    Empty,
    /// Text longer than the protocol allows.
    #[error("the path has {len} characters, the limit is {limit}")]
    TooLong {
        /// Characters of the text.
        len: usize,
        /// Maximum: [`ABSOLUTE_PATH_MAX`] or [`RELATIVE_PATH_MAX`].
        limit: usize,
    },
    /// Byte other than letters, digits and `-` `/` `_` `@`.
    #[error("byte {byte:#04x} at position {position} may not be in a path")]
    BadCharacter {
        /// Index of the byte, counted from 0.
        position: usize,
        byte: u8,
    },
    /// Two slashes in a row.
    #[error("empty component at position {position} of the path")]
    EmptyComponent {
        /// Index of the second slash, counted from 0.
        position: usize,
    },
    /// Slash at the end of the path.
    #[error("the path ends in a slash")]
    TrailingSlash,
    /// Name with a leading `@` in place of a node, or unknown as a watch.
    #[error("a path that begins with @ names no node")]
    Special,
}

/// Returns the home path of a domain; its relative paths start from here.
pub fn domain_path(domain: DomId) -> String {
    format!("/local/domain/{domain}")
}

/// Validated path: a node may have this name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Path<'a>(&'a str);

impl<'a> Path<'a> {
    /// Path of the root node.
    pub const ROOT: Path<'static> = Path("/");

    /// Parses `bytes`, which have no terminator.
    ///
    /// # Errors
    /// Returns the first rule of [`PathError`] that the path breaks.
    pub fn parse(bytes: &'a [u8]) -> Result<Path<'a>, PathError> {
        let limit = match bytes.first() {
            None => return Err(PathError::Empty),
            Some(b'@') => return Err(PathError::Special),
            Some(b'/') => ABSOLUTE_PATH_MAX,
            Some(_) => RELATIVE_PATH_MAX,
        };
        if bytes.len() > limit {
            return Err(PathError::TooLong { len: bytes.len(), limit });
        }
        let mut before = 0;
        for (position, &byte) in bytes.iter().enumerate() {
            if !(byte.is_ascii_alphanumeric() || b"-/_@".contains(&byte)) {
                return Err(PathError::BadCharacter { position, byte });
            }
            if byte == b'/' && before == b'/' {
                return Err(PathError::EmptyComponent { position });
            }
            before = byte;
        }
        if before == b'/' && bytes.len() > 1 {
            return Err(PathError::TrailingSlash);
        }
        let text = core::str::from_utf8(bytes).expect("the characters allowed are ASCII");
        Ok(Path(text))
    }

    /// Returns the text as given.
    pub fn as_str(self) -> &'a str {
        self.0
    }

    /// Returns `true` if the path starts at the root.
    pub fn is_absolute(self) -> bool {
        self.0.starts_with('/')
    }

    /// Returns the absolute form for `caller`: a relative path is below [`domain_path`].
    ///
    /// # Errors
    /// Returns [`PathError::TooLong`] for an absolute form above [`ABSOLUTE_PATH_MAX`]. No valid path
    /// reaches it: 2048 characters and the home path fit into 3072.
    pub fn to_absolute(self, caller: DomId) -> Result<String, PathError> {
        if self.is_absolute() {
            return Ok(self.0.to_owned());
        }
        let path = format!("{}/{}", domain_path(caller), self.0);
        if path.len() > ABSOLUTE_PATH_MAX {
            return Err(PathError::TooLong { len: path.len(), limit: ABSOLUTE_PATH_MAX });
        }
        Ok(path)
    }

    /// Returns the names from the top down; none for the root.
    pub fn components(self) -> impl DoubleEndedIterator<Item = &'a str> {
        self.0.split('/').filter(|name| !name.is_empty())
    }

    /// Returns the parent node; `None` for the root and for a relative path of one name.
    pub fn parent(self) -> Option<Path<'a>> {
        match self.0.rsplit_once('/') {
            Some(("", "")) | None => None,
            Some(("", _)) => Some(Path("/")),
            Some((parent, _)) => Some(Path(parent)),
        }
    }

    /// Returns `true` if `self` is `ancestor` or lies below it: a watch on `ancestor` then sees changes of
    /// `self`. Both paths must have the same form, absolute or relative.
    pub fn is_within(self, ancestor: Path<'_>) -> bool {
        if ancestor.0 == "/" {
            return self.is_absolute();
        }
        self.0
            .strip_prefix(ancestor.0)
            .is_some_and(|below| below.is_empty() || below.starts_with('/'))
    }
}

/// Node or event that a client watches.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum WatchPath<'a> {
    /// Node and all nodes below it.
    Node(Path<'a>),
    /// `@introduceDomain`: fires for each new domain.
    IntroduceDomain,
    /// `@releaseDomain`: fires for each domain that dies or is gone.
    ReleaseDomain,
}

impl<'a> WatchPath<'a> {
    /// Parses the path or special name in `bytes`, which have no terminator.
    ///
    /// # Errors
    /// Returns [`PathError::Special`] for an unknown `@` name; other errors as [`Path::parse`].
    pub fn parse(bytes: &'a [u8]) -> Result<WatchPath<'a>, PathError> {
        match bytes {
            b"@introduceDomain" => Ok(WatchPath::IntroduceDomain),
            b"@releaseDomain" => Ok(WatchPath::ReleaseDomain),
            _ => Path::parse(bytes).map(WatchPath::Node),
        }
    }

    /// Returns the text on the wire.
    pub fn as_str(self) -> &'a str {
        match self {
            WatchPath::Node(path) => path.as_str(),
            WatchPath::IntroduceDomain => "@introduceDomain",
            WatchPath::ReleaseDomain => "@releaseDomain",
        }
    }
}

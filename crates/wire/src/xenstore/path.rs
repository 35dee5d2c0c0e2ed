//! Names of nodes.

use crate::grant::DomId;
use thiserror::Error;

/// Most characters of an absolute path (`XENSTORE_ABS_PATH_MAX`).
pub const ABSOLUTE_PATH_MAX: usize = 3072;

/// Most characters of a relative path (`XENSTORE_REL_PATH_MAX`).
pub const RELATIVE_PATH_MAX: usize = 2048;

/// Why a text names no node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum PathError {
    /// Nothing there.
    #[error("the path is empty")]
    Empty,
    /// Longer than the protocol allows.
    #[error("the path has {len} characters, the limit is {limit}")]
    TooLong {
        /// Characters offered.
        len: usize,
        /// [`ABSOLUTE_PATH_MAX`] or [`RELATIVE_PATH_MAX`].
        limit: usize,
    },
    /// Something else than letters, digits and `-` `/` `_` `@`.
    #[error("byte {byte:#04x} at position {position} may not be in a path")]
    BadCharacter {
        /// Where, counted from 0.
        position: usize,
        /// The byte there.
        byte: u8,
    },
    /// Two slashes in a row.
    #[error("empty component at position {position} of the path")]
    EmptyComponent {
        /// Of the second slash, counted from 0.
        position: usize,
    },
    /// A slash at the end.
    #[error("the path ends in a slash")]
    TrailingSlash,
    /// A name with a leading `@` where a node is wanted, or one that no watch knows.
    #[error("a path that begins with @ names no node")]
    Special,
}

/// The home of a domain, which its relative paths start from.
pub fn domain_path(domain: DomId) -> String {
    format!("/local/domain/{domain}")
}

/// A path that keeps all the rules: a node may have this name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Path<'a>(&'a str);

impl<'a> Path<'a> {
    /// The root.
    pub const ROOT: Path<'static> = Path("/");

    /// The path in `bytes` (without terminator).
    ///
    /// # Errors
    /// The first rule of [`PathError`] that it breaks.
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

    /// The text, as given.
    pub fn as_str(self) -> &'a str {
        self.0
    }

    /// Whether it starts at the root.
    pub fn is_absolute(self) -> bool {
        self.0.starts_with('/')
    }

    /// The absolute form for `caller`: a relative path is below [`domain_path`].
    ///
    /// # Errors
    /// Never for a path that was within its limit: 2048 characters and the home fit into 3072.
    /// The rule is checked all the same.
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

    /// The names from the top down; none for the root.
    pub fn components(self) -> impl DoubleEndedIterator<Item = &'a str> {
        self.0.split('/').filter(|name| !name.is_empty())
    }

    /// The node above; none for the root and for a relative path of one name.
    pub fn parent(self) -> Option<Path<'a>> {
        match self.0.rsplit_once('/') {
            Some(("", "")) | None => None,
            Some(("", _)) => Some(Path("/")),
            Some((above, _)) => Some(Path(above)),
        }
    }

    /// Whether `self` is `ancestor` or lies below it: the rule by which a watch on `ancestor` sees
    /// a change of `self`. Both in the same form, absolute or relative.
    pub fn is_within(self, ancestor: Path<'_>) -> bool {
        if ancestor.0 == "/" {
            return self.is_absolute();
        }
        self.0
            .strip_prefix(ancestor.0)
            .is_some_and(|below| below.is_empty() || below.starts_with('/'))
    }
}

/// What may be watched.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum WatchPath<'a> {
    /// A node and all below it.
    Node(Path<'a>),
    /// `@introduceDomain`: domains that appear.
    IntroduceDomain,
    /// `@releaseDomain`: domains that die or are gone.
    ReleaseDomain,
}

impl<'a> WatchPath<'a> {
    /// The path or special name in `bytes` (without terminator).
    ///
    /// # Errors
    /// [`PathError::Special`] for an `@` name that no watch knows; else as [`Path::parse`].
    pub fn parse(bytes: &'a [u8]) -> Result<WatchPath<'a>, PathError> {
        match bytes {
            b"@introduceDomain" => Ok(WatchPath::IntroduceDomain),
            b"@releaseDomain" => Ok(WatchPath::ReleaseDomain),
            _ => Path::parse(bytes).map(WatchPath::Node),
        }
    }

    /// The text on the wire.
    pub fn as_str(self) -> &'a str {
        match self {
            WatchPath::Node(path) => path.as_str(),
            WatchPath::IntroduceDomain => "@introduceDomain",
            WatchPath::ReleaseDomain => "@releaseDomain",
        }
    }
}

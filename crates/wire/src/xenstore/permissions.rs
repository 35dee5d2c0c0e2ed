//! Permissions of a node: `n0`, `r5`, `w5`, `b5`.

use super::request::strings;
use crate::decimal::{self, NumberError};
use crate::grant::DomId;
use arrayvec::ArrayVec;
use thiserror::Error;

/// Maximum permissions of one node. The protocol has no limit of its own; servers set one.
pub const PERMISSIONS_MAX: usize = 8;

/// Access that a permission allows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum NodeAccess {
    /// `n`: neither reading nor writing.
    None,
    Read,
    Write,
    Both,
}

impl NodeAccess {
    /// Returns the letter on the wire.
    pub fn letter(self) -> char {
        match self {
            NodeAccess::None => 'n',
            NodeAccess::Read => 'r',
            NodeAccess::Write => 'w',
            NodeAccess::Both => 'b',
        }
    }

    /// Returns `true` if reading is allowed.
    pub fn reads(self) -> bool {
        matches!(self, NodeAccess::Read | NodeAccess::Both)
    }

    /// Returns `true` if writing is allowed.
    pub fn writes(self) -> bool {
        matches!(self, NodeAccess::Write | NodeAccess::Both)
    }
}

/// Reasons for which a text is no permission or no list of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum PermissionError {
    /// Permission without any character.
    #[error("a permission is empty")]
    Empty,
    /// First character other than `n r w b`.
    #[error("a permission begins with byte {letter:#04x}; it has to be n, r, w or b")]
    BadLetter { letter: u8 },
    /// Malformed domain id behind the letter.
    #[error("bad domain id in a permission: {0}")]
    BadDomain(#[from] NumberError),
    /// List without an owner.
    #[error("a list of permissions needs at least the owner's")]
    NoOwner,
    /// More permissions than the limit.
    #[error("more than {limit} permissions for one node")]
    TooMany {
        /// Maximum, equal to [`PERMISSIONS_MAX`].
        limit: usize,
    },
    /// Last permission without a terminator.
    #[error("the last permission is not terminated")]
    Unterminated,
}

/// Entry of a node's permissions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Permission {
    pub access: NodeAccess,
    /// Domain that the entry names. Reserved ids are kept: one of them means "any domain".
    pub domain: DomId,
}

impl Permission {
    /// Parses one permission, without its terminator.
    ///
    /// # Errors
    /// Returns the first rule of [`PermissionError`] that the text breaks.
    pub fn parse(text: &[u8]) -> Result<Permission, PermissionError> {
        let (&letter, domain) = text.split_first().ok_or(PermissionError::Empty)?;
        let access = match letter {
            b'n' => NodeAccess::None,
            b'r' => NodeAccess::Read,
            b'w' => NodeAccess::Write,
            b'b' => NodeAccess::Both,
            _ => return Err(PermissionError::BadLetter { letter }),
        };
        Ok(Permission { access, domain: DomId(decimal::parse_u16(domain)?) })
    }
}

impl core::fmt::Display for Permission {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}{}", self.access.letter(), self.domain)
    }
}

/// Permissions of a node, never empty. The first entry names the owner, who has full access. Its letter
/// is the access of domains without an entry of their own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PermissionList(ArrayVec<Permission, PERMISSIONS_MAX>);

impl PermissionList {
    /// Creates a list with the owner only; all other domains get `default`.
    pub fn owned_by(owner: DomId, default: NodeAccess) -> PermissionList {
        let mut list = ArrayVec::new();
        list.push(Permission { access: default, domain: owner });
        PermissionList(list)
    }

    /// Creates a list of these entries, the owner's first.
    ///
    /// # Errors
    /// Returns [`PermissionError::NoOwner`] or [`PermissionError::TooMany`].
    pub fn new(entries: &[Permission]) -> Result<PermissionList, PermissionError> {
        if entries.is_empty() {
            return Err(PermissionError::NoOwner);
        }
        ArrayVec::try_from(entries)
            .map(PermissionList)
            .map_err(|_| PermissionError::TooMany { limit: PERMISSIONS_MAX })
    }

    /// Returns the entries, the owner's first.
    pub fn entries(&self) -> &[Permission] {
        &self.0
    }

    /// Returns the owner of the node.
    pub fn owner(&self) -> DomId {
        self.0[0].domain
    }

    /// Returns the access of `domain` by this list. Callers grant privileged domains full access themselves.
    pub fn access_of(&self, domain: DomId) -> NodeAccess {
        if self.owner() == domain {
            return NodeAccess::Both;
        }
        let named = self.0[1..].iter().find(|entry| entry.domain == domain);
        named.unwrap_or(&self.0[0]).access
    }
}

/// Parses the list in `payload`: entries, each with a NUL behind it. `GET_PERMS` replies and the rest
/// of a `SET_PERMS` request have this form.
///
/// # Errors
/// Returns the first rule of [`PermissionError`] that the list breaks.
pub fn parse_permissions(payload: &[u8]) -> Result<PermissionList, PermissionError> {
    let mut list = ArrayVec::new();
    for text in strings(payload).ok_or(PermissionError::Unterminated)? {
        let entry = Permission::parse(text)?;
        list.try_push(entry).map_err(|_| PermissionError::TooMany { limit: PERMISSIONS_MAX })?;
    }
    if list.is_empty() {
        return Err(PermissionError::NoOwner);
    }
    Ok(PermissionList(list))
}

/// Appends `list` in the form that [`parse_permissions`] accepts.
pub fn emit_permissions(list: &PermissionList, out: &mut Vec<u8>) {
    for entry in list.entries() {
        out.extend_from_slice(entry.to_string().as_bytes());
        out.push(0);
    }
}

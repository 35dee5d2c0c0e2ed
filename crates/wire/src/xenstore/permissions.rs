//! Who may do what with a node: `n0`, `r5`, `w5`, `b5`.

use super::request::strings;
use crate::decimal::{self, NumberError};
use crate::grant::DomId;
use arrayvec::ArrayVec;
use thiserror::Error;

/// Most permissions taken for one node. The protocol has no limit of its own; servers set one.
pub const PERMISSIONS_MAX: usize = 8;

/// What a permission allows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum NodeAccess {
    /// `n`: nothing.
    None,
    /// `r`: read.
    Read,
    /// `w`: write.
    Write,
    /// `b`: both.
    Both,
}

impl NodeAccess {
    /// The letter on the wire.
    pub fn letter(self) -> char {
        match self {
            NodeAccess::None => 'n',
            NodeAccess::Read => 'r',
            NodeAccess::Write => 'w',
            NodeAccess::Both => 'b',
        }
    }

    /// Whether reading is allowed.
    pub fn reads(self) -> bool {
        matches!(self, NodeAccess::Read | NodeAccess::Both)
    }

    /// Whether writing is allowed.
    pub fn writes(self) -> bool {
        matches!(self, NodeAccess::Write | NodeAccess::Both)
    }
}

/// Why a text is no permission, or no list of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum PermissionError {
    /// Nothing there, so no letter either.
    #[error("a permission is empty")]
    Empty,
    /// The first character is none of `n r w b`.
    #[error("a permission begins with byte {letter:#04x}; it has to be n, r, w or b")]
    BadLetter {
        /// The byte there.
        letter: u8,
    },
    /// What follows is no domain id.
    #[error("bad domain id in a permission: {0}")]
    BadDomain(#[from] NumberError),
    /// A list without an owner.
    #[error("a list of permissions needs at least the owner's")]
    NoOwner,
    /// More than a node may have.
    #[error("more than {limit} permissions for one node")]
    TooMany {
        /// [`PERMISSIONS_MAX`].
        limit: usize,
    },
    /// The last one has no terminator.
    #[error("the last permission is not terminated")]
    Unterminated,
}

/// One entry of a node's permissions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Permission {
    /// What is allowed.
    pub access: NodeAccess,
    /// To whom. Reserved ids are kept: one of them stands for "any domain".
    pub domain: DomId,
}

impl Permission {
    /// The permission in `text` (without terminator).
    ///
    /// # Errors
    /// The first rule of [`PermissionError`] that it breaks.
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

/// The permissions of a node, never empty: the first names the owner, who may do all, and says what
/// domains without an entry of their own may do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PermissionList(ArrayVec<Permission, PERMISSIONS_MAX>);

impl PermissionList {
    /// `owner` alone; the rest of the world gets `default`.
    pub fn owned_by(owner: DomId, default: NodeAccess) -> PermissionList {
        let mut list = ArrayVec::new();
        list.push(Permission { access: default, domain: owner });
        PermissionList(list)
    }

    /// A list of these entries, the owner's first.
    ///
    /// # Errors
    /// [`PermissionError::NoOwner`] or [`PermissionError::TooMany`].
    pub fn new(entries: &[Permission]) -> Result<PermissionList, PermissionError> {
        if entries.is_empty() {
            return Err(PermissionError::NoOwner);
        }
        ArrayVec::try_from(entries)
            .map(PermissionList)
            .map_err(|_| PermissionError::TooMany { limit: PERMISSIONS_MAX })
    }

    /// The entries, the owner's first.
    pub fn entries(&self) -> &[Permission] {
        &self.0
    }

    /// Who owns the node.
    pub fn owner(&self) -> DomId {
        self.0[0].domain
    }

    /// What `domain` may do, by this list alone (a privileged domain may do all anyway).
    pub fn access_of(&self, domain: DomId) -> NodeAccess {
        if self.owner() == domain {
            return NodeAccess::Both;
        }
        let named = self.0[1..].iter().find(|entry| entry.domain == domain);
        named.unwrap_or(&self.0[0]).access
    }
}

/// The list in `payload`: entries, each with a NUL behind it (a `GET_PERMS` reply, or what follows
/// the path in `SET_PERMS`).
///
/// # Errors
/// The first rule of [`PermissionError`] that it breaks.
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

/// Appends `list` in the form that [`parse_permissions`] takes.
pub fn emit_permissions(list: &PermissionList, out: &mut Vec<u8>) {
    for entry in list.entries() {
        out.extend_from_slice(entry.to_string().as_bytes());
        out.push(0);
    }
}

//! Requests: what a client asks of the server.

use super::error_name::ErrorName;
use super::header::MessageType;
use super::path::{Path, PathError, WatchPath};
use super::permissions::{PermissionError, PermissionList, emit_permissions, parse_permissions};
use super::reply::{EmitError, emit_message};
use crate::decimal::{self, NumberError};
use crate::grant::DomId;
use thiserror::Error;

/// A request, parsed. What it borrows is the payload.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Request<'a> {
    /// Names of the children, each with a NUL.
    Directory {
        /// Of this node.
        path: Path<'a>,
    },
    /// Names of the children, from byte `offset` of the whole listing on.
    DirectoryPart {
        /// Of this node.
        path: Path<'a>,
        /// First byte wanted.
        offset: u32,
    },
    /// The value.
    Read {
        /// Of this node.
        path: Path<'a>,
    },
    /// The permissions.
    GetPerms {
        /// Of this node.
        path: Path<'a>,
    },
    /// Tell of changes; fires once at once.
    Watch {
        /// What to watch.
        path: WatchPath<'a>,
        /// Comes back in each event; any bytes but NUL.
        token: &'a [u8],
        /// How many levels below the path count; all when absent.
        depth: Option<u32>,
    },
    /// No longer tell.
    Unwatch {
        /// As it was watched.
        path: WatchPath<'a>,
        /// As it was given.
        token: &'a [u8],
    },
    /// Open a transaction.
    TransactionStart,
    /// End the transaction of the header.
    TransactionEnd {
        /// Keep (`T`) or drop (`F`) what it did.
        commit: bool,
    },
    /// Where is the home of a domain?
    GetDomainPath {
        /// That domain.
        domain: DomId,
    },
    /// Is a domain known to the server?
    IsDomainIntroduced {
        /// That domain.
        domain: DomId,
    },
    /// Set the value, making the node and those above it.
    Write {
        /// Of this node.
        path: Path<'a>,
        /// Any bytes, not terminated.
        value: &'a [u8],
    },
    /// Make an empty node if it is not there.
    Mkdir {
        /// This node.
        path: Path<'a>,
    },
    /// Remove a node and all below it.
    Rm {
        /// This node.
        path: Path<'a>,
    },
    /// Replace the permissions.
    SetPerms {
        /// Of this node.
        path: Path<'a>,
        /// The new ones.
        permissions: PermissionList,
    },
    /// Drop every watch and transaction of this connection.
    ResetWatches,
}

/// Why a payload is not the request that its header announces.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum RequestError {
    /// The path breaks a rule.
    #[error(transparent)]
    Path(#[from] PathError),
    /// A number breaks a rule.
    #[error(transparent)]
    Number(#[from] NumberError),
    /// The permissions break a rule.
    #[error(transparent)]
    Permission(#[from] PermissionError),
    /// A string has no NUL behind it.
    #[error("a string of the {kind:?} request is not terminated")]
    Unterminated {
        /// The request.
        kind: MessageType,
    },
    /// Too few or too many strings.
    #[error("{found} strings in a {kind:?} request, {least} to {most} expected")]
    ArgumentCount {
        /// The request.
        kind: MessageType,
        /// Strings found.
        found: usize,
        /// Fewest taken.
        least: usize,
        /// Most taken.
        most: usize,
    },
    /// `TRANSACTION_END` with something else than `T` or `F`.
    #[error("a transaction ends with T or F")]
    BadDecision,
    /// A request that this module does not parse: reserved for toolstacks, or unknown.
    #[error("{kind:?} is not a request this server knows")]
    Unsupported {
        /// The request.
        kind: MessageType,
    },
}

impl RequestError {
    /// The error to answer with.
    pub fn error_name(&self) -> ErrorName {
        match self {
            RequestError::Unsupported { .. } => ErrorName::NotImplemented,
            _ => ErrorName::Invalid,
        }
    }
}

/// The strings in `payload`, each of which has a NUL behind it; `None` if the last has not.
pub(super) fn strings(payload: &[u8]) -> Option<impl Iterator<Item = &[u8]>> {
    let whole = match payload.split_last() {
        None => None,
        Some((0, whole)) => Some(whole),
        Some(_) => return None,
    };
    Some(whole.into_iter().flat_map(|whole| whole.split(|&byte| byte == 0)))
}

/// The strings of a request that takes `least` to `MOST` of them; absent ones are empty.
fn arguments<const MOST: usize>(
    kind: MessageType,
    payload: &[u8],
    least: usize,
) -> Result<([&[u8]; MOST], usize), RequestError> {
    let mut found = 0;
    let mut taken = [&[][..]; MOST];
    for text in strings(payload).ok_or(RequestError::Unterminated { kind })? {
        if let Some(place) = taken.get_mut(found) {
            *place = text;
        }
        found += 1;
    }
    if !(least..=MOST).contains(&found) {
        return Err(RequestError::ArgumentCount { kind, found, least, most: MOST });
    }
    Ok((taken, found))
}

fn one(kind: MessageType, payload: &[u8]) -> Result<&[u8], RequestError> {
    let ([argument], _) = arguments::<1>(kind, payload, 1)?;
    Ok(argument)
}

/// The path at the head of `payload`, and what follows its NUL.
fn path_and_rest(kind: MessageType, payload: &[u8]) -> Result<(Path<'_>, &[u8]), RequestError> {
    let end = payload.iter().position(|&byte| byte == 0);
    let end = end.ok_or(RequestError::Unterminated { kind })?;
    let (path, rest) = payload.split_at(end);
    Ok((Path::parse(path)?, &rest[1..]))
}

impl<'a> Request<'a> {
    /// The request of type `kind` in `payload`.
    ///
    /// # Errors
    /// [`RequestError`]; the connection stays usable, the answer is [`RequestError::error_name`].
    pub fn parse(kind: MessageType, payload: &'a [u8]) -> Result<Request<'a>, RequestError> {
        let path = || Ok::<_, RequestError>(Path::parse(one(kind, payload)?)?);
        let domain = || Ok::<_, RequestError>(DomId(decimal::parse_u16(one(kind, payload)?)?));
        Ok(match kind {
            MessageType::Directory => Request::Directory { path: path()? },
            MessageType::DirectoryPart => {
                let ([path, offset], _) = arguments::<2>(kind, payload, 2)?;
                let (path, offset) = (Path::parse(path)?, decimal::parse_u32(offset)?);
                Request::DirectoryPart { path, offset }
            }
            MessageType::Read => Request::Read { path: path()? },
            MessageType::GetPerms => Request::GetPerms { path: path()? },
            MessageType::Watch => {
                let ([path, token, depth], found) = arguments::<3>(kind, payload, 2)?;
                let path = WatchPath::parse(path)?;
                let depth = if found == 3 { Some(decimal::parse_u32(depth)?) } else { None };
                Request::Watch { path, token, depth }
            }
            MessageType::Unwatch => {
                let ([path, token], _) = arguments::<2>(kind, payload, 2)?;
                Request::Unwatch { path: WatchPath::parse(path)?, token }
            }
            // Clients send one empty string; some send nothing at all.
            MessageType::TransactionStart => {
                arguments::<1>(kind, payload, 0).map(|_| Request::TransactionStart)?
            }
            MessageType::ResetWatches => {
                arguments::<1>(kind, payload, 0).map(|_| Request::ResetWatches)?
            }
            MessageType::TransactionEnd => match one(kind, payload)? {
                b"T" => Request::TransactionEnd { commit: true },
                b"F" => Request::TransactionEnd { commit: false },
                _ => return Err(RequestError::BadDecision),
            },
            MessageType::GetDomainPath => Request::GetDomainPath { domain: domain()? },
            MessageType::IsDomainIntroduced => Request::IsDomainIntroduced { domain: domain()? },
            MessageType::Write => {
                let (path, value) = path_and_rest(kind, payload)?;
                Request::Write { path, value }
            }
            MessageType::Mkdir => Request::Mkdir { path: path()? },
            MessageType::Rm => Request::Rm { path: path()? },
            MessageType::SetPerms => {
                let (path, rest) = path_and_rest(kind, payload)?;
                Request::SetPerms { path, permissions: parse_permissions(rest)? }
            }
            kind => return Err(RequestError::Unsupported { kind }),
        })
    }

    /// The type for the header.
    pub fn kind(&self) -> MessageType {
        match self {
            Request::Directory { .. } => MessageType::Directory,
            Request::DirectoryPart { .. } => MessageType::DirectoryPart,
            Request::Read { .. } => MessageType::Read,
            Request::GetPerms { .. } => MessageType::GetPerms,
            Request::Watch { .. } => MessageType::Watch,
            Request::Unwatch { .. } => MessageType::Unwatch,
            Request::TransactionStart => MessageType::TransactionStart,
            Request::TransactionEnd { .. } => MessageType::TransactionEnd,
            Request::GetDomainPath { .. } => MessageType::GetDomainPath,
            Request::IsDomainIntroduced { .. } => MessageType::IsDomainIntroduced,
            Request::Write { .. } => MessageType::Write,
            Request::Mkdir { .. } => MessageType::Mkdir,
            Request::Rm { .. } => MessageType::Rm,
            Request::SetPerms { .. } => MessageType::SetPerms,
            Request::ResetWatches => MessageType::ResetWatches,
        }
    }

    /// Appends the whole message to `out`; [`Request::parse`] is the inverse.
    ///
    /// # Errors
    /// [`EmitError`], with `out` as it was.
    pub fn emit(&self, req_id: u32, tx_id: u32, out: &mut Vec<u8>) -> Result<(), EmitError> {
        let emit = |parts: &[&[u8]], out| emit_message(self.kind(), req_id, tx_id, parts, out);
        match self {
            Request::Directory { path }
            | Request::Read { path }
            | Request::GetPerms { path }
            | Request::Mkdir { path }
            | Request::Rm { path } => emit(&[path.as_str().as_bytes(), b"\0"], out),
            Request::DirectoryPart { path, offset } => {
                emit(&[path.as_str().as_bytes(), b"\0", offset.to_string().as_bytes(), b"\0"], out)
            }
            Request::Watch { path, token, depth } => {
                let depth = depth.map_or(String::new(), |depth| format!("{depth}\0"));
                let path = path.as_str().as_bytes();
                let token = terminable(token)?;
                emit(&[path, b"\0", token, b"\0", depth.as_bytes()], out)
            }
            Request::Unwatch { path, token } => {
                emit(&[path.as_str().as_bytes(), b"\0", terminable(token)?, b"\0"], out)
            }
            Request::TransactionStart | Request::ResetWatches => emit(&[b"\0"], out),
            Request::TransactionEnd { commit: true } => emit(&[b"T\0"], out),
            Request::TransactionEnd { commit: false } => emit(&[b"F\0"], out),
            Request::GetDomainPath { domain } | Request::IsDomainIntroduced { domain } => {
                emit(&[domain.to_string().as_bytes(), b"\0"], out)
            }
            Request::Write { path, value } => emit(&[path.as_str().as_bytes(), b"\0", value], out),
            Request::SetPerms { path, permissions } => {
                let mut list = Vec::new();
                emit_permissions(permissions, &mut list);
                emit(&[path.as_str().as_bytes(), b"\0", &list], out)
            }
        }
    }
}

/// `text`, if a NUL can end it.
pub(super) fn terminable(text: &[u8]) -> Result<&[u8], EmitError> {
    match text.iter().position(|&byte| byte == 0) {
        None => Ok(text),
        Some(position) => Err(EmitError::NulInText { position }),
    }
}

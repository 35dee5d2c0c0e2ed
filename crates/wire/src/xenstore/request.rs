//! Requests that a client sends to the server.

use super::error_name::ErrorName;
use super::header::MessageType;
use super::path::{Path, PathError, WatchPath};
use super::permissions::{PermissionError, PermissionList, emit_permissions, parse_permissions};
use super::reply::{EmitError, emit_message};
use crate::decimal::{self, NumberError};
use crate::grant::DomId;
use thiserror::Error;

/// Parsed request that borrows the payload.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StoreRequest<'a> {
    /// Lists the names of the children, each with a NUL.
    Directory { path: Path<'a> },
    /// Lists the names of the children from byte `offset` of the whole listing on.
    DirectoryPart {
        path: Path<'a>,
        /// First byte of the listing to return.
        offset: u32,
    },
    /// Reads the value of a node.
    Read { path: Path<'a> },
    /// Reads the permissions of a node.
    GetPerms { path: Path<'a> },
    /// Requests events for changes; the first event fires immediately.
    Watch {
        path: WatchPath<'a>,
        /// Token that each event carries; any bytes except NUL.
        token: &'a [u8],
        /// Levels below the path that the watch covers; all levels if absent.
        depth: Option<u32>,
    },
    /// Removes a watch of this connection.
    Unwatch { path: WatchPath<'a>, token: &'a [u8] },
    /// Opens a new transaction.
    TransactionStart,
    /// Ends the transaction of the header.
    TransactionEnd {
        /// Commit (`T`) or abort (`F`).
        commit: bool,
    },
    /// Asks for the home path of a domain.
    GetDomainPath { domain: DomId },
    /// Asks if the server knows a domain.
    IsDomainIntroduced { domain: DomId },
    /// Sets the value; creates the node and its parents.
    Write {
        path: Path<'a>,
        /// Value of any bytes, not terminated.
        value: &'a [u8],
    },
    /// Creates an empty node unless the node exists.
    Mkdir { path: Path<'a> },
    /// Removes a node and all nodes below it.
    Rm { path: Path<'a> },
    /// Replaces the permissions of a node.
    SetPerms { path: Path<'a>, permissions: PermissionList },
    /// Drops every watch and transaction of this connection.
    ResetWatches,
}

/// Reasons for which a payload is not the request that its header announces.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum RequestError {
    /// Invalid path in the request.
    #[error(transparent)]
    Path(#[from] PathError),
    /// Malformed number in the request.
    #[error(transparent)]
    Number(#[from] NumberError),
    /// Invalid permissions in the request.
    #[error(transparent)]
    Permission(#[from] PermissionError),
    /// String without its terminating NUL.
    #[error("a string of the {kind:?} request is not terminated")]
    Unterminated { kind: MessageType },
    /// Too few or too many strings.
    #[error("{found} strings in a {kind:?} request, {least} to {most} expected")]
    ArgumentCount { kind: MessageType, found: usize, least: usize, most: usize },
    /// `TRANSACTION_END` with a payload other than `T` or `F`.
    #[error("a transaction ends with T or F")]
    BadDecision,
    /// Request that this module does not parse: reserved for toolstacks, or unknown.
    #[error("{kind:?} is not a request this server knows")]
    Unsupported { kind: MessageType },
}

impl RequestError {
    /// Returns the error name of the reply.
    pub fn error_name(&self) -> ErrorName {
        match self {
            RequestError::Unsupported { .. } => ErrorName::NotImplemented,
            _ => ErrorName::Invalid,
        }
    }
}

/// Returns the NUL-terminated strings in `payload`; `None` if the last one has no NUL.
pub(super) fn strings(payload: &[u8]) -> Option<impl Iterator<Item = &[u8]>> {
    let whole = match payload.split_last() {
        None => None,
        Some((0, whole)) => Some(whole),
        Some(_) => return None,
    };
    Some(whole.into_iter().flat_map(|whole| whole.split(|&byte| byte == 0)))
}

/// Returns the strings of a request that takes `least` to `MOST` of them; absent ones are empty.
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

fn single_argument(kind: MessageType, payload: &[u8]) -> Result<&[u8], RequestError> {
    let ([argument], _) = arguments::<1>(kind, payload, 1)?;
    Ok(argument)
}

/// Splits `payload` into the path at its head and the bytes behind the path's NUL.
fn path_and_rest(kind: MessageType, payload: &[u8]) -> Result<(Path<'_>, &[u8]), RequestError> {
    let end = payload.iter().position(|&byte| byte == 0);
    let end = end.ok_or(RequestError::Unterminated { kind })?;
    let (path, rest) = payload.split_at(end);
    Ok((Path::parse(path)?, &rest[1..]))
}

impl<'a> StoreRequest<'a> {
    /// Parses the request of type `kind` in `payload`.
    ///
    /// # Errors
    /// Returns [`RequestError`]. The connection stays usable; the reply is [`RequestError::error_name`].
    pub fn parse(kind: MessageType, payload: &'a [u8]) -> Result<StoreRequest<'a>, RequestError> {
        let path = || Ok::<_, RequestError>(Path::parse(single_argument(kind, payload)?)?);
        let domain =
            || Ok::<_, RequestError>(DomId(decimal::parse_u16(single_argument(kind, payload)?)?));
        Ok(match kind {
            MessageType::Directory => StoreRequest::Directory { path: path()? },
            MessageType::DirectoryPart => {
                let ([path, offset], _) = arguments::<2>(kind, payload, 2)?;
                let (path, offset) = (Path::parse(path)?, decimal::parse_u32(offset)?);
                StoreRequest::DirectoryPart { path, offset }
            }
            MessageType::Read => StoreRequest::Read { path: path()? },
            MessageType::GetPerms => StoreRequest::GetPerms { path: path()? },
            MessageType::Watch => {
                let ([path, token, depth], found) = arguments::<3>(kind, payload, 2)?;
                let path = WatchPath::parse(path)?;
                let depth = if found == 3 { Some(decimal::parse_u32(depth)?) } else { None };
                StoreRequest::Watch { path, token, depth }
            }
            MessageType::Unwatch => {
                let ([path, token], _) = arguments::<2>(kind, payload, 2)?;
                StoreRequest::Unwatch { path: WatchPath::parse(path)?, token }
            }
            // Clients send one empty string; some send an empty payload.
            MessageType::TransactionStart => {
                arguments::<1>(kind, payload, 0).map(|_| StoreRequest::TransactionStart)?
            }
            MessageType::ResetWatches => {
                arguments::<1>(kind, payload, 0).map(|_| StoreRequest::ResetWatches)?
            }
            MessageType::TransactionEnd => match single_argument(kind, payload)? {
                b"T" => StoreRequest::TransactionEnd { commit: true },
                b"F" => StoreRequest::TransactionEnd { commit: false },
                _ => return Err(RequestError::BadDecision),
            },
            MessageType::GetDomainPath => StoreRequest::GetDomainPath { domain: domain()? },
            MessageType::IsDomainIntroduced => {
                StoreRequest::IsDomainIntroduced { domain: domain()? }
            }
            MessageType::Write => {
                let (path, value) = path_and_rest(kind, payload)?;
                StoreRequest::Write { path, value }
            }
            MessageType::Mkdir => StoreRequest::Mkdir { path: path()? },
            MessageType::Rm => StoreRequest::Rm { path: path()? },
            MessageType::SetPerms => {
                let (path, rest) = path_and_rest(kind, payload)?;
                StoreRequest::SetPerms { path, permissions: parse_permissions(rest)? }
            }
            kind => return Err(RequestError::Unsupported { kind }),
        })
    }

    /// Returns the message type for the header.
    pub fn kind(&self) -> MessageType {
        match self {
            StoreRequest::Directory { .. } => MessageType::Directory,
            StoreRequest::DirectoryPart { .. } => MessageType::DirectoryPart,
            StoreRequest::Read { .. } => MessageType::Read,
            StoreRequest::GetPerms { .. } => MessageType::GetPerms,
            StoreRequest::Watch { .. } => MessageType::Watch,
            StoreRequest::Unwatch { .. } => MessageType::Unwatch,
            StoreRequest::TransactionStart => MessageType::TransactionStart,
            StoreRequest::TransactionEnd { .. } => MessageType::TransactionEnd,
            StoreRequest::GetDomainPath { .. } => MessageType::GetDomainPath,
            StoreRequest::IsDomainIntroduced { .. } => MessageType::IsDomainIntroduced,
            StoreRequest::Write { .. } => MessageType::Write,
            StoreRequest::Mkdir { .. } => MessageType::Mkdir,
            StoreRequest::Rm { .. } => MessageType::Rm,
            StoreRequest::SetPerms { .. } => MessageType::SetPerms,
            StoreRequest::ResetWatches => MessageType::ResetWatches,
        }
    }

    /// Appends the whole message to `out`. Inverse of [`StoreRequest::parse`].
    ///
    /// # Errors
    /// Returns [`EmitError`] and leaves `out` unchanged.
    pub fn emit(&self, req_id: u32, tx_id: u32, out: &mut Vec<u8>) -> Result<(), EmitError> {
        let emit = |parts: &[&[u8]], out| emit_message(self.kind(), req_id, tx_id, parts, out);
        match self {
            StoreRequest::Directory { path }
            | StoreRequest::Read { path }
            | StoreRequest::GetPerms { path }
            | StoreRequest::Mkdir { path }
            | StoreRequest::Rm { path } => emit(&[path.as_str().as_bytes(), b"\0"], out),
            StoreRequest::DirectoryPart { path, offset } => {
                emit(&[path.as_str().as_bytes(), b"\0", offset.to_string().as_bytes(), b"\0"], out)
            }
            StoreRequest::Watch { path, token, depth } => {
                let depth = depth.map_or(String::new(), |depth| format!("{depth}\0"));
                let path = path.as_str().as_bytes();
                let token = check_terminable(token)?;
                emit(&[path, b"\0", token, b"\0", depth.as_bytes()], out)
            }
            StoreRequest::Unwatch { path, token } => {
                emit(&[path.as_str().as_bytes(), b"\0", check_terminable(token)?, b"\0"], out)
            }
            StoreRequest::TransactionStart | StoreRequest::ResetWatches => emit(&[b"\0"], out),
            StoreRequest::TransactionEnd { commit: true } => emit(&[b"T\0"], out),
            StoreRequest::TransactionEnd { commit: false } => emit(&[b"F\0"], out),
            StoreRequest::GetDomainPath { domain }
            | StoreRequest::IsDomainIntroduced { domain } => {
                emit(&[domain.to_string().as_bytes(), b"\0"], out)
            }
            StoreRequest::Write { path, value } => {
                emit(&[path.as_str().as_bytes(), b"\0", value], out)
            }
            StoreRequest::SetPerms { path, permissions } => {
                let mut list = Vec::new();
                emit_permissions(permissions, &mut list);
                emit(&[path.as_str().as_bytes(), b"\0", &list], out)
            }
        }
    }
}

/// Checks that `text` contains no NUL, so that a NUL can terminate it.
pub(super) fn check_terminable(text: &[u8]) -> Result<&[u8], EmitError> {
    match text.iter().position(|&byte| byte == 0) {
        None => Ok(text),
        Some(position) => Err(EmitError::NulInText { position }),
    }
}

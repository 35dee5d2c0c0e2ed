//! Replies and watch events: what the server sends.

use super::error_name::ErrorName;
use super::header::{Header, MessageType, PAYLOAD_MAX};
use super::path::{PathError, WatchPath};
use super::request::{strings, terminable};
use crate::decimal::{self, NumberError};
use thiserror::Error;

/// Why a message cannot be sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum EmitError {
    /// More than fits into one message. A server answers [`ErrorName::TooBig`] instead.
    #[error("a payload of {len} bytes does not fit, the limit is {limit}")]
    PayloadTooLong {
        /// Bytes that would be needed.
        len: usize,
        /// [`PAYLOAD_MAX`].
        limit: u32,
    },
    /// A NUL in a text that a NUL ends.
    #[error("NUL at position {position} of a text that a NUL ends")]
    NulInText {
        /// Where, counted from 0.
        position: usize,
    },
}

/// Appends one message whose payload is `parts` in a row; leaves `out` alone on error.
pub(super) fn emit_message(
    kind: MessageType,
    req_id: u32,
    tx_id: u32,
    parts: &[&[u8]],
    out: &mut Vec<u8>,
) -> Result<(), EmitError> {
    // Each part is a slice in memory; a handful of them cannot overflow, but saturate all the same.
    let len = parts.iter().fold(0usize, |sum, part| sum.saturating_add(part.len()));
    let announced = u32::try_from(len).ok().filter(|&len| len <= PAYLOAD_MAX);
    let Some(announced) = announced else {
        return Err(EmitError::PayloadTooLong { len, limit: PAYLOAD_MAX });
    };
    out.extend_from_slice(&Header { kind, req_id, tx_id, len: announced }.emit());
    for part in parts {
        out.extend_from_slice(part);
    }
    Ok(())
}

/// Appends the reply to `request`: same type, same ids, this payload.
///
/// # Errors
/// [`EmitError::PayloadTooLong`], with `out` as it was.
pub fn emit_reply(request: &Header, payload: &[u8], out: &mut Vec<u8>) -> Result<(), EmitError> {
    emit_message(request.kind, request.req_id, request.tx_id, &[payload], out)
}

/// Appends the reply of a request that succeeded and returns nothing.
pub fn emit_ok(request: &Header, out: &mut Vec<u8>) {
    emit_reply(request, b"OK\0", out).expect("three bytes fit into a message");
}

/// Appends the reply of a request that failed.
pub fn emit_error(request: &Header, error: ErrorName, out: &mut Vec<u8>) {
    let name = error.as_str().as_bytes();
    emit_message(MessageType::Error, request.req_id, request.tx_id, &[name, b"\0"], out)
        .expect("an error name fits into a message");
}

/// Appends the event of a watch: `path` is what changed, in the form the watch was set (relative or
/// absolute), or a special name; `token` is the watch's.
///
/// # Errors
/// [`EmitError`], with `out` as it was.
pub fn emit_event(path: &str, token: &[u8], out: &mut Vec<u8>) -> Result<(), EmitError> {
    let path = terminable(path.as_bytes())?;
    let token = terminable(token)?;
    emit_message(MessageType::WatchEvent, 0, 0, &[path, b"\0", token, b"\0"], out)
}

/// Why what the server sent makes no sense.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum ReplyError {
    /// The reply has another type than the request.
    #[error("the reply is {found:?}, the request was {expected:?}")]
    WrongType {
        /// The request's type.
        expected: MessageType,
        /// The reply's type.
        found: MessageType,
    },
    /// An `ERROR` reply with a name that the protocol does not have.
    #[error("the server failed with an unknown error name of {len} bytes")]
    UnknownErrorName {
        /// Bytes of the payload.
        len: usize,
    },
    /// A text that should have a NUL behind it has not.
    #[error("a text from the server is not terminated")]
    Unterminated,
    /// An event has something else than a path and a token.
    #[error("{found} strings in a watch event, two expected")]
    EventStrings {
        /// Strings found.
        found: usize,
    },
    /// The path of an event breaks a rule.
    #[error(transparent)]
    Path(#[from] PathError),
    /// A number breaks a rule.
    #[error(transparent)]
    Number(#[from] NumberError),
}

/// The answer to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reply<'a> {
    /// It succeeded; this is the payload (`OK` and a NUL where there is nothing to return).
    Success(&'a [u8]),
    /// It failed.
    Failure(ErrorName),
}

impl<'a> Reply<'a> {
    /// The answer to a request of type `expected`. The caller has matched `req_id`.
    ///
    /// # Errors
    /// [`ReplyError::WrongType`], [`ReplyError::UnknownErrorName`].
    pub fn parse(
        expected: MessageType,
        header: &Header,
        payload: &'a [u8],
    ) -> Result<Reply<'a>, ReplyError> {
        if header.kind == expected {
            return Ok(Reply::Success(payload));
        }
        if header.kind != MessageType::Error {
            return Err(ReplyError::WrongType { expected, found: header.kind });
        }
        let name = payload.strip_suffix(b"\0").unwrap_or(payload);
        ErrorName::from_name(name)
            .map(Reply::Failure)
            .ok_or(ReplyError::UnknownErrorName { len: payload.len() })
    }
}

/// A watch that fired.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WatchEvent<'a> {
    /// What changed.
    pub path: WatchPath<'a>,
    /// The token that the watch was set with.
    pub token: &'a [u8],
}

impl<'a> WatchEvent<'a> {
    /// The event in the payload of a [`MessageType::WatchEvent`] message.
    ///
    /// # Errors
    /// The first rule of [`ReplyError`] that it breaks.
    pub fn parse(payload: &'a [u8]) -> Result<WatchEvent<'a>, ReplyError> {
        let mut texts = strings(payload).ok_or(ReplyError::Unterminated)?;
        let (Some(path), Some(token), None) = (texts.next(), texts.next(), texts.next()) else {
            let found = strings(payload).map_or(0, Iterator::count);
            return Err(ReplyError::EventStrings { found });
        };
        Ok(WatchEvent { path: WatchPath::parse(path)?, token })
    }
}

/// The texts of a reply that lists some (`DIRECTORY`).
///
/// # Errors
/// [`ReplyError::Unterminated`].
pub fn parse_strings(payload: &[u8]) -> Result<impl Iterator<Item = &[u8]>, ReplyError> {
    strings(payload).ok_or(ReplyError::Unterminated)
}

/// The id in the reply to `TRANSACTION_START`.
///
/// # Errors
/// [`ReplyError::Unterminated`], [`ReplyError::Number`].
pub fn parse_transaction_id(payload: &[u8]) -> Result<u32, ReplyError> {
    let text = payload.strip_suffix(b"\0").ok_or(ReplyError::Unterminated)?;
    Ok(decimal::parse_u32(text)?)
}

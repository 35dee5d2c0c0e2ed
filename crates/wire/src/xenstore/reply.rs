//! Replies and watch events: messages that the server sends.

use super::error_name::ErrorName;
use super::header::{Header, MessageType, PAYLOAD_MAX};
use super::path::{PathError, WatchPath};
use super::request::{check_terminable, strings};
use crate::decimal::{self, NumberError};
use thiserror::Error;

/// Reasons for which a message cannot be sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum EmitError {
    /// Payload longer than one message holds. A server answers [`ErrorName::TooBig`] instead.
    #[error("a payload of {len} bytes does not fit, the limit is {limit}")]
    PayloadTooLong {
        /// Bytes that the payload needs.
        len: usize,
        /// Maximum, equal to [`PAYLOAD_MAX`].
        limit: u32,
    },
    /// NUL inside a NUL-terminated text.
    #[error("NUL at position {position} of a text that a NUL ends")]
    NulInText {
        /// Index of the NUL, counted from 0.
        position: usize,
    },
}

/// Appends one message whose payload is `parts` in a row. Leaves `out` unchanged on error.
pub(super) fn emit_message(
    kind: MessageType,
    req_id: u32,
    tx_id: u32,
    parts: &[&[u8]],
    out: &mut Vec<u8>,
) -> Result<(), EmitError> {
    // The parts are slices in memory, so their sum cannot overflow; saturate anyway.
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
/// Returns [`EmitError::PayloadTooLong`] and leaves `out` unchanged.
pub fn emit_reply(request: &Header, payload: &[u8], out: &mut Vec<u8>) -> Result<(), EmitError> {
    emit_message(request.kind, request.req_id, request.tx_id, &[payload], out)
}

/// Appends the reply of a successful request that returns no data.
pub fn emit_ok(request: &Header, out: &mut Vec<u8>) {
    emit_reply(request, b"OK\0", out).expect("three bytes fit into a message");
}

/// Appends the reply of a failed request.
pub fn emit_error(request: &Header, error: ErrorName, out: &mut Vec<u8>) {
    let name = error.as_str().as_bytes();
    emit_message(MessageType::Error, request.req_id, request.tx_id, &[name, b"\0"], out)
        .expect("an error name fits into a message");
}

/// Appends the event of a watch. `path` is the changed node, in the form of the watch (relative or
/// absolute), or a special name; `token` is the watch's token.
///
/// # Errors
/// Returns [`EmitError`] and leaves `out` unchanged.
pub fn emit_event(path: &str, token: &[u8], out: &mut Vec<u8>) -> Result<(), EmitError> {
    let path = check_terminable(path.as_bytes())?;
    let token = check_terminable(token)?;
    emit_message(MessageType::WatchEvent, 0, 0, &[path, b"\0", token, b"\0"], out)
}

/// Reasons for which a message of the server is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum ReplyError {
    /// Reply of another type than the request.
    #[error("the reply is {found:?}, the request was {expected:?}")]
    WrongType { expected: MessageType, found: MessageType },
    /// `ERROR` reply with an unknown error name.
    #[error("the server failed with an unknown error name of {len} bytes")]
    UnknownErrorName {
        /// Bytes of the payload.
        len: usize,
    },
    /// Text without its terminating NUL.
    #[error("a text from the server is not terminated")]
    Unterminated,
    /// Watch event with other than two strings.
    #[error("{found} strings in a watch event, two expected")]
    EventStrings { found: usize },
    /// Invalid path in a watch event.
    #[error(transparent)]
    Path(#[from] PathError),
    /// Malformed number in the reply.
    #[error(transparent)]
    Number(#[from] NumberError),
}

/// Parsed payload of the server's message to a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reply<'a> {
    /// Payload of a successful request: `OK` and a NUL if there is no data.
    Success(&'a [u8]),
    /// Error of a failed request.
    Failure(ErrorName),
}

impl<'a> Reply<'a> {
    /// Parses the reply to a request of type `expected`. The caller has matched `req_id`.
    ///
    /// # Errors
    /// Returns [`ReplyError::WrongType`] or [`ReplyError::UnknownErrorName`].
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

/// Event of a watch that fired.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WatchEvent<'a> {
    /// Changed node or special name.
    pub path: WatchPath<'a>,
    /// Token that the client gave the watch.
    pub token: &'a [u8],
}

impl<'a> WatchEvent<'a> {
    /// Parses the payload of a [`MessageType::WatchEvent`] message.
    ///
    /// # Errors
    /// Returns the first rule of [`ReplyError`] that the payload breaks.
    pub fn parse(payload: &'a [u8]) -> Result<WatchEvent<'a>, ReplyError> {
        let mut texts = strings(payload).ok_or(ReplyError::Unterminated)?;
        let (Some(path), Some(token), None) = (texts.next(), texts.next(), texts.next()) else {
            let found = strings(payload).map_or(0, Iterator::count);
            return Err(ReplyError::EventStrings { found });
        };
        Ok(WatchEvent { path: WatchPath::parse(path)?, token })
    }
}

/// Returns the strings of a reply that is a list (`DIRECTORY`).
///
/// # Errors
/// Returns [`ReplyError::Unterminated`] if the last string has no NUL.
pub fn parse_strings(payload: &[u8]) -> Result<impl Iterator<Item = &[u8]>, ReplyError> {
    strings(payload).ok_or(ReplyError::Unterminated)
}

/// Parses the transaction id in the reply to `TRANSACTION_START`.
///
/// # Errors
/// Returns [`ReplyError::Unterminated`] or [`ReplyError::Number`].
pub fn parse_transaction_id(payload: &[u8]) -> Result<u32, ReplyError> {
    let text = payload.strip_suffix(b"\0").ok_or(ReplyError::Unterminated)?;
    Ok(decimal::parse_u32(text)?)
}

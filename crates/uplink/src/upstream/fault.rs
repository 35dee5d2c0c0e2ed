//! Reasons for which a proxy carries no connection.

use core::net::SocketAddr;

use rustix::io::Errno;

/// Reasons for which a proxy carries no connection. Texts contain no byte of the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProxyFault {
    #[error("the upstream proxy {0} cannot be reached: {1}")]
    Unreachable(SocketAddr, Errno),
    #[error("the upstream proxy has closed the connection before its answer")]
    Closed,
    #[error("the upstream proxy has not answered in time")]
    Late,
    #[error("the upstream proxy's answer is not HTTP/1: is it another kind of proxy?")]
    NotHttp,
    #[error("the upstream proxy's answer is too long")]
    TooLong,
    #[error("{}", of_status(*.0))]
    Status(u16),
    #[error("the upstream proxy's answer is not SOCKS version 5: is it another kind of proxy?")]
    NotSocks,
    #[error(
        "the upstream proxy asks for credentials, or for another form of them: see --upstream-proxy-credentials"
    )]
    NoMethod,
    #[error("the upstream proxy refuses the credentials of --upstream-proxy-credentials")]
    Credentials,
    #[error("{}", of_reply(*.0))]
    Reply(u8),
}

/// Describes an HTTP status that is no success.
fn of_status(status: u16) -> String {
    let why = match status {
        401 | 407 => "asks for credentials, or refuses them: see --upstream-proxy-credentials",
        403 => "forbids this destination",
        404 | 502 | 503 => "cannot reach the destination",
        504 => "waited in vain for the destination",
        400 | 405 | 501 => "does not carry such connections",
        429 => "has too many requests",
        _ => "refuses the connection",
    };
    format!("the upstream proxy {why} (HTTP status {status})")
}

/// Describes a reply of SOCKS that is no success (RFC 1928, 6).
fn of_reply(reply: u8) -> String {
    let why = match reply {
        2 => "forbids this destination",
        3 => "has no route to the destination",
        4 => "cannot reach the destination",
        5 => "was refused by the destination",
        6 => "waited in vain for the destination",
        7 | 8 => "does not carry such connections",
        _ => "refuses the connection",
    };
    format!("the upstream proxy {why} (SOCKS reply {reply})")
}

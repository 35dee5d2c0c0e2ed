//! Address, protocol and credentials of a proxy.

use core::fmt;
use core::net::IpAddr;

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ProxyKind {
    /// HTTP/1.1 without TLS, by the method CONNECT.
    Http,
    /// SOCKS version 5, with names.
    Socks5,
}

/// User and password for a proxy. Its `Debug` form shows neither.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    pub(super) user: String,
    pub(super) password: String,
}

/// Reasons for which credentials cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CredentialsError {
    #[error("one line is expected, `USER:PASSWORD`")]
    Form,
    #[error("user and password have 1 to {MAX} bytes each", MAX = Credentials::LENGTH_MAX)]
    Length,
}

impl Credentials {
    /// Maximum length of user and password in bytes (RFC 1929).
    pub const LENGTH_MAX: usize = 255;

    /// Reads `USER:PASSWORD`, with at most one end of line. The password may contain colons.
    ///
    /// # Errors
    ///
    /// Returns the rule that the text breaks.
    pub fn parse(text: &str) -> Result<Credentials, CredentialsError> {
        let line = text.strip_suffix('\n').unwrap_or(text);
        let line = line.strip_suffix('\r').unwrap_or(line);
        let (user, password) = line.split_once(':').ok_or(CredentialsError::Form)?;
        if line.contains(char::is_control) {
            return Err(CredentialsError::Form);
        }
        let is_sized = |part: &str| (1..=Credentials::LENGTH_MAX).contains(&part.len());
        if !is_sized(user) || !is_sized(password) {
            return Err(CredentialsError::Length);
        }
        Ok(Credentials { user: user.to_owned(), password: password.to_owned() })
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

/// Address of a proxy, and how it is spoken to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProxySettings {
    pub kind: ProxyKind,
    /// Name or address of the proxy, as the user wrote it.
    pub host: String,
    pub port: u16,
    /// Addresses of the proxy's host. Each connection tries them in this order.
    pub addresses: Vec<IpAddr>,
    pub credentials: Option<Credentials>,
}

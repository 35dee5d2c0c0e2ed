//! Dialogue of one connection with a proxy.

use super::fault::ProxyFault;
use super::settings::{ProxyKind, ProxySettings};
use super::step::Step;
use super::target::Target;
use super::{http, socks};

/// Client's side of the dialogue with a proxy, until it has opened a connection.
#[derive(Debug)]
pub enum Dialogue {
    Http(http::Reply),
    Socks(socks::Client),
}

impl Dialogue {
    /// Starts a dialogue. Returns it with its first bytes.
    pub fn start(settings: &ProxySettings, target: &Target) -> (Dialogue, Vec<u8>) {
        let credentials = settings.credentials.as_ref();
        match settings.kind {
            ProxyKind::Http => {
                (Dialogue::Http(http::Reply::default()), http::request(target, credentials))
            }
            ProxyKind::Socks5 => {
                let (client, hello) = socks::Client::start(target, credentials);
                (Dialogue::Socks(client), hello)
            }
        }
    }

    /// Reads bytes of the proxy. At least one is consumed, if there is one.
    ///
    /// # Errors
    ///
    /// Returns the reason for which there is no connection.
    pub fn read(&mut self, bytes: &[u8]) -> Result<Step, ProxyFault> {
        match self {
            Dialogue::Http(reply) => reply.read(bytes),
            Dialogue::Socks(client) => client.read(bytes),
        }
    }
}

//! Query of the guest to a name server that goes out over TCP ([`name_queries`](crate::name_queries)).

use core::net::SocketAddr;

use ringfence_policy::gate::QueryEnds;
use ringfence_sys::numbers::bounded;

use crate::flow::FlowId;
use crate::packet::Mac;

/// Client of a query.
#[derive(Clone, Copy, Debug)]
pub(crate) enum QueryClient {
    /// Sender of a datagram, with this hardware address.
    Datagram(Mac),
    /// TCP connection of the guest.
    Stream(FlowId),
}

/// Query that is to be sent over TCP.
#[derive(Debug)]
pub struct NameQuery {
    pub(crate) ends: QueryEnds,
    /// The host's address of the server.
    pub(crate) server: SocketAddr,
    pub(crate) query: Vec<u8>,
    pub(crate) client: QueryClient,
}

/// Returns a message with its length before it (RFC 1035, 4.2.2).
pub(crate) fn framed(message: &[u8]) -> Vec<u8> {
    [&bounded(message.len(), u16::MAX).to_be_bytes()[..], message].concat()
}

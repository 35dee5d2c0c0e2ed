//! Step of a dialogue with a proxy.

/// Result of reading bytes of a proxy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Number of bytes that belong to the dialogue.
    pub consumed: usize,
    /// Bytes for the proxy.
    pub send: Vec<u8>,
    /// The proxy has opened the connection: all other bytes are the server's.
    pub is_done: bool,
}

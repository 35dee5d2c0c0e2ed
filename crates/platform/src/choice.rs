//! Choice of the platform on a command line.

use std::path::PathBuf;

/// Hypervisor that a process uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlatformChoice {
    Xen,
    /// Hub that listens at this socket.
    Local(PathBuf),
}

impl PlatformChoice {
    /// Parses `xen` or `local:SOCKET`.
    ///
    /// # Errors
    ///
    /// Returns a text for the user if `text` is neither.
    pub fn parse(text: &str) -> Result<PlatformChoice, String> {
        match (text, text.strip_prefix("local:")) {
            ("xen", _) => Ok(PlatformChoice::Xen),
            (_, Some(socket)) if !socket.is_empty() => Ok(PlatformChoice::Local(socket.into())),
            _ => Err("a platform is `xen`, or `local:` and the path of a hub's socket".to_owned()),
        }
    }
}

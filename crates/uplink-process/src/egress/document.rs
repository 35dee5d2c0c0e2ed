//! Policy on its way between processes: a sealed memfd with the policy as JSON.
//!
//! `ringfence policy set` hands it to a launcher, and the launcher hands one of its own to the uplink's process. A
//! policy is larger than a message, and a file arrives whole or not at all.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use ringfence_policy::PolicySource;
use ringfence_policy::file::FILE_MAX;
use rustix::fs::{MemfdFlags, SealFlags, SeekFrom};

/// Maximum length in bytes: a policy file whose every rule is one character and gets a name of its file.
const DOCUMENT_MAX: usize = 16 * FILE_MAX;
/// Seals without which the content could change while it is read.
const SEALS: SealFlags = SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW);

/// Reasons for which a document cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// Descriptor of another kind.
    #[error("the policy did not come in a sealed memfd")]
    Unsealed,
    /// Document that is too long.
    #[error("the policy is too long")]
    TooLong,
    #[error("the policy cannot be read: {0}")]
    System(#[from] io::Error),
    /// Bytes that are no policy.
    #[error("the policy is of another version of Ringfence: {0}")]
    Form(#[from] serde_json::Error),
}

impl From<rustix::io::Errno> for DocumentError {
    fn from(errno: rustix::io::Errno) -> Self {
        DocumentError::System(errno.into())
    }
}

/// Writes a policy to a sealed file, whose position is its start.
///
/// # Errors
///
/// Returns the error of the system, or [`DocumentError::TooLong`].
pub fn write(policy: &PolicySource) -> Result<OwnedFd, DocumentError> {
    let bytes = serde_json::to_vec(policy)?;
    if bytes.len() > DOCUMENT_MAX {
        return Err(DocumentError::TooLong);
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("policy", flags)?;
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let written = rustix::io::write(&file, rest)?;
        rest = &rest[written..];
    }
    rustix::fs::seek(&file, SeekFrom::Start(0))?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

/// Reads a policy of a process that is not trusted. Blocks for no file server.
///
/// # Errors
///
/// Returns [`DocumentError`]. The rules are not parsed.
pub fn check_and_read(file: impl AsFd) -> Result<PolicySource, DocumentError> {
    let seals = rustix::fs::fcntl_get_seals(&file).map_err(|_| DocumentError::Unsealed)?;
    if !seals.contains(SEALS) {
        return Err(DocumentError::Unsealed);
    }
    read(file)
}

/// Reads a policy from the position of the file. Needs no system call but `read`.
///
/// # Errors
///
/// Returns [`DocumentError`]. The rules are not parsed.
// #syscall uplink read: another policy
pub fn read(file: impl AsFd) -> Result<PolicySource, DocumentError> {
    let (mut bytes, mut block) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        let count = match rustix::io::read(&file, &mut block) {
            Ok(0) => return Ok(serde_json::from_slice(&bytes)?),
            Ok(count) => count,
            Err(rustix::io::Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
        };
        if bytes.len() + count > DOCUMENT_MAX {
            return Err(DocumentError::TooLong);
        }
        bytes.extend_from_slice(&block[..count]);
    }
}

#[cfg(test)]
mod tests {
    use ringfence_policy::{Action, RuleSource};

    use super::*;

    fn policy(rules: usize) -> PolicySource {
        let rule = |number| RuleSource {
            action: Action::Allow,
            text: format!("host{number}.example.org:443"),
            origin: "p.toml:1".to_owned(),
        };
        PolicySource { rules: (0..rules).map(rule).collect(), ..PolicySource::default() }
    }

    #[test]
    fn policy_of_any_length_arrives_unchanged() {
        for rules in [0, 1, 30_000] {
            let file = write(&policy(rules)).unwrap();
            assert_eq!(check_and_read(&file).unwrap(), policy(rules));
        }
    }

    #[test]
    fn file_that_could_change_or_block_is_refused() {
        let open = rustix::fs::memfd_create("t", MemfdFlags::ALLOW_SEALING).unwrap();
        assert!(matches!(check_and_read(&open), Err(DocumentError::Unsealed)));
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(matches!(check_and_read(&socket), Err(DocumentError::Unsealed)));
    }

    #[test]
    fn other_bytes_are_refused() {
        let file = rustix::fs::memfd_create("t", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::io::write(&file, b"{\"rules\":[[").unwrap();
        rustix::fs::seek(&file, SeekFrom::Start(0)).unwrap();
        rustix::fs::fcntl_add_seals(&file, SEALS).unwrap();
        assert!(matches!(check_and_read(&file), Err(DocumentError::Form(_))));
    }
}
